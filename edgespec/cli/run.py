"""`edgespec run`: text from a prompt."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgespec.choices import Objective, Rule, Signal
from edgespec.cli.console import INTERRUPTED, err, message, out
from edgespec.cli.options import (
    DRAFTING,
    OUTPUT,
    PROMPT,
    CacheOption,
    DrafterOption,
    DraftOption,
    FrequencyPenaltyOption,
    GammaOption,
    KernelsOption,
    LogitBiasOption,
    MinPOption,
    PairOption,
    PresencePenaltyOption,
    RepeatLastNOption,
    RepeatPenaltyOption,
    ShowDraftOption,
    SpanOption,
    SystemOption,
    TargetOption,
    TemperatureOption,
    TextSeedOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    TypicalOption,
    WattsOption,
    parse_bias,
    parse_span,
    refuse_contradictions,
)
from edgespec.cli.progress import pull_chosen
from edgespec.cli.render import ExplainedSteps, Explanation, TextWriter, as_json, print_stats
from edgespec.cli.structure import GrammarOption, JsonSchemaOption, read_structure, tell_if_cut
from edgespec.energy import EnergyMeter
from edgespec.engine import Engine
from edgespec.errors import EdgespecError, UsageError
from edgespec.options import SPAN, Options, Waking
from edgespec.platform.signals import SignalPipe
from edgespec.sampling import SamplingParams
from edgespec.stream import Stream

_LOSSY = "Lossy: faster, and not the target's text (docs/cascade.md)"
_DEFAULT = SamplingParams()


def run_command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads stdin, as does a pipe.")] = None,
    *,
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    drafter: DrafterOption = None,
    gamma: GammaOption = None,
    rule: Annotated[
        Rule | None,
        typer.Option(
            help="Acceptance rule; all are exact.",
            show_default="match with --seed or at temperature 0, else block",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="What drafting is to save.", rich_help_panel=DRAFTING)
    ] = "latency",
    cache: CacheOption = True,
    explain: Annotated[
        Explanation | None,
        typer.Option(
            help="Print to stderr what each step knew, chose and got (steps), or also its tree of tokens "
            "after each pass over it (ir); in a terminal the text follows.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    mode: Annotated[
        Literal["exact", "cascade"],
        typer.Option(
            help="cascade: the draft model writes, and wakes the target where it is unsure.",
            rich_help_panel=_LOSSY,
        ),
    ] = "exact",
    signal: Annotated[
        Signal | None,
        typer.Option(
            help="What says that it is unsure: how far its likeliest token is ahead of the next (margin, 0 "
            "to 1), or the entropy of its distribution in nats.",
            show_default="margin",
            rich_help_panel=_LOSSY,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="The target is woken where the margin is no more than this, or the entropy no less.",
            show_default="that of `edgespec calibrate`",
            rich_help_panel=_LOSSY,
        ),
    ] = None,
    span: SpanOption = None,
    lenience: Annotated[
        float,
        typer.Option(
            help="Accept drafted tokens that the target likes L times as much as the exact rule wants.",
            metavar="L",
            show_default="1: exact",
            rich_help_panel=_LOSSY,
        ),
    ] = 1.0,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Most tokens; -1: to the end of the context.")
    ] = 256,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            "-c",
            min=1,
            help="Context in tokens.",
            show_default="what is needed, with -n -1 the prompt and 4096",
        ),
    ] = None,
    threads: ThreadsOption = None,
    kernels: KernelsOption = "auto",
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read the prompt from a file.", rich_help_panel=PROMPT),
    ] = None,
    system: SystemOption = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Insist on the model's chat template.", rich_help_panel=PROMPT)
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the prompt as it is, without template.", rich_help_panel=PROMPT),
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=PROMPT),
    ] = None,
    temp: TemperatureOption = _DEFAULT.temperature,
    top_k: TopKOption = _DEFAULT.top_k,
    top_p: TopPOption = _DEFAULT.top_p,
    min_p: MinPOption = _DEFAULT.min_p,
    typical: TypicalOption = _DEFAULT.typical_p,
    repeat_penalty: RepeatPenaltyOption = _DEFAULT.repeat_penalty,
    presence_penalty: PresencePenaltyOption = _DEFAULT.presence_penalty,
    frequency_penalty: FrequencyPenaltyOption = _DEFAULT.frequency_penalty,
    repeat_last_n: RepeatLastNOption = _DEFAULT.penalty_last_n,
    logit_bias: LogitBiasOption = None,
    seed: TextSeedOption = None,
    energy: Annotated[
        bool,
        typer.Option(
            "--energy", help="Count the joules too (see `edgespec energy`).", rich_help_panel="Energy"
        ),
    ] = False,
    assume_watts: WattsOption = None,
    grammar: GrammarOption = None,
    json_schema: JsonSchemaOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.", rich_help_panel=OUTPUT)
    ] = False,
    stats: Annotated[bool, typer.Option(help="Print statistics to stderr.", rich_help_panel=OUTPUT)] = True,
    show_draft: ShowDraftOption = False,
) -> int:
    """Write text with the target model, helped by a draft model, distributed exactly as the target's own."""
    refuse_contradictions(
        {
            "a PROMPT and --file": prompt is not None and file is not None,
            "--chat and --raw": chat and raw,
            "--system and --raw": system is not None and raw,
            "--pair and --target or --draft": pair is not None and bool(target or draft),
            f"--draft and --drafter {drafter}": draft is not None and drafter in ("none", "suffix"),
            "--json and --show-draft": json and show_draft,
            "--grammar and --json-schema": grammar is not None and json_schema is not None,
            "--grammar and --mode cascade": grammar is not None and mode == "cascade",
            "--json-schema and --mode cascade": json_schema is not None and mode == "cascade",
            f"--drafter {drafter} and --mode cascade": drafter in ("none", "suffix") and mode == "cascade",
        }
    )
    if mode == "exact" and (threshold is not None or signal is not None or span is not None):
        raise UsageError("--threshold, --signal and --span are of --mode cascade: add it, or leave them out")
    cascade = None
    if mode == "cascade":
        cascade = Waking(signal or "margin", threshold, span=SPAN if span is None else parse_span(span))
    params = SamplingParams(
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical,
        repeat_penalty=repeat_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        penalty_last_n=repeat_last_n,
        logit_bias=parse_bias(logit_bias or []),
    )
    limit = None if n_predict == -1 else n_predict
    Options(
        gamma=gamma,
        n_predict=limit,
        stop=stop or [],
        seed=seed,
        rule=rule,
        cascade=cascade,
        lenience=lenience,
    )
    drafter = "none" if gamma == 0 and not cascade else drafter or "auto"
    if show_draft and not out.is_terminal:
        message("--show-draft has an effect only in a terminal")
    text = _read_prompt(prompt, file)
    structure = read_structure(grammar, json_schema)

    counts = energy or assume_watts is not None
    meter = EnergyMeter.choose(assume_watts=assume_watts, on_message=message) if counts else None
    target, draft = pull_chosen(pair, target, draft, drafter)
    with meter or nullcontext(), SignalPipe() as signals:
        with err.status("loading the models"):
            engine = Engine(
                target,
                draft,
                drafter=drafter,
                n_ctx=ctx,
                n_threads=threads,
                kernels=kernels,
                objective=objective,
                history=cache,
                meter=meter,
                signals=signals,
                on_message=message,
            )
        with engine:
            stream = engine.stream(
                text,
                params=params,
                seed=seed,
                n_predict=limit,
                gamma=gamma,
                rule=rule,
                stop=stop or [],
                system=system,
                chat=True if chat else False if raw else None,
                on_step=ExplainedSteps(engine.target, explain).print if explain else None,
                cascade=cascade,
                lenience=lenience,
                grammar=structure.compile(engine.target) if structure else None,
            )
            code = _show(stream, json=json, stats=stats, show_draft=show_draft, explain=explain is not None)
            tell_if_cut(structure, stream.result)
            return code


def _show(stream: Stream, *, json: bool, stats: bool, show_draft: bool, explain: bool) -> int:
    writer = None if json else TextWriter(show_draft=show_draft, explain=explain)
    code = 0
    try:
        for token in stream:
            if writer:
                writer.write(token)
    except KeyboardInterrupt:
        stream.close()
        code = INTERRUPTED
    if writer:
        writer.finish(stream.result.text)
        if stats:
            print_stats(stream.result, show_draft=show_draft)
    else:
        sys.stdout.write(as_json(stream.result) + "\n")
    return code


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        try:
            return _decode(file.read_bytes(), str(file))
        except OSError as error:
            raise UsageError(f"--file {file}: {error.strerror}") from None
    if prompt is not None and prompt != "-":
        if not prompt:
            raise UsageError("the prompt is empty")
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise UsageError(
            'no prompt: give one, as in `edgespec run "Write a quicksort"`, or -f FILE, or a pipe'
        )
    return _decode(sys.stdin.buffer.read(), "stdin")


def _decode(data: bytes, name: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise EdgespecError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start}; "
            "convert it first"
        ) from None
    if not text.strip():
        raise UsageError(f"{name}: the prompt is empty")
    return text
