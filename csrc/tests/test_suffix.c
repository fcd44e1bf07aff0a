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
static void start_at(es_suffix *s, uint64_t position) {
    s->size = 0;
    s->end = position;
    rejuvenate(s);
}

/* Appends a document of its own. */
static bool append_all(es_suffix *s, const int32_t *tokens, size_t n) {
    uint64_t document = 0;
    return es_suffix_extend(s, &document, tokens, n);
}

static es_suffix *new_at(size_t capacity, uint32_t position) {
    es_suffix *s = es_suffix_new(capacity);
    CHECK(s);
    if (position) start_at(s, position);
    CHECK(es_suffix_check(s) && es_suffix_size(s) == 0);
    return s;
}

/* ---- the oracle: all that was ever appended, of which document, and loops over it ---- */

enum { MOST_LOG = 8192, MOST_TAIL = 80 };

typedef struct stream {
    int32_t tokens[MOST_LOG];
    uint32_t document[MOST_LOG];
    size_t n, capacity, cleared; /* cleared: tokens there were when all were forgotten */
} stream;

static size_t slow_start(const stream *l) {
    const size_t start = l->n > l->capacity ? l->n - l->capacity : 0;
    return start > l->cleared ? start : l->cleared;
}

static void slow_extend(stream *l, uint32_t document, const int32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++, l->n++) {
        l->tokens[l->n] = tokens[i];
        l->document[l->n] = document;
    }
}

/* The token before another of its document, in the window; SIZE_MAX: there is none. */
static size_t slow_before(const stream *l, size_t p) {
    const uint32_t document = l->document[p];
    while (p-- > slow_start(l))
        if (l->document[p] == document) return p;
    return SIZE_MAX;
}

/* The token after; SIZE_MAX: there is none. */
static size_t slow_after(const stream *l, size_t p) {
    const uint32_t document = l->document[p];
    while (++p < l->n)
        if (l->document[p] == document) return p;
    return SIZE_MAX;
}

