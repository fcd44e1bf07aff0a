"""Transcripts as text, subtitles and JSON."""

import json

from edgespec.apps.speech.transcript import (
    Segment,
    SpokenWord,
    Transcript,
    clock,
    transcript_object,
    write_transcript,
)


def segment(start, end, text, words=()):
    return Segment(0, start, end, text, (1, 2), 0.0, -0.3, 1.2, float("nan"), 0.0, words)


TRANSCRIPT = Transcript(
    "en",
    segments=[
        segment(0.0, 1.5, " Hello,\nthere.", (SpokenWord(" Hello,", 0.0, 0.5, 0.9),)),
        segment(3599.9996, 3661.25, " a --> b <i> & c"),
    ],
)


def test_text_has_a_line_for_each_segment():
    assert write_transcript(TRANSCRIPT, "txt") == "Hello, there.\na --> b <i> & c\n"
    assert write_transcript(Transcript("en"), "txt") == ""


def test_subtitles_have_times_and_text_that_breaks_no_cue():
    assert write_transcript(TRANSCRIPT, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello, there.\n\n"
        "2\n01:00:00,000 --> 01:01:01,250\na -> b <i> & c\n\n"
    )
    assert write_transcript(TRANSCRIPT, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello, there.\n\n"
        "01:00:00.000 --> 01:01:01.250\na -> b &lt;i> &amp; c\n\n"
    )


def test_words_are_cues_of_their_own_where_they_are_asked_for():
    found = write_transcript(TRANSCRIPT, "srt", words=True)
    assert found.startswith("1\n00:00:00,000 --> 00:00:00,500\nHello,\n\n2\n01:00:00")


def test_json_has_openais_names_and_no_nan():
    found = json.loads(write_transcript(TRANSCRIPT, "json", words=True))
    assert found["text"] == "Hello,\nthere. a --> b <i> & c"
    first = found["segments"][0]
    assert (first["start"], first["end"], first["no_speech_prob"]) == (0.0, 1.5, None)
    assert first["words"] == [{"word": " Hello,", "start": 0.0, "end": 0.5, "probability": 0.9}]
    assert "words" not in transcript_object(TRANSCRIPT)["segments"][0]


def test_a_time_below_zero_is_the_start():
    assert clock(-0.1, "vtt") == "00:00:00.000"
