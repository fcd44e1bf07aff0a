#include "suffix.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#ifndef ES_CALLOC /* the tests put an allocator here that fails */
#define ES_CALLOC calloc
#endif

/* ---- the model: both figures are tuned on real data ---- */

/* How much an occurrence says that agrees with the text in `len` tokens, 1 to ES_SUFFIX_LONGEST. */
static float weight(uint32_t len) { return (float)(len * len); }

/* The weight of all that the store has not seen; above 0. */
static const float ESCAPE = 2.0f;

/* ---- memory ---- */

enum { BYTES_A_TOKEN = sizeof(es_suffix_entry) + 2 * ES_SUFFIX_ORDERS * sizeof(uint32_t) };

es_suffix *es_suffix_new(size_t capacity) {
    if (capacity == 0 || capacity > ES_SUFFIX_LARGEST) return NULL;
    es_suffix *s = ES_CALLOC(1, sizeof *s);
    if (!s) return NULL;
    s->capacity = 1;
    while (s->capacity < capacity) s->capacity *= 2;
    s->end = 1; /* heads are 0 and so is the age of none: every chain is empty, and no page was touched */
    s->memory = ES_CALLOC(s->capacity, BYTES_A_TOKEN);
    if (!s->memory) {
        free(s);
        return NULL;
    }
    s->log = s->memory;
    s->prev = (uint32_t *)(s->log + s->capacity);
    s->head = s->prev + (size_t)ES_SUFFIX_ORDERS * s->capacity;
    return s;
}

void es_suffix_free(es_suffix *s) {
    if (!s) return;
    free(s->memory);
    free(s);
}

size_t es_suffix_size(const es_suffix *s) { return s->size; }

size_t es_suffix_bytes(const es_suffix *s) {
    return sizeof *s + (size_t)s->capacity * BYTES_A_TOKEN;
}

/* ---- positions and their documents ---- */

static es_suffix_entry *entry(const es_suffix *s, uint32_t age) {
    return &s->log[(s->end - age) & (s->capacity - 1)];
}

static bool is_alive(const es_suffix *s, uint32_t age) { return age - 1 < s->size; }

/* The age of a position that has 64 bits; 0 when it is not in the window. */
static uint32_t age_of(const es_suffix *s, uint64_t position) {
    const uint64_t age = s->end - position;
    return age - 1 < s->size ? (uint32_t)age : 0;
}

/* The age of the token before; 0 where the document begins, above `size` when it has left the window. */
static uint32_t age_before(const es_suffix *s, uint32_t age) {
    const uint32_t before = entry(s, age)->before;
    /* Nearly always 1: the processor goes on with that and does not wait for the memory. */
    if (__builtin_expect(before == 1, true)) return age + 1;
    return before ? age + before : 0;
}

/* ---- texts and their buckets ---- */

enum { CONTEXT = 1 << (ES_SUFFIX_ORDERS - 1) }; /* most tokens under which a position is linked */

/* A text that grows at its beginning, and the buckets of its last 1, 2, 4 and 8 tokens. */
typedef struct context {
    uint64_t hash;
    uint32_t n;     /* tokens */
    uint32_t found; /* buckets */
    uint32_t bucket[ES_SUFFIX_ORDERS];
} context;

static void put_before(context *c, int32_t token, uint32_t capacity) {
    c->hash = (c->hash + (uint32_t)token) * UINT64_C(0x9E3779B97F4A7C15);
    if (++c->n == 1u << c->found) c->bucket[c->found++] = (uint32_t)((c->hash >> 32) * capacity >> 32);
}

/* The buckets of text[n]. */
static context context_of(const int32_t *text, size_t n, uint32_t capacity) {
    context c = {0};
    while (c.n < CONTEXT && c.n < n && text[n - 1 - c.n] != ES_SUFFIX_END)
        put_before(&c, text[n - 1 - c.n], capacity);
    return c;
}

