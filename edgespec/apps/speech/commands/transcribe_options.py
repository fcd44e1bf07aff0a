"""Options of `edgespec transcribe`, in groups."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from edgespec.apps.speech.choices import DEFAULT_MODEL, TranscriptFormat
from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, message, out
from edgespec.cli.groups import option_group
from edgespec.cli.options import DRAFTING, OUTPUT, EnergyOption, ThreadsOption, WattsOption
from edgespec.cli.render import printable
from edgespec.errors import UsageError
from edgespec.llama.choices import KernelsChoice
from edgespec.platform.files import check_folder, check_writable

if TYPE_CHECKING:
    from edgespec.apps.energy import EnergyMeter
    from edgespec.apps.speech.options import SpeechOptions
    from edgespec.apps.speech.transcriber import Transcriber
    from edgespec.apps.speech.transcript import Segment, Transcript


# ---- writes the segments of a transcript to stdout while it is made ----


class SegmentWriter:
    """Writes segments to stdout as they come, in forms that are written so."""

    def __init__(self, output: SpeechOutput, *, n_files: int) -> None:
        """Write as `output` says, one of `n_files`."""
        from edgespec.apps.speech.formats import opening

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
        from edgespec.apps.speech.formats import clock, cues

        for cue in cues([segment], self._output.format, words=self._output.words, first=self._n):
            times = f"[{clock(segment.start_s, 'vtt')}] " if self._shows_times else ""
            sys.stdout.write(times + (printable(cue) if out.is_terminal else cue))
            self._n += 1
        sys.stdout.flush()


# ---- standard input heard live: the final text on stdout, in a terminal the hypothesis below it ----


def hear_live(transcriber: Transcriber, output: SpeechOutput, meter: EnergyMeter | None) -> Transcript:
    """Hear standard input to its end or Ctrl-C, and return its text."""
    from edgespec.apps.speech.audio import stream_audio
    from edgespec.apps.speech.live import Hypothesis, LiveHearing

    hearing = LiveHearing(transcriber, stream_audio(sys.stdin.buffer, on_message=message))
    writer = SegmentWriter(output, n_files=1)
    window = meter.begin() if meter else None
    try:
        with Live(console=err, transient=True, auto_refresh=False) as live:
            while True:
                try:
                    for event in hearing.events():
                        if isinstance(event, Hypothesis):
                            if err.is_terminal:
                                live.update(Text(printable(event.text), style="dim"), refresh=True)
                        else:
                            writer.write(event)
                    break
                except KeyboardInterrupt:  # the end of what a microphone hears; a second one ends the work
                    if hearing.stopped:
                        raise
                    hearing.stop()
    except KeyboardInterrupt:
        pass  # what was heard so far is kept
    finally:
        if window:
            hearing.transcript.energy = window.end()
    return hearing.transcript


# ---- transcribe_options ----


_DECODING = "Decoding (defaults and meaning as in openai-whisper)"


@option_group()
class SpeechInput:
    """Recordings, and what is said in them."""

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
            "--track",
            min=1,
            metavar="N",
            help="Track of sound of a film.",
            show_default="the first that is not silent",
        ),
    ] = None
    translate: Annotated[bool, typer.Option("--translate", help="Write English, whatever is spoken.")] = False
    vad: Annotated[
        bool, typer.Option("--vad", help="Leave out silence, as found by a detector: faster, other windows.")
    ] = False


@option_group()
class SpeechModels:
    """The model that hears, and the one that drafts."""

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
            help="Smaller Whisper model that drafts, where that pays; the text stays the same. auto: one "
            "that is here and pays, and text heard before; none: nothing.",
            rich_help_panel=DRAFTING,
            autocompletion=complete_model,
        ),
    ] = "auto"
    threads: ThreadsOption = None
    kernels: Annotated[
        KernelsChoice,
        typer.Option(help="auto: edgespec's own where they can be used; off: ggml's (stock)."),
    ] = "auto"


@option_group(_DECODING)
class SpeechDecoding:
    """The choice of the text."""

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
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Cut the sound every 30 seconds, and decode windows together: faster. Changes the text: "
            "words at the cuts may suffer.",
        ),
    ] = False

    def options(self, heard: SpeechInput, *, words: bool) -> SpeechOptions:
        """Return the transcription's options. Raises UsageError."""
        from edgespec.apps.speech.options import TEMPERATURES, SpeechOptions

        if self.temp is not None and self.beam is not None and self.temp > 0:
            raise UsageError("--beam and --temp contradict each other: beams are searched at temperature 0")
        return SpeechOptions(
            language=heard.language,
            task="translate" if heard.translate else "transcribe",
            prompt=self.prompt,
            condition=self.condition and not self.independent,
            temperatures=TEMPERATURES if self.temp is None else (self.temp,),
            beam=self.beam,
            patience=self.patience,
            length_penalty=self.length_penalty,
            words=words,
            seed=self.seed,
            independent=self.independent,
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

    @property
    def counts_joules(self) -> bool:
        """Whether energy is measured, or estimated."""
        return self.energy or self.assume_watts is not None

    def check(self, files: Sequence[str]) -> None:
        """Raise UsageError for files that cannot be written, or not side by side."""
        if self.json and self.format != "txt" and self.output is None:
            raise UsageError(f"--json and --format {self.format} contradict each other: both write to stdout")
        if len(files) > 1 and self.output is None and self.format in ("srt", "vtt"):
            raise UsageError(f"--format {self.format} of several files needs --output DIR")
        if files.count("-") > 1:
            raise UsageError("-: standard input can be heard only once")
        if self.output is None:
            return
        if self.output.exists() and not self.output.is_dir():
            raise UsageError(f"--output {self.output}: a file; name a directory")
        written: dict[Path, str] = {}
        for file in files:
            path = self.path(file)
            if path in written:
                raise UsageError(f"{file} and {written[path]} would both be written to {path}: rename one")
            written[path] = file

    def prepare(self, files: Sequence[str]) -> None:
        """Make the directory, before any work, and raise UsageError where a text could not be written."""
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
