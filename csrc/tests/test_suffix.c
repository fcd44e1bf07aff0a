/* The suffix store against an oracle that looks at every token; its bounds, damage and refusals.  This
 * compiles its own copy of suffix.c, over an allocator that counts and refuses. */
#include <stddef.h>

static void *counted_calloc(size_t n, size_t size);
#define ES_CALLOC counted_calloc
#include "../suffix.c"

#include "check.h"

static size_t n_calls, failing_call;
static uint64_t state = 5;

static void *counted_calloc(size_t n, size_t size) { return ++n_calls == failing_call ? NULL : calloc(n, size); }

/* The counter at `position`, as if the store had been emptied there. */
static void start_at(es_suffix *s, uint32_t position) {
    s->size = 0;
    s->end = position;
    rejuvenate(s);
}

static es_suffix *new_at(size_t capacity, uint32_t position) {
    es_suffix *s = es_suffix_new(capacity);
    CHECK(s);
    if (position) start_at(s, position);
    CHECK(es_suffix_check(s) && es_suffix_size(s) == 0);
    return s;
}

/* ---- the oracle: all that was ever appended, and loops over it ---- */

enum { MOST_LOG = 8192, MOST_TAIL = 80 };

typedef struct stream {
    int32_t tokens[MOST_LOG];
    size_t n, capacity;
} stream;

static size_t slow_start(const stream *l) { return l->n > l->capacity ? l->n - l->capacity : 0; }

static size_t slow_len(const stream *l, size_t p, const int32_t *text, size_t n_text) {
    size_t len = 0;
    while (len < 32 && len < n_text && len < p - slow_start(l)) {
        const int32_t token = l->tokens[p - 1 - len];
        if (token == -1 || token != text[n_text - 1 - len]) break;
        len++;
    }
    return len;
}

static size_t slow_gather(const stream *l, const int32_t *text, size_t n_text, size_t *at, size_t *len) {
    static const size_t classes[4][2] = {{8, 32}, {4, 7}, {2, 3}, {1, 1}};
    size_t n = 0;
    for (size_t c = 0; c < 4; c++)
        for (size_t p = l->n; p-- > slow_start(l) && n < 32;) {
            if (l->tokens[p] == -1) continue;
            at[n] = p;
            len[n] = slow_len(l, p, text, n_text);
            n += len[n] >= classes[c][0] && len[n] <= classes[c][1];
        }
    return n;
}

static size_t slow_propose(const stream *l, const int32_t *tail, size_t n_tail, size_t max, int32_t *tokens,
                           float *probs) {
    int32_t text[MOST_TAIL + 32];
    size_t at[33], len[33], n = 0, n_text = n_tail, i = 0;
    for (size_t t = 0; t < n_tail; t++) text[t] = tail[t];
    for (; i < max && i < 32; i++) {
        if (n == 0) n = slow_gather(l, text, n_text, at, len);
        if (n == 0) break;
        float total = ESCAPE, most = 0;
        size_t last = 0;
        for (size_t j = 0; j < n; j++) {
            float sum = 0;
            size_t recent = 0;
            for (size_t k = 0; k < n; k++) {
                if (l->tokens[at[k]] != l->tokens[at[j]]) continue;
                sum += weight((uint32_t)len[k]);
                if (at[k] > recent) recent = at[k];
            }
            total += weight((uint32_t)len[j]);
            if (j == 0 || sum > most || (sum == most && recent > last)) {
                most = sum;
                last = recent;
            }
        }
        tokens[i] = text[n_text++] = l->tokens[last];
        probs[i] = most / total;
        size_t kept = 0;
        for (size_t j = 0; j < n; j++) {
            if (l->tokens[at[j]] != tokens[i] || at[j] + 1 == l->n || l->tokens[at[j] + 1] == -1) continue;
            at[kept] = at[j] + 1;
            len[kept++] = len[j] < 32 ? len[j] + 1 : 32;
        }
        n = kept;
    }
    return i;
}

