// The products of one instruction set that prefetch weights into cache level ES_LEVEL: a file is compiled for each level, as
// they take most of the time that the kernels take to compile.
#pragma once

#include "simd.h"

namespace edgespec {
namespace {

#include "loading.h"
#include "matmul.h"
#include "floats.h"
#include "panel.h"

} // namespace

#define TILES(FUNCTION, TYPE)                                                                                         \
    {                                                                                                                 \
        FUNCTION<TYPE, 1, ES_LEVEL>, FUNCTION<TYPE, 2, ES_LEVEL>, FUNCTION<TYPE, 3, ES_LEVEL>,                        \
            FUNCTION<TYPE, 4, ES_LEVEL>, FUNCTION<TYPE, 5, ES_LEVEL>, FUNCTION<TYPE, 6, ES_LEVEL>,                    \
            FUNCTION<TYPE, 7, ES_LEVEL>, FUNCTION<TYPE, 8, ES_LEVEL>                                                  \
    }
#define TYPES(BF16_FUNCTION)                                                                                          \
    {                                                                                                                 \
        TILES(matmul, Q4_0), TILES(matmul, Q4_1), TILES(matmul, Q5_0),                                                \
            TILES(matmul, Q5_1), TILES(matmul, Q8_0), TILES(matmul, IQ4_NL),                                          \
            TILES(matmul, MXFP4), TILES(matmul, NVFP4), TILES(matmul, Q1_0), TILES(matmul, Q2_0), TILES(matmul, Q2_K),                                          \
            TILES(matmul, Q3_K), TILES(matmul, Q4_K), TILES(matmul, Q5_K),                                            \
            TILES(matmul, Q6_K), TILES(matmul, IQ4_XS), TILES(matmul, TQ1_0),                                         \
            TILES(matmul, TQ2_0), TILES(matmul, IQ1_S), TILES(matmul, IQ1_M),                                         \
            TILES(matmul, IQ2_XXS), TILES(matmul, IQ2_XS), TILES(matmul, IQ2_S),                                      \
            TILES(matmul, IQ3_XXS), TILES(matmul, IQ3_S), TILES(matmul_floats, F16),                                  \
            TILES(BF16_FUNCTION, BF16)                                                                                \
    }

extern const MatmulTable ES_MATMUL(ES_ISA, ES_LEVEL);
const MatmulTable ES_MATMUL(ES_ISA, ES_LEVEL) = {TYPES(matmul_floats), PANELS};
#ifdef ES_ISA_BF16 // the same but for BF16 weights
extern const MatmulTable ES_MATMUL(ES_ISA_BF16, ES_LEVEL);
const MatmulTable ES_MATMUL(ES_ISA_BF16, ES_LEVEL) = {TYPES(matmul_pairs), PANELS};
#endif

} // namespace edgespec
