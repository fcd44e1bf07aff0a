/* From a row of logits to a distribution over tokens, and from a coin to a token.
 *
 * The filters, their order and their meaning are llama.cpp's: logit bias, penalties, top-k,
 * typical, top-p, min-p, temperature.  Temperature 0 leaves the likeliest token alone.
 * Equal logits are ordered by token id, so every result is a function of its arguments.
 *
 * An es_dist is either dense (one probability for every token id) or sparse (ids beside
 * probabilities, in no particular order, each id once).  Invariants, checked by the tests:
 *   - probabilities are finite and not negative; `total` is their sum and is positive;
 *   - a distribution made by es_filter has a total of 1 up to float rounding.
 * Memory is allocated by es_sampler_new alone; nothing here allocates afterwards. */
#ifndef EDGESPEC_SAMPLER_H
#define EDGESPEC_SAMPLER_H

#include "rows.h"

#include <stdint.h>

typedef enum es_status {
    ES_OK = 0,
    ES_NOT_FINITE, /* a logit is NaN or +infinity */
    ES_NO_TOKEN,   /* every logit is -infinity */
    ES_BAD_LENGTH, /* a length or an index is outside what the sampler was made for */
} es_status;

typedef struct es_params {
    float temperature;       /* <= 0: greedy */
    int32_t top_k;           /* <= 0: off */
    float top_p;             /* >= 1: off */
    float min_p;             /* <= 0: off */
    float typical_p;         /* >= 1: off */
    int32_t penalty_last_n;  /* tokens looked back on; 0: penalties off; < 0: all of them */
    float repeat_penalty;    /* 1: off */
    float frequency_penalty; /* 0: off */
    float presence_penalty;  /* 0: off */
} es_params;

typedef struct es_dist {
    size_t n;          /* entries; when dense, also the number of token ids */
    bool dense;        /* ids and total of a dense distribution: ids is unused */
    int32_t *ids;
    float *probs;
    double *block_sum; /* dense only: the sum of every ES_BLOCK_LEN probabilities */
    double total;
} es_dist;

typedef struct es_candidate {
    double key;
    int32_t id;
} es_candidate;

typedef struct es_sampler {
    const es_rows *rows;
    es_params params;
    size_t n_vocab, n_slots, n_bias;
    const int32_t *bias_ids;
    const float *bias_values;
    es_dist target;           /* p at the position last filtered */
    es_dist residual;         /* max(0, weight * p - q), not normalised; shares ids with `target` */
    es_dist *slots;           /* q at every drafted position */
    /* Scratch, n_vocab entries each unless said otherwise. */
    float *adjusted;          /* logits after bias and penalties; later the residual's probabilities */
    float *scattered;         /* a sparse q by token id; all zero between calls */
    int32_t *counts;          /* occurrences by token id; all zero between calls */
    float *block_max;         /* es_n_blocks(n_vocab) */
    es_candidate *candidates;
    void *memory;             /* the one allocation behind every pointer above */
} es_sampler;

/* Returns NULL when memory runs out.  Bias ids outside the vocabulary must have been refused before.
 * n_vocab >= 1, and n_slots is the longest draft that will be verified. */
es_sampler *es_sampler_new(size_t n_vocab, size_t n_slots, const es_params *params, const int32_t *bias_ids,
                           const float *bias_values, size_t n_bias);
void es_sampler_free(es_sampler *sampler);

/* Filters row[n] (n <= n_vocab), at a position that follows prefix[n_prefix], into `out`, which is
 * `target` or one of `slots`. */
es_status es_filter(es_sampler *sampler, const float *row, size_t n, const int32_t *prefix, size_t n_prefix,
                    es_dist *out);

/* Makes `out` the distribution whose n entries (n <= n_vocab) are given by token id. */
es_status es_dist_set(es_sampler *sampler, const float *probs, size_t n, es_dist *out);
/* Makes `out` the point mass on `token`. */
es_status es_dist_set_point(es_sampler *sampler, int32_t token, es_dist *out);

double es_dist_prob(const es_dist *dist, int32_t token);
/* The likeliest token, of equal ones that of the smallest id. */
int32_t es_dist_top(const es_dist *dist);
/* The token at which the running sum first exceeds coin * total; coin in [0, 1). */
int32_t es_dist_sample(const es_dist *dist, double coin);

/* Sets *confidence to the probability that row[n] (n <= n_vocab) itself, unfiltered, gives its likeliest token. */
es_status es_confidence(es_sampler *sampler, const float *row, size_t n, double *confidence);

/* Sets sampler->residual to max(0, weight * target - q). */
void es_residual(es_sampler *sampler, const es_dist *q, double weight);

#endif
