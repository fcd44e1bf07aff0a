/* Compiled once for each instruction set, under the name given by ES_ROWS_NAME. */
#include "rows.h"

#include <stdint.h>
#include <string.h>

#ifndef ES_ROWS_NAME
#define ES_ROWS_NAME es_rows_baseline
#endif
#define STRING_(x) #x
#define STRING(x) STRING_(x)

/* A vector is one register: compilers take wider ones apart entry by entry.  Every pass works on
 * GROUP entries at a time, in one register or several, so that sums are added in the same order
 * everywhere and no register waits for itself. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { GROUP = 16, PARTS = GROUP / LANES };

typedef float vfloat __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t vint __attribute__((vector_size(LANES * sizeof(int32_t))));

/* Rows live in llama.cpp's buffer at any alignment; memcpy is the portable unaligned access. */
#define LOAD(v, p) memcpy(&(v), (p), sizeof(v))
#define STORE(p, v) memcpy((p), &(v), sizeof(v))
#define SELECT(mask, a, b) ((vfloat)(((mask) & (vint)(a)) | (~(mask) & (vint)(b))))
#define MAX(a, b) SELECT((a) > (b), a, b)
#define SPLAT(x) ((vfloat){0} + (x))

/* exp(x) for x <= 0, relative error below 2e-7; 0 where the result would be subnormal.
 * Cody-Waite reduction to |r| <= ln(2)/2, then Cephes' expf polynomial. */
#define EXP(result, x)                                                                                       \
    do {                                                                                                     \
        const vfloat x_ = MAX(x, SPLAT(-87.0f));                                                             \
        const vfloat shifted_ = x_ * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */       \
        const vfloat n_ = shifted_ - 12582912.0f;                                                            \
        const vfloat r_ = (x_ - n_ * 0.693359375f) + n_ * 2.12194440e-4f;                                    \
        vfloat p_ = r_ * 1.9875691500e-4f + 1.3981999507e-3f;                                                \
        p_ = p_ * r_ + 8.3334519073e-3f;                                                                     \
        p_ = p_ * r_ + 4.1665795894e-2f;                                                                     \
        p_ = p_ * r_ + 1.6666665459e-1f;                                                                     \
        p_ = p_ * r_ + 5.0000001201e-1f;                                                                     \
        p_ = p_ * r_ * r_ + r_ + 1.0f;                                                                       \
        const vint exponent_ = ((vint)shifted_ - 0x4B400000 + 127) << 23;                                    \
        result = SELECT((x) < SPLAT(-87.0f), SPLAT(0.0f), p_ * (vfloat)exponent_);                           \
    } while (0)

static inline float group_max(const vfloat parts[PARTS]) {
    vfloat most = parts[0];
    for (int k = 1; k < PARTS; k++) most = MAX(parts[k], most);
    float best = most[0];
    for (int i = 1; i < LANES; i++) best = most[i] > best ? most[i] : best;
    return best;
}

