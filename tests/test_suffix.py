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

END = -1
ESCAPE = 2.0  # this and weight() as in suffix.c


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


def oracle(log, capacity, tail, most):
    start, text, found = max(0, len(log) - capacity), list(tail), []
    tokens, probs = [], []
    while len(tokens) < most:
        found = found or gather(log, start, text)
        if not found:
            break
        votes, last = {}, {}
        for p, length in found:
            votes[log[p]] = votes.get(log[p], 0) + weight(length)
            last[log[p]] = max(last.get(log[p], 0), p)
        token = max(votes, key=lambda t: (votes[t], last[t]))
        tokens.append(token)
        probs.append(votes[token] / (sum(votes.values()) + ESCAPE))
        text.append(token)
        found = [(p + 1, min(32, n + 1)) for p, n in found if log[p] == token]
        found = [o for o in found if o[0] < len(log) and log[o[0]] != END]
    return tokens, probs


few = st.lists(st.integers(END, 3), max_size=40)
# Pieces that return are what makes long matches.
streams = st.lists(few, min_size=1, max_size=4).flatmap(
    lambda pieces: st.lists(st.sampled_from(pieces), max_size=12)
)


@settings(max_examples=400, deadline=None)
@given(streams, few, st.integers(0, 6), st.integers(0, 32))
def test_proposals_are_the_oracles(pieces, tail, log_capacity, most):
    store, log, capacity = SuffixStore(2**log_capacity), [], 2**log_capacity
    for piece in pieces:
        store.extend(ints(piece))
        log += piece
        assert store.check()
        assert len(store) == min(len(log), capacity)
        for text in (tail, log + tail, log):
            tokens, probs = store.propose(ints(text), most)
            want, want_probs = oracle(log, capacity, text, most)
            assert tokens == want
            assert probs == pytest.approx(want_probs, abs=1e-6)
            assert all(0 < p < 1 for p in probs)


def test_the_most_recent_of_equals():
    store = SuffixStore(64)
    store.extend(ints([5, 1, END, 5, 2, END, 5, 1, END, 5, 2, END]))
    assert store.propose(ints([5]), 8) == ([2], [pytest.approx(2 / 6)])


def test_a_proposal_goes_on_through_shorter_contexts():
    store = SuffixStore(64)
    store.extend(ints([1, 2, 3, END, 9, 3, 4, 5]))
    assert store.propose(ints([1, 2]), 8)[0] == [3, 4, 5]
    assert store.propose(ints([1, 2]), 2)[0] == [3, 4]
    assert store.propose(ints([1, 2]), 0) == ([], [])


def test_arrays_of_the_standard_library_also_empty_ones():
    store = SuffixStore(8)
    store.extend(array("i"))
    store.extend(array("i", [1, 2, 1]))
    assert store.propose(array("i", [1]), 1)[0] == [2]
    assert store.propose(array("i"), 8) == ([], [])


def test_nothing_known_proposes_nothing():
    store = SuffixStore(8)
    assert len(store) == 0
    assert store.check()
    assert store.propose(ints([1, 2, 3]), 8) == ([], [])
    store.extend(ints([1, 2, END]))
    for tail in ([], [7], [END], [1, END], [2], [-5]):
        assert store.propose(ints(tail), 8) == ([], [])


@pytest.mark.parametrize("bad", [[-2], [1, 2, -2], [-(2**31), 1]])
def test_a_token_below_the_end_changes_nothing(bad):
    store = SuffixStore(8)
    store.extend(ints([1, 2]))
    with pytest.raises(ValueError, match="below -1"):
        store.extend(ints(bad))
    assert len(store) == 2
    assert store.check()
    assert store.propose(ints([1]), 1)[0] == [2]
    store.extend(ints([3]))  # and it is not in use
    assert len(store) == 3


@pytest.mark.parametrize("capacity", [0, -1, 2**28 + 1, 2**62])
def test_absurd_capacities(capacity):
    with pytest.raises(ValueError, match="capacity"):
        SuffixStore(capacity)


@pytest.mark.parametrize("most", [-1, 33, 2**40])
def test_absurd_lengths(most):
    with pytest.raises(ValueError, match="max"):
        SuffixStore(8).propose(ints([1]), most)


@pytest.mark.parametrize(
    "wrong", [[1, 2], b"1234", np.zeros(4, np.int64), np.zeros(4, np.float32), np.zeros(8, np.int32)[::2]]
)
def test_what_is_not_an_array_of_int32(wrong):
    store = SuffixStore(8)
    with pytest.raises((TypeError, BufferError, ValueError)):
        store.extend(wrong)
    with pytest.raises((TypeError, BufferError, ValueError)):
        store.propose(wrong, 1)
    assert len(store) == 0


def test_arguments_are_checked():
    store = SuffixStore(8)
    for call in (
        SuffixStore,
        store.extend,
        store.propose,
        lambda: store.propose(ints([1])),
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
        lambda: store.propose(tokens, 1),
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
        store.propose(tokens, 32)
    tracemalloc.start()
    try:
        for _ in range(200):
            store.extend(tokens)
            store.propose(tokens, 32)
        assert tracemalloc.get_traced_memory()[0] < 4096
    finally:
        tracemalloc.stop()
    assert len(store) == 1024
    assert store.check()
