"""Timelines that are kept: what was copied back gives the rows that stood there before, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.model import DraftModel
from edgespec.errors import EdgespecError
from edgespec.llama.prefixes import Prefixes, n_common
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_gguf import write_tiny_gguf
from tree_shapes import SPREAD, random_shape, trunk

ABORT = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
PLENTY = 1 << 30
NEXT = [3, 1, 4, 1, 5]


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def open_session(model: Model, n_ctx: int = 256, **others: int) -> Session:
    return Session(model, n_ctx=n_ctx, n_threads=1, **others)


def read(session: Session, prefixes: Prefixes, tokens: list[int]) -> int:
    """Do as the engine does with a prompt; return how many tokens were not read again."""
    n_known = prefixes.prepare(session, tokens)
    session.rewind(n_known)
    session.eval(tokens[n_known:])
    assert session.timeline == tokens
    return n_known


def rows(session: Session) -> np.ndarray:
    """The logits of a few tokens more, which are taken back."""
    n_past = session.n_past
    found = session.eval(NEXT, n_logits=len(NEXT)).copy()
    session.rewind(n_past)
    return found


@pytest.fixture(scope="module", params=["llama", "a sliding window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model; one of them sees the last 16 tokens only, in its first layer."""
    path = tmp_path_factory.mktemp("prefixes") / "tiny.gguf"
    if request.param == "llama":
        write_tiny_gguf(path, seed=1)
    else:
        norms = {"attn_q_norm.weight": 64, "attn_k_norm.weight": 64}
        norms |= {"post_attention_norm.weight": 256, "post_ffw_norm.weight": 256}
        lengths = {"{arch}.attention.key_length": 64, "{arch}.attention.value_length": 64}
        window = {"{arch}.attention.sliding_window": 16}
        shape = {"n_embd": 256, "n_ff": 256, "n_layer": 2}
        write_tiny_gguf(path, architecture="gemma3", vectors=norms, extra=lengths | window, **shape)
    with Model(path) as opened:
        yield opened


# The session: its timeline, and copies of it


def test_the_timeline_is_what_was_read_and_stayed(model: Model) -> None:
    rng = np.random.default_rng(3)
    with open_session(model, n_batch=48) as session:
        expected: list[int] = []
        for _ in range(60):
            if len(expected) > 150:
                n_keep = int(rng.integers(0, 60))
                session.rewind(n_keep)
                del expected[n_keep:]
            tokens = rng.integers(0, 256, rng.integers(2, 60)).tolist()
            if rng.random() < 0.5:
                session.eval(tokens, n_logits=0)
                expected += tokens
            else:
                parents = random_shape(rng, int(rng.integers(1, min(len(tokens), 12))))
                session.eval(tokens, n_logits=len(parents) + 1, parents=parents)
                expected += tokens[: len(tokens) - len(parents) + trunk(parents)]
            assert session.timeline == expected
        session.clear()
        assert session.timeline == []


@pytest.mark.parametrize("others", [{}, {"n_ctx": 512}, {"n_ctx": 130}, {"n_logits_max": 1}, {"n_batch": 7}])
def test_a_copy_serves_another_session(model: Model, others: dict[str, int]) -> None:
    tokens = text(1, 120)
    with open_session(model) as first:
        first.eval(tokens)
        copy, expected = first.state(), rows(first)[-1]
        assert copy.nbytes == first.state_bytes
    with open_session(model, **others) as second:
        second.eval(text(2, 30))  # what was there is gone
        second.restore(copy, tokens)
        assert second.timeline == tokens
        for token in NEXT[:-1]:
            second.eval([token])
        assert np.allclose(second.eval(NEXT[-1:])[0], expected, atol=1e-3)


def test_the_rows_after_a_copy_are_those_before_it(model: Model) -> None:
    with open_session(model) as first, open_session(model) as second:
        first.eval(text(1, 120))
        second.restore(first.state(), first.timeline)
        assert np.array_equal(rows(second), rows(first))
        first.eval(text(5, 60))
        second.eval(text(5, 60))
        assert np.array_equal(rows(second), rows(first))


