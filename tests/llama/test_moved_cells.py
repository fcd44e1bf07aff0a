"""Tokens moved to other places of a cache: which are found, what they are worth after, who cannot have it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec.llama.cache_reuse import Match, check_reuse, find_matches
from edgespec.llama.cache_types import with_cache_type
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny
from tiny_states import SOME, tiny

TOKENS = st.lists(st.integers(0, 2), max_size=60)
NEXT = [3, 1, 4, 1, 5]
LEAST = 16


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, n).tolist()


@given(TOKENS, TOKENS, st.integers(0, 60), st.integers(1, 8))
def test_matches_are_in_both_texts_and_none_is_missed(
    earlier: list[int], prompt: list[int], begin: int, least: int
) -> None:
    def known(at: int) -> bool:
        part = prompt[at : at + least]
        return at + least < len(prompt) and any(
            earlier[i : i + least] == part for i in range(len(earlier) - least + 1)
        )

    at = begin
    for match in find_matches(earlier, prompt, begin, least):
        assert match.n_tokens >= least
        assert earlier[match.start : match.start + match.n_tokens] == prompt[match.at : match.stop]
        assert not any(known(i) for i in range(at, match.at))
        at = match.stop
        assert at < len(prompt), "the last token is read for its logits"
    assert not any(known(i) for i in range(at, len(prompt)))


def test_of_several_places_the_one_with_the_same_shift_is_taken() -> None:
    block = text(1, 40)
    earlier = [*text(2, 10), *block, *text(3, 10), *block]
    prompt = [*text(4, 11), *block, *text(5, 10), *block, 0]
    assert find_matches(earlier, prompt, 0, LEAST) == [Match(11, 10, 40), Match(61, 60, 40)]


# ---- what moved tokens are worth ----


@pytest.fixture(scope="module", params=[1, 2], ids=["a layer", "two layers"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that edgespec's kernels run whole.

    In a first layer keys and values depend on a token and its place alone: a model of one layer must not
    notice that they were moved.
    """
    shape = {"block_count": request.param, "embedding_length": 256, "context_length": 2048}
    target = tmp_path_factory.mktemp("moved") / "tiny.gguf"
    return make_tiny("llama", target, weights_type="q8_0", metadata=shape)


def read(pool: SequencePool, tokens: list[int]) -> tuple[int, np.ndarray, Session]:
    """Do as the engine does with a prompt; return how much was moved, logits after it, and its session."""
    session = pool.begin(tokens)
    n_moved = pool.move(session)
    while session.n_past < len(tokens) - 1:
        n_before = pool.n_before_moved(session)
        n = len(tokens) - 1 - session.n_past if n_before is None else n_before
        session.eval(tokens[session.n_past :][:n], n_logits=0)
        n_moved += pool.move(session)
    assert session.tokens == tokens[:-1]
    return n_moved, session.eval([tokens[-1], *NEXT], n_logits=6).copy(), session


def pool_of(model: Model, least: int, n_cells: int = 2048) -> SequencePool:
    cache = KVCache(model, KVCacheSize(n_ctx=n_cells, n_sequences=4), n_threads=1)
    return SequencePool(cache, least_moved=least)


HEAD, MIDDLE, TAIL = text(1, 30), text(2, 150), text(3, 90)
FIRST = [*HEAD, *text(4, 3), *MIDDLE, *text(5, 40), *TAIL, 7]
EDITED = [*HEAD, *text(6, 5), *MIDDLE, *text(7, 20), *TAIL, 8, 9]
"""Something else in front, later text three places on and eighteen back."""
DELETED = [*HEAD, *TAIL, *MIDDLE, 5]
"""The two in another order, and the first of them at once after what is known."""


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_kernels_and_llama_cpps_agree_on_what_was_moved(path: Path, cache_type: str) -> None:
    rows: dict[tuple[bool, int], list[np.ndarray]] = {}
    for kernels in (True, False):
        with Model(path, kernels=kernels) as model:
            assert model.uses_kernels == kernels
            model.header = with_cache_type(model.header, cache_type)
            for least in (0, LEAST):
                with pool_of(model, least) as pool:
                    found = rows.setdefault((kernels, least), [])
                    for tokens in (FIRST, EDITED, DELETED):
                        n_moved, logits, session = read(pool, tokens)
                        found.append(logits)
                        pool.end(session)
                        wanted = 0 if tokens is FIRST or not least else len(MIDDLE) + len(TAIL)
                        assert n_moved == sum(map(len, session.moved)) == wanted
            n_layer = model.header.n_layer
    spread = [apart(rows[True, 0][i], rows[False, 0][i]) for i in range(3)]
    for i in range(3):
        assert apart(rows[True, LEAST][i], rows[False, LEAST][i]) < 2 * max(spread)
        for kernels in (True, False):
            moved = apart(rows[kernels, LEAST][i], rows[kernels, 0][i])
            if n_layer == 1 or not i:
                assert moved < 2 * max(spread)
            else:
                assert moved > 2 * max(spread), "it was read after another text"


