"""`edgespec run`: text from a prompt."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgespec.cli.console import INTERRUPTED, message, out
from edgespec.cli.groups import grouped
from edgespec.cli.options import (
    DRAFTING,
    ENERGY,
    LOSSY,
    OUTPUT,
    PROMPT,
    ChatTemplateOption,
    ComputeOnNodes,
    DraftingOptions,
    Explanation,
    ModelChoice,
    Sampling,
    ShowDraftOption,
    SystemOption,
    WattsOption,
    refuse_contradictions,
)
from edgespec.cli.structure import Structure
from edgespec.decoding.choices import DRAFTLESS, Objective, Rule
from edgespec.errors import NodeLost, UsageError
from edgespec.models.registry import load_registry

if TYPE_CHECKING:
    from edgespec.decoding.options import Options, Waking
    from edgespec.engine.stream import Stream


StatsChoice = Literal["short", "full", "none"]


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompt, and how it is put to the model."""

    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; what is piped in follows it. Without one, or for -: stdin."),
    ] = None
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Read the prompt from a file; what is piped in follows it.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    system: SystemOption = None
    chat_template: ChatTemplateOption = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Insist on the model's chat template.", rich_help_panel=PROMPT)
    ] = False
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the prompt as it is, without template.", rich_help_panel=PROMPT),
    ] = False
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=PROMPT),
    ] = None

    @property
    def reads_stdin(self) -> bool:
        """Whether all of it comes from standard input."""
        return self.file is None and self.prompt in (None, "-")

    @property
    def in_template(self) -> bool | None:
        """Whether the chat template is used; None: where the model has one."""
        return True if self.chat else False if self.raw else None


