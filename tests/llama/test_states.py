"""Taking tokens back on models that keep a state: what is gone back to is what was there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgespec.decoding.session import Forward
from edgespec.llama.backend import llama
from edgespec.llama.kv_cache import CacheFull, KVCache, KVCacheSize
from edgespec.llama.rollback import LONG, MOST_COPIES, RollbackSize
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import states_bytes, target_rollback
from tiny_states import SOME, STATEFUL, tiny

ABORT = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)

TOLERANCE = 5e-3
"""Of logits near 1: another size of a pass changes them by up to 1e-3, another state by 0.1 and more."""

SIZES = {"a mark": RollbackSize(), "marks": RollbackSize(n_marks=5), "snapshots": RollbackSize(n_snapshots=6)}


@pytest.fixture(params=STATEFUL)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(tiny(request.param)) as loaded:
        yield loaded


@pytest.fixture(params=SOME)
def one_of_two(request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(tiny(request.param)) as loaded:
        yield loaded


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, n).tolist()


def opened(model: Model, size: RollbackSize, n_sequences: int = 1, n_batch: int = 128) -> KVCache:
    cells = KVCacheSize(n_ctx=512 * n_sequences, n_batch=n_batch, n_sequences=n_sequences, rollback=size)
    return KVCache(model, cells, n_threads=1)


class Reader:
    """Reads texts from their beginning, in a session of its own."""

    def __init__(self, model: Model) -> None:
        self.session = Session(model, n_ctx=512, n_threads=1)

    def after(self, tokens: Sequence[int]) -> np.ndarray:
        self.session.clear()
        return self.session.eval(tokens)[0].copy()


def assert_right(session: Session, reader: Reader, token: int = 7) -> None:
    """Assert that the session goes on as if nothing had ever been taken back."""
    timeline = [*session.tokens, token]
    assert np.allclose(session.eval([token])[0], reader.after(timeline), atol=TOLERANCE)


def test_the_header_says_how_large_a_state_is_and_whether_there_are_snapshots(model: Model) -> None:
    assert model.keeps_state and model.can_rewind
    size = target_rollback(replace(model.header, file_bytes=1 << 40))
    with opened(model, size) as cache:
        session = Session.within(cache)
        session.eval([3, 4, 5])
        copied = llama.llama_state_seq_get_size_ext(cache._context, 0, 1)
        assert 0 < copied - model.header.state_bytes < 200  # what is written beside it
        assert bool(llama.llama_n_rs_seq(cache._context)) == model.header.has_snapshots
        n_cells = session.state_bytes - copied
        assert n_cells == 0 or 0 < n_cells - 3 * model.header.kv_bytes(256) // 256 < 200
    assert (size.n_snapshots > 0) == model.header.has_snapshots
    assert states_bytes(model.header, size) == size.n_states(1) * model.header.state_bytes


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("n_sequences", [1, 3])
def test_a_walk_back_and_forth(model: Model, size: RollbackSize, n_sequences: int) -> None:
    rng = np.random.default_rng(n_sequences)
    with opened(model, size, n_sequences) as cache:
        reader = Reader(model)
        sessions = [Session.within(cache) for _ in range(n_sequences)]
        n_taken_back = 0
        for _ in range(20):
            chosen = rng.choice(n_sequences, rng.integers(1, n_sequences + 1), replace=False)
            several = [sessions[i] for i in chosen]
            parts = []
            for session in several:
                tokens = text(int(rng.integers(1, 9)), int(rng.integers(1 << 30)))
                n_logits = int(rng.integers(1, len(tokens) + 1))
                parts.append(Forward(session, tokens, n_logits))
            rows = [result.rows[-1].copy() for result in cache.forward(parts)]
            for session, part, row in zip(several, parts, rows, strict=True):
                timeline = session.tokens
                assert np.allclose(row, reader.after(timeline), atol=TOLERANCE)
                n_before = len(timeline) - len(part.tokens)
                n_keep = int(rng.integers(n_before, len(timeline) + 1))
                expected = session.n_reachable(n_keep)
                assert session.rewind(n_keep) == session.n_past == expected <= n_keep
                assert session.tokens == timeline[:expected]
                if not (model.header.has_snapshots and size.n_snapshots):
                    assert expected >= n_before or part.n_logits == 1 or n_before == 0
                elif n_keep > n_before:
                    n_back = len(timeline) - n_keep
                    assert (expected == n_keep) == (n_back <= size.n_snapshots)
                n_taken_back += len(timeline) - expected
        assert n_taken_back > 20


def test_a_pass_is_not_taken_back_whole_by_snapshots(model: Model) -> None:
    """The library says that it can, and goes on from a state of an earlier pass."""
    with opened(model, SIZES["snapshots"]) as cache:
        session, reader = Session.within(cache), Reader(model)
        session.eval(text(20))
        session.eval(text(4, 1), n_logits=4)
        kept = session.rewind(20)
        assert kept == (0 if model.header.has_snapshots else 20)
        assert_right(session, reader)


def test_what_is_kept_can_be_gone_back_to_from_anywhere(model: Model) -> None:
    with opened(model, SIZES["snapshots"]) as cache:
        session, reader = Session.within(cache), Reader(model)
        session.eval(text(20))
        session.checkpoint()
        for seed in range(3):
            for n in (3, LONG + 3, 1):
                session.eval(text(n, seed), n_logits=1)
            assert session.rewind(25) == 20
            assert_right(session, reader)
            assert session.rewind(20) == 20


def test_only_so_many_copies_are_kept(one_of_two: Model) -> None:
    with opened(one_of_two, RollbackSize()) as cache:
        session = Session.within(cache)
        for _ in range(4):
            session.eval(text(5))
            session.checkpoint()
        assert sorted(session.copies()) == [5, 20]
        assert len(session.copies()) == MOST_COPIES
        session.clear()
        assert not session.copies()


def test_marks_are_rare_in_the_distance(one_of_two: Model) -> None:
    """A draft model's passes of one token: it goes back to any of the last ones, and reads few again."""
    with opened(one_of_two, RollbackSize(n_marks=8)) as cache:
        session = Session.within(cache)
        for n in range(1, 100):
            session.eval([n])
            for back in range(1, min(n, 40)):
                reached = session.n_reachable(n - back)
                assert n - back - reached <= (2 * back if back > 3 else 0), (n, back)


