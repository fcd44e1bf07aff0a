/* Random steps with random parameters, trees and kinds of q, for the sanitizers to watch: whatever comes, the
 * invariants hold and an emitted token is one that the target could emit.  Chains give to the last bit what
 * they gave before there were trees; trees that are none are refused. */
#include "verify.h"

#include "chain_reference.h"
#include "invariants.h"

enum { N_RUNS = 100000, MOST_NODES = 7 };

static uint64_t state = 4;

static float pick(const float *values, size_t n) { return values[random_below(&state, n)]; }

static es_params random_params(void) {
    return (es_params){
        .temperature = pick((float[]){0.0f, 1e-40f, 0.1f, 0.8f, 1.0f, 10.0f}, 6),
        .top_k = (int32_t)pick((float[]){-1, 0, 0, 1, 3, 40, 500}, 7),
        .top_p = pick((float[]){1e-6f, 0.5f, 0.95f, 1.0f, 1.0f}, 5),
        .min_p = pick((float[]){0.0f, 0.0f, 0.05f, 1.0f}, 4),
        .typical_p = pick((float[]){0.2f, 0.95f, 1.0f, 1.0f, 1.0f}, 5),
        .penalty_last_n = (int32_t)pick((float[]){-1, 0, 5, 64}, 4),
        .repeat_penalty = pick((float[]){1.0f, 1.0f, 1.3f, 0.5f}, 4),
        .frequency_penalty = pick((float[]){0.0f, 0.0f, 0.7f, -0.7f}, 4),
        .presence_penalty = pick((float[]){0.0f, 0.0f, 0.7f, -0.7f}, 4),
        .dry_multiplier = pick((float[]){0.0f, 0.0f, 0.8f, 1000.0f}, 4),
        .dry_base = pick((float[]){0.5f, 1.0f, 1.75f, 1000.0f}, 4),
        .dry_allowed_length = (int32_t)pick((float[]){0, 1, 2, 64}, 4),
        .dry_penalty_last_n = (int32_t)pick((float[]){-1, 0, 1, 20}, 4),
        .top_n_sigma = pick((float[]){-1.0f, 0.0f, 0.1f, 1.0f}, 4),
        .xtc_probability = pick((float[]){0.0f, 0.0f, 0.5f, 1.0f}, 4),
        .xtc_threshold = pick((float[]){0.0f, 0.05f, 0.5f, 1.0f}, 4),
        .seed = random_bits(&state),
        .dynatemp_range = pick((float[]){0.0f, 0.0f, 0.5f, 1000.0f}, 4),
        .dynatemp_exponent = pick((float[]){0.0f, 1.0f, 1000.0f}, 3),
    };
}

/* Fills slot i and draws the drafted token from it. */
static int32_t propose(es_sampler *s, size_t i, size_t n_q, const int32_t *prefix, size_t n_prefix) {
    es_dist *q = &s->slots[i];
    float *values = exact(n_q * sizeof *values);
    switch (random_below(&state, 3)) {
    case 0:
        CHECK(es_dist_set_point(s, (int32_t)random_below(&state, s->n_vocab), q) == ES_OK);
        break;
    case 1:
        for (size_t j = 0; j < n_q; j++)
            values[j] = random_bits(&state) % 2 ? (float)(random_unit(&state) / (double)n_q) : 0.0f;
        values[random_below(&state, n_q)] = 1.0f / (float)n_q;
        CHECK(es_dist_set(s, values, n_q, q) == ES_OK);
        break;
    default:
        fill_row(&state, random_below(&state, N_ROW_KINDS), values, n_q);
        CHECK(es_filter(s, values, n_q, prefix, n_prefix, NULL, 0, q) == ES_OK);
        check_filtered(s, q);
    }
    free(values);
    check_dist(s, q);
    const int32_t token = es_dist_sample(q, random_unit(&state));
    CHECK(es_dist_prob(q, token) > 0.0);
    return token;
}

/* The nearest sibling before node i, or -1. */
static int32_t sibling_before(const int32_t *parents, size_t i) {
    for (int32_t j = (int32_t)i - 1; j > parents[i]; j--)
        if (parents[j] == parents[i]) return j;
    return -1;
}

