"""Drafts of Whisper models: the text stays the target's."""

import numpy as np
import pytest

from edgespec.apps.speech.drafts import (
    ModelDrafts,
    TranscriptStore,
    check_draft,
    map_tokenizers,
    shares_encoder,
)
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.transcriber import Transcriber, open_transcriber
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.drafting.suffix import Document
from edgespec.errors import UsageError
from edgespec.llama import kernels as llama_kernels
from tiny_whisper import ordinary_tokens, write_tiny_whisper
from toy_speech import toy_tokenizer

N_CTX = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, and drafts: itself, of another vocabulary, with its encoder alone, and of other sizes."""
    folder = tmp_path_factory.mktemp("whisper")
    tokens = ordinary_tokens()
    turned = [*tokens[:256][::-1], *tokens[256:-2]]
    shape = {"n_text_ctx": N_CTX, "peak": 3.0}
    paths = {
        "target": write_tiny_whisper(folder / "target.gguf", **shape),
        "same": write_tiny_whisper(folder / "same.gguf", **shape),
        "other": write_tiny_whisper(folder / "other.gguf", seed=3, **shape),
        "english": write_tiny_whisper(
            folder / "english.gguf", seed=4, tokens=turned, multilingual=False, **shape
        ),
        "decoder": write_tiny_whisper(folder / "decoder.gguf", seed=5, n_audio_layer=0, **shape),
        "wide": write_tiny_whisper(folder / "wide.gguf", n_audio_layer=0, n_state=128, **shape),
    }
    opened = {name: SpeechModel(path, n_threads=2) for name, path in paths.items()}
    yield opened
    for model in opened.values():
        model.close()


@pytest.fixture(scope="module")
def sound():
    return np.random.default_rng(2).uniform(-0.3, 0.3, 16000 * 12).astype(np.float32)


def transcribed(model, sound, drafts=None, **options):
    chosen = {"language": "en", "temperatures": (0.0,), "max_no_speech": None, **options}
    spoken = Transcriber(model.model, model.tokenizer, SpeechOptions(**chosen), drafts=drafts)
    transcript = spoken.transcribe(sound)
    return [one.tokens for one in transcript.segments], transcript.stats


@pytest.mark.parametrize("name", ["same", "other", "english", "decoder"])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 0.6)], ids=["greedy", "fallback"])
def test_text_is_the_same_bit_for_bit_with_any_draft(models, sound, name, temperatures):
    if not llama_kernels.load().available:
        pytest.skip(f"with stock kernels a token's bits depend on its batch: {llama_kernels.load().reason}")
    plain, _ = transcribed(models["target"], sound, temperatures=temperatures)
    drafts = ModelDrafts(models["target"], models[name])
    drafts._acceptance[True].argmax.chance = lambda depth, bucket: 0.95  # drafts, whatever it costs
    drafts._acceptance[True].next.chance = lambda depth, bucket: 0.95
    drafted, stats = transcribed(models["target"], sound, drafts, temperatures=temperatures)
    assert plain
    assert drafted == plain
    assert stats.n_drafted > 0
    if name == "same":
        assert stats.n_accepted > 0.9 * stats.n_drafted * (temperatures == (0.0,))


def test_a_text_that_is_expected_again_drafts_itself(models, sound):
    drafts = ModelDrafts(models["target"])
    plain, stats = transcribed(models["target"], sound)
    first, _ = transcribed(models["target"], sound, drafts)
    again, later = transcribed(models["target"], sound, drafts)
    assert first == again == plain
    assert later.n_steps < 0.7 * stats.n_steps


@pytest.mark.parametrize("name", ["none", "auto", "other"])
def test_a_draft_model_runs_where_it_is_named(models, sound, name):
    options = SpeechOptions(language="en", temperatures=(0.0,), max_no_speech=None)
    draft = str(models[name].path) if name in models else name
    with open_transcriber(str(models["target"].path), options, draft=draft, n_threads=1) as transcriber:
        stats = transcriber.transcribe(sound).stats
    assert (transcriber.drafts is None) == (name == "none")
    assert (stats.draft_encode_s > 0) == (name == "other")


def test_which_drafts_share_the_targets_encoder(models):
    target = models["target"]
    assert shares_encoder(target, models["same"])
    assert shares_encoder(target, models["decoder"])
    assert not shares_encoder(target, models["other"])


def test_a_decoder_for_another_encoder_is_refused(models):
    check_draft(models["target"], models["english"])
    with pytest.raises(UsageError, match="has no encoder, and was made for one of width 128"):
        check_draft(models["target"], models["wide"])


def test_tokens_of_two_vocabularies_are_the_same_by_text_and_time():
    target = toy_tokenizer(multilingual=True)
    draft = WhisperTokenizer((*target.tokens[::-1], b"the"), target.n_vocab + 1, False)
    found = map_tokenizers(target, draft)
    assert found.draft_of[ord("a")] == len(target.tokens) - 1 - ord("a")
    assert found.draft_of[target.timestamp_begin + 77] == draft.timestamp_begin + 77
    assert found.target_of[draft.timestamp_begin] == target.timestamp_begin
    assert found.draft_of[target.sot] == draft.sot
    assert found.draft_of[target.eot] == draft.eot
    assert (np.diff(found.shared[0]) > 0).all()


COSTS = [0.0, *(1.6e-3 + 0.1e-3 * n for n in range(33))]


def test_text_that_repeats_itself_begins_to_draft_and_other_text_ends_it():
    store = TranscriptStore()
    refrain = list(range(100, 160))
    store.play([1, 2, *refrain], 2, COSTS)
    assert not store.drafts
    store.play([1, 2, *refrain], 2, COSTS)
    assert store.drafts
    store.learn(60, 20, 1, COSTS)
    store.learn(60, 20, 0, COSTS)
    store.learn(60, 20, 0, COSTS)
    store.learn(60, 20, 0, COSTS)
    assert not store.drafts


def test_what_is_expected_drafts_at_once():
    store = TranscriptStore()
    store.expect([5, 6, 7, 8])
    assert store.drafts
    assert Document(store.store, [1, 5, 6]).offer((), 2)[0] == [7, 8]
