#include "sampler.h"

#include "philox.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef ES_CALLOC /* the tests put an allocator here that fails */
#define ES_CALLOC calloc
#endif

static bool dry_on(const es_params *p) {
    return p->dry_multiplier != 0.0f && p->dry_base >= 1.0f && p->dry_penalty_last_n != 0;
}

/* ---- memory: one block, cut into 64-byte aligned pieces ---- */

typedef struct arena {
    unsigned char *base; /* NULL while the size is being counted */
    size_t used;
} arena;

/* More than this no allocator gives; a sum that would wrap round sticks here. */
#define MOST_BYTES (SIZE_MAX / 2)

static void *take(arena *a, size_t n, size_t size) {
    void *piece = a->base ? a->base + a->used : NULL;
    const bool fits = a->used < MOST_BYTES && n < (MOST_BYTES - a->used) / size;
    a->used = fits ? a->used + (n * size + 63) / 64 * 64 : MOST_BYTES;
    return piece;
}

static es_dist *take_dists(arena *a, size_t n, size_t n_vocab) {
    es_dist *dists = take(a, n, sizeof *dists), unplaced;
    for (size_t i = 0; i < n; i++) {
        es_dist *dist = a->base ? &dists[i] : &unplaced;
        dist->ids = take(a, n_vocab, sizeof *dist->ids);
        dist->probs = take(a, n_vocab, sizeof *dist->probs);
        dist->block_sum = take(a, es_n_blocks(n_vocab), sizeof *dist->block_sum);
    }
    return dists;
}

static void take_all(arena *a, es_sampler *s, int32_t **bias_ids, float **bias_values, int32_t **breakers) {
    *bias_ids = take(a, s->n_bias, sizeof **bias_ids);
    *bias_values = take(a, s->n_bias, sizeof **bias_values);
    *breakers = take(a, s->params.n_dry_breakers, sizeof **breakers);
    s->breaker_at = take(a, s->params.n_dry_breakers ? s->n_vocab : 0, sizeof *s->breaker_at);
    s->repeats = take(a, dry_on(&s->params) ? ES_LONGEST_REPEAT : 0, sizeof *s->repeats);
    s->adjusted = take(a, s->n_vocab, sizeof *s->adjusted);
    s->scattered = take(a, s->n_vocab, sizeof *s->scattered);
    s->counts = take(a, s->n_vocab, sizeof *s->counts);
    s->block_max = take(a, es_n_blocks(s->n_vocab), sizeof *s->block_max);
    s->candidates = take(a, s->n_vocab, sizeof *s->candidates);
    s->spare_sums = take(a, es_n_blocks(s->n_vocab), sizeof *s->spare_sums);
    s->path = take(a, s->n_slots, sizeof *s->path);
    s->ends = take(a, s->n_slots, sizeof *s->ends);
    s->judged = take(a, s->n_slots, sizeof *s->judged);
    s->frames = take(a, s->n_slots + 1, sizeof *s->frames);
    s->target = take_dists(a, s->n_slots + 1, s->n_vocab);
    s->slots = take_dists(a, s->n_slots, s->n_vocab);
}

es_sampler *es_sampler_new(size_t n_vocab, size_t n_slots, const es_params *params, const int32_t *bias_ids,
                           const float *bias_values, size_t n_bias) {
    es_sampler *s = ES_CALLOC(1, sizeof *s);
    if (!s) return NULL;
    s->rows = es_rows_best();
    s->params = *params;
    s->n_vocab = n_vocab;
    s->n_slots = n_slots;
    s->n_bias = n_bias;

    int32_t *own_ids, *own_breakers;
    float *own_values;
    arena a = {0};
    take_all(&a, s, &own_ids, &own_values, &own_breakers);
    s->memory = a.used < MOST_BYTES ? ES_CALLOC(1, a.used + 64) : NULL;
    if (!s->memory) {
        free(s);
        return NULL;
    }
    a = (arena){.base = (unsigned char *)(((uintptr_t)s->memory + 63) & ~(uintptr_t)63)};
    take_all(&a, s, &own_ids, &own_values, &own_breakers);
    if (n_bias) {
        memcpy(own_ids, bias_ids, n_bias * sizeof *own_ids);
        memcpy(own_values, bias_values, n_bias * sizeof *own_values);
    }
    s->bias_ids = own_ids;
    s->bias_values = own_values;
    for (size_t i = params->n_dry_breakers; i-- > 0;) {
        own_breakers[i] = params->dry_breakers[i];
        const bool is_head = own_breakers[i] >= 0 && (i == 0 || params->dry_breakers[i - 1] < 0);
        if (is_head) s->breaker_at[own_breakers[i]] = (int32_t)i + 1; /* at last that of the first sequence */
    }
    s->params.dry_breakers = own_breakers;
    return s;
}