static void check_verdict(es_sampler *s, const es_draft *d, es_rule rule, const double *coins) {
    es_verdict v;
    CHECK(es_verify(s, d, rule, coins, &v) == ES_OK);
    check_scratch(s);
    CHECK(v.n_accepted <= d->n && v.n_judged >= v.n_accepted && v.n_judged <= d->n);
    int32_t path[MOST_NODES + 1] = {-1}, judged[MOST_NODES];
    for (size_t i = 0; i < v.n_accepted; i++) {
        path[i + 1] = v.path[i];
        CHECK(path[i + 1] < (int32_t)d->n && d->parents[path[i + 1]] == path[i]);
    }
    size_t n_judged = 0, depth = 0;
    for (int32_t i = 0; (size_t)i < d->n; i++) { /* on the path, or beside it and before it */
        if (d->parents[i] != path[depth]) continue;
        judged[n_judged++] = i;
        if (depth < v.n_accepted && path[depth + 1] == i) depth++;
    }
    CHECK(n_judged == v.n_judged);
    for (size_t i = 0; i < n_judged; i++)
        CHECK(v.judged[i].node == judged[i] && v.judged[i].p >= 0.0 && v.judged[i].q > 0.0);
    const size_t n_accepted = v.n_accepted;
    const int32_t next_token = v.next_token, end = path[n_accepted];

    double sum = 0; /* over all that could have come of it */
    for (int32_t i = -1; i < (int32_t)d->n; i++) {
        double chance;
        const es_dist *next;
        CHECK(es_outcome(s, d, rule, i, &chance, &next) == ES_OK);
        check_scratch(s);
        check_dist(s, next);
        CHECK(chance >= 0.0 && chance <= 1.0);
        if (i == end) CHECK(chance > 0.0 && es_dist_sample(next, coins[d->n]) == next_token);
        sum += chance;
    }
    CHECK(fabs(sum - 1.0) < 1e-9);

    int32_t emitted[MOST_NODES];
    for (size_t i = 0; i <= n_accepted; i++) { /* each has p > 0 */
        CHECK(es_filter(s, d->rows + (size_t)(path[i] + 1) * s->n_vocab, s->n_vocab, d->prefix, d->n_prefix,
                        emitted, i, s->target) == ES_OK);
        check_filtered(s, s->target);
        const int32_t token = i < n_accepted ? d->tokens[path[i + 1]] : next_token;
        CHECK(es_dist_prob(s->target, token) > 0.0);
        if (i < n_accepted) emitted[i] = token;
    }
    CHECK(es_verify(s, d, rule, coins, &v) == ES_OK); /* a function of its arguments */
    CHECK(v.n_accepted == n_accepted && v.next_token == next_token);
    CHECK(memcmp(v.path, path + 1, n_accepted * sizeof *path) == 0);
}

static void check_chain(es_sampler *s, const es_draft *d, bool block, const double *coins) {
    es_verdict v;
    CHECK(es_verify(s, d, block ? ES_BLOCK : ES_CHAIN, coins, &v) == ES_OK);
    int32_t path[MOST_NODES];
    es_judged judged[MOST_NODES];
    const size_t n_accepted = v.n_accepted, n_judged = v.n_judged;
    const int32_t next_token = v.next_token;
    memcpy(path, v.path, n_accepted * sizeof *path);
    memcpy(judged, v.judged, n_judged * sizeof *judged);
    const chain_verdict want = chain_verify(s, d, block, coins);
    CHECK(n_accepted == want.tau && next_token == want.next_token);
    CHECK(n_judged == (want.tau < d->n ? want.tau + 1 : d->n));
    for (size_t i = 0; i < n_judged; i++) {
        CHECK(i >= n_accepted || path[i] == (int32_t)i);
        CHECK(judged[i].node == (int32_t)i && judged[i].p == want.p[i] && judged[i].q == want.q[i]);
    }
}

/* Something of the draft is made wrong, or stays right by luck. */
static void check_refusal(es_sampler *s, const es_draft *good, const double *coins) {
    int32_t *parents = exact(good->n * sizeof *parents), *slots = exact(good->n * sizeof *slots),
            *tokens = exact(good->n * sizeof *tokens);
    memcpy(parents, good->parents, good->n * sizeof *parents);
    memcpy(slots, good->slots, good->n * sizeof *slots);
    memcpy(tokens, good->tokens, good->n * sizeof *tokens);
    const int32_t wild[] = {INT32_MIN, -2, -1, 0, 1, 2, (int32_t)good->n, INT32_MAX};
    int32_t *const arrays[] = {parents, parents, slots, tokens};
    const size_t at = random_below(&state, good->n);
    arrays[random_below(&state, 4)][at] = wild[random_below(&state, 8)];
    bool is_tree = true, in_range = true;
    for (int32_t i = 0; (size_t)i < good->n; i++) {
        int32_t above = i - 1;
        while (is_tree && above != parents[i] && above >= 0) above = parents[above];
        is_tree &= above == parents[i];
        in_range &= slots[i] >= -1 && slots[i] < (int32_t)s->n_slots;
        in_range &= tokens[i] >= 0 && (size_t)tokens[i] < s->n_vocab;
    }
    es_draft d = *good;
    d.parents = parents;
    d.slots = slots;
    d.tokens = tokens;
    for (size_t block = 0; block < 2; block++) {
        es_verdict v;
        const es_status status = es_verify(s, &d, block ? ES_BLOCK : ES_CHAIN, coins, &v);
        if (is_tree && in_range) CHECK(status == ES_OK || status == ES_NOT_DRAWN);
        else CHECK(status == ES_BAD_TREE || status == ES_BAD_LENGTH);
        check_scratch(s);
    }
    free(parents);
    free(slots);
    free(tokens);
}

