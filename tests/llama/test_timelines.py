"""SequencePool of a cache: copies, what is kept for prompts that begin alike, several at once in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.session import Forward, n_common
from edgespec.drafting.draft_model import DraftModel
from edgespec.errors import EdgespecError
from edgespec.llama.kv_cache import CacheFull, KVCache, KVCacheSize
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import Session, n_cells
from edgespec.llama.weights import Model
from tiny_gguf import write_tiny_gguf
from toy_sessions import run
from tree_shapes import SPREAD, random_shape, trunk

NEXT = [3, 1, 4, 1, 5]


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def open_session(model: Model, n_ctx: int = 256, **others: int) -> Session:
    return Session(model, n_ctx=n_ctx, n_threads=1, **others)


def open_timelines(model: Model, n_cells: int = 1024, n_sequences: int = 4, **options: int) -> SequencePool:
    return SequencePool(
        KVCache(model, KVCacheSize(n_ctx=n_cells, n_sequences=n_sequences), n_threads=1), **options
    )


def read(timelines: SequencePool, tokens: list[int]) -> int:
    """Do as the engine does with a prompt that gets no answer; return how much was not read again."""
    session = timelines.begin(tokens)
    n_known = session.n_past
    session.eval(tokens[n_known:])
    assert session.tokens == tokens
    timelines.end(session)
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
            assert session.tokens == expected
        session.clear()
        assert session.tokens == []


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
        assert second.tokens == tokens
        for token in NEXT[:-1]:
            second.eval([token])
        assert np.allclose(second.eval(NEXT[-1:])[0], expected, atol=1e-3)


def test_the_rows_after_a_copy_are_those_before_it(model: Model) -> None:
    with open_session(model) as first, open_session(model) as second:
        first.eval(text(1, 120))
        second.restore(first.state(), first.tokens)
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
        timeline, expected = session.tokens, rows(session)
        other.restore(session.state(), timeline)
        assert other.tokens == timeline
        assert np.allclose(rows(other), expected, atol=1e-3)
        for one in (session, other):  # and trees go on from there
            one.eval([7, *text(8, len(SPREAD))], n_logits=len(SPREAD) + 1, parents=SPREAD)
        assert session.tokens == other.tokens
        assert np.allclose(rows(other), rows(session), atol=1e-3)


def test_an_empty_timeline_is_copied_too(model: Model) -> None:
    with open_session(model) as session:
        nothing = session.state()
        session.eval(text(1, 9))
        session.restore(nothing, [])
        assert session.tokens == []
        session.eval(text(1, 9))
        assert session.tokens == text(1, 9)


def test_a_copy_that_does_not_fit_leaves_nothing(model: Model) -> None:
    with open_session(model, n_ctx=512) as large, open_session(model, n_ctx=256) as small:
        large.eval(text(1, 300))
        small.eval(text(2, 20))
        before = small.state()
        with pytest.raises(EdgespecError, match="could not restore a cache of 300 tokens"):
            small.restore(large.state(), large.tokens)
        assert small.tokens == []
        with pytest.raises(EdgespecError, match="could not restore a cache of 19 tokens"):
            small.restore(before, text(2, 19))  # of another length than it says
        with pytest.raises(EdgespecError, match="could not restore a cache of 20 tokens"):
            small.restore(before[: before.nbytes // 2], text(2, 20))
        assert small.tokens == []
        small.restore(before, text(2, 20))
        assert small.tokens == text(2, 20)


# Several timelines in one cache


def alone(model: Model, tokens: list[int], n_logits: int = 1, parents: list[int] | None = None) -> np.ndarray:
    with open_session(model, 512) as session:
        return session.eval(tokens, n_logits=n_logits, parents=parents).copy()


def test_one_pass_serves_chains_trees_and_pieces(model: Model) -> None:
    texts = [text(seed, 40 + 7 * seed) for seed in range(4)]
    with open_timelines(model) as timelines:
        sessions = [timelines.begin(one) for one in texts]
        for session, one in zip(sessions, texts, strict=True):
            session.eval(one)
        more = [text(10 + i, 12 + (i == 3)) for i in range(4)]
        n = len(SPREAD)
        parts = [
            Forward(sessions[0], more[0][:1]),
            Forward(sessions[1], more[1][: n + 1], n + 1, SPREAD),
            Forward(sessions[2], more[2], 0),
            Forward(sessions[3], more[3][: n + 2], n + 1, SPREAD),
        ]
        rows = [result.rows for result in timelines.cache.forward(parts)]
        expected = [
            alone(model, texts[0] + more[0][:1]),
            alone(model, texts[1] + more[1][: n + 1], n + 1, SPREAD),
            np.empty((0, model.n_vocab)),
            alone(model, texts[3] + more[3][: n + 2], n + 1, SPREAD),
        ]
        for found, wanted in zip(rows, expected, strict=True):
            assert np.allclose(found, wanted, atol=1e-3)
        kept = [1, 1 + trunk(SPREAD), 12, 2 + trunk(SPREAD)]
        for session, one, extra, n_kept in zip(sessions, texts, more, kept, strict=True):
            assert session.tokens == one + extra[:n_kept]
            after = session.eval(NEXT)[0]
            assert np.allclose(after, alone(model, one + extra[:n_kept] + NEXT)[0], atol=1e-3)


def test_a_pass_that_fails_leaves_all_timelines(tiny_target: Model) -> None:
    with open_timelines(tiny_target, n_cells=256) as timelines:
        one, two = timelines.begin(text(1, 100)), timelines.begin(text(2, 100))
        one.eval(text(1, 100))
        two.eval(text(2, 100))
        with pytest.raises(CacheFull, match="context is full"):
            timelines.cache.forward([Forward(one, text(3, 30)), Forward(two, text(4, 30))])
        assert (one.tokens, two.tokens) == (text(1, 100), text(2, 100))
        assert np.allclose(rows(one), alone(tiny_target, text(1, 100) + NEXT, len(NEXT)), atol=1e-3)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_timelines_come_and_go(tiny_target: Model, data: st.DataObject) -> None:
    """Whatever is opened, cut, dropped and read together: each gives the rows that it gives alone."""
    with open_timelines(tiny_target, n_cells=700) as timelines, open_session(tiny_target, 700) as fresh:
        sessions: list[Session] = []
        for _ in range(data.draw(st.integers(1, 12))):
            if len(sessions) < 4 and data.draw(st.booleans()):
                seed = data.draw(st.integers(0, 3))
                tokens = text(seed, data.draw(st.integers(1, 90)))
                session = timelines.begin(tokens)
                assert session.tokens == tokens[: session.n_past]
                session.eval(tokens[session.n_past :], n_logits=0)
                sessions.append(session)
            elif sessions and data.draw(st.integers(0, 2)) == 0:
                timelines.end(sessions.pop(data.draw(st.integers(0, len(sessions) - 1))))
            elif sessions and data.draw(st.booleans()):
                session = sessions[data.draw(st.integers(0, len(sessions) - 1))]
                session.rewind(data.draw(st.integers(1, session.n_past)))
            if not sessions or not timelines.make_room(16 * len(sessions)):
                continue
            extra = [text(50 + i, data.draw(st.integers(1, 16))) for i in range(len(sessions))]
            parts = [Forward(session, more) for session, more in zip(sessions, extra, strict=True)]
            found = [result.rows.copy() for result in timelines.cache.forward(parts)]
            for session, row in zip(sessions, found, strict=True):
                fresh.clear()
                assert np.allclose(row, fresh.eval(session.tokens), atol=1e-3)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_cells_are_counted_as_the_library_has_them(tiny_target: Model, data: st.DataObject) -> None:
    """Whoever began as whom, and was cut or ended: free cells can be filled, and no more."""
    with open_timelines(tiny_target, n_cells=256, n_sequences=6) as timelines:
        cache, sessions = timelines.cache, [timelines.begin([1])]
        for _ in range(data.draw(st.integers(1, 14))):
            session = sessions[data.draw(st.integers(0, len(sessions) - 1))]
            act = data.draw(st.sampled_from(["begin", "read", "read", "tree", "rewind", "end"]))
            if act == "begin" and len(sessions) < 6 and session.n_past:
                other = session.tokens[: data.draw(st.integers(1, session.n_past))] + NEXT
                sessions.append(timelines.begin(other))
            elif act == "end" and len(sessions) > 1:
                sessions.remove(session)
                timelines.end(session)
            elif act == "rewind" and session.n_past:
                session.rewind(data.draw(st.integers(0, session.n_past)))
            elif act == "tree" and timelines.make_room(4):
                session.eval(NEXT[:4], n_logits=4, parents=[-1, 0, -1])
            elif act == "read" and timelines.make_room(n := data.draw(st.integers(1, 60))):
                session.eval(text(data.draw(st.integers(0, 3)), n), n_logits=0)
        n_free = cache.n_ctx - n_cells(cache.sessions.values())
        session = min(sessions, key=lambda one: one.n_past)
        if n_free:
            session.eval([2] * n_free, n_logits=0)
        with pytest.raises(EdgespecError, match="context is full"):
            session.eval([2], n_logits=0)


# What is kept for prompts that begin alike


def test_a_timeline_under_way_is_shared(model: Model) -> None:
    with open_timelines(model) as timelines:
        tokens = text(1, 12)
        first = timelines.begin(tokens)
        first.eval(tokens)
        second = timelines.begin(tokens[:10] + NEXT)
        assert second.tokens == tokens[:10]
        second.eval(NEXT)
        first.rewind(3)
        assert np.allclose(rows(second), alone(model, tokens[:10] + NEXT + NEXT, len(NEXT)), atol=1e-3)
        assert np.allclose(rows(first), alone(model, tokens[:3] + NEXT, len(NEXT)), atol=1e-3)


def test_the_only_timeline_is_a_prefix(tiny_target: Model) -> None:
    tokens = text(1, 100)
    with open_timelines(tiny_target, n_sequences=1) as timelines:
        assert read(timelines, tokens) == 0
        assert read(timelines, tokens + NEXT) == 100
        assert read(timelines, tokens) == 99  # its last logits are wanted
        assert read(timelines, tokens[:40] + NEXT) == 40
        assert read(timelines, [255 - t for t in tokens]) == 0


def test_without_keeping_every_prompt_is_read(tiny_target: Model) -> None:
    with open_timelines(tiny_target, keeps=False) as timelines:
        assert [read(timelines, text(1, 100)) for _ in range(2)] == [0, 0]


def test_a_conversation_goes_on_after_another(tiny_target: Model) -> None:
    one, two = text(1, 100), text(2, 120)
    with open_timelines(tiny_target) as timelines:
        read(timelines, one)
        assert read(timelines, two) == 0
        assert read(timelines, one + NEXT) == 100
        assert read(timelines, two + NEXT) == 120
        assert read(timelines, one + text(9, 30)) == 100


def test_the_one_unused_for_longest_goes_first(tiny_target: Model) -> None:
    texts = [text(seed, 200) for seed in range(4)]
    with open_timelines(tiny_target, n_cells=768, n_sequences=8) as timelines:
        for one in texts[:3]:
            read(timelines, one)
        assert timelines.n_kept == 600
        assert read(timelines, texts[0] + NEXT) == 200
        assert timelines.make_room(250)
        assert timelines.n_kept == 405
        assert read(timelines, texts[1]) == n_common(texts[1], texts[2])
        assert read(timelines, texts[0]) == 199
        assert not timelines.make_room(800)


def test_sequences_are_compared_where_they_are(tiny_target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those kept is copied for a prompt, whether it can begin or only waits."""
    copied = []
    real = Session.written.fget
    monkeypatch.setattr(Session, "written", property(lambda one: copied.append(one) or real(one)))
    with open_timelines(tiny_target) as timelines:
        for seed in (1, 2, 3):
            session = timelines.begin(text(seed, 40))
            session.eval(text(seed, 40))
            timelines.end(session)
        copied.clear()
        assert timelines.n_new(text(2, 40)) == 40
        assert timelines.begin([*text(2, 40), 7]).n_past == 40
    assert not copied


