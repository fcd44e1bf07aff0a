/* Filters against a slow sort, sampling at its edges, residuals of every shape. */
#include "sampler.h"

#include "invariants.h"

static uint64_t state = 2;

/* ---- the slow filter: sorts everything, keeps everything in double ---- */

typedef struct entry {
    double key;
    float logit;
    int32_t id;
} entry;

static int best_first(const void *a, const void *b) {
    const entry *x = a, *y = b;
    return x->key != y->key ? (x->key > y->key ? -1 : 1) : (x->id > y->id) - (x->id < y->id);
}

static void sort(entry *e, size_t n) { qsort(e, n, sizeof *e, best_first); }

static double total_exp(const entry *e, size_t n, double max) {
    double total = 0;
    for (size_t i = 0; i < n; i++) total += exp((double)e[i].logit - max);
    return total;
}

/* Writes probabilities by id.  `nudge` moves every cut a little: where the outcome then changes, a
 * boundary is so near that rounding may decide it. */
static size_t slow_filter(const es_params *p, const float *row, size_t n, const int32_t *prefix, size_t n_prefix,
                          double nudge, double *probs) {
    entry *e = exact(n * sizeof *e);
    for (size_t i = 0; i < n; i++) {
        float x = row[i];
        const size_t last_n = p->penalty_last_n < 0 ? n_prefix : (size_t)p->penalty_last_n;
        size_t count = 0;
        for (size_t j = n_prefix > last_n ? n_prefix - last_n : 0; j < n_prefix; j++)
            count += prefix[j] == (int32_t)i;
        if (count) {
            x = x <= 0.0f ? x * p->repeat_penalty : x / p->repeat_penalty;
            x -= (float)count * p->frequency_penalty + p->presence_penalty;
        }
        e[i] = (entry){(double)x, x, (int32_t)i};
    }
    sort(e, n);
    const double max = (double)e[0].logit;
    size_t kept = p->top_k > 0 && (size_t)p->top_k < n ? (size_t)p->top_k : n;
    if (p->typical_p < 1.0f) {
        const double total = total_exp(e, kept, max);
        double entropy = nudge, sum = 0;
        for (size_t i = 0; i < kept; i++) {
            const double share = exp((double)e[i].logit - max) / total;
            if (share > 0) entropy -= share * log(share);
        }
        for (size_t i = 0; i < kept; i++) e[i].key = -fabs(entropy + (double)e[i].logit - max - log(total));
        sort(e, kept);
        size_t typical = 0;
        while (typical < kept && sum <= (double)p->typical_p * (1 + nudge))
            sum += exp((double)e[typical++].logit - max) / total;
        kept = typical;
        for (size_t i = 0; i < kept; i++) e[i].key = (double)e[i].logit;
        sort(e, kept);
    }
    const double first = (double)e[0].logit;
    if (p->top_p < 1.0f) {
        const double total = total_exp(e, kept, first);
        double sum = 0;
        size_t nucleus = 0;
        while (nucleus < kept && (nucleus == 0 || sum < (double)p->top_p * (1 + nudge) * total))
            sum += exp((double)e[nucleus++].logit - first);
        kept = nucleus;
    }
    if (p->min_p > 0.0f)
        while (kept > 1 && (double)e[kept - 1].logit < first + log((double)p->min_p) + nudge * (1 + fabs(first)))
            kept--;
    if (p->temperature <= 0.0f) kept = 1;
    double total = 0;
    const double scale = p->temperature > 0.0f ? 1.0 / (double)p->temperature : 1.0;
    for (size_t i = 0; i < n; i++) probs[i] = 0;
    for (size_t i = 0; i < kept; i++) total += exp(((double)e[i].logit - first) * scale);
    for (size_t i = 0; i < kept; i++) probs[e[i].id] = exp(((double)e[i].logit - first) * scale) / total;
    free(e);
    return kept;
}

static bool agree(const es_dist *d, const double *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (fabs(es_dist_prob(d, (int32_t)i) - want[i]) > 1e-6) return false;
    return true;
}