/* The buckets of the document up to the token of this age. */
static context context_at(const es_suffix *s, uint32_t age) {
    context c = {0};
    for (; c.n < CONTEXT && is_alive(s, age); age = age_before(s, age)) {
        if (entry(s, age)->token == ES_SUFFIX_END) break;
        put_before(&c, entry(s, age)->token, s->capacity);
    }
    return c;
}

/* ---- extending ---- */

/* Makes all dead heads younger, twice in each turn of 32 bits: one that stood still for 2^32 tokens
 * would name a living position. */
static void rejuvenate(es_suffix *s) {
    for (size_t i = 0; i < (size_t)ES_SUFFIX_ORDERS * s->capacity; i++)
        if (!is_alive(s, (uint32_t)s->end - s->head[i])) s->head[i] = (uint32_t)s->end - s->capacity - 1;
}

/* Appends a token, linked under `c`, behind the one of age `last` in its document; 0: there is none. */
static void append(es_suffix *s, const context *c, uint32_t last, int32_t token) {
    const size_t slot = s->end & (s->capacity - 1);
    if (token != ES_SUFFIX_END)
        for (size_t order = 0; order < c->found; order++) {
            uint32_t *head = &s->head[order * s->capacity + c->bucket[order]];
            s->prev[order * s->capacity + slot] = *head;
            *head = (uint32_t)s->end;
        }
    if (last) entry(s, last)->after = last;
    s->log[slot] = (es_suffix_entry){token, last, 0};
    s->size += s->size < s->capacity;
    if ((++s->end & INT32_MAX) == 0) rejuvenate(s);
}

bool es_suffix_is_last(const es_suffix *s, uint64_t document) {
    const uint32_t age = age_of(s, document);
    return document < s->end && (age == 0 || entry(s, age)->after == 0);
}

bool es_suffix_extend(es_suffix *s, uint64_t *document, const int32_t *tokens, size_t n) {
    if (!es_suffix_is_last(s, *document)) return false;
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < ES_SUFFIX_END) return false;
    uint32_t last = age_of(s, *document);
    for (size_t i = 0; i < n; i++, last = 1) {
        /* The array is read much faster than the log.  Of a window below 8 tokens the first of these may
         * have left already, instead of later. */
        const context c = i >= CONTEXT ? context_of(tokens, i, s->capacity) : context_at(s, last);
        append(s, &c, last, tokens[i]);
    }
    if (n > 0) *document = s->end - 1;
    return true;
}

void es_suffix_clear(es_suffix *s) { s->size = 0; }

/* ---- proposing ---- */

typedef struct occurrence {
    uint32_t age, len;
    int32_t next;
} occurrence;

/* In how many tokens, going backwards, text[n] agrees with what stands before a position.  The text holds
 * no ES_SUFFIX_END. */
static uint32_t agreement(const es_suffix *s, uint32_t age, const int32_t *text, uint32_t n, uint32_t most) {
    if (n < most) most = n;
    uint32_t len = 0;
    while (len < most) {
        age = age_before(s, age);
        if (!is_alive(s, age) || entry(s, age)->token != text[n - 1 - len]) break;
        len++;
    }
    return len;
}

/* Gathers occurrences of text[n], of the longest order first.  A chain of order k also leads to those
 * that agree in 2k tokens and more: the order above has them. */
static size_t gather(const es_suffix *s, const int32_t *text, uint32_t n, occurrence found[ES_SUFFIX_MOST]) {
    const context c = context_of(text, n, s->capacity);
    size_t n_found = 0;
    for (size_t order = c.found; order-- > 0;) {
        const bool is_top = order == ES_SUFFIX_ORDERS - 1;
        const uint32_t least = 1u << order, most = is_top ? ES_SUFFIX_LONGEST : 2 * least;
        const uint32_t *prev = s->prev + order * s->capacity;
        uint32_t age = (uint32_t)s->end - s->head[order * s->capacity + c.bucket[order]];
        for (size_t visit = 0; visit < ES_SUFFIX_VISITS && is_alive(s, age); visit++) {
            const uint32_t len = agreement(s, age, text, n, most);
            if (len >= least && (is_top || len < most)) {
                found[n_found++] = (occurrence){age, len, entry(s, age)->token};
                if (n_found == ES_SUFFIX_MOST) return n_found;
            }
            age = (uint32_t)s->end - prev[(s->end - age) & (s->capacity - 1)];
        }
    }
    return n_found;
}

