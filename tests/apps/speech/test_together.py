"""Windows decoded together say what each says alone, whatever ends first, fails or is interrupted."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from edgespec.apps.speech import transcriber as room
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.transcriber import Transcriber
from edgespec.apps.speech.whisper_model import SequenceBatch, SpeechModel
from edgespec.apps.speech.windows import WindowsTogether
from edgespec.errors import UsageError
from edgespec.llama import kernels as llama_kernels
from tiny_whisper import write_tiny_whisper
from toy_speech import ToyDecoderCache, random_decoder

WINDOWS = 3


class Cache(ToyDecoderCache):
    """A cache of windows, two sequences each, that counts what shares a pass."""

    n_sequences = 2

    def __init__(self):
        super().__init__(random_decoder(), 2 * WINDOWS)
        self.shared = []

    def forward(self, batch):
        self.shared.append([part.sequence for part in batch])
        return super().forward(batch)


def test_all_that_go_on_share_each_pass_and_no_other_window_is_touched():
    cache = Cache()

    def decode(place, passes):
        """A text of place + 2 passes; its second sequence goes on from the first."""
        passes.forward([SequenceBatch(0, [place])])
        passes.reorder([0, 0])
        for i in range(place + 1):
            rows = passes.forward([SequenceBatch(0, [10 + i]), SequenceBatch(1, [20 + i])])
            assert [row.shape for row in rows] == [(1, cache._n_vocab)] * 2
        passes.rewind(1, 1)
        passes.reorder([1])
        return passes.n_past(0), passes.n_past(1)

    assert WindowsTogether(cache, WINDOWS).run(decode) == [(1, 0)] * 3
    assert cache.shared == [[0, 2, 4], [0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [4, 5]]
    assert [tokens[:1] for tokens in cache.sequences] == [[0], [], [1], [], [2], []]


def test_a_failure_ends_all():
    def decode(place, passes):
        passes.forward([SequenceBatch(0, [1])])
        if place == 1:
            raise UsageError("broken")
        passes.forward([SequenceBatch(0, [2])])

    n_threads = threading.active_count()
    with pytest.raises(UsageError, match="broken"):
        WindowsTogether(Cache(), WINDOWS).run(decode)
    assert threading.active_count() == n_threads


def test_an_interrupted_pass_ends_all():
    cache = Cache()

    def interrupted(_batch):
        raise KeyboardInterrupt

    cache.forward = interrupted
    n_threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        WindowsTogether(cache, WINDOWS).run(lambda _, passes: passes.forward([SequenceBatch(0, [1])]))
    assert threading.active_count() == n_threads


# ---- a recording ----


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if not llama_kernels.load().available:
        pytest.skip(f"stock kernels: {llama_kernels.load().reason}")
    path = write_tiny_whisper(tmp_path_factory.mktemp("together") / "tiny.gguf", n_text_ctx=40, peak=4.0)
    with SpeechModel(path, n_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def samples():
    """Five windows and a bit; the third is silent."""
    sound = np.random.default_rng(0).uniform(-0.3, 0.3, 16000 * 155).astype(np.float32)
    sound[16000 * 60 : 16000 * 90] = 0.0
    return sound


@pytest.mark.parametrize(
    "options",
    [
        {"temperatures": (0.0,), "words": True, "prompt": "the thing"},
        {"temperatures": (0.0, 0.7), "min_logprob": -0.1, "max_no_speech": None},
        {"temperatures": (0.0,), "beam": 3, "language": None},
    ],
    ids=["words", "fallback", "beams"],
)
def test_the_text_is_the_same_whatever_number_of_windows_is_decoded_together(
    model, samples, monkeypatch, options
):
    chosen = SpeechOptions(**{"language": "en", "independent": True, "condition": False} | options)
    found = []
    for n in (1, 2, 5):
        monkeypatch.setattr(room, "AT_ONCE", n)
        transcript = Transcriber(model.model, model.tokenizer, chosen).transcribe(samples)
        stats = transcript.stats
        found.append(
            (
                transcript.language,
                transcript.segments,
                (stats.n_windows, stats.n_tokens, stats.n_steps, stats.n_decodings),
            )
        )
        assert stats.n_windows >= 5
        assert transcript.complete
    assert found[0][1]
    assert {0.0, 30.0, 90.0, 120.0, 150.0} <= {segment.seek_s for segment in found[0][1]}
    assert repr(found[1]) == repr(found[0])  # no_speech_prob may be NaN
    assert repr(found[2]) == repr(found[0])
