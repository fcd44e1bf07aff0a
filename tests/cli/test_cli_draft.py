"""`edgespec draft make` as a user types it, with tiny models."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from command_line import COMMAND, run_cli
from terminals import messages_in_terminal
from tiny_gguf import write_tiny_gguf


@pytest.fixture
def edgespec(environment):
    def edgespec(*arguments, **more):
        return run_cli(*arguments, env={**environment, **more})

    return edgespec


@pytest.fixture
def source(tmp_path):
    return write_tiny_gguf(tmp_path / "small-f32.gguf", seed=5, n_layer=1, n_embd=64, n_ff=64)


@pytest.fixture
def asked(source, tiny_path):
    """The arguments of what takes least time."""
    options = "--keep 272 --types none --budget 1 -n 4 --threads 1"
    return ["draft", "make", source, "--target", tiny_path, *options.split()]


def models(tmp_path):
    return sorted(path.name for path in (tmp_path / "models").glob("*"))


def test_a_draft_by_its_name(edgespec, asked, tiny_path, tmp_path):
    process = edgespec(*asked, "--force", "--name", "cut")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0].startswith("for target; vocabulary cut to 272 tokens, ")
    assert lines[1].endswith("14 of the shipped suite, 8,358 tokens")
    assert [line.split()[0] for line in lines[2:5]] == ["draft", "small-f32", "small-f32-cut272"]
    assert "small-f32-cut272 is expected " in lines[5]
    assert lines[6:] == [f"kept: {tmp_path / 'models' / 'cut.gguf'}", "use it with --draft cut"]
    assert "choosing tokens" in process.stderr
    assert "asking the target" in process.stderr
    assert models(tmp_path) == [".drafts-of-small-f32.lock", "cut.gguf"]

    options = ["hello", "-t", tiny_path, "--temp", "0", "-n", "40", "--json"]
    drafted = edgespec("run", *options, "--draft", "cut", "--drafter", "model", "--gamma", "3")
    assert drafted.returncode == 0, drafted.stderr
    plain = edgespec("run", *options, "--drafter", "none")
    assert json.loads(drafted.stdout)["text"] == json.loads(plain.stdout)["text"]
    stats = json.loads(drafted.stdout)["stats"]
    assert stats["n_drafted"] > 0
    assert json.loads(drafted.stdout)["draft"] == "cut"

    removed = edgespec("models", "remove", "cut")
    assert removed.returncode == 0
    assert "cut.gguf is untouched" in removed.stdout


def test_json(edgespec, asked, tmp_path):
    process = edgespec(*asked, "--json")
    assert process.returncode == 0, process.stderr
    made = json.loads(process.stdout)
    assert made["target"] == "target"
    assert made["vocabulary"]["kept"] == 272
    assert 0.5 < made["vocabulary"]["coverage"] <= 1
    assert made["source"]["tokens"] is None
    (one,) = made["candidates"]
    assert (one["name"], one["tokens"]) == ("small-f32-cut272", 272)
    assert set(one["seconds"]) == {"1", "2", "4"}
    assert set(one["greedy"]) == {"gamma", "factor"}
    assert (made["path"] is not None) == (made["gain"] >= 0.01)
    assert made["path"] in (None, str(tmp_path / "models" / "small-f32-cut272.gguf"))


def test_the_corpus(edgespec, asked, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the wind in the reeds and the other " * 9)
    process = edgespec(*asked, "--corpus", text)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[1].startswith("corpus: text.txt, ")
    assert "edgespec: the corpus has only" in process.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--corpus", "none.txt"], "--corpus none.txt: no such file; give a text"),
        (["--corpus", "."], "--corpus .: a directory; give a text"),
        (["--corpus", "empty.txt"], "--corpus empty.txt: an empty text"),
        (["--keep", "30"], "--keep 30: at least 260 tokens stay"),
        (["--keep", "9999"], "--keep 9999: the model has only 284 tokens"),
        (["--types", "q9"], "--types: no quantization is called 'q9'"),
        (["--target", "qwen3.gguf"], "qwen3.gguf: no such file"),
        (["--name", "a/b"], "'a/b': not a usable name"),
        (["-n", "99"], "--n-predict"),
    ],
)
def test_mistakes(asked, environment, options, problem, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    process = run_cli(*asked, *options, env=environment, cwd=tmp_path)
    assert process.returncode == 2
    assert process.stdout == ""
    assert problem in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
    assert not list((tmp_path / "models").glob("*.gguf"))


def test_a_source_that_is_none(edgespec, tiny_path, tmp_path):
    (tmp_path / "text.gguf").write_text("some text")
    other = write_tiny_gguf(tmp_path / "other.gguf", architecture="granite")
    for source, problem, code in (
        (tmp_path / "text.gguf", "not a GGUF model but a text file", 1),
        (other, "a granite model; the vocabulary can be cut of llama, qwen2, qwen3, gemma3 models only", 2),
    ):
        process = edgespec("draft", "make", source, "-t", tiny_path)
        assert process.returncode == code
        assert problem in process.stderr.splitlines()[-1]


def test_in_a_terminal(asked, environment):
    code, seen, out = messages_in_terminal([*COMMAND, *map(str, asked)], environment)
    assert code == 0, seen
    assert b"timing small-f32" in seen
    assert b"\x1b[?25h" in seen, "the cursor is back"
    assert b"small-f32-cut272" in out


def test_interrupted(asked, environment, tmp_path):
    process = subprocess.Popen(
        [*COMMAND, *map(str, asked), "--budget", "60"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    while process.stderr.readline().strip() != "timing small-f32-cut272":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "edgespec: error: interrupted"
    assert models(tmp_path) == [".drafts-of-small-f32.lock"]
    assert not (tmp_path / "config").exists()
