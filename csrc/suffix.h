/* Remembers texts, of which many may grow at the same time, and proposes how one goes on: as it, or
 * another, went on before.
 *
 * All tokens are in one log: a ring of the last `capacity` tokens, and hash chains over it as in zlib's
 * match finder.  A position is a counter of tokens; its token lies at that index modulo `capacity`.
 * Position p is linked under the 1, 2, 4 and 8 tokens before it, the most recent first:
 *
 *      tokens   ... a b X  ...   a b Y   ...   a b Z ... |      the next token goes to `end`
 *                       ^            ^             ^
 *                     older <------ prev <------- prev <--- head[order][bucket of "a b"]
 *
 * A tree would hold the counts of what followed; here they are counted at lookup, and in return the
 * oldest token leaves by being overwritten, and a new store takes in 524,288 tokens in 25 to 50 ms
 * (50 to 100 ns a token; 22 to 60 in memory that was touched before).
 *
 * The age of a position is end - p.  It is alive when 1 <= age <= size: it lies in the window.
 * Nothing else says that a link is dead, so nothing is done when a position leaves the window.
 *
 * Documents that grow in turns are mixed in the log.  So each position also says how far away the token
 * before it and the token after it in its own document are; where one document grows alone, that is 1:
 *
 *      document A    a1 <---------------> a2 <-> a3 <---------------------> a4
 *      document B           b1 <-> b2                   b3 <-> b4 <-> b5
 *
 * What is said below of tokens before or after a position is along these two distances.  The store does
 * not know which documents still grow: who extends one names it by the position of its last token.
 * ES_SUFFIX_END also ends a document, so that many can be appended at once: no match reaches across
 * it and no proposal goes over it.
 *
 * Invariants, checked by es_suffix_check; "in the window" means the last `size` tokens:
 *   - capacity is a power of two and size <= capacity; tokens in the window are >= ES_SUFFIX_END;
 *   - no distance is above the capacity; of two positions in the window both distances name the other,
 *     or none does.  Only when the window is full may the token before a position have left it;
 *   - a chain's links are alive and strictly older one after the other, until one that is dead;
 *   - a position is in the chain of order k that the k tokens before it name, once, exactly when its
 *     token and those k are in the window and none is ES_SUFFIX_END.  A position whose k tokens
 *     left the window since may still be in a chain: it no longer matches k tokens;
 *   - no head or link of a chain has an age of 0 or above ES_SUFFIX_OLDEST, so that a dead link
 *     cannot come to life when its 32 bits wrap round.  `end` has 64 and does not.
 * Memory is allocated by es_suffix_new alone; nothing here allocates afterwards. */
#ifndef EDGESPEC_SUFFIX_H
#define EDGESPEC_SUFFIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    ES_SUFFIX_END = -1,
    ES_SUFFIX_LONGEST = 32,      /* tokens of the text that are compared; most tokens proposed at once */
    ES_SUFFIX_MOST = 32,         /* occurrences that vote; most tokens proposed for one position */
    ES_SUFFIX_VISITS = 128,      /* links followed in one chain by one lookup: what hides behind more in
                                    the same bucket is not found */
    ES_SUFFIX_ORDERS = 4,        /* chains by 1, 2, 4 and 8 tokens */
    ES_SUFFIX_LARGEST = 1 << 28, /* tokens of capacity */
};
#define ES_SUFFIX_OLDEST (UINT32_C(3) << 30)
#define ES_SUFFIX_LEAST (1.0f / 1024) /* what is less likely, with all before it, is not proposed */

typedef struct es_suffix_entry {
    int32_t token;
    uint32_t before; /* how much older the token before it is; 0: the document begins here */
    uint32_t after;  /* how much younger the token after it is; 0: there is none yet */
} es_suffix_entry;

typedef struct es_suffix {
    uint64_t end;         /* the position that the next token gets; 0 is no position */
    uint32_t capacity;
    uint32_t size;        /* tokens in the window */
    es_suffix_entry *log; /* [capacity], by position modulo capacity */
    uint32_t *prev;       /* [ES_SUFFIX_ORDERS][capacity], modulo 2^32: the next older position in the chain */
    uint32_t *head;       /* [ES_SUFFIX_ORDERS][capacity], modulo 2^32, by bucket: the most recent position */
    void *memory;         /* the one allocation behind the three pointers above */
} es_suffix;

/* A token of what is proposed: a tree, in an array in which parents come first. */
typedef struct es_suffix_node {
    int32_t token;
    int32_t parent; /* the index of the node before it; -1: it follows the text */
    float prob;     /* of the token, given those before it: in (0, 1) */
    float path;     /* of it and all before it: the product of their probabilities */
} es_suffix_node;

/* The capacity is rounded up to a power of two.  Returns NULL when memory runs out and for a capacity
 * of 0 or above ES_SUFFIX_LARGEST. */
es_suffix *es_suffix_new(size_t capacity);
void es_suffix_free(es_suffix *store);

/* Appends tokens[n] to a document and writes the position of its last token to *document.  The document
 * is named by what was written there before; 0 begins a new one.  One whose last token has left the window
 * goes on as a new one.  Returns false, and changes nothing, when a token is below ES_SUFFIX_END, or when
 * *document is no document's last position: it is yet to come, or a token follows it. */
bool es_suffix_extend(es_suffix *store, uint64_t *document, const int32_t *tokens, size_t n);

/* Whether es_suffix_extend takes this for a document. */
bool es_suffix_is_last(const es_suffix *store, uint64_t document);

/* Forgets all tokens.  Documents that grew go on as new ones. */
void es_suffix_clear(es_suffix *store);

/* Writes how tail[n_tail] may go on to nodes[max]: at most `max` tokens, at most ES_SUFFIX_LONGEST, the
 * likeliest paths first, down to ES_SUFFIX_LEAST; at most `branches` tokens follow each.  With `branches`
 * 1 that is a chain, and the first children of every tree are a part of that chain, from its beginning
 * on.  Returns how many nodes there are.
 *
 * An occurrence is a position in the window with a token that is not ES_SUFFIX_END, before which at
 * least the last token of the text stands.  Its length is the number of tokens, going backwards, in
 * which store and text agree: at most ES_SUFFIX_LONGEST, within the window and the document.
 * ES_SUFFIX_MOST occurrences are gathered, those of length 8 and more before those of 4 to 7, 2 to 3
 * and 1, the most recent first.  Each votes for its token with a weight that grows with its length;
 * what a token got of all weight, and of some for what was never seen, is its probability.  Of equals
 * the one that occurred last comes first.  Behind a node the occurrences that voted for it move on by one
 * token; when none of them can, they are gathered anew. */
size_t es_suffix_propose(const es_suffix *store, const int32_t *tail, size_t n_tail, size_t max,
                         size_t branches, es_suffix_node *nodes);

size_t es_suffix_size(const es_suffix *store);
size_t es_suffix_bytes(const es_suffix *store);
/* Whether every invariant above holds.  Takes time proportional to the capacity. */
bool es_suffix_check(const es_suffix *store);

#endif
