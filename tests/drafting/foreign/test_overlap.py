"""`edgespec models pair`: what two vocabularies have in common, and what is made of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from edgespec.cli.models import models_app
from edgespec.drafting.foreign.overlap import (
    OTHER_FAMILY,
    SAME_FAMILY,
    Overlap,
    find_overlap,
    measure_agreement,
    suite_text,
    with_agreement,
)
from edgespec.drafting.foreign.vocabulary_map import map_vocabularies
from edgespec.errors import EdgespecError
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from tiny_gguf import BOS, N_WORDS, write_tiny_gguf

PLAIN = Overlap(
    n_target=300,
    n_draft=200,
    types=("BPE", "SPM"),
    n_shared=150,
    equal=False,
    n_tokens=1000,
    coverage=0.9,
    same=0.8,
    compression=1.1,
    cost=0.1,
)


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    """A draft that has no token for " the" and for "on"."""
    texts = {262: "Ġqq", 260: "Ġxy"}
    path = tmp_path_factory.mktemp("other") / "draft.gguf"
    return write_tiny_gguf(path, seed=2, n_layer=1, n_embd=32, n_ff=64, n_head=2, texts=texts)


def test_overlap_over_a_text(tiny_target, other_path):
    words = " the in on" * 10
    with Model(other_path, vocab_only=True) as draft:
        overlap = find_overlap(tiny_target, draft, map_vocabularies(tiny_target, draft), words)
    assert overlap.n_shared == N_WORDS - 2
    assert not overlap.equal
    assert overlap.n_tokens == len(tiny_target.tokenize(words, add_special=False, parse_special=False))
    assert overlap.coverage == pytest.approx(1 - 20 / overlap.n_tokens)  # two of each " the in on"
    assert 0.0 < overlap.same <= overlap.coverage
    assert overlap.compression != 1.0


def test_overlap_of_a_vocabulary_with_itself(tiny_target, tiny_draft):
    overlap = find_overlap(tiny_target, tiny_draft, map_vocabularies(tiny_target, tiny_draft), suite_text())
    assert overlap.equal
    assert (overlap.coverage, overlap.same, overlap.compression) == (1.0, 1.0, 1.0)
    assert overlap.acceptance == SAME_FAMILY


def test_overlap_over_no_text(tiny_target, tiny_draft):
    overlap = find_overlap(tiny_target, tiny_draft, map_vocabularies(tiny_target, tiny_draft), "")
    assert (overlap.n_tokens, overlap.coverage) == (0, 0.0)
    assert overlap.advice


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "worth trying: about 64% of what it drafts should be accepted"),
        ({"measured": 0.2}, "do not try: only about 20% of what it drafts should be accepted, which"),
        ({"compression": 6.0}, "do not try: only about 64%"),
        ({"cost": 0.9}, "do not try: the draft is too large beside the target (90% of its size)"),
        ({"cost": 0.27, "compression": 1.2}, "it may just pay: about 64%"),
        ({"equal": True, "cost": 0.3}, "worth trying: about 84%"),
    ],
)
def test_advice(changes, advice):
    overlap = replace(PLAIN, **changes)
    assert overlap.advice.startswith(advice)
    assert overlap.worth is not advice.startswith("do not")
    assert overlap.summary == f"150 tokens are the same, 90% of those that text is made of; {overlap.advice}"


def test_the_expected_acceptance_falls_with_what_is_cut_elsewhere():
    chances = [replace(PLAIN, same=same).acceptance for same in (0.0, 0.5, 1.0)]
    assert 0.5 * OTHER_FAMILY < chances[0] < chances[1] < chances[2] == OTHER_FAMILY
    assert with_agreement(PLAIN, [0.25, 0.75]).acceptance == 0.5


@pytest.mark.parametrize("level", ["auto", "token", "string"])
def test_agreement_of_a_model_with_itself_is_complete(tiny_target, level):
    prompts = [
        tiny_target.tokenize(text, add_special=True, parse_special=False) for text in ("the", "on and")
    ]
    shares = measure_agreement(tiny_target, tiny_target, prompts, n_tokens=30, n_threads=1, level=level)
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


def test_the_report(tiny_path, other_path):
    result = pair(tiny_path, other_path)
    assert result.exit_code == 0, result.exception
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(lines) == ["target", "draft", "shared", "text", "accepted", "advice"]
    assert lines["shared"].startswith(f"{N_WORDS - 2} tokens; ")
    assert "estimated" in lines["accepted"]


def test_the_report_of_one_vocabulary(tiny_path, tiny_draft_path):
    assert "nothing has to be translated" in pair(tiny_path, tiny_draft_path).stdout


def test_the_report_as_json(tiny_path, other_path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" the" * 50)
    data = json.loads(pair(tiny_path, other_path, "--text", text, "--json").stdout)
    assert data["n_tokens"] == 50
    assert data["coverage"] == 0.0
    assert data["n_target"] == BOS + 3
    assert data["measured"] is None
    assert isinstance(data["worth"], bool)


def test_the_report_as_measured(tiny_path, other_path):
    data = json.loads(pair(tiny_path, other_path, "--measure", "--json").stdout)
    assert 0.0 < data["measured"] <= 1.0
    assert data["acceptance"] == data["measured"]
    assert "measured" in pair(tiny_path, other_path, "--measure").stdout


def test_wrong_requests(tiny_path, other_path, tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, words in (
        ("empty", "empty"),
        ("binary", "not UTF-8"),
        ("missing", "No such file"),
        (".", "directory"),
    ):
        refused = error(tiny_path, other_path, "--text", tmp_path / name)
        assert words in str(refused)
        assert str(tmp_path) in str(refused)
        assert refused.exit_code == 2
    assert error(tiny_path, "qwen2.5-coder-0.5b").exit_code == 2
    assert error(tiny_path, tmp_path / "no.gguf").exit_code == 2
    (tmp_path / "text.gguf").write_text("hello")
    assert error(tmp_path / "text.gguf", other_path).exit_code == 1


@pytest.mark.pair
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-270m-q4_k_m"])
def test_the_estimate_is_near_what_is_measured(pair, monkeypatch, name):
    monkeypatch.setattr("edgespec.cli.models._MEASURED_TOKENS", 24)
    try:
        path = resolve(name)
    except EdgespecError as reason:
        pytest.skip(f"the draft could not be downloaded: {reason}")
    result = CliRunner().invoke(models_app, ["pair", str(pair[0]), str(path), "--measure", "--json"])
    data = json.loads(result.stdout)
    estimated = replace(Overlap(**{k: data[k] for k in Overlap.__slots__}), measured=None).acceptance
    print(f"{name}: {data['measured']:.2f} measured, {estimated:.2f} estimated")
    assert data["measured"] == pytest.approx(estimated, abs=0.15)
    assert data["worth"]
