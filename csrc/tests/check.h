/* What the C tests share: a check that stops the test, repeatable random numbers, exact buffers. */
#ifndef EDGESPEC_CHECK_H
#define EDGESPEC_CHECK_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* SplitMix64: the state is the generator. */
static inline uint64_t random_bits(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline double random_unit(uint64_t *state) { return (double)(random_bits(state) >> 11) * 0x1.0p-53; }

static inline size_t random_below(uint64_t *state, size_t n) { return (size_t)(random_bits(state) % n); }

static inline double random_normal(uint64_t *state) {
    const double radius = sqrt(-2.0 * log(1.0 - random_unit(state)));
    return radius * cos(6.283185307179586 * random_unit(state));
}

/* From how many samples a statistic is drawn. Under a sanitizer a tenth goes through the same code. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SAMPLES(n) ((n) / 10)
#else
#define SAMPLES(n) (n)
#endif

/* `size` bytes and not one more, so that AddressSanitizer sees any read beyond them. */
static inline void *exact(size_t size) {
    void *memory = malloc(size ? size : 1);
    CHECK(memory);
    return memory;
}

/* Logits of the kinds that break filters: smooth, flat, steep, tied, forbidden, huge. */
enum { N_ROW_KINDS = 6 };

static inline void fill_row(uint64_t *state, size_t kind, float *row, size_t n) {
    static const double spread[N_ROW_KINDS] = {2.5, 0.01, 30.0, 1.0, 2.5, 1e4};
    for (size_t i = 0; i < n; i++) {
        row[i] = (float)(spread[kind] * random_normal(state));
        if (kind == 3) row[i] = (float)random_below(state, 5) - 2.0f;
        if (kind == 4 && random_bits(state) % 2) row[i] = -INFINITY;
    }
    if (kind == 4) row[random_below(state, n)] = 1.0f;
}

#endif
