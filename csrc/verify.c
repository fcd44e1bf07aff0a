#include "verify.h"

static const size_t NO_ROW = (size_t)-1;

typedef struct walk {
    size_t tau;    /* the longest prefix accepted so far */
    double weight; /* weight_tau */
    size_t held;   /* the row whose distribution is in sampler->target */
} walk;

/* Puts the target's distribution at row i into sampler->target.  Penalties see what precedes it. */
static es_status hold(es_sampler *s, const es_draft *d, size_t i, size_t *held) {
    if (*held == i) return ES_OK;
    *held = i;
    return es_filter(s, d->rows + i * s->n_vocab, s->n_vocab, d->prefix, d->n_prefix - d->n + i, &s->target);
}

static bool lengths_fit(const es_sampler *s, const es_draft *d) {
    return d->n <= s->n_slots && d->n_prefix >= d->n && d->n_rows == d->n + 1;
}

/* min(1, p / q).  A token sampled from q has q > 0. */
static double ratio(double p, double q) { return p >= q ? 1.0 : p / q; }

/* Visits the drafted positions in order.  With coins it tosses them and stops once tau is certain;
 * without, it visits all and only records.  Rows are filtered when first needed. */
static es_status visit(es_sampler *s, const es_draft *d, es_rule rule, const double *coins, double *accept,
                       double *weight, es_judged *judged, walk *w) {
    double carried = 1.0; /* weight_i of the block rule; the chain rule's is always 1 */
    for (size_t i = 1; i <= d->n; i++) {
        es_status status = hold(s, d, i - 1, &w->held);
        if (status != ES_OK) return status;
        const double p = es_dist_prob(&s->target, d->tokens[i - 1]);
        const double q = es_dist_prob(&s->slots[i - 1], d->tokens[i - 1]);
        double h = ratio(carried * p, q);
        if (judged) judged[i - 1] = (es_judged){p, q};
        if (rule == ES_BLOCK) {
            carried = h;
            if (i < d->n && carried > 0.0) {
                status = hold(s, d, i, &w->held);
                if (status != ES_OK) return status;
                es_residual(s, &s->slots[i], carried);
                const double left = s->residual.total;
                h = left > 0.0 ? left / (left + (1.0 - carried)) : 0.0;
            }
        }
        if (accept) accept[i - 1] = h;
        if (weight) weight[i] = carried;
        if (!coins) continue;
        if (coins[i - 1] < h) {
            w->tau = i;
            w->weight = carried;
        } else if (rule == ES_CHAIN || carried <= 0.0) {
            break; /* no longer prefix can be accepted */
        }
    }
    return ES_OK;
}

static es_status next_dist(es_sampler *s, const es_draft *d, walk *w, const es_dist **next) {
    const es_status status = hold(s, d, w->tau, &w->held);
    if (status != ES_OK) return status;
    *next = &s->target;
    if (w->tau == d->n) return ES_OK;
    es_residual(s, &s->slots[w->tau], w->weight);
    /* No residual is left when p = q up to rounding; the exact probability of coming here is 0. */
    if (s->residual.total > 0.0) *next = &s->residual;
    return ES_OK;
}

es_status es_acceptance(es_sampler *s, const es_draft *d, es_rule rule, double *accept, double *weight) {
    if (!lengths_fit(s, d)) return ES_BAD_LENGTH;
    weight[0] = 1.0;
    walk w = {.weight = 1.0, .held = NO_ROW};
    return visit(s, d, rule, NULL, accept, weight, NULL, &w);
}

es_status es_next(es_sampler *s, const es_draft *d, size_t tau, double weight, const es_dist **next) {
    if (!lengths_fit(s, d) || tau > d->n) return ES_BAD_LENGTH;
    walk w = {.tau = tau, .weight = weight, .held = NO_ROW};
    return next_dist(s, d, &w, next);
}

es_status es_verify(es_sampler *s, const es_draft *d, es_rule rule, const double *coins, es_verdict *verdict,
                    es_judged *judged) {
    if (!lengths_fit(s, d)) return ES_BAD_LENGTH;
    walk w = {.weight = 1.0, .held = NO_ROW};
    es_status status = visit(s, d, rule, coins, NULL, NULL, judged, &w);
    if (status != ES_OK) return status;
    const es_dist *next;
    status = next_dist(s, d, &w, &next);
    if (status != ES_OK) return status;
    verdict->n_accepted = w.tau;
    verdict->next_token = es_dist_sample(next, coins[d->n]);
    return ES_OK;
}