void es_sampler_free(es_sampler *s) {
    if (!s) return;
    free(s->memory);
    free(s);
}

/* ---- candidates: a binary heap, the best (largest key, then smallest id) at the root ---- */

static bool better(es_candidate a, es_candidate b) {
    return a.key > b.key || (a.key == b.key && a.id < b.id);
}

static void sift_down(es_candidate *heap, size_t n, size_t i) {
    const es_candidate moving = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && better(heap[child + 1], heap[child])) child++;
        if (!better(heap[child], moving)) break;
        heap[i] = heap[child];
    }
    heap[i] = moving;
}

static void heapify(es_candidate *heap, size_t n) {
    for (size_t i = n / 2; i-- > 0;) sift_down(heap, n, i);
}

/* Moves the best of heap[0..n) to heap[n - 1] and returns it. */
static es_candidate pop(es_candidate *heap, size_t n) {
    const es_candidate best = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = best;
    sift_down(heap, n - 1, 0);
    return best;
}

/* Popping leaves the best at the end, in reverse: turn the array round to have them in front. */
static void turn_round(es_candidate *c, size_t n) {
    for (size_t i = 0; i < n / 2; i++) {
        const es_candidate swap = c[i];
        c[i] = c[n - 1 - i];
        c[n - 1 - i] = swap;
    }
}

/* Gathers the tokens whose logit reaches `least`, looking only into blocks that hold one. */
static size_t gather(es_sampler *s, const float *row, size_t n, float least) {
    size_t found = 0;
    for (size_t b = 0; b < es_n_blocks(n); b++) {
        if (!(s->block_max[b] >= least)) continue;
        const size_t end = (b + 1) * ES_BLOCK_LEN < n ? (b + 1) * ES_BLOCK_LEN : n;
        for (size_t i = b * ES_BLOCK_LEN; i < end; i++)
            if (row[i] >= least) s->candidates[found++] = (es_candidate){row[i], (int32_t)i};
    }
    return found;
}

/* The k likeliest tokens, best first; fewer when the others are at -infinity.  The k-th largest block maximum
 * is a lower bound of the k-th largest logit, so only blocks that reach it are looked into. */
static size_t top_k(es_sampler *s, const float *row, size_t n, size_t k) {
    const size_t n_blocks = es_n_blocks(n);
    float least = -FLT_MAX; /* a grammar leaves few tokens: what it forbids is not looked at */
    if (k < n_blocks) {
        for (size_t b = 0; b < n_blocks; b++)
            s->candidates[b] = (es_candidate){s->block_max[b], (int32_t)b};
        heapify(s->candidates, n_blocks);
        for (size_t i = 0; i < k; i++) least = (float)pop(s->candidates, n_blocks - i).key;
        if (least < -FLT_MAX) least = -FLT_MAX;
    }
    const size_t found = gather(s, row, n, least);
    if (k > found) k = found;
    heapify(s->candidates, found);
    for (size_t i = 0; i < k; i++) pop(s->candidates, found - i);
    turn_round(s->candidates, found);
    return k;
}

/* How many of the first n candidates, in their order, bring the running sum of
 * exp(logit - max) to share * total. */
static size_t nucleus(const es_candidate *c, size_t n, double max, double total, double share) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += exp(c[i].key - max);
        if (sum >= share * total) return i + 1;
    }
    return n;
}

