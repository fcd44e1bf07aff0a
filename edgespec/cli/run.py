"""`edgespec run`: text from a prompt."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgespec.cli.console import INTERRUPTED, message, out, read_piped
from edgespec.cli.groups import grouped, listed, option_group, shown
from edgespec.cli.options import (
    DRAFTING,
    LOSSY,
    OUTPUT,
    PROMPT,
    AnyCompute,
    ChatTemplateOption,
    DraftingOptions,
    EnergyOption,
    Explanation,
    ModelChoice,
    Sampling,
    ShowDraftOption,
    SpecialOption,
    StateOptions,
    SystemOption,
    WattsOption,
    most_tokens,
)
from edgespec.decoding.choices import Objective, Rule, is_plugin
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.registry import load_registry
from edgespec.models.resolve import ModelRef, model_named
from edgespec.platform.kept import SERVERS

if TYPE_CHECKING:
    from edgespec.cli.local_run import RunRequest
    from edgespec.cli.served import ServedStream
    from edgespec.decoding.choices import DrafterChoice
    from edgespec.decoding.grammars import GrammarSource
    from edgespec.decoding.options import Options, WakePolicy
    from edgespec.decoding.records import Result
    from edgespec.engine.stream import Stream
    from edgespec.platform.metering import Meter


# ---- options of `edgespec run`, in groups, and the reading of its prompt and grammar ----


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
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Put an image before the prompt (- from a pipe); may be repeated."),
    ] = None

    @property
    def prompt(self) -> str | None:
        """The prompt on the command line; several words were refused earlier."""
        return self.words[0] if self.words else None

    @property
    def reads_stdin(self) -> bool:
        """Whether the whole prompt comes from standard input."""
        return self.file is None and self.prompt in (None, "-")

    @property
    def in_template(self) -> bool | None:
        """Whether the chat template is used; None: if the model has one."""
        return True if self.chat else False if self.raw else None

    def images(self) -> tuple[bytes, ...]:
        """Return the files of the images. Raises UsageError."""
        if not self.image:
            return ()
        from edgespec.platform.plugins import part

        return tuple(map(part("images.read_file"), self.image))

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

    def wake_policy(self) -> WakePolicy | None:
        """Return when a cascade wakes its target; None for no cascade. Raises UsageError."""
        from edgespec.decoding.options import WakePolicy

        if self.mode == "cascade":
            return WakePolicy(threshold=self.threshold)
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
    compute: AnyCompute
    here: Annotated[
        bool,
        typer.Option("--here", help="Load the models, even if `edgespec serve` runs with them."),
    ] = False
    states: StateOptions


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

    def check(self, prompt: PromptOptions) -> None:
        """Raise UsageError if two things would be read from stdin."""
        taken = ["a prompt from stdin"] if prompt.reads_stdin else []
        taken += ["--image -"] * (prompt.image or []).count("-")
        taken += [f"--{name.replace('_', '-')} -" for name, value in vars(self).items() if value == "-"]
        if len(taken) > 1:
            raise UsageError(f"{taken[0]} and {taken[1]} contradict each other: choose one")

    def read(self) -> GrammarSource | None:
        """The grammar of the text; None for any text. Raises UsageError, before models are loaded."""
        if self.grammar is None and self.json_schema is None and self.regex is None:
            return None
        from edgespec.decoding.grammars import GrammarSource

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

    def warn_if_cut(self, result: Result) -> None:
        """Warn that a text does not match, because it ends too early."""
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
        StatsChoice, typer.Option(help="Statistics on stderr: three lines, all of them, or none.")
    ] = "short"
    no_stats: Annotated[bool, typer.Option("--no-stats", help="The same as --stats none.")] = False
    show_draft: ShowDraftOption = False

    @property
    def counts_joules(self) -> bool:
        """Whether energy is measured, or estimated."""
        return self.energy or self.assume_watts is not None

    def meter(self) -> Meter | None:
        """The meter of the joules, if they are counted."""
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


def _decode(data: bytes, name: str, kind: type[EdgespecError] = EdgespecError) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(
            f"{name} is not UTF-8 text at byte {error.start}, 0x{data[error.start]:02x}; convert it first"
        ) from None


def _read_constraint(path: str, name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    return _decode(data, name, UsageError)


# ---- run ----


@shown("Write", 'edgespec run --gamma 3 --temp 0 "Write a quicksort in Python."')
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
    prompt, models = _as_in_ollama(*_as_in_llama_cpp(prompt, models))
    is_cascade = lossy.mode == "cascade"
    drafter = drafting.chosen(cascade=is_cascade)
    options = _options(prompt, drafting, lossy, length, sampling)
    source, states = _grammar_source(output, prompt), length.states.room()
    images, text = prompt.images(), prompt.read()  # in this order: an image may be piped
    if any(SERVERS.path().glob("*.json")) and not _needs_own_engine(drafting, lossy, length, output):
        request = _request(prompt, text, images, options, source, drafting.chosen())
        if served := _served(models, drafting, length, prompt, request):
            return _show_served(served, output, history=drafting.cache)
    from edgespec.cli.render import ExplainedSteps
    from edgespec.platform.processes import SignalPipe

    meter = output.meter()
    names = models.pull(drafter, length.compute, writes=is_cascade, chat_template=prompt.chat_template)
    with (
        meter or nullcontext(),
        SignalPipe() as signals,
        length.compute.load_engine(
            EngineOptions(
                names,
                drafter=drafter,
                n_ctx=length.ctx,
                objective=drafting.objective,
                history=drafting.cache,
                meter=meter,
                signals=signals,
                chat_template=prompt.chat_template,
                states=states,
            )
        ) as engine,
    ):
        if source:
            from edgespec.decoding.grammars import Grammar

            options = replace(options, grammar=Grammar(engine.target, source))
        stream = engine.stream(
            text,
            options,
            images=images,
            system=prompt.system,
            chat=prompt.in_template,
            parse_special=prompt.special,
            on_step=ExplainedSteps(engine.target, drafting.explain).print if drafting.explain else None,
        )
        code = _show(stream, output, engine.target.n_ctx_train, explain=drafting.explain is not None)
        output.structure.warn_if_cut(stream.result)
    return code


def _as_in_llama_cpp(prompt: PromptOptions, models: ModelChoice) -> tuple[PromptOptions, ModelChoice]:
    """Read `-m MODEL -p TEXT` as llama.cpp does: with a target, a pair that does not exist is a prompt.

    Raises UsageError, which says where a prompt belongs, for other names that no pair has.
    """
    pair = models.pair
    if pair in load_registry().pairs:
        models.names()  # which refuses a target beside it, before a prompt is read
    if pair is None or prompt.prompt is not None or prompt.file is not None or pair in load_registry().pairs:
        return prompt, models
    if models.target is not None:
        return replace(prompt, words=[pair]), replace(models, pair=None)
    try:
        load_registry().pair(pair)
    except UsageError as error:
        raise UsageError(f"{error}; -p is --pair here, and a prompt needs no option") from None
    return prompt, models


def _as_in_ollama(prompt: PromptOptions, models: ModelChoice) -> tuple[PromptOptions, ModelChoice]:
    """Take the first word as the target if it is the name of a model or a pair, and none was named otherwise.

    The words after it are the prompt. Raises UsageError if there is none, and for several words that do
    not begin with a model.
    """
    words = prompt.words or []
    is_free = models.target is None and models.pair is None
    name = model_named(words[0], alone=len(words) == 1) if words and is_free else None
    if name is None:
        if len(words) > 1:
            known = f"{words[0]!r} is no model that is known here; " if is_free else ""
            raise UsageError(f"{known}a PROMPT of several words stands in quotation marks")
        return prompt, models
    rest = [" ".join(words[1:])] if words[1:] else []
    if not rest and prompt.file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                f"{name} is a model: `edgespec chat {name}` talks with it, "
                f'`edgespec run {name} "PROMPT"` has it write one answer'
            )
        message(f"{name} is the model, and the prompt is what is piped in")
    return replace(prompt, words=rest), models.with_model(name)


def _options(
    prompt: PromptOptions, drafting: RunDrafting, lossy: LossyOptions, length: RunLength, sampling: Sampling
) -> Options:
    """Return the generation's options without its grammar, which needs the model. Raises UsageError."""
    from edgespec.decoding.options import Options

    return Options(
        params=sampling.params,
        seed=sampling.seed,
        n_predict=most_tokens(length.n_predict),
        gamma=drafting.gamma,
        rule=drafting.rule,
        stop=prompt.stop or (),
        reasoning_budget=sampling.reasoning_budget,
        cascade=lossy.wake_policy(),
        lenience=lossy.lenience,
    )


