/* Accept, resample, bonus: greedy trees, p = q, lengths, and half a million samples of each rule. */
#include "verify.h"

#include "invariants.h"
#include "philox.h"

static uint64_t state = 3;

static const es_rule RULES[] = {{false, 1.0}, {true, 1.0}};

static es_sampler *sampler(size_t n_vocab, size_t n_slots, es_params params) {
    es_sampler *s = es_sampler_new(n_vocab, n_slots, &params, NULL, NULL, 0);
    CHECK(s);
    return s;
}

/* The path goes down as long as a child is the likeliest token; coins decide nothing. */
static void greedy_trees(void) {
    enum { N = 200, NODES = 8 };
    es_params params = all_off();
    params.temperature = 0.0f;
    es_sampler *s = sampler(N, NODES, params);
    for (size_t run = 0; run < 4000; run++) {
        float *rows = exact((NODES + 1) * N * sizeof *rows);
        int32_t best[NODES + 1], tokens[NODES], parents[NODES], slots[NODES], path[NODES];
        double coins[NODES + 1];
        const size_t n = random_below(&state, NODES + 1);
        for (size_t i = 0; i <= n; i++) {
            best[i] = (int32_t)random_below(&state, N);
            for (size_t j = 0; j < N; j++) rows[i * N + j] = -(float)random_unit(&state) - 0.001f;
            rows[i * N + (size_t)best[i]] = 0.0f;
            coins[i] = run % 2 ? random_unit(&state) : 1 - 0x1p-53;
        }
        random_tree(&state, parents, n);
        for (size_t i = 0; i < n; i++) {
            tokens[i] = (best[parents[i] + 1] + (random_bits(&state) % 3 == 0)) % N;
            slots[i] = random_bits(&state) % 2 ? (int32_t)i : -1;
            CHECK(es_dist_set_point(s, tokens[i], &s->slots[i]) == ES_OK);
        }
        size_t n_path = 0;
        int32_t at = -1;
        for (int32_t i = 0; (size_t)i < n; i++)
            if (parents[i] == at && tokens[i] == best[at + 1]) path[n_path++] = at = i;
        const es_draft d = {tokens, parents, slots, n, rows, n + 1, NULL, 0};
        for (size_t rule = 0; rule < 2; rule++) {
            es_verdict verdict;
            CHECK(es_verify(s, &d, RULES[rule], coins, &verdict) == ES_OK);
            CHECK(verdict.n_accepted == n_path && memcmp(verdict.path, path, n_path * sizeof *path) == 0);
            CHECK(verdict.next_token == best[at + 1]);
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
        int32_t draft[GAMMA], parents[GAMMA], slots[GAMMA];
        double coins[GAMMA + 1];
        chain_of(parents, slots, GAMMA);
        for (size_t i = 0; i <= GAMMA; i++) {
            fill_row(&state, random_below(&state, N_ROW_KINDS), rows + i * n, n);
            coins[i] = run % 2 ? random_unit(&state) : 1 - 0x1p-53;
        }
        for (size_t i = 0; i < GAMMA; i++) {
            CHECK(es_filter(s, rows + i * n, n, draft, i, NULL, 0, &s->slots[i]) == ES_OK);
            draft[i] = es_dist_sample(&s->slots[i], random_unit(&state));
        }
        const es_draft d = {draft, parents, slots, GAMMA, rows, GAMMA + 1, NULL, 0};
        for (size_t rule = 0; rule < 2; rule++) {
            es_verdict verdict;
            CHECK(es_verify(s, &d, RULES[rule], coins, &verdict) == ES_OK);
            CHECK(verdict.n_accepted == GAMMA && verdict.n_judged == GAMMA);
            for (size_t i = 0; i < GAMMA; i++) CHECK(verdict.judged[i].p == verdict.judged[i].q);
            CHECK(es_filter(s, rows + GAMMA * n, n, NULL, 0, NULL, 0, s->target) == ES_OK);
            CHECK(es_dist_prob(s->target, verdict.next_token) > 0.0);
        }
        es_sampler_free(s);
        free(rows);
    }
}

static void lengths_are_refused(void) {
    enum { N = 10, SLOTS = 2 };
    es_sampler *s = sampler(N, SLOTS, all_off());
    float rows[4 * N] = {0};
    const int32_t tokens[3] = {0};
    int32_t parents[3], slots[3];
    const double coins[4] = {0};
    es_verdict verdict;
    double chance;
    const es_dist *next;
    chain_of(parents, slots, 3);
    for (size_t i = 0; i < SLOTS; i++) CHECK(es_dist_set_point(s, 0, &s->slots[i]) == ES_OK);
    for (size_t n = 0; n <= 3; n++)
        for (size_t n_rows = 0; n_rows <= 4; n_rows++) {
            const es_draft d = {tokens, parents, slots, n, rows, n_rows, tokens, 1};
            const es_status want = n <= SLOTS && n_rows == n + 1 ? ES_OK : ES_BAD_LENGTH;
            CHECK(es_verify(s, &d, ES_BLOCK, coins, &verdict) == want);
            for (int32_t end = -1; end < (int32_t)n; end++)
                CHECK(es_outcome(s, &d, ES_BLOCK, end, &chance, &next) == want);
            CHECK(es_outcome(s, &d, ES_BLOCK, -2, &chance, &next) == ES_BAD_LENGTH);
            CHECK(es_outcome(s, &d, ES_BLOCK, (int32_t)n, &chance, &next) == ES_BAD_LENGTH);
        }

    /* A bad row is found when it is needed, and leaves the sampler usable. */
    const es_draft d = {tokens, parents, slots, 2, rows, 3, NULL, 0};
    for (size_t bad = 0; bad < 3; bad++) {
        rows[bad * N + 4] = NAN;
        for (size_t rule = 0; rule < 2; rule++)
            CHECK(es_verify(s, &d, RULES[rule], coins, &verdict) == ES_NOT_FINITE);
        rows[bad * N + 4] = 0.0f;
        CHECK(es_verify(s, &d, ES_BLOCK, coins, &verdict) == ES_OK);
        check_scratch(s);
    }

    /* So is a token that its slot cannot have given. */
    CHECK(es_dist_set_point(s, 1, &s->slots[1]) == ES_OK);
    for (size_t rule = 0; rule < 2; rule++) CHECK(es_verify(s, &d, RULES[rule], coins, &verdict) == ES_NOT_DRAWN);
    es_sampler_free(s);
}

/* ---- half a million samples ---- */

enum { V = 3, MOST_NODES = 7, LENGTH = 3, N_SEQUENCES = 27, N_COINS = 2 * MOST_NODES + 1 + LENGTH,
       N_SAMPLES = SAMPLES(500000) };

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

/* Each row of a shape: the parent, and how the token is found.  Nodes that cannot be made are left out. */
typedef enum how { SAMPLED, WITHOUT_PREVIOUS, TOP, BIASED } how;

typedef struct shape {
    const char *name;
    size_t n;
    int32_t parents[MOST_NODES];
    how hows[MOST_NODES];
} shape;

static int32_t top_of(const float *row) {
    return row[0] >= row[1] && row[0] >= row[2] ? 0 : row[1] >= row[2] ? 1 : 2;
}

/* The p-value of n samples against the target alone (Wilson-Hilferty's normal approximation).  BIASED
 * drafts the likeliest token but verifies it as if it had been sampled from q. */
static double p_value(const shape *shape, es_rule rule, size_t n_runs) {
    const toy target = random_toy(), draft = random_toy();
    es_params params = all_off();
    params.temperature = 0.9f;
    es_sampler *s = sampler(V, MOST_NODES, params);
    size_t counts[N_SEQUENCES] = {0};
    for (size_t run = 0; run < n_runs; run++) {
        double coins[N_COINS];
        es_coins(20261121, (uint64_t)run * N_COINS, coins, N_COINS);
        int32_t tokens[MOST_NODES], parents[MOST_NODES], slots[MOST_NODES], place[MOST_NODES];
        int32_t paths[MOST_NODES + 1][LENGTH]; /* tokens on the way to each node, of which there are */
        size_t depths[MOST_NODES + 1] = {0}, n = 0;
        float rows[(MOST_NODES + 1) * V];
        memcpy(rows, logits_after(&target, NULL, 0), V * sizeof *rows);
        for (size_t i = 0; i < shape->n; i++) {
            place[i] = -2; /* left out */
            const int32_t parent = shape->parents[i] < 0 ? -1 : place[shape->parents[i]];
            if (parent == -2) continue;
            const size_t depth = depths[parent + 1];
            const float *row = logits_after(&draft, paths[parent + 1], depth);
            es_dist *q = &s->slots[n];
            slots[n] = (int32_t)n;
            if (shape->hows[i] == WITHOUT_PREVIOUS) {
                const int32_t previous = place[i - 1]; /* a leaf, so this node's sibling */
                if (es_dist_without(s, &s->slots[previous], tokens[previous], q) != ES_OK) continue;
            } else {
                CHECK(es_filter(s, row, V, paths[parent + 1], depth, NULL, 0, q) == ES_OK);
            }
            tokens[n] = es_dist_sample(q, coins[i]);
            if (shape->hows[i] == TOP || shape->hows[i] == BIASED) tokens[n] = top_of(row);
            if (shape->hows[i] == TOP) slots[n] = -1;
            parents[n] = parent;
            memcpy(paths[n + 1], paths[parent + 1], sizeof *paths);
            paths[n + 1][depth] = tokens[n];
            depths[n + 1] = depth + 1;
            memcpy(rows + (n + 1) * V, logits_after(&target, paths[n + 1], depth + 1), V * sizeof *rows);
            place[i] = (int32_t)n++;
        }
        const es_draft d = {tokens, parents, slots, n, rows, n + 1, NULL, 0};
        es_verdict verdict;
        CHECK(es_verify(s, &d, rule, coins + MOST_NODES, &verdict) == ES_OK);
        int32_t x[LENGTH];
        size_t length = verdict.n_accepted;
        for (size_t i = 0; i < length; i++) x[i] = tokens[verdict.path[i]];
        x[length++] = verdict.next_token;
        for (; length < LENGTH; length++) { /* the target alone goes on */
            CHECK(es_filter(s, logits_after(&target, x, length), V, x, length, NULL, 0, s->target) == ES_OK);
            x[length] = es_dist_sample(s->target, coins[2 * MOST_NODES + 1 + length]);
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
    static const shape chain = {"chain", 2, {-1, 0}, {SAMPLED, SAMPLED}},
                       tree = {"tree",
                               7,
                               {-1, 0, 0, -1, 3, -1, 5},
                               {SAMPLED, SAMPLED, WITHOUT_PREVIOUS, SAMPLED, TOP, TOP, SAMPLED}},
                       biased_chain = {"biased chain", 2, {-1, 0}, {BIASED, BIASED}},
                       biased_tree = {"biased tree", 3, {-1, 0, -1}, {SAMPLED, BIASED, BIASED}};
    for (size_t rule = 0; rule < 2; rule++) {
        const char *name = RULES[rule].block ? "block" : "chain";
        const shape *fair[] = {&chain, &tree}, *biased[] = {&biased_chain, &biased_tree};
        for (size_t i = 0; i < 2; i++) {
            const double good = p_value(fair[i], RULES[rule], N_SAMPLES);
            const double bad = p_value(biased[i], RULES[rule], 50000);
            printf("%s rule, %s: p-value %.3f over %d samples; %s: %.1e\n", name, fair[i]->name, good,
                   N_SAMPLES, biased[i]->name, bad);
            CHECK(good > 1e-3);
            CHECK(bad < 1e-9);
        }
    }
}

int main(void) {
    greedy_trees();
    everything_is_accepted_when_p_is_q();
    lengths_are_refused();
    chi_square();
    return 0;
}
