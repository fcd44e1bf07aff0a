// One instruction set's kernels, compiled once for each: ES_ISA names the table, ES_ISA_TEXT what users read.
//
// Everything is in an anonymous namespace and nothing of the standard library's templates is used: the
// linker would keep one copy of a shared inline function, maybe the one for a CPU this is not.
#include "isa.h"

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace edgespec {
namespace {

inline float float_at(const int8_t *p, int i) {
    float x;
    __builtin_memcpy(&x, p + 4 * i, 4);
    return x;
}
inline int32_t int_at(const int8_t *p, int i) {
    int32_t x;
    __builtin_memcpy(&x, p + 4 * i, 4);
    return x;
}

#if defined(__aarch64__)
#include "simd_neon.h"
#elif defined(__AVX512F__)
#define ES_ISA_BF16 ISA_AVX512_BF16
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif
#include "pairs.h"
#include "loading.h"
#include "matmul.h"
#include "floats.h"
#include "functions.h"
#include "attention.h"
#include "rows.h"
#include "recurrence.h"
#include "limits.h"

template <bool PAIRS>
void quantize(const float *x, int64_t columns, Acts acts, int64_t block0, int64_t block1, int8_t *tile, int nc, int c) {
    if (acts == BYTES_32 || acts == BYTES_256) {
        quantize_bytes(x, columns, acts, block0, block1, tile, nc, c);
        return;
    }
#ifdef ES_ISA_BF16
    if (PAIRS && acts == ROUNDED_FLOATS) {
        put_pairs(x, block0, block1, tile, nc, c);
        return;
    }
#endif
    put_floats(x, acts == ROUNDED_FLOATS, block0, block1, tile, nc, c);
}
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
#define TABLE(TEXT, PAIRS, BF16_FUNCTION)                                                                             \
    {                                                                                                                 \
        TEXT, {LANES, SIGNED_BYTES, PAIRED}, quantize<PAIRS>, {TYPES(1, BF16_FUNCTION), TYPES(SECOND_LEVEL,           \
            BF16_FUNCTION)}, attend, merge, delta_net, state_scan, rms_norm, norm, l2_norm, add, sub, mul, divide,    \
            scale, clamp, square, square_root, negative, exponential, relu, tanh_of, sigmoid, silu, gelu, gelu_erf, reglu,      \
            geglu, swiglu, swiglu_oai, geglu_quick, swiglu_clamp, sum, soft_max, dots, to_half, to_q8, rope,          \
            read_bytes, peak                                                                                          \
    }

// The second level of prefetching differs in a hint alone: checked builds do without, in half the time to compile.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SECOND_LEVEL 1
#else
#define SECOND_LEVEL 2
#endif

extern const Isa ES_ISA;
const Isa ES_ISA = TABLE(ES_ISA_TEXT, false, matmul_floats);
#ifdef ES_ISA_BF16 // the same but for BF16 weights
extern const Isa ES_ISA_BF16;
const Isa ES_ISA_BF16 = TABLE("avx512-bf16", true, matmul_pairs);
#endif

} // namespace edgespec