def apart(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(first - second))))


def test_what_others_have_read_keeps_its_bits(path: Path) -> None:
    with Model(path) as model, pool_of(model, LEAST) as pool:
        _, _, first = read(pool, FIRST)
        before = first.state()
        n_moved, _, edited = read(pool, EDITED)
        assert n_moved
        assert np.array_equal(first.state(), before)
        pool.end(first)
        pool.end(edited)
        with pool_of(model, 0) as fresh:
            _, expected, _ = read(fresh, [*FIRST, 1])
        _, rows, again = read(pool, [*FIRST, 1])
        assert again.moved == []
        assert np.array_equal(rows, expected)


def test_texts_that_go_on_from_moved_tokens_know_it(path: Path) -> None:
    with Model(path) as model, pool_of(model, LEAST) as pool:
        for tokens in (FIRST, EDITED):
            pool.end(read(pool, tokens)[2])
        at = len(HEAD) + 5
        places = [range(at, at + len(MIDDLE)), range(at + len(MIDDLE) + 20, len(EDITED) - 2)]
        session = pool.begin([*EDITED, *NEXT, 1])
        assert session.n_past > len(EDITED)
        assert session.moved == places
        assert session.n_exact == at
        shorter = pool.begin(EDITED[: at + 7])
        assert shorter.moved == [range(at, at + 6)]
        shorter.rewind(at)
        shorter.eval(text(9, 30))
        assert shorter.moved == []
        copy = pool.begin([0])
        copy.restore(session.state(), session.tokens, moved=session.moved)
        assert copy.moved == places


def test_what_finds_no_room_is_read(path: Path) -> None:
    with Model(path) as model, pool_of(model, LEAST, n_cells=448) as pool:
        _, _, first = read(pool, FIRST)  # and stays under way
        n_moved, _, edited = read(pool, [*HEAD, *text(6, 20), *MIDDLE[:60]])
        assert n_moved == 59
        pool.end(edited)
        n_moved, _, _ = read(pool, [*HEAD, *text(6, 1), *MIDDLE, 1])
        assert n_moved == 0
        assert first.n_past > len(FIRST)


# ---- models that cannot have it ----


def several_positions(tmp_path: Path) -> Path:
    """A model each of whose tokens has several positions (M-RoPE)."""
    sections = {"{arch}.rope.dimension_sections": (2, 3, 3, 0)}
    biases = {"attn_q.bias": 64, "attn_k.bias": 32, "attn_v.bias": 32}
    return write_tiny_gguf(tmp_path / "vl.gguf", architecture="qwen2vl", vectors=biases, extra=sections)


@pytest.mark.parametrize("name", [*SOME, "gemma3", "qwen2vl"])
def test_models_without_shifts_refuse_it_by_name(name: str, tmp_path: Path) -> None:
    with Model(several_positions(tmp_path) if name == "qwen2vl" else tiny(name)) as model:
        check_reuse(model, 0, 1)
        with pytest.raises(
            UsageError, match=rf"architecture {name}\).*(keeps a state|cannot be shifted)"
        ) as error:
            check_reuse(model, 64, 1)
        assert (error.value.field, error.value.value) == ("cache_reuse", 64)


def test_quantized_keys_that_llama_cpp_cannot_rotate_refuse_it(tmp_path: Path) -> None:
    """There it ends the process (llama-cpp-python 0.3.36), as `keys_can_shift` explains."""
    path = write_tiny_gguf(tmp_path / "narrow.gguf", n_embd=128)  # heads of 32
    with Model(path) as model:
        check_reuse(model, 64, 1)
        model.header = with_cache_type(model.header, "q8_0")
        with pytest.raises(UsageError, match="what it has read, held in q8_0, cannot be shifted"):
            check_reuse(model, 64, 1)


def test_rotations_that_scale_refuse_it(tmp_path: Path) -> None:
    """llama.cpp rotates all keys of a cache at once; these it would scale each time."""
    scaling = {"{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.factor": 4.0}
    path = write_tiny_gguf(tmp_path / "yarn.gguf", extra=scaling)
    with (
        Model(path) as model,
        pytest.raises(UsageError, match="would change what it has read of other texts"),
    ):
        check_reuse(model, 64, 1)
