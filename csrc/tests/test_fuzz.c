/* Random steps with random parameters, lengths and kinds of q, for the sanitizers to watch:
 * whatever comes, the invariants hold and an emitted token is one that the target could emit. */
#include "verify.h"

#include "invariants.h"

enum { N_RUNS = 100000, LONGEST_DRAFT = 6 };

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
        CHECK(es_filter(s, values, n_q, prefix, n_prefix, q) == ES_OK);
        check_filtered(s, q);
    }
    free(values);
    check_dist(s, q);
    const int32_t token = es_dist_sample(q, random_unit(&state));
    CHECK(es_dist_prob(q, token) > 0.0);
    return token;
}

static void one_step(size_t n) {
    const es_params params = random_params();
    const size_t gamma = random_below(&state, LONGEST_DRAFT + 1), n_before = random_below(&state, 30);
    const size_t n_bias = random_below(&state, 3);
    int32_t bias_ids[2] = {0};
    float bias_values[2] = {0};
    for (size_t i = 0; i < n_bias; i++) {
        bias_ids[i] = (int32_t)random_below(&state, n);
        bias_values[i] = (float)random_normal(&state);
    }
    es_sampler *s = es_sampler_new(n, gamma, &params, bias_ids, bias_values, n_bias);
    CHECK(s);

    int32_t *prefix = exact((n_before + gamma) * sizeof *prefix);
    for (size_t i = 0; i < n_before; i++) prefix[i] = (int32_t)random_below(&state, n + 2) - 1;
    for (size_t i = 0; i < gamma; i++)
        prefix[n_before + i] = propose(s, i, 1 + random_below(&state, n), prefix, n_before + i);
    float *rows = exact((gamma + 1) * n * sizeof *rows);
    for (size_t i = 0; i <= gamma; i++) fill_row(&state, random_below(&state, N_ROW_KINDS), rows + i * n, n);
    double *coins = exact((gamma + 1) * sizeof *coins), *accept = exact(gamma * sizeof *accept),
           *weight = exact((gamma + 1) * sizeof *weight);
    for (size_t i = 0; i <= gamma; i++) {
        coins[i] = random_unit(&state);
        if (random_bits(&state) % 8 == 0) coins[i] = random_bits(&state) % 2 ? 0.0 : 1 - 0x1p-53;
    }

    const es_draft d = {prefix + n_before, gamma, rows, gamma + 1, prefix, n_before + gamma};
    for (int rule = ES_CHAIN; rule <= ES_BLOCK; rule++) {
        es_verdict verdict, again;
        CHECK(es_verify(s, &d, (es_rule)rule, coins, &verdict, NULL) == ES_OK);
        check_scratch(s);
        CHECK(verdict.n_accepted <= gamma);
        CHECK(es_acceptance(s, &d, (es_rule)rule, accept, weight) == ES_OK);
        check_scratch(s);
        size_t tau = 0;
        for (size_t i = 1; i <= gamma; i++) {
            CHECK(accept[i - 1] >= 0.0 && accept[i - 1] <= 1.0 && weight[i] >= 0.0 && weight[i] <= 1.0);
            if (coins[i - 1] < accept[i - 1]) tau = i;
            else if (rule == ES_CHAIN) break;
        }
        CHECK(tau == verdict.n_accepted); /* stopping early changes nothing */
        const es_dist *next;
        CHECK(es_next(s, &d, tau, weight[tau], &next) == ES_OK);
        check_dist(s, next);
        CHECK(es_dist_sample(next, coins[gamma]) == verdict.next_token);
        for (size_t i = 0; i <= tau; i++) { /* what is emitted has p > 0 */
            CHECK(es_filter(s, rows + i * n, n, prefix, n_before + i, &s->target) == ES_OK);
            check_filtered(s, &s->target);
            CHECK(es_dist_prob(&s->target, i < tau ? d.tokens[i] : verdict.next_token) > 0.0);
        }
        CHECK(es_verify(s, &d, (es_rule)rule, coins, &again, NULL) == ES_OK); /* a function of its arguments */
        CHECK(again.n_accepted == verdict.n_accepted && again.next_token == verdict.next_token);
    }
    free(prefix);
    free(rows);
    free(coins);
    free(accept);
    free(weight);
    es_sampler_free(s);
}

int main(void) {
    for (size_t run = 0; run < N_RUNS; run++) {
        const size_t longest = run % 100 == 0 ? 3000 : run % 2 ? 300 : 12;
        one_step(1 + random_below(&state, longest));
    }
    return 0;
}
