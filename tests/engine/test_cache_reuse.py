"""Prompts that differ from earlier ones in their middle: what engines read again, and what they say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from edgespec import Engine, Result, SamplingParams
from edgespec.decoding.session import n_common
from edgespec.errors import UsageError
from edgespec.llama.cache_reuse import find_matches
from edgespec.llama.choices import StateRoom
from server_app import serving
from tiny_models import make_tiny
from tiny_states import tiny

GREEDY = SamplingParams(temperature=0.0)
LEAST = 24
N_PREDICT = 6


@pytest.fixture(scope="module", params=[1, 2], ids=["a layer", "two layers"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the kernels run whole; one of one layer does not notice that tokens were moved."""
    shape = {"block_count": request.param, "embedding_length": 256, "context_length": 2048}
    target = tmp_path_factory.mktemp("moved") / "tiny.gguf"
    return make_tiny("llama", target, weights_type="q8_0", metadata=shape)


def opened(path: Path, **options: object) -> Engine:
    return Engine(path, drafter="suffix", n_ctx=1024, profile=False, **options)  # type: ignore[arg-type]


class Answer(NamedTuple):
    """A result, and of each token its logprob and those of the likeliest."""

    result: Result
    logprobs: list[tuple[float | None, tuple[tuple[int, float], ...]]]

    def apart(self, other: Answer) -> float:
        """The largest difference between logprobs of what may follow the prompt."""
        first, second = dict(self.logprobs[0][1]), dict(other.logprobs[0][1])
        both = first.keys() & second.keys()
        assert len(both) > 15
        return max(abs(first[token] - second[token]) for token in both)


def answer(engine: Engine, prompt: Sequence[int], n_predict: int = N_PREDICT) -> Answer:
    stream = engine.stream([*prompt], params=GREEDY, n_predict=n_predict, n_logprobs=20, seed=1)
    logprobs = [(token.logprob, token.top) for token in stream]
    return Answer(stream.result, logprobs)


def edited(rng: random.Random, prompt: Sequence[int]) -> list[int]:
    """Change a prompt at a few places: words in front, others in the place of some, some away, two moved."""
    tokens = [*prompt]
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.choice([0, rng.randrange(len(tokens)), len(tokens)])
        n = rng.choice([0, 1, 5, 40])
        new = [rng.randrange(200) for _ in range(rng.choice([0, 1, 5, 40]))]
        if rng.random() < 0.2:
            new, tokens = tokens[:at], tokens[at:]
            at = len(tokens)
        tokens[at : at + n] = new
    return tokens[:600] or [1]


def prompts(seed: int, n: int) -> list[list[int]]:
    rng = random.Random(seed)
    found = [[rng.randrange(200) for _ in range(300)]]
    while len(found) < n:
        found.append(edited(rng, found[-1] if rng.random() < 0.8 else rng.choice(found)))
    return found


def fresh(path: Path, asked: Sequence[Sequence[int]]) -> list[Answer]:
    """What an engine that keeps nothing says."""
    with opened(path) as engine:
        return [answer(engine, prompt) for prompt in asked]


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [0, 1 << 24])
@pytest.mark.parametrize("seed", range(3))
def test_without_it_nothing_stale_is_reused(path: Path, seed: int, prefix_cache: int) -> None:
    asked = prompts(seed, 15)
    expected = fresh(path, asked)
    earlier: list[list[int]] = []
    with opened(path, prefix_cache=prefix_cache) as engine:
        for prompt, wanted in zip(asked, expected, strict=True):
            result, logprobs = answer(engine, prompt)
            assert logprobs == wanted.logprobs, "the same bits"
            assert (result.token_ids, result.exact, result.n_shifted) == (wanted.result.token_ids, True, 0)
            if not prefix_cache:
                begun = [n_common(text, prompt) for text in earlier[-1:]]
                assert result.n_cached == min(max(begun, default=0), len(prompt) - 1)
            earlier.append([*prompt, *result.token_ids[:-1]])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_with_it_what_was_reused_is_counted(path: Path, seed: int) -> None:
    """One sequence is kept: what it holds, and which of it was moved, is followed here token by token."""
    asked = prompts(seed, 15)
    expected = fresh(path, asked)
    kept: list[int] = []
    moved: set[int] = set()  # places in it
    n_exact = n_moved = 0
    with opened(path, cache_reuse=LEAST) as engine:
        for prompt, wanted in zip(asked, expected, strict=True):
            n = min(n_common(kept, prompt), len(prompt) - 1)
            matches = find_matches(kept, prompt, n, LEAST)
            moved = {i for i in moved if i < n} | {i for one in matches for i in range(one.at, one.stop)}
            found = answer(engine, prompt)
            result = found.result
            assert result.n_cached == n + sum(one.n_tokens for one in matches)
            assert result.n_shifted == len(moved)
            assert (result.exact, result.mode) == (not moved, "shifted" if moved else "exact")
            assert result.seed == (None if moved else 1)
            if not moved:
                assert found.logprobs == wanted.logprobs
            elif engine.target.header.n_layer == 1:
                assert found.apart(wanted) < 0.2, "each token is where the prompt has it"
            kept = [*prompt, *result.token_ids[:-1]]
            n_exact, n_moved = n_exact + (not moved), n_moved + bool(moved)
    assert n_exact and n_moved, "both were seen"


