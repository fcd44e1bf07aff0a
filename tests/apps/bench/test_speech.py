"""Recordings: suites, variants, word errors, figures by hand, peers that print as the real ones."""

from __future__ import annotations

import io
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from edgespec.apps.bench.rows import write_csv
from edgespec.apps.bench.runs import BenchmarkOutcome, Cell, HeardRecording, Run, peer_of
from edgespec.apps.bench.speech import (
    FasterWhisper,
    SpeechBench,
    SpeechSettings,
    WhisperCpp,
    parse_speech_variants,
    word_errors,
)
from edgespec.apps.bench.summary import noise, summarise_cell, summarise_heard
from edgespec.apps.energy.meter import EnergyMeter
from edgespec.apps.speech.drafts import SpeechDraftCosts
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.suites import RECORDINGS, is_recordings, load_recordings, load_suite
from edgespec.platform.metering import Measurement
from tiny_whisper import write_tiny_whisper


def wav(path: Path, seconds: float = 0.1) -> Path:
    samples = np.random.default_rng(0).uniform(-0.3, 0.3, round(16000 * seconds))
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


# ---- suites ----


def test_a_folder_of_recordings_is_a_suite_whose_categories_are_its_folders(tmp_path):
    wav(tmp_path / "talk.wav").with_suffix(".txt").write_text("Good morning.\n")
    wav(tmp_path / "radio" / "far.wav")
    (tmp_path / "notes.md").write_text("no recording")
    suite = load_recordings(str(tmp_path))
    found = {prompt.id: (prompt.category, prompt.text) for prompt in suite.prompts}
    assert found == {"talk.wav": (RECORDINGS, "Good morning."), "radio/far.wav": ("radio", "")}
    assert [prompt.id for prompt in suite.select(["radio"]).prompts] == ["radio/far.wav"]
    one = load_recordings(str(tmp_path / "talk.wav"))
    assert [(prompt.id, prompt.text) for prompt in one.prompts] == [("talk.wav", "Good morning.")]
    (tmp_path / "talk.txt").write_text("Good evening.")
    assert load_recordings(str(tmp_path)).sha256 != suite.sha256


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda _: None, "no recording in it"),
        (lambda folder: wav(folder / "a.wav").with_suffix(".txt").write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda folder: wav(folder / "a.wav").with_suffix(".txt").write_text(" \n"), "empty"),
    ],
)
def test_a_folder_that_is_no_suite(tmp_path, prepare, words):
    prepare(tmp_path)
    with pytest.raises(UsageError, match=words):
        load_recordings(str(tmp_path))


def test_what_is_taken_for_recordings(tmp_path):
    assert is_recordings("talk.WAV")
    assert is_recordings(str(tmp_path))
    assert not is_recordings("default")
    assert not is_recordings("questions.jsonl")
    with pytest.raises(UsageError, match="no such file or folder"):
        load_recordings("nowhere.wav")
    with pytest.raises(UsageError, match="or measure recordings with `edgespec bench"):
        load_suite("talk.wav")


# ---- variants and word errors ----


