"""The hint that a better draft could be made: in a terminal, once a day, and nowhere else."""

from __future__ import annotations

import json
import shutil
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from command_line import COMMAND, run_cli
from edgespec.drafting.history import History
from edgespec.forge.hints import LEAST_HISTORY
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.gguf_header import read_header
from kept_drafts import keep_draft
from terminals import Terminal, messages_in_terminal

FROM_HISTORY = "edgespec draft make --target {} --from-history --when-idle"


@pytest.fixture
def target(tmp_path, tiny_path):
    return Path(shutil.copy(tiny_path, tmp_path / "target.gguf"))


@pytest.fixture
def hints(cache):
    return cache / "edgespec" / "hints.json"


@pytest.fixture
def history(cache, target):
    """A history that is long enough."""
    history = History(tokenizer_fingerprint(read_header(target)), root=cache / "edgespec" / "history")
    history.append(np.arange(LEAST_HISTORY, dtype=np.int32) % 200)
    return history


@pytest.fixture
def command(target, tiny_draft_path):
    """A run, in words."""

    def command(*arguments, verb="run", prompt=("abc", "-n", 5)):
        models = ("--target", target, "--draft", tiny_draft_path)
        return [*COMMAND, *map(str, (verb, *models, *prompt, *arguments))]

    return command


@pytest.fixture
def shown(command, environment):
    """Run `edgespec run` in a terminal; return what it shows."""

    def shown(*arguments, **options):
        with Terminal(command(*arguments, **options), environment) as terminal:
            assert terminal.wait() == 0
            return terminal.rest()

    return shown


def test_a_long_history(shown, history, hints, target):
    line = FROM_HISTORY.format(target)
    assert shown().count(f"edgespec: a draft trained on your own texts may be faster: `{line}`") == 1
    assert json.loads(hints.read_text()) == {"day": date.today().isoformat()}
    assert "draft make" not in shown(), "once a day"
    hints.write_text(json.dumps({"day": (date.today() - timedelta(days=1)).isoformat()}))
    assert line in shown()
    hints.write_text("damaged")
    assert line in shown()


@pytest.mark.parametrize(
    "arguments", [["--json"], ["--no-stats"], ["--gamma", 0], ["--no-cache"]], ids=lambda words: words[0]
)
def test_nobody_is_told_who_did_not_ask(shown, history, hints, arguments):
    assert "draft make" not in shown(*arguments)
    assert not hints.exists()


def test_pipes(command, environment, history, hints):
    code, seen, out = messages_in_terminal(command(), environment)
    assert code == 0
    assert out
    assert b"draft make" not in seen
    process = run_cli(*command()[len(COMMAND) :], env=environment)
    assert "tokens/s" in process.stderr
    assert "draft make" not in process.stderr
    assert not hints.exists()


def test_a_history_that_is_too_short(shown, cache, target, hints):
    History(tokenizer_fingerprint(read_header(target)), root=cache / "edgespec" / "history").append(
        np.zeros(LEAST_HISTORY - 1000, np.int32)
    )
    assert "draft make" not in shown()
    assert not hints.exists()


def test_drafts_that_gain_little(shown, target):
    """A tiny draft model knows little of what is sampled from a tiny target: 1.05 tokens a step."""
    text = shown("--temp", 2, "--seed", 1, "--drafter", "model", "--gamma", 1, prompt=("abc", "-n", 150))
    assert "one made for this target may gain more" in text
    assert f"`edgespec draft make --target {target}`" in text


def test_a_draft_that_was_made_already(shown, history, target, environment, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "EDGESPEC_MODELS_DIR"):
        monkeypatch.setenv(name, environment[name])
    models = Path(environment["EDGESPEC_MODELS_DIR"])
    keep_draft(models, "of-history", target, target_sha256="cd" * 32)
    keep_draft(models, "of-prompts", target, data={"prompt:built-in": 1_000_000})
    assert "draft make" in shown(), "neither knows these texts and is for this file"


def test_a_draft_that_knows_the_history(shown, history, target, environment, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "EDGESPEC_MODELS_DIR"):
        monkeypatch.setenv(name, environment[name])
    keep_draft(Path(environment["EDGESPEC_MODELS_DIR"]), "of-history", target)
    assert "draft make" not in shown()


def test_a_cache_that_cannot_be_written(shown, history, hints):
    hints.mkdir()
    assert "draft make" not in shown()


def test_chat(command, environment, history, target):
    words = command("-n", 5, verb="chat", prompt=())
    with Terminal(words, environment) as terminal:
        terminal.expect("Ctrl-D ends")
        terminal.type("abc\r")
        terminal.expect("cut after 5 tokens")
        terminal.type("/exit\r")
        terminal.expect(FROM_HISTORY.format(target))
        assert terminal.wait() == 0
