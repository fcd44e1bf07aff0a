/* Passes over one row of logits: the only loops that touch all of the vocabulary.
 *
 * rows.c is written with the compiler's portable vectors and compiled once for each instruction
 * set; es_rows_best() picks the fastest set that this CPU has.  A row is cut into blocks of
 * ES_BLOCK_LEN entries, and each pass leaves one figure a block behind, so that what follows looks
 * only into the few blocks that matter. */
#ifndef EDGESPEC_ROWS_H
#define EDGESPEC_ROWS_H

#include <stdbool.h>
#include <stddef.h>

enum { ES_BLOCK_LEN = 128 };

static inline size_t es_n_blocks(size_t n) { return (n + ES_BLOCK_LEN - 1) / ES_BLOCK_LEN; }

typedef struct es_rows {
    const char *name;
    /* Writes the largest entry of every block to block_max[es_n_blocks(n)].
     * Returns false when an entry is not a number. */
    bool (*block_max)(const float *row, size_t n, float *block_max);
    /* Returns the sum of exp(row[i] - max).  No entry may exceed max. */
    double (*exp_sum)(const float *row, size_t n, float max);
    /* Writes out[i] = exp((row[i] - max) * scale) and the sum of every block.  Returns the sum. */
    double (*exp_write)(const float *row, size_t n, float max, float scale, float *out, double *block_sum);
    /* Multiplies values and block sums by `factor`. */
    void (*scale)(float *values, size_t n, double *block_sum, float factor);
    /* Writes out[i] = max(0, weight * p[i] - q[i]) and the sum of every block.  Returns the sum. */
    double (*residual)(const float *p, const float *q, size_t n, float weight, float *out, double *block_sum);
} es_rows;

extern const es_rows es_rows_baseline;
#ifdef ES_HAVE_X86_LEVELS
extern const es_rows es_rows_x86_64_v3;
extern const es_rows es_rows_x86_64_v4;
#endif

const es_rows *es_rows_best(void);

#endif
