/* Compiled once for each instruction set, under the name given by ES_PRODUCT_NAME. */
#include "product.h"

#include <string.h>

#ifndef ES_PRODUCT_NAME
#define ES_PRODUCT_NAME es_product_baseline
#endif
#define STRING_(x) #x
#define STRING(x) STRING_(x)

/* IEEE half to single precision. */
static inline float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 0) { /* 0, or a number too small for the usual form */
        const float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t wide = sign | (exponent == 31u ? 255u : exponent + 112u) << 23 | fraction << 13;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* There is a sum for each column of a block, which the compiler keeps in vectors; they are added up at the
 * end, always in the same order. */
static float dot(const uint8_t *row, size_t n_blocks, const float *x) {
    float sums[ES_Q8_COLUMNS] = {0};
    for (size_t b = 0; b < n_blocks; b++, row += ES_Q8_BYTES, x += ES_Q8_COLUMNS) {
        const float scale = half(row);
        const int8_t *q = (const int8_t *)row + 2;
        for (int i = 0; i < ES_Q8_COLUMNS; i++) sums[i] += (float)q[i] * (x[i] * scale);
    }
    for (int n = ES_Q8_COLUMNS / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) sums[i] += sums[i + n];
    return sums[0];
}

static void multiply(const uint8_t *matrix, size_t n_rows, size_t n_columns, const float *vectors,
                     size_t n_vectors, float *out) {
    const size_t n_blocks = n_columns / ES_Q8_COLUMNS;
    for (size_t r = 0; r < n_rows; r++, matrix += n_blocks * ES_Q8_BYTES)
        for (size_t v = 0; v < n_vectors; v++) out[v * n_rows + r] = dot(matrix, n_blocks, vectors + v * n_columns);
}

const es_product ES_PRODUCT_NAME = {.name = STRING(ES_PRODUCT_NAME), .multiply = multiply};