static double sum_exp(const es_candidate *c, size_t n, double max) {
    double total = 0;
    for (size_t i = 0; i < n; i++) total += exp(c[i].key - max);
    return total;
}

/* Candidates by distance from the maximum: bins of 1/8, the last for all beyond 16. */
enum { N_BINS = 16 * 8 + 1 };

static size_t bin_of(es_candidate c, double max) {
    const double bin = (max - c.key) * 8.0;
    return bin < N_BINS - 1 ? (size_t)bin : N_BINS - 1;
}

/* Top-p over the whole vocabulary, in no particular order.  Gathers the tokens within 8 of the
 * maximum, then more, until they hold the mass; sums them by bins, whose order is known, and sorts
 * the bin in which the cut falls. */
static size_t top_p(es_sampler *s, const float *row, size_t n, float max, double share) {
    es_candidate *c = s->candidates;
    const double goal = share * s->rows->exp_sum(row, n, max);
    double mass[N_BINS], sum;
    size_t found;
    float reach = 8.0f;
    do {
        found = gather(s, row, n, reach <= 16.0f ? max - reach : -INFINITY);
        memset(mass, 0, sizeof mass);
        for (size_t i = 0; i < found; i++) mass[bin_of(c[i], max)] += exp(c[i].key - (double)max);
        sum = 0;
        for (size_t b = 0; b < N_BINS; b++) sum += mass[b];
        reach += 2.0f;
    } while (sum < goal && found < n);

    size_t cut = 0;
    for (sum = 0; cut < N_BINS - 1 && sum + mass[cut] < goal; cut++) sum += mass[cut];
    size_t kept = 0, in_cut = 0; /* c[0..kept) lies above the cut's bin, the next in_cut within it */
    for (size_t i = 0; i < found; i++) {
        const es_candidate moving = c[i];
        const size_t bin = bin_of(moving, max);
        if (bin > cut) continue;
        c[i] = c[kept + in_cut];
        c[kept + in_cut] = moving;
        if (bin == cut) {
            in_cut++;
        } else {
            c[kept + in_cut] = c[kept];
            c[kept++] = moving;
        }
    }
    heapify(c + kept, in_cut);
    size_t popped = 0;
    while (popped < in_cut && (kept + popped == 0 || sum < goal))
        sum += exp(pop(c + kept, in_cut - popped++).key - (double)max);
    turn_round(c + kept, in_cut);
    return kept + popped;
}

static double entropy_of(const es_candidate *c, size_t n, double max, double log_total) {
    double entropy = 0;
    for (size_t i = 0; i < n; i++) {
        const double log_p = c[i].key - max - log_total;
        if (log_p > -700.0) entropy -= exp(log_p) * log_p; /* below that p log p is 0 */
    }
    return entropy;
}

/* Locally typical sampling (Meister et al., arXiv 2202.00666): the tokens whose surprise is
 * nearest to the entropy, until their mass exceeds typical_p.  Leaves the kept candidates keyed by
 * logit, best first. */
static size_t typical(es_sampler *s, const float *row, size_t n, double max, double share) {
    es_candidate *c = s->candidates;
    const double log_total = log(sum_exp(c, n, max));
    const double entropy = entropy_of(c, n, max, log_total);
    for (size_t i = 0; i < n; i++) c[i].key = -fabs(entropy + (c[i].key - max - log_total));
    heapify(c, n);
    double sum = 0;
    size_t kept = 0;
    while (kept < n && !(sum > share)) {
        const es_candidate next = pop(c, n - kept++);
        sum += exp((double)row[next.id] - max - log_total);
    }
    turn_round(c, n);
    for (size_t i = 0; i < kept; i++) c[i].key = row[c[i].id];
    heapify(c, kept);
    for (size_t i = 0; i < kept; i++) pop(c, kept - i);
    turn_round(c, kept);
    return kept;
}

static void set_sparse(es_dist *out, const es_candidate *c, size_t n, double max, double scale) {
    double total = 0;
    for (size_t i = 0; i < n; i++) {
        out->probs[i] = (float)exp((c[i].key - max) * scale);
        total += (double)out->probs[i];
    }
    out->dense = false;
    out->n = n;
    out->total = 0;
    for (size_t i = 0; i < n; i++) {
        out->ids[i] = c[i].id;
        out->probs[i] = (float)((double)out->probs[i] / total);
        out->total += (double)out->probs[i];
    }
}