def _grammar_source(output: RunOutput, prompt: PromptOptions) -> GrammarSource | None:
    """Return the grammar of the text; a message names parts without effect. Raises UsageError."""
    output.structure.check(prompt)
    if output.show_draft and not out.is_terminal:
        message("--show-draft has an effect only in a terminal")
    source = output.structure.read()
    if source:
        for warning in source.warnings:
            message(f"{source.name}: not enforced: {warning}")
    return source


def _request(
    prompt: PromptOptions,
    text: str,
    images: tuple[bytes, ...],
    options: Options,
    source: GrammarSource | None,
    drafter: DrafterChoice,
) -> RunRequest:
    from edgespec.cli.local_run import RunRequest

    bias = options.params.logit_bias.items()
    return RunRequest(
        prompt=text,
        images=images,
        system=prompt.system,
        chat=prompt.in_template,
        special=prompt.special,
        params={name: value for name, value in vars(options.params).items() if name != "logit_bias"},
        logit_bias={token: None if value == -math.inf else value for token, value in bias},
        seed=options.seed,
        n_predict=options.n_predict,
        reasoning_budget=options.reasoning_budget,
        drafter=None if drafter == "auto" else str(drafter),
        gamma=options.gamma,
        rule=options.rule,
        stop=tuple(options.stop),
        grammar=(source.compiled, source.name, source.warnings) if source else None,
    )