def test_variants_of_recordings():
    names = "auto, suffix,model,beam-5,independent"
    found = parse_speech_variants(names)
    assert [one.drafting for one in found] == ["auto", "suffix", "model", "none", "none"]
    assert found[3].beam == 5
    assert found[4].independent
    assert [one.writes_plain_text for one in found] == [True, True, True, False, False]
    for wrong, words in (
        ("model-3", "of recordings"),
        ("beam-99", "beam-1 to"),
        ("auto,auto", "twice"),
        (",", "name"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_speech_variants(wrong)


@pytest.mark.parametrize(("left_alone", "tries"), [(0, False), (1, False), (2, True)])
def test_auto_leaves_a_draft_alone_that_lost_as_transcribe_does(tmp_path, left_alone, tries):
    path = write_tiny_whisper(tmp_path / "model.gguf")
    with SpeechModel(path) as target, SpeechModel(path) as draft:
        settings = SpeechSettings(parse_speech_variants("auto"), "en")
        with EnergyMeter.choose() as meter:
            bench = SpeechBench(target, draft, settings, tmp_path, meter)
            bench._known = SpeechDraftCosts(
                encode_s=0.1035, plain_s=2e-3, drafted_s=1e-3, n_tokens=100.0, left_alone=left_alone
            )
            drafts = bench._transcriber(settings.variants[0]).drafts
    assert (drafts._draft is not None) == tries


@pytest.mark.parametrize(
    ("heard", "errors"),
    [
        ("ask NOT, what your country", 0),
        ("ask what your country", 1),
        ("ask not what our country", 1),
        ("please ask not what your country", 1),
        ("", 5),
        ("one two three", 5),
    ],
)
def test_word_errors(heard, errors):
    assert word_errors("Ask not what your country", heard) == (errors, 5)


# ---- figures ----


def heard(variant="plain", total_s=2.0, *, prompt="a.wav", round_=0, audio_s=10.0, energy=None, **figures):
    return Run(
        **{"prompt": prompt, "category": RECORDINGS, "variant": variant, "round": round_, "prompt_tokens": 0},
        **{"tokens": 20, "total_s": total_s, "ttft_s": None, "prefill_s": None, "energy": energy},
        heard=HeardRecording(audio_s, "text", **figures),
    )


def test_figures_by_hand():
    runs = [
        heard(total_s=2.0, n_words=8, n_errors=1, encode_s=1.0, decode_s=0.5),
        heard(total_s=4.0, round_=1, n_words=8, n_errors=1, encode_s=2.0, decode_s=1.0),
        heard(total_s=3.0, round_=2, n_words=8, n_errors=1, encode_s=1.5, decode_s=1.5),
        heard(total_s=1.0, prompt="b.wav", audio_s=6.0, encode_s=0.5, decode_s=0.25),
    ]
    joules = Measurement(1.0, 5.0, source="RAPL")
    found = summarise_heard(runs, [joules] * 4)
    assert found
    assert (found.seconds, found.audio_s, found.times_real_time) == (4.0, 16.0, 4.0)  # medians 3 and 1
    assert (found.n_words, found.word_error_rate) == (8, 0.125)
    assert (found.encoder_share, found.decoder_share) == (0.5, 0.325)
    assert found.joules_per_minute == pytest.approx(60 * 20 / 36)
    peer = summarise_heard([heard("whisper.cpp")], [])
    assert peer
    assert (peer.encoder_share, peer.word_error_rate, peer.joules_per_minute) == (None, None, None)


def test_speed_is_that_of_the_recording_whatever_number_of_tokens_a_peer_writes(tmp_path):
    plain = [heard(total_s=2.0, round_=i) for i in range(3)]
    peer = [heard("faster-whisper beam-5", 6.0 + 0.1 * i, round_=i) for i in range(3)]
    cell = Cell("whisper-base", None, "avx2", (*plain, *peer))
    overall = summarise_cell(cell)[0]
    (compared,) = overall.comparisons
    assert compared.speedup
    assert compared.speedup.median == pytest.approx(2.0 / 6.1)
    assert noise(cell.runs) == pytest.approx((2 / 6.0 - 2 / 6.2) / (2 / 6.1))
    outcome = BenchmarkOutcome("bench", "2026-01-01T00:00:00", {}, {}, {}, {}, (cell,))
    text = io.StringIO()
    write_csv(outcome, text)
    assert "times_real_time" in text.getvalue()
    assert peer_of("faster-whisper beam-5") == "faster-whisper"
    assert peer_of("llama.cpp plain") == "llama.cpp"
    assert peer_of("plain") is None


# ---- peers ----

FASTER_WHISPER = """
from types import SimpleNamespace
__version__ = "9.9"
class WhisperModel:
    def __init__(self, folder, **options):
        assert options["compute_type"] == "int8"
        if "broken" in folder:
            raise RuntimeError("no model in it")
    def transcribe(self, file, *, language, beam_size, temperature):
        return [SimpleNamespace(text=f" heard {language}"), SimpleNamespace(text=f" with {beam_size}")], None
"""
WHISPER_CPP = """#!{python}
import sys
print("[00:00:00.000 --> 00:00:02.000]   heard", sys.argv[sys.argv.index("-l") + 1])
print("[00:00:02.000 --> 00:00:04.000]   with", sys.argv[sys.argv.index("-bs") + 1])
print("whisper_print_timings:     load time =    50.00 ms", file=sys.stderr)
print("whisper_print_timings:    total time =   250.00 ms", file=sys.stderr)
"""


class Hears:
    """What a peer asks of the recordings."""

    language, beams = "en", (1, 5)

    def __init__(self, file):
        self.file = file

    def path(self, _prompt):
        return self.file

    def seconds(self, _prompt):
        return 4.0


@pytest.fixture
def recording(tmp_path):
    file = wav(tmp_path / "suite" / "talk.wav")
    file.with_suffix(".txt").write_text("Heard it with one.")
    return load_recordings(str(file)).prompts[0], Hears(file)


def test_faster_whisper_runs_in_a_python_of_its_own(tmp_path, monkeypatch, recording):
    prompt, hears = recording
    (tmp_path / "faster_whisper.py").write_text(FASTER_WHISPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    with FasterWhisper(f"{sys.executable} {model}", hears, 1) as peer:
        assert peer.name == "faster-whisper 9.9 (int8)"
        runs = list(peer.runs(prompt, 3))
        peer._child.kill()
        peer._child.wait()
        with pytest.raises(EdgespecError, match="ended"):
            list(peer.runs(prompt, 4))
    assert [(run.variant, run.round) for run in runs] == [("faster-whisper", 3), ("faster-whisper beam-5", 3)]
    assert [run.heard.text for run in runs] == ["heard en with 1", "heard en with 5"]
    assert [(run.heard.n_errors, run.heard.n_words, run.heard.audio_s) for run in runs] == [(2, 4, 4.0)] * 2
    assert all(0 < run.total_s < 60 for run in runs)


def test_a_peer_that_does_not_start_says_why(tmp_path, monkeypatch, recording):
    (tmp_path / "faster_whisper.py").write_text(FASTER_WHISPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(EdgespecError, match="no model in it"):
        FasterWhisper(str(broken), recording[1], 1)
    with pytest.raises(UsageError, match="no such folder"):
        FasterWhisper(str(tmp_path / "nothing"), recording[1], 1)
    with pytest.raises(UsageError, match="no such program"):
        FasterWhisper(f"/nowhere/python {broken}", recording[1], 1)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="not on the PATH"):
        WhisperCpp("model.bin", recording[1], 1)


def test_whisper_cpp_is_a_process_for_each_recording(tmp_path, recording):
    prompt, hears = recording
    program, model = tmp_path / "whisper-cli", tmp_path / "ggml-base.bin"
    program.write_text(WHISPER_CPP.format(python=sys.executable))
    program.chmod(0o755)
    model.write_bytes(b"")
    peer = WhisperCpp(f"{program} {model}", hears, 2)
    runs = list(peer.runs(prompt, 0))
    assert [run.heard.text for run in runs] == ["heard en with 1", "heard en with 5"]
    assert [run.variant for run in runs] == ["whisper.cpp", "whisper.cpp beam-5"]
    assert [run.total_s for run in runs] == [0.2, 0.2]
    with pytest.raises(UsageError, match="no such file"):
        WhisperCpp(f"{program} {tmp_path / 'none.bin'}", hears, 2)
