"""Timelines: the right rows, and rewinds that leave no trace."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import write_tiny_gguf

from edgespec import session as session_module
from edgespec.backend import llama
from edgespec.errors import EdgespecError
from edgespec.session import Session
from edgespec.weights import Model

PROMPT = list(b"the cat and the other cat")
# A batch of another size may add up a float32 sum in another order, and an F16 number of the cache then
# rounds the other way: 3e-4 on ARM, of logits up to 13; with a float32 cache 2e-6.
TOLERANCE = 1e-3
ABORT = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)


def fresh_logits(model: Model, tokens: list[int], n_logits: int) -> np.ndarray:
    with Session(model, n_ctx=128, n_threads=1) as session:
        return session.eval(tokens, n_logits=n_logits).copy()


def test_rows(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=128, n_threads=1) as session:
        rows = session.eval(PROMPT, n_logits=5)
        assert rows.shape == (5, tiny_target.n_vocab)
        assert rows.dtype == np.float32
        assert rows.flags.c_contiguous
        assert not rows.flags.owndata
        assert rows.ctypes.data == ctypes.addressof(llama.llama_get_logits(session._context).contents)
        for row, index in zip(rows, range(len(PROMPT) - 5, len(PROMPT)), strict=True):
            theirs = llama.llama_get_logits_ith(session._context, index)
            assert np.array_equal(row, np.ctypeslib.as_array(theirs, (tiny_target.n_vocab,)))


def test_rows_equal_a_fresh_evaluation(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=128, n_threads=1) as session:
        rows = session.eval(PROMPT, n_logits=len(PROMPT)).copy()
    for n in (1, 2, 7, len(PROMPT)):
        assert np.allclose(rows[n - 1], fresh_logits(tiny_target, PROMPT[:n], 1)[0], atol=TOLERANCE)


def test_token_by_token_equals_at_once(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=128, n_threads=1) as session:
        one_by_one = np.concatenate([session.eval([token]).copy() for token in PROMPT])
        assert session.n_past == len(PROMPT)
    assert np.allclose(one_by_one, fresh_logits(tiny_target, PROMPT, len(PROMPT)), atol=TOLERANCE)


@pytest.mark.parametrize("n_tokens", [4, 5, 8, 9, 10, 11, 23, 24, 25])
@pytest.mark.parametrize("n_logits", [0, 1, 3, 4])
def test_passes_never_part_the_wanted_rows(tiny_target: Model, n_tokens: int, n_logits: int) -> None:
    tokens = (PROMPT * 2)[:n_tokens]
    with Session(tiny_target, n_ctx=128, n_threads=1, n_batch=4) as session:
        rows = session.eval(tokens, n_logits=n_logits)
        assert rows.shape == (n_logits, tiny_target.n_vocab)
        assert session.n_past == n_tokens
        assert np.allclose(
            rows, fresh_logits(tiny_target, tokens, n_tokens)[n_tokens - n_logits :], atol=TOLERANCE
        )


def test_numpy_tokens_and_no_tokens(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=32, n_threads=1) as session:
        rows = session.eval(np.array(PROMPT[:4], np.int32)).copy()  # type: ignore[arg-type]
        assert session.eval([], n_logits=0).shape == (0, tiny_target.n_vocab)
        assert session.n_past == 4
    assert np.array_equal(rows, fresh_logits(tiny_target, PROMPT[:4], 1))


def test_rewind_leaves_no_trace(tiny_target: Model) -> None:
    """The same batches after a rewind give the same bits as if nothing had been between."""
    rng = np.random.default_rng(0)
    with (
        Session(tiny_target, n_ctx=256, n_threads=1) as session,
        Session(tiny_target, n_ctx=256, n_threads=1) as never_wrong,
    ):
        session.eval(PROMPT)
        never_wrong.eval(PROMPT)
        n_kept = len(PROMPT)
        for _ in range(20):
            rejected = rng.integers(0, 256, rng.integers(1, 9)).tolist()
            session.eval(rejected, n_logits=len(rejected))
            session.rewind(n_kept)
            assert session.n_past == n_kept
            accepted = rng.integers(0, 256, rng.integers(1, 6)).tolist()
            rows = session.eval(accepted, n_logits=len(accepted))
            assert np.array_equal(rows, never_wrong.eval(accepted, n_logits=len(accepted)))
            n_kept += len(accepted)


def test_rewind_within_a_batch_and_to_nothing(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=64, n_threads=1) as session:
        session.eval(PROMPT)
        session.rewind(len(PROMPT))  # nothing to do
        session.rewind(3)
        rows = session.eval(PROMPT[3:9], n_logits=6).copy()
        assert np.allclose(rows, fresh_logits(tiny_target, PROMPT[:9], 6), atol=TOLERANCE)
        session.rewind(0)
        assert session.n_past == 0
        assert np.array_equal(session.eval(PROMPT), fresh_logits(tiny_target, PROMPT, 1))
        session.clear()
        assert session.n_past == 0
        for n_keep in (-1, 1):
            with pytest.raises(ValueError, match="cannot keep"):
                session.rewind(n_keep)


def test_a_model_that_cannot_rewind_says_so(tiny_path: Path) -> None:
    with Model(tiny_path) as model, Session(model, n_ctx=32, n_threads=1) as session:
        model.can_rewind = False
        session.eval([1, 2, 3])
        with pytest.raises(EdgespecError, match="tiny 1 cannot take tokens back"):
            session.rewind(2)
        session.rewind(0)
        assert session.n_past == 0


def test_full_context_changes_nothing(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=10, n_threads=1) as session:
        session.eval(PROMPT[:8])
        with pytest.raises(EdgespecError, match=r"context is full: 8 tokens and 3 more do not fit in 10"):
            session.eval(PROMPT[8:11])
        assert session.n_past == 8
        rows = session.eval(PROMPT[8:10])
        assert np.allclose(rows, fresh_logits(tiny_target, PROMPT[:10], 1), atol=TOLERANCE)


def test_a_token_that_does_not_exist(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=32, n_threads=1, n_batch=2) as session:
        session.eval(PROMPT[:3])
        with pytest.raises(EdgespecError, match=r"failed with code -1: .*invalid token.* = 5000"):
            session.eval([1, 2, 3, 5000])
        assert session.n_past == 3  # the passes before the bad one are undone


def test_wrong_arguments(tiny_target: Model) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Session(tiny_target, n_ctx=0, n_threads=1)
    with Session(tiny_target, n_ctx=32, n_threads=1, n_logits_max=2) as session:
        for tokens, n_logits in (([1], 2), ([1, 2, 3], 3), ([1], -1)):
            with pytest.raises(ValueError, match="n_logits"):
                session.eval(tokens, n_logits=n_logits)
        assert session.n_past == 0


def test_context_that_cannot_be_created(tiny_target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "llama_init_from_model", lambda *_: None)
    with pytest.raises(EdgespecError, match=r"no context of 32 tokens: .*; choose a smaller --ctx"):
        Session(tiny_target, n_ctx=32, n_threads=1)


def test_abort_restores_the_timeline(tiny_target: Model) -> None:
    calls = []

    @ABORT
    def abort(data: int | None) -> bool:
        calls.append(data)
        return len(calls) > limit

    limit = 1 << 30
    address = ctypes.cast(abort, ctypes.c_void_p).value or 0
    with Session(
        tiny_target, n_ctx=128, n_threads=1, n_batch=4, abort_callback=address, abort_data=42
    ) as session:
        session.eval(PROMPT[:10])
        assert calls[0] == 42
        per_pass = len(calls) // 3
        calls.clear()
        limit = 2 * per_pass + per_pass // 2  # in the third of four passes
        with pytest.raises(KeyboardInterrupt):
            session.eval(PROMPT[10:25])
        assert session.n_past == 10
        limit = 1 << 30
        rows = session.eval(PROMPT[10:25])
        assert np.allclose(rows, fresh_logits(tiny_target, PROMPT[:25], 1), atol=TOLERANCE)


def test_ctrl_c_between_two_passes_restores_the_timeline(
    tiny_target: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Session._decode
    with Session(tiny_target, n_ctx=128, n_threads=1, n_batch=4) as session:
        session.eval(PROMPT[:6])

        def interrupted(self: Session, tokens: list[int], n_logits: int) -> None:
            decode(self, tokens, n_logits)
            raise KeyboardInterrupt

        monkeypatch.setattr(Session, "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.eval(PROMPT[6:20])
        assert session.n_past == 6


def test_sessions_do_not_disturb_each_other(tiny_target: Model, tiny_draft: Model) -> None:
    alone = fresh_logits(tiny_target, PROMPT, 3)
    with (
        Session(tiny_target, n_ctx=64, n_threads=1) as one,
        Session(tiny_target, n_ctx=64, n_threads=2) as two,
        Session(tiny_draft, n_ctx=64, n_threads=1) as draft,
    ):
        rows = one.eval(PROMPT, n_logits=3)
        two.eval(PROMPT[::-1], n_logits=4)
        other = draft.eval(PROMPT, n_logits=3)
        assert np.array_equal(rows, alone)
        assert not np.allclose(rows, other, atol=0.1)
        two.close()
        assert np.array_equal(one.eval(PROMPT[:2], n_logits=2).shape, (2, tiny_target.n_vocab))


def test_wanting_more_rows_later_moves_the_buffer_safely(tmp_path: Path) -> None:
    with (
        Model(write_tiny_gguf(tmp_path / "m.gguf", n_padding=3000)) as model,
        Session(model, n_ctx=256, n_threads=1) as session,
    ):
        for n_logits in (1, 2, 5, 20, 3):
            rows = session.eval((PROMPT * 2)[:n_logits], n_logits=n_logits)
            theirs = llama.llama_get_logits_ith(session._context, n_logits - 1)
            assert np.array_equal(rows[-1], np.ctypeslib.as_array(theirs, (model.n_vocab,)))
            session.clear()


@pytest.mark.pair
def test_real_pair_rewinds_without_a_trace(pair: tuple[Path, Path]) -> None:
    with Model(pair[1]) as model:
        tokens = model.tokenize("def fibonacci(n):\n    if n", add_special=False, parse_special=False)
        with (
            Session(model, n_ctx=128, n_threads=2) as session,
            Session(model, n_ctx=128, n_threads=2) as never_wrong,
        ):
            session.eval(tokens)
            session.eval(tokens[::-1][:4], n_logits=4)
            session.rewind(len(tokens))
            never_wrong.eval(tokens)
            next_tokens = tokens[2:5]
            assert np.array_equal(
                session.eval(next_tokens, n_logits=3), never_wrong.eval(next_tokens, n_logits=3)
            )


def test_ctrl_c_while_a_context_is_made(tiny_target, monkeypatch):
    """Python raises it inside whichever callback the library is in, and ctypes would print and lose it."""
    real = session_module.llama.llama_init_from_model
    made = []

    @ctypes.CFUNCTYPE(None)
    def callback():
        signal.raise_signal(signal.SIGINT)

    def interrupted(model, params):
        context = real(model, params)
        callback()
        made.append(context)
        return context

    monkeypatch.setattr(session_module.llama, "llama_init_from_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Session(tiny_target, n_ctx=64, n_threads=1)
    assert made
    monkeypatch.undo()
    with Session(tiny_target, n_ctx=64, n_threads=1) as session:
        session.eval([1, 2, 3])
