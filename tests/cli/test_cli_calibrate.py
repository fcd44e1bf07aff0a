"""`edgespec calibrate`, and the lossy modes of `edgespec run`, as a user types them: with tiny models."""

from __future__ import annotations

import json

import pytest

from command_line import failed, run_cli
from random_heads import write_random_head
from tiny_gguf import write_tiny_gguf
from user_models import write_user_models


@pytest.fixture
def suite(tmp_path):
    prompts = ["abc abc", "the thing and the", "1 2 3 4"]
    lines = [
        json.dumps({"question_id": i, "category": "x", "turns": [text]}) for i, text in enumerate(prompts)
    ]
    file = tmp_path / "three.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def models(tmp_path):
    """A pair that is not so certain of what follows."""
    target, draft = (
        write_tiny_gguf(tmp_path / f"{name}.gguf", seed=seed, peak=0.7, chat_template=None)
        for seed, name in enumerate(("big", "small"))
    )
    return ("--target", target, "--draft", draft)


@pytest.fixture
def edgespec(environment, models):
    def edgespec(command, *arguments, models=models):
        return run_cli(command, *models, *arguments, env=environment)

    return edgespec


def test_calibrating_lets_a_cascade_run(edgespec, suite, tmp_path):
    quick = ("--suite", suite, "-n", 24, "--threads", 1, "--loss", 0.3)
    process = edgespec("calibrate", *quick)
    assert process.returncode == 0, process.stderr
    for word in (
        "margin",
        "entropy",
        "<- chosen",
        "the target writes",
        "30.0% allowed",
        "3 prompts, 72 tokens",
    ):
        assert word in process.stdout
    (file,) = (tmp_path / "cache").rglob("*.calibration.json")
    assert process.stdout.splitlines()[-1] == str(file)
    assert "\x1b[" not in process.stdout + process.stderr

    kept = json.loads(file.read_text())["choices"]
    assert sorted(kept) == ["entropy 16", "margin 16"]
    process = edgespec("run", "abc", "--mode", "cascade", "-n", 20, "--seed", 1, "--json")
    result = json.loads(process.stdout)
    assert (result["mode"], result["exact"], result["seed"]) == ("cascade", False, 1)
    assert 0.0 <= result["target_share"] <= 1.0
    assert f"{kept['margin 16']['point']['threshold']:g}" in result["note"]

    again = edgespec("calibrate", *quick, "--span", "rest", "--json")
    printed = json.loads(again.stdout)
    assert printed["file"] == str(file)
    assert [choice["span"] for choice in printed["choices"]] == ["rest", "rest"]
    assert printed["choices"][0]["curve"][0]["target_share"] == 0.0
    assert len(json.loads(file.read_text())["choices"]) == 4, "the others are kept"


def test_what_is_not_exact_says_so(edgespec):
    options = ("abc", "-n", 20, "--seed", 1)
    process = edgespec("run", *options, "--mode", "cascade", "--threshold", 0)
    assert "not exact: the target saw 0 % of the tokens" in process.stderr
    assert "the small model wrote alone" in process.stderr
    process = edgespec("run", *options, "--mode", "cascade", "--threshold", 1)
    assert "not exact: the target saw 100 % of the tokens" in process.stderr
    always = process.stdout
    process = edgespec("run", *options)
    assert "not exact" not in process.stderr
    assert process.stdout == always
    process = edgespec("run", *options, "--lenience", 0.5, "--temp", 0)
    assert "not exact: the target saw 100 % of the tokens" in process.stderr
    result = json.loads(edgespec("run", *options, "--lenience", 0.5, "--temp", 0, "--json").stdout)
    assert (result["mode"], result["exact"], result["target_share"], result["seed"]) == (
        "lenient",
        False,
        1.0,
        None,
    )
    result = json.loads(edgespec("run", *options, "--json").stdout)
    assert (result["mode"], result["exact"], result["target_share"]) == ("exact", True, 1.0)


def test_a_cascade_needs_a_draft_of_the_same_vocabulary(edgespec, tmp_path, models):
    other = write_tiny_gguf(tmp_path / "other.gguf", texts={270: "elsewhere"}, chat_template=None)
    for command in (("run", "abc", "--mode", "cascade", "--threshold", 0.5), ("calibrate",)):
        process = edgespec(*command, models=(*models[:2], "--draft", other))
        assert process.returncode in (1, 2)
        last = process.stderr.splitlines()[-1]
        assert "vocabular" in last or "cannot draft" in last


def test_a_loss_that_only_the_target_keeps_is_warned_of(edgespec, suite):
    process = edgespec("calibrate", "--suite", suite, "-n", 8, "--threads", 1, "--loss", 0)
    assert process.returncode == 0
    if "writes 100%" in process.stdout:
        assert "only the target alone keeps the loss within 0.0%" in process.stderr


def test_the_small_model_of_a_pair_writes_in_a_cascade(edgespec, models, tmp_path):
    """Its draft, a head, cannot."""
    _, big, _, small = models
    paths = {"big": big, "small": small, "head": write_random_head(tmp_path / "head.gguf", big)}
    pair = '[pairs.mine]\ntarget = "big"\ndraft = "head"\n'
    cascade = ("abc", "-n", 8, "--mode", "cascade", "--threshold", 0.4, "--json")
    for choice in (("--pair", "mine"), ("--target", "big")):
        write_user_models(tmp_path / "config", paths, pair)
        failed(edgespec("run", *cascade, models=choice), 2, "head")
        write_user_models(tmp_path / "config", paths, f'{pair}small = "small"\n')
        refused = edgespec("run", *cascade, "--draft", "head", models=("--target", "big"))
        failed(refused, 2, "small")
        process = edgespec("run", *cascade, models=choice)
        assert process.returncode == 0, process.stderr
        assert json.loads(process.stdout)["draft"] == "small"
        assert json.loads(edgespec("run", "abc", "-n", 8, "--json", models=choice).stdout)["draft"] == "head"