/* The nodes that may be next, the likeliest last; of equals the one that came first. */
typedef struct queue {
    size_t n;
    es_suffix_node nodes[ES_SUFFIX_LONGEST]; /* what is behind as many will never be next */
} queue;

static void push(queue *waiting, es_suffix_node node) {
    size_t at = waiting->n;
    while (at > 0 && waiting->nodes[at - 1].path >= node.path) at--;
    if (waiting->n < ES_SUFFIX_LONGEST) {
        memmove(waiting->nodes + at + 1, waiting->nodes + at, (waiting->n++ - at) * sizeof node);
    } else {
        if (at-- == 0) return;
        memmove(waiting->nodes, waiting->nodes + 1, at * sizeof node);
    }
    waiting->nodes[at] = node;
}

typedef struct candidate {
    int32_t token;
    uint32_t age;
    float weight;
} candidate;

/* Counts the votes for each token.  Returns how many tokens there are. */
static size_t count(const occurrence *found, size_t n, candidate tally[ES_SUFFIX_MOST], float *total) {
    size_t n_tally = 0;
    *total = ESCAPE;
    for (size_t i = 0; i < n; i++) {
        size_t t = 0;
        while (t < n_tally && tally[t].token != found[i].next) t++;
        if (t == n_tally) tally[n_tally++] = (candidate){found[i].next, found[i].age, 0};
        if (found[i].age < tally[t].age) tally[t].age = found[i].age;
        tally[t].weight += weight(found[i].len);
        *total += weight(found[i].len);
    }
    return n_tally;
}

static bool is_better(candidate a, candidate b) {
    return a.weight > b.weight || (a.weight == b.weight && a.age < b.age);
}

/* Lets the `branches` likeliest tokens that the occurrences vote for wait behind `parent`. */
static void vote(const occurrence *found, size_t n, size_t branches, int32_t parent, float path,
                 queue *waiting) {
    candidate tally[ES_SUFFIX_MOST];
    float total;
    const size_t n_tally = count(found, n, tally, &total);
    for (size_t b = 0; b < branches && b < n_tally; b++) {
        size_t best = b;
        for (size_t t = b + 1; t < n_tally; t++)
            if (is_better(tally[t], tally[best])) best = t;
        const candidate chosen = tally[best];
        tally[best] = tally[b];
        float prob = chosen.weight / total;
        if (prob >= 1.0f) prob = 1.0f - FLT_EPSILON / 2; /* an escape too small to count leaves 1 */
        if (path * prob < ES_SUFFIX_LEAST) return;
        push(waiting, (es_suffix_node){chosen.token, parent, prob, path * prob});
    }
}

/* The occurrences of `token`, moved on behind it, that are in the store and in the document. */
static size_t advance(const es_suffix *s, const occurrence *from, size_t n, int32_t token, occurrence *to) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t after = entry(s, from[i].age)->after;
        if (from[i].next != token || after == 0) continue;
        const uint32_t age = from[i].age - after;
        const int32_t next = entry(s, age)->token;
        if (next == ES_SUFFIX_END) continue;
        to[kept++] = (occurrence){age, from[i].len + (from[i].len < ES_SUFFIX_LONGEST), next};
    }
    return kept;
}

/* Gathers occurrences of the part of the tail that can agree, and of the nodes down to `at` behind it. */
static size_t gather_behind(const es_suffix *s, const int32_t *tail, size_t n_tail, const es_suffix_node *nodes,
                            int32_t at, occurrence found[ES_SUFFIX_MOST]) {
    int32_t text[ES_SUFFIX_LONGEST];
    uint32_t n = 0;
    for (; n < ES_SUFFIX_LONGEST && at >= 0; at = nodes[at].parent)
        text[ES_SUFFIX_LONGEST - ++n] = nodes[at].token;
    while (n < ES_SUFFIX_LONGEST && n_tail > 0 && tail[n_tail - 1] != ES_SUFFIX_END)
        text[ES_SUFFIX_LONGEST - ++n] = tail[--n_tail];
    return gather(s, text + ES_SUFFIX_LONGEST - n, n, found);
}