static bool penalties_on(const es_params *p) {
    return p->penalty_last_n != 0 &&
           (p->repeat_penalty != 1.0f || p->frequency_penalty != 0.0f || p->presence_penalty != 0.0f);
}

/* Where in a row the logit of `token` stands; n if nowhere.  Entry i is that of token ids[i], or of i. */
static size_t place_of(const int32_t *ids, size_t n, int32_t token) {
    if (!ids) return token >= 0 && (size_t)token < n ? (size_t)token : n;
    size_t low = 0, high = n;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (ids[middle] < token) low = middle + 1;
        else high = middle;
    }
    return low < n && ids[low] == token ? low : n;
}

static size_t n_before(const es_text *t) { return t->n_prefix + t->n_path; }

static int32_t token_at(const es_text *t, size_t i) { return i < t->n_prefix ? t->prefix[i] : t->path[i - t->n_prefix]; }

/* The last tokens of the text that a filter looks back on: at most `last_n`; all for a negative one. */
static size_t n_recent(const es_text *t, int32_t last_n) {
    const size_t n = n_before(t);
    return last_n < 0 || (size_t)last_n > n ? n : (size_t)last_n;
}

static void penalise(es_sampler *s, float *x, const int32_t *ids, size_t n, const es_text *t) {
    const es_params *p = &s->params;
    const size_t end = n_before(t), begin = end - n_recent(t, p->penalty_last_n);
    for (size_t i = begin; i < end; i++) {
        const size_t at = place_of(ids, n, token_at(t, i));
        if (at < n) s->counts[at]++;
    }
    for (size_t i = begin; i < end; i++) {
        const size_t at = place_of(ids, n, token_at(t, i));
        if (at == n || s->counts[at] == 0) continue;
        float *logit = &x[at];
        *logit = *logit <= 0.0f ? *logit * p->repeat_penalty : *logit / p->repeat_penalty;
        *logit -= (float)s->counts[at] * p->frequency_penalty + p->presence_penalty;
        s->counts[at] = 0; /* done, and zero again for the next call */
    }
}

/* ---- DRY (llama.cpp's): a token that would go on repeating what the text has said is made less likely ---- */

static int32_t from_end(const es_text *t, size_t i) { return token_at(t, n_before(t) - 1 - i); }

/* Where in dry_breakers the first sequence that begins with `token` stands; n_dry_breakers: none does. */
static size_t breakers_of(const es_sampler *s, int32_t token) {
    const bool is_token = token >= 0 && (size_t)token < s->n_vocab && s->params.n_dry_breakers;
    return is_token && s->breaker_at[token] ? (size_t)s->breaker_at[token] - 1 : s->params.n_dry_breakers;
}

/* Whether `token` breaks sequences by itself. */
static bool is_breaker(const es_sampler *s, int32_t token) {
    const int32_t *all = s->params.dry_breakers;
    for (size_t at = breakers_of(s, token); at < s->params.n_dry_breakers && all[at] == token; at++) {
        if (all[at + 1] < 0) return true;
        while (all[at] >= 0) at++;
    }
    return false;
}

/* How many of the last n tokens follow the last sequence that breaks repeats; all n where there is none. */
static size_t n_unbroken(const es_sampler *s, const es_text *t, size_t n) {
    const int32_t *all = s->params.dry_breakers;
    for (size_t i = 0; i < n; i++) {
        const int32_t head = from_end(t, i);
        size_t longest = 0, length;
        for (size_t at = breakers_of(s, head); at < s->params.n_dry_breakers && all[at] == head; at += length + 1) {
            bool same = true;
            for (length = 1; all[at + length] >= 0; length++)
                same = same && length <= i && all[at + length] == from_end(t, i - length);
            if (same && length > longest) longest = length;
        }
        if (longest > 0) return i + 1 - longest;
    }
    return n;
}