def _needs_own_engine(
    drafting: RunDrafting, lossy: LossyOptions, length: RunLength, output: RunOutput
) -> bool:
    return (
        length.here
        or is_plugin(drafting.drafter)
        or length.ctx is not None
        or length.states.state_dir is not None
        or lossy.wake_policy() is not None
        or lossy.lenience < 1.0
        or drafting.objective != "latency"
        or drafting.explain is not None
        or output.counts_joules
    )


def _served(
    models: ModelChoice, drafting: RunDrafting, length: RunLength, prompt: PromptOptions, request: RunRequest
) -> ServedStream | None:
    """Ask a running server of the same user and models; None if none can answer this."""
    from edgespec.cli.served import ask_server, find_server
    from edgespec.engine.model_choice import adapters_of, choose_models

    drafter, names = drafting.chosen(), models.names()
    target, _ = choose_models(names[0], None, "none")  # no draft is looked for
    if adapters_of(ModelRef(target), length.compute.adapters):
        return None
    loading = length.compute.for_text(prompt.chat_template)
    server = find_server(target, names[1], drafter, loading, kept=drafting.cache)
    return ask_server(server, request) if server else None


def _show_served(stream: ServedStream, output: RunOutput, *, history: bool) -> int:
    try:
        code = _show(stream, output, stream.server.n_ctx_train, explain=False)
        output.structure.warn_if_cut(stream.result)
        if history:
            stream.store()
    finally:
        stream.close()
    return code


def _show(stream: Stream | ServedStream, output: RunOutput, n_ctx_train: int, *, explain: bool) -> int:
    from edgespec.cli.render import TextWriter, as_json, print_stats, shown_while_read

    writer = None if output.json else TextWriter(show_draft=output.show_draft, explain=explain)
    code, failed = 0, None
    try:
        for token in shown_while_read(stream, hides_text=output.json):
            if writer:
                writer.write(token)
    except KeyboardInterrupt:
        stream.close()
        code = INTERRUPTED
    except EdgespecError as error:
        if not stream.result.token_ids:
            raise
        failed = error  # what was written and counted so far is kept
    if writer:
        writer.finish(stream.result.text)
        if output.shows_stats:
            full = output.stats == "full"
            print_stats(stream.result, n_ctx_train=n_ctx_train, full=full, show_draft=output.show_draft)
    else:
        sys.stdout.write(as_json(stream.result) + "\n")
    if failed:
        raise failed
    return code