def test_a_prompt_is_read_from_where_it_parts_from_another(model: Model) -> None:
    begin, reader = text(4 * LONG), Reader(model)
    prompts = [[*begin, *text(LONG + n, n)] for n in range(4)]
    with SequencePool(opened(model, RollbackSize(n_marks=1, n_kept=3), 4)) as timelines:
        known = []
        for prompt in prompts:
            session = timelines.begin(prompt)
            known.append(session.n_past)
            session.eval(prompt[session.n_past :])
            assert_right(session, reader)
            timelines.end(session)
        # The second prompt shows where they part; from the third on nothing before is read.
        assert known == [0, 0, len(begin), len(begin)]
        session = timelines.begin([*prompts[3], 7, 11, 12])  # goes on where the last one ended
        assert session.n_past == len(prompts[3]) + 1
        assert_right(session, reader)


def test_another_ending_of_the_same_prompt_reads_only_that(one_of_two: Model) -> None:
    """As where a template leaves out what was thought before an answer."""
    prompt, reader = text(4 * LONG), Reader(one_of_two)
    with SequencePool(opened(one_of_two, RollbackSize())) as timelines:
        session = timelines.begin(prompt)
        session.eval(prompt)
        session.eval(text(30, 1), n_logits=0)
        timelines.end(session)
        session = timelines.begin([*prompt[:-2], *text(LONG, 2)])
        assert len(prompt) - 16 <= session.n_past < len(prompt)
        assert_right(session, reader)


def test_a_larger_cache_goes_on(model: Model) -> None:
    prompt, reader = text(4 * LONG), Reader(model)
    with SequencePool(opened(model, target_rollback(model.header))) as timelines:
        session = timelines.begin(prompt)
        session.eval(prompt)
        session.eval(text(5, 1), n_logits=5)
        n_kept = session.rewind(len(prompt) + 2)
        timelines.end(session)
        kept = timelines.last()
        assert kept is not None and len(kept.tokens) == n_kept >= len(prompt)
    with SequencePool(opened(model, target_rollback(model.header), 2)) as timelines:
        timelines.adopt(kept)
        session = timelines.begin([*kept.tokens, 7, 8])
        assert session.n_past == n_kept
        assert_right(session, reader)
        timelines.end(session)
        session = timelines.begin([*prompt[:-1], *text(20, 3)])
        assert 0 < session.n_past < len(prompt)
        assert_right(session, reader)


