"""Where somebody speaks, and times that lead back into the recording."""

import numpy as np
import pytest

from edgespec.apps.speech.voice import Span, SpokenParts, check_detector, spans_of, speech_spans
from edgespec.errors import EdgespecError

RATE = 16000


def frames(*seconds):
    """Frames of 30 ms with speech in them: silence and speech in turns."""
    parts = [np.full(round(s / 0.03), i % 2 == 1) for i, s in enumerate(seconds)]
    return np.concatenate(parts)


def test_speech_is_padded_joined_over_short_pauses_and_freed_of_clicks():
    found = frames(3.0, 2.0, 1.0, 2.0, 10.0, 0.09, 5.0, 1.0, 1.0)
    n = len(found) * 480
    spans = [(round(start / RATE, 1), round(end / RATE, 1)) for start, end in spans_of(found, n)]
    assert spans == [(2.6, 8.4), (22.7, 24.5)]


def test_nothing_is_found_in_silence():
    assert spans_of(np.zeros(100, np.bool_), 48000) == []


def test_times_of_joined_parts_lead_back_into_the_recording():
    spans = [Span(10 * RATE, 14 * RATE), Span(50 * RATE, 52 * RATE)]
    spoken = SpokenParts(np.ones(100 * RATE, np.float32), spans)
    assert len(spoken.samples) == 7 * RATE
    assert not spoken.samples[4 * RATE : 5 * RATE].any()
    assert [spoken.start_s(t) for t in (0.0, 2.0, 4.5, 5.0, 6.0)] == [10.0, 12.0, 50.0, 50.0, 51.0]
    assert [spoken.end_s(t) for t in (2.0, 4.0, 4.5, 5.0, 6.0, 7.0)] == [12.0, 14.0, 14.0, 14.0, 51.0, 52.0]
    assert SpokenParts(np.zeros(5, np.float32), []).start_s(0.0) == 0.0


def test_the_detector_finds_a_voice_like_sound_between_silence():
    pytest.importorskip("webrtcvad")
    t = np.arange(3 * RATE) / RATE
    harmonics = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 20))
    syllables = 0.5 + 0.5 * np.sin(2 * np.pi * 4 * t)
    voice = (0.2 * harmonics * syllables).astype(np.float32)
    quiet = np.zeros(5 * RATE, np.float32)
    (span,) = speech_spans(np.concatenate([quiet, voice, quiet]))
    assert span.start == pytest.approx(5 * RATE, abs=RATE)
    assert span.end == pytest.approx(8 * RATE, abs=RATE)


def test_without_the_detector_its_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EdgespecError, match=r"edgespec\[vad\]"):
        check_detector()
