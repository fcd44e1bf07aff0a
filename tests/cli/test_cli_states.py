"""Commands over models that keep a state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run_cli
from edgespec.llama.gguf import UINT32, encode_number
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.footprint import required_bytes, target_rollback
from tiny_models import make_tiny
from tiny_states import SOME, tiny


@pytest.mark.parametrize(
    ("name", "by", "words"),
    [
        ("lfm2", "snapshots", "keeps a state: drafts of up to 32 tokens are taken back; 17 kB of states"),
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


def test_doctor_says_whether_the_head_in_a_file_drafts(tmp_path: Path, environment: dict[str, str]) -> None:
    path = make_tiny("qwen35-mtp", tmp_path / "one.gguf", weights_type="q8_0")
    shown = run_cli("doctor", path, env=environment).stdout
    assert "its MTP head drafts" in shown
    assert "not packed: blk.2." not in shown, "its matrices are loaded, as where it drafts"
    one, two = (encode_number("glm4moe.nextn_predict_layers", UINT32, n) for n in (1, 2))
    path.write_bytes(tiny("glm4-moe-mtp").read_bytes().replace(one, two))
    shown = run_cli("doctor", path, env=environment).stdout
    assert "MTP head not used: its MTP head has 2 blocks" in shown
    assert "blk.1." not in shown, "what is not loaded cannot be packed"


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
