"""Options of `edgespec run`, in groups, and the reading of its prompt and grammar."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgespec.cli.console import message
from edgespec.cli.groups import listed, option_group
from edgespec.cli.options import (
    DRAFTING,
    LOSSY,
    OUTPUT,
    PROMPT,
    ChatTemplateOption,
    ComputeOnNodes,
    DraftingOptions,
    EnergyOption,
    Explanation,
    ShowDraftOption,
    SpecialOption,
    SystemOption,
    WattsOption,
)
from edgespec.decoding.choices import Objective, Rule, is_plugin
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.standard_input import read_piped

if TYPE_CHECKING:
    from edgespec.decoding.grammar.source import GrammarSource
    from edgespec.decoding.options import Waking
    from edgespec.decoding.records import Result
    from edgespec.platform.metering import Meter

StatsChoice = Literal["short", "full", "none"]


@option_group(PROMPT)
class PromptOptions:
    """The prompt, and how it is given to the model."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="The prompt; what is piped in follows it. Without one, or for -: stdin. Before it a model, "
            "as --target names one, or a pair.",
        ),
    ] = None
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read the prompt from a file; a PROMPT and a pipe follow it."),
    ] = None
    system: SystemOption = None
    chat_template: ChatTemplateOption = None
    chat: Annotated[bool, typer.Option("--chat", help="Insist on the model's chat template.")] = False
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without template.")] = (
        False
    )
    special: SpecialOption = None
    stop: Annotated[list[str] | None, listed("stop")] = None

    @property
    def prompt(self) -> str | None:
        """The prompt of the command line; several words are refused before."""
        return self.words[0] if self.words else None

    @property
    def reads_stdin(self) -> bool:
        """Whether the whole prompt comes from standard input."""
        return self.file is None and self.prompt in (None, "-")

    @property
    def in_template(self) -> bool | None:
        """Whether the chat template is used; None: if the model has one."""
        return True if self.chat else False if self.raw else None

    def read(self) -> str:
        """Return the text of the file, the prompt and what is piped to stdin, in this order; or all of stdin.

        Raises UsageError and EdgespecError.
        """
        if self.reads_stdin:
            return _read_stdin(is_named=self.prompt == "-")
        texts = [] if self.prompt in (None, "-") else [self.prompt or ""]
        if self.file is not None:
            try:
                texts.insert(0, _decode(self.file.read_bytes(), str(self.file)))
            except OSError as error:
                raise UsageError(f"--file {self.file}: {error.strerror}") from None
        if not all(text.strip() for text in texts):
            is_file = self.file is not None and not texts[0].strip()
            raise UsageError(f"{self.file}: the prompt is empty" if is_file else "the prompt is empty")
        piped = _decode(read_piped(message), "stdin")
        return "\n\n".join([*texts, piped] if piped.strip() else texts)


@option_group(DRAFTING)
class RunDrafting(DraftingOptions):
    """The drafter, how much it drafts and to what end, and the acceptance rule."""

    rule: Annotated[Rule | None, listed("rule")] = None
    objective: Annotated[Objective, typer.Option(help="The quantity that drafting minimises.")] = "latency"
    explain: Annotated[
        Explanation | None,
        typer.Option(
            help="Print to stderr the inputs, choice and result of each step (steps), or also its token tree "
            "after each forward pass (ir); in a terminal the text follows."
        ),
    ] = None

    def contradictions(self) -> dict[str, bool]:
        """Return the options for `refuse_contradictions`."""
        is_own = is_plugin(self.drafter)
        return {
            **super().contradictions(),
            f"--drafter {self.drafter} and --objective energy": is_own and self.objective == "energy",
            f"--drafter {self.drafter} and --explain": is_own and self.explain is not None,
        }


@option_group(LOSSY)
class LossyOptions:
    """The modes that are not exact."""

    mode: Annotated[
        Literal["exact", "cascade"],
        typer.Option(help="cascade: the small model writes, and wakes the target where it is unsure."),
    ] = "exact"
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Margin between the small model's two likeliest tokens up to which the target is woken: "
            "0 never, 1 always.",
            show_default="that of `edgespec calibrate`",
        ),
    ] = None
    lenience: Annotated[float, listed("lenience")] = 1.0

    def waking(self) -> Waking | None:
        """Return when a cascade wakes its target; None for no cascade. Raises UsageError."""
        from edgespec.decoding.options import Waking

        if self.mode == "cascade":
            return Waking(threshold=self.threshold)
        if self.threshold is not None:
            raise UsageError("--threshold needs --mode cascade: add it, or leave it out")
        return None


