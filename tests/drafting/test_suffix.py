"""The suffix store's binding, and its proposals against an oracle that looks at every token."""

from __future__ import annotations

import threading
import tracemalloc
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec._core import SuffixStore
from edgespec.drafting.suffix import SuffixDrafts, n_before_answer

END = -1
ESCAPE = 2.0  # this and weight() as in suffix.c
LEAST = 1 / 1024


def weight(length):
    return length * length


def ints(tokens):
    return np.array(tokens, np.int32)


def length_at(log, start, p, text):
    n = 0
    while n < min(32, p - start, len(text)) and log[p - 1 - n] == text[-1 - n] != END:
        n += 1
    return n


def gather(log, start, text):
    found = [(p, length_at(log, start, p, text)) for p in range(len(log) - 1, start - 1, -1) if log[p] != END]
    classes = [(8, 32), (4, 7), (2, 3), (1, 1)]
    return [o for low, high in classes for o in found if low <= o[1] <= high][:32]


def behind(log, start, tail, nodes, at):
    """Return the occurrences behind node `at`: its parent's that went on with it, or else all there are."""
    if at < 0:
        return gather(log, start, tail)
    token, parent = nodes[at][:2]
    found = [(p + 1, min(32, n + 1)) for p, n in behind(log, start, tail, nodes, parent) if log[p] == token]
    found = [o for o in found if o[0] < len(log) and log[o[0]] != END]
    path = []
    while at >= 0:
        path.insert(0, nodes[at][0])
        at = nodes[at][1]
    return found or gather(log, start, [*tail, *path])


def oracle(log, capacity, tail, most, branches):
    """Return the nodes (token, parent, probability, path) and look at every token for each."""
    start, nodes, waiting = max(0, len(log) - capacity), [], []
    while len(nodes) < most:
        votes, last = {}, {}
        for p, length in behind(log, start, tail, nodes, len(nodes) - 1):
            votes[log[p]] = votes.get(log[p], 0) + weight(length)
            last[log[p]] = max(last.get(log[p], 0), p)
        path = nodes[-1][3] if nodes else np.float32(1)
        for token in sorted(votes, key=lambda t: (votes[t], last[t]), reverse=True)[:branches]:
            prob = np.float32(votes[token]) / np.float32(sum(votes.values()) + ESCAPE)
            waiting.append((token, len(nodes) - 1, prob, path * prob))
        waiting = [node for node in waiting if node[3] >= LEAST]
        if not waiting:
            break
        nodes.append(max(waiting, key=lambda node: node[3]))  # of equals the one that came first
        waiting.remove(nodes[-1])
    return nodes


few = st.lists(st.integers(END, 3), max_size=40)
# Pieces that return are what makes long matches.
streams = st.lists(few, min_size=1, max_size=4).flatmap(
    lambda pieces: st.lists(st.sampled_from(pieces), max_size=12)
)


@settings(max_examples=400, deadline=None)
@given(streams, few, st.integers(0, 6), st.integers(0, 32), st.sampled_from([1, 2, 3, 32]))
def test_proposals_are_the_oracles(pieces, tail, log_capacity, most, branches):
    store, log, capacity = SuffixStore(2**log_capacity), [], 2**log_capacity
    for piece in pieces:
        store.extend(ints(piece))
        log += piece
        assert store.check()
        assert len(store) == min(len(log), capacity)
        for text in (tail, log + tail, log):
            tokens, parents, probs = store.propose(ints(text), most, branches)
            want = oracle(log, capacity, text, most, branches)
            assert list(zip(tokens, parents, probs, strict=True)) == [node[:3] for node in want]
            assert all(0 < p < 1 for p in probs)


def test_the_most_recent_of_equals():
    store = SuffixStore(64)
    store.extend(ints([5, 1, END, 5, 2, END, 5, 1, END, 5, 2, END]))
    assert store.propose(ints([5]), 8, 1) == ([2], [-1], [pytest.approx(2 / 6)])
    assert store.propose(ints([5]), 8, 2) == ([2, 1], [-1, -1], [pytest.approx(2 / 6)] * 2)


