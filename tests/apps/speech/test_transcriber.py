"""Recordings window by window, of a model that says what a script has."""

import numpy as np
import pytest

from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.transcriber import Transcriber
from edgespec.apps.speech.transcript import remarks
from edgespec.apps.speech.voice import Span
from edgespec.errors import UsageError
from toy_speech import ScriptedWhisper, toy_tokenizer

TOKENS = toy_tokenizer()


def at(seconds, tokens=TOKENS):
    return tokens.timestamp_begin + round(seconds / 0.02)


def said(*parts, tokens=TOKENS):
    """A window's tokens: texts, and numbers as timestamps."""
    found = []
    for part in parts:
        found += tokens.encode(part) if isinstance(part, str) else [at(part, tokens)]
    return found


def sound(seconds):
    return np.random.default_rng(1).uniform(-0.1, 0.1, round(16000 * seconds)).astype(np.float32)


def transcriber(scripts, *, tokens=TOKENS, model=None, **options):
    model = model or ScriptedWhisper(tokens, scripts)
    return Transcriber(model, tokens, SpeechOptions(**options)), model


def test_the_next_window_begins_where_the_last_complete_segment_ended_and_knows_the_text():
    scripts = [
        said(0.0, " one", 8.0, 8.0, " two", 20.0, 20.0, " cut of"),
        said(0.0, " cut off", 10.0, 10.0, " four", 18.0),
    ]
    spoken, model = transcriber(scripts)
    transcript = spoken.transcribe(sound(38.0))
    assert [(one.start_s, one.end_s, one.text) for one in transcript.segments] == [
        (0.0, 8.0, " one"),
        (8.0, 20.0, " two"),
        (20.0, 30.0, " cut off"),
        (30.0, 38.0, " four"),
    ]
    assert transcript.text == "one two cut off four"
    assert transcript.doubts == []
    assert transcript.stats.transcribed_s == 38.0
    assert transcript.complete
    assert model.heard[0] == (TOKENS.sot,)
    assert model.heard[1] == (TOKENS.sot_prev, *said(0.0, " one", 8.0, 8.0, " two", 20.0), TOKENS.sot)
    assert transcript.stats.n_windows == 2
    assert transcript.stats.audio_s == 38.0


def test_a_prompt_stands_before_the_first_window_and_text_is_no_condition_where_it_should_not_be():
    scripts = [said(0.0, " a", 30.0), said(0.0, " b", 5.0)]
    spoken, model = transcriber(scripts, prompt=" Kubernetes ", condition=False)
    spoken.transcribe(sound(35.0))
    assert model.heard[0] == (TOKENS.sot_prev, *TOKENS.encode(" Kubernetes"), TOKENS.sot)
    assert model.heard[1] == (TOKENS.sot,)


class Attempting(ScriptedWhisper):
    """Says another script in each decoding of its one window, as sure of it as `peaks` says."""

    def __init__(self, scripts, peaks):
        super().__init__(TOKENS, [scripts[0]])
        self.attempts, self.peaks, self.n_begun, self.n_read = scripts, peaks, 0, 0

    def row(self, window, prefix):
        if prefix[-1] == TOKENS.sot and len(prefix) != self.n_read:  # another decoding begins
            attempt = min(self.n_begun, len(self.attempts) - 1)
            self.scripts, self.peak = [self.attempts[attempt]], self.peaks[attempt]
            self.n_begun += 1
        self.n_read = len(prefix)
        return super().row(window, prefix)


LOOP = said(0.0, " no" * 25, 9.0, 9.0, " no" * 25, 18.0)


@pytest.mark.parametrize(
    ("scripts", "peaks", "temperature", "doubts"),
    [
        ([LOOP, said(0.0, " no", 18.0)], [20, 9], 0.0, ["the text repeats itself"]),
        ([LOOP, said(0.0, " no", 18.0)], [9, 20], 0.2, []),
        ([LOOP, said(0.0, " a", 18.0)] * 3, [9, 7.5, 9, 7.5, 9, 7.5], 0.0, ["the text repeats itself"]),
        ([said(0.0, " a b", 9.0)] * 2, [7.6, 7.4], 0.0, ["the text is a guess"]),
        ([said(0.0, " no" * 230), said(0.0, " a", 9.0)], [20, 9], 0.2, []),
        ([said(0.0, " a" * 230)], [20], 0.0, ["the text repeats itself"]),
    ],
)
def test_the_best_attempt_is_kept_and_what_is_uncertain_of_it_said(scripts, peaks, temperature, doubts):
    """A loop up to the limit of tokens is no speech where a good text follows."""
    model = Attempting(scripts, peaks)
    spoken, _ = transcriber([], model=model, min_logprob=-0.3)
    transcript = spoken.transcribe(sound(18.0))
    assert {one.temperature for one in transcript.segments} == {temperature}
    assert [one.reason for one in transcript.doubts] == doubts
    assert all(one.kept and (one.start_s, one.end_s) == (0.0, 18.0) for one in transcript.doubts)


