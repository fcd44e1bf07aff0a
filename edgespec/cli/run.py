"""`edgespec run`: text from a prompt."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.cli.console import INTERRUPTED, message, out
from edgespec.cli.groups import grouped, shown
from edgespec.cli.local_run import RunRequest, has_servers
from edgespec.cli.options import ModelChoice, Sampling, most_tokens, refuse_contradictions
from edgespec.cli.progress import shown_while_read
from edgespec.cli.run_options import LossyOptions, PromptOptions, RunDrafting, RunLength, RunOutput
from edgespec.decoding.choices import is_draftless, is_plugin
from edgespec.errors import NodeLost, ServerLost, UsageError
from edgespec.models.registry import load_registry
from edgespec.models.resolve import model_named

if TYPE_CHECKING:
    from edgespec.cli.served import ServedStream
    from edgespec.decoding.choices import DrafterChoice
    from edgespec.decoding.grammar.source import GrammarSource
    from edgespec.decoding.options import Options
    from edgespec.engine.stream import Stream


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
    drafter = drafting.chosen(cascade=lossy.mode == "cascade")
    _refuse_contradictions(prompt, models, drafting, lossy, output)
    options = _options(prompt, drafting, lossy, length, sampling)
    source = _grammar_source(output)
    text = prompt.read()
    if has_servers() and not _needs_own_engine(drafting, lossy, length, output):
        request = _request(prompt, text, options, source, drafting.chosen())
        if served := _served(models, drafting, length, prompt, request):
            return _show_served(served, output, history=drafting.cache)
    from edgespec.cli.render import ExplainedSteps
    from edgespec.decoding.grammar.grammar import Grammar
    from edgespec.platform.signals import SignalPipe

    meter = output.meter()
    names = models.pull(
        drafter, length.compute, writes=lossy.mode == "cascade", chat_template=prompt.chat_template
    )
    with (
        meter or nullcontext(),
        SignalPipe() as signals,
        length.compute.load_engine(
            names,
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
            options = replace(options, grammar=Grammar(engine.target, source))
        stream = engine.stream(
            text,
            options,
            system=prompt.system,
            chat=prompt.in_template,
            parse_special=prompt.special,
            on_step=ExplainedSteps(engine.target, drafting.explain).print if drafting.explain else None,
        )
        code = _show(stream, output, engine.target.n_ctx_train, explain=drafting.explain is not None)
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
        return replace(prompt, words=[pair]), replace(models, pair=None)
    try:
        load_registry().pair(pair)
    except UsageError as error:
        raise UsageError(f"{error}; -p is --pair here, and a prompt needs no option") from None
    return prompt, models


def _as_in_ollama(prompt: PromptOptions, models: ModelChoice) -> tuple[PromptOptions, ModelChoice]:
    """Take the first word as the target if it is the name of a model or a pair, and none was named otherwise.

    The words after it are the prompt. Raises UsageError where there is none, and for several words that do
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


def _refuse_contradictions(
    prompt: PromptOptions, models: ModelChoice, drafting: RunDrafting, lossy: LossyOptions, output: RunOutput
) -> None:
    cascade, drafter = lossy.mode == "cascade", drafting.drafter
    refuse_contradictions(
        {
            "--chat and --raw": prompt.chat and prompt.raw,
            "--system and --raw": prompt.system is not None and prompt.raw,
            "--chat-template and --raw": prompt.chat_template is not None and prompt.raw,
            **models.contradictions(drafter),
            "--no-stats and --stats full": output.no_stats and output.stats == "full",
            "--json and --show-draft": output.json and output.show_draft,
            **output.structure.contradictions(cascade=cascade, reads_stdin=prompt.reads_stdin),
            f"--drafter {drafter} and --mode cascade": cascade and is_draftless(drafter or "auto"),
            **drafting.contradictions(),
        }
    )


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
        cascade=lossy.waking(),
        lenience=lossy.lenience,
    )


def _grammar_source(output: RunOutput) -> GrammarSource | None:
    """Return what the text must match; the user is told what has no effect. Raises UsageError."""
    if output.show_draft and not out.is_terminal:
        message("--show-draft has an effect only in a terminal")
    source = output.structure.read()
    if source:
        for warning in source.warnings:
            message(f"{source.name}: not enforced: {warning}")
    return source


def _request(
    prompt: PromptOptions, text: str, options: Options, source: GrammarSource | None, drafter: DrafterChoice
) -> RunRequest:
    bias = options.params.logit_bias.items()
    return RunRequest(
        prompt=text,
        system=prompt.system,
        chat=prompt.in_template,
        special=prompt.special,
        params={name: value for name, value in vars(options.params).items() if name != "logit_bias"},
        logit_bias={token: None if value == -math.inf else value for token, value in bias},
        seed=options.seed,
        n_predict=options.n_predict,
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
        or lossy.waking() is not None
        or lossy.lenience < 1.0
        or drafting.objective != "latency"
        or drafting.explain is not None
        or output.counts_joules
    )


def _served(
    models: ModelChoice, drafting: RunDrafting, length: RunLength, prompt: PromptOptions, request: RunRequest
) -> ServedStream | None:
    """Ask a running server of the same user and models; None if there is none that answers this."""
    from edgespec.cli.served import ask_server, find_server
    from edgespec.engine.model_choice import choose_models

    drafter, names = drafting.chosen(), models.names()
    target, _ = choose_models(names[0], None, "none")  # no draft is looked for
    loading = length.compute.for_text(prompt.chat_template)
    server = find_server(target, names[1], drafter, loading)
    return ask_server(server, request) if server else None


def _show_served(stream: ServedStream, output: RunOutput, *, history: bool) -> int:
    try:
        code = _show(stream, output, stream.server.n_ctx_train, explain=False)
        output.structure.tell_if_cut(stream.result)
        if history:
            stream.store()
    finally:
        stream.close()
    return code


def _show(stream: Stream | ServedStream, output: RunOutput, n_ctx_train: int, *, explain: bool) -> int:
    from edgespec.cli.render import TextWriter, as_json, print_stats

    writer = None if output.json else TextWriter(show_draft=output.show_draft, explain=explain)
    code, lost = 0, None
    try:
        for token in shown_while_read(stream, hides_text=output.json):
            if writer:
                writer.write(token)
    except KeyboardInterrupt:
        stream.close()
        code = INTERRUPTED
    except (NodeLost, ServerLost) as error:
        lost = error  # what was written and counted so far is kept
    if writer:
        writer.finish(stream.result.text)
        if output.shows_stats:
            full = output.stats == "full"
            print_stats(stream.result, n_ctx_train=n_ctx_train, full=full, show_draft=output.show_draft)
    else:
        sys.stdout.write(as_json(stream.result) + "\n")
    if lost:
        raise lost
    return code