def test_the_likeliest_paths_come_first():
    store = SuffixStore(64)
    store.extend(ints([5, 1, 7, END, 5, 1, 8, END, 5, 1, 8, END, 5, 2, 9, END]))
    tokens, parents, probs = store.propose(ints([5]), 8, 32)
    assert tokens == [1, 8, 2, 7, 9]
    assert parents == [-1, 0, -1, 0, 2]
    assert probs == pytest.approx([3 / 6, 8 / 14, 1 / 6, 4 / 14, 4 / 6])
    for most in range(6):
        assert store.propose(ints([5]), most, 32) == (tokens[:most], parents[:most], probs[:most])


@pytest.mark.parametrize("branches", [1, 32])
def test_paths_that_are_too_unlikely_are_left_out(branches):
    # Each token follows the one before in a document of its own: a third, by what one token says.
    store = SuffixStore(64)
    store.extend(ints([token for i in range(8) for token in (i, i + 1, END)]))
    assert store.propose(ints([0]), 8, branches) == (
        [1, 2, 3, 4, 5, 6],
        [-1, 0, 1, 2, 3, 4],
        pytest.approx([1 / 3] * 6),
    )


def test_a_proposal_goes_on_through_shorter_contexts():
    store = SuffixStore(64)
    store.extend(ints([1, 2, 3, END, 9, 3, 4, 5]))
    assert store.propose(ints([1, 2]), 8, 1)[0] == [3, 4, 5]
    assert store.propose(ints([1, 2]), 2, 1)[0] == [3, 4]
    assert store.propose(ints([1, 2]), 0, 1) == ([], [], [])


def test_arrays_of_the_standard_library_also_empty_ones():
    store = SuffixStore(8)
    store.extend(array("i"))
    store.extend(array("i", [1, 2, 1]))
    assert store.propose(array("i", [1]), 1, 1)[0] == [2]
    assert store.propose(array("i"), 8, 1) == ([], [], [])


def test_nothing_known_proposes_nothing():
    store = SuffixStore(8)
    assert len(store) == 0
    assert store.check()
    assert store.propose(ints([1, 2, 3]), 8, 32) == ([], [], [])
    store.extend(ints([1, 2, END]))
    for tail in ([], [7], [END], [1, END], [2], [-5]):
        assert store.propose(ints(tail), 8, 32) == ([], [], [])


@pytest.mark.parametrize("bad", [[-2], [1, 2, -2], [-(2**31), 1]])
def test_a_token_below_the_end_changes_nothing(bad):
    store = SuffixStore(8)
    store.extend(ints([1, 2]))
    with pytest.raises(ValueError, match="below -1"):
        store.extend(ints(bad))
    assert len(store) == 2
    assert store.check()
    assert store.propose(ints([1]), 1, 1)[0] == [2]
    store.extend(ints([3]))  # and it is not in use
    assert len(store) == 3


@pytest.mark.parametrize("capacity", [0, -1, 2**28 + 1, 2**62])
def test_absurd_capacities(capacity):
    with pytest.raises(ValueError, match="capacity"):
        SuffixStore(capacity)


@pytest.mark.parametrize("most", [-1, 33, 2**40])
def test_absurd_lengths(most):
    with pytest.raises(ValueError, match="max"):
        SuffixStore(8).propose(ints([1]), most, 1)


@pytest.mark.parametrize("branches", [0, -1, 33, 2**40])
def test_absurd_branches(branches):
    with pytest.raises(ValueError, match="branches"):
        SuffixStore(8).propose(ints([1]), 1, branches)


@pytest.mark.parametrize(
    "wrong", [[1, 2], b"1234", np.zeros(4, np.int64), np.zeros(4, np.float32), np.zeros(8, np.int32)[::2]]
)
def test_what_is_not_an_array_of_int32(wrong):
    store = SuffixStore(8)
    with pytest.raises((TypeError, BufferError, ValueError)):
        store.extend(wrong)
    with pytest.raises((TypeError, BufferError, ValueError)):
        store.propose(wrong, 1, 1)
    assert len(store) == 0


