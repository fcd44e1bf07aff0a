/* What sampler.h promises of every distribution, and of the scratch between two calls. */
#ifndef EDGESPEC_INVARIANTS_H
#define EDGESPEC_INVARIANTS_H

#include "check.h"
#include "sampler.h"

static inline es_params all_off(void) {
    return (es_params){.temperature = 1.0f, .top_p = 1.0f, .typical_p = 1.0f, .repeat_penalty = 1.0f};
}

static inline void check_scratch(const es_sampler *s) {
    for (size_t i = 0; i < s->n_vocab; i++) CHECK(s->scattered[i] == 0.0f && s->counts[i] == 0);
}

/* `total` is the sum of finite probabilities and positive; ids are in range and each is there once. */
static inline void check_dist(const es_sampler *s, const es_dist *d) {
    CHECK(d->n >= 1 && d->n <= s->n_vocab);
    double sum = 0, block = 0;
    unsigned char *seen = exact(s->n_vocab);
    memset(seen, 0, s->n_vocab);
    for (size_t i = 0; i < d->n; i++) {
        CHECK(isfinite(d->probs[i]) && d->probs[i] >= 0.0f);
        sum += (double)d->probs[i];
        block += (double)d->probs[i];
        if (d->dense) {
            if ((i + 1) % ES_BLOCK_LEN && i + 1 < d->n) continue;
            CHECK(fabs(d->block_sum[i / ES_BLOCK_LEN] - block) <= 1e-6 * block + 1e-30);
            block = 0;
        } else {
            CHECK(d->ids[i] >= 0 && (size_t)d->ids[i] < s->n_vocab && !seen[d->ids[i]]);
            seen[d->ids[i]] = 1;
        }
    }
    free(seen);
    CHECK(d->total > 0.0 && fabs(d->total - sum) <= 1e-6 * sum);
}

static inline void check_filtered(const es_sampler *s, const es_dist *d) {
    check_dist(s, d);
    CHECK(fabs(d->total - 1.0) <= 1e-5);
}

/* Parents of a tree in depth-first order: each node hangs from the one before it, or from one above that. */
static inline void random_tree(uint64_t *state, int32_t *parents, size_t n) {
    for (size_t i = 0; i < n; i++) {
        int32_t parent = (int32_t)i - 1;
        while (parent >= 0 && random_bits(state) % 3 == 0) parent = parents[parent];
        parents[i] = parent;
    }
}

static inline void chain_of(int32_t *parents, int32_t *slots, size_t n) {
    for (size_t i = 0; i < n; i++) {
        parents[i] = (int32_t)i - 1;
        slots[i] = (int32_t)i;
    }
}

#endif
