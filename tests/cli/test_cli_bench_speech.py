"""`edgespec bench` on recordings, as a user types it, with tiny models and sound that nobody said."""

from __future__ import annotations

import csv
import json
import wave

import msgspec
import numpy as np
import pytest

from command_line import failed, run_cli
from edgespec.apps.bench.runs import BenchmarkOutcome
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and a suite of two recordings; what is said in one of them is known."""
    folder = tmp_path_factory.mktemp("bench")
    write_tiny_whisper(folder / "target.gguf", n_text_ctx=40, peak=4.0)
    write_tiny_whisper(folder / "draft.gguf", n_text_ctx=40, peak=4.0, seed=1)
    write_tiny_gguf(folder / "text.gguf")
    for i, name in enumerate(("read.wav", "radio/far.wav")):
        path = folder / "suite" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = np.random.default_rng(i).uniform(-0.3, 0.3, 16000 * (i + 1))
        with wave.open(str(path), "wb") as out:
            out.setparams((1, 2, 16000, 0, "NONE", ""))
            out.writeframes((samples * 32767).astype("<i2").tobytes())
    (folder / "suite" / "read.txt").write_text("Nobody said a word.")
    return folder


@pytest.fixture
def bench(environment, folder):
    def bench(*arguments):
        fixed = ["bench", "--threads", 1, "--language", "en", "--rounds", 1]
        return run_cli(*fixed, *arguments, env=environment)

    return bench


def test_recordings_are_heard_in_all_variants_and_every_run_is_kept(bench, folder, tmp_path):
    done = bench(
        *("--suite", folder / "suite", "-t", folder / "target.gguf", "-d", folder / "draft.gguf"),
        *("--variants", "auto,model,beam-2,independent", "--json", "--csv", tmp_path / "x.csv"),
        *("--assume-watts", 10),
    )
    assert done.returncode == 0, done.stderr
    outcome = msgspec.convert(json.loads(done.stdout)["outcome"], BenchmarkOutcome)
    (cell,) = outcome.cells
    assert outcome.suite["prompts"] == {"radio": 1, "recordings": 1}
    assert len(cell.runs) == 2 * 5
    by_name = {(run.prompt, run.variant): run for run in cell.runs}
    for name in ("read.wav", "radio/far.wav"):
        plain = by_name[name, "plain"]
        assert plain.heard
        for variant in ("auto", "model"):
            run = by_name[name, variant]
            assert run.heard
            assert (run.heard.text, run.text_sha256) == (plain.heard.text, plain.text_sha256)
        assert by_name[name, "beam-2"].text_sha256 is None
    read = by_name["read.wav", "plain"]
    assert read.heard
    assert read.heard.n_words == 4
    assert read.heard.n_errors is not None
    assert read.heard.audio_s == 1.0
    assert 0 < (read.heard.encode_s or 0) + (read.heard.decode_s or 0) < read.total_s
    assert sum(n for _, _, n in by_name["read.wav", "model"].histogram or ()) > 0
    assert read.energy
    assert read.energy.estimated
    assert by_name["radio/far.wav", "plain"].heard.n_words is None  # type: ignore[union-attr]
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert {row["variant"] for row in rows} == {"plain", "auto", "model", "beam-2", "independent"}
    assert all(float(row["times_real_time"]) > 0 for row in rows)


def test_the_table(bench, folder):
    done = bench("--suite", folder / "suite" / "read.wav", "-t", folder / "target.gguf")
    assert done.returncode == 0, done.stderr
    assert "recordings, n = 1" in done.stdout
    assert "of 4" in done.stdout
    assert "all 1 identical to plain decoding's" in done.stdout
    assert "1 recording)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "{}/suite", "-t", "qwen2.5-coder-0.5b-q4_k_m"), "writes text, and --suite"),
        (("--suite", "{}/suite", "-t", "{}/text.gguf"), "a language model, which writes text"),
        (("--suite", "{}/suite", "-t", "{}/target.gguf", "-n", 5), "--n-predict is for texts"),
        (("--suite", "{}/suite", "-t", "{}/target.gguf", "--report", "x.html"), "--report is for texts"),
        (("--suite", "{}/suite", "-t", "{}/target.gguf", "--variants", "model"), "needs --draft NAME"),
        (("--suite", "{}/suite", "-t", "{}/target.gguf", "--variants", "cascade"), "of recordings"),
        (("--suite", "{}/nothing.wav", "-t", "{}/target.gguf"), "no such file or folder"),
        (("-t", "{}/text.gguf"), "--language is for recordings; --suite default holds texts"),
    ],
)
def test_refused_in_one_line(bench, folder, arguments, words):
    done = bench(*(str(one).replace("{}", str(folder)) for one in arguments))
    failed(done, 1 if "language model" in words else 2, words)


def test_a_whisper_model_and_texts(environment):
    done = run_cli("bench", "-t", "whisper-base", env=environment)
    failed(done, 2, "--target whisper-base: a Whisper model, and --suite default holds texts")