def test_what_is_kept_leaves_the_reserve(tiny_target: Model) -> None:
    with open_timelines(tiny_target, n_cells=512, n_sequences=8, reserved=256) as timelines:
        for seed in range(4):
            read(timelines, text(seed, 100))
            assert timelines.n_kept <= 256


def test_a_larger_cache_goes_on(model: Model) -> None:
    tokens = text(1, 200)
    with open_timelines(model, n_cells=256) as timelines:
        read(timelines, tokens)
        kept = timelines.last()
        assert kept is not None
    with open_timelines(model, n_cells=512) as timelines:
        timelines.adopt(kept)
        assert read(timelines, tokens + NEXT) == 200
        session = timelines.begin([*tokens, *NEXT, 0])
        assert np.allclose(rows(session), alone(model, tokens + NEXT + NEXT, len(NEXT)), atol=1e-3)


def test_n_common() -> None:
    assert n_common([], [1]) == n_common([2], [1]) == 0
    assert n_common([1, 2, 3], [1, 2, 4, 5]) == 2
    long = text(1, 2000)
    assert n_common(long, long) == n_common(long, [*long, 1]) == n_common((*long, 1), long) == 2000
    assert n_common(long, [*long[:1100], -1]) == 1100
    assert n_common([1, 2], (1, 2, 4, 5)) == n_common((1, 2, 4, 5), [1, 2]) == 2


