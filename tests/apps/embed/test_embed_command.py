"""`edgespec embed` as a user runs it, with a tiny BERT."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from command_line import COMMAND, failed, run_cli, user_environment
from terminals import Terminal
from tiny_bert import TinyBert

TEXTS = ["the cat", "a dog, and the cat ran!", "x"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return user_environment(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return TinyBert().write(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(model):
    from edgespec.apps.embed.embedder import VectorModel

    with VectorModel(model) as loaded:
        return np.stack([TinyBert().vector(loaded.text_tokens(text), "mean") for text in TEXTS])


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\r\n".join(TEXTS) + "\r\n")
    return path


def test_an_object_a_line_for_each_text(environment, model, lines, expected):
    done = run_cli("embed", "-m", model, "--lines", lines, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["file"], one["line"]) for one in found] == [(str(lines), n) for n in (1, 2, 3)]
    np.testing.assert_allclose([one["embedding"] for one in found], expected, atol=5e-4)
    assert f"3 texts, {sum(one['tokens'] for one in found)} tokens in" in done.stderr


def test_each_file_is_a_text_and_standard_input_one(environment, model, tmp_path, expected):
    file = tmp_path / "one.txt"
    file.write_text(f"{TEXTS[1]}\n")
    done = run_cli("embed", "-m", model, file, "-", env=environment, stdin=TEXTS[0].encode())
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["file"], second["file"]) == (str(file), "-") and "line" not in first
    np.testing.assert_allclose([first["embedding"], second["embedding"]], expected[[1, 0]], atol=5e-4)


def test_numpys_file(environment, model, lines, tmp_path, expected):
    piped = run_cli("embed", "-m", model, "--lines", lines, "-f", "npy", env=environment, text=False)
    rows = np.load(io.BytesIO(piped.stdout))
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, expected, atol=5e-4)
    options = ("--dimensions", 5, "-o", tmp_path / "vectors.npy", "--json")
    done = run_cli("embed", "-m", model, "--lines", lines, *options, env=environment)
    facts = json.loads(done.stdout)
    assert (facts["texts"], facts["dimensions"], facts["pooling"]) == (3, 5, "mean") and "data" not in facts
    cut = np.load(tmp_path / "vectors.npy")
    np.testing.assert_allclose(cut, rows[:, :5] / np.linalg.norm(rows[:, :5], axis=1)[:, None], atol=1e-6)
    whole = json.loads(run_cli("embed", "-m", model, "--lines", lines, "--json", env=environment).stdout)
    np.testing.assert_allclose([one["embedding"] for one in whole["data"]], rows, atol=1e-6)


def test_what_cannot_be_embedded(environment, model, lines, tmp_path, tiny_path):
    def refuse(code, *words, files=(lines,), stdin=b"", use=model):
        failed(run_cli("embed", "-m", use, *files, env=environment, stdin=stdin), code, *words)

    (long := tmp_path / "long.txt").write_text("cat " * 120)
    (odd := tmp_path / "odd.txt").write_bytes(b"\xff\xfe")
    (gap := tmp_path / "gap.txt").write_text("a\n\nb\n")
    refuse(2, f"{long}: a text of 122 tokens", "at most 48", "--truncate", files=[long])
    assert run_cli("embed", "-m", model, "--truncate", long, env=environment).returncode == 0
    refuse(2, f"{odd}: not UTF-8", files=[odd])
    refuse(2, f"{gap}:2: is empty", files=["--lines", gap])
    refuse(2, "standard input: is empty", files=["-"])
    refuse(2, "standard input can be read only once", files=["-", "-"])
    refuse(2, "No such file", files=[tmp_path / "none.txt"])
    refuse(2, "--dimensions 65", "have 64 numbers", files=["--dimensions", 65, lines])
    refuse(2, "--json and --format npy contradict", files=["--json", "-f", "npy", lines])
    refuse(2, "v.npy: cannot be written", files=["-o", tmp_path / "none" / "v.npy", lines])
    refuse(1, "a model that writes text", "--pooling", use=tiny_path)
    ranks = TinyBert().write(tmp_path / "rank.gguf", pooling="rank")
    refuse(1, "a reranking model", "/v1/rerank", use=ranks)


def test_no_array_is_written_to_a_terminal(environment, model, lines):
    command = [*COMMAND, "embed", "-m", str(model), "-f", "npy", str(lines)]
    with Terminal(command, environment) as terminal:
        terminal.expect("--format npy: is no text: redirect it to a file, or name one with -o")
        assert terminal.wait() == 2
