/* Accept, resample, bonus: greedy chains, p = q, lengths, and a million samples of each rule. */
#include "verify.h"

#include "invariants.h"
#include "philox.h"

static uint64_t state = 3;

static es_sampler *sampler(size_t n_vocab, size_t n_slots, es_params params) {
    es_sampler *s = es_sampler_new(n_vocab, n_slots, &params, NULL, NULL, 0);
    CHECK(s);
    return s;
}

static void greedy_chains(void) {
    enum { N = 200, GAMMA = 4 };
    es_params params = all_off();
    params.temperature = 0.0f;
    es_sampler *s = sampler(N, GAMMA, params);
    for (size_t run = 0; run < 2000; run++) {
        float *rows = exact((GAMMA + 1) * N * sizeof *rows);
        int32_t best[GAMMA + 1], draft[GAMMA];
        double coins[GAMMA + 1];
        const size_t n = random_below(&state, GAMMA + 1), wrong_from = random_below(&state, n + 1);
        for (size_t i = 0; i <= n; i++) {
            best[i] = (int32_t)random_below(&state, N);
            for (size_t j = 0; j < N; j++) rows[i * N + j] = -(float)random_unit(&state) - 0.001f;
            rows[i * N + (size_t)best[i]] = 0.0f;
            coins[i] = run % 2 ? random_unit(&state) : 1 - 0x1p-53;
        }
        for (size_t i = 0; i < n; i++) {
            draft[i] = i < wrong_from ? best[i] : (best[i] + 1) % N;
            CHECK(es_dist_set_point(s, draft[i], &s->slots[i]) == ES_OK);
        }
        const es_draft d = {draft, n, rows, n + 1, draft, n};
        for (int rule = ES_CHAIN; rule <= ES_BLOCK; rule++) {
            es_verdict verdict;
            CHECK(es_verify(s, &d, (es_rule)rule, coins, &verdict, NULL) == ES_OK);
            CHECK(verdict.n_accepted == wrong_from && verdict.next_token == best[wrong_from]);
            check_scratch(s);
        }
        free(rows);
    }
    es_sampler_free(s);
}

/* The target as its own draft: everything is accepted, and the bonus token comes from p. */
static void everything_is_accepted_when_p_is_q(void) {
    enum { GAMMA = 5 };
    for (size_t run = 0; run < 1500; run++) {
        es_params params = all_off();
        if (run % 3 == 1) params.top_k = 7;
        if (run % 3 == 2) params.top_p = 0.9f;
        const size_t n = 1 + random_below(&state, 300);
        es_sampler *s = sampler(n, GAMMA, params);
        float *rows = exact((GAMMA + 1) * n * sizeof *rows);
        int32_t draft[GAMMA];
        double coins[GAMMA + 1];
        for (size_t i = 0; i <= GAMMA; i++) {
            fill_row(&state, random_below(&state, N_ROW_KINDS), rows + i * n, n);
            coins[i] = run % 2 ? random_unit(&state) : 1 - 0x1p-53;
        }
        for (size_t i = 0; i < GAMMA; i++) {
            CHECK(es_filter(s, rows + i * n, n, draft, i, &s->slots[i]) == ES_OK);
            draft[i] = es_dist_sample(&s->slots[i], random_unit(&state));
        }
        const es_draft d = {draft, GAMMA, rows, GAMMA + 1, draft, GAMMA};
        for (int rule = ES_CHAIN; rule <= ES_BLOCK; rule++) {
            es_verdict verdict;
            CHECK(es_verify(s, &d, (es_rule)rule, coins, &verdict, NULL) == ES_OK);
            CHECK(verdict.n_accepted == GAMMA);
            CHECK(es_dist_prob(&s->target, verdict.next_token) > 0.0);
        }
        es_sampler_free(s);
        free(rows);
    }
}

static void lengths_are_refused(void) {
    enum { N = 10, SLOTS = 2 };
    es_sampler *s = sampler(N, SLOTS, all_off());
    float rows[4 * N] = {0};
    const int32_t tokens[4] = {0};
    const double coins[4] = {0};
    double accept[4], weight[5];
    for (size_t i = 0; i < SLOTS; i++) CHECK(es_dist_set_point(s, 0, &s->slots[i]) == ES_OK);
    for (size_t n = 0; n <= 3; n++)
        for (size_t n_rows = 0; n_rows <= 4; n_rows++)
            for (size_t n_prefix = 0; n_prefix <= 4; n_prefix++) {
                const es_draft d = {tokens, n, rows, n_rows, tokens, n_prefix};
                const bool fits = n <= SLOTS && n_rows == n + 1 && n_prefix >= n;
                const es_status want = fits ? ES_OK : ES_BAD_LENGTH;
                es_verdict verdict;
                const es_dist *next;
                CHECK(es_verify(s, &d, ES_BLOCK, coins, &verdict, NULL) == want);
                CHECK(es_acceptance(s, &d, ES_BLOCK, accept, weight) == want);
                CHECK(es_next(s, &d, n, 1.0, &next) == want);
                CHECK(es_next(s, &d, n + 1, 1.0, &next) == ES_BAD_LENGTH);
            }

    /* A bad row is found when it is needed, and leaves the sampler usable. */
    const es_draft d = {tokens, 2, rows, 3, tokens, 2};
    for (size_t bad = 0; bad < 3; bad++) {
        es_verdict verdict;
        rows[bad * N + 4] = NAN;
        for (int rule = ES_CHAIN; rule <= ES_BLOCK; rule++)
            CHECK(es_verify(s, &d, (es_rule)rule, coins, &verdict, NULL) == ES_NOT_FINITE);
        rows[bad * N + 4] = 0.0f;
        CHECK(es_verify(s, &d, ES_BLOCK, coins, &verdict, NULL) == ES_OK);
        check_scratch(s);
    }
    es_sampler_free(s);
}