/* ---- fuzz ---- */

static int32_t random_token(size_t alphabet, size_t end_every) {
    if (end_every && random_below(&state, end_every) == 0) return ES_SUFFIX_END;
    return (int32_t)random_below(&state, alphabet);
}

/* New tokens, mixed with copies of what was there. */
static void random_piece(const stream *l, size_t alphabet, size_t end_every, int32_t *tokens, size_t n) {
    const bool copies = l->n > n && random_bits(&state) % 2;
    const size_t from = copies ? random_below(&state, l->n - n) : 0;
    for (size_t i = 0; i < n; i++) tokens[i] = copies ? l->tokens[from + i] : random_token(alphabet, end_every);
    if (copies && n && random_bits(&state) % 2)
        tokens[random_below(&state, n)] = random_token(alphabet, end_every);
}

static void compare(const es_suffix *s, const stream *l, size_t alphabet) {
    const size_t n_tail = random_below(&state, MOST_TAIL), max = random_below(&state, 40);
    int32_t *tail = exact(n_tail * sizeof *tail), *tokens = exact(max * sizeof *tokens), want[32];
    float *probs = exact(max * sizeof *probs), want_probs[32];
    if (random_bits(&state) % 2 && l->n >= n_tail) {
        for (size_t i = 0; i < n_tail; i++) tail[i] = l->tokens[l->n - n_tail + i];
    } else {
        random_piece(l, alphabet, 30, tail, n_tail);
        if (n_tail && random_bits(&state) % 8 == 0) tail[random_below(&state, n_tail)] = INT32_MIN;
    }
    const size_t n = es_suffix_propose(s, tail, n_tail, max, tokens, probs);
    CHECK(n == slow_propose(l, tail, n_tail, max, want, want_probs));
    for (size_t i = 0; i < n; i++) {
        CHECK(tokens[i] == want[i] && tokens[i] >= 0);
        CHECK(fabsf(probs[i] - want_probs[i]) <= 1e-6f && probs[i] > 0.0f && probs[i] < 1.0f);
    }
    free(tail);
    free(tokens);
    free(probs);
}

static void proposals_are_the_oracles(void) {
    static const size_t capacities[] = {1, 2, 3, 4, 7, 8, 9, 16, 33, 64, 128, 1024};
    static const uint32_t starts[] = {0, 1, UINT32_MAX, UINT32_MAX - 70, UINT32_MAX - 700, INT32_MAX,
                                      (uint32_t)INT32_MAX - 70, (uint32_t)INT32_MAX + 1};
    static stream l;
    for (size_t run = 0; run < 3000; run++) {
        es_suffix *s = new_at(capacities[run % 12], starts[random_below(&state, 8)]);
        const size_t alphabet = (size_t[]){1, 2, 3, 5, 20}[random_below(&state, 5)];
        const size_t end_every = (size_t[]){0, 40, 5}[random_below(&state, 3)];
        const size_t goal = s->capacity * (1 + random_below(&state, 5)) + 40;
        l.n = 0;
        for (l.capacity = 1; l.capacity < capacities[run % 12];) l.capacity *= 2;
        while (l.n < goal) {
            const size_t n = random_below(&state, random_bits(&state) % 4 ? 8 : s->capacity + 20);
            int32_t *tokens = exact(n * sizeof *tokens);
            random_piece(&l, alphabet, end_every, tokens, n);
            CHECK(es_suffix_extend(s, tokens, n));
            memcpy(l.tokens + l.n, tokens, n * sizeof *tokens);
            l.n += n;
            free(tokens);
            CHECK(es_suffix_size(s) == l.n - slow_start(&l));
            CHECK(es_suffix_check(s));
            compare(s, &l, alphabet);
        }
        es_suffix_free(s);
    }
}

