"""`edgespec transcribe`: the text of recordings."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from edgespec.apps.speech.commands.transcribe_options import (
    SpeechDecoding,
    SpeechInput,
    SpeechModels,
    SpeechOutput,
)
from edgespec.cli.console import INTERRUPTED, err, line_of, message, out, print_error
from edgespec.cli.groups import grouped, shown
from edgespec.cli.progress import WorkDisplay
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import write_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edgespec.apps.energy import EnergyMeter
    from edgespec.apps.speech.transcriber import Transcriber
    from edgespec.apps.speech.transcript import Transcript
    from edgespec.apps.speech.voice import Span

STDIN = "-"


@shown("Write", "edgespec transcribe talk.wav --format srt --language en")
@grouped
def transcribe_command(
    *, heard: SpeechInput, models: SpeechModels, decoding: SpeechDecoding, output: SpeechOutput
) -> int:
    """Write down what is said in recordings, with a Whisper model."""
    output.check(heard.files)
    options = decoding.options(heard, words=output.words)
    if options.independent and models.draft not in ("auto", "none"):
        raise UsageError(
            f"--independent and --draft {models.draft} contradict each other: windows that are decoded "
            "together are not drafted for"
        )
    from edgespec.apps.energy import EnergyMeter
    from edgespec.apps.speech.opening import open_transcriber
    from edgespec.apps.speech.rules import check_english
    from edgespec.apps.speech.speech_model import is_english, pull_speech
    from edgespec.apps.speech.voice import check_detector

    if heard.vad:
        check_detector()
    files, code = _readable(heard)
    if not files:
        return code
    output.prepare(files)
    if is_english(models.model):
        check_english(options)
    meter = None
    if output.counts_joules:
        meter = EnergyMeter.choose(assume_watts=output.assume_watts, on_message=message)
    pull_speech(models.model, models.draft)
    with ExitStack() as stack:
        if meter:
            stack.enter_context(meter)
        with err.status("loading the model"):
            transcriber = stack.enter_context(
                open_transcriber(
                    models.model,
                    options,
                    draft=models.draft,
                    n_threads=models.threads,
                    kernels=models.kernels != "off",
                    on_message=message,
                )
            )
        return _Run(transcriber, heard, output, meter).files(files, code)


def _readable(heard: SpeechInput) -> tuple[list[str], int]:
    """Return the recordings that can be read, and the exit code of the others, which are told.

    Raises EdgespecError if that is the only one.
    """
    from edgespec.apps.speech.audio import check_audio

    files, code = [], 0
    for file in heard.files:
        try:
            check_audio(file, track=heard.track)
        except EdgespecError as error:
            code = max(code, error.exit_code)
            if len(heard.files) == 1:
                raise
            print_error(line_of(error))
        else:
            files.append(file)
    return files, code


class _Run:
    """The recordings of one call, one after the other."""

    def __init__(
        self, transcriber: Transcriber, heard: SpeechInput, output: SpeechOutput, meter: EnergyMeter | None
    ) -> None:
        self._transcriber, self._heard, self._output, self._meter = transcriber, heard, output, meter
        self._code = 0

    def files(self, files: Sequence[str], code: int) -> int:
        """Hear `files` and return the exit code, `code` or worse; one that fails does not end the others."""
        self._code = code
        for file in files:
            try:
                complete = self._live() if file == STDIN else self._file(file)
            except EdgespecError as error:
                if len(self._heard.files) == 1:
                    raise
                print_error(line_of(error))
                self._code = max(self._code, error.exit_code)
            else:
                if not complete:
                    return INTERRUPTED
        return self._code

    def _file(self, file: str) -> bool:
        """Hear one file; return whether that came to its end."""
        from edgespec.apps.speech.audio import read_audio
        from edgespec.apps.speech.commands.transcribe_options import SegmentWriter
        from edgespec.apps.speech.voice import speech_spans

        samples = read_audio(file, track=self._heard.track, on_message=message)
        spans: list[Span] | None = speech_spans(samples) if self._heard.vad else None
        with WorkDisplay() as display:

            def show(done_s: float, total_s: float) -> None:
                if self._shows_bar:
                    display.show(f"transcribing {file}", done_s, total_s)

            show(0.0, len(samples) / 16000)
            hearing = self._transcriber.hear(samples, speech=spans, on_progress=show)
            writer = SegmentWriter(self._output, n_files=len(self._heard.files))
            window = self._meter.begin() if self._meter else None
            try:
                for segment in hearing.segments():
                    writer.write(segment)
            except KeyboardInterrupt:
                pass  # what was heard so far is kept
            finally:
                if window:
                    hearing.transcript.energy = window.end()
        self._finish(file, hearing.transcript)
        return hearing.transcript.complete

    @property
    def _shows_bar(self) -> bool:
        """Whether a bar is shown: not where the text itself comes to the terminal."""
        return self._output.output is not None or self._output.json or not out.is_terminal

    def _live(self) -> bool:
        """Hear standard input; return whether that came to its end."""
        from edgespec.apps.speech.commands.transcribe_options import hear_live

        transcript = hear_live(self._transcriber, self._output, self._meter)
        self._finish("standard input", transcript)
        return transcript.complete

    def _finish(self, file: str, transcript: Transcript) -> None:
        """Write what was heard, and say what it took."""
        from edgespec.apps.speech.formats import remarks, stats_object, transcript_object, write_transcript

        output, stats = self._output, transcript.stats
        whole = write_transcript(transcript, output.format, words=output.words)
        if output.output is not None:
            self._write(output.path(STDIN if file == "standard input" else file), whole)
        elif output.format == "json" and not output.json:
            sys.stdout.write(whole)
        if output.json:
            facts = {"file": file, **transcript_object(transcript, words=output.words)}
            facts["stats"] = stats_object(transcript)
            sys.stdout.write(json.dumps(facts, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        for line in remarks(transcript):
            message(f"{file}: {line}")
        if not transcript.complete:
            heard = f"{stats.heard_s:.0f} of {stats.audio_s:.0f} s"
            message(f"{file}: interrupted after {heard}; what was heard is kept")
        if not output.no_stats:
            for line in stats_lines(transcript):
                err.print(line)

    def _write(self, path: Path, text: str) -> None:
        """Write a text to its file; to stdout, if that fails and JSON does not have it there."""
        try:
            write_file(path, text.encode(), field="output")
        except EdgespecError as error:
            print_error(line_of(error))
            self._code = max(self._code, error.exit_code)
            if not self._output.json:
                sys.stdout.write(text)
        else:
            message(f"wrote {path}")


def stats_lines(transcript: Transcript) -> list[str]:
    """Return what a transcription took, in a line or a few."""
    stats = transcript.stats
    factor = stats.real_time_factor
    speed = f"{stats.heard_s:.1f} s of sound in {stats.total_s:.2f} s"
    if factor:
        speed += f", {factor:.1f} times real time"
    parts = [f"encoder {stats.encode_s:.2f} s", f"decoder {stats.decode_s:.2f} s"]
    if stats.draft_encode_s:
        parts.append(f"draft's encoder {stats.draft_encode_s:.2f} s")
    if stats.words_s:
        parts.append(f"words {stats.words_s:.2f} s")
    lines = [f"speed    {speed}: {', '.join(parts)}; {stats.n_tokens} tokens"]
    rate = stats.draft_acceptance_rate
    if rate is not None:
        shares = f"{rate:.0%}".replace("%", " %")
        lines.append(
            f"drafting {stats.n_accepted} of {stats.n_drafted} drafted tokens accepted ({shares}); "
            f"{stats.tau:.1f} tokens a pass"
        )
    lines += [f"drafting {note}" for note in stats.draft_notes]
    if transcript.language_probability is not None:
        chance = f"{transcript.language_probability:.0%}".replace("%", " %")
        lines.append(f"language {transcript.language}, detected ({chance})")
    energy = transcript.energy
    if energy and energy.joules is None:
        lines.append(f"energy   unavailable: {energy.reason} (see `edgespec energy`)")
    elif energy and energy.joules is not None:
        about = "estimated: " if energy.estimated else ""
        a_minute = f", {60 * energy.joules / stats.heard_s:.3g} J a minute of sound" if stats.heard_s else ""
        lines.append(f"energy   {about}{energy.joules:.3g} J{a_minute}; {energy.source}")
    return lines
