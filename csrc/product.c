/* Compiled once for each instruction set, under the name given by ES_PRODUCT_NAME. */
#include "product.h"

#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#ifndef ES_PRODUCT_NAME
#define ES_PRODUCT_NAME es_product_baseline
#endif
#define STRING_(x) #x
#define STRING(x) STRING_(x)

/* IEEE half to single precision. */
static inline float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
#ifdef __F16C__
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 0) { /* 0, or a number too small for the usual form */
        const float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t wide = sign | (exponent == 31u ? 255u : exponent + 112u) << 23 | fraction << 13;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
#endif
}

enum { TOGETHER = 4 }; /* vectors that a row is read once for: as many sums as fit into registers */

/* Writes the products of a row with n vectors, at most TOGETHER, n_rows apart. n is a constant where this is
 * inlined. There is a sum for each column of a block, which the compiler keeps in vectors; they are added up
 * at the end, always in the same order: a product does not depend on what is computed beside it. */
static inline __attribute__((always_inline)) void dots(const uint8_t *row, size_t n_blocks, const float *x,
                                                       size_t n, float *out, size_t n_rows) {
    float sums[TOGETHER][ES_Q8_COLUMNS] = {{0}};
    for (size_t b = 0; b < n_blocks; b++, row += ES_Q8_BYTES) {
        const float scale = half(row);
        const int8_t *q = (const int8_t *)row + 2;
        for (size_t v = 0; v < n; v++) {
            const float *own = x + (v * n_blocks + b) * ES_Q8_COLUMNS;
            for (int i = 0; i < ES_Q8_COLUMNS; i++) sums[v][i] += (float)q[i] * scale * own[i];
        }
    }
    for (size_t v = 0; v < n; v++) {
        for (int m = ES_Q8_COLUMNS / 2; m > 0; m /= 2)
            for (int i = 0; i < m; i++) sums[v][i] += sums[v][i + m];
        out[v * n_rows] = sums[v][0];
    }
}

static void multiply(const uint8_t *matrix, size_t n_rows, size_t n_columns, const float *vectors,
                     size_t n_vectors, float *out) {
    const size_t n_blocks = n_columns / ES_Q8_COLUMNS;
    for (size_t r = 0; r < n_rows; r++, matrix += n_blocks * ES_Q8_BYTES)
        for (size_t v = 0; v < n_vectors; v += TOGETHER) {
            const float *x = vectors + v * n_columns;
            float *to = out + v * n_rows + r;
            switch (n_vectors - v) {
            case 1: dots(matrix, n_blocks, x, 1, to, n_rows); break;
            case 2: dots(matrix, n_blocks, x, 2, to, n_rows); break;
            case 3: dots(matrix, n_blocks, x, 3, to, n_rows); break;
            default: dots(matrix, n_blocks, x, TOGETHER, to, n_rows);
            }
        }
}

const es_product ES_PRODUCT_NAME = {.name = STRING(ES_PRODUCT_NAME), .multiply = multiply};