/* Heads that stand still while the counter goes round do not come to life. */
static void old_heads_stay_dead(void) {
    es_suffix *s = new_at(64, 0);
    for (uint32_t turn = 0; turn < 6; turn++) {
        int32_t *tokens = exact(100 * sizeof *tokens);
        for (int32_t i = 0; i < 100; i++) tokens[i] = (int32_t)random_below(&state, 1000);
        s->size = 0;
        s->end = turn % 2 ? UINT32_MAX - 30 : INT32_MAX - 30;
        CHECK(es_suffix_check(s));
        CHECK(es_suffix_extend(s, tokens, 100) && es_suffix_check(s));
        free(tokens);
    }
    es_suffix_free(s);
}

/* ---- bounds ---- */

static uint32_t bucket_of(const es_suffix *s, int32_t token) {
    uint32_t bucket[ES_SUFFIX_ORDERS];
    CHECK(buckets((view){&token, UINT32_MAX, 1, 1}, s->capacity, bucket) == 1);
    return bucket[0];
}

/* An occurrence behind the links of another token in the same bucket is found, until they are too many. */
static void visits_are_bounded(void) {
    for (size_t others = ES_SUFFIX_VISITS - 3; others < ES_SUFFIX_VISITS + 3; others++) {
        es_suffix *s = new_at(1024, 0);
        int32_t same = 1;
        while (bucket_of(s, same) != bucket_of(s, 0)) same++;
        CHECK(es_suffix_extend(s, (int32_t[]){0, 7, ES_SUFFIX_END}, 3));
        for (size_t i = 0; i < others; i++) CHECK(es_suffix_extend(s, (int32_t[]){same, 8, ES_SUFFIX_END}, 3));
        int32_t token;
        float prob;
        CHECK(es_suffix_propose(s, (int32_t[]){0}, 1, 1, &token, &prob) == (others < ES_SUFFIX_VISITS));
        CHECK(es_suffix_propose(s, &same, 1, 1, &token, &prob) == 1 && token == 8);
        es_suffix_free(s);
    }
}

static void memory_runs_out(void) {
    n_calls = 0;
    es_suffix_free(new_at(100, 0));
    const size_t needed = n_calls;
    CHECK(needed > 0);
    for (failing_call = 1; failing_call <= needed; failing_call++) {
        n_calls = 0;
        CHECK(!es_suffix_new(100)); /* LeakSanitizer sees what stays behind */
    }
    failing_call = 0;
    es_suffix_free(NULL);
}

static void memory_is_bounded(void) {
    es_suffix *s = new_at(100, 0);
    const size_t bytes = es_suffix_bytes(s);
    CHECK(s->capacity == 128 && bytes >= 128 * 36 && bytes < 128 * 40);
    n_calls = 0;
    int32_t tokens[32] = {0}, next[32];
    float probs[32];
    for (size_t i = 0; i < 1000; i++) {
        CHECK(es_suffix_extend(s, tokens, 32));
        CHECK(es_suffix_propose(s, tokens, 32, 32, next, probs) == 32);
    }
    CHECK(n_calls == 0 && es_suffix_bytes(s) == bytes && es_suffix_size(s) == 128);
    es_suffix_free(s);
}

/* ---- refusals ---- */

static void refusals(void) {
    CHECK(!es_suffix_new(0) && !es_suffix_new((size_t)ES_SUFFIX_LARGEST + 1) && !es_suffix_new(SIZE_MAX));
    es_suffix *s = new_at(16, 0);
    CHECK(es_suffix_extend(s, NULL, 0) && es_suffix_propose(s, NULL, 0, 8, NULL, NULL) == 0);
    CHECK(es_suffix_extend(s, (int32_t[]){1, 2, ES_SUFFIX_END, 1, INT32_MAX}, 5));
    const size_t n_bytes = es_suffix_bytes(s) - sizeof *s;
    void *was = exact(n_bytes);
    memcpy(was, s->memory, n_bytes);
    const es_suffix fields = *s;
    for (size_t i = 0; i < 30; i++) {
        int32_t tokens[30] = {0};
        tokens[i] = i % 2 ? -2 : INT32_MIN;
        CHECK(!es_suffix_extend(s, tokens, 30));
        CHECK(memcmp(was, s->memory, n_bytes) == 0 && memcmp(&fields, s, sizeof *s) == 0);
    }
    free(was);
    int32_t token;
    float prob;
    CHECK(es_suffix_propose(s, (int32_t[]){ES_SUFFIX_END}, 1, 1, &token, &prob) == 0);
    CHECK(es_suffix_propose(s, (int32_t[]){1, ES_SUFFIX_END}, 2, 1, &token, &prob) == 0);
    CHECK(es_suffix_propose(s, (int32_t[]){2}, 1, 1, &token, &prob) == 0); /* its only successor is the end */
    CHECK(es_suffix_propose(s, (int32_t[]){1}, 1, 1, &token, &prob) == 1 && token == INT32_MAX);
    es_suffix_free(s);
}

