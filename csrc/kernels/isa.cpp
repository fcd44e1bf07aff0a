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
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif
#include "matmul.h"
#include "attention.h"
#include "rows.h"
#include "limits.h"
} // namespace

#define TILES(TYPE, LEVEL)                                                                                            \
    {                                                                                                                 \
        matmul<TYPE, 1, LEVEL>, matmul<TYPE, 2, LEVEL>, matmul<TYPE, 3, LEVEL>, matmul<TYPE, 4, LEVEL>,               \
            matmul<TYPE, 5, LEVEL>, matmul<TYPE, 6, LEVEL>, matmul<TYPE, 7, LEVEL>, matmul<TYPE, 8, LEVEL>            \
    }
#define TYPES(LEVEL)                                                                                                  \
    {                                                                                                                 \
        TILES(Q4_0, LEVEL), TILES(Q4_1, LEVEL), TILES(Q5_0, LEVEL), TILES(Q5_1, LEVEL), TILES(Q8_0, LEVEL),           \
            TILES(IQ4_NL, LEVEL), TILES(Q3_K, LEVEL), TILES(Q4_K, LEVEL), TILES(Q5_K, LEVEL), TILES(Q6_K, LEVEL)      \
    }

extern const Isa ES_ISA;
const Isa ES_ISA = {
    ES_ISA_TEXT,
    {LANES, SIGNED_BYTES},
    quantize,
    {TYPES(1), TYPES(2)},
    attend,
    merge,
    rms_norm,
    add,
    mul,
    scale,
    silu_mul,
    gelu_mul,
    to_half,
    rope,
    read_bytes,
    peak,
};

} // namespace edgespec
