"""Commands over models that keep a state."""

from __future__ import annotations

import json

import pytest

from command_line import run_cli
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.footprint import required_bytes, target_rollback
from tiny_states import SOME, tiny


@pytest.mark.parametrize(
    ("name", "by", "words"),
    [
        ("lfm2", "snapshots", "keeps a state: drafts of up to 32 tokens are taken back; 16 KiB of states"),
        (
            "mamba2",
            "reading again",
            "keeps a state: after a rejected draft its accepted tokens are read again",
        ),
        ("llama", "cells", None),
    ],
)
def test_doctor_says_how_tokens_are_taken_back(
    name: str, by: str, words: str | None, environment: dict[str, str]
) -> None:
    report = json.loads(run_cli("doctor", "--json", tiny(name), env=environment).stdout)
    (model,) = report["models"]
    header = check_model_file(tiny(name))
    states = target_rollback(header).n_states(1) * header.state_bytes
    assert model["rollback"]["by"] == by
    assert model["rollback"]["states_bytes"] == states
    assert required_bytes(header, 256) > header.file_bytes + states + header.kv_bytes(256)
    shown = run_cli("doctor", tiny(name), env=environment).stdout
    assert words in shown if words else "keeps a state" not in shown


@pytest.mark.parametrize("name", SOME)
def test_run_and_compare_two_models(name: str, environment: dict[str, str]) -> None:
    plain = run_cli(
        "run",
        "--target",
        tiny(name),
        "--drafter",
        "none",
        "-n",
        "20",
        "--temp",
        "0",
        "the fox",
        env=environment,
    )
    drafted = run_cli(
        "run", "--target", tiny(name), "--gamma", "3", "-n", "20", "--temp", "0", "the fox", env=environment
    )
    assert plain.returncode == drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    pair = run_cli("models", "pair", "--measure", tiny("llama"), tiny(name, 2), env=environment)
    assert pair.returncode == 0, pair.stderr
    assert "measured" in pair.stdout