/* Sets counts[] of each token that would go on with a repeat to 1 + the length of the longest such.  Z algorithm
 * over the text from its end: of a match that is cut at `limit`, the first `limit` repeats are enough. */
static void find_repeats(es_sampler *s, const int32_t *ids, size_t n_row, const es_text *t, size_t n, size_t limit) {
    size_t left = 0, right = 0; /* the match that reaches farthest back: the tokens [left, right) from the end */
    for (size_t k = 1; k < n; k++) {
        size_t z = k < right ? (size_t)s->repeats[k - left] : 0;
        if (k < right && z > right - k) z = right - k;
        while (z < limit && k + z < n && from_end(t, z) == from_end(t, k + z)) z++;
        if (k + z > right) {
            left = k;
            right = k + z;
        }
        if (k < ES_LONGEST_REPEAT) s->repeats[k] = (int32_t)z;
        if (z < (size_t)s->params.dry_allowed_length) continue;
        const size_t at = place_of(ids, n_row, from_end(t, k - 1));
        if (at < n_row && s->counts[at] < (int32_t)z + 1) s->counts[at] = (int32_t)z + 1;
    }
}

static void penalise_repeats(es_sampler *s, float *x, const int32_t *ids, size_t n_row, const es_text *t) {
    const es_params *p = &s->params;
    const size_t n = n_recent(t, p->dry_penalty_last_n), allowed = (size_t)p->dry_allowed_length;
    size_t limit = n <= allowed ? 0 : n_unbroken(s, t, n);
    if (n <= allowed || limit < allowed) return;
    if (limit > ES_LONGEST_REPEAT) limit = ES_LONGEST_REPEAT;
    find_repeats(s, ids, n_row, t, n, limit);
    /* llama.cpp's largest exponent, which keeps the power a float */
    const double most = p->dry_base > 1.000001f ? floor(88.7228391 / log((double)p->dry_base)) : INFINITY;
    for (size_t k = 1; k < n; k++) {
        const int32_t token = from_end(t, k - 1);
        const size_t at = place_of(ids, n_row, token);
        if (at == n_row || s->counts[at] == 0) continue;
        const double exponent = fmin((double)(s->counts[at] - 1 - p->dry_allowed_length), most);
        s->counts[at] = 0;
        if (is_breaker(s, token)) continue;
        x[at] -= (float)fmin((double)p->dry_multiplier * pow((double)p->dry_base, exponent), 1e30);
    }
}

/* ---- filters ---- */

/* Top-n-sigma (Tang et al., arXiv 2411.07641): forbids what is more than `width` standard deviations of the
 * possible logits below the largest. */
static void top_n_sigma(float *x, size_t n, double width) {
    double sum = 0, squares = 0, max = -INFINITY;
    size_t n_possible = 0;
    for (size_t i = 0; i < n; i++) {
        if (x[i] == -INFINITY) continue;
        sum += (double)x[i];
        max = (double)x[i] > max ? (double)x[i] : max;
        n_possible++;
    }
    if (n_possible == 0) return;
    const double mean = sum / (double)n_possible;
    for (size_t i = 0; i < n; i++)
        if (x[i] != -INFINITY) squares += ((double)x[i] - mean) * ((double)x[i] - mean);
    const double least = max - width * sqrt(squares / (double)n_possible);
    for (size_t i = 0; i < n; i++)
        if ((double)x[i] < least) x[i] = -INFINITY;
}

static bool adjusts(const es_sampler *s) {
    return s->n_bias || penalties_on(&s->params) || dry_on(&s->params) || s->params.top_n_sigma > 0.0f;
}

/* Copies the row and applies to the copy what changes logits one by one. */
static const float *adjust(es_sampler *s, const float *row, const int32_t *ids, size_t n, const es_text *t) {
    float *x = s->adjusted;
    memcpy(x, row, n * sizeof *x);
    for (size_t i = 0; i < s->n_bias; i++) {
        const size_t at = place_of(ids, n, s->bias_ids[i]);
        if (at < n) x[at] += s->bias_values[i];
    }
    if (penalties_on(&s->params)) penalise(s, x, ids, n, t);
    if (dry_on(&s->params)) penalise_repeats(s, x, ids, n, t);
    if (s->params.top_n_sigma > 0.0f) top_n_sigma(x, n, (double)s->params.top_n_sigma);
    return x;
}

