"""`edgespec transcribe`: the text of recordings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from edgespec.apps.speech.options import DEFAULT_MODEL, TranscriptFormat
from edgespec.cli.completion import complete_model
from edgespec.cli.console import INTERRUPTED, err, line_of, message, out, print_error
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import DRAFTING, OUTPUT, EnergyOption, ThreadsOption, WattsOption
from edgespec.cli.progress import WorkDisplay
from edgespec.cli.render import printable
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.choices import KernelsChoice
from edgespec.platform.files import check_folder, check_writable, write_file

if TYPE_CHECKING:
    from edgespec.apps.speech.options import SpeechOptions
    from edgespec.apps.speech.transcriber import LiveTranscription, Transcriber, Transcription
    from edgespec.apps.speech.transcript import Segment, Transcript
    from edgespec.platform.metering import Meter


# ---- writes the segments of a transcript to stdout while it is made ----


class SegmentWriter:
    """Writes segments to stdout as they come, in formats that allow it."""

    def __init__(self, output: SpeechOutput, *, n_files: int) -> None:
        """Write as `output` says, one of `n_files`."""
        from edgespec.apps.speech.transcript import opening

        self._output = output
        self._is_on = output.output is None and not output.json and output.format != "json"
        self._n = 1
        if self._is_on and (start := opening(output.format)):
            sys.stdout.write(start)
        self._shows_times = self._is_on and output.format == "txt" and out.is_terminal and n_files == 1

    def write(self, segment: Segment) -> None:
        """Write a segment, flushed: somebody may be reading along."""
        if not self._is_on:
            return
        from edgespec.apps.speech.transcript import clock, cues

        for cue in cues([segment], self._output.format, words=self._output.words, first=self._n):
            times = f"[{clock(segment.start_s, 'vtt')}] " if self._shows_times else ""
            sys.stdout.write(times + (printable(cue) if out.is_terminal else cue))
            self._n += 1
        sys.stdout.flush()


STDIN = "-"
_DECODING = "Decoding (defaults and meaning as in openai-whisper)"


@option_group()
class SpeechInput:
    """Recordings, and the language spoken in them."""

    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Recordings: WAV; flac, mp3, m4a, ogg, films with edgespec\\[audio]. - is a pipe, live: "
            "WAV, or samples of 16 bits at 16 kHz.",
        ),
    ]
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            "-l",
            metavar="NAME",
            help="Language: en, en-US, English, auto.",
            show_default="auto",
        ),
    ] = None
    track: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Track of sound of a film.", show_default="the first that is not silent"
        ),
    ] = None
    translate: Annotated[bool, typer.Option("--translate", help="Write English, whatever is spoken.")] = False
    vad: Annotated[
        bool, typer.Option("--vad", help="Leave out silence, as found by a detector: faster, other windows.")
    ] = False


@option_group()
class SpeechModels:
    """The model that transcribes, and the one that drafts."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            "--target",
            "-t",
            help="Whisper model: a GGUF file or a name of `edgespec models list`.",
            autocompletion=complete_model,
        ),
    ] = DEFAULT_MODEL
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "-d",
            metavar="NAME|auto|none",
            help="Smaller Whisper model that drafts; the text stays the same. auto: earlier text drafts; "
            "none: nothing.",
            rich_help_panel=DRAFTING,
            autocompletion=complete_model,
        ),
    ] = "auto"
    threads: ThreadsOption = None
    kernels: Annotated[
        KernelsChoice, typer.Option(help="auto: edgespec's own where they can be used; off: ggml's (stock).")
    ] = "auto"


