// The products of one instruction set that prefetch weights into cache level ES_LEVEL: a file is compiled for each level, as
// they take most of the time that the kernels take to compile.
#pragma once

#include "simd.h"

namespace edgespec {
namespace {

#include "loading.h"
#include "matmul.h"
#include "floats.h"

} // namespace

#define TILES(FUNCTION, TYPE, LEVEL)                                                                                  \
    {                                                                                                                 \
        FUNCTION<TYPE, 1, LEVEL>, FUNCTION<TYPE, 2, LEVEL>, FUNCTION<TYPE, 3, LEVEL>, FUNCTION<TYPE, 4, LEVEL>,       \
            FUNCTION<TYPE, 5, LEVEL>, FUNCTION<TYPE, 6, LEVEL>, FUNCTION<TYPE, 7, LEVEL>, FUNCTION<TYPE, 8, LEVEL>    \
    }
#define TYPES(LEVEL, BF16_FUNCTION)                                                                                   \
    {                                                                                                                 \
        TILES(matmul, Q4_0, LEVEL), TILES(matmul, Q4_1, LEVEL), TILES(matmul, Q5_0, LEVEL),                           \
            TILES(matmul, Q5_1, LEVEL), TILES(matmul, Q8_0, LEVEL), TILES(matmul, IQ4_NL, LEVEL),                     \
            TILES(matmul, MXFP4, LEVEL), TILES(matmul, NVFP4, LEVEL), TILES(matmul, Q2_K, LEVEL),                     \
            TILES(matmul, Q3_K, LEVEL), TILES(matmul, Q4_K, LEVEL), TILES(matmul, Q5_K, LEVEL),                       \
            TILES(matmul, Q6_K, LEVEL), TILES(matmul, IQ4_XS, LEVEL), TILES(matmul, TQ1_0, LEVEL),                    \
            TILES(matmul, TQ2_0, LEVEL), TILES(matmul, IQ1_S, LEVEL), TILES(matmul, IQ1_M, LEVEL),                    \
            TILES(matmul, IQ2_XXS, LEVEL), TILES(matmul, IQ2_XS, LEVEL), TILES(matmul, IQ2_S, LEVEL),                 \
            TILES(matmul, IQ3_XXS, LEVEL), TILES(matmul, IQ3_S, LEVEL), TILES(matmul_floats, F16, LEVEL),             \
            TILES(BF16_FUNCTION, BF16, LEVEL)                                                                         \
    }

extern const MatmulTable ES_MATMUL(ES_ISA, ES_LEVEL);
const MatmulTable ES_MATMUL(ES_ISA, ES_LEVEL) = {TYPES(ES_LEVEL, matmul_floats)};
#ifdef ES_ISA_BF16 // the same but for BF16 weights
extern const MatmulTable ES_MATMUL(ES_ISA_BF16, ES_LEVEL);
const MatmulTable ES_MATMUL(ES_ISA_BF16, ES_LEVEL) = {TYPES(ES_LEVEL, matmul_pairs)};
#endif

} // namespace edgespec
