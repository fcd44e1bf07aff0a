"""The suffix store's binding, and its proposals against an oracle that looks at every token."""

from __future__ import annotations

import threading
import tracemalloc
from array import array
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec._core import SuffixStore
from edgespec.drafting.suffix import Document, n_before_answer

pytestmark = pytest.mark.proof

END = -1
ESCAPE = 2.0  # this and weight() as in suffix.c
LEAST = 1 / 1024


def weight(length):
    return length * length


def ints(tokens):
    return np.array(tokens, np.int32)


class Log:
    """All that was ever appended, and of which document each token is."""

    def __init__(self):
        self.tokens, self.document = [], []

    def extend(self, name, tokens):
        self.tokens += tokens
        self.document += [name] * len(tokens)

    def of(self, name):
        return [token for token, owner in zip(self.tokens, self.document, strict=True) if owner == name]

    def step(self, p, by):
        """Return the position of the next token of p's document in a direction, or None."""
        name, p = self.document[p], p + by
        while 0 <= p < len(self.tokens):
            if self.document[p] == name:
                return p
            p += by
        return None


def length_at(log, start, p, text):
    n = 0
    while n < min(32, len(text)):
        p = log.step(p, -1)
        if p is None or p < start or not log.tokens[p] == text[-1 - n] != END:
            break
        n += 1
    return n


def gather(log, start, text):
    positions = [p for p in range(len(log.tokens) - 1, start - 1, -1) if log.tokens[p] != END]
    found = [(p, length_at(log, start, p, text)) for p in positions]
    classes = [(8, 32), (4, 7), (2, 3), (1, 1)]
    return [o for low, high in classes for o in found if low <= o[1] <= high][:32]


def behind(log, start, tail, nodes, at):
    """Return the occurrences behind node `at`: its parent's that went on with it, or else all there are."""
    if at < 0:
        return gather(log, start, tail)
    token, parent = nodes[at][:2]
    above = [o for o in behind(log, start, tail, nodes, parent) if log.tokens[o[0]] == token]
    found = [(log.step(p, 1), min(32, n + 1)) for p, n in above]
    found = [o for o in found if o[0] is not None and log.tokens[o[0]] != END]
    path = []
    while at >= 0:
        path.insert(0, nodes[at][0])
        at = nodes[at][1]
    return found or gather(log, start, [*tail, *path])


def oracle(log, capacity, tail, most, branches):
    """Return the nodes (token, parent, probability, path) and look at every token for each."""
    start, nodes, waiting = max(0, len(log.tokens) - capacity), [], []
    while len(nodes) < most:
        votes, last = {}, {}
        for p, length in behind(log, start, tail, nodes, len(nodes) - 1):
            votes[log.tokens[p]] = votes.get(log.tokens[p], 0) + weight(length)
            last[log.tokens[p]] = max(last.get(log.tokens[p], 0), p)
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
# Pieces that return are what makes long matches; each goes to one of the documents that grow.
streams = st.lists(few, min_size=1, max_size=4).flatmap(
    lambda pieces: st.integers(0, 3).flatmap(
        lambda others: st.lists(
            st.tuples(st.integers(0, others), st.sampled_from(pieces), st.integers(1, 40)), max_size=12
        )
    )
)


@settings(max_examples=400, deadline=None)
@given(streams, few, st.integers(0, 6), st.integers(0, 32), st.sampled_from([1, 2, 3, 32]))
def test_proposals_are_the_oracles(growth, tail, log_capacity, most, branches):
    capacity = 2**log_capacity
    store, log, documents = SuffixStore(capacity), Log(), {}
    for name, piece, n in growth:
        documents[name] = store.extend(ints(piece[:n]), documents.get(name, 0))
        log.extend(name, piece[:n])
        assert store.check()
        assert len(store) == min(len(log.tokens), capacity)
        own = log.of(name)
        for text in (tail, own + tail, own):
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
    assert store.extend(array("i")) == 0
    assert store.extend(array("i", [1, 2, 1])) == 3
    assert store.extend(array("i"), 3) == 3
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
    document = store.extend(ints([1, 2]))
    with pytest.raises(ValueError, match="below -1"):
        store.extend(ints(bad), document)
    assert len(store) == 2
    assert store.check()
    assert store.propose(ints([1]), 1, 1)[0] == [2]
    store.extend(ints([3]), document)  # and it is not in use
    assert len(store) == 3


@pytest.mark.parametrize("position", [-1, 1, 4, 2**32 + 3, 2**63 - 1])
def test_a_position_at_which_no_document_ends_changes_nothing(position):
    store = SuffixStore(8)
    assert store.extend(ints([1, 2, 3])) == 3
    with pytest.raises(ValueError, match=f"none ends at position {position}$"):
        store.extend(ints([4]), position)
    assert len(store) == 3
    assert store.extend(ints([4]), 3) == 4
    with pytest.raises(ValueError, match="none ends"):
        store.extend(ints([4]), 3)  # 4 follows it
    assert store.check()


@pytest.mark.parametrize("absurd", [-1, 33, 2**40])
def test_absurd_numbers(absurd):
    for capacity in (0, absurd, 2**28 + 1) if absurd != 33 else ():
        with pytest.raises(ValueError, match="capacity"):
            SuffixStore(capacity)
    with pytest.raises(ValueError, match="max"):
        SuffixStore(8).propose(ints([1]), absurd, 1)
    for branches in (0, absurd):
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
        lambda: store.extend(ints([1]), "1"),
        lambda: store.extend(ints([1]), 0, 0),
        lambda: store.clear(1),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(TypeError):
        SuffixStore("8")
    with pytest.raises(OverflowError):
        store.extend(ints([1]), 2**63)


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
        store.clear,
    ):
        with pytest.raises(RuntimeError, match="another thread"):
            call()
    thread.join()
    assert len(store) == 2**20
    assert store.check()


