"""The table of a Whisper model's types: word errors against what was read, words unlike the first type's."""

from __future__ import annotations

import numpy as np

from transcribe import Hearing, Recording
from whisper_types import report, unlike


def test_words_are_compared_with_the_text_and_with_the_first_model():
    silence = np.zeros(16_000, np.float32)
    recordings = [Recording("read.wav", silence, "one two, three four"), Recording("talk.wav", silence, None)]
    texts = {"f16": ("One two three four.", "a b c d"), "q4_0": ("one two three for", "a b x y")}
    hearings = [
        Hearing(name, file, 0, 1.0, text, {})
        for name, found in texts.items()
        for file, text in zip(("read.wav", "talk.wav"), found, strict=True)
    ]
    f16, q4 = hearings[:2], hearings[2:]
    assert unlike(f16, f16) == 0.0 and unlike(q4, f16) == 3 / 8
    lines = report(hearings, recordings, {"f16": 2_000_000, "q4_0": 500_000})
    assert lines[1].split()[:4] == ["f16", "2.0", "0.0%", "0.0%"]
    assert lines[2].split()[:4] == ["q4_0", "0.5", "25.0%", "37.5%"]