def test_copies_after_trees_and_rewinds(model: Model) -> None:
    """Cells lie in another order then, with holes: the copy has them in a row."""
    rng = np.random.default_rng(0)
    with open_session(model) as session, open_session(model) as other:
        session.eval(text(1, 40))
        for _ in range(12):
            tokens = rng.integers(0, 256, 2 + len(SPREAD)).tolist()
            session.eval(tokens, n_logits=len(SPREAD) + 1, parents=SPREAD)
            session.rewind(session.n_past - int(rng.integers(0, 4)))
        timeline, expected = session.timeline, rows(session)
        other.restore(session.state(), timeline)
        assert other.timeline == timeline
        assert np.allclose(rows(other), expected, atol=1e-3)
        for one in (session, other):  # and trees go on from there
            one.eval([7, *text(8, len(SPREAD))], n_logits=len(SPREAD) + 1, parents=SPREAD)
        assert session.timeline == other.timeline
        assert np.allclose(rows(other), rows(session), atol=1e-3)


def test_an_empty_timeline_is_copied_too(model: Model) -> None:
    with open_session(model) as session:
        nothing = session.state()
        session.eval(text(1, 9))
        session.restore(nothing, [])
        assert session.timeline == []
        session.eval(text(1, 9))
        assert session.timeline == text(1, 9)