def test_all_is_forgotten_but_a_beginning(tiny_target: Model) -> None:
    one, two = [*text(1, 60), *text(2, 20)], [*text(1, 60), *text(3, 20)]
    with open_timelines(tiny_target) as timelines:
        for tokens in (one, two, text(4, 50)):
            read(timelines, tokens)
        timelines.forget(one[:60])
        assert timelines.n_kept == 60
        assert read(timelines, two) == 60
        timelines.forget(one[:70])
        assert timelines.n_kept == 0, "none begins so"
        read(timelines, one)
        timelines.forget()
        assert timelines.n_kept == 0


# The draft model


def drafting(model: Model, n_ctx: int, n_sequences: int = 4) -> DraftModel:
    timelines = open_timelines(model, 4 * n_ctx, n_sequences, n_ctx=n_ctx)
    draft = DraftModel(timelines.begin([0]), n_vocab=model.n_vocab)
    draft.sequences = timelines
    return draft


def test_a_draft_without_timelines_forgets(tiny_draft: Model) -> None:
    tokens = text(1, 50)
    with open_session(tiny_draft, 128) as session:
        draft = DraftModel(session, n_vocab=tiny_draft.n_vocab)
        draft.begin(tokens)
        run(draft, tokens)
        draft.begin(tokens)
        assert draft.n_past == 0


