"""`edgespec transcribe` as a user runs it, with tiny models and sound that nobody said."""

import io
import json
import signal
import wave

import numpy as np
import pytest

from command_line import failed, run_cli, started
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_whisper(tmp_path_factory.mktemp("models") / "tiny.gguf", n_text_ctx=40, peak=4.0)


def wav(seconds, seed=0, loud=0.3):
    file = io.BytesIO()
    samples = np.random.default_rng(seed).uniform(-loud, loud, round(16000 * seconds))
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "talk.wav"
    path.write_bytes(wav(3.0))
    return path


FAST = ("--temp", 0, "--language", "en")


def test_text_goes_to_stdout_and_figures_to_stderr(environment, model, recording):
    done = run_cli("transcribe", recording, "-m", model, *FAST, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "3.0 s of sound in" in done.stderr
    quiet = run_cli("transcribe", recording, "-m", model, *FAST, "--no-stats", env=environment)
    assert quiet.stdout == done.stdout
    assert "sound in" not in quiet.stderr


def test_json_has_text_and_figures(environment, model, recording):
    done = run_cli(
        "transcribe",
        recording,
        "-m",
        model,
        *FAST,
        "--json",
        "--words",
        "--assume-watts",
        10,
        env=environment,
    )
    found = json.loads(done.stdout)
    assert found["language"] == "en"
    assert found["duration"] == 3.0
    assert found["segments"][0]["words"]
    assert found["stats"]["complete"]
    assert found["stats"]["energy"]["estimated"]
    assert found["stats"]["energy"]["joules"] > 0


def test_each_file_is_written_where_it_is_wanted_and_a_bad_one_ends_nothing(
    environment, model, recording, tmp_path
):
    other, bad = tmp_path / "other.wav", tmp_path / "bad.wav"
    other.write_bytes(wav(2.0, 1))
    bad.write_bytes(b"")
    out = tmp_path / "out"
    done = run_cli(
        "transcribe", recording, bad, other, "-m", model, *FAST, "-f", "srt", "-o", out, env=environment
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{bad}: empty, 0 bytes" in done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["other.srt", "talk.srt"]
    assert (out / "talk.srt").read_text().startswith("1\n00:00:0")


def test_a_pipe_is_heard(environment, model):
    done = run_cli("transcribe", "-", "-m", model, *FAST, env=environment, stdin=wav(3.0))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "3.0 s of sound" in done.stderr


def test_silence_is_no_text(environment, model, tmp_path):
    path = tmp_path / "silence.wav"
    path.write_bytes(wav(100.0, loud=0.0))
    done = run_cli("transcribe", path, "-m", model, env=environment)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("--language", "xx"), 2, ("--language xx", "the model knows")),
        (("--beam", "0"), 2, ("--beam 0", "1 to 15")),
        (("--temp", "-1"), 2, ("--temp", "0.001 to 5")),
        (("--beam", "5", "--temp", "0.5"), 2, ("--beam", "--temp")),
        (("--independent", "-d", "whisper-tiny"), 2, ("--independent", "--draft whisper-tiny")),
        (("--json", "-f", "srt"), 2, ("--json", "--format srt")),
        (("-o", "FILE"), 2, ("--output", "name a directory")),
        (("-d", "TEXT"), 1, ("a language model, which writes text", "whisper-base")),
    ],
)
def test_what_cannot_be_is_one_line(environment, model, recording, tmp_path, words, code, problem):
    given = {"FILE": recording, "TEXT": write_tiny_gguf(tmp_path / "text.gguf")}
    done = run_cli("transcribe", recording, "-m", model, *(given.get(w, w) for w in words), env=environment)
    failed(done, code, *problem)


def test_a_model_of_text_hears_nothing(environment, recording, tmp_path):
    text = write_tiny_gguf(tmp_path / "text.gguf")
    failed(run_cli("transcribe", recording, "-m", text, env=environment), 1, "a language model")


def test_two_files_of_one_name_are_not_written_over_each_other(environment, model, recording, tmp_path):
    other = tmp_path / "b" / "talk.wav"
    done = run_cli("transcribe", recording, other, "-m", model, "-o", tmp_path / "out", env=environment)
    failed(done, 2, "would both be written to")


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_heard(environment, model, tmp_path):
    path = tmp_path / "long.wav"
    path.write_bytes(wav(1200.0))
    with started("transcribe", path, "-m", model, *FAST, env=environment) as process:
        assert process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 130, told
    assert b"interrupted after" in told
    assert b"sound in" in told