def test_a_copy_that_does_not_fit_leaves_nothing(model: Model) -> None:
    with open_session(model, n_ctx=512) as large, open_session(model, n_ctx=256) as small:
        large.eval(text(1, 300))
        small.eval(text(2, 20))
        before = small.state()
        with pytest.raises(EdgespecError, match="could not restore a cache of 300 tokens"):
            small.restore(large.state(), large.timeline)
        assert small.timeline == []
        with pytest.raises(EdgespecError, match="could not restore a cache of 19 tokens"):
            small.restore(before, text(2, 19))  # of another length than it says
        with pytest.raises(EdgespecError, match="could not restore a cache of 20 tokens"):
            small.restore(before[: before.nbytes // 2], text(2, 20))
        assert small.timeline == []
        small.restore(before, text(2, 20))
        assert small.timeline == text(2, 20)


def test_a_pass_that_is_interrupted_leaves_the_timeline(tiny_target: Model) -> None:
    limit, n_calls = PLENTY, 0

    @ABORT
    def abort(_data: int | None) -> bool:
        nonlocal n_calls
        n_calls += 1
        return n_calls > limit

    address = ctypes.cast(abort, ctypes.c_void_p).value or 0
    prefixes = Prefixes(PLENTY)
    one, two = text(1, 90), text(2, 90)
    with open_session(
        tiny_target, n_batch=16, interrupt=SimpleNamespace(callback=address, data=0)
    ) as session:
        read(session, prefixes, one)
        expected = rows(session)
        n_calls, limit = 0, 3  # in the first pass over `two`, for which `one` had to go
        n_known = prefixes.prepare(session, two)
        session.rewind(n_known)
        with pytest.raises(KeyboardInterrupt):
            session.eval(two[n_known:])
        assert session.timeline == two[:n_known]
        limit = PLENTY
        assert prefixes.prepare(session, one) == 89
        assert session.timeline == one
        assert np.array_equal(rows(session), expected)
        assert read(session, prefixes, two) == n_common(one, two)


# What is kept beside it


def test_the_session_itself_is_a_prefix(tiny_target: Model) -> None:
    prefixes = Prefixes(0)
    tokens = text(1, 100)
    with open_session(tiny_target) as session:
        assert read(session, prefixes, tokens) == 0
        assert read(session, prefixes, tokens + NEXT) == 100
        assert read(session, prefixes, tokens) == 99  # its last logits are wanted
        assert read(session, prefixes, tokens[:40] + NEXT) == 40
        assert read(session, prefixes, [255 - t for t in tokens]) == 0
        assert prefixes.n_bytes == 0


def test_a_conversation_goes_on_after_another(model: Model) -> None:
    prefixes = Prefixes(PLENTY)
    one, two = text(1, 100), text(2, 120)
    with open_session(model) as session:
        read(session, prefixes, one)
        expected = rows(session)
        assert read(session, prefixes, two) == 0
        assert prefixes.prepare(session, one + NEXT) == 100
        assert session.timeline == one
        assert np.array_equal(rows(session), expected)
        assert read(session, prefixes, two + NEXT) == 120
        assert read(session, prefixes, one + text(9, 30)) == 100


def test_what_goes_on_takes_the_place_of_its_beginning(tiny_target: Model) -> None:
    prefixes = Prefixes(PLENTY)
    one, two = text(1, 60), text(2, 60)
    with open_session(tiny_target) as session:
        read(session, prefixes, one)
        read(session, prefixes, two)
        first = prefixes.n_bytes
        longer = one + text(3, 60)
        read(session, prefixes, longer)
        read(session, prefixes, two)
        # `longer` is kept, and `two` perhaps; `one`, its beginning, is not.
        assert 2 * first <= 1.01 * prefixes.n_bytes <= 3.1 * first
        assert prefixes.prepare(session, longer) == 119


def test_little_is_not_copied(tiny_target: Model) -> None:
    prefixes = Prefixes(PLENTY)
    one = text(1, 100)
    with open_session(tiny_target) as session:
        read(session, prefixes, one)
        read(session, prefixes, one[:80] + NEXT)  # of which 20 tokens go
        assert prefixes.n_bytes == 0
        read(session, prefixes, one[:40] + NEXT)
        assert prefixes.n_bytes > 0


@pytest.mark.parametrize("n_conversations", [2, 3, 5])
def test_conversations_in_turn_all_go_on(tiny_target: Model, n_conversations: int) -> None:
    """There is room for all but the one in the session: none is ever read twice."""
    texts = [text(seed, 100) for seed in range(n_conversations)]
    with open_session(tiny_target) as session:
        session.eval(texts[0] + NEXT * 3)
        size = session.state_bytes
    prefixes = Prefixes((n_conversations - 1) * size)
    with open_session(tiny_target) as session:
        for one in texts:
            read(session, prefixes, one)
        for turn in range(3):
            for one in texts:
                one.extend(NEXT)
                assert read(session, prefixes, one) == len(one) - len(NEXT), f"turn {turn}"
                assert prefixes.n_bytes <= (n_conversations - 1) * size


def test_the_oldest_goes_first(tiny_target: Model) -> None:
    texts = [text(seed, 100) for seed in range(5)]
    with open_session(tiny_target) as session:
        session.eval(texts[0])
        prefixes = Prefixes(2 * session.state_bytes)
    with open_session(tiny_target) as session:
        for one in texts:
            read(session, prefixes, one)
        assert prefixes.n_bytes == 2 * session.state_bytes
        assert read(session, prefixes, texts[0]) == n_common(texts[0], texts[4])
        assert read(session, prefixes, texts[4]) == 99


def test_more_than_the_memory_is_not_kept(tiny_target: Model) -> None:
    with open_session(tiny_target) as session:
        session.eval(text(1, 100))
        prefixes = Prefixes(session.state_bytes - 1)
        assert prefixes.prepare(session, text(2, 100)) == 0
        assert prefixes.n_bytes == 0
        assert session.timeline == text(1, 100)  # for the caller to cut


def test_a_kept_timeline_longer_than_the_context_is_no_error(tiny_target: Model) -> None:
    prefixes = Prefixes(PLENTY)
    long = text(1, 400)
    with open_session(tiny_target, n_ctx=512) as large:
        read(large, prefixes, long)
        read(large, prefixes, text(2, 50))
    with open_session(tiny_target, n_ctx=256) as small:
        read(small, prefixes, [*long[:100], 7])


def test_a_larger_session_goes_on(model: Model) -> None:
    prefixes = Prefixes(0)
    tokens = text(1, 200)
    with open_session(model, n_ctx=256) as session:
        read(session, prefixes, tokens)
        expected = rows(session)
        prefixes.hold(session)
    with open_session(model, n_ctx=512) as session:
        assert prefixes.prepare(session, tokens + NEXT) == 200
        assert np.allclose(rows(session), expected, atol=1e-3)
        assert read(session, prefixes, tokens + text(2, 200)) == 200


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200), st.integers(0, 40)), max_size=12))
@settings(max_examples=25, deadline=None)
def test_any_prompts_give_the_rows_of_a_fresh_session(
    tiny_target: Model, prompts: list[tuple[int, int, int]]
) -> None:
    with open_session(tiny_target) as session:
        session.eval(text(0, 120))
        prefixes = Prefixes(3 * session.state_bytes)
    with open_session(tiny_target) as session, open_session(tiny_target) as fresh:
        for which, n, n_other in prompts:
            tokens = text(which, n) + text(which + 10, n_other)
            read(session, prefixes, tokens)
            assert prefixes.n_bytes <= prefixes._max_bytes
            fresh.clear()
            fresh.eval(tokens)
            assert np.allclose(rows(session), rows(fresh), atol=1e-3)


