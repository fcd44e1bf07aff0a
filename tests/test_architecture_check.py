"""What works with each architecture: the check of tiny models, its page, and sampled texts, counted."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from architecture_check import SOURCES, check_architectures
from architecture_table import MTP
from edgespec import Engine, SamplingParams
from edgespec.llama.gguf_header import read_results
from edgespec.llama.session import Session
from models_supported import COLUMNS, MARK, markdown, problems, supports
from tiny_models import ARCHITECTURES, make_tiny
from toy_models import chi_square_p_value

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def checks(kernels):
    return {check.name: check for check in check_architectures(list(ARCHITECTURES))}


def test_each_is_checked(checks):
    assert list(checks) == list(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_is_wrong(checks, name):
    assert problems(checks[name]) == []
    if not checks[name].declined:
        assert checks[name].same_in_any_batch


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_can_be_taken_back_and_every_source_drafts(checks, name):
    assert checks[name].takes_back
    assert checks[name].works == (SOURCES if MTP in ARCHITECTURES[name].kinds else SOURCES[:-1])


def test_the_page_says_what_was_found(checks):
    page = (ROOT / "docs/models-supported.md").read_text()
    table = markdown(list(checks.values()))
    assert comparable(page[page.index(MARK) + len(MARK) :]) == comparable(table), (
        "run `make models-supported`"
    )
    found, kept = supports(list(checks.values())), read_results()
    assert list(kept) == list(found)
    for name, support in kept.items():
        if not support.left_to_llama_cpp:  # else it depends on the processor
            assert support == found[name], "run `make models-supported`"


def comparable(tables):
    """The tables without what llama.cpp decides where it runs a part: other processors may differ."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.strip().splitlines()]
    kernels, batch = COLUMNS.index("on the kernels"), COLUMNS.index("any batch")
    for row in rows:
        if len(row) == len(COLUMNS) and row[kernels] != "all":
            row[batch] = ""
    return rows


# ---- sampled text ----

WORDS, LENGTH, N = (7, 99), 4, 150

COUNTED = ("llama", "gemma3", "qwen35", "mamba2", "qwen35moe-mtp", "glm4-moe-mtp")
"""Each way of taking tokens back with each kind of draft: a cache, one with a window, states beside one,
states alone; the head of a hybrid and of a dense model. That what is drafted is what is written plainly, for
a seed too, `test_tokens_can_be_taken_back_and_every_source_drafts` checks of all architectures.
"""


def probabilities(engine, prompt):
    """Of each text of LENGTH words, by the target alone."""
    found = np.zeros((len(WORDS),) * LENGTH)
    with Session(engine.target, n_ctx=256, n_threads=1) as session:

        def chances(text):
            session.clear()
            row = session.eval([*prompt, *text])[0][list(WORDS)].astype(np.float64)
            exp = np.exp(row - row.max())
            return exp / exp.sum()

        for indices in itertools.product(range(len(WORDS)), repeat=LENGTH):
            text = [WORDS[i] for i in indices]
            found[indices] = np.prod([chances(text[:at])[i] for at, i in enumerate(indices)])
    return found


@pytest.mark.proof
@pytest.mark.parametrize("name", COUNTED)
def test_sampled_texts_are_distributed_as_the_target_alone_would(kernels, tmp_path, name):
    """Over two words, drafted by a model of the same two, or by the head in its own file."""
    target = make_tiny(name, tmp_path / "target.gguf", weights_type="q8_0")
    own = MTP in ARCHITECTURES[name].kinds
    draft = None if own else make_tiny("llama", tmp_path / "draft.gguf", seed=2)
    with Engine(target, draft, n_threads=1, profile=False) as engine:
        forbidden = {token: -math.inf for token in range(engine.target.n_vocab) if token not in WORDS}
        params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=forbidden)
        prompt = engine.prompt_tokens("the quick brown fox", chat=False)
        expected = N * probabilities(engine, prompt)
        counts, n_drafted = np.zeros_like(expected), 0
        for seed in range(N):
            result = engine.generate(
                prompt,
                params=params,
                seed=seed,
                rule="block",
                drafter="mtp" if own else "model",
                gamma=2,
                n_predict=LENGTH,
            )
            counts[tuple(WORDS.index(token) for token in result.token_ids)] += 1
            n_drafted += result.stats.n_drafted
        p_value = chi_square_p_value(counts.ravel(), expected.ravel())
        print(f"{name}: chi-square p-value {p_value:.3f}, {n_drafted} tokens drafted")
        assert p_value > 1e-3
        assert n_drafted > 0
