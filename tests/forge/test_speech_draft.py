"""A draft of a Whisper model that shares its encoder: what it computes, what it learns, and where it goes."""

import wave

import numpy as np
import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.forge.dataset_store import delete_user_texts, find_stored
from edgespec.forge.progress import StageContext
from edgespec.forge.recordings import HELD_OUT, hear_recordings, read_windows, recordings_in
from edgespec.forge.speech_draft import SpeechDraftRequest, make_speech_draft
from edgespec.llama import kernels as llama_kernels
from edgespec.models.draft_records import draft_records
from edgespec.models.whisper.convert import convert_whisper
from edgespec.models.whisper.gguf_file import read_whisper_gguf
from edgespec.speech.draft_choice import was_made_for
from edgespec.speech.loading import SpeechModel
from edgespec.speech.opening import open_transcriber
from edgespec.speech.options import SpeechOptions
from reference_whisper import ReferenceWhisper
from tiny_whisper import write_tiny_whisper

pytestmark = pytest.mark.slow

pytest.importorskip("jax")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper") / "tiny.gguf", n_text_ctx=40, peak=3.0)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Three recordings of noise, and a file that is none."""
    folder = tmp_path_factory.mktemp("talks")
    rng = np.random.default_rng(1)
    for name in ("a", "b", "c"):
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(rng.integers(-9000, 9000, 16000).astype("<i2").tobytes())
    (folder / "broken.wav").write_bytes(b"no sound")
    (folder / "notes.txt").write_text("nothing")
    return folder


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("edgespec.forge.speech_draft.forge_root", lambda: tmp_path / "forge")
    monkeypatch.setattr("edgespec.speech.draft_costs.cache_root", lambda: tmp_path / "cache")
    return tmp_path


def heard(target, talks, folder, messages=None):
    said = [] if messages is None else messages
    with SpeechModel(target, n_threads=1) as model:
        return hear_recordings(model, recordings_in(talks), folder, StageContext(on_message=said.append))


def test_it_computes_what_whisper_does(tmp_path):
    from edgespec.forge.training.speech_decoder import SpeechDecoder

    path = write_tiny_whisper(
        tmp_path / "m.gguf", matrix_type="f32", n_audio_ctx=75, n_text_ctx=40, n_state=64, n_text_layer=3
    )
    decoder, reference = SpeechDecoder(read_whisper_gguf(path), (0, 1, 2)), ReferenceWhisper(path)
    rng = np.random.default_rng(0)
    states = rng.normal(0, 1, (75, 64)).astype(np.float32)
    tokens = rng.integers(0, 1872, 20)
    found = decoder.logits(decoder.start, decoder.frozen, tokens[None], states[None])
    expected, _ = reference.decode([*tokens], states)
    assert np.sqrt(np.mean((np.asarray(found) - expected) ** 2) / np.mean(expected**2)) < 0.02  # bfloat16


def test_a_decoder_alone_is_written_and_read(target, tmp_path):
    from edgespec.forge.training.speech_decoder import SpeechDecoder

    contents = read_whisper_gguf(target)
    decoder = SpeechDecoder(contents, (1,))
    convert_whisper(decoder.contents(decoder.start), tmp_path / "d.gguf", "f16", drafts_for="abc")
    again = read_whisper_gguf(tmp_path / "d.gguf")
    assert (again.sizes.n_audio_layer, again.sizes.n_text_layer) == (0, 1)
    of_layer = contents.tensors["decoder.blocks.1.mlp.0.weight"].read()
    np.testing.assert_allclose(again.tensors["decoder.blocks.0.mlp.0.weight"].read(), of_layer, atol=1e-3)
    with SpeechModel(tmp_path / "d.gguf", n_threads=1) as model:
        assert model.model.dims.n_audio_layer == 0
    assert not was_made_for(target, tmp_path / "d.gguf")


