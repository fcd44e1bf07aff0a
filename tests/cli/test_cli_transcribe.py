"""`edgespec transcribe` as a user runs it, with tiny models and sound that nobody said."""

import io
import json
import re
import signal
import wave
from pathlib import Path

import numpy as np
import pytest

from command_line import run_cli, started
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
    english = run_cli("transcribe", recording, "-m", model, *FAST, "--translate", env=environment)
    assert english.returncode == 0 and english.stdout.strip()


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


def test_silence_is_no_text_and_said(environment, model, tmp_path):
    path = tmp_path / "silence.wav"
    path.write_bytes(wav(100.0, loud=0.0))
    done = run_cli("transcribe", path, "-m", model, "--no-stats", env=environment)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"edgespec: {path}: silent: no sound above -80 dB in 100.0 s\n" in done.stderr
    done = run_cli("transcribe", path, "-m", model, "--json", env=environment)
    assert json.loads(done.stdout)["stats"]["silent"] is True
    done = run_cli("transcribe", "-", "-m", model, env=environment, stdin=wav(2.0, loud=0.0))
    assert (done.returncode, done.stdout) == (0, "")
    assert "standard input: silent: no sound above -80 dB in 2.0 s" in done.stderr


def test_no_cue_ends_after_the_sound(environment, model, tmp_path):
    path = tmp_path / "short.wav"
    path.write_bytes(wav(0.5))
    options = ("-m", model, *FAST, "--json", "--words")
    found = json.loads(run_cli("transcribe", path, *options, env=environment).stdout)
    assert found["segments"] and found["duration"] == 0.5
    for segment in found["segments"]:
        assert segment["start"] < segment["end"] <= 0.5
        assert all(word["start"] <= word["end"] <= 0.5 for word in segment["words"])


def test_what_is_uncertain_is_said_with_its_times(environment, model, recording):
    """A model of random weights repeats itself."""
    done = run_cli("transcribe", recording, "-m", model, "--json", "-l", "EN_us", env=environment)
    found = json.loads(done.stdout)
    assert found["language"] == "en" and found["text"]
    (doubt,) = found["stats"]["doubts"]
    assert doubt["kept"] and (doubt["start"], doubt["end"]) == (0.0, 3.0)
    assert f"uncertain: 00:00:00.000 to 00:00:03.000 ({doubt['reason']})" in done.stderr


# ---- inputs and outputs before the work ----


def test_bad_recordings_are_all_named_before_a_model_is_pulled(environment, tmp_path):
    done = run_cli("transcribe", "a.wav", "b.wav", "-m", "whisper-base", env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("No such file") == 2


@pytest.mark.parametrize("stdin", [False, True])
def test_what_was_heard_goes_to_stdout_where_its_file_cannot_be_written(
    environment, model, recording, tmp_path, stdin
):
    """What cannot be known before: /dev/full takes no byte."""
    plain = run_cli("transcribe", recording, "-m", model, *FAST, "-f", "srt", env=environment)
    (tmp_path / "out").mkdir()
    name = "stdin" if stdin else "talk"
    (tmp_path / "out" / f"{name}.srt").symlink_to("/dev/full")
    files, given = (["-"], recording.read_bytes()) if stdin else ([recording], b"")
    if not stdin:
        other = tmp_path / "other.wav"
        other.write_bytes(wav(1.0, 1))
        files.append(other)
    options = ("-m", model, *FAST, "-f", "srt", "-o", tmp_path / "out")
    done = run_cli("transcribe", *files, *options, env=environment, stdin=given)
    assert done.returncode == 1
    assert done.stdout == plain.stdout != ""
    assert f"--output {tmp_path}/out/{name}.srt: cannot be written: No space left" in done.stderr
    if not stdin:
        assert (tmp_path / "out" / "other.srt").read_text()
        assert f"wrote {tmp_path}/out/other.srt" in done.stderr
    assert not Path("/dev/full").is_file(), "the device is not replaced"
    done = run_cli("transcribe", *files[:1], *options, "--json", env=environment, stdin=given)
    assert done.returncode == 1 and json.loads(done.stdout)["text"]


def test_ctrl_c_keeps_what_was_heard(environment, model, tmp_path):
    path = tmp_path / "long.wav"
    path.write_bytes(wav(1200.0))
    with started("transcribe", path, "-m", model, *FAST, env=environment) as process:
        assert process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    (heard,) = re.findall(rb"interrupted after (\d+) of 1200 s", told)
    (counted,) = re.findall(rb"speed +([0-9.]+) s of sound in", told)
    assert 0 < float(counted) < 1200 and round(float(counted)) == int(heard)
