"""Prompts with spans of rows: what drafts propose after one changes no text, for each kind of draft."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import EmbeddedSpan, PromptTokens
from edgespec.engine.engine import Engine
from random_heads import write_random_head
from tiny_models import make_tiny

GREEDY = SamplingParams(temperature=0.0)
TEXT = [5, 9, 13, 5, 9, 13, 5, 9]


def span(engine: Engine, seed: int, n_rows: int = 20, n_positions: int = 20) -> EmbeddedSpan:
    """Return a span of random rows; with fewer positions than rows it is a square of them."""
    rows = np.random.default_rng(seed).standard_normal((n_rows, engine.target.n_input), np.float32)
    done: Future[np.ndarray] = Future()
    done.set_result(rows)
    places = None
    if n_positions < n_rows:
        at = np.arange(n_rows)
        places = np.array([0 * at, at // n_positions, at % n_positions, 0 * at], np.int32)
    ids = EmbeddedSpan.ids_of(bytes([seed]), n_rows, n_positions)
    return EmbeddedSpan(ids, lambda: done, places)


def prompt(*parts: list[int] | EmbeddedSpan) -> PromptTokens:
    made = PromptTokens(
        token for part in parts for token in (part.ids if isinstance(part, EmbeddedSpan) else part)
    )
    made.spans = tuple(part for part in parts if isinstance(part, EmbeddedSpan))
    return made


def prompts(engine: Engine, **size: int) -> list[PromptTokens]:
    one, two = span(engine, 1, **size), span(engine, 2, **size)
    return [
        prompt(TEXT, one, TEXT),
        prompt(one, TEXT, two, two, TEXT),
        prompt(TEXT, one, TEXT, two),
        prompt(one),
    ]


CASES = {
    "draft": ("llama", {}),
    "head": ("llama", {}),
    "mtp": ("qwen35-mtp", {}),
    "folded, mtp": ("qwen35-mtp", {"n_positions": 5}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{"params": GREEDY}, {"seed": 5}], ids=["greedy", "seed"])
def test_drafts_change_no_text_after_spans(case, options, tmp_path):
    name, size = CASES[case]
    target = make_tiny(name, tmp_path / "target.gguf", weights_type="q8_0")
    draft = None
    if case == "draft":
        draft = make_tiny(name, tmp_path / "draft.gguf", seed=2)
    elif case == "head":
        draft = write_random_head(tmp_path / "head.gguf", target)
    n_drafted = 0
    common = {"profile": False, "n_ctx": 1024}
    with Engine(target, drafter="none", **common) as plain, Engine(target, draft, **common) as drafting:
        assert drafting.kernels != "stock"
        for tokens in prompts(plain, **size):
            expected = plain.generate(tokens, n_predict=32, **options).token_ids
            for chosen in ({}, {"drafter": "mtp" if draft is None else "model", "gamma": 3}):
                got = drafting.generate(tokens, n_predict=32, **chosen, **options)
                assert got.token_ids == expected
                n_drafted += got.sources.get("model", (0, 0))[0]
    assert n_drafted