static es_params random_params(size_t kind) {
    es_params p = all_off();
    p.temperature = (float[]){0.0f, 0.3f, 0.8f, 1.0f, 2.5f}[random_below(&state, 5)];
    if (kind & 1) p.top_k = (int32_t[]){1, 2, 5, 40, 1000}[random_below(&state, 5)];
    if (kind & 2) p.top_p = (float[]){0.05f, 0.5f, 0.9f, 0.999f}[random_below(&state, 4)];
    if (kind & 4) p.min_p = (float[]){0.001f, 0.05f, 0.3f, 1.0f}[random_below(&state, 4)];
    if (kind & 8) p.typical_p = (float[]){0.1f, 0.7f, 0.95f}[random_below(&state, 3)];
    if (kind & 16) {
        p.penalty_last_n = (int32_t[]){-1, 0, 1, 3, 64}[random_below(&state, 5)];
        p.repeat_penalty = (float[]){1.0f, 1.1f, 0.7f}[random_below(&state, 3)];
        p.frequency_penalty = (float[]){0.0f, 0.5f, -0.25f}[random_below(&state, 3)];
        p.presence_penalty = (float[]){0.0f, 0.75f}[random_below(&state, 2)];
    }
    return p;
}

/* Whether the slow filter gives `dist`; if not, a cut must be so near that rounding may decide it. */
static bool agrees(const es_params *p, const float *row, size_t n, const int32_t *prefix, size_t n_prefix,
                   const es_dist *dist) {
    double *want = exact(n * sizeof *want), *nudged = exact(n * sizeof *nudged);
    slow_filter(p, row, n, prefix, n_prefix, 0.0, want);
    const bool same = agree(dist, want, n);
    bool is_near = same;
    for (int sign = -1; sign <= 1 && !same; sign += 2) {
        slow_filter(p, row, n, prefix, n_prefix, 3e-6 * sign, nudged);
        for (size_t i = 0; i < n; i++) is_near |= (nudged[i] > 0) != (want[i] > 0);
    }
    CHECK(is_near);
    free(want);
    free(nudged);
    return same;
}

static void filters_agree_with_the_slow_ones(size_t n_runs, size_t longest) {
    size_t n_near = 0;
    for (size_t run = 0; run < n_runs; run++) {
        const es_params params = random_params(run % 32);
        const size_t n = 1 + random_below(&state, longest), n_vocab = n + random_below(&state, 3);
        const size_t n_prefix = random_below(&state, 100);
        float *row = exact(n * sizeof *row), *some = exact(n * sizeof *some);
        int32_t *prefix = exact(n_prefix * sizeof *prefix), *ids = exact(n * sizeof *ids);
        fill_row(&state, run / 32 % N_ROW_KINDS, row, n);
        for (size_t i = 0; i < n_prefix; i++) prefix[i] = (int32_t)random_below(&state, 40) - 2;

        es_sampler *s = es_sampler_new(n_vocab, 1, &params, NULL, NULL, 0);
        CHECK(s && es_filter(s, row, n, prefix, n_prefix, NULL, 0, &s->slots[0]) == ES_OK);
        check_filtered(s, &s->slots[0]);
        check_scratch(s);
        n_near += !agrees(&params, row, n, prefix, n_prefix, &s->slots[0]);

        /* A row of some of the tokens is a row in which the others are impossible; a draft's may be sharper. */
        size_t n_some = 0;
        const size_t sure = random_below(&state, n);
        for (size_t i = 0; i < n; i++) {
            if (i == sure) row[i] = 1.0f;
            if (i != sure && random_bits(&state) % 3) {
                row[i] = -INFINITY;
            } else {
                some[n_some] = row[i];
                ids[n_some++] = (int32_t)i;
            }
        }
        const float ratio = (float[]){1.0f, 0.5f, 2.0f}[run / 7 % 3];
        es_params sharper = params;
        sharper.temperature *= ratio;
        CHECK(es_filter_draft(s, some, ids, n_some, (double)ratio, prefix, n_prefix, &s->slots[0]) == ES_OK);
        check_filtered(s, &s->slots[0]);
        check_scratch(s);
        n_near += !agrees(&sharper, row, n, prefix, n_prefix, &s->slots[0]);
        CHECK(es_filter_draft(s, row, NULL, n, (double)ratio, prefix, n_prefix, &s->slots[0]) == ES_OK);
        n_near += !agrees(&sharper, row, n, prefix, n_prefix, &s->slots[0]);
        es_sampler_free(s);
        free(row);
        free(some);
        free(ids);
        free(prefix);
    }
    CHECK(n_near <= n_runs / 25 + 1);
}