/* Whether XTC takes the top choices from the position after the text. */
static bool xtc_falls(const es_params *p, const es_text *t) {
    return p->xtc_probability > 0.0f && p->xtc_threshold <= 0.5f &&
           es_position_coin(p->seed, n_before(t)) < (double)p->xtc_probability;
}

/* XTC (llama.cpp's): of the candidates at least as likely as `threshold` only the least likely stays. */
static size_t without_top_choices(es_candidate *c, size_t n, double max, double threshold) {
    const double least = threshold * sum_exp(c, n, max);
    size_t n_top = 0, spared = 0, kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (exp(c[i].key - max) < least) continue;
        if (n_top++ == 0 || better(c[spared], c[i])) spared = i;
    }
    if (n_top < 2) return n;
    for (size_t i = 0; i < n; i++)
        if (i == spared || exp(c[i].key - max) < least) c[kept++] = c[i];
    return kept;
}

static double largest_key(const es_candidate *c, size_t n) {
    double first = c[0].key;
    for (size_t i = 1; i < n; i++) first = c[i].key > first ? c[i].key : first;
    return first;
}

/* The temperature; a dynamic one (llama.cpp's) rises with the entropy of the n candidates. */
static double temperature_of(const es_params *p, const es_candidate *c, size_t n, double max) {
    const double temperature = fmax(0.0, (double)p->temperature), range = (double)p->dynatemp_range;
    if (!(range > 0.0) || n < 2) return temperature;
    const double share = entropy_of(c, n, max, log(sum_exp(c, n, max))) / log((double)n);
    const double low = fmax(0.0, temperature - range);
    return low + (temperature + range - low) * pow(fmax(0.0, share), (double)p->dynatemp_exponent);
}

/* The filters over a row whose entry i is that of token ids[i]; `out` has i in the place of ids[i].  The
 * temperature is multiplied by `ratio`. */
static es_status filter(es_sampler *s, const float *row, const int32_t *ids, size_t n, double ratio, es_text text,
                        es_dist *out) {
    const es_params *p = &s->params;
    if (n == 0 || n > s->n_vocab) return ES_BAD_LENGTH;
    if (adjusts(s)) row = adjust(s, row, ids, n, &text);

    if (!s->rows->block_max(row, n, s->block_max)) return ES_NOT_FINITE;
    size_t best_block = 0;
    for (size_t b = 1; b < es_n_blocks(n); b++)
        if (s->block_max[b] > s->block_max[best_block]) best_block = b;
    const float max = s->block_max[best_block];
    if (max == INFINITY) return ES_NOT_FINITE;
    if (max == -INFINITY) return ES_NO_TOKEN;

    const bool dynamic = p->dynatemp_range > 0.0f, greedy = p->temperature <= 0.0f && !dynamic;
    const bool typical_on = p->typical_p < 1.0f, xtc = xtc_falls(p, &text);
    if (greedy && !typical_on && !xtc) { /* every other filter keeps the likeliest token */
        size_t i = best_block * ES_BLOCK_LEN;
        while (row[i] != max) i++;
        return es_dist_set_point(s, (int32_t)i, out);
    }

    es_candidate *c = s->candidates;
    size_t kept;
    const bool top_k_on = p->top_k > 0 && (size_t)p->top_k < n, top_p_on = p->top_p < 1.0f;
    const bool min_p_on = p->min_p > 0.0f;
    if (top_k_on || typical_on) {
        kept = top_k_on ? top_k(s, row, n, (size_t)p->top_k) : gather(s, row, n, -INFINITY);
        if (typical_on) kept = typical(s, row, kept, (double)max, (double)p->typical_p);
        const double first = c[0].key;
        if (top_p_on) kept = nucleus(c, kept, first, sum_exp(c, kept, first), (double)p->top_p);
    } else if (top_p_on) {
        kept = top_p(s, row, n, max, (double)p->top_p);
    } else if (min_p_on) {
        kept = gather(s, row, n, max + logf(p->min_p));
    } else if (xtc || dynamic) {
        kept = gather(s, row, n, -FLT_MAX);
    } else {
        out->dense = true;
        out->n = n;
        const float scale = 1.0f / (p->temperature * (float)ratio);
        const double total = s->rows->exp_write(row, n, max, scale, out->probs, out->block_sum);
        s->rows->scale(out->probs, n, out->block_sum, (float)(1.0 / total));
        out->total = 0;
        for (size_t b = 0; b < es_n_blocks(n); b++) out->total += out->block_sum[b];
        return ES_OK;
    }

    double first = largest_key(c, kept);
    if (min_p_on) {
        const float least = (float)first + logf(p->min_p);
        size_t above = 0;
        for (size_t i = 0; i < kept; i++)
            if (c[i].key >= (double)least) c[above++] = c[i];
        kept = above;
    }
    if (xtc) {
        kept = without_top_choices(c, kept, first, (double)p->xtc_threshold);
        first = largest_key(c, kept);
    }
    const double temperature = ratio * temperature_of(p, c, kept, first);
    if (greedy || (dynamic && temperature < 1e-38)) {
        size_t best = 0;
        for (size_t i = 1; i < kept; i++)
            if (better(c[i], c[best])) best = i;
        return es_dist_set_point(s, c[best].id, out);
    }
    set_sparse(out, c, kept, first, 1.0 / temperature);
    return ES_OK;
}

