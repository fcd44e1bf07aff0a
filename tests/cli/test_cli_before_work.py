"""Inputs and outputs are checked before anything is fetched, loaded or measured, on every command."""

from __future__ import annotations

import json
import os

import pytest

from command_line import failed, run_cli
from tiny_gguf import write_tiny_gguf

ABSENT = "qwen2.5-0.5b-q4_k_m"
"""A model of the registry, which the user does not have."""

INPUTS = {
    "run -t A -f FILE": "--file missing: No such file",
    "run -t A --json-schema FILE hi": "--json-schema missing: No such file",
    "run -t A --grammar FILE hi": "--grammar missing: No such file",
    "run -t A --chat-template FILE hi": "--chat-template missing: neither a file nor one of",
    "run -t A --rpc a:b:c hi": "--rpc a:b:c: not HOST:PORT",
    "run -t A -d nobody hi": "no model is called 'nobody'",
    "chat -t A --load FILE": "missing: no such file",
    "chat -t A --chat-template FILE": "--chat-template missing: neither",
    "chat -t A --rpc a:b:c": "--rpc a:b:c",
    "serve -t A --port 0 --api-key-file FILE": "--api-key-file missing: No such file",
    "serve -t A --port 0 --chat-template FILE": "--chat-template missing: neither",
    "serve -t nobody --port 0 --speech whisper-base": "no model is called 'nobody'",
    "batch FILE -o out.jsonl -t A": "missing: No such file",
    "batch text.txt -o out.jsonl -t A --chat-template FILE": "--chat-template missing: neither",
    "bench -t A --suite FILE": "missing: there is no such file",
    "bench -t A --peer llama.cpp --bin FILE": "--bin missing: no executable",
    "bench -t A --rpc a:b:c": "--rpc a:b:c",
    "compare --targets A --drafts none --text FILE": "--text missing: No such file",
    "compare --targets A --drafts none --suite FILE": "missing: there is no such file",
    "compare --targets A --drafts none,nobody": "no model is called 'nobody'",
    "calibrate -t A -d A --suite FILE": "missing: there is no such file",
    "profile -t A --rpc a:b:c": "--rpc a:b:c",
    "quantize A --type q4_0 --imatrix FILE": "--imatrix: missing: no such file",
    "draft make -t A --prompts FILE": "--prompts missing: no such file",
    "draft make -t A --prompts latin1.txt": "--prompts latin1.txt: not UTF-8 text",
    "draft make -t A --prompts broken.jsonl": "broken.jsonl",
    "draft make -t A --start nobody": "no model is called 'nobody'",
    "draft make -t A --name A": "a model of that name exists already",
    "cache import FILE -t A": "missing: no such file",
}
OUTPUTS = {
    "bench -t A --csv PLACE",
    "bench -t A --report PLACE",
    "compare --targets A --drafts none --csv PLACE",
    "compare --targets A --drafts none -o PLACE",
    "quantize A --type q4_0 -o PLACE",
    "batch text.txt -t A -o PLACE",
}


@pytest.fixture
def work(tmp_path):
    (work := tmp_path / "work").mkdir()
    (work / "text.txt").write_text("a text\n")
    (work / "latin1.txt").write_bytes("Größe\n".encode("latin-1"))
    (work / "broken.jsonl").write_text("{\n")
    (work / "folder").mkdir()
    return work


@pytest.fixture
def refused(environment, work, tmp_path):
    """Run a command that must be refused with one line; nothing was fetched or written by then."""
    nothing_answers = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}

    def refused(command, **places):
        words = [{"A": ABSENT, "FILE": "missing", **places}.get(word, word) for word in command.split()]
        before = sorted(work.rglob("*"))
        line = failed(run_cli(*words, env=environment | nothing_answers, cwd=work), 2)
        assert not (tmp_path / "models").exists(), "a pull began"
        assert sorted(work.rglob("*")) == before
        return line

    return refused


@pytest.mark.parametrize("command", INPUTS)
def test_an_input_that_is_not_there(refused, command):
    assert INPUTS[command] in refused(command)


@pytest.mark.parametrize("command", sorted(OUTPUTS))
def test_an_output_that_cannot_be_written(refused, command, work):
    takes_folder = command.startswith(("compare --targets A --drafts none -o", "quantize"))
    assert "text.txt" in refused(command, PLACE="text.txt/below/it.csv")
    assert "/proc/below" in refused(command, PLACE="/proc/below/it.csv")
    if takes_folder:
        assert "text.txt" in refused(command, PLACE="text.txt")
    else:
        assert "folder" in refused(command, PLACE="folder")
        assert "no/such" in refused(command, PLACE="no/such/it.csv")


def test_an_output_that_is_there_already(refused, work):
    for name in ("old.jsonl", f"{ABSENT}-q4_0.gguf", "old.gguf"):
        (work / name).write_bytes(b"old")
    assert "old.jsonl is there already" in refused("batch text.txt -t A -o old.jsonl")
    assert "exists already" in refused("quantize A --type q4_0 -o old.gguf")
    assert "exists already" in refused("quantize A --type q4_0 -o .")


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full here")
def test_what_was_measured_is_not_lost_with_its_file(environment, work):
    """/dev/full can be opened and never written: a disk that is full at the end."""
    tiny = write_tiny_gguf(work / "tiny.gguf")
    (work / "suite.jsonl").write_text(
        json.dumps({"question_id": 1, "category": "x", "turns": ["abc"]}) + "\n"
    )
    common = ("--suite", "suite.jsonl", "--assume-watts", 5, "-n", 4, "--threads", 1, "--rounds", 1)
    done = run_cli(
        "bench", "-t", tiny, "--variants", "suffix", *common, "--csv", "/dev/full", env=environment, cwd=work
    )
    assert done.returncode == 1
    assert "plain" in done.stdout
    assert "--csv /dev/full: cannot be written: the disk is full" in done.stderr
    done = run_cli(
        "bench", "-t", tiny, "--variants", "suffix", *common, "--csv", "new.csv", env=environment, cwd=work
    )
    assert done.returncode == 0
    size = (work / "new.csv").stat().st_size
    assert f"edgespec: wrote new.csv ({size / 1000:.0f} kB)" in done.stderr
