"""The passes that rewrite a token tree, as a compiler does: each a pure function from trees to a tree.

    merge    common subexpressions: one node for the same token after the same text
    balance  conflicting estimates for one position
    fold     constant folding: tokens that a grammar leaves no choice about
    order    the layout: depth first, siblings in the order in which they are to be tested
    cut      scheduling and dead code: as many nodes, the likeliest first, as pay in the target's pass

A pass that has nothing to do returns the very tuple it was given.

Exactness: a node that was sampled, and every node above one, is *pinned*: no pass drops it. Dropping a token
because of its value changes what is emitted, even where the draft's distribution is the
target's. A point mass came from no coin, and may be dropped for any reason (docs/measuring.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from edgespec.decoding.tree import Tree, TreeNode, children_of, depth_first, is_chain

Forced = Callable[[Sequence[int]], int | None]
"""The only token that may follow these tokens of the tree; None if there is a choice."""


def merge(trees: Sequence[Tree]) -> Tree:
    """Merge `trees` into one, in which each token appears once under its parent.

    A sampled node absorbs the point masses of its token and their children; without one, the first of them
    does. The path is the likelier of the two. Tokens that were sampled from different slots stay siblings:
    each was drawn, and each is tested.
    """
    trees = [tree for tree in trees if tree]
    if not trees:
        return ()
    if len(trees) == 1 and is_chain(trees[0]):
        return trees[0]
    nodes: list[TreeNode] = []
    drawn: list[int] = []  # when each node came: of sampled siblings, the order in which they were drawn
    below: list[list[int]] = []
    top: list[int] = []
    n_seen = 0
    for tree in trees:
        place: list[int] = []
        for node in tree:
            parent = place[node.parent] if node.parent >= 0 else -1
            siblings = below[parent] if parent >= 0 else top
            for at in siblings:
                if _is_same(nodes[at], node):
                    break
            else:
                at = len(nodes)
                nodes.append(node)
                drawn.append(n_seen)
                below.append([])
                siblings.append(at)
            path = max(nodes[at].path, node.path)
            if nodes[at].slot < 0 <= node.slot:
                nodes[at], drawn[at] = node, n_seen
            if nodes[at].path != path:
                nodes[at] = replace(nodes[at], path=path)
            place.append(at)
            n_seen += 1
    if len(trees) == 1 and len(nodes) == n_seen:
        return trees[0]
    for siblings in (top, *below):
        siblings.sort(key=drawn.__getitem__)
    return _lay_out(nodes, [*below, top])


def _is_same(a: TreeNode, b: TreeNode) -> bool:
    return a.token == b.token and (a.slot < 0 or b.slot < 0 or a.slot == b.slot)


def balance(tree: Tree) -> Tree:
    """Return `tree` with consistent paths: those of siblings add up to at most their parent's.

    Two sources that propose different tokens for one position may both be sure, but only one can be right:
    the likeliest keeps its path, the others share the rest of the parent's, and subtrees scale with them.
    """
    below = children_of(tree)
    scale = [1.0] * (len(tree) + 1)
    paths = [*(node.path for node in tree), 1.0]
    for parent in (-1, *range(len(tree))):
        siblings = below[parent]
        left = paths[parent]
        for i in sorted(siblings, key=lambda i: -tree[i].path) if len(siblings) > 1 else siblings:
            paths[i] = min(tree[i].path * scale[parent], left)
            left -= paths[i]
            scale[i] = paths[i] / tree[i].path if tree[i].path > 0.0 else 1.0
    if all(factor > 1.0 - 1e-9 for factor in scale):
        return tree
    return tuple(
        node if node.path == path else replace(node, path=path)
        for node, path in zip(tree, paths, strict=False)
    )


def fold(tree: Tree, forced: Forced, room: int) -> Tree:
    """Return `tree` with each token that `forced` requires, and no point mass beside it.

    The forced token gets its parent's path, and those of its subtree scale with it. Tokens sampled beside it
    stay, with chance 0. Where a token is forced after the end of the tree it grows, up to `room` nodes in
    all, the likeliest positions first.
    """
    pinned = _pinned(tree)
    # The last entry of each is the root's: it is at -1, where its children look for their parent.
    before = [*(node.path for node in tree), 1.0]
    after = before.copy()
    kept = [True] * (len(tree) + 1)
    texts: list[tuple[int, ...] | None] = [*[None] * len(tree), ()]  # None: a text that cannot be
    only: list[int | None] = [*[None] * len(tree), forced(())]
    ends = set() if only[-1] is None else {-1}  # where a token is forced and is not there
    nodes = list(tree)
    for i, node in enumerate(tree):
        parent, token, text = node.parent, only[node.parent], texts[node.parent]
        if text is None or token not in (None, node.token):
            kept[i] = pinned[i]
            after[i] = 0.0
        else:
            texts[i] = text = (*text, node.token)
            only[i] = forced(text)
            if only[i] is not None:
                ends.add(i)
            if token is not None:
                ends.discard(parent)
                after[i] = after[parent]
                nodes[i] = replace(node, source="forced" if node.slot < 0 else node.source, chance=1.0)
            elif after[parent] != before[parent] > 0.0:
                after[i] = after[parent] * (before[i] / before[parent])
        if after[i] != before[i]:
            nodes[i] = replace(nodes[i], path=after[i])
    n_more = room - (sum(kept) - 1)
    for end in sorted(ends, key=after.__getitem__, reverse=True):
        parent, token, grown = end, only[end], list(texts[end] or ())
        while token is not None and n_more > 0:
            nodes.append(TreeNode(parent, token, "forced", after[end]))
            parent, n_more = len(nodes) - 1, n_more - 1
            grown.append(token)
            token = forced(grown)
    folded = _select(tuple(nodes), [*kept[:-1], *[True] * (len(nodes) - len(tree))])
    return tree if folded == tree else folded


def cut(tree: Tree, cost: Sequence[float], rate: float, room: int, again: float = 0.0) -> Tree:
    """Return the part of `tree`, at most `room` nodes, that gains most in the target's pass.

    `cost[n]`: the cost of a pass over n tokens, the pending one and n - 1 nodes; larger passes than `cost`
    covers are not made. With `rate` the tokens that a unit of cost brings now, the gain is the sum of
    the paths less `rate * (cost[n + 1] - cost[1])`. An accepted node beside the trunk is evaluated again with
    the next pass, which takes `again` of its token. Ties go to the smallest part. The pinned nodes are
    always kept: the caller must ensure that there is room for them.
    """
    reach = _reach(tree)
    if again:
        n_trunk = next((i for i, node in enumerate(tree) if node.parent != i - 1), len(tree))
        reach[n_trunk:-1] = [path * (1.0 - again) for path in reach[n_trunk:-1]]
    kept = _pinned(tree)
    likeliest = [i for i, is_pinned in enumerate(kept) if not is_pinned]
    likeliest.sort(key=reach.__getitem__, reverse=True)  # stable: of equals the parent is first
    n = len(tree) - len(likeliest)
    n_most = min(room, len(cost) - 2)
    gain = best = 0.0
    n_best = 0
    for n_taken, i in enumerate(likeliest, 1):
        n += 1
        if n > n_most:
            break
        gain += reach[i] - rate * (cost[n + 1] - cost[n])
        if gain > best:
            best, n_best = gain, n_taken
    for i in likeliest[:n_best]:
        kept[i] = True
    return _select(tree, kept)


def order(tree: Tree) -> Tree:
    """Return `tree` depth first, parents before children.

    Sampled siblings come first, in the order they were drawn; the distribution of a later one excludes the
    tokens of those before it. Then come the point masses, the likeliest first.
    """
    if is_chain(tree):
        return tree
    below = children_of(tree)
    for siblings in below:
        if len(siblings) > 1:
            siblings.sort(key=lambda i: (tree[i].slot < 0, -tree[i].path if tree[i].slot < 0 else 0.0))
    laid_out = _lay_out(tree, below)
    return tree if laid_out == tree else laid_out


def _pinned(tree: Tree) -> list[bool]:
    pinned = [node.slot >= 0 for node in tree]
    for i in range(len(tree) - 1, -1, -1):
        parent = tree[i].parent
        if pinned[i] and parent >= 0:
            pinned[parent] = True
    return pinned


def _reach(tree: Tree) -> list[float]:
    """Return the path of each node, capped at its parent's; the root's comes last."""
    reach = [1.0] * (len(tree) + 1)
    for i, node in enumerate(tree):
        path, above = node.path, reach[node.parent]
        reach[i] = path if path < above else above
    return reach


def _lay_out(nodes: Sequence[TreeNode], below: Sequence[Sequence[int]]) -> Tree:
    """Return the nodes depth first and renumbered, children in the order of `below`."""
    place = [-1] * len(below)
    parents = [-1] * len(below)
    for parent, siblings in enumerate(below[:-1]):
        for i in siblings:
            parents[i] = parent
    found = depth_first(below)
    for at, i in enumerate(found):
        place[i] = at
    return tuple(_under(nodes[i], place[parents[i]]) for i in found)


def _select(tree: Tree, kept: Sequence[bool]) -> Tree:
    """Return the kept nodes, renumbered; the same tuple if all are kept."""
    if all(kept):
        return tree
    place = [-1] * (len(tree) + 1)
    found: list[TreeNode] = []
    for i, node in enumerate(tree):
        if kept[i]:
            place[i] = len(found)
            found.append(_under(node, place[node.parent]))
    return tuple(found)


def _under(node: TreeNode, parent: int) -> TreeNode:
    """Return `node` with another parent, in half the time that `replace` takes."""
    if node.parent == parent:
        return node
    return TreeNode(
        parent,
        node.token,
        node.source,
        node.path,
        node.slot,
        node.chance,
        node.bucket,
        node.next_bucket,
        node.is_top,
    )