static size_t slow_len(const stream *l, size_t p, const int32_t *text, size_t n_text) {
    size_t len = 0;
    while (len < 32 && len < n_text) {
        p = slow_before(l, p);
        if (p == SIZE_MAX || l->tokens[p] == -1 || l->tokens[p] != text[n_text - 1 - len]) break;
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
            at[n] = slow_after(l, above[j]);
            if (at[n] == SIZE_MAX || l->tokens[at[n]] == -1) continue;
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

/* New tokens, or a copy of what was there in a document. */
static void random_piece(const stream *l, size_t alphabet, size_t end_every, int32_t *tokens, size_t n) {
    const bool copies = l->n > 0 && random_bits(&state) % 2;
    size_t from = copies ? random_below(&state, l->n) : SIZE_MAX;
    for (size_t i = 0; i < n; i++) {
        tokens[i] = from == SIZE_MAX ? random_token(alphabet, end_every) : l->tokens[from];
        if (from != SIZE_MAX) from = slow_after(l, from);
    }
    if (copies && n && random_bits(&state) % 2)
        tokens[random_below(&state, n)] = random_token(alphabet, end_every);
}

/* Copies at most the last `n` tokens of the document of a random position; returns how many. */
static size_t end_of_document(const stream *l, int32_t *tail, size_t n) {
    size_t p = l->n ? random_below(&state, l->n) : SIZE_MAX, found = 0;
    if (p != SIZE_MAX && p < slow_start(l)) p = SIZE_MAX;
    while (p != SIZE_MAX && slow_after(l, p) != SIZE_MAX) p = slow_after(l, p);
    for (; p != SIZE_MAX && found < n; p = slow_before(l, p)) tail[n - ++found] = l->tokens[p];
    memmove(tail, tail + n - found, found * sizeof *tail);
    return found;
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
    size_t n_tail = random_below(&state, MOST_TAIL);
    const size_t max = random_below(&state, 40);
    const size_t branches = random_bits(&state) % 2 ? 1 : 1 + random_below(&state, 40);
    int32_t *tail = exact(n_tail * sizeof *tail);
    es_suffix_node *nodes = exact(max * sizeof *nodes), want[32], chain[32];
    if (random_bits(&state) % 2) {
        n_tail = end_of_document(l, tail, n_tail);
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

enum { MOST_GROWING = 8 };

/* A piece for one of the documents that grow, or for a new one in its place. */
static void extend_both(es_suffix *s, stream *l, uint64_t *last, uint32_t *names, size_t n_growing,
                        size_t alphabet, size_t end_every) {
    static uint32_t n_documents;
    const size_t chosen = random_below(&state, n_growing);
    const size_t n = random_below(&state, random_bits(&state) % 4 ? 8 : s->capacity + 20);
    int32_t *tokens = exact(n * sizeof *tokens);
    random_piece(l, alphabet, end_every, tokens, n);
    if (last[chosen] == 0 || random_below(&state, 30) == 0) {
        last[chosen] = 0;
        names[chosen] = n_documents++;
    }
    CHECK(es_suffix_is_last(s, last[chosen]));
    const uint64_t was = last[chosen];
    CHECK(es_suffix_extend(s, &last[chosen], tokens, n));
    CHECK(n ? last[chosen] == s->end - 1 : last[chosen] == was);
    CHECK(es_suffix_is_last(s, was) == (n == 0 || was == 0 || s->end - was > s->size));
    slow_extend(l, names[chosen], tokens, n);
    free(tokens);
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
        const size_t n_growing = (size_t[]){1, 2, 3, MOST_GROWING}[random_below(&state, 4)];
        uint64_t last[MOST_GROWING] = {0};
        uint32_t names[MOST_GROWING];
        l.n = l.cleared = 0;
        for (l.capacity = 1; l.capacity < capacities[run % 12];) l.capacity *= 2;
        while (l.n < goal) {
            if (random_below(&state, 60) == 0) {
                es_suffix_clear(s);
                l.cleared = l.n;
            }
            extend_both(s, &l, last, names, n_growing, alphabet, end_every);
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
        CHECK(append_all(s, tokens, 100) && es_suffix_check(s));
        free(tokens);
    }
    es_suffix_free(s);
}

/* A document is not taken for what lies 2^32 positions behind its end. */
static void old_documents_stay_dead(void) {
    es_suffix *s = new_at(64, 0);
    uint64_t document = 0;
    CHECK(es_suffix_extend(s, &document, (int32_t[]){1, 2, 3, 4, 5}, 5) && document == 5);
    start_at(s, UINT64_C(1) << 32);
    CHECK(append_all(s, (int32_t[]){1, 2, 3, 4, 5, 6, 7, 8}, 8)); /* 2^32 + 5 is amid them */
    CHECK(es_suffix_extend(s, &document, (int32_t[]){9, 9}, 2) && document == (UINT64_C(1) << 32) + 9);
    CHECK(entry(s, 2)->before == 0 && entry(s, 1)->before == 1 && es_suffix_check(s));
    es_suffix_free(s);
}

/* ---- bounds ---- */

static uint32_t bucket_of(const es_suffix *s, int32_t token) {
    const context c = context_of(&token, 1, s->capacity);
    CHECK(c.found == 1);
    return c.bucket[0];
}

/* An occurrence behind the links of another token in the same bucket is found, until they are too many. */
static void visits_are_bounded(void) {
    for (size_t others = ES_SUFFIX_VISITS - 3; others < ES_SUFFIX_VISITS + 3; others++) {
        es_suffix *s = new_at(1024, 0);
        int32_t same = 1;
        while (bucket_of(s, same) != bucket_of(s, 0)) same++;
        CHECK(append_all(s, (int32_t[]){0, 7, ES_SUFFIX_END}, 3));
        for (size_t i = 0; i < others; i++) CHECK(append_all(s, (int32_t[]){same, 8, ES_SUFFIX_END}, 3));
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
                CHECK(append_all(s, piece, 6));
                slow_extend(&l, 0, piece, 6);
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
    CHECK(s->capacity == 128 && bytes >= 128 * 44 && bytes < 128 * 48);
    n_calls = 0;
    int32_t tokens[32] = {0};
    uint64_t last[3] = {0};
    es_suffix_node nodes[32];
    for (size_t i = 0; i < 1000; i++) {
        CHECK(es_suffix_extend(s, &last[i % 3], tokens, 32));
        CHECK(es_suffix_propose(s, tokens, 32, 32, 32, nodes) == 32);
    }
    CHECK(n_calls == 0 && es_suffix_bytes(s) == bytes && es_suffix_size(s) == 128);
    es_suffix_free(s);
}

/* ---- refusals ---- */

static void refusals(void) {
    CHECK(!es_suffix_new(0) && !es_suffix_new((size_t)ES_SUFFIX_LARGEST + 1) && !es_suffix_new(SIZE_MAX));
    es_suffix *s = new_at(16, 0);
    CHECK(append_all(s, NULL, 0) && es_suffix_propose(s, NULL, 0, 8, 1, NULL) == 0);
    CHECK(append_all(s, (int32_t[]){1, 2, ES_SUFFIX_END, 1, INT32_MAX}, 5));
    const size_t n_bytes = es_suffix_bytes(s) - sizeof *s;
    void *was = exact(n_bytes);
    memcpy(was, s->memory, n_bytes);
    const es_suffix fields = *s;
    for (size_t i = 0; i < 30; i++) {
        int32_t tokens[30] = {0};
        tokens[i] = i % 2 ? -2 : INT32_MIN;
        CHECK(!append_all(s, tokens, 30));
        CHECK(memcmp(was, s->memory, n_bytes) == 0 && memcmp(&fields, s, sizeof *s) == 0);
    }
    /* Of the five positions, 1 to 5, a document ends at the last one alone. */
    for (uint64_t position = 1; position < 10; position++)
        for (size_t high = 0; high < 2; high++) {
            const uint64_t named = position + ((uint64_t)high << 32);
            uint64_t document = named;
            CHECK(es_suffix_is_last(s, named) == (named == 5));
            if (named == 5) continue;
            CHECK(!es_suffix_extend(s, &document, (int32_t[]){1}, 1) && document == named);
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

/* Whether nothing in the window is before a position at this distance, and that can be right: it left. */
static bool may_have_left(const es_suffix *s, uint32_t age, uint32_t before) {
    if (s->size < s->capacity || before > s->capacity) return false;
    return before == 0 || age + before > s->size;
}

/* Whatever a distance becomes is noticed, but where it leads to no token of the window, before and after. */
static void damage_distances(es_suffix *s) {
    for (uint32_t age = 1; age <= s->size; age++)
        for (size_t side = 0; side < 2; side++) {
            es_suffix_entry *at = entry(s, age);
            uint32_t *distance = side ? &at->after : &at->before;
            const uint32_t was = *distance;
            for (uint32_t value = 0; value < 2 * s->capacity; value++)
                for (size_t sign = 0; sign < 2; sign++) {
                    *distance = sign ? 0u - value : value;
                    if (side == 0 && may_have_left(s, age, was) && may_have_left(s, age, *distance)) continue;
                    CHECK(es_suffix_check(s) == (*distance == was));
                }
            *distance = was;
        }
}

static void damage_tokens(es_suffix *s) {
    for (uint32_t age = 1; age <= s->size; age++) {
        int32_t *token = &entry(s, age)->token;
        const int32_t was = *token;
        const uint32_t after = entry(s, age)->after;
        /* Whether the position after it is linked under it. */
        const bool names = after && entry(s, age - after)->token != ES_SUFFIX_END;
        for (*token = -3; *token < 4; ++*token)
            if (*token < ES_SUFFIX_END || names) CHECK(es_suffix_check(s) == (*token == was));
        *token = was;
    }
}

static void damage_is_noticed(void) {
    es_suffix *s = new_at(64, 0); /* not full: nothing has left, so the position of every link is known */
    uint64_t last[3] = {0};
    for (size_t i = 0; i < 50; i++) { /* the first two tokens are of one document */
        const int32_t token = random_token(4, 15);
        CHECK(es_suffix_extend(s, &last[i < 2 ? 0 : random_below(&state, 3)], &token, 1));
    }
    CHECK(es_suffix_check(s));
    for (size_t order = 0; order < ES_SUFFIX_ORDERS; order++)
        for (size_t b = 0; b < s->capacity; b++) {
            uint32_t *link = &s->head[order * s->capacity + b];
            while (damage_link(s, link), !is_dead(s, *link))
                link = &s->prev[order * s->capacity + *link % s->capacity];
        }
    damage_tokens(s);
    damage_distances(s);
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
        CHECK(es_suffix_extend(s, &last[random_below(&state, 3)], &token, 1));
        if (s->size == s->capacity) damage_tokens(s);
    }
    damage_distances(s);
    es_suffix_free(s);
}

/* The number of random stores may be given: an emulated processor is ten times slower. */
int main(int argc, char **argv) {
    proposals_are_the_oracles(argc > 1 ? strtoul(argv[1], NULL, 10) : 3000);
    old_heads_stay_dead();
    old_documents_stay_dead();
    visits_are_bounded();
    a_wide_tree();
    memory_runs_out();
    memory_is_bounded();
    refusals();
    damage_is_noticed();
    return 0;
}
