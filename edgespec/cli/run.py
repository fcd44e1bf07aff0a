"""`edgespec run`: text from a prompt."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.cli.console import INTERRUPTED, message, out
from edgespec.cli.groups import grouped
from edgespec.cli.options import ModelChoice, Sampling, most_tokens, refuse_contradictions
from edgespec.cli.run_options import LossyOptions, PromptOptions, RunDrafting, RunLength, RunOutput
from edgespec.decoding.choices import DRAFTLESS
from edgespec.errors import NodeLost, UsageError
from edgespec.models.registry import load_registry
from edgespec.models.resolve import model_named

if TYPE_CHECKING:
    from edgespec.decoding.options import Options
    from edgespec.engine.stream import Stream


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
    _refuse_contradictions(prompt, models, drafting, lossy, output)
    options = _options(prompt, drafting, lossy, length, sampling)
    from edgespec.cli.render import ExplainedSteps
    from edgespec.decoding.grammar.grammar import Grammar
    from edgespec.energy import EnergyMeter
    from edgespec.platform.signals import SignalPipe

    if output.show_draft and not out.is_terminal:
        message("--show-draft has an effect only in a terminal")
    source = output.structure.read()
    text = prompt.read()
    meter = None
    if output.counts_joules:
        meter = EnergyMeter.choose(assume_watts=output.assume_watts, on_message=message)
    drafter = drafting.chosen(cascade=lossy.mode == "cascade")
    names = models.pull(drafter, writes=lossy.mode == "cascade")
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
            for warning in source.warnings:
                message(f"{source.name}: not enforced: {warning}")
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
        n_predict=most_tokens(length.n_predict),
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