class Interrupts:
    """Ends a pass at a call of the library's."""

    def __init__(self) -> None:
        self.n_calls, self.limit = 0, 1 << 30
        self._callback = ABORT(self._asked)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self.interrupt = SimpleNamespace(callback=address, data=0)

    def _asked(self, _data: int | None) -> bool:
        self.n_calls += 1
        return self.n_calls > self.limit


@pytest.mark.parametrize("n_before", [0, 20])
def test_ctrl_c_in_a_long_pass(model: Model, n_before: int) -> None:
    interrupts, reader = Interrupts(), Reader(model)
    size = KVCacheSize(n_ctx=512, n_batch=LONG, rollback=target_rollback(model.header))
    with KVCache(model, size, n_threads=1, interrupt=interrupts.interrupt) as cache:  # type: ignore[arg-type]
        session = Session.within(cache)
        if n_before:
            session.eval(text(n_before))
        interrupts.n_calls = 0
        session.eval(text(2 * LONG, 1), n_logits=0)
        n_calls = interrupts.n_calls
        session.rewind(0)
        session.eval(text(20)[:n_before], n_logits=0) if n_before else None
        for share in (0.2, 0.7):  # in the first pass, in the second
            interrupts.n_calls, interrupts.limit = 0, int(share * n_calls)
            with pytest.raises(KeyboardInterrupt):
                session.eval(text(2 * LONG, 1), n_logits=0)
            interrupts.limit = 1 << 30
            assert session.tokens == text(20)[:n_before]
        assert_right(session, reader)


def test_ctrl_c_in_a_pass_of_several_empties_them(one_of_two: Model) -> None:
    interrupts, reader = Interrupts(), Reader(one_of_two)
    size = KVCacheSize(n_ctx=1024, n_batch=256, n_sequences=3, rollback=RollbackSize())
    with KVCache(one_of_two, size, n_threads=1, interrupt=interrupts.interrupt) as cache:  # type: ignore[arg-type]
        sessions = [Session.within(cache) for _ in range(3)]
        for session in sessions:
            session.eval(text(20))
        interrupts.n_calls, interrupts.limit = 0, 3
        with pytest.raises(KeyboardInterrupt):
            cache.forward([Forward(session, text(LONG, i)) for i, session in enumerate(sessions[:2])])
        interrupts.limit = 1 << 30
        assert [session.n_past for session in sessions] == [0, 0, 0]
        for session in sessions:
            session.eval(text(9))
            assert_right(session, reader)


@pytest.mark.parametrize("n_drafted", [0, 3])
def test_ctrl_c_after_a_short_pass(model: Model, monkeypatch: pytest.MonkeyPatch, n_drafted: int) -> None:
    """Such a pass is not broken off: what it was to read for good may stay, nothing else."""
    decode, reader, interrupts = KVCache._decode, Reader(model), Interrupts()
    interrupts.limit = 0  # is not asked

    def interrupted(self: KVCache, *arguments: object) -> None:
        decode(self, *arguments)
        raise KeyboardInterrupt

    size = KVCacheSize(n_ctx=512, rollback=target_rollback(model.header))
    with KVCache(model, size, n_threads=1, interrupt=interrupts.interrupt) as cache:  # type: ignore[arg-type]
        session = Session.within(cache)
        session.eval(text(20))
        session.eval([5])
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "_decode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.eval([6, *text(n_drafted, 1)], n_logits=1 + n_drafted)
        assert session.tokens in ([*text(20), 5], [*text(20), 5, 6])
        assert_right(session, reader)


def test_what_fails_before_it_begins_changes_nothing(one_of_two: Model) -> None:
    reader = Reader(one_of_two)
    with KVCache(one_of_two, KVCacheSize(n_ctx=256, n_sequences=2), n_threads=1) as cache:
        sessions = [Session.within(cache) for _ in range(2)]
        for session in sessions:
            session.eval(text(20))
        if one_of_two.header.n_head_kv != (0, 0):  # else there is no end to what fits
            with pytest.raises(CacheFull):
                cache.forward([Forward(session, text(120)) for session in sessions])
        assert [session.n_past for session in sessions] == [20, 20]
        for session in sessions:
            assert_right(session, reader)
