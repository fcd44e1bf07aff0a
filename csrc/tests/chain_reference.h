/* The two rules on a chain, as they were before there were trees: what es_verify gives there must be the same
 * to the last bit.  The q of x_i stands in the sampler's slot i - 1. */
#ifndef EDGESPEC_CHAIN_REFERENCE_H
#define EDGESPEC_CHAIN_REFERENCE_H

#include "check.h"
#include "verify.h"

typedef struct chain_verdict {
    size_t tau;
    int32_t next_token;
    double p[16], q[16]; /* of the accepted tokens and of the first one that was not */
} chain_verdict;

static inline const es_dist *chain_p(es_sampler *s, const es_draft *d, size_t i) {
    int32_t *history = exact((d->n_prefix + i) * sizeof *history);
    if (d->n_prefix) memcpy(history, d->prefix, d->n_prefix * sizeof *history);
    if (i) memcpy(history + d->n_prefix, d->tokens, i * sizeof *history);
    CHECK(es_filter(s, d->rows + i * s->n_vocab, s->n_vocab, history, d->n_prefix + i, NULL, 0, s->target) == ES_OK);
    free(history);
    return s->target;
}

static inline double chain_ratio(double p, double q) { return p >= q ? 1.0 : p / q; }

static inline chain_verdict chain_verify(es_sampler *s, const es_draft *d, bool block, const double *coins) {
    chain_verdict verdict = {0};
    double carried = 1.0, weight = 1.0; /* weight_i, and that of tau */
    for (size_t i = 1; i <= d->n; i++) {
        const es_dist *p = chain_p(s, d, i - 1);
        verdict.p[i - 1] = es_dist_prob(p, d->tokens[i - 1]);
        verdict.q[i - 1] = es_dist_prob(&s->slots[i - 1], d->tokens[i - 1]);
        double h = chain_ratio(carried * verdict.p[i - 1], verdict.q[i - 1]);
        if (block) {
            carried = h;
            if (i < d->n && carried > 0.0) {
                chain_p(s, d, i);
                const double left = es_residual(s, s->target, &s->slots[i], carried);
                h = left > 0.0 ? left / (left + (1.0 - carried)) : 0.0;
            }
        }
        if (coins[i - 1] < h) {
            verdict.tau = i;
            weight = carried;
        } else if (!block || carried <= 0.0) {
            break;
        }
    }
    chain_p(s, d, verdict.tau);
    if (verdict.tau < d->n) es_residual(s, s->target, &s->slots[verdict.tau], weight);
    verdict.next_token = es_dist_sample(s->target, coins[d->n]);
    return verdict;
}

#endif