@option_group(_DECODING)
class SpeechDecoding:
    """How the text is chosen: greedily, by beams, or at a temperature."""

    beam: Annotated[int | None, typer.Option(help="Beams.", show_default="greedy")] = None
    patience: Annotated[float, typer.Option(help="Texts that a search waits for, times the beams.")] = 1.0
    length_penalty: Annotated[
        float | None, typer.Option(help="Length penalty, 0 to 1.", show_default="mean")
    ] = None
    temp: Annotated[
        float | None,
        typer.Option(
            help="Temperature, without fallback.",
            show_default="0, higher where the text repeats itself or is a guess",
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Seed above temperature 0.")] = None
    prompt: Annotated[
        str | None, typer.Option(help="Text before the first window: names, spelling, style.")
    ] = None
    condition: Annotated[
        bool, typer.Option("--condition/--no-condition", help="Give each window the text before it.")
    ] = True

    def options(self, recordings: SpeechInput, *, words: bool) -> SpeechOptions:
        """Return the transcription's options. Raises UsageError."""
        from edgespec.apps.speech.options import TEMPERATURES, SpeechOptions

        if self.temp is not None and self.beam is not None and self.temp > 0:
            raise UsageError("--beam and --temp contradict each other: beams are searched at temperature 0")
        names = ("prompt", "condition", "beam", "patience", "length_penalty", "seed")
        return SpeechOptions(
            language=recordings.language,
            task="translate" if recordings.translate else "transcribe",
            temperatures=TEMPERATURES if self.temp is None else (self.temp,),
            words=words,
            **{name: getattr(self, name) for name in names},
        )


@option_group(OUTPUT)
class SpeechOutput:
    """Where the text goes, and in which form."""

    format: Annotated[TranscriptFormat, typer.Option("--format", "-f", help="Form of the text.")] = "txt"
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write NAME.txt (.srt, .vtt, .json) for each FILE there.",
            show_default="stdout",
        ),
    ] = None
    words: Annotated[
        bool, typer.Option("--words", help="Find the times of words too (json; srt and vtt: a cue each).")
    ] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each FILE, with statistics.")
    ] = False
    no_stats: Annotated[bool, typer.Option("--no-stats", help="No statistics on stderr.")] = False
    energy: EnergyOption = False
    assume_watts: WattsOption = None

    def check(self, files: Sequence[str]) -> None:
        """Raise UsageError for files that cannot be written, or whose names collide."""
        if self.json and self.format != "txt" and self.output is None:
            raise UsageError(f"--json and --format {self.format} contradict each other: both write to stdout")
        if len(files) > 1 and self.output is None and self.format in ("srt", "vtt"):
            raise UsageError(f"--format {self.format} of several files needs --output DIR")
        if files.count("-") > 1:
            raise UsageError("-: standard input can be read only once")
        if self.output is None:
            return
        written: dict[Path, str] = {}
        for file in files:
            path = self.path(file)
            if path in written:
                raise UsageError(f"{file} and {written[path]} would both be written to {path}: rename one")
            written[path] = file

    def prepare(self, files: Sequence[str]) -> None:
        """Make the directory, before any work, and raise UsageError if a text could not be written."""
        if self.output is None:
            return
        check_folder(self.output, "output")
        self.output.mkdir(parents=True, exist_ok=True)
        for file in files:
            check_writable(self.path(file), "output")

    def path(self, file: str) -> Path:
        """Return where the text of `file` is written."""
        assert self.output is not None  # noqa: S101 - for the type checker
        stem = "stdin" if file == "-" else Path(file).stem
        return self.output / f"{stem}.{self.format}"


@shown("Write", "edgespec transcribe talk.wav --format srt --language en")
@grouped
def transcribe_command(
    *, recordings: SpeechInput, models: SpeechModels, decoding: SpeechDecoding, output: SpeechOutput
) -> int:
    """Write down what is said in recordings, with a Whisper model."""
    output.check(recordings.files)
    options = decoding.options(recordings, words=output.words)
    from edgespec.apps.speech.rules import check_english
    from edgespec.apps.speech.speech_model import is_english, pull_speech
    from edgespec.apps.speech.transcriber import open_transcriber
    from edgespec.apps.speech.voice import check_detector
    from edgespec.platform.metering import choose_meter

    if recordings.vad:
        check_detector()
    files, code = _readable(recordings)
    if not files:
        return code
    output.prepare(files)
    if is_english(models.model):
        check_english(options)
    meter = None
    if output.energy or output.assume_watts is not None:
        meter = choose_meter(assume_watts=output.assume_watts, on_message=message)
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
                )
            )
        return _Run(transcriber, recordings, output, meter, code).files(files)


def _readable(recordings: SpeechInput) -> tuple[list[str], int]:
    """Return the recordings that can be read, and the exit code for the others, which are reported.

    Raises EdgespecError if that is the only one.
    """
    from edgespec.apps.speech.audio import check_audio

    files, code = [], 0
    for file in recordings.files:
        try:
            check_audio(file, track=recordings.track)
            files.append(file)
        except EdgespecError as error:
            code = max(code, error.exit_code)
            if len(recordings.files) == 1:
                raise
            print_error(line_of(error))
    return files, code


