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

/* Where the text goes on, and the node that this would add. */
typedef struct slow_choice {
    es_suffix_node node;
    bool is_taken;
} slow_choice;

/* All tokens that follow the occurrences at[n], the likeliest first, of equals the most recent. */
static void slow_vote(const stream *l, const size_t *at, const size_t *len, size_t n, size_t branches,
                      int32_t parent, float path, slow_choice *choices, size_t *n_choices) {
    bool is_done[33] = {false};
    for (size_t b = 0; b < branches; b++) {
        float total = ESCAPE, most = 0;
        size_t last = SIZE_MAX;
        for (size_t j = 0; j < n; j++) {
            float sum = 0;
            size_t recent = 0;
            for (size_t k = 0; k < n; k++) {
                if (l->tokens[at[k]] != l->tokens[at[j]]) continue;
                sum += weight((uint32_t)len[k]);
                if (at[k] > recent) recent = at[k];
            }
            total += weight((uint32_t)len[j]);
            if (is_done[j]) continue;
            if (last == SIZE_MAX || sum > most || (sum == most && recent > last)) {
                most = sum;
                last = recent;
            }
        }
        if (last == SIZE_MAX) return;
        for (size_t j = 0; j < n; j++) is_done[j] |= l->tokens[at[j]] == l->tokens[last];
        const float prob = most / total;
        if (path * prob >= 1.0f / 1024)
            choices[(*n_choices)++] = (slow_choice){{l->tokens[last], parent, prob, path * prob}, false};
    }
}

/* The occurrences behind a node: those behind its parent that went on with it, or all that agree now. */
static size_t slow_behind(const stream *l, const int32_t *tail, size_t n_tail, const es_suffix_node *nodes,
                          int32_t node, size_t *at, size_t *len) {
    size_t n = 0;
    if (node >= 0) {
        size_t above[33], above_len[33];
        const size_t n_above = slow_behind(l, tail, n_tail, nodes, nodes[node].parent, above, above_len);
        for (size_t j = 0; j < n_above; j++) {
            if (l->tokens[above[j]] != nodes[node].token) continue;
            if (above[j] + 1 == l->n || l->tokens[above[j] + 1] == -1) continue;
            at[n] = above[j] + 1;
            len[n++] = above_len[j] < 32 ? above_len[j] + 1 : 32;
        }
    }
    if (n) return n;
    int32_t text[MOST_TAIL + 32], path[32];
    size_t n_text = 0, n_path = 0;
    for (; node >= 0; node = nodes[node].parent) path[n_path++] = nodes[node].token;
    for (size_t t = 0; t < n_tail; t++) text[n_text++] = tail[t];
    while (n_path) text[n_text++] = path[--n_path];
    return slow_gather(l, text, n_text, at, len);
}