/* Top-k and min-p cut between logits, not sums: nothing is rounded and ties go to smaller ids. */
static void ties_are_ordered_by_id(void) {
    enum { N = 700 };
    float row[N];
    for (size_t i = 0; i < N; i++) row[i] = (float)(i % 7);
    es_params params = all_off();
    for (params.top_k = 1; params.top_k < N; params.top_k++) {
        es_sampler *s = es_sampler_new(N, 0, &params, NULL, NULL, 0);
        CHECK(s && es_filter(s, row, N, NULL, 0, NULL, 0, s->target) == ES_OK);
        CHECK(s->target->n == (size_t)params.top_k);
        for (size_t i = 0; i < s->target->n; i++)
            CHECK(s->target->ids[i] == (int32_t)(i % 100 * 7 + 6 - i / 100));
        es_sampler_free(s);
    }
}

static void refusals(void) {
    enum { N = 200 };
    for (size_t kind = 0; kind < 32; kind++) {
        const es_params params = random_params(kind);
        es_sampler *s = es_sampler_new(N, 2, &params, NULL, NULL, 0);
        float row[N + 1] = {0};
        CHECK(s);
        CHECK(es_filter(s, row, 0, NULL, 0, NULL, 0, s->target) == ES_BAD_LENGTH);
        CHECK(es_filter(s, row, N + 1, NULL, 0, NULL, 0, s->target) == ES_BAD_LENGTH);
        const int32_t wrong_ids[][2] = {{-1, 3}, {3, N}, {3, 3}, {4, 3}};
        for (size_t w = 0; w < 4; w++)
            CHECK(es_filter_draft(s, row, wrong_ids[w], 2, 1.0, NULL, 0, s->target) == ES_BAD_LENGTH);
        CHECK(es_filter_draft(s, row, wrong_ids[0], 0, 1.0, NULL, 0, s->target) == ES_BAD_LENGTH);
        for (size_t i = 0; i < N; i += 13) {
            row[i] = NAN;
            CHECK(es_filter(s, row, N, NULL, 0, NULL, 0, s->target) == ES_NOT_FINITE);
            row[i] = INFINITY;
            CHECK(es_filter(s, row, N, NULL, 0, NULL, 0, s->target) == ES_NOT_FINITE);
            row[i] = 0;
        }
        for (size_t i = 0; i < N; i++) row[i] = -INFINITY;
        CHECK(es_filter(s, row, N, NULL, 0, NULL, 0, s->target) == ES_NO_TOKEN);
        row[150] = -1e30f; /* the only possible token */
        CHECK(es_filter(s, row, N, NULL, 0, NULL, 0, s->target) == ES_OK);
        check_filtered(s, s->target);
        CHECK(es_dist_prob(s->target, 150) == 1.0);
        CHECK(es_dist_sample(s->target, 0.0) == 150 && es_dist_sample(s->target, 1 - 0x1p-53) == 150);

        es_dist *d = &s->slots[0];
        CHECK(es_dist_set_point(s, -1, d) == ES_BAD_LENGTH && es_dist_set_point(s, N, d) == ES_BAD_LENGTH);
        CHECK(es_dist_set_point(s, 0, d) == ES_OK && es_dist_prob(d, 0) == 1.0);
        CHECK(es_dist_set(s, row, 0, d) == ES_BAD_LENGTH && es_dist_set(s, row, N + 1, d) == ES_BAD_LENGTH);
        const float wrong[] = {NAN, INFINITY, -0.5f, 1.5f};
        for (size_t w = 0; w < 4; w++) {
            float probs[N] = {0.5f};
            probs[N - 1] = wrong[w];
            CHECK(es_dist_set(s, probs, N, d) == ES_NOT_FINITE);
        }
        const float nothing[N] = {0};
        CHECK(es_dist_set(s, nothing, N, d) == ES_NO_TOKEN);
        check_scratch(s);
        es_sampler_free(s);
    }
}

