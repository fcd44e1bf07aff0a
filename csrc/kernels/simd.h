// The vectors of one instruction set, and what all of its kernels share.
//
// Everything is in an anonymous namespace and nothing of the standard library's templates is used: the
// linker would keep one copy of a shared inline function, maybe the one for a CPU this is not.
#pragma once

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

template <int LEVEL> inline void prefetch(const uint8_t *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) {
        __builtin_prefetch(p + i, 0, LEVEL == 1 ? 0 : 2); // no use in any cache after this one; in the second level
    }
}

// Unrolled even where the compiler hesitates: the arrays indexed by c must end up in registers.
#define EACH_TOKEN _Pragma("GCC unroll 8") for (int c = 0; c < NC; c++)

#if defined(__aarch64__)
#include "simd_neon.h"
#elif defined(__AVX512F__)
#define ES_ISA_BF16 ISA_AVX512_BF16
#define ES_ISA_WIDE ISA_AMX_INT8
#include "simd_avx512.h"
#else
#ifndef __AVXVNNI__
#define ES_ISA_WIDE ISA_AVX2_TILES
#define ES_TILES_IN_C
#endif
#include "simd_avx2.h"
#endif
#include "pairs.h"

// Of a wide tile of nc tokens: where int8 of step s begin, those of a token 64 bytes after the last one's, and its numbers.
template <class Byte> inline Byte *wide_bytes(Byte *tile, int nc, int64_t s) { return tile + s / 2 * 96 * nc + s % 2 * 32; }
template <class Byte> inline Byte *wide_numbers(Byte *tile, int nc, int64_t s) {
    return tile + s / 2 * 96 * nc + (64 + s % 2 * 16) * nc;
}

} // namespace

// The table of an instruction set's products that prefetch into a level of cache.
#define ES_JOINED(ISA, LEVEL) ISA##_MATMUL_##LEVEL
#define ES_MATMUL(ISA, LEVEL) ES_JOINED(ISA, LEVEL)
#define ES_WIDE(ISA) ES_MATMUL(ISA, WIDE)

} // namespace edgespec