def test_requests_beside_one_whose_tokens_are_moved_keep_their_bits(path: Path) -> None:
    first, other = prompts(1, 1)[0], prompts(9, 1)[0]
    wanted = fresh(path, [first, other])
    with opened(path, cache_reuse=LEAST, parallel=2, n_cells=2048) as engine:
        assert answer(engine, first).logprobs == wanted[0].logprobs
        beside = engine.stream(other, params=GREEDY, n_predict=60, n_logprobs=20, seed=1)
        tokens = [next(beside), next(beside)]
        assert answer(engine, [1, 2, 3, *first, 4]).result.n_shifted == len(first)
        tokens += beside
        assert [(one.logprob, one.top) for one in tokens[:N_PREDICT]] == wanted[1].logprobs
        assert beside.result.exact
        again = answer(engine, first)
        assert (again.result.exact, again.result.n_cached) == (True, len(first) - 1)
        assert again.logprobs == wanted[0].logprobs


def test_states_on_disk_have_nothing_that_was_moved(path: Path, tmp_path: Path) -> None:
    first = prompts(2, 1)[0]
    changed = [*first[:100], 1, 2, 3, *first[100:], 4]
    room = StateRoom(tmp_path / "states", 1 << 30)
    with opened(path, cache_reuse=LEAST, states=room) as engine:
        answer(engine, first)
        assert answer(engine, changed).result.n_shifted == 200
    with opened(path, states=room) as engine:
        again = answer(engine, changed)
    assert again.result.n_cached == 103, "up to the first token that was moved"
    assert again.logprobs == fresh(path, [changed])[0].logprobs


def test_a_server_says_what_was_shifted(path: Path) -> None:
    first = prompts(3, 1)[0]
    with serving(path, engine_options={"cache_reuse": LEAST}) as served, served.client() as client:
        usages = []
        for prompt in (first, [1, 2, 3, *first, 4]):
            asked = {"model": "edgespec", "prompt": prompt, "temperature": 0, "max_tokens": 3}
            found = client.post("/v1/completions", json=asked).raise_for_status().json()
            usages.append(found["usage"])
    said = [usage["edgespec"] for usage in usages]
    assert [(one["exact"], one["shifted_tokens"]) for one in said] == [(True, 0), (False, len(first))]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == len(first)


# ---- what is refused ----


def test_what_cannot_be_is_refused_by_name(path: Path) -> None:
    with pytest.raises(UsageError, match="cache_reuse -1: must be 0 or more"):
        Engine(path, cache_reuse=-1)
    with pytest.raises(UsageError, match="cache_reuse 8: cannot be with a target on nodes"):
        Engine(path, cache_reuse=8, rpc=("127.0.0.1:1",))
    with pytest.raises(UsageError, match=r"cache_reuse 8: .*mamba2\): it keeps a state"):
        Engine(tiny("mamba2"), drafter="none", cache_reuse=8, profile=False)