static void bias_and_extreme_temperatures(void) {
    const int32_t ids[] = {3, 5, 3};
    const float values[] = {1.0f, -INFINITY, 0.5f}, row[6] = {0, 0, 0, 0, 0, 9};
    es_params params = all_off();
    es_sampler *s = es_sampler_new(6, 0, &params, ids, values, 3);
    CHECK(s && es_filter(s, row, 6, NULL, 0, NULL, 0, s->target) == ES_OK);
    CHECK(es_dist_prob(s->target, 5) == 0.0);
    CHECK(fabs(es_dist_prob(s->target, 3) / es_dist_prob(s->target, 0) - exp(1.5)) < 1e-5);
    CHECK(es_filter(s, row, 3, NULL, 0, NULL, 0, s->target) == ES_OK); /* a shorter row lacks the biased ids */
    es_sampler_free(s);

    const float coldest[] = {1e-45f, 1e-40f, 1e-30f}; /* 1 / temperature overflows a float */
    for (size_t i = 0; i < 3; i++)
        for (params.top_k = 0; params.top_k <= 3; params.top_k += 3) {
            params.temperature = coldest[i];
            s = es_sampler_new(6, 0, &params, NULL, NULL, 0);
            CHECK(s && es_filter(s, row, 6, NULL, 0, NULL, 0, s->target) == ES_OK);
            check_filtered(s, s->target);
            CHECK(es_dist_prob(s->target, 5) > 0.999999);
            es_sampler_free(s);
        }
}

/* ---- sampling ---- */

static const double EDGES[] = {0.0, 0x1p-53, 0.25, 0.5, 1 - 0x1p-52, 1 - 0x1p-53};

/* Zero-probability heads, tails and holes are never sampled; the running sum decides. */
static void sampling_edges(void) {
    const es_params params = all_off();
    for (size_t run = 0; run < 4000; run++) {
        const size_t n = 1 + random_below(&state, 600);
        es_sampler *s = es_sampler_new(n, 1, &params, NULL, NULL, 0);
        CHECK(s);
        float *probs = exact(n * sizeof *probs);
        const size_t head = random_below(&state, n), tail = random_below(&state, n - head);
        double sum = 0;
        for (size_t i = 0; i < n; i++) {
            const bool possible = i >= head && i + tail < n && (i == head || random_bits(&state) % 4);
            probs[i] = possible ? (float)(random_unit(&state) + 1e-3) : 0.0f;
            if (run % 5 == 0 && possible) probs[i] = 1e-30f; /* nothing but the last would be left */
            sum += (double)probs[i];
        }
        for (size_t i = 0; i < n; i++) probs[i] = (float)((double)probs[i] / sum);
        es_dist *d = &s->slots[0];
        CHECK(es_dist_set(s, probs, n, d) == ES_OK);
        check_dist(s, d);
        for (size_t c = 0; c < 12; c++) {
            const double coin = c < 6 ? EDGES[c] : random_unit(&state);
            const int32_t token = es_dist_sample(d, coin);
            CHECK(token >= 0 && (size_t)token < n && probs[token] > 0.0f);
            double below = 0;
            for (int32_t i = 0; i < token; i++) below += (double)probs[i];
            CHECK(below <= coin * d->total + 1e-12);
            CHECK(below + (double)probs[token] > coin * d->total - 1e-12);
        }
        CHECK(es_dist_sample(d, 0.0) == (int32_t)head);
        es_sampler_free(s);
        free(probs);
    }
}

static void sampling_over_dense_filters(void) { /* block sums are rounded apart from their entries */
    const es_params params = all_off();
    for (size_t run = 0; run < 600; run++) {
        const size_t n = run == 0 ? 151936 : 1 + random_below(&state, 900);
        float *row = exact(n * sizeof *row);
        fill_row(&state, run % N_ROW_KINDS, row, n);
        es_sampler *s = es_sampler_new(n, 0, &params, NULL, NULL, 0);
        CHECK(s && es_filter(s, row, n, NULL, 0, NULL, 0, s->target) == ES_OK);
        check_filtered(s, s->target);
        for (size_t c = 0; c < 20; c++) {
            const double coin = c < 6 ? EDGES[c] : random_unit(&state);
            const int32_t token = es_dist_sample(s->target, coin);
            CHECK(token >= 0 && (size_t)token < n && s->target->probs[token] > 0.0f);
            double below = 0;
            for (int32_t i = 0; i < token; i++) below += (double)s->target->probs[i];
            CHECK(below <= coin + 1e-5 && below + (double)s->target->probs[token] >= coin - 1e-5);
        }
        es_sampler_free(s);
        free(row);
    }
}