static inline double group_sum(const vfloat parts[PARTS]) {
    double sum[GROUP];
    for (int i = 0; i < GROUP; i++) sum[i] = (double)parts[i / LANES][i % LANES];
    for (int half = GROUP / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* The last, short block is copied out and padded, so that every pass has one loop only. */
static inline const float *block_of(const float *row, size_t n, size_t begin, float padding, float *copy) {
    if (n - begin >= ES_BLOCK_LEN) return row + begin;
    for (size_t i = 0; i < ES_BLOCK_LEN; i++) copy[i] = begin + i < n ? row[begin + i] : padding;
    return copy;
}

/* Where a pass writes a block: in place, or to `copy` when fewer than ES_BLOCK_LEN entries are left. */
static inline float *block_for(float *out, size_t n, size_t begin, float *copy) {
    return n - begin >= ES_BLOCK_LEN ? out + begin : copy;
}

static inline void write_short_block(float *out, size_t n, size_t begin, const float *copy) {
    if (n - begin < ES_BLOCK_LEN) memcpy(out + begin, copy, (n - begin) * sizeof *out);
}

static bool block_max(const float *row, size_t n, float *maxima) {
    float copy[ES_BLOCK_LEN];
    vint nan = {0};
    for (size_t begin = 0; begin < n; begin += ES_BLOCK_LEN) {
        const float *block = block_of(row, n, begin, row[begin], copy);
        vfloat best[PARTS];
        for (int k = 0; k < PARTS; k++) best[k] = SPLAT(row[begin]);
        for (size_t i = 0; i < ES_BLOCK_LEN; i += GROUP)
            for (int k = 0; k < PARTS; k++) {
                vfloat x;
                LOAD(x, block + i + k * LANES);
                nan |= x != x;
                best[k] = MAX(x, best[k]);
            }
        maxima[begin / ES_BLOCK_LEN] = group_max(best);
    }
    for (int i = 0; i < LANES; i++)
        if (nan[i]) return false;
    return true;
}

static double exp_sum(const float *row, size_t n, float max) {
    float copy[ES_BLOCK_LEN];
    double total = 0;
    for (size_t begin = 0; begin < n; begin += ES_BLOCK_LEN) {
        const float *block = block_of(row, n, begin, -__builtin_inff(), copy);
        vfloat sum[PARTS] = {0};
        for (size_t i = 0; i < ES_BLOCK_LEN; i += GROUP)
            for (int k = 0; k < PARTS; k++) {
                vfloat x, e;
                LOAD(x, block + i + k * LANES);
                x -= max;
                EXP(e, x);
                sum[k] += e;
            }
        total += group_sum(sum);
    }
    return total;
}

static double exp_write(const float *row, size_t n, float max, float scale, float *out, double *block_sum) {
    float copy[ES_BLOCK_LEN], out_copy[ES_BLOCK_LEN];
    double total = 0;
    for (size_t begin = 0; begin < n; begin += ES_BLOCK_LEN) {
        const float *block = block_of(row, n, begin, -__builtin_inff(), copy);
        float *to = block_for(out, n, begin, out_copy);
        vfloat sum[PARTS] = {0};
        for (size_t i = 0; i < ES_BLOCK_LEN; i += GROUP)
            for (int k = 0; k < PARTS; k++) {
                vfloat x, e;
                LOAD(x, block + i + k * LANES);
                x = (x - max) * scale;
                EXP(e, x);
                STORE(to + i + k * LANES, e);
                sum[k] += e;
            }
        write_short_block(out, n, begin, out_copy);
        total += block_sum[begin / ES_BLOCK_LEN] = group_sum(sum);
    }
    return total;
}

static void scale_all(float *values, size_t n, double *block_sum, float factor) {
    for (size_t i = 0; i < n; i++) values[i] *= factor;
    for (size_t b = 0; b < es_n_blocks(n); b++) block_sum[b] *= (double)factor;
}

static double residual(const float *p, const float *q, size_t n, float weight, float *out, double *block_sum) {
    float p_copy[ES_BLOCK_LEN], q_copy[ES_BLOCK_LEN], out_copy[ES_BLOCK_LEN];
    double total = 0;
    for (size_t begin = 0; begin < n; begin += ES_BLOCK_LEN) {
        const float *p_block = block_of(p, n, begin, 0.0f, p_copy);
        const float *q_block = block_of(q, n, begin, 0.0f, q_copy);
        float *to = block_for(out, n, begin, out_copy);
        vfloat sum[PARTS] = {0};
        for (size_t i = 0; i < ES_BLOCK_LEN; i += GROUP)
            for (int k = 0; k < PARTS; k++) {
                vfloat a, b;
                LOAD(a, p_block + i + k * LANES);
                LOAD(b, q_block + i + k * LANES);
                a = a * weight - b;
                a = MAX(a, SPLAT(0.0f));
                STORE(to + i + k * LANES, a);
                sum[k] += a;
            }
        write_short_block(out, n, begin, out_copy);
        total += block_sum[begin / ES_BLOCK_LEN] = group_sum(sum);
    }
    return total;
}

const es_rows ES_ROWS_NAME = {
    .name = STRING(ES_ROWS_NAME),
    .block_max = block_max,
    .exp_sum = exp_sum,
    .exp_write = exp_write,
    .scale = scale_all,
    .residual = residual,
};