def test_memory_is_bounded():
    store = SuffixStore(1000)
    n_bytes = store.n_bytes
    assert 44 * 1024 <= n_bytes < 48 * 1024
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


def documents_of(*texts):
    drafts = SuffixStore(64)
    return [Document(drafts, tokens) for tokens in texts]


def test_an_offer_is_the_first_children_of_the_offered_tree():
    document = documents_of([5, 1, 7], [5, 1, 8], [5, 1, 8], [5, 2, 9], [3, 5])[-1]
    assert document.offer([], 8)[0] == [1, 8]
    assert document.offer_tree([], 8)[:2] == ([1, 8, 2, 7, 9], [-1, 0, -1, 0, 2])
    assert document.offer([2], 8)[0] == [9]
    assert document.offer_tree([2], 8) == ([9], [-1], document.offer([2], 8)[1])
    assert document.offer_tree([1], 1)[:2] == ([8], [-1])
    assert document.offer_tree([4], 8) == ([], [], [])


def test_a_match_in_another_text_under_way():
    first, second = documents_of([1, 2, 3], [1, 2])
    assert second.offer([], 8)[0] == [3]
    for token in (4, 5, 6):  # each right behind the second text's own last token
        second.extend([token + 10])
        first.extend([token])
    second.extend([2, 3])
    assert second.offer([], 8)[0] == [4, 5, 6]
    first.extend([7])
    assert second.offer([], 8)[0] == [4, 5, 6, 7]
    assert first.offer([11], 8)[0] == []  # nobody wrote 11: the texts are not one


def grow(texts, *, step, interleaved):
    """Grow `texts` in one store, and return what each was offered at each of its steps."""
    drafts, offers = SuffixStore(4096), {name: [] for name in range(len(texts))}
    open_ones = {}

    def take(name, at):
        if at == 0:
            open_ones[name] = Document(drafts, texts[name][:step])
        else:
            open_ones[name].extend(texts[name][at : at + step])
        document = open_ones[name]
        offers[name].append((document.offer([], 16), document.offer_tree([texts[name][0]], 16)))

    turns = [(at, name) for at in range(0, len(texts[0]), step) for name in range(len(texts))]
    for at, name in turns if interleaved else sorted(turns, key=lambda turn: turn[1]):
        take(name, at)
    return offers


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=60, max_size=60), min_size=2, max_size=5), st.integers(1, 7)
)
def test_texts_that_share_no_token_grow_as_if_alone(texts, step):
    texts = [[4 * name + token for token in text] for name, text in enumerate(texts)]
    in_turns = grow(texts, step=step, interleaved=True)
    assert in_turns == grow(texts, step=step, interleaved=False)
    for name, text in enumerate(texts):
        assert in_turns[name] == grow([text], step=step, interleaved=True)[0]
    assert any(offer[0] for offers in in_turns.values() for offer, _ in offers)


def test_an_open_text_loses_its_oldest_part_while_others_grow():
    drafts = SuffixStore(16)
    text, other = Document(drafts, [1, 2, 3, 4, 5]), Document(drafts, [])
    text.extend([1, 2])
    other.extend(range(20, 27))  # 16 tokens, with the ends before both
    assert text.offer([], 3) == ([3, 4, 5], [pytest.approx(4 / 6), pytest.approx(9 / 11), ANY])
    other.extend([27, 28])  # the first end and 1 leave: what went on with 3 agrees in 2 alone
    assert text.offer([], 3) == ([3, 4, 5], [pytest.approx(1 / 3), pytest.approx(4 / 6), ANY])
    other.extend([29, 30])  # 2 and 3 leave
    assert text.offer([], 3) == ([], [])
    text.extend([4])  # in place of the 4 before 5
    assert text.offer([], 3) == ([], [])
    text.extend([6, 4])
    assert text.offer([], 2)[0] == [6, 4]
    other.extend(range(40, 60))  # all of the text leaves
    assert text.offer([], 3) == ([], [])
    text.extend([7, 8, 7])
    assert text.offer([], 1)[0] == [8]
    assert text.offer([59], 1)[0] == []  # 7 came after 59 in the store, but not in a text


def test_open_texts_survive_that_all_is_forgotten():
    drafts = SuffixStore(64)
    first, second = Document(drafts, [1, 2, 3, 1]), Document(drafts, [4, 5, 4])
    assert first.offer([], 1)[0] == [2]
    drafts.clear()
    assert first.offer([], 1) == second.offer([], 1) == ([], [])
    first.extend([2, 9])
    second.extend([5, 4])
    first.extend([1, 2])
    assert first.offer([], 2)[0] == [9, 1]
    assert second.offer([], 1) == ([], [])  # only 5, 4 came since


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
    answer = documents_of(first, second)[-1]
    assert answer.offer([], 2)[1][0] > 0.9  # "7", and the header before it
    drafts = SuffixStore(64)
    Document(drafts, first)
    answer = Document(drafts, second, n_silent=len(second) - 1)
    tokens, probabilities = answer.offer([], 2)
    assert tokens == [8, 9]
    assert probabilities[0] < 0.4  # "7" alone
    answer.extend([8])
    assert answer.offer([], 1)[1][0] > probabilities[0]  # the answer's own tokens count
    assert answer.offer([1, 2], 1)[0] == [3]  # the prompt can still be copied
