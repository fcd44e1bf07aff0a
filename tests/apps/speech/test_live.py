"""Sound that comes while it is heard: hypotheses, windows that become final, and the end."""

import numpy as np
import pytest
from test_transcriber import TOKENS, said, sound, transcriber

from edgespec.apps.speech.transcriber import Hypothesis, LiveTranscription
from edgespec.apps.speech.transcript import Segment


def blocks_of(samples, seconds=0.25):
    n = round(16000 * seconds)
    return iter([samples[i : i + n] for i in range(0, len(samples), n)])


def events_of(transcription):
    found = list(transcription.events())
    segments = [event for event in found if isinstance(event, Segment)]
    return found, segments


def test_windows_become_final_as_those_of_a_file():
    scripts = [said(0.0, " one", 20.0, 20.0, " cut of"), said(0.0, " cut off", 10.0)]
    spoken, model = transcriber(scripts)
    transcription = LiveTranscription(spoken, blocks_of(sound(30.0), 30.0), every_s=1.0)
    _, segments = events_of(transcription)
    assert [(one.start_s, one.end_s, one.text) for one in segments] == [
        (0.0, 20.0, " one"),
        (20.0, 30.0, " cut off"),
    ]
    assert transcription.transcript.complete
    assert transcription.transcript.text == "one cut off"
    assert transcription.transcript.stats.audio_s == 30.0
    assert model.heard[-1] == (TOKENS.sot_prev, *said(0.0, " one", 20.0), TOKENS.sot)


def test_a_hypothesis_comes_every_second_and_is_not_final():
    scripts = [said(0.0, f" {'la ' * n}", 1.0) for n in range(1, 4)] + [said(0.0, " la la la la", 3.0)]
    spoken, _ = transcriber(scripts)

    def slowly():  # each block only when the one before was heard
        for block in blocks_of(sound(3.0), 1.0):
            yield block
            waiting.wait(60)
            waiting.clear()

    import threading

    waiting = threading.Event()
    transcription = LiveTranscription(spoken, slowly(), every_s=1.0)
    found = []
    for event in transcription.events():
        found.append(event)
        waiting.set()
    guesses = [event.text for event in found if isinstance(event, Hypothesis)]
    assert guesses[:3] == ["la", "la la", "la la la"]
    assert found[-1].text == " la la la la"


def test_stopping_makes_final_what_has_come():
    spoken, _ = transcriber([said(0.0, " one", 1.0), said(0.0, " one two", 1.0)])

    def endless():
        yield sound(1.0)
        forever.wait(60)

    import threading

    forever = threading.Event()
    transcription = LiveTranscription(spoken, endless(), every_s=0.5)
    events = transcription.events()
    assert next(events) == Hypothesis("one", 1.0)
    transcription.stop()
    (segment,) = events
    forever.set()
    assert segment.text == " one two"
    assert transcription.transcript.complete


def test_what_reading_raises_reaches_the_listener():
    spoken, _ = transcriber([])

    def broken():
        raise OSError("gone")
        yield np.zeros(1)

    with pytest.raises(OSError, match="gone"):
        list(LiveTranscription(spoken, broken()).events())


def test_no_sound_is_no_text():
    spoken, _ = transcriber([])
    assert list(LiveTranscription(spoken, iter([])).events()) == []