/* ---- residual ---- */

enum { Q_SPARSE, Q_DENSE, Q_SHORTER, Q_POINT, N_Q_KINDS };

static void residuals(void) {
    for (size_t run = 0; run < 3000; run++) {
        es_params params = all_off();
        const size_t q_kind = run % N_Q_KINDS;
        const bool p_sparse = run / N_Q_KINDS % 2;
        if (p_sparse) params.top_k = 1 + (int32_t)random_below(&state, 50);
        const size_t n = 2 + random_below(&state, 400), n_q = q_kind == Q_SHORTER ? 1 + random_below(&state, n) : n;
        float *row = exact(n * sizeof *row), *probs = exact(n_q * sizeof *probs);
        es_sampler *s = es_sampler_new(n, 1, &params, NULL, NULL, 0);
        CHECK(s);
        es_dist *q = &s->slots[0];
        fill_row(&state, random_below(&state, N_ROW_KINDS), row, n);
        if (q_kind == Q_SPARSE) {
            s->params.top_k = 1 + (int32_t)random_below(&state, 50);
            CHECK(es_filter(s, row, n, NULL, 0, NULL, 0, q) == ES_OK);
            s->params.top_k = params.top_k;
        } else if (q_kind == Q_POINT) {
            CHECK(es_dist_set_point(s, (int32_t)random_below(&state, n), q) == ES_OK);
        } else {
            for (size_t i = 0; i < n_q; i++) probs[i] = (float)((random_unit(&state) + 1e-6) / (double)n_q);
            CHECK(es_dist_set(s, probs, n_q, q) == ES_OK);
        }
        fill_row(&state, random_below(&state, N_ROW_KINDS), row, n);
        CHECK(es_filter(s, row, n, NULL, 0, NULL, 0, s->target) == ES_OK);
        double *before = exact(n * sizeof *before);
        double weight = random_bits(&state) % 2 ? 1.0 : random_unit(&state);
        for (size_t time = 0; time < 2; time++) { /* what is left can be taken from again */
            for (int32_t i = 0; (size_t)i < n; i++) before[i] = es_dist_prob(s->target, i);
            const double left = es_residual(s, s->target, q, weight);
            check_scratch(s);
            double total = 0;
            for (int32_t i = 0; (size_t)i < n; i++) {
                const double q_i = es_dist_prob(q, i), got = es_dist_prob(s->target, i);
                const double want = fmax(0.0, weight * before[i] - q_i);
                CHECK(left > 0.0 || got == before[i]);
                if (left == 0.0) continue;
                CHECK(fabs(got - want) <= 2e-7 * (weight * before[i] + q_i) + 1e-44); /* half a subnormal step */
                CHECK(got == 0.0 || before[i] > 0.0);
                total += got;
            }
            if (left == 0.0) continue;
            CHECK(fabs(left - total) <= 1e-6 * total + 1e-30 && s->target->total == left);
            check_dist(s, s->target);
            for (size_t c = 0; c < 6; c++)
                CHECK(es_dist_prob(s->target, es_dist_sample(s->target, EDGES[c])) > 0.0);
            weight = random_unit(&state) / left;
        }
        free(before);
        es_sampler_free(s);
        free(row);
        free(probs);
    }
}

/* ---- without replacement ---- */