@dataclass
class _Run:
    """The recordings of one call, one after the other."""

    transcriber: Transcriber
    recordings: SpeechInput
    output: SpeechOutput
    meter: Meter | None
    code: int
    """Exit code so far."""

    def files(self, files: Sequence[str]) -> int:
        """Transcribe `files` and return the exit code; one that fails does not stop the others."""
        for file in files:
            try:
                if not self._transcribe(file):
                    return INTERRUPTED
            except EdgespecError as error:
                if len(self.recordings.files) == 1:
                    raise
                print_error(line_of(error))
                self.code = max(self.code, error.exit_code)
        return self.code

    def _transcribe(self, file: str) -> bool:
        """Transcribe one file, or standard input live; return whether it was read to its end."""
        from edgespec.apps.speech.audio import stream_audio
        from edgespec.apps.speech.transcriber import LiveTranscription

        with ExitStack() as stack:
            transcription: Transcription | LiveTranscription
            if file == STDIN:
                transcription = LiveTranscription(
                    self.transcriber, stream_audio(sys.stdin.buffer, on_message=message)
                )
            else:
                transcription = self._transcription(file, stack.enter_context(WorkDisplay()))
            writer = SegmentWriter(self.output, n_files=len(self.recordings.files))
            window = self.meter.begin() if self.meter else None
            try:
                if isinstance(transcription, LiveTranscription):
                    _follow(transcription, writer)
                else:
                    for segment in transcription.segments():
                        writer.write(segment)
            except KeyboardInterrupt:
                pass  # the text so far is kept
            finally:
                if window:
                    transcription.transcript.energy = window.end()
        self._finish(file, transcription.transcript)
        return transcription.transcript.complete

    def _transcription(self, file: str, display: WorkDisplay) -> Transcription:
        from edgespec.apps.speech.audio import read_audio
        from edgespec.apps.speech.voice import speech_spans

        samples = read_audio(file, track=self.recordings.track, on_message=message)
        # No bar where the text itself comes to the terminal.
        has_bar = self.output.output is not None or self.output.json or not out.is_terminal

        def show(done_s: float, total_s: float) -> None:
            if has_bar:
                display.show(f"transcribing {file}", done_s, total_s)

        show(0.0, len(samples) / 16000)
        spans = speech_spans(samples) if self.recordings.vad else None
        return self.transcriber.stream(samples, speech=spans, on_progress=show)

    def _finish(self, file: str, transcript: Transcript) -> None:
        """Write the transcript, and print what it took."""
        from edgespec.apps.speech.transcript import remarks, stats_object, transcript_object, write_transcript

        output, stats = self.output, transcript.stats
        name = "standard input" if file == STDIN else file
        whole = write_transcript(transcript, output.format, words=output.words)
        if output.output is not None:
            try:
                write_file(output.path(file), whole.encode(), field="output")
                message(f"wrote {output.path(file)}")
            except EdgespecError as error:  # to stdout, if JSON does not have it there
                print_error(line_of(error))
                self.code = max(self.code, error.exit_code)
                sys.stdout.write("" if output.json else whole)
        elif output.format == "json" and not output.json:
            sys.stdout.write(whole)
        if output.json:
            facts = {"file": name, **transcript_object(transcript, words=output.words)}
            facts["stats"] = stats_object(transcript)
            sys.stdout.write(json.dumps(facts, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        for line in remarks(transcript):
            message(f"{name}: {line}")
        if not transcript.complete:
            done = f"{stats.transcribed_s:.0f} of {stats.audio_s:.0f} s"
            message(f"{name}: interrupted after {done}; its text is kept")
        if not output.no_stats:
            for line in stats_lines(transcript):
                err.print(line)


def _follow(transcription: LiveTranscription, writer: SegmentWriter) -> None:
    """Write the final text of a pipe until its end or Ctrl-C; a terminal shows the hypothesis below it."""
    from edgespec.apps.speech.transcriber import Hypothesis

    with Live(console=err, transient=True, auto_refresh=False) as live:
        while True:
            try:
                for event in transcription.events():
                    if not isinstance(event, Hypothesis):
                        writer.write(event)
                    elif err.is_terminal:
                        live.update(Text(printable(event.text), style="dim"), refresh=True)
                return
            except KeyboardInterrupt:  # the end of the recording of a microphone; a second one ends the work
                if transcription.stopped:
                    raise
                transcription.stop()


def stats_lines(transcript: Transcript) -> list[str]:
    """The statistics of a transcription, in a line or a few."""
    stats = transcript.stats
    factor = stats.real_time_factor
    speed = f"{stats.transcribed_s:.1f} s of sound in {stats.total_s:.2f} s"
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
    if transcript.language_probability is not None:
        chance = f"{transcript.language_probability:.0%}".replace("%", " %")
        lines.append(f"language {transcript.language}, detected ({chance})")
    energy = transcript.energy
    if energy and energy.joules is None:
        lines.append(f"energy   unavailable: {energy.reason} (see `edgespec energy`)")
    elif energy and energy.joules is not None:
        about = "estimated: " if energy.estimated else ""
        minutes = stats.transcribed_s / 60
        a_minute = f", {energy.joules / minutes:.3g} J a minute of sound" if minutes else ""
        lines.append(f"energy   {about}{energy.joules:.3g} J{a_minute}; {energy.source}")
    return lines
