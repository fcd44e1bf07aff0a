/* From a row of logits to a distribution over tokens, and from a coin to a token.
 *
 * The filters, their order and their meaning are llama.cpp's: logit bias, penalties, DRY, top-n-sigma, top-k,
 * typical, top-p, min-p, XTC, temperature.  Temperature 0 leaves the likeliest token alone.
 * Equal logits are ordered by token id, so every result is a function of its arguments.  XTC tosses the coin of
 * its position, the number of tokens before it: target and draft see the same one, however often they come there.
 *
 * An es_dist is either dense (one probability for every token id) or sparse (ids beside
 * probabilities, in no particular order, each id once).  Invariants, checked by the tests:
 *   - probabilities are finite and not negative; `total` is their sum and is positive;
 *   - a distribution made by es_filter has a total of 1 up to float rounding.
 * Memory is allocated by es_sampler_new alone; nothing here allocates afterwards.  It comes zeroed and is not
 * touched before it is used: the distributions of filters that keep few tokens stay small. */
#ifndef EDGESPEC_SAMPLER_H
#define EDGESPEC_SAMPLER_H

#include "rows.h"

#include <stdint.h>

typedef enum es_status {
    ES_OK = 0,
    ES_NOT_FINITE, /* a logit is NaN or +infinity */
    ES_NO_TOKEN,   /* every logit is -infinity */
    ES_BAD_LENGTH, /* a length or an index is outside what the sampler was made for */
    ES_BAD_TREE,   /* parents are not those of a tree in depth-first order */
    ES_NOT_DRAWN,  /* a node's token has no probability in the slot it is said to come from */
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
    float dry_multiplier;    /* 0: off */
    float dry_base;          /* < 1: off */
    int32_t dry_allowed_length;
    int32_t dry_penalty_last_n;  /* tokens looked back on; 0: off; < 0: all of them */
    const int32_t *dry_breakers; /* sequences of tokens, each ended by -1; those that begin alike stand together */
    size_t n_dry_breakers;       /* entries, -1 included */
    float top_n_sigma;           /* <= 0: off */
    float xtc_probability;       /* <= 0: off */
    float xtc_threshold;         /* > 0.5: off */
    uint64_t seed;               /* of XTC's coins */
    float dynatemp_range;        /* <= 0: off; the temperature is then this much lower to higher */
    float dynatemp_exponent;
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

/* What the two models gave a drafted token. */
typedef struct es_judged {
    int32_t node; /* its index in the tree */
    double p, q;  /* p is the target's own, before anything was taken from it */
} es_judged;

/* One depth of the path that verify.c follows through a tree; depth 0 is the timeline's last token. */
typedef struct es_frame {
    int32_t node;  /* -1 at depth 0 */
    int32_t next;  /* the child to be looked at next, or where the node's subtree ends */
    double weight; /* of the node, see verify.h */
    double scale;  /* what is left of p is target[depth] times this: it stands there not normalised */
    bool held;     /* its row was filtered into target[depth] */
} es_frame;

/* The tokens before a position: prefix[n_prefix], then path[n_path]. */
typedef struct es_text {
    const int32_t *prefix;
    size_t n_prefix;
    const int32_t *path;
    size_t n_path;
} es_text;

typedef struct es_sampler {
    const es_rows *rows;
    es_params params;
    size_t n_vocab, n_slots, n_bias;
    const int32_t *bias_ids;
    const float *bias_values;
    es_dist *target;          /* n_slots + 1: p, or what is left of it, at each depth of a path */
    es_dist *slots;           /* the q that drafted tokens were sampled from */
    /* Scratch, n_vocab entries each unless said otherwise. */
    float *adjusted;          /* logits after bias and penalties; later what a residual is written to */
    double *spare_sums;       /* es_n_blocks(n_vocab): the residual's block sums */
    float *scattered;         /* a sparse q by token id; all zero between calls */
    int32_t *counts;          /* occurrences by token id; all zero between calls */
    float *block_max;         /* es_n_blocks(n_vocab) */
    es_candidate *candidates;
    int32_t *breaker_at;      /* by token id: 1 + where in dry_breakers sequences begin with it; 0: none */
    int32_t *repeats;         /* ES_LONGEST_REPEAT, of DRY */
    /* Of verify.c, n_slots entries each. */
    int32_t *path;            /* tokens, then nodes, of the path */
    int32_t *ends;            /* where each node's subtree ends: the index after its last descendant */
    es_judged *judged;
    es_frame *frames;         /* n_slots + 1 */
    void *memory;             /* the one allocation behind every pointer above */
} es_sampler;

/* DRY takes a longer repeat for one of so many tokens. */
enum { ES_LONGEST_REPEAT = 4096 };

/* Returns NULL when memory runs out.  Bias ids and breakers outside the vocabulary must have been refused before.
 * n_vocab >= 1, and n_slots is the largest tree that will be verified. */
es_sampler *es_sampler_new(size_t n_vocab, size_t n_slots, const es_params *params, const int32_t *bias_ids,
                           const float *bias_values, size_t n_bias);
void es_sampler_free(es_sampler *sampler);

/* Filters row[n] (n <= n_vocab), at a position that follows prefix[n_prefix] and then path[n_path], into `out`,
 * which is one of `target` or of `slots`. */
es_status es_filter(es_sampler *sampler, const float *row, size_t n, const int32_t *prefix, size_t n_prefix,
                    const int32_t *path, size_t n_path, es_dist *out);
/* The same for a draft's row, whose temperature is `ratio` (above 0) times the target's.  It may be of some tokens
 * only: entry i is that of token ids[i], and others are impossible.  The ids must ascend and be tokens of the
 * vocabulary, else ES_BAD_LENGTH; NULL: all of the row's. */
es_status es_filter_draft(es_sampler *sampler, const float *row, const int32_t *ids, size_t n, double ratio,
                          const int32_t *prefix, size_t n_prefix, es_dist *out);

/* Points *adjusted at the n logits of the row after bias, penalties, DRY and top-n-sigma, valid until the next
 * call. */
es_status es_adjust(es_sampler *sampler, const float *row, size_t n, const int32_t *prefix, size_t n_prefix,
                    const float **adjusted);

/* Makes `out` the distribution whose n entries (n <= n_vocab) are given by token id. */
es_status es_dist_set(es_sampler *sampler, const float *probs, size_t n, es_dist *out);
/* Makes `out` the point mass on `token`. */
es_status es_dist_set_point(es_sampler *sampler, int32_t token, es_dist *out);
/* Makes `out` the distribution q without `token`, normalised; out may be q.  ES_NO_TOKEN, and `out` as it was,
 * when nothing is left, or less than a float can say. */
es_status es_dist_without(const es_sampler *sampler, const es_dist *q, int32_t token, es_dist *out);

double es_dist_prob(const es_dist *dist, int32_t token);
/* The likeliest token, of equal ones that of the smallest id. */
int32_t es_dist_top(const es_dist *dist);
/* The token at which the running sum first exceeds coin * total; coin in [0, 1). */
int32_t es_dist_sample(const es_dist *dist, double coin);

/* Writes the k (k >= 1) likeliest tokens of row[n] (n <= n_vocab), best first, to ids[k], and the probability
 * that the row itself, unfiltered, gives each to probs[k]; *found of them, fewer than k where the others are at
 * -infinity or there are no more. */
es_status es_likeliest(es_sampler *sampler, const float *row, size_t n, size_t k, int32_t *ids, double *probs,
                       size_t *found);

/* Makes p, one of `target`, max(0, weight * p - q), not normalised, and returns its total.  When that is 0,
 * p stays as it was. */
double es_residual(es_sampler *sampler, es_dist *p, const es_dist *q, double weight);

#endif