static void without(void) {
    for (size_t run = 0; run < 3000; run++) {
        es_params params = all_off();
        if (run % 2) params.top_k = 1 + (int32_t)random_below(&state, 20);
        const size_t n = 1 + random_below(&state, 400), n_q = run % 3 ? n : 1 + random_below(&state, n);
        es_sampler *s = es_sampler_new(n, 2, &params, NULL, NULL, 0);
        CHECK(s);
        es_dist *q = &s->slots[0], *out = run % 5 ? &s->slots[1] : q;
        float *row = exact(n_q * sizeof *row);
        double *want = exact(n * sizeof *want), left = 0;
        fill_row(&state, random_below(&state, N_ROW_KINDS), row, n_q);
        CHECK(es_filter(s, row, n_q, NULL, 0, NULL, 0, q) == ES_OK);
        const int32_t token =
            random_bits(&state) % 2 ? es_dist_sample(q, random_unit(&state)) : (int32_t)random_below(&state, n);
        for (int32_t i = 0; (size_t)i < n; i++) left += want[i] = i == token ? 0.0 : es_dist_prob(q, i);
        const double before = es_dist_prob(q, token);
        const es_status status = es_dist_without(s, q, token, out);
        CHECK(status == (left >= 0x1p-126 ? ES_OK : ES_NO_TOKEN));
        if (status == ES_OK) {
            check_filtered(s, out);
            CHECK(es_dist_prob(out, token) == 0.0);
            for (int32_t i = 0; (size_t)i < n; i++)
                CHECK(fabs(es_dist_prob(out, i) - want[i] / left) <= 1e-6 * want[i] / left + 1e-44);
        } else {
            CHECK(es_dist_prob(q, token) == before);
        }
        CHECK(es_dist_without(s, q, -1, out) == ES_BAD_LENGTH);
        CHECK(es_dist_without(s, q, (int32_t)n, out) == ES_BAD_LENGTH);
        check_scratch(s);
        es_sampler_free(s);
        free(row);
        free(want);
    }
}

/* A history in two pieces is one history. */
static void histories_join(void) {
    enum { N = 50, LENGTH = 40 };
    for (size_t run = 0; run < 500; run++) {
        const es_params params = random_params(16);
        es_sampler *s = es_sampler_new(N, 1, &params, NULL, NULL, 0);
        CHECK(s);
        float row[N];
        fill_row(&state, 0, row, N);
        int32_t history[LENGTH];
        for (size_t i = 0; i < LENGTH; i++) history[i] = (int32_t)random_below(&state, N + 2) - 1;
        const size_t n = random_below(&state, LENGTH + 1), n_prefix = random_below(&state, n + 1);
        int32_t *prefix = exact(n_prefix * sizeof *prefix), *path = exact((n - n_prefix) * sizeof *path);
        memcpy(prefix, history, n_prefix * sizeof *prefix);
        memcpy(path, history + n_prefix, (n - n_prefix) * sizeof *path);
        CHECK(es_filter(s, row, N, history, n, NULL, 0, s->target) == ES_OK);
        CHECK(es_filter(s, row, N, prefix, n_prefix, path, n - n_prefix, &s->slots[0]) == ES_OK);
        for (int32_t i = 0; i < N; i++) CHECK(es_dist_prob(s->target, i) == es_dist_prob(&s->slots[0], i));
        check_scratch(s);
        es_sampler_free(s);
        free(prefix);
        free(path);
    }
}

/* Rows in which a grammar, or a draft without these tokens, has left few at finite logits. */
static void the_likeliest_of_masked_rows(void) {
    enum { N = 40000, K = 64 };
    const es_params params = {.top_p = 1.0f, .typical_p = 1.0f};
    float *row = exact(N * sizeof *row);
    double probs[K];
    int32_t ids[K];
    for (size_t n_left = 0; n_left <= 3; n_left++) {
        es_sampler *s = es_sampler_new(N, 0, &params, NULL, NULL, 0);
        for (size_t i = 0; i < N; i++) row[i] = -INFINITY;
        for (size_t i = 0; i < n_left; i++) row[i * 999] = (float)(2 * (i + 1));
        size_t found = 99;
        const es_status status = es_likeliest(s, row, N, K, ids, probs, &found);
        CHECK(status == (n_left ? ES_OK : ES_NO_TOKEN));
        if (n_left) CHECK(found == n_left && ids[0] == (int32_t)(999 * (n_left - 1)));
        CHECK(es_likeliest(s, row, N, 0, ids, probs, &found) == ES_BAD_LENGTH);
        row[7] = NAN;
        CHECK(es_likeliest(s, row, N, K, ids, probs, &found) == ES_NOT_FINITE);
        check_scratch(s);
        es_sampler_free(s);
    }
    free(row);
}

int main(void) {
    filters_agree_with_the_slow_ones(12000, 400);
    filters_agree_with_the_slow_ones(64, 20000);
    ties_are_ordered_by_id();
    refusals();
    bias_and_extreme_temperatures();
    sampling_edges();
    sampling_over_dense_filters();
    residuals();
    without();
    histories_join();
    the_likeliest_of_masked_rows();
    return 0;
}