@dataclass(frozen=True, kw_only=True)
class RunDrafting(DraftingOptions):
    """The drafter, how much it drafts and to what end, and the acceptance rule."""

    rule: Annotated[
        Rule | None,
        typer.Option(
            help="Acceptance rule; all are exact.",
            show_default="match with --seed or at temperature 0, else block",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    objective: Annotated[
        Objective, typer.Option(help="What drafting is to save.", rich_help_panel=DRAFTING)
    ] = "latency"
    explain: Annotated[
        Explanation | None,
        typer.Option(
            help="Print to stderr what each step knew, chose and got (steps), or also its tree of tokens "
            "after each pass over it (ir); in a terminal the text follows.",
            rich_help_panel=DRAFTING,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LossyOptions:
    """The modes that are not exact."""

    mode: Annotated[
        Literal["exact", "cascade"],
        typer.Option(
            help="cascade: the small model writes, and wakes the target where it is unsure.",
            rich_help_panel=LOSSY,
        ),
    ] = "exact"
    threshold: Annotated[
        float | None,
        typer.Option(
            help="The target is woken where the small model's likeliest token is no further ahead of the "
            "next: 0 never, 1 always.",
            show_default="that of `edgespec calibrate`",
            rich_help_panel=LOSSY,
        ),
    ] = None
    lenience: Annotated[
        float,
        typer.Option(
            help="Accept drafted tokens that the target likes L times as much as the exact rule wants.",
            metavar="L",
            show_default="1: exact",
            rich_help_panel=LOSSY,
        ),
    ] = 1.0

    def waking(self) -> Waking | None:
        """Return when a cascade wakes its target; None for no cascade. Raises UsageError."""
        from edgespec.decoding.options import Waking

        if self.mode == "cascade":
            return Waking(threshold=self.threshold)
        if self.threshold is not None:
            raise UsageError("--threshold needs --mode cascade: add it, or leave it out")
        return None


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How much may be written, and read before."""

    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Most tokens; -1: to the end of the context.")
    ] = 256
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            "-c",
            min=1,
            help="Context in tokens.",
            show_default="what is needed, with -n -1 the prompt and 4096",
        ),
    ] = None
    compute: ComputeOnNodes


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """The output, its statistics and its constraints."""

    energy: Annotated[
        bool,
        typer.Option(
            "--energy", help="Count the joules too (see `edgespec energy`).", rich_help_panel=ENERGY
        ),
    ] = False
    assume_watts: WattsOption = None
    structure: Structure
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.", rich_help_panel=OUTPUT)
    ] = False
    stats: Annotated[
        StatsChoice,
        typer.Option(help="Statistics on stderr: two lines, all of them, or none.", rich_help_panel=OUTPUT),
    ] = "short"
    no_stats: Annotated[
        bool, typer.Option("--no-stats", help="The same as --stats none.", rich_help_panel=OUTPUT)
    ] = False
    show_draft: ShowDraftOption = False

    @property
    def counts_joules(self) -> bool:
        """Whether energy is measured, or estimated."""
        return self.energy or self.assume_watts is not None

    @property
    def shows_stats(self) -> bool:
        """Whether any statistics are printed beside the text."""
        return self.stats != "none" and not self.no_stats


@grouped
def run_command(
    *,
    models: ModelChoice,
    drafting: RunDrafting,
    lossy: LossyOptions,
    length: RunLength,
    prompt: PromptOptions,
    sampling: Sampling,
    output: RunOutput,
) -> int:
    """Write text with the target model, helped by a draft model, distributed exactly as the target's own."""
    prompt, models = _as_in_llama_cpp(prompt, models)
    _refuse_contradictions(prompt, models, drafting, lossy, output)
    options = _options(prompt, drafting, lossy, length, sampling)
    from edgespec.cli.loading import load_engine
    from edgespec.cli.prompt_text import read_prompt
    from edgespec.cli.render import ExplainedSteps
    from edgespec.cli.structure import tell_warnings
    from edgespec.decoding.grammar.grammar import Grammar
    from edgespec.energy import EnergyMeter
    from edgespec.platform.signals import SignalPipe

    if output.show_draft and not out.is_terminal:
        message("--show-draft has an effect only in a terminal")
    source = output.structure.read()
    text = read_prompt(prompt.prompt, prompt.file)
    meter = None
    if output.counts_joules:
        meter = EnergyMeter.choose(assume_watts=output.assume_watts, on_message=message)
    drafter = drafting.chosen(cascade=lossy.mode == "cascade")
    names = models.pull(drafter, writes=lossy.mode == "cascade")
    with (
        meter or nullcontext(),
        SignalPipe() as signals,
        load_engine(
            names,
            length.compute,
            drafter=drafter,
            n_ctx=length.ctx,
            objective=drafting.objective,
            history=drafting.cache,
            meter=meter,
            signals=signals,
            chat_template=prompt.chat_template,
        ) as engine,
    ):
        if source:
            tell_warnings(source)
            options = replace(options, grammar=Grammar(engine.target, source))
        stream = engine.stream(
            text,
            options,
            system=prompt.system,
            chat=prompt.in_template,
            on_step=ExplainedSteps(engine.target, drafting.explain).print if drafting.explain else None,
        )
        code = _show(stream, output, explain=drafting.explain is not None)
        output.structure.tell_if_cut(stream.result)
    return code


def _as_in_llama_cpp(prompt: PromptOptions, models: ModelChoice) -> tuple[PromptOptions, ModelChoice]:
    """Take `-m MODEL -p TEXT` as llama.cpp does: the pair of a target, which no pair is called, is a prompt.

    Raises UsageError for another name that no pair has, and says where a prompt is written.
    """
    pair = models.pair
    if pair is None or prompt.prompt is not None or prompt.file is not None or pair in load_registry().pairs:
        return prompt, models
    if models.target is not None:
        return replace(prompt, prompt=pair), replace(models, pair=None)
    try:
        load_registry().pair(pair)
    except UsageError as error:
        raise UsageError(f"{error}; -p is --pair here, and a prompt needs no option") from None
    return prompt, models


def _refuse_contradictions(
    prompt: PromptOptions, models: ModelChoice, drafting: RunDrafting, lossy: LossyOptions, output: RunOutput
) -> None:
    cascade, drafter = lossy.mode == "cascade", drafting.drafter
    refuse_contradictions(
        {
            "a PROMPT and --file": prompt.prompt is not None and prompt.file is not None,
            "--chat and --raw": prompt.chat and prompt.raw,
            "--system and --raw": prompt.system is not None and prompt.raw,
            "--chat-template and --raw": prompt.chat_template is not None and prompt.raw,
            **models.contradictions(drafter),
            "--no-stats and --stats full": output.no_stats and output.stats == "full",
            "--json and --show-draft": output.json and output.show_draft,
            **output.structure.contradictions(cascade=cascade, reads_stdin=prompt.reads_stdin),
            f"--drafter {drafter} and --mode cascade": drafter in DRAFTLESS and cascade,
        }
    )


def _options(
    prompt: PromptOptions, drafting: RunDrafting, lossy: LossyOptions, length: RunLength, sampling: Sampling
) -> Options:
    """Return the generation's options without its grammar, which needs the model. Raises UsageError."""
    from edgespec.decoding.options import Options

    return Options(
        params=sampling.params(),
        seed=sampling.seed,
        n_predict=None if length.n_predict == -1 else length.n_predict,
        gamma=drafting.gamma,
        rule=drafting.rule,
        stop=prompt.stop or (),
        cascade=lossy.waking(),
        lenience=lossy.lenience,
    )


def _show(stream: Stream, output: RunOutput, *, explain: bool) -> int:
    from edgespec.cli.render import TextWriter, as_json, print_stats

    writer = None if output.json else TextWriter(show_draft=output.show_draft, explain=explain)
    code, lost = 0, None
    try:
        for token in stream:
            if writer:
                writer.write(token)
    except KeyboardInterrupt:
        stream.close()
        code = INTERRUPTED
    except NodeLost as error:
        lost = error  # what was written and counted so far is kept
    if writer:
        writer.finish(stream.result.text)
        if output.shows_stats:
            print_stats(stream.result, full=output.stats == "full", show_draft=output.show_draft)
    else:
        sys.stdout.write(as_json(stream.result) + "\n")
    if lost:
        raise lost
    return code