def test_arguments_are_checked():
    store = SuffixStore(8)
    for call in (
        SuffixStore,
        store.extend,
        store.propose,
        lambda: store.propose(ints([1])),
        lambda: store.propose(ints([1]), 1),
        lambda: store.check(1),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(TypeError):
        SuffixStore("8")


def test_two_threads_at_once_are_refused():
    store = SuffixStore(2**20)
    tokens = np.random.default_rng(1).integers(0, 50_000, 2**23).astype(np.int32)
    thread = threading.Thread(target=store.extend, args=(tokens,))
    thread.start()
    with pytest.raises(RuntimeError, match="another thread"):
        while thread.is_alive():  # until it is at work
            len(store)
    for call in (
        lambda: store.propose(tokens, 1, 1),
        lambda: store.extend(tokens[:1]),
        lambda: len(store),
        store.check,
    ):
        with pytest.raises(RuntimeError, match="another thread"):
            call()
    thread.join()
    assert len(store) == 2**20
    assert store.check()


def test_memory_is_bounded():
    store = SuffixStore(1000)
    n_bytes = store.n_bytes
    assert 36 * 1024 <= n_bytes < 40 * 1024
    tokens = np.random.default_rng(1).integers(-1, 50, 4096).astype(np.int32)
    for _ in range(20):
        store.extend(tokens)
        store.propose(tokens, 32, 32)
    tracemalloc.start()
    try:
        for _ in range(200):
            store.extend(tokens)
            store.propose(tokens, 32, 32)
        assert tracemalloc.get_traced_memory()[0] < 4096
    finally:
        tracemalloc.stop()
    assert len(store) == 1024
    assert store.check()


def drafts_of(*documents):
    drafts = SuffixDrafts(64)
    for tokens in documents:
        drafts.begin(tokens)
    return drafts


def test_an_offer_is_the_first_children_of_the_offered_tree():
    drafts = drafts_of([5, 1, 7], [5, 1, 8], [5, 1, 8], [5, 2, 9], [3, 5])
    assert drafts.offer([], 8)[0] == [1, 8]
    assert drafts.offer_tree([], 8)[:2] == ([1, 8, 2, 7, 9], [-1, 0, -1, 0, 2])
    assert drafts.offer([2], 8)[0] == [9]
    assert drafts.offer_tree([2], 8) == ([9], [-1], drafts.offer([2], 8)[1])
    assert drafts.offer_tree([1], 1)[:2] == ([8], [-1])
    assert drafts.offer_tree([4], 8) == ([], [], [])


END_OF_TURN = 99


def test_what_a_template_puts_before_every_answer_says_nothing_of_it():
    def n_before(*tokens):
        return n_before_answer(tokens, lambda token: token == END_OF_TURN)

    assert n_before(1, 2, END_OF_TURN, 3, 4, 5, 7) == 6
    assert n_before(1, 2, 3, 4, 5, 7) == 0  # no template: the text goes on
    assert n_before(END_OF_TURN, *range(20), 7) == 0  # so long ago that it is no header
    assert n_before(1, 2, 3, END_OF_TURN) == 0  # the answer itself, which ends at once
    header = [END_OF_TURN, 50, 51, 52, 53]
    first, second = [1, 2, 3, *header, 7, 8, 9], [4, 5, *header, 7]
    drafts = drafts_of(first)
    drafts.begin(second)
    assert drafts.offer([], 2)[1][0] > 0.9  # "7", and the header before it
    drafts = drafts_of(first)
    drafts.begin(second, n_silent=len(second) - 1)
    tokens, probabilities = drafts.offer([], 2)
    assert tokens == [8, 9]
    assert probabilities[0] < 0.4  # "7" alone
    drafts.extend([8])
    assert drafts.offer([], 1)[1][0] > probabilities[0]  # the answer's own tokens count
    assert drafts.offer([1, 2], 1)[0] == [3]  # the prompt can still be copied