static size_t slow_propose(const stream *l, const int32_t *tail, size_t n_tail, size_t max, size_t branches,
                           es_suffix_node *nodes) {
    static slow_choice choices[33 * 32];
    size_t at[33], len[33], n_choices = 0, i = 0;
    for (; i < max && i < 32; i++) {
        const size_t n = slow_behind(l, tail, n_tail, nodes, (int32_t)i - 1, at, len);
        slow_vote(l, at, len, n, branches, (int32_t)i - 1, i ? nodes[i - 1].path : 1.0f, choices, &n_choices);
        size_t best = SIZE_MAX;
        for (size_t c = 0; c < n_choices; c++)
            if (!choices[c].is_taken && (best == SIZE_MAX || choices[c].node.path > choices[best].node.path))
                best = c;
        if (best == SIZE_MAX) break;
        choices[best].is_taken = true;
        nodes[i] = choices[best].node;
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

/* Whatever the shape: the first children are what a chain is, and none is left out that would fit. */
static void check_shape(const es_suffix_node *nodes, size_t n, const es_suffix_node *chain, size_t n_chain,
                        size_t branches) {
    size_t n_below[33] = {0}, n_first = 0;
    int32_t last = -1;
    for (size_t i = 0; i < n; i++) {
        CHECK(nodes[i].parent >= -1 && nodes[i].parent < (int32_t)i);
        CHECK(n_below[nodes[i].parent + 1]++ < branches);
        CHECK(i == 0 || nodes[i].path <= nodes[i - 1].path);
        CHECK(nodes[i].prob > 0.0f && nodes[i].prob < 1.0f && nodes[i].path >= ES_SUFFIX_LEAST);
        for (size_t j = 0; j < i; j++)
            CHECK(nodes[j].parent != nodes[i].parent || nodes[j].token != nodes[i].token);
        if (nodes[i].parent != last || n_below[last + 1] > 1) continue;
        CHECK(n_first < n_chain && nodes[i].token == chain[n_first].token);
        CHECK(nodes[i].prob == chain[n_first].prob && nodes[i].path == chain[n_first].path);
        n_first++;
        last = (int32_t)i;
    }
}

static void compare(const es_suffix *s, const stream *l, size_t alphabet) {
    const size_t n_tail = random_below(&state, MOST_TAIL), max = random_below(&state, 40);
    const size_t branches = random_bits(&state) % 2 ? 1 : 1 + random_below(&state, 40);
    int32_t *tail = exact(n_tail * sizeof *tail);
    es_suffix_node *nodes = exact(max * sizeof *nodes), want[32], chain[32];
    if (random_bits(&state) % 2 && l->n >= n_tail) {
        for (size_t i = 0; i < n_tail; i++) tail[i] = l->tokens[l->n - n_tail + i];
    } else {
        random_piece(l, alphabet, 30, tail, n_tail);
        if (n_tail && random_bits(&state) % 8 == 0) tail[random_below(&state, n_tail)] = INT32_MIN;
    }
    const size_t n = es_suffix_propose(s, tail, n_tail, max, branches, nodes);
    CHECK(n == slow_propose(l, tail, n_tail, max, branches, want));
    for (size_t i = 0; i < n; i++) {
        CHECK(nodes[i].token == want[i].token && nodes[i].token >= 0 && nodes[i].parent == want[i].parent);
        CHECK(nodes[i].prob == want[i].prob && nodes[i].path == want[i].path);
    }
    check_shape(nodes, n, chain, es_suffix_propose(s, tail, n_tail, 32, 1, chain), branches);
    free(tail);
    free(nodes);
}

static void proposals_are_the_oracles(size_t n_runs) {
    static const size_t capacities[] = {1, 2, 3, 4, 7, 8, 9, 16, 33, 64, 128, 1024};
    static const uint32_t starts[] = {0, 1, UINT32_MAX, UINT32_MAX - 70, UINT32_MAX - 700, INT32_MAX,
                                      (uint32_t)INT32_MAX - 70, (uint32_t)INT32_MAX + 1};
    static stream l;
    for (size_t run = 0; run < n_runs; run++) {
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
        es_suffix_node node;
        CHECK(es_suffix_propose(s, (int32_t[]){0}, 1, 1, 1, &node) == (others < ES_SUFFIX_VISITS));
        CHECK(es_suffix_propose(s, &same, 1, 1, 1, &node) == 1 && node.token == 8);
        es_suffix_free(s);
    }
}

/* More tokens than a tree holds are waiting: the likeliest of them are taken, to the last. */
static void a_wide_tree(void) {
    static stream l;
    es_suffix *s = new_at(8192, 0);
    l.capacity = s->capacity;
    for (int32_t i = 0; i < 6; i++) /* the text, then its tokens in other orders, so that each is a way on */
        for (int32_t a = 0; a < 24; a++)
            for (int32_t b = 0; b < 1 + (a + i) % 3; b++) {
                const int32_t piece[] = {100, 100 + i, a, 100 + (a + b) % 6, (7 * a + b) % 24, ES_SUFFIX_END};
                CHECK(es_suffix_extend(s, piece, 6));
                memcpy(l.tokens + l.n, piece, sizeof piece);
                l.n += 6;
            }
    for (int32_t tail = 99; tail < 107; tail++)
        for (size_t max = 1; max <= 32; max++)
            for (size_t branches = 1; branches <= 32; branches += 1 + branches / 8) {
                es_suffix_node nodes[32], want[32];
                const size_t n = es_suffix_propose(s, &tail, 1, max, branches, nodes);
                CHECK(n == slow_propose(&l, &tail, 1, max, branches, want));
                CHECK(memcmp(nodes, want, n * sizeof *nodes) == 0);
                CHECK(tail == 99 || tail == 106 || branches < 8 || n == max);
            }
    es_suffix_free(s);
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
    int32_t tokens[32] = {0};
    es_suffix_node nodes[32];
    for (size_t i = 0; i < 1000; i++) {
        CHECK(es_suffix_extend(s, tokens, 32));
        CHECK(es_suffix_propose(s, tokens, 32, 32, 32, nodes) == 32);
    }
    CHECK(n_calls == 0 && es_suffix_bytes(s) == bytes && es_suffix_size(s) == 128);
    es_suffix_free(s);
}

/* ---- refusals ---- */

static void refusals(void) {
    CHECK(!es_suffix_new(0) && !es_suffix_new((size_t)ES_SUFFIX_LARGEST + 1) && !es_suffix_new(SIZE_MAX));
    es_suffix *s = new_at(16, 0);
    CHECK(es_suffix_extend(s, NULL, 0) && es_suffix_propose(s, NULL, 0, 8, 1, NULL) == 0);
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
    es_suffix_node node;
    CHECK(es_suffix_propose(s, (int32_t[]){ES_SUFFIX_END}, 1, 1, 1, &node) == 0);
    CHECK(es_suffix_propose(s, (int32_t[]){1, ES_SUFFIX_END}, 2, 1, 1, &node) == 0);
    CHECK(es_suffix_propose(s, (int32_t[]){2}, 1, 1, 1, &node) == 0); /* its only successor is the end */
    CHECK(es_suffix_propose(s, (int32_t[]){1}, 1, 1, 1, &node) == 1 && node.token == INT32_MAX);
    CHECK(es_suffix_propose(s, (int32_t[]){1}, 1, 1, 0, NULL) == 0); /* no branches, no room */
    CHECK(es_suffix_propose(s, (int32_t[]){1}, 1, 0, 1, NULL) == 0);
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

/* The number of random stores may be given: an emulated processor is ten times slower. */
int main(int argc, char **argv) {
    proposals_are_the_oracles(argc > 1 ? strtoul(argv[1], NULL, 10) : 3000);
    old_heads_stay_dead();
    visits_are_bounded();
    a_wide_tree();
    memory_runs_out();
    memory_is_bounded();
    refusals();
    damage_is_noticed();
    return 0;
}