es_status es_filter(es_sampler *s, const float *row, size_t n, const int32_t *prefix, size_t n_prefix,
                    const int32_t *path, size_t n_path, es_dist *out) {
    return filter(s, row, NULL, n, 1.0, (es_text){prefix, n_prefix, path, n_path}, out);
}

es_status es_adjust(es_sampler *s, const float *row, size_t n, const int32_t *prefix, size_t n_prefix,
                    const float **adjusted) {
    if (n == 0 || n > s->n_vocab) return ES_BAD_LENGTH;
    *adjusted = adjust(s, row, NULL, n, &(es_text){.prefix = prefix, .n_prefix = n_prefix});
    return ES_OK;
}

/* Whether ids[n] ascend and are tokens of the vocabulary. */
static bool are_tokens(const es_sampler *s, const int32_t *ids, size_t n) {
    if (n == 0 || ids[0] < 0 || (size_t)ids[n - 1] >= s->n_vocab) return false;
    bool ascend = true; /* no way out of the loop, so that it runs in vectors */
    for (size_t i = 1; i < n; i++) ascend &= ids[i] > ids[i - 1];
    return ascend;
}

es_status es_filter_draft(es_sampler *s, const float *row, const int32_t *ids, size_t n, double ratio,
                          const int32_t *prefix, size_t n_prefix, es_dist *out) {
    if (ids && !are_tokens(s, ids, n)) return ES_BAD_LENGTH;
    const es_status status = filter(s, row, ids, n, ratio, (es_text){.prefix = prefix, .n_prefix = n_prefix}, out);
    if (status != ES_OK || !ids) return status;
    for (size_t i = 0; i < out->n; i++) out->ids[i] = ids[out->dense ? i : (size_t)out->ids[i]];
    out->dense = false;
    return ES_OK;
}

es_status es_likeliest(es_sampler *s, const float *row, size_t n, size_t k, int32_t *ids, double *probs,
                       size_t *found) {
    if (n == 0 || n > s->n_vocab || k == 0) return ES_BAD_LENGTH;
    if (!s->rows->block_max(row, n, s->block_max)) return ES_NOT_FINITE;
    *found = top_k(s, row, n, k);
    const es_candidate *c = s->candidates;
    if (*found == 0) return ES_NO_TOKEN;
    if (c[0].key == INFINITY) return ES_NOT_FINITE;
    const double total = s->rows->exp_sum(row, n, (float)c[0].key);
    for (size_t i = 0; i < *found; i++) {
        ids[i] = c[i].id;
        probs[i] = exp(c[i].key - c[0].key) / total;
    }
    return ES_OK;
}