size_t es_suffix_propose(const es_suffix *s, const int32_t *tail, size_t n_tail, size_t max,
                         size_t branches, es_suffix_node *nodes) {
    occurrence found[ES_SUFFIX_LONGEST][ES_SUFFIX_MOST]; /* behind the tail, then behind each node */
    size_t n_found[ES_SUFFIX_LONGEST];
    queue waiting;
    waiting.n = 0;
    if (max > ES_SUFFIX_LONGEST) max = ES_SUFFIX_LONGEST;
    for (size_t n = 0; n < max; n++) {
        const int32_t last = (int32_t)n - 1;
        n_found[n] = 0;
        if (n > 0) {
            const size_t parent = (size_t)(nodes[last].parent + 1);
            n_found[n] = advance(s, found[parent], n_found[parent], nodes[last].token, found[n]);
        }
        if (n_found[n] == 0) n_found[n] = gather_behind(s, tail, n_tail, nodes, last, found[n]);
        vote(found[n], n_found[n], branches, last, n > 0 ? nodes[last].path : 1.0f, &waiting);
        if (waiting.n == 0) return n;
        nodes[n] = waiting.nodes[--waiting.n];
    }
    return max;
}

/* ---- integrity ---- */

/* Whether the document goes back beyond the `n` tokens before a position, out of the window. */
static bool has_left(const es_suffix *s, uint32_t age, uint32_t n) {
    do age = age_before(s, age);
    while (n-- > 0);
    return age > s->size;
}

/* Whether the chains of an order lead to `n` positions whose `1 << order` tokens before are in the window. */
static bool check_order(const es_suffix *s, size_t order, size_t n) {
    const uint32_t *head = s->head + order * s->capacity, *prev = s->prev + order * s->capacity;
    const uint32_t end = (uint32_t)s->end;
    size_t found = 0;
    for (uint32_t b = 0; b < s->capacity; b++) {
        uint32_t age = end - head[b], last = 0;
        for (; is_alive(s, age); last = age, age = end - prev[(end - age) & (s->capacity - 1)]) {
            if (age <= last || entry(s, age)->token == ES_SUFFIX_END) return false;
            const context c = context_at(s, age_before(s, age));
            if (c.found > order) {
                if (c.bucket[order] != b) return false;
                found++;
            } else if (!has_left(s, age, c.n)) {
                return false;
            }
        }
        if (age - 1 >= ES_SUFFIX_OLDEST) return false;
    }
    return found == n; /* a chain names each position once, and one bucket is right: so none is missing */
}

/* Whether the distances of a position, which lies in the window, are right. */
static bool check_distances(const es_suffix *s, uint32_t age) {
    const uint32_t before = entry(s, age)->before, after = entry(s, age)->after;
    if (before > s->capacity || after >= age) return false;
    if (after && entry(s, age - after)->before != after) return false;
    if (!before) return true;
    return is_alive(s, age + before) ? entry(s, age + before)->after == before : s->size == s->capacity;
}

bool es_suffix_check(const es_suffix *s) {
    if (!s->capacity || s->capacity & (s->capacity - 1) || s->size > s->capacity) return false;
    for (uint32_t age = 1; age <= s->size; age++)
        if (entry(s, age)->token < ES_SUFFIX_END || !check_distances(s, age)) return false;
    size_t linked[ES_SUFFIX_ORDERS] = {0};
    for (uint32_t age = 1; age <= s->size; age++) {
        if (entry(s, age)->token == ES_SUFFIX_END) continue;
        const context c = context_at(s, age_before(s, age));
        for (size_t order = 0; order < c.found; order++) linked[order]++;
    }
    for (size_t order = 0; order < ES_SUFFIX_ORDERS; order++)
        if (!check_order(s, order, linked[order])) return false;
    return true;
}