def test_speech_that_repeats_itself_is_kept_where_a_guess_looks_like_silence():
    """The model's chance that nobody speaks is high for speech that is looped, too."""
    model = Attempting([LOOP, said(0.0, " a", 9.0)], [20, 4])
    model.no_speech = 1.0
    transcript = transcriber([], model=model)[0].transcribe(sound(18.0))
    assert transcript.text == ("no " * 50).strip()
    assert [(one.reason, one.kept) for one in transcript.doubts] == [("the text repeats itself", True)]


def test_a_loop_that_nobody_can_say_in_so_little_time_is_no_speech():
    spoken, _ = transcriber([], model=Attempting([LOOP, said(0.0, " a", 0.5)], [20, 9]))
    transcript = spoken.transcribe(sound(0.5))
    assert (transcript.text, transcript.doubts) == ("a", [])


def test_text_that_repeats_itself_is_tried_at_all_temperatures_and_is_no_prompt():
    scripts = [said(0.0, " no" * 40, 30.0), said(0.0, " b", 5.0)]
    spoken, model = transcriber(scripts)
    transcript = spoken.transcribe(sound(35.0))
    assert transcript.text == ("no " * 40 + "b").strip(), "the best attempt is kept"
    assert transcript.segments[0].compression_ratio > 2.4
    assert transcript.segments[1].temperature == 0.0
    assert transcript.stats.n_decodings == 7
    assert model.heard[-1] == (TOKENS.sot,)


def test_a_window_in_which_nobody_speaks_is_left_out_only_if_its_text_is_a_guess():
    scripts = [said(0.0, " thank you", 2.0), said(0.0, " so", 3.0)]
    unsure = ScriptedWhisper(TOKENS, scripts, no_speech=1.0, peak=4.0)
    spoken, _ = transcriber(scripts, model=unsure)
    transcript = spoken.transcribe(sound(31.0))
    assert transcript.segments == []
    assert transcript.text == ""
    doubts = [(one.start_s, one.end_s, one.kept) for one in transcript.doubts]
    assert doubts == [(0.0, 30.0, False), (30.0, 31.0, False)]
    assert remarks(transcript) == ["left out: 00:00:00.000 to 00:00:31.000 (probably nobody speaks)"]
    assert transcript.stats.n_decodings == 2, "silence is no reason to try another temperature"
    sure = ScriptedWhisper(TOKENS, scripts, no_speech=1.0)
    spoken, _ = transcriber(scripts, model=sure)
    assert spoken.transcribe(sound(31.0)).text == "thank you so"


def test_no_segment_ends_after_the_sound():
    spoken, _ = transcriber([said(0.0, " a", 3.24)])
    (segment,) = spoken.transcribe(sound(0.5)).segments
    assert (segment.start_s, segment.end_s) == (0.0, 0.5)
    spoken, _ = transcriber([said(0.0, " a", 30.0), said(0.5, " b", 20.0, 25.1, " c", 25.36)])
    ends = [(one.start_s, one.end_s) for one in spoken.transcribe(sound(55.0)).segments]
    assert ends == [(0.0, 30.0), (30.5, 50.0), (pytest.approx(54.98), 55.0)]
    spoken, _ = transcriber([said(0.0, " a", 20.0, 20.0, " b", 28.1, 28.1)])
    ends = [(one.start_s, one.end_s) for one in spoken.transcribe(sound(10.0)).segments]
    assert ends == [(0.0, 10.0), (9.98, 10.0)]


def test_a_window_begins_where_the_sound_does():
    """Its first timestamp is at most a second: after a longer silence it would be too early."""
    late = np.concatenate([np.zeros(16000 * 5, np.float32), sound(3.0)])
    spoken, _ = transcriber([said(0.0, " a", 3.0)])
    (segment,) = spoken.transcribe(late).segments
    assert (segment.start_s, segment.end_s) == (pytest.approx(4.8), pytest.approx(7.8))
    soon = np.concatenate([np.zeros(16000, np.float32), sound(3.0)])
    (segment,) = transcriber([said(1.0, " a", 3.0)])[0].transcribe(soon).segments
    assert (segment.start_s, segment.end_s) == (0.0, 3.0)