def test_n_common() -> None:
    assert n_common([], [1]) == n_common([2], [1]) == 0
    assert n_common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert n_common([1, 2], (1, 2, 4, 5)) == n_common((1, 2, 4, 5), [1, 2]) == 2


# The draft model


def drafting(model: Model, n_ctx: int, prefixes: Prefixes | None) -> DraftModel:
    draft = DraftModel(open_session(model, n_ctx), n_vocab=model.n_vocab)
    draft.prefixes = prefixes
    return draft


def test_a_draft_without_prefixes_forgets(tiny_draft: Model) -> None:
    tokens = text(1, 50)
    with drafting(tiny_draft, 128, None)._session as session:
        draft = DraftModel(session, n_vocab=tiny_draft.n_vocab)
        draft.begin(tokens)
        draft.run(tokens)
        draft.begin(tokens)
        assert draft.n_past == 0


def test_a_draft_reads_what_is_new(tiny_draft: Model) -> None:
    prefixes = Prefixes(PLENTY)
    one, two = text(1, 60), text(2, 60)
    draft = drafting(tiny_draft, 128, prefixes)
    draft.begin(one)
    draft.run(one, [5, 6])
    draft.begin([*one, 9])
    assert draft.n_past == 60
    draft.run([*one, 9])
    draft.begin(two)
    assert draft.n_past == n_common(one, two)
    draft.run(two)
    draft.begin([*one, 9, 8])
    assert draft.n_past == 61
    expected = draft.run([*one, 9, 8]).copy()
    draft.hold()
    draft.close()
    fresh = drafting(tiny_draft, 128, None)
    fresh.begin()
    assert np.allclose(fresh.run([*one, 9, 8]), expected, atol=1e-3)
    fresh.close()
    larger = drafting(tiny_draft, 256, prefixes)  # takes over what the closed one had read
    larger.begin([*one, 9, 8, 7])
    assert larger.n_past == 62
    larger.close()


def test_a_draft_that_looked_back_on_a_part_goes_on_there(tiny_draft: Model) -> None:
    draft = drafting(tiny_draft, 64, Prefixes(PLENTY))
    tokens = text(1, 100)
    draft.begin(tokens)
    draft.make_room(len(tokens) + 4)
    draft.run(tokens)
    n_read = draft.n_past
    assert n_read < 64
    draft.begin([*tokens, 5])
    assert draft.n_past == n_read
    assert draft.n_unread(len(tokens) + 1) == 1
    draft.begin(text(2, 30))  # shorter than what the draft had left out
    assert draft.n_past == 0
    draft.run(text(2, 30))
    assert draft.n_past == 30
    draft.close()


def test_a_draft_does_not_look_back_less_because_of_chance(tiny_draft: Model) -> None:
    """Another text with the same token where the draft had begun to read: nothing of it was read."""
    draft = drafting(tiny_draft, 128, Prefixes(PLENTY))
    one, two = text(1, 150), text(2, 120)
    draft.begin(one)
    draft.make_room(len(one) + 4)
    draft.run(one)
    start = len(one) + 4 - 64
    two[start] = one[start]
    draft.begin(two)
    assert draft.n_unread(len(two)) == len(two), "all of the other text is unread"
    draft.close()
