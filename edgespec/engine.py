"""The public engine: text from a pair of models, and what is kept from one generation to the next."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from edgespec.choices import DrafterName, KernelsChoice, Objective, Rule, check_choice
from edgespec.decoding.generate import Generation
from edgespec.decoding.loop import Task
from edgespec.drafting.earlier_texts import EarlierTexts
from edgespec.drafting.knowledge import Knowledge
from edgespec.drafting.model import DraftModel
from edgespec.drafting.proposal import DraftStep
from edgespec.drafting.scheduler import Policy
from edgespec.drafting.trees import TreeDrafter
from edgespec.energy import EnergyMeter
from edgespec.errors import UsageError
from edgespec.grammar.constraint import Constraint
from edgespec.grammar.masking import needs_all
from edgespec.llama.weights import Model
from edgespec.lossy.calibration import calibrated
from edgespec.lossy.cascade import Cascade
from edgespec.options import OptionKeywords, Options, Waking
from edgespec.pair import Pair, PairOptions
from edgespec.platform.closing import Closing
from edgespec.platform.signals import Cancellation
from edgespec.records import Mode, Provenance, Result
from edgespec.sampling import Coins
from edgespec.stream import Stream

_POLICIES: dict[DrafterName, Policy] = {
    # Sampled siblings are accepted too rarely for what they cost: docs/measurements/scheduler.md.
    "auto": Policy(suffix=True, model=True, staged=True, siblings=False),
    "tree": Policy(suffix=True, model=True, staged=True),
    "chain": Policy(suffix=True, model=True, staged=True, branches=False),
    "model": Policy(suffix=False, model=True, staged=False),
    "suffix": Policy(suffix=True, model=False, staged=False),
    "staged": Policy(suffix=False, model=True, staged=True),
}

_LEADING = 32  # tokens of a text


class Engine(Closing):
    """Text from `target`, helped by `draft`, distributed exactly as `target`'s alone.

    Models are paths, registry names or `hf:OWNER/REPO/FILE.gguf`. What is not given comes from the
    registry's pairs: the default pair, or the draft that goes with the target.
    A context manager; `close` frees everything. Not for use by two threads at once.

        with Engine(target="7b.gguf", draft="tiny.gguf") as engine:
            print(engine.generate("Write a quicksort").text)
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        drafter: DrafterName = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kernels: KernelsChoice = "auto",
        objective: Objective = "latency",
        profile: bool = True,
        history: bool = False,
        meter: EnergyMeter | None = None,
        signals: Cancellation | None = None,
        prefix_cache: int | None = None,
        on_message: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Load the models; missing ones are pulled.

        `drafter` says what may draft (choices.py); with "suffix" and "none" no draft model is loaded.
        `n_ctx`: context in tokens, by default as much as a generation needs. `n_threads`: by default one a
        physical core. `kernels`: "auto" uses edgespec's own where they can be used, "off" llama.cpp's.
        `objective`: what drafting saves, time or joules. `profile`: begin with what is stored of this pair
        on this machine, and store what was learnt when closed. `history`: draft from earlier prompts and
        answers on disk, and add those of this engine (docs/cache.md). `meter`: counts the joules of each
        generation. `signals`: lets Ctrl-C, or another thread, end a pass under way. `prefix_cache`: 0 keeps
        the last timeline, and reads of a prompt that goes on like it only what is new; more keeps others
        beside it, in so many bytes at most; None reads every prompt from its beginning. `on_message` takes
        lines that the user should know. Raises UsageError or EdgespecError: a model cannot be had, is not
        usable, or does not fit in memory.
        """
        check_choice("objective", objective, Objective)
        if objective == "energy" and not profile:
            problem = "takes joules from the profile: leave out profile=False"
            raise UsageError(problem, field="objective", value=objective)
        options = PairOptions(
            drafter=drafter,
            n_ctx=n_ctx,
            n_threads=n_threads,
            kernels=kernels,
            prefix_cache=prefix_cache,
            signals=signals,
        )
        self.meter = meter
        """Counts the joules of each generation from the next on; None: nothing does."""
        self._stream: Stream | None = None
        self._prompt: str | Sequence[int] = ""  # of that stream
        self._closed = False
        self._on_message = on_message
        self._signals = signals
        self._pair = Pair(target, draft, options)
        self._earlier_texts = EarlierTexts(
            self._pair.target_header, kept=history and drafter != "none", on_message=on_message
        )
        self._pair.load(on_message)
        try:
            self._knowledge = Knowledge(
                self.target,
                self.draft,
                kernels=self.kernels,
                n_threads=self.n_threads,
                objective=objective if drafter != "none" else "latency",
                kept=profile and drafter != "none",
                on_message=on_message,
            )
        except BaseException:
            self._pair.close()
            raise

    @property
    def target(self) -> Model:
        """The model whose distribution the text has."""
        return self._pair.target

    @property
    def draft(self) -> Model | None:
        """The model that drafts; None where none does."""
        return self._pair.draft

    @property
    def target_name(self) -> str:
        """The target as it was given, or by its name in the registry."""
        return self._pair.target_name

    @property
    def draft_name(self) -> str | None:
        """The draft as it was given, or by its name in the registry; None where none drafts."""
        return self._pair.draft_name

    @property
    def kernels(self) -> str:
        """The name of the kernels that the models run on."""
        return self._pair.kernels

    @property
    def n_threads(self) -> int:
        """Threads that compute."""
        return self._pair.n_threads

    def forget(self, *, tables: bool = False) -> None:
        """Forget the text of earlier generations and of the history; with `tables` also what was learnt."""
        self._end_stream(keep=False)
        self._earlier_texts.ready().forget()
        self._pair.forget()
        if tables:
            self._knowledge.forget()

    def prompt_tokens(self, prompt: str, *, system: str | None = None, chat: bool | None = None) -> list[int]:
        """Return the tokens of `prompt`, in the model's chat template where it has one.

        `chat` True or False forces or forbids the template; `system` is a system message and needs
        it. Raises UsageError for an impossible combination.
        """
        if chat is None:
            chat = self.target.chat_template is not None
        if not chat:
            if system is not None:
                problem = "needs a chat template: ask for one, and use a model that has one"
                raise UsageError(problem, field="system")
            return self.target.tokenize(prompt, add_special=True, parse_special=True)
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.target.tokenize_chat(messages)

    def stream(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        system: str | None = None,
        chat: bool | None = None,
        on_step: Callable[[DraftStep], None] | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> Stream:
        """Continue `prompt` (text, or token ids), a Token at a time.

        What is asked for is an `Options`, or its fields as keywords, which go before those of `options`.
        `system` and `chat`: as for `prompt_tokens`. `on_step` is told of every step of a drafter. An earlier
        stream of this engine is closed. Raises UsageError for bad values, EdgespecError for a prompt longer
        than the context.
        """
        called = time.perf_counter()
        if self._closed:
            raise UsageError("the engine is closed")
        task = self._task(prompt, (options or Options()).changed(**keywords), on_step)
        self._end_stream()
        self._prompt = prompt
        tokens = (
            self.prompt_tokens(prompt, system=system, chat=chat) if isinstance(prompt, str) else [*prompt]
        )
        if not tokens:
            raise UsageError("the prompt is empty")
        loop = self._cascade(task, tokens) if task.options.cascade else self._exact(task, tokens)
        window = None
        if self.meter:
            began = time.perf_counter()
            window = self.meter.begin()
            loop.mark = window.mark
            called += time.perf_counter() - began  # its own time is not the generation's
        if self._signals:
            self._signals.drain()
        drafts = task.policy is not None and task.policy.model
        self._stream = Stream(
            loop,
            self.target,
            Provenance(
                target=self.target_name,
                draft=self.draft_name if task.options.cascade or drafts else None,
                kernels=self.kernels,
                seed=task.coins.seed if task.is_reproducible else None,
                mode=task.mode,
            ),
            stop=task.options.stop,
            called=called,
            window=window,
        )
        return self._stream

    def _task(
        self,
        prompt: str | Sequence[int],
        options: Options,
        on_step: Callable[[DraftStep], None] | None,
    ) -> _Task:
        """Decide what `options` leave open. Raises UsageError for what this pair cannot do."""
        if options.cascade:
            options = replace(options, cascade=self._resolved(options.cascade))
        constraint = None
        if options.grammar:
            if options.grammar.model is not self.target:
                problem = f"made for another model than {self.target_name}"
                raise UsageError(problem, field=options.grammar.name)
            constraint = options.grammar.begin(options.params)
        policy = self._policy(options)
        return _Task(
            prompt=prompt,
            options=options,
            coins=Coins(secrets.randbits(32) if options.seed is None else options.seed),
            rule=_rule(options, constraint, drafts=policy is not None),
            policy=policy,
            constraint=constraint,
            on_step=on_step,
        )

    def _policy(self, options: Options) -> Policy | None:
        """Return what may be drafted; None to decode plainly."""
        name = options.drafter or self._pair.options.drafter
        if name == "none" or options.gamma == 0 or not self.target.can_rewind:
            return None
        policy = replace(_POLICIES[name], gamma=options.gamma)
        if policy.model and self.draft is None:
            if self._pair.draft_is_stuck and not policy.suffix:
                return None
            if not policy.suffix:
                raise UsageError("no draft model was loaded", field="drafter", value=name)
            policy = replace(policy, model=False, staged=False)
        if options.cascade and options.cascade.span != "rest":
            # A store would take up the text anew for each span.
            policy = replace(policy, suffix=False, model=True, staged=False)
        return policy

    def check_cascade(self) -> Model:
        """Return the draft model if it can write in a cascade. Raises UsageError where it cannot."""
        return self._pair.check_cascade()

    def _resolved(self, cascade: Waking) -> Waking:
        """Return `cascade` with a threshold: its own, or the calibrated one of this pair.

        Raises UsageError where this pair cannot run in a cascade, or has not been calibrated.
        """
        draft = self.check_cascade()
        if cascade.threshold is not None:
            return cascade
        return calibrated(self.target.header, draft.header, cascade)

    def _exact(self, task: _Task, tokens: list[int]) -> Generation:
        options = task.options
        n_ctx = self._pair.needed_ctx(len(tokens), options.n_predict)
        target = self._pair.target_session(n_ctx)
        n_known = self._pair.prepare(target, tokens)
        drafter = None
        if task.policy:
            wanted = task.policy.model
            model = self._pair.draft_model(n_ctx, len(tokens), options.n_predict) if wanted else None
            drafter = self._drafter(task.policy, model, task)
        return Generation(target, drafter, tokens, task, n_ctx=n_ctx, n_known=n_known)

    def _cascade(self, task: _Task, tokens: list[int]) -> Cascade:
        n_ctx = self._pair.needed_ctx(len(tokens), task.options.n_predict)
        target = self._pair.target_session(n_ctx)
        small = self._pair.small_model(n_ctx)
        drafter = self._drafter(task.policy, small, task) if task.policy else None
        return Cascade(target, small, tokens, task, drafter=drafter, n_ctx=n_ctx)

    def _drafter(self, policy: Policy, model: DraftModel | None, task: _Task) -> TreeDrafter:
        scheduler = self._knowledge.scheduler(policy, task.prompt, greedy=task.options.params.greedy)
        return TreeDrafter(
            scheduler,
            suffix=self._earlier_texts.ready(),
            model=model,
            is_eog=self.target.is_eog,
            clocks=self._knowledge.clocks,
            on_step=task.on_step,
            constraint=task.constraint,
        )

    def _end_stream(self, *, keep: bool = True) -> None:
        """End the generation under way; keep what it wrote, unless it was kept before."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        result = stream.result
        if result.stop_reason in ("eog", "stop", "length"):
            unfinished = result.stop_reason == "length"
            self._knowledge.answered(self._prompt, len(result.token_ids), unfinished=unfinished)
        if keep:
            # Of a conversation that goes on, what came before is kept already: but for what leads to the new.
            self._earlier_texts.keep(stream.timeline[max(0, result.n_cached - _LEADING) :])

    def generate(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        system: str | None = None,
        chat: bool | None = None,
        on_step: Callable[[DraftStep], None] | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> Result:
        """Continue `prompt` to the end and return the Result; arguments as for `stream`."""
        stream = self.stream(prompt, options, system=system, chat=chat, on_step=on_step, **keywords)
        for _ in stream:
            pass
        return stream.result

    def close(self) -> None:
        """Keep what was learnt and free models and sessions; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end_stream()
            self._knowledge.store(self._on_message)
            self._pair.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task(Task):
    """A loop's task, and what its drafter is made of."""

    prompt: str | Sequence[int]
    policy: Policy | None
    """What may be drafted; None to decode plainly."""
    on_step: Callable[[DraftStep], None] | None

    @property
    def mode(self) -> Mode:
        """Whether the text is the target's own, and if not, why."""
        return "cascade" if self.options.cascade else "lenient" if self.options.lenience < 1.0 else "exact"

    @property
    def is_reproducible(self) -> bool:
        """Whether the seed alone decides the text.

        With the other rules it depends on what was drafted, and that on timing and on what was learnt before.
        """
        return self.policy is None or (self.rule == "match" and self.options.lenience == 1.0)


def _rule(options: Options, constraint: Constraint | None, *, drafts: bool) -> Rule:
    """Return the rule that was asked for, or the one that suits best."""
    if options.lenience < 1.0:
        return "match" if options.params.greedy else "chain"
    if options.rule:
        return options.rule
    if options.cascade or options.seed is not None or options.params.greedy or not drafts:
        return "match"
    # By the match rule a grammar judges only the rows of what is emitted.
    return "match" if constraint and needs_all(options.params) else "block"
