#include "verify.h"

/* Either coins decide, or every toss falls so that the path ends at `end`, and `chance` is how likely that is. */
typedef struct walk {
    es_sampler *s;
    const es_draft *d;
    es_rule rule;
    const double *coins;
    int32_t end;
    double chance;
    size_t depth; /* of the frame at work; in the end, of the accepted node */
} walk;

/* Checks the draft, and finds where each node's subtree ends. */
static es_status lay_out(es_sampler *s, const es_draft *d) {
    if (d->n > s->n_slots || d->n_rows != d->n + 1) return ES_BAD_LENGTH;
    int32_t open = -1; /* the deepest node whose subtree goes on */
    for (int32_t i = 0; (size_t)i < d->n; i++) {
        if (d->tokens[i] < 0 || (size_t)d->tokens[i] >= s->n_vocab) return ES_BAD_LENGTH;
        if (d->slots[i] < -1 || d->slots[i] >= (int32_t)s->n_slots) return ES_BAD_LENGTH;
        for (; open != d->parents[i]; open = d->parents[open]) {
            if (open == -1) return ES_BAD_TREE;
            s->ends[open] = i;
        }
        open = i;
    }
    for (; open != -1; open = d->parents[open]) s->ends[open] = (int32_t)d->n;
    return ES_OK;
}

static int32_t end_of(const walk *w, int32_t node) { return node < 0 ? (int32_t)w->d->n : w->s->ends[node]; }

static bool tossed(walk *w, int32_t node, double probability) {
    if (w->coins) return w->coins[node] < probability;
    const bool wanted = w->rule.block ? node == w->end : node <= w->end && w->end < end_of(w, node);
    w->chance *= wanted ? probability : 1.0 - probability;
    return wanted;
}

/* min(1, p / q) */
static double ratio(double p, double q) { return p >= q ? 1.0 : p / q; }

static void enter(walk *w, size_t depth, int32_t node, double weight) {
    w->depth = depth;
    w->s->frames[depth] = (es_frame){.node = node, .next = node + 1, .weight = weight, .scale = 1.0};
    if (depth > 0) w->s->path[depth - 1] = w->d->tokens[node];
}

/* Has p of the frame at work in target[depth], and looks up what it gives the node's children. */
static es_status hold(walk *w) {
    es_sampler *s = w->s;
    const es_draft *d = w->d;
    es_frame *f = &s->frames[w->depth];
    if (f->held) return ES_OK;
    es_dist *p = &s->target[w->depth];
    const es_status status = es_filter(s, d->rows + (size_t)(f->node + 1) * s->n_vocab, s->n_vocab, d->prefix,
                                       d->n_prefix, s->path, w->depth, p);
    if (status != ES_OK) return status;
    f->held = true;
    for (int32_t child = f->node + 1; child < end_of(w, f->node); child = s->ends[child])
        s->judged[child] = (es_judged){.node = child, .p = es_dist_prob(p, d->tokens[child])};
    return ES_OK;
}

/* Takes the q of a rejected child from what is left of p. */
static void take_away(walk *w, int32_t child) {
    es_sampler *s = w->s;
    es_frame *f = &s->frames[w->depth];
    int32_t token = w->d->tokens[child];
    float one = 1.0f;
    const es_dist point = {.n = 1, .ids = &token, .probs = &one, .total = 1.0};
    const es_dist *q = w->d->slots[child] < 0 ? &point : &s->slots[w->d->slots[child]];
    const double left = es_residual(s, &s->target[w->depth], q, f->weight * f->scale);
    /* Nothing is left when p = q up to rounding; the exact probability of coming here is 0. */
    f->weight = left > 0.0 ? left / (left + (1.0 - f->weight)) : 0.0;
    if (left > 0.0) f->scale = 1.0 / left;
}

/* Follows the rule from the root to the node that is accepted, and has what is left of p there. */
static es_status follow(walk *w) {
    es_sampler *s = w->s;
    size_t certain = 0; /* the depth down to which the path is accepted already */
    for (enter(w, 0, -1, 1.0);;) {
        es_frame *f = &s->frames[w->depth];
        if (f->next == end_of(w, f->node)) {
            if (w->depth == certain || tossed(w, f->node, f->weight)) return hold(w);
            w->depth--;
            take_away(w, f->node);
            continue;
        }
        const es_status status = hold(w);
        if (status != ES_OK) return status;
        const int32_t child = f->next, slot = w->d->slots[child], token = w->d->tokens[child];
        f->next = s->ends[child];
        const double q = slot < 0 ? 1.0 : es_dist_prob(&s->slots[slot], token);
        if (!(q > 0.0)) return ES_NOT_DRAWN;
        s->judged[child].q = q;
        const double p = f->scale * es_dist_prob(&s->target[w->depth], token);
        double weight = ratio(f->weight * p, q * w->rule.lenience);
        if (!w->rule.block) { /* the chain rule's coins fall on the way down, and never again */
            weight = tossed(w, child, weight) ? 1.0 : 0.0;
            if (weight > 0.0) certain = w->depth + 1;
        }
        if (weight > 0.0) {
            enter(w, w->depth + 1, child, weight);
        } else { /* so would be the weights of all that hangs below it */
            take_away(w, child);
        }
    }
}

es_status es_verify(es_sampler *s, const es_draft *d, es_rule rule, const double *coins, es_verdict *verdict) {
    es_status status = lay_out(s, d);
    if (status != ES_OK) return status;
    walk w = {.s = s, .d = d, .rule = rule, .coins = coins};
    status = follow(&w);
    if (status != ES_OK) return status;
    size_t n_judged = 0;
    for (size_t depth = 0; depth <= w.depth; depth++) {
        const es_frame *f = &s->frames[depth];
        for (int32_t child = f->node + 1; child < f->next; child = s->ends[child])
            s->judged[n_judged++] = s->judged[child]; /* n_judged <= child */
        if (depth > 0) s->path[depth - 1] = f->node;
    }
    *verdict = (es_verdict){
        .path = s->path,
        .n_accepted = w.depth,
        .next_token = es_dist_sample(&s->target[w.depth], coins[d->n]),
        .judged = s->judged,
        .n_judged = n_judged,
    };
    return ES_OK;
}

es_status es_outcome(es_sampler *s, const es_draft *d, es_rule rule, int32_t end, double *chance,
                     const es_dist **next) {
    if (end < -1 || end >= (int32_t)d->n) return ES_BAD_LENGTH;
    es_status status = lay_out(s, d);
    if (status != ES_OK) return status;
    walk w = {.s = s, .d = d, .rule = rule, .end = end, .chance = 1.0};
    status = follow(&w);
    if (status != ES_OK) return status;
    *chance = s->frames[w.depth].node == end ? w.chance : 0.0;
    *next = &s->target[w.depth];
    return ES_OK;
}
