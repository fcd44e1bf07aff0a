/* Accept, resample, bonus: what makes speculative sampling exact, over a tree of tokens.
 *
 * Node i of the tree is a token that follows its parent's; a node without one (-1) follows the timeline.  Nodes
 * stand in depth-first order, a parent before its children and a subtree in one piece.  A node was sampled from
 * a q that stands in one of the sampler's slots, or it is a point mass (slot -1: q is 1).  The q of a node may
 * depend on what stands before it in the tree, as when siblings are sampled without replacement.  The target's
 * logits stand in n + 1 rows: row 0 follows the timeline, row i + 1 follows node i.  A chain is the tree whose
 * node i has the parent i - 1.
 *
 * Both rules accept a path from the root and emit its tokens and one more, distributed exactly as the target
 * alone would, whatever q is.  Below, p is what is left of the target's distribution at a node; when a child x
 * that was sampled from q is rejected, p becomes the normalised max(0, weight p - q).
 *
 * Chain rule (on a tree: SpecInfer, arXiv 2305.09781; Sequoia, arXiv 2402.12374; on a chain: Leviathan et al.,
 * arXiv 2211.17192; Chen et al., arXiv 2302.01318): from the root down, children in order, each is accepted
 * with probability min(1, p(x) / q(x)).  The weight is 1.  Lenience l < 1 accepts with min(1, p(x) / (l q(x))),
 * which is not exact: a token can come to be 1/l times as likely as the target makes it.
 * Block rule (on a tree: traversal verification, arXiv 2505.12398; on a chain: Sun et al., arXiv 2403.10444):
 *     weight(root) = 1,  weight(x) = min(1, weight(parent) p(x) / q(x)),
 * and from the leaves up: a leaf is accepted, its path with it, with the probability of its weight.  A rejected
 * leaf is taken away, and of its parent are left p as above and
 *     weight <- R / (R + 1 - weight),  R = sum over x of max(0, weight p(x) - q(x)).
 * Then comes the parent's next child with its leaves, or else the parent, a leaf itself.  The root is accepted.
 * On a chain it never accepts less than the chain rule, nor does it on the trees that the tests enumerate. */
#ifndef EDGESPEC_VERIFY_H
#define EDGESPEC_VERIFY_H

#include "sampler.h"

typedef struct es_rule {
    bool block;
    double lenience; /* of the chain rule: above 0, at most 1 */
} es_rule;

static const es_rule ES_CHAIN = {.block = false, .lenience = 1.0};
static const es_rule ES_BLOCK = {.block = true, .lenience = 1.0};

typedef struct es_draft {
    const int32_t *tokens, *parents, *slots; /* n each */
    size_t n;                                /* at most the sampler's n_slots */
    const float *rows;                       /* n_rows * n_vocab logits of the target */
    size_t n_rows;                           /* n + 1 */
    const int32_t *prefix;                   /* what precedes the tree: the penalties' history */
    size_t n_prefix;
} es_draft;

/* The arrays are the sampler's and valid until its next call. */
typedef struct es_verdict {
    const int32_t *path; /* the accepted nodes, root to leaf */
    size_t n_accepted;
    int32_t next_token;
    /* The nodes whose parent was accepted, or is the root, up to the accepted one among siblings. */
    const es_judged *judged;
    size_t n_judged;
} es_verdict;

/* Runs the rule with coins[n + 1]: one for each node, the last for the next token. */
es_status es_verify(es_sampler *sampler, const es_draft *draft, es_rule rule, const double *coins,
                    es_verdict *verdict);

/* Sets *chance to the probability that the accepted path ends at node `end` (-1: none is accepted) and, where it
 * is not 0, points *next at the distribution that the next token then comes from.  The tests enumerate with it. */
es_status es_outcome(es_sampler *sampler, const es_draft *draft, es_rule rule, int32_t end, double *chance,
                     const es_dist **next);

#endif