def test_recordings_are_heard_once_and_split(target, talks, tmp_path):
    messages = []
    (learnt, judged), sounds = heard(target, talks, tmp_path, messages)
    assert [len(learnt), len(judged), len(sounds)] == [2, 1, 1]
    assert len(messages) == 1
    assert "broken.wav" in messages[0]
    (window,) = read_windows(learnt[0])
    assert window.states.shape == (1500, 64)
    assert len(window.tokens) > window.n_prompt >= 3
    times = [path.stat().st_mtime_ns for path in (*learnt, *judged)]
    assert heard(target, talks, tmp_path)[0] == (learnt, judged)
    assert [path.stat().st_mtime_ns for path in (*learnt, *judged)] == times
    learnt[0].write_bytes(b"PK")
    with pytest.raises(EdgespecError, match="damaged"):
        read_windows(learnt[0])


def test_a_fifth_is_held_out(tmp_path):
    for i in range(2 * HELD_OUT):
        (tmp_path / f"{i}.mp3").touch()
    assert len(recordings_in(tmp_path)) == 2 * HELD_OUT
    with pytest.raises(UsageError, match="no such folder"):
        recordings_in(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="two recordings"):
        recordings_in(tmp_path / "empty")


def test_it_learns_and_goes_on_where_it_was_stopped(target, talks, tmp_path):
    from edgespec.forge.training.loop import TrainingSettings, train
    from edgespec.forge.training.speech_decoder import SpeechDecoder, SpeechLessons

    (learnt, judged), _ = heard(target, talks, tmp_path / "heard")
    windows = [window for path in (*learnt, *judged) for window in read_windows(path)]
    decoder = SpeechDecoder(read_whisper_gguf(target), (1,))
    lessons = SpeechLessons(decoder, windows, windows)
    before = lessons.evaluate(decoder.start).mean_accepted
    n = sum(len(window.tokens) - window.n_prompt for window in windows)  # of a step: all are in its rows
    first = train(lessons, TrainingSettings(tokens=30 * n), tmp_path)
    assert first.acceptance.mean_accepted > before + 0.1
    again = train(lessons, TrainingSettings(tokens=31 * n), tmp_path)
    assert (first.n_tokens, again.n_tokens) == (30 * n, 31 * n)  # one more step
    assert again.acceptance.mean_accepted >= first.acceptance.mean_accepted
    with pytest.raises(EdgespecError, match="no speech"):
        SpeechLessons(decoder, windows, [])


def test_a_window_comes_once_an_epoch(target, talks, tmp_path):
    from edgespec.forge.training.batches import EpochPosition
    from edgespec.forge.training.speech_decoder import SpeechDecoder, SpeechLessons

    (learnt, judged), _ = heard(target, talks, tmp_path / "heard")
    windows = [window for path in (*learnt, *judged) for window in read_windows(path)] * 3
    lessons = SpeechLessons(SpeechDecoder(read_whisper_gguf(target), (1,)), windows, windows)
    feed = lessons.batches(0, EpochPosition())
    places = [place for _, place in (next(feed) for _ in range(5))]
    assert [(one.epoch, one.row) for one in places] == [(0, 4), (1, 0), (1, 4), (2, 0), (2, 4)]
    after = [batch.tokens for batch, _ in (next(feed), next(lessons.batches(0, places[-1])))]
    np.testing.assert_array_equal(*after)


def test_it_is_made_kept_and_found(target, talks, models):
    request = SpeechDraftRequest(
        target=str(target), recordings=talks, hours=2 / 3600, rounds=1, threads=1, name="mine", force=True
    )
    made = make_speech_draft(request)
    assert made.kept
    assert made.path
    assert [record.name for record in draft_records()] == ["mine"]
    assert 0.0 <= made.drafted_accepted <= 1.0
    assert was_made_for(target, made.path)
    sound = np.random.default_rng(3).uniform(-0.3, 0.3, 16000).astype(np.float32)
    texts = []
    for draft in ("none", "mine"):
        options = SpeechOptions(language="en", temperatures=(0.0,), max_no_speech=None)
        with open_transcriber(str(target), options, draft=draft, n_threads=1) as transcriber:
            texts.append(transcriber.transcribe(sound).text)
    if llama_kernels.load().available:
        assert texts[0] == texts[1]
    (stored,) = find_stored(models / "forge")
    assert (stored.n_texts, stored.n_own) == (3, 3)
    assert delete_user_texts(stored) == 3
    assert not find_stored(models / "forge")[0].n_own
    with pytest.raises(UsageError, match="replace it with --force"):
        make_speech_draft(SpeechDraftRequest(target=str(target), recordings=talks, name="mine"))
