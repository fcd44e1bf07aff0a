/* Accept, resample, bonus: what makes speculative sampling exact.
 *
 * A draft x_1 .. x_n was sampled from q_1 .. q_n (the sampler's slots; a deterministic proposal is
 * a point mass).  The target's logits stand in n + 1 rows: row i is the position of x_(i+1).
 * Both rules emit the first tau drafted tokens and one more, distributed exactly as the target
 * alone would, whatever q is.
 *
 * Chain (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): each token is accepted
 * with probability min(1, p/q), and tau ends at the first rejection.
 * Block (Sun et al., arXiv 2403.10444): tau is the LARGEST i with coin_i < h_i, where
 *     weight_0 = 1,  weight_i = min(1, weight_(i-1) p(x_i)/q(x_i)),
 *     R_i = sum over x of max(0, weight_i p(x) - q(x)),
 *     h_i = R_i / (R_i + 1 - weight_i) for i < n,  h_n = weight_n.
 * It never accepts less than the chain rule.  The next token comes from the normalised residual
 * max(0, weight_tau p - q), and from p itself after full acceptance (the bonus token). */
#ifndef EDGESPEC_VERIFY_H
#define EDGESPEC_VERIFY_H

#include "sampler.h"

typedef enum es_rule { ES_CHAIN = 0, ES_BLOCK = 1 } es_rule;

typedef struct es_draft {
    const int32_t *tokens; /* x_1 .. x_n; q_i stands in the sampler's slot i - 1 */
    size_t n;
    const float *rows;     /* n_rows * n_vocab logits of the target */
    size_t n_rows;         /* n + 1 */
    const int32_t *prefix; /* what precedes x_1, then x_1 .. x_n: the penalties' history */
    size_t n_prefix;       /* length of `prefix`, the n drafted tokens included */
} es_draft;

typedef struct es_verdict {
    size_t n_accepted;
    int32_t next_token;
} es_verdict;

/* What the two models gave a drafted token. */
typedef struct es_judged {
    double p, q;
} es_judged;

/* For i = 1 .. n, accept[i - 1] is the probability of the rule's coin i (min(1, p/q), or h_i), and
 * weight[i] for i = 0 .. n the residual's weight should tau be i.  The tests enumerate with these. */
es_status es_acceptance(es_sampler *sampler, const es_draft *draft, es_rule rule, double *accept, double *weight);

/* Points *next at the distribution of the token after tau accepted ones: the residual, or p itself
 * after full acceptance or when no residual is left.  Valid until the sampler's next call. */
es_status es_next(es_sampler *sampler, const es_draft *draft, size_t tau, double weight, const es_dist **next);

/* Runs the rule with coins[n + 1]: one for each drafted token, the last for the next token.  `judged`, n
 * entries or NULL, tells of the accepted tokens and of the first one that was not. */
es_status es_verify(es_sampler *sampler, const es_draft *draft, es_rule rule, const double *coins,
                    es_verdict *verdict, es_judged *judged);

#endif
