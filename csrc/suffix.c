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

es_suffix *es_suffix_new(size_t capacity) {
    if (capacity == 0 || capacity > ES_SUFFIX_LARGEST) return NULL;
    es_suffix *s = ES_CALLOC(1, sizeof *s);
    if (!s) return NULL;
    s->capacity = 1;
    while (s->capacity < capacity) s->capacity *= 2;
    s->end = 1; /* heads are 0 and so is the age of none: every chain is empty, and no page was touched */
    s->memory = ES_CALLOC(s->capacity, (1 + 2 * ES_SUFFIX_ORDERS) * sizeof(uint32_t));
    if (!s->memory) {
        free(s);
        return NULL;
    }
    s->tokens = s->memory;
    s->prev = (uint32_t *)s->memory + s->capacity;
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
    return sizeof *s + (size_t)s->capacity * (1 + 2 * ES_SUFFIX_ORDERS) * sizeof(uint32_t);
}

/* ---- texts and their buckets ---- */

/* `size` tokens up to `end`: what stands in the store before a position, or a text of its own. */
typedef struct view {
    const int32_t *tokens;
    uint32_t mask, end, size;
} view;

static int32_t token_at(view v, uint32_t age) { return v.tokens[(v.end - age) & v.mask]; }

static view before(const es_suffix *s, uint32_t age) {
    return (view){s->tokens, s->capacity - 1, s->end - age, s->size - age};
}

static bool is_alive(const es_suffix *s, uint32_t age) { return age - 1 < s->size; }

/* The buckets of the text's last 1, 2, 4 and 8 tokens.  Returns how many of the four there are. */
static size_t buckets(view text, uint32_t capacity, uint32_t bucket[ES_SUFFIX_ORDERS]) {
    const uint32_t longest = 1u << (ES_SUFFIX_ORDERS - 1);
    const uint32_t n = text.size < longest ? text.size : longest;
    uint64_t hash = 0;
    size_t found = 0;
    for (uint32_t age = 1; age <= n; age++) {
        const int32_t token = token_at(text, age);
        if (token == ES_SUFFIX_END) break;
        hash = (hash + (uint32_t)token) * UINT64_C(0x9E3779B97F4A7C15);
        if (age == 1u << found) bucket[found++] = (uint32_t)((hash >> 32) * capacity >> 32);
    }
    return found;
}

/* ---- extending ---- */

/* Makes all dead heads younger, twice in each turn of the counter: one that stood still for 2^32
 * tokens would name a living position. */
static void rejuvenate(es_suffix *s) {
    for (size_t i = 0; i < (size_t)ES_SUFFIX_ORDERS * s->capacity; i++)
        if (!is_alive(s, s->end - s->head[i])) s->head[i] = s->end - s->capacity - 1;
}

static void append(es_suffix *s, int32_t token) {
    const size_t slot = s->end & (s->capacity - 1);
    uint32_t bucket[ES_SUFFIX_ORDERS];
    const size_t n = token == ES_SUFFIX_END ? 0 : buckets(before(s, 0), s->capacity, bucket);
    for (size_t order = 0; order < n; order++) {
        uint32_t *head = &s->head[order * s->capacity + bucket[order]];
        s->prev[order * s->capacity + slot] = *head;
        *head = s->end;
    }
    s->tokens[slot] = token;
    s->size += s->size < s->capacity;
    if ((++s->end & INT32_MAX) == 0) rejuvenate(s);
}

bool es_suffix_extend(es_suffix *s, const int32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < ES_SUFFIX_END) return false;
    for (size_t i = 0; i < n; i++) append(s, tokens[i]);
    return true;
}

/* ---- proposing ---- */

typedef struct occurrence {
    uint32_t age, len;
    int32_t next;
} occurrence;

/* In how many tokens, going backwards, two texts agree.  The second holds no ES_SUFFIX_END. */
static uint32_t agreement(view a, view b, uint32_t most) {
    if (a.size < most) most = a.size;
    if (b.size < most) most = b.size;
    uint32_t n = 0;
    while (n < most && token_at(a, n + 1) == token_at(b, n + 1)) n++;
    return n;
}

/* Gathers occurrences of the text, of the longest order first.  A chain of order k also leads to those
 * that agree in 2k tokens and more: the order above has them. */
static size_t gather(const es_suffix *s, view text, occurrence found[ES_SUFFIX_MOST]) {
    uint32_t bucket[ES_SUFFIX_ORDERS];
    size_t n = 0;
    for (size_t order = buckets(text, s->capacity, bucket); order-- > 0;) {
        const bool is_top = order == ES_SUFFIX_ORDERS - 1;
        const uint32_t least = 1u << order, most = is_top ? ES_SUFFIX_LONGEST : 2 * least;
        const uint32_t *prev = s->prev + order * s->capacity;
        uint32_t age = s->end - s->head[order * s->capacity + bucket[order]];
        for (size_t visit = 0; visit < ES_SUFFIX_VISITS && is_alive(s, age); visit++) {
            const view here = before(s, age);
            const uint32_t len = agreement(here, text, most);
            if (len >= least && (is_top || len < most)) {
                found[n++] = (occurrence){age, len, token_at(here, 0)};
                if (n == ES_SUFFIX_MOST) return n;
            }
            age = s->end - prev[here.end & here.mask];
        }
    }
    return n;
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
        const uint32_t age = from[i].age - 1;
        if (from[i].next != token || age == 0) continue;
        const int32_t next = token_at(before(s, age), 0);
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
    return gather(s, (view){text, UINT32_MAX, ES_SUFFIX_LONGEST, n}, found);
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

/* Whether the chains of an order lead to `n` positions whose `1 << order` tokens before are in the window. */
static bool check_order(const es_suffix *s, size_t order, size_t n) {
    const uint32_t *head = s->head + order * s->capacity, *prev = s->prev + order * s->capacity;
    size_t found = 0;
    for (uint32_t b = 0; b < s->capacity; b++) {
        uint32_t age = s->end - head[b], last = 0;
        for (; is_alive(s, age); last = age, age = s->end - prev[(s->end - age) & (s->capacity - 1)]) {
            uint32_t bucket[ES_SUFFIX_ORDERS];
            if (age <= last || token_at(before(s, age), 0) == ES_SUFFIX_END) return false;
            if (buckets(before(s, age), s->capacity, bucket) > order) {
                if (bucket[order] != b) return false;
                found++;
            } else if (s->size - age >= 1u << order || s->size < s->capacity) {
                return false; /* too few tokens are before it, and that is not because some have left */
            }
        }
        if (age - 1 >= ES_SUFFIX_OLDEST) return false;
    }
    return found == n; /* a chain names each position once, and one bucket is right: so none is missing */
}

bool es_suffix_check(const es_suffix *s) {
    if (!s->capacity || s->capacity & (s->capacity - 1) || s->size > s->capacity) return false;
    size_t linked[ES_SUFFIX_ORDERS] = {0}, run = 0; /* run: tokens since the last ES_SUFFIX_END */
    for (uint32_t age = s->size; age > 0; age--) {
        const int32_t token = token_at(before(s, age), 0);
        if (token < ES_SUFFIX_END) return false;
        for (size_t order = 0; order < ES_SUFFIX_ORDERS; order++)
            linked[order] += token != ES_SUFFIX_END && run >= (size_t)1 << order;
        run = token == ES_SUFFIX_END ? 0 : run + 1;
    }
    for (size_t order = 0; order < ES_SUFFIX_ORDERS; order++)
        if (!check_order(s, order, linked[order])) return false;
    return true;
}