/* ---- a million samples ---- */

enum { V = 3, GAMMA = 2, LENGTH = 3, N_SEQUENCES = 27, N_COINS = 2 * GAMMA + 1 + LENGTH };

/* A toy model: logits for each of the 1 + 3 + 9 prefixes shorter than three tokens. */
typedef struct toy {
    float logits[13][V];
} toy;

static toy random_toy(void) {
    toy model;
    for (size_t i = 0; i < 13; i++)
        for (size_t j = 0; j < V; j++) model.logits[i][j] = (float)(1.5 * random_normal(&state));
    return model;
}

static const float *logits_after(const toy *model, const int32_t *prefix, size_t n) {
    size_t index = n == 0 ? 0 : n == 1 ? 1 : 4;
    if (n == 1) index += (size_t)prefix[0];
    if (n == 2) index += (size_t)(V * prefix[0] + prefix[1]);
    return model->logits[index];
}

static double prob_of(const float *logits, int32_t token, double temperature) {
    double total = 0;
    for (size_t i = 0; i < V; i++) total += exp((double)logits[i] / temperature);
    return exp((double)logits[token] / temperature) / total;
}

/* The p-value of n samples against the target alone (Wilson-Hilferty's normal approximation).
 * `biased` drafts the likeliest token but verifies it as if it had been sampled from q. */
static double p_value(es_rule rule, bool biased, size_t n_runs) {
    const toy target = random_toy(), draft = random_toy();
    es_params params = all_off();
    params.temperature = 0.9f;
    es_sampler *s = sampler(V, GAMMA, params);
    size_t counts[N_SEQUENCES] = {0};
    for (size_t run = 0; run < n_runs; run++) {
        double coins[N_COINS];
        int32_t x[GAMMA + LENGTH];
        float rows[(GAMMA + 1) * V];
        es_coins(20261121, (uint64_t)run * N_COINS, coins, N_COINS);
        for (size_t i = 0; i < GAMMA; i++) {
            const float *row = logits_after(&draft, x, i);
            CHECK(es_filter(s, row, V, x, i, &s->slots[i]) == ES_OK);
            x[i] = es_dist_sample(&s->slots[i], coins[i]);
            if (biased) x[i] = row[0] >= row[1] && row[0] >= row[2] ? 0 : row[1] >= row[2] ? 1 : 2;
        }
        for (size_t i = 0; i <= GAMMA; i++) memcpy(rows + i * V, logits_after(&target, x, i), V * sizeof *rows);
        const es_draft d = {x, GAMMA, rows, GAMMA + 1, x, GAMMA};
        es_verdict verdict;
        CHECK(es_verify(s, &d, rule, coins + GAMMA, &verdict, NULL) == ES_OK);
        size_t n = verdict.n_accepted;
        x[n++] = verdict.next_token;
        for (; n < LENGTH; n++) { /* the target alone goes on */
            CHECK(es_filter(s, logits_after(&target, x, n), V, x, n, &s->target) == ES_OK);
            x[n] = es_dist_sample(&s->target, coins[2 * GAMMA + 1 + n]);
        }
        counts[(x[0] * V + x[1]) * V + x[2]]++;
    }
    es_sampler_free(s);

    double statistic = 0;
    for (int32_t i = 0; i < N_SEQUENCES; i++) {
        const int32_t x[3] = {i / 9, i / 3 % 3, i % 3};
        double expected = (double)n_runs;
        for (size_t j = 0; j < LENGTH; j++)
            expected *= prob_of(logits_after(&target, x, j), x[j], (double)params.temperature);
        statistic += ((double)counts[i] - expected) * ((double)counts[i] - expected) / expected;
    }
    const double k = N_SEQUENCES - 1, spread = 2.0 / (9.0 * k);
    return 0.5 * erfc((cbrt(statistic / k) - (1.0 - spread)) / sqrt(2.0 * spread));
}

static void chi_square(void) {
    const char *names[] = {"chain", "block"};
    for (int rule = ES_CHAIN; rule <= ES_BLOCK; rule++) {
        const double fair = p_value((es_rule)rule, false, 1000000);
        const double biased = p_value((es_rule)rule, true, 50000);
        printf("%s rule: p-value %.3f over a million samples; biased drafts: %.1e\n", names[rule], fair, biased);
        CHECK(fair > 1e-3);
        CHECK(biased < 1e-9);
    }
}

int main(void) {
    greedy_chains();
    everything_is_accepted_when_p_is_q();
    lengths_are_refused();
    chi_square();
    return 0;
}