@pytest.mark.parametrize(
    ("samples", "speech", "script", "said_of_it"),
    [
        (np.zeros(16000 * 40, np.float32), None, [], ["silent: no sound above -80 dB in 40.0 s"]),
        (sound(3.0), None, said(0.0, " ", 3.0), ["no speech in 3.0 s of sound"]),
        (sound(3.0), [], [], ["no speech in 3.0 s of sound"]),
        (sound(3.0), None, said(0.0, " a", 3.0), []),
        (
            sound(3.0),
            None,
            said(0.0, " no" * 40, 3.0),
            ["uncertain: 00:00:00.000 to 00:00:03.000 (the text repeats itself)"],
        ),
    ],
)
def test_why_there_is_no_text_and_what_is_uncertain_is_said(samples, speech, script, said_of_it):
    assert remarks(transcriber([script])[0].transcribe(samples, speech=speech)) == said_of_it


def test_segments_without_text_are_left_out():
    spoken, _ = transcriber([said(0.0, " ", 3.0, 3.0, " a", 5.0)])
    assert [one.text for one in spoken.transcribe(sound(6.0)).segments] == [" a"]


def test_the_language_is_detected_and_named_in_the_prompt():
    tokens = toy_tokenizer(multilingual=True)
    scripts = [said(0.0, " ja", 2.0, tokens=tokens)]
    spoken, model = transcriber(scripts, tokens=tokens, model=ScriptedWhisper(tokens, scripts, language="de"))
    transcript = spoken.transcribe(sound(2.0))
    assert transcript.language == "de"
    assert 0.1 < transcript.language_probability < 1.0
    assert model.heard == [(tokens.sot, tokens.language_token("de"), tokens.transcribe)]
    spoken, model = transcriber(scripts, tokens=tokens, language="fr", task="translate")
    assert spoken.transcribe(sound(2.0)).language == "fr"
    assert model.heard == [(tokens.sot, tokens.language_token("fr"), tokens.translate)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"language": "de"}, "only English"),
        ({"task": "translate"}, "only English"),
        ({"words": True}, "heads"),
    ],
)
def test_what_a_model_cannot_do_is_refused(options, problem):
    with pytest.raises(UsageError, match=problem):
        transcriber([], **options)


def test_a_language_of_other_models_is_refused():
    tokens = toy_tokenizer(multilingual=True)
    with pytest.raises(UsageError, match="language yue: this model does not know cantonese"):
        transcriber([], tokens=tokens, language="Cantonese")


def test_only_spans_of_speech_are_heard():
    spoken, model = transcriber([said(0.0, " a", 4.2, 4.8, " b", 7.0)])
    spans = [Span(16000 * 10, 16000 * 14), Span(16000 * 50, 16000 * 52)]
    transcript = spoken.transcribe(sound(60.0), speech=spans)
    assert [(one.start_s, one.end_s) for one in transcript.segments] == [(10.0, 14.0), (50.0, 52.0)]
    assert not model.mels[0][:, 700:].any(), "nothing but the spans and the pause between them"
    assert transcript.stats.audio_s == 60.0
    assert spoken.transcribe(sound(60.0), speech=[]).text == ""


def test_what_was_heard_before_ctrl_c_is_kept():
    spoken, model = transcriber([said(0.0, " one", 30.0), said(0.0, " two", 30.0), []])
    encode = model.encode

    def interrupted(mel):
        if len(model.mels) == 2:
            raise KeyboardInterrupt
        return encode(mel)

    model.encode = interrupted
    transcription = spoken.stream(sound(90.0))
    with pytest.raises(KeyboardInterrupt):
        list(transcription.segments())
    assert transcription.transcript.text == "one two"
    assert (transcription.transcript.stats.transcribed_s, transcription.transcript.stats.audio_s) == (
        60.0,
        90.0,
    )
    assert not transcription.transcript.complete


def test_without_timestamps_a_window_is_one_segment():
    spoken, _ = transcriber([said("one two")], timestamps=False)
    (segment,) = spoken.transcribe(sound(5.0)).segments
    assert (segment.start_s, segment.end_s, segment.text) == (0.0, 5.0, "one two")


def test_progress_reaches_the_end_of_the_recording():
    told = []
    spoken, _ = transcriber([said(0.0, " a", 30.0), said(0.0, " b", 5.0)])
    spoken.transcribe(sound(35.0), on_progress=lambda done, total: told.append((done, total)))
    assert told == [(30.0, 35.0), (35.0, 35.0)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam", 0),
        ("patience", 0.0),
        ("length_penalty", 2.0),
        ("temperatures", ()),
        ("temperatures", (-1.0,)),
        ("task", "sing"),
        ("seed", -1),
    ],
)
def test_options_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(UsageError) as error:
        SpeechOptions(**{field: value})
    assert error.value.field == field
