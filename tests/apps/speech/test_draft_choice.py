"""The choice of a draft for a Whisper model: by what files tell, and by what runs have seen."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from edgespec.apps.speech.drafts import (
    SpeechDraftCosts,
    SpeechModelCosts,
    SpeechPair,
    expected_gain_s,
    keep_costs,
    load_costs,
)
from edgespec.apps.speech.opening import choose_draft, open_transcriber
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.llama import kernels as llama_kernels
from tiny_whisper import write_tiny_whisper

SIZES = {"tiny": (384, 4), "base": (512, 6), "small": (768, 12), "medium": (1024, 24)}
"""Published models: states, and layers of the encoder and of the decoder."""

PAYS = SpeechDraftCosts(encode_s=0.01, plain_s=2e-3, drafted_s=1e-3, n_tokens=100.0)
BETTER = SpeechDraftCosts(encode_s=0.01, plain_s=9e-3, drafted_s=1e-3, n_tokens=100.0)
LOSES = SpeechDraftCosts(encode_s=0.2, plain_s=2e-3, drafted_s=1e-3, n_tokens=100.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    shape = {"n_audio_ctx": 150, "n_text_ctx": 60}
    little = {"n_state": 32, "n_text_layer": 1, "alignment_heads": (), **shape}
    made = {
        "target": {"n_text_layer": 6, **shape},
        "small": little,
        "other": {"seed": 2, **little},
        "mels": {"n_mels": 128, **little},
        "large": {"seed": 3, "n_text_layer": 6, **shape},
        "decoder": {"n_audio_layer": 0, **little},
        "whole": {"n_text_ctx": 60},
        "small whole": {**little, "n_audio_ctx": 1500},
    }
    paths = {name: write_tiny_whisper(folder / f"{name}.gguf", **sizes) for name, sizes in made.items()}
    (folder / "damaged.gguf").write_bytes(paths["small"].read_bytes()[:3000])
    return {**paths, "damaged": folder / "damaged.gguf"}


@pytest.fixture
def target(files, tmp_path, monkeypatch):
    monkeypatch.setattr("edgespec.platform.kept.cache_root", lambda: tmp_path)
    with SpeechModel(files["target"], n_threads=1) as model:
        yield model


def pair_of(target, files, name):
    return SpeechPair.of(target.path, files[name], kernels=target.model.kernels, threads=1)


def chosen(target, files, *names):
    found = choose_draft(target, [(name, files[name]) for name in names], threads=1)
    return found and found.name


def costs_of(name):
    """As the files of the published models tell them, in q8_0."""
    state, n_layer = SIZES[name]
    n = 1500.0
    macs = n_layer * (12.0 * state * state * n + 2.0 * n * n * state) + 9.0 * n * state * state
    numbers = n_layer * 14 * state * state + 51_865 * state + 2 * n_layer * n * state
    return SpeechModelCosts(macs, numbers * 34 / 32, 80, True)


def gain_s(target, draft, **options):
    return expected_gain_s(costs_of(target), costs_of(draft), **{"shares": False, "kernels": True, **options})


def test_tiny_is_expected_to_pay_from_small_on_and_base_from_medium_on():
    assert gain_s("small", "tiny") > 0
    assert gain_s("medium", "tiny") > gain_s("medium", "base") > 0
    assert gain_s("small", "base") < 0
    assert gain_s("base", "tiny") < 0
    assert gain_s("base", "tiny", shares=True) > 0  # without an encoder of its own


def test_a_draft_of_english_alone_is_expected_to_save_less():
    english = replace(costs_of("tiny"), multilingual=False)
    assert expected_gain_s(costs_of("small"), english, shares=False, kernels=True) < gain_s("small", "tiny")


def test_what_runs_saw_decides(target, files):
    assert chosen(target, files, "small", "other") == "small"  # as good as the other by their files
    keep_costs(pair_of(target, files, "small"), LOSES)
    assert chosen(target, files, "small", "other") == "other"
    keep_costs(pair_of(target, files, "other"), LOSES)
    assert chosen(target, files, "small", "other") is None
    keep_costs(pair_of(target, files, "small"), BETTER)
    assert chosen(target, files, "small", "other") == "small"


def test_what_cannot_draft_is_never_chosen(target, files):
    for name in ("mels", "large", "target"):
        keep_costs(pair_of(target, files, name), PAYS)
    assert chosen(target, files, "mels", "large", "target", "decoder", "damaged") is None


@pytest.mark.parametrize(("encode_s", "runs"), [(0.2, 50), (0.1035, 2)])
def test_a_draft_that_lost_is_weighed_anew_after_some_runs(target, files, encode_s, runs):
    """A hundredth of the time of decoding goes into trials: half of it lost, and a fiftieth."""
    pair, loses = pair_of(target, files, "small"), replaced(LOSES, encode_s=encode_s)
    keep_costs(pair, loses)
    for _ in range(runs):
        assert not load_costs(pair).is_due
        chosen(target, files, "small")
    assert load_costs(pair).is_due
    keep_costs(pair, loses)  # it was tried
    assert not load_costs(pair).is_due


def test_runs_are_joined_and_a_damaged_file_is_set_aside(target, files):
    pair = pair_of(target, files, "small")
    keep_costs(pair, PAYS)
    keep_costs(pair, LOSES)
    assert load_costs(pair).encode_s == pytest.approx(0.105)
    pair.path.write_text('{"format": "edgespec speech draft", "version": 1, "pair": {}}')
    said = []
    assert load_costs(pair, on_message=said.append) is None
    assert len(said) == 1
    assert load_costs(pair_of(target, files, "other")) is None


@pytest.mark.slow
def test_auto_loads_what_pays_and_drafts_from_the_first_window(files, tmp_path, monkeypatch):
    monkeypatch.setattr("edgespec.platform.kept.cache_root", lambda: tmp_path)
    target, small = files["whole"], files["small whole"]
    monkeypatch.setattr("edgespec.apps.speech.opening.speech_models_here", lambda: [("small", small)])
    sound = np.random.default_rng(2).uniform(-0.3, 0.3, 16000 * 2).astype(np.float32)

    def heard(draft):
        options = SpeechOptions(language="en", temperatures=(0.0,), max_no_speech=None)
        with open_transcriber(str(target), options, draft=draft, n_threads=1) as transcriber:
            kernels, transcript = transcriber.model.kernels, transcriber.transcribe(sound)
        return SpeechPair.of(target, small, kernels=kernels, threads=1), transcript

    pair, plain = heard("none")
    keep_costs(pair, replaced(BETTER, encode_s=0.1))
    assert heard("auto")[1].stats.draft_encode_s == 0, "in two seconds little is said: 53 ms to be saved"
    pair.path.unlink()
    keep_costs(pair, BETTER)
    _, drafted = heard("auto")
    assert drafted.stats.draft_encode_s > 0 == plain.stats.draft_encode_s
    assert any(note.startswith("small drafts") for note in drafted.stats.draft_notes)
    if llama_kernels.load().available:
        assert drafted.text == plain.text
    assert load_costs(pair).n_drafted == 1  # what was seen is kept
    keep_costs(pair, replaced(BETTER, n_drafted=16))
    assert heard("auto")[1].stats.draft_encode_s == 0  # a window without it, now and then
    assert load_costs(pair).n_drafted == 0
    assert load_costs(pair).plain_s < BETTER.plain_s
    for _ in range(4):
        keep_costs(pair, LOSES)
    assert heard("auto")[1].stats.draft_encode_s == 0