@option_group()
class RunLength:
    """The most tokens of the answer and of the context."""

    n_predict: Annotated[int, listed("n_predict", "--n-predict", "-n")] = -1
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            "-c",
            min=1,
            help="Context in tokens.",
            show_default="what is needed; without -n the prompt and 4096, or fewer that fit in memory",
        ),
    ] = None
    compute: ComputeOnNodes
    here: Annotated[
        bool,
        typer.Option("--here", help="Load the models, even if `edgespec serve` runs with them."),
    ] = False


@option_group(OUTPUT)
class Structure:
    """The grammar, schema or pattern that the text must match; at most one of these."""

    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write only text that matches this grammar: llama.cpp's GBNF, or Lark (- reads stdin).",
        ),
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="Write only JSON that this schema describes: a file, the schema itself, or - for stdin.",
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Write only text that this regular expression matches as a whole."
        ),
    ] = None

    def contradictions(self, *, cascade: bool, reads_stdin: bool) -> dict[str, bool]:
        """Return which of these options contradict each other, or a cascade, or a prompt from stdin."""
        given = {
            f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if value is not None
        }
        names = [*given]
        found = {" and ".join(names): len(names) > 1}
        for name, value in given.items():
            found[f"{name} and --mode cascade"] = cascade
            found[f"a prompt from stdin and {name} -"] = value == "-" and reads_stdin
        return found

    def read(self) -> GrammarSource | None:
        """Return what the text must match; None for any text. Raises UsageError, before models are loaded."""
        if self.grammar is None and self.json_schema is None and self.regex is None:
            return None
        from edgespec.decoding.grammar.source import GrammarSource

        if self.grammar is not None:
            name = f"--grammar {self.grammar}"
            text = _read_constraint(self.grammar, name)
            is_lark = self.grammar.lower().endswith(".lark")
            return GrammarSource.lark(text, name) if is_lark else GrammarSource.any(text, name)
        if self.regex is not None:
            return GrammarSource.regex(self.regex, "--regex")
        given = self.json_schema or ""
        if given.lstrip().startswith(("{", "[")):
            return GrammarSource.json_schema(given, "--json-schema")
        name = f"--json-schema {given}"
        return GrammarSource.json_schema(_read_constraint(given, name), name)

    def tell_if_cut(self, result: Result) -> None:
        """Tell the user that a text does not match, because it ends too early."""
        limit = {"length": "-n", "context": "--ctx", "stop": "--stop"}.get(result.stop_reason)
        if limit and (self.grammar or self.json_schema or self.regex):
            whole = "be whole JSON" if self.json_schema else "match as a whole"
            message(f"the text was cut by {limit} and may not {whole}")


@option_group(OUTPUT)
class RunOutput:
    """The output, its statistics and its constraints."""

    energy: EnergyOption = False
    assume_watts: WattsOption = None
    structure: Structure
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False
    stats: Annotated[
        StatsChoice, typer.Option(help="Statistics on stderr: two lines, all of them, or none.")
    ] = "short"
    no_stats: Annotated[bool, typer.Option("--no-stats", help="The same as --stats none.")] = False
    show_draft: ShowDraftOption = False

    @property
    def counts_joules(self) -> bool:
        """Whether energy is measured, or estimated."""
        return self.energy or self.assume_watts is not None

    def meter(self) -> Meter | None:
        """Return what measures the joules, if they are counted."""
        from edgespec.platform.metering import choose_meter

        if not self.counts_joules:
            return None
        return choose_meter(assume_watts=self.assume_watts, on_message=message)

    @property
    def shows_stats(self) -> bool:
        """Whether any statistics are printed."""
        return self.stats != "none" and not self.no_stats


# ---- reading ----


def _read_stdin(*, is_named: bool) -> str:
    if sys.stdin is None or (not is_named and sys.stdin.isatty()):
        raise UsageError(
            'no prompt: give one, as in `edgespec run "Write a quicksort"`, or -f FILE, or a pipe'
        )
    text = _decode(sys.stdin.buffer.read(), "stdin")
    if not text.strip():
        raise UsageError("stdin: the prompt is empty")
    return text


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EdgespecError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start}; "
            "convert it first"
        ) from None


def _read_constraint(path: str, name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text at byte {error.start}; convert it first") from None