/* Writes up to three sequences that break repeats; returns their entries. */
static size_t random_breakers(size_t n, int32_t breakers[12]) {
    size_t used = 0;
    for (size_t i = random_below(&state, 4); i-- > 0;) {
        for (size_t length = 1 + random_below(&state, 3); length-- > 0;)
            breakers[used++] = (int32_t)random_below(&state, n);
        breakers[used++] = -1;
    }
    return used;
}

static void one_step(size_t n) {
    es_params params = random_params();
    int32_t breakers[12];
    params.dry_breakers = breakers;
    params.n_dry_breakers = random_breakers(n, breakers);
    const size_t n_nodes = random_below(&state, MOST_NODES + 1), n_before = random_below(&state, 30);
    const size_t n_bias = random_below(&state, 3);
    int32_t bias_ids[2] = {0};
    float bias_values[2] = {0};
    for (size_t i = 0; i < n_bias; i++) {
        bias_ids[i] = (int32_t)random_below(&state, n);
        bias_values[i] = (float)random_normal(&state);
    }
    es_sampler *s = es_sampler_new(n, n_nodes, &params, bias_ids, bias_values, n_bias);
    CHECK(s);

    int32_t *prefix = exact(n_before * sizeof *prefix), *tokens = exact(n_nodes * sizeof *tokens),
            *parents = exact(n_nodes * sizeof *parents), *slots = exact(n_nodes * sizeof *slots);
    for (size_t i = 0; i < n_before; i++) prefix[i] = (int32_t)random_below(&state, n + 2) - 1;
    chain_of(parents, slots, n_nodes);
    const bool is_chain = random_bits(&state) % 3 == 0;
    if (!is_chain) random_tree(&state, parents, n_nodes);
    for (size_t i = 0; i < n_nodes; i++) {
        const int32_t sibling = sibling_before(parents, i);
        if (sibling >= 0 && random_bits(&state) % 2 &&
            es_dist_without(s, &s->slots[sibling], tokens[sibling], &s->slots[i]) == ES_OK) {
            check_dist(s, &s->slots[i]);
            tokens[i] = es_dist_sample(&s->slots[i], random_unit(&state));
        } else {
            tokens[i] = propose(s, i, 1 + random_below(&state, n), prefix, n_before);
        }
        if (s->slots[i].n == 1 && es_dist_prob(&s->slots[i], tokens[i]) == 1.0 && random_bits(&state) % 2)
            slots[i] = -1;
    }
    float *rows = exact((n_nodes + 1) * n * sizeof *rows);
    for (size_t i = 0; i <= n_nodes; i++) fill_row(&state, random_below(&state, N_ROW_KINDS), rows + i * n, n);
    double *coins = exact((n_nodes + 1) * sizeof *coins);
    for (size_t i = 0; i <= n_nodes; i++) {
        coins[i] = random_unit(&state);
        if (random_bits(&state) % 8 == 0) coins[i] = random_bits(&state) % 2 ? 0.0 : 1 - 0x1p-53;
    }
    if (random_bits(&state) % 4 == 0 && n_nodes) { /* p = q in places */
        const size_t i = random_below(&state, n_nodes);
        if (s->slots[i].dense && s->slots[i].n == n)
            for (size_t j = 0; j < n; j++) rows[(size_t)(parents[i] + 1) * n + j] = logf(s->slots[i].probs[j]);
    }

    const es_draft d = {tokens, parents, slots, n_nodes, rows, n_nodes + 1, prefix, n_before};
    check_verdict(s, &d, ES_CHAIN, coins);
    check_verdict(s, &d, ES_BLOCK, coins);
    check_verdict(s, &d, (es_rule){.block = false, .lenience = 0.05 + 0.9 * random_unit(&state)}, coins);
    if (is_chain) {
        check_chain(s, &d, false, coins);
        check_chain(s, &d, true, coins);
    }
    if (n_nodes) check_refusal(s, &d, coins);
    free(prefix);
    free(tokens);
    free(parents);
    free(slots);
    free(rows);
    free(coins);
    es_sampler_free(s);
}

int main(void) {
    for (size_t run = 0; run < N_RUNS; run++) {
        const size_t longest = run % 100 == 0 ? 3000 : run % 2 ? 300 : 12;
        one_step(1 + random_below(&state, longest));
    }
    return 0;
}
