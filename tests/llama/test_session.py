"""SequencePool: the right rows, and rewinds that leave no trace."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from edgespec.decoding.session import Forward
from edgespec.errors import EdgespecError
from edgespec.llama import kv_cache as context_module
from edgespec.llama.backend import llama
from edgespec.llama.kv_cache import MAX_LEAVES, KVCache, KVCacheSize
from edgespec.llama.quantize import quantize
from edgespec.llama.rollback import Rollback
from edgespec.llama.session import Session, n_cells
from edgespec.llama.weights import Model
from tiny_gguf import write_tiny_gguf
from tree_shapes import DEEP, SPREAD, WIDE, WIDEST, paths, random_shape, trunk

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
        assert rows.ctypes.data == ctypes.addressof(llama.llama_get_logits(session.cache._context).contents)
        for row, index in zip(rows, range(len(PROMPT) - 5, len(PROMPT)), strict=True):
            theirs = llama.llama_get_logits_ith(session.cache._context, index)
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
    with pytest.raises(EdgespecError, match=r"no context of 32 tokens: .*; choose a smaller context"):
        Session(tiny_target, n_ctx=32, n_threads=1)


def test_abort_restores_the_timeline(tiny_target: Model) -> None:
    calls = []

    @ABORT
    def abort(data: int | None) -> bool:
        calls.append(data)
        return len(calls) > limit

    limit = 1 << 30
    address = ctypes.cast(abort, ctypes.c_void_p).value or 0
    interrupt = SimpleNamespace(callback=address, data=42)
    with Session(tiny_target, n_ctx=128, n_threads=1, n_batch=4, interrupt=interrupt) as session:
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
    decode = KVCache._decode
    with Session(tiny_target, n_ctx=128, n_threads=1, n_batch=4) as session:
        session.eval(PROMPT[:6])

        def interrupted(self: KVCache, *arguments: object) -> None:
            decode(self, *arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(KVCache, "_decode", interrupted)
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
            theirs = llama.llama_get_logits_ith(session.cache._context, n_logits - 1)
            assert np.array_equal(rows[-1], np.ctypeslib.as_array(theirs, (model.n_vocab,)))
            session.clear()


def chain_rows(session: Session, tokens: list[int], parents: list[int]) -> np.ndarray:
    """The rows that a tree at the end of `tokens` must have, each node from a chain of its own."""
    n_past, n_before = session.n_past, len(tokens) - len(parents)
    rows = [session.eval(tokens[:n_before])[0].copy()]
    for path in paths(parents):
        rows.append(session.eval([tokens[n_before + node] for node in path])[0].copy())
        session.rewind(n_past + n_before)
    session.rewind(n_past)
    return np.array(rows)


@pytest.mark.parametrize("parents", [[], [-1], [-1, 0, 1], [-1, -1], SPREAD, DEEP, WIDE, WIDEST], ids=len)
def test_rows_of_a_tree_are_those_of_chains(tiny_target: Model, parents: list[int]) -> None:
    tokens = np.random.default_rng(6).integers(0, 256, 5 + len(parents)).tolist()
    with (
        Session(tiny_target, n_ctx=128, n_threads=1) as session,
        Session(tiny_target, n_ctx=128, n_threads=1) as chains,
    ):
        for one in (session, chains):
            one.eval(PROMPT)
        rows = session.eval(tokens, n_logits=len(parents) + 1, parents=parents)
        assert np.allclose(rows, chain_rows(chains, tokens, parents), atol=TOLERANCE)
        # The trunk stays, and what comes next sees nothing else.
        n_kept = 5 + trunk(parents)
        assert session.n_past == len(PROMPT) + n_kept
        chains.eval(tokens[:n_kept])
        for n_logits in (1, 7):
            assert np.allclose(
                session.eval(PROMPT, n_logits=n_logits),
                chains.eval(PROMPT, n_logits=n_logits),
                atol=TOLERANCE,
            )


def test_a_chain_with_parents_is_a_chain(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=128, n_threads=1) as session:
        rows = session.eval(PROMPT, n_logits=6, parents=np.arange(-1, 4, dtype=np.int32)).copy()  # type: ignore[arg-type]
        assert session.n_past == len(PROMPT)
    assert np.array_equal(rows, fresh_logits(tiny_target, PROMPT, 6))


def test_trees_chains_and_rewinds_in_any_order(tiny_target: Model) -> None:
    """Against a session that never had a branch."""
    rng = np.random.default_rng(9)
    with (
        Session(tiny_target, n_ctx=256, n_threads=1) as session,
        Session(tiny_target, n_ctx=256, n_threads=1) as chains,
    ):
        for _ in range(120):
            if chains.n_past > 180 or rng.random() < 0.05:
                n_keep = int(rng.integers(0, min(20, chains.n_past + 1)))
            else:
                n_keep = chains.n_past - int(rng.integers(0, min(4, chains.n_past + 1)))
            session.rewind(n_keep)
            chains.rewind(n_keep)
            parents = random_shape(rng, int(rng.integers(0, 12)))
            tokens = rng.integers(0, 256, int(rng.integers(1, 4)) + len(parents)).tolist()
            rows = session.eval(tokens, n_logits=len(parents) + 1, parents=parents)
            assert np.allclose(rows, chain_rows(chains, tokens, parents), atol=TOLERANCE)
            chains.eval(tokens[: len(tokens) - len(parents) + trunk(parents)])
            assert session.n_past == chains.n_past


@pytest.mark.parametrize("n_before", [1, 3, 4, 5, 9, 10, 11, 25])
def test_a_tree_after_more_tokens_than_a_pass_has(tiny_target: Model, n_before: int) -> None:
    parents = [-1, 0, 0, -1]
    tokens = np.random.default_rng(7).integers(0, 256, n_before + 4).tolist()
    with (
        Session(tiny_target, n_ctx=64, n_threads=1, n_batch=5) as session,
        Session(tiny_target, n_ctx=64, n_threads=1) as chains,
    ):
        rows = session.eval(tokens, n_logits=5, parents=parents)
        assert np.allclose(rows, chain_rows(chains, tokens, parents), atol=TOLERANCE)
        assert session.n_past == n_before + 2


def test_a_tree_needs_a_place_for_each_node(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=10, n_threads=1) as session:
        session.eval(PROMPT[:5])
        with pytest.raises(EdgespecError, match="context is full: 5 tokens and 6 more do not fit in 10"):
            session.eval(PROMPT[5:11], n_logits=6, parents=[-1] * 5)
        assert session.n_past == 5
        session.eval(PROMPT[5:10], n_logits=5, parents=[-1] * 4)
        assert session.n_past == 7


def test_wrong_trees(tiny_target: Model) -> None:
    with Session(tiny_target, n_ctx=128, n_threads=1) as session:
        for parents in ([0], [-2], [-1, 1], [-1, -1, 0], [-1, 0, -1, 1], [1, -1]):
            with pytest.raises(ValueError, match="not in depth-first pre-order"):
                session.eval(PROMPT, n_logits=len(parents) + 1, parents=parents)
        with pytest.raises(ValueError, match="n_logits 2 with a tree of 2 nodes"):
            session.eval(PROMPT, n_logits=2, parents=[-1, -1])
        with pytest.raises(ValueError, match="n_logits 3 with 2 tokens"):
            session.eval(PROMPT[:2], n_logits=3, parents=[-1, -1])
        assert session.cache.max_leaves == MAX_LEAVES
        with pytest.raises(ValueError, match="a tree of 33 leaves, max_leaves 32"):
            session.eval(PROMPT * 2, n_logits=34, parents=[-1] * 33)
        assert session.n_past == 0
    with Session(tiny_target, n_ctx=128, n_threads=1, n_logits_max=4) as session:
        assert session.cache.max_leaves == 3
        session.eval(PROMPT[:4], n_logits=4, parents=[-1] * 3)


def test_a_model_that_cannot_rewind_has_no_branches(tiny_path: Path) -> None:
    with Model(tiny_path) as model:
        model.can_rewind = False
        with Session(model, n_ctx=32, n_threads=1) as session:
            assert session.cache.max_leaves == 1
            session.eval(PROMPT[:3], n_logits=3, parents=[-1, 0])
            with pytest.raises(EdgespecError) as caught:
                session.eval(PROMPT[:3], n_logits=3, parents=[-1, -1])
            assert str(caught.value) == "tiny 1 cannot evaluate branches (architecture llama)"
            assert session.n_past == 3


def test_a_tree_that_fails_leaves_no_trace(tiny_target: Model) -> None:
    with (
        Session(tiny_target, n_ctx=128, n_threads=1, n_batch=12) as session,
        Session(tiny_target, n_ctx=128, n_threads=1) as chains,
    ):
        for one in (session, chains):
            one.eval(PROMPT[:7])
        tokens = PROMPT + PROMPT[: len(SPREAD)]
        with pytest.raises(EdgespecError, match=r"failed with code -1: .*invalid token"):
            session.eval([*tokens[:-1], 5000], n_logits=len(SPREAD) + 1, parents=SPREAD)
        assert session.n_past == 7
        rows = session.eval(tokens, n_logits=len(SPREAD) + 1, parents=SPREAD)
        assert np.allclose(rows, chain_rows(chains, tokens, SPREAD), atol=TOLERANCE)


@pytest.mark.parametrize("when", ["in the pass", "after it", "after it, and before the timeline is restored"])
def test_ctrl_c_in_a_tree(tiny_target: Model, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    n_calls, limit = 0, 1 << 30

    @ABORT
    def abort(_data: int | None) -> bool:
        nonlocal n_calls
        n_calls += 1
        return n_calls > limit

    address = ctypes.cast(abort, ctypes.c_void_p).value or 0
    tokens = PROMPT[: 3 + len(SPREAD)]
    tree = {"n_logits": len(SPREAD) + 1, "parents": SPREAD}
    decode = KVCache._decode

    def interrupted(self: KVCache, *arguments: object) -> None:
        decode(self, *arguments)
        raise KeyboardInterrupt

    def interrupted_again(self: Rollback, *arguments: object) -> None:
        raise KeyboardInterrupt

    with (
        Session(
            tiny_target, n_ctx=128, n_threads=1, interrupt=SimpleNamespace(callback=address, data=0)
        ) as session,
        Session(tiny_target, n_ctx=128, n_threads=1) as chains,
    ):
        for one in (session, chains):
            one.eval(PROMPT[:6])
        expected = chain_rows(chains, tokens, SPREAD)
        assert np.allclose(session.eval(tokens, **tree), expected, atol=TOLERANCE)
        session.rewind(6)
        with monkeypatch.context() as patch:
            if when == "in the pass":
                limit = n_calls // 4
                n_calls = 0
            else:
                patch.setattr(KVCache, "_decode", interrupted)
                if when != "after it":
                    patch.setattr(Rollback, "undo", interrupted_again)
            with pytest.raises(KeyboardInterrupt):
                session.eval(tokens, **tree)
        limit = 1 << 30
        if session.n_past > 6:  # it went wrong twice: the pass has been made
            chains.eval(tokens[: 3 + trunk(SPREAD)])
        assert session.n_past == chains.n_past
        for one in (session, chains):
            one.eval(PROMPT[::-1], n_logits=0)
        assert np.allclose(session.eval(tokens, **tree), chain_rows(chains, tokens, SPREAD), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["f32", "q8_0"])
def test_embeddings_in_place_of_tokens(tiny_path: Path, tmp_path: Path, name: str) -> None:
    path = tiny_path
    if name != "f32":
        path = tmp_path / "quantized.gguf"
        quantize(tiny_path, path, name)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    table = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    with (
        Model(path) as model,
        Session(model, n_ctx=128, n_threads=1, n_batch=16) as session,
        Session(model, n_ctx=128, n_threads=1, n_batch=16, embeddings=table.__getitem__) as embedded,
    ):
        for tokens, parents in ((PROMPT, None), (PROMPT[:12], SPREAD), (PROMPT[5:6], None), (PROMPT, SPREAD)):
            n_logits = 1 if parents is None else len(parents) + 1
            assert np.array_equal(
                embedded.eval(tokens, n_logits=n_logits, parents=parents),
                session.eval(tokens, n_logits=n_logits, parents=parents),
            )
            assert embedded.n_past == session.n_past


def test_wrong_embeddings(tiny_target: Model) -> None:
    with Session(
        tiny_target, n_ctx=32, n_threads=1, embeddings=lambda tokens: np.zeros((len(tokens), 63), np.float32)
    ) as session:
        with pytest.raises(ValueError, match=r"embeddings of shape \(2, 63\), not \(2, 64\)"):
            session.eval([1, 2])
        assert session.n_past == 0


def test_ctrl_c_while_a_context_is_made(tiny_target, monkeypatch):
    """Python raises it inside whichever callback the library is in, and ctypes would print and lose it."""
    real = context_module.llama.llama_init_from_model
    made = []

    @ctypes.CFUNCTYPE(None)
    def callback():
        signal.raise_signal(signal.SIGINT)

    def interrupted(model, params):
        context = real(model, params)
        callback()
        made.append(context)
        return context

    monkeypatch.setattr(context_module.llama, "llama_init_from_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Session(tiny_target, n_ctx=64, n_threads=1)
    assert made
    monkeypatch.undo()
    with Session(tiny_target, n_ctx=64, n_threads=1) as session:
        session.eval([1, 2, 3])


def test_features_are_what_the_output_matrix_takes(tmp_path: Path) -> None:
    """Logits are the output matrix times the hidden state, for every token of pieces and of trees."""
    path = tmp_path / "t.gguf"
    write_tiny_gguf(path)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    matrix = tensors.get("output.weight", tensors["token_embd.weight"])
    output = gguf.quants.dequantize(matrix.data, matrix.tensor_type).astype(np.float32)
    size = KVCacheSize(n_ctx=128, n_sequences=2, n_logits_max=48)
    with Model(path) as model, KVCache(model, size, n_threads=1) as cache:
        first, second = Session.within(cache), Session.within(cache)
        for n_logits, parents in ((1, None), (3, [-1, -1])):
            other = Forward(second, PROMPT[:7], n_logits, parents)
            results = cache.forward([Forward(first, PROMPT, with_features=True), other])
            assert [one.features.shape for one in results] == [(len(PROMPT), model.n_embd), (7, model.n_embd)]
            for one in results:
                assert np.allclose(one.features[-len(one.rows) :] @ output.T, one.rows, atol=0.05)
            assert len(results[1].rows) == n_logits


def test_passes_with_and_without_features_give_the_same_rows(tiny_target: Model) -> None:
    size = KVCacheSize(n_ctx=128, n_logits_max=32)
    with KVCache(tiny_target, size, n_threads=1) as cache:
        session = Session.within(cache)
        found = []
        for _ in range(2):
            session.clear()
            (plain,) = cache.forward([Forward(session, PROMPT, 2)])
            assert plain.features is None
            plain = plain.copy()
            session.clear()
            asked = cache.forward([Forward(session, PROMPT, 2, with_features=True)])[0].copy()
            found.append(asked.features)
            assert np.array_equal(plain.rows, asked.rows)
        assert np.array_equal(*found)
        with pytest.raises(ValueError, match="a pass of 33 tokens and 33 rows"):
            cache.forward([Forward(session, [1] * 33, with_features=True)])


# The oldest tokens leave the cache


@pytest.fixture(scope="module")
def one_block(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model whose keys and values of a token do not depend on those before it."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("block") / "block.gguf", n_layer=1)
    with Model(path) as model:
        yield model


def test_what_follows_attends_to_the_tokens_that_are_left(one_block: Model) -> None:
    """As if the text had begun with them, wherever it stands; a tree too, and again and again."""
    text = [(11 * i * i + 5) % 250 for i in range(400)]
    with Session(one_block, n_ctx=64, n_threads=1) as session:
        for start in range(0, 360, 20):
            tree = session.eval([*text[start : start + 20], 7, 8], n_logits=3, parents=[-1, -1]).copy()
            session.rewind(start + 20)
            first = max(0, start - 20)
            fresh = [
                fresh_logits(one_block, [*text[first : start + 20], *more], 1)[0] for more in ([], [7], [8])
            ]
            assert np.allclose(tree, fresh, atol=TOLERANCE)
            assert session.drop_first(start)
            assert (session.n_past, session.n_held) == (start + 20, 20)
            assert session.tokens == text[: start + 20]


def test_a_sequence_without_its_first_tokens(one_block: Model) -> None:
    with Session(one_block, n_ctx=64, n_threads=1) as session:
        session.eval(PROMPT)
        for n_tokens in (-1, len(PROMPT)):
            with pytest.raises(ValueError, match=f"cannot drop {n_tokens} of"):
                session.drop_first(n_tokens)
        assert session.drop_first(10)
        assert session.rewind(11) == 11
        assert session.rewind(10) == 0, "nothing is left of it"
        assert session.n_held == 0
        session.eval([1] * 64)
        with pytest.raises(EdgespecError, match="64 tokens and 1 more"):
            session.eval([1])
        assert session.drop_first(1)
        session.eval([1])
    with KVCache(one_block, KVCacheSize(n_ctx=64, n_sequences=2), n_threads=1) as cache:
        one, two = Session.within(cache), Session.within(cache)
        one.eval(PROMPT)
        one.drop_first(3)
        two.begin_as(one, 12)
        assert two.n_past == 0, "it would lack its beginning"
        assert n_cells([one, two]) == len(PROMPT) - 3