def test_a_draft_reads_what_is_new(tiny_draft: Model) -> None:
    one, two = text(1, 60), text(2, 60)
    draft = drafting(tiny_draft, 128)
    draft.begin(one)
    run(draft, one, [5, 6])
    draft.begin([*one, 9])
    assert draft.n_past == 60
    run(draft, [*one, 9])
    draft.begin(two)
    assert draft.n_past == n_common(one, two)
    run(draft, two)
    draft.begin([*one, 9, 8])
    assert draft.n_past == 61
    expected = run(draft, [*one, 9, 8]).copy()
    draft.rest()
    fresh = drafting(tiny_draft, 128)
    fresh.begin()
    assert np.allclose(run(fresh, [*one, 9, 8]), expected, atol=1e-3)


def test_a_draft_that_looked_back_on_a_part_goes_on_there(tiny_draft: Model) -> None:
    draft = drafting(tiny_draft, 64)
    tokens = text(1, 100)
    draft.begin(tokens)
    draft.make_room(len(tokens) + 4)
    run(draft, tokens)
    n_read = draft.n_past
    assert n_read < 64
    draft.rest()
    draft.begin([*tokens, 5])
    assert draft.n_past == n_read
    assert draft.n_unread(len(tokens) + 1) == 1
    draft.begin(text(2, 30))  # shorter than what the draft had left out
    assert draft.n_past == 0
    run(draft, text(2, 30))
    assert draft.n_past == 30


def test_a_draft_does_not_look_back_less_because_of_chance(tiny_draft: Model) -> None:
    """Another text with the same token where the draft had begun to read: nothing of it was read."""
    draft = drafting(tiny_draft, 128)
    one, two = text(1, 150), text(2, 120)
    draft.begin(one)
    draft.make_room(len(one) + 4)
    run(draft, one)
    start = len(one) + 4 - 64
    two[start] = one[start]
    draft.begin(two)
    assert draft.n_unread(len(two)) == len(two), "all of the other text is unread"
