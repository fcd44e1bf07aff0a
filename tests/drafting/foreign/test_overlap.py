"""`edgespec models pair`: what two models share, and what is made of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from edgespec.cli.models import models_app
from edgespec.drafting.foreign.overlap import Overlap, measure_agreement
from edgespec.drafting.foreign.vocabulary_map import map_vocabularies
from edgespec.errors import EdgespecError
from tiny_gguf import BOS, N_WORDS, write_tiny_gguf

PLAIN = Overlap(
    n_target=300, n_draft=200, types=("BPE", "SPM"), n_shared=150, equal=False, cost=0.1, acceptance=0.64
)


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    """A draft that has no token for " the" and for "on"."""
    texts = {262: "Ġqq", 260: "Ġxy"}
    path = tmp_path_factory.mktemp("other") / "draft.gguf"
    return write_tiny_gguf(path, seed=2, n_layer=1, n_embd=32, n_ff=64, n_head=2, texts=texts)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "worth trying: about 64% of what it drafts is accepted"),
        ({"acceptance": 0.2}, "do not try: about 20%"),
        (
            {"cost": 0.9},
            "do not try: about 64% of what it drafts is accepted, which costs more",
        ),
        ({"cost": 0.32}, "it may just pay: about 64%"),
        ({"equal": True, "cost": 0.3, "acceptance": 0.84}, "worth trying: about 84%"),
    ],
)
def test_advice(changes, advice):
    overlap = replace(PLAIN, **changes)
    assert overlap.advice.startswith(advice)
    assert overlap.worth is not advice.startswith("do not")


@pytest.mark.parametrize("level", ["auto", "token", "string"])
def test_agreement_of_a_model_with_itself_is_complete(tiny_target, level):
    prompts = [
        tiny_target.tokenize(text, add_special=True, parse_special=False) for text in ("the", "on and")
    ]
    mapping = map_vocabularies(tiny_target, tiny_target)
    asked = {"n_tokens": 30, "n_threads": 1, "level": level}
    shares = measure_agreement(tiny_target, tiny_target, mapping, prompts, **asked)
    assert len(shares) == 2
    # What is said need not be written as the tokenizer would: there the string level proposes something else.
    assert min(shares) > (0.99 if level == "token" else 0.4)


# --- the command


def pair(*arguments):
    return CliRunner().invoke(models_app, ["pair", *map(str, arguments)], catch_exceptions=True)


def error(*arguments):
    result = pair(*arguments)
    assert isinstance(result.exception, EdgespecError), (result.output, result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""
    return result.exception


def test_the_report(tiny_path, tiny_draft_path, other_path):
    result = pair(tiny_path, other_path)
    assert result.exit_code == 0, result.exception
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(lines) == ["target", "draft", "shared", "advice"]
    assert lines["shared"] == f"{N_WORDS - 2} tokens"
    assert "the vocabularies are the same" in pair(tiny_path, tiny_draft_path).stdout
    data = json.loads(pair(tiny_path, other_path, "--json").stdout)
    assert 0.0 < data["acceptance"] <= 1.0
    assert (data["n_target"], data["n_shared"], data["equal"]) == (BOS + 3, N_WORDS - 2, False)
    assert isinstance(data["worth"], bool)


def test_wrong_requests(tiny_path, other_path, tmp_path):
    assert error(tiny_path, "qwen2.5-coder-0.5b").exit_code == 2
    assert error(tiny_path, tmp_path / "no.gguf").exit_code == 2
    (tmp_path / "text.gguf").write_text("hello")
    assert error(tmp_path / "text.gguf", other_path).exit_code == 1
