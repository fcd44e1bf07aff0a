/* A matrix of 8-bit numbers times a few vectors: what a draft head reads is computed with it.
 *
 * The rows are ggml's type Q8_0: blocks of 32 columns, each a half-precision scale and 32 signed bytes.
 * product.c is compiled once for each instruction set, as rows.c is; es_product_best() picks the fastest. */
#ifndef EDGESPEC_PRODUCT_H
#define EDGESPEC_PRODUCT_H

#include <stddef.h>
#include <stdint.h>

enum { ES_Q8_COLUMNS = 32, ES_Q8_BYTES = 34 };

typedef struct es_product {
    const char *name;
    /* Writes out[v * n_rows + r] = the sum over c of matrix[r][c] * vectors[v * n_columns + c].
     * n_columns is a multiple of ES_Q8_COLUMNS; a row has n_columns / ES_Q8_COLUMNS * ES_Q8_BYTES bytes. */
    void (*multiply)(const uint8_t *matrix, size_t n_rows, size_t n_columns, const float *vectors,
                     size_t n_vectors, float *out);
} es_product;

extern const es_product es_product_baseline;
#ifdef ES_HAVE_X86_LEVELS
extern const es_product es_product_x86_64_v3;
extern const es_product es_product_x86_64_v4;
#endif

const es_product *es_product_best(void);

#endif