/* ---- damage ---- */

static bool is_dead(const es_suffix *s, uint32_t link) {
    const uint32_t age = s->end - link;
    return age > s->size && age <= ES_SUFFIX_OLDEST;
}

/* Whatever a link in use becomes, but for another that is dead, is noticed. */
static void damage_link(es_suffix *s, uint32_t *link) {
    const uint32_t was = *link;
    for (uint32_t age = 0; age < s->size + 3; age++)
        for (size_t sign = 0; sign < 2; sign++) {
            *link = sign ? s->end + age : s->end - age;
            const bool same = *link == was || (is_dead(s, was) && is_dead(s, *link));
            CHECK(es_suffix_check(s) == same);
        }
    *link = was;
}

static void damage_tokens(es_suffix *s) {
    for (uint32_t age = 1; age <= s->size; age++) {
        int32_t *token = &s->tokens[(s->end - age) % s->capacity];
        const int32_t was = *token;
        /* Whether the position after it is linked under it. */
        const bool names = age > 1 && s->tokens[(s->end - age + 1) % s->capacity] != ES_SUFFIX_END;
        for (*token = -3; *token < 4; ++*token)
            if (*token < ES_SUFFIX_END || names) CHECK(es_suffix_check(s) == (*token == was));
        *token = was;
    }
}

static void damage_is_noticed(void) {
    es_suffix *s = new_at(64, 0); /* not full: nothing has left, so the position of every link is known */
    for (size_t i = 0; i < 50; i++) {
        const int32_t token = random_token(4, 15);
        CHECK(es_suffix_extend(s, &token, 1));
    }
    CHECK(es_suffix_check(s));
    for (size_t order = 0; order < ES_SUFFIX_ORDERS; order++)
        for (size_t b = 0; b < s->capacity; b++) {
            uint32_t *link = &s->head[order * s->capacity + b];
            while (damage_link(s, link), !is_dead(s, *link))
                link = &s->prev[order * s->capacity + *link % s->capacity];
        }
    damage_tokens(s);
    const es_suffix was = *s;
    for (uint32_t wrong = 0; wrong < 200; wrong++) {
        s->capacity = wrong;
        if (wrong < was.capacity) CHECK(!es_suffix_check(s)); /* more would be read beyond the memory */
        *s = was;
        s->size = wrong;
        if (wrong > was.size) CHECK(!es_suffix_check(s));
        *s = was;
        s->end = wrong;
        CHECK(es_suffix_check(s) == (wrong == was.end));
        *s = was;
    }
    CHECK(es_suffix_check(s));
    for (size_t i = 0; i < 50; i++) { /* full: the contexts of the oldest have left */
        const int32_t token = random_token(4, 15);
        CHECK(es_suffix_extend(s, &token, 1));
        if (s->size == s->capacity) damage_tokens(s);
    }
    es_suffix_free(s);
}

int main(void) {
    proposals_are_the_oracles();
    old_heads_stay_dead();
    visits_are_bounded();
    memory_runs_out();
    memory_is_bounded();
    refusals();
    damage_is_noticed();
    return 0;
}
