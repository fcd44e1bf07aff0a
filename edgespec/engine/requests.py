"""The requests that an engine runs: their sessions and drafters, and what is kept when they end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from edgespec.decoding.choices import NamedDrafter
from edgespec.decoding.generate import Generation
from edgespec.decoding.loop import Event
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.earlier_texts import EarlierTexts
from edgespec.drafting.head_model import states_worth
from edgespec.drafting.learned_state import LearnedState
from edgespec.drafting.plugin import PluginDrafter
from edgespec.drafting.policy import Policy
from edgespec.drafting.proposal import DraftStep
from edgespec.drafting.scheduler import Scheduler
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.engine.batcher import BatchedRequest, Batcher, StepSummary
from edgespec.engine.lossy.cascade import Cascade
from edgespec.engine.pair import Pair
from edgespec.engine.plan import Plan
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.messages import MessageFn

_LEADING = 32  # tokens of a text
_SOON = 256  # tokens that a request is expected to need soon


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request under way, and the sessions and drafter that it has."""

    prompt: str | Sequence[int]
    plan: Plan
    loop: Generation | Cascade = field(init=False)
    session: Session | None = None
    draft: DraftModel | None = None
    drafter: TreeDrafter | None = None
    batched: BatchedRequest | None = None
    """Its entry in the batcher, where it shares passes."""
    events: Generator[Event] | None = None
    """Its events, where it runs by itself."""
    n_steps: int = 0
    shares: float = 0.0
    """The request's share of those steps: the sum of 1 / requests running."""

    @property
    def n_soon(self) -> int:
        """Tokens that it is expected to need in addition to those it has."""
        n_left = self.loop.n_left
        return _SOON if n_left is None else min(_SOON, n_left)


class RequestRunner:
    """Runs the requests under way, and tells their streams."""

    def __init__(
        self, pair: Pair, knowledge: LearnedState, earlier_texts: EarlierTexts, on_message: MessageFn
    ) -> None:
        """Run with `pair`, learn into `knowledge`, draft from `earlier_texts` and add to them.

        `on_message` takes lines that the user should know.
        """
        self._pair = pair
        self._knowledge = knowledge
        self._earlier_texts = earlier_texts
        self._on_message = on_message
        self._running: dict[Stream, RunningRequest] = {}
        self._unkept: list[list[int]] = []
        self.batcher: Batcher | None = None
        """The batcher that runs them; None before the first."""
        self._is_advancing = False

    @property
    def n_running(self) -> int:
        """Requests under way."""
        return len(self._running)

    @property
    def last_pass(self) -> StepSummary:
        """The last step's pass of the target."""
        return self.batcher.last if self.batcher else StepSummary()

    def has_room(self, n_prompt: int, n_predict: int | None) -> bool:
        """Say whether a request of `n_prompt` tokens, and `n_predict` to come, can begin now."""
        running = [one for stream, one in self._running.items() if not stream.finished]
        if len(running) >= self._pair.parallel:
            return False
        if not running or self.batcher is None:
            return True
        if any(one.batched is None or one.batched.is_preempted for one in running):
            return False
        held = sum(len(one.loop.tokens) + one.n_soon for one in running)  # prompts not yet prefilled included
        needed = n_prompt + min(_SOON, n_predict or _SOON)
        return held + needed <= self.batcher.sequences.cache.n_ctx

    def begin(
        self,
        prompt: str | Sequence[int],
        tokens: list[int],
        plan: Plan,
        on_step: Callable[[DraftStep], None] | None,
    ) -> RunningRequest:
        """Prepare a request over sessions that are large enough for it; `tokens` are those of its prompt.

        Raises UsageError if too many are under way, EdgespecError if it does not fit.
        """
        self._refuse_inside_step()
        if self.n_running >= self._pair.parallel:
            problem = "as many texts are being written: end one, or allow more"
            raise UsageError(problem, field="parallel", value=self._pair.parallel)
        if plan.options.cascade and self._pair.parallel > 1:
            raise UsageError("a cascade writes one text at a time: use an engine for one", field="cascade")
        running = RunningRequest(prompt, plan)
        try:
            running.loop = self._loop(running, tokens, on_step)
        except BaseException:
            self._release(running)
            raise
        return running

    def start(self, stream: Stream, running: RunningRequest) -> None:
        """Let `stream` be told what its loop does."""
        loop = running.loop
        self._running[stream] = running
        stream.on_closed = self._ended
        if isinstance(loop, Generation) and running.session and self.batcher:
            batched = BatchedRequest(loop, running.session, running.drafter, stream.take, stream.end)
            running.batched = batched
            self.batcher.add(batched)
            stream.advance = self.step
        else:
            running.events = loop.events()
            stream.advance = partial(self._advance, stream, running.events)

    def _advance(self, stream: Stream, events: Generator[Event]) -> None:
        """Let a loop that runs by itself go on, and tell its stream."""
        with self._advancing():
            try:
                stream.take(next(events))
            except StopIteration:
                stream.end()

    @contextmanager
    def _advancing(self) -> Iterator[None]:
        self._is_advancing = True
        try:
            yield
        finally:
            self._is_advancing = False

    def step(self) -> None:
        """Make one pass of the target for all requests: `Engine.step`."""
        if self.batcher:
            with self._advancing():
                self.batcher.step()
            n_running = max(1, len(self._running))
            for running in self._running.values():
                running.n_steps += 1
                running.shares += 1.0 / n_running

    def _loop(
        self, running: RunningRequest, tokens: list[int], on_step: Callable[[DraftStep], None] | None
    ) -> Generation | Cascade:
        """Return the loop of a request, over sessions that are large enough for it."""
        plan = running.plan
        n_predict = plan.options.n_predict
        n_ctx = self._pair.needed_ctx(len(tokens), n_predict)
        sequences = self._pair.sequences(n_ctx)
        if self.batcher is None or self.batcher.sequences is not sequences:
            self.batcher = Batcher(sequences, self._knowledge.clocks)
        drafter: TreeDrafter | PluginDrafter | None = None
        features = None
        if plan.options.cascade:
            small = self._pair.small_model(n_ctx)
            target = running.session = sequences.begin([0])
            if plan.policy:
                drafter = self._drafter(running, plan.policy, small, on_step)
            return Cascade(target, small, tokens, plan, drafter=drafter, n_ctx=n_ctx)
        # A prompt's logits are not kept: where they are asked for, all of it is prefilled.
        known = tokens[:1] if plan.options.prompt_logprobs else tokens
        target = running.session = sequences.begin(known)
        n_known = target.n_past
        if plan.plugin:
            drafter = self._plugin_drafter(plan, plan.plugin, tokens, on_step)
        if plan.policy:
            if plan.uses_model:
                running.draft = self._pair.begin_draft(n_ctx, len(tokens), n_predict)
            drafter = self._drafter(running, plan.policy, running.draft, on_step)
            features = running.draft.features if running.draft else None
            if features and running.drafter:
                # Asked when it is read: others may have begun by then, which are to share its passes.
                features.n_prompt = partial(
                    self._n_states, running.drafter.scheduler, target.model, len(tokens) - n_known, n_predict
                )
        return Generation(target, drafter, tokens, plan, n_ctx=n_ctx, n_known=n_known, features=features)

    def _plugin_drafter(
        self,
        plan: Plan,
        plugin: NamedDrafter,
        tokens: Sequence[int],
        on_step: Callable[[DraftStep], None] | None,
    ) -> PluginDrafter:
        if on_step:
            problem = f"is told of the scheduler's steps, and {plugin} drafts without a scheduler"
            raise UsageError(problem, field="on_step")
        target = self._pair.target
        return PluginDrafter(
            plugin,
            tokens,
            n_vocab=target.n_vocab,
            is_eog=plan.options.ends(target.is_eog),
            branches=not target.keeps_state,
            on_message=self._on_message,
        )

    def _n_states(self, scheduler: Scheduler, target: Model, n_unread: int, n_predict: int | None) -> int:
        """Return for how many tokens of a prompt, which is read now, hidden states are worth their cost."""
        return states_worth(scheduler, target, n_unread, n_predict, n_requests=max(1, self.n_running))

    def _drafter(
        self,
        running: RunningRequest,
        policy: Policy,
        model: DraftModel | None,
        on_step: Callable[[DraftStep], None] | None,
    ) -> TreeDrafter:
        plan = running.plan
        scheduler = self._knowledge.scheduler(
            policy, running.prompt, greedy=plan.options.params.greedy, gamma=plan.options.gamma
        )
        running.drafter = TreeDrafter(
            scheduler,
            suffix=self._earlier_texts.ready(),
            model=model,
            is_eog=plan.options.ends(self._pair.target.is_eog),
            clocks=self._knowledge.clocks,
            on_step=on_step,
            constraint=plan.constraint,
        )
        return running.drafter

    def end_all(self, why: str) -> None:
        """End the requests under way; `why` is told to those who read on, lest the text seem complete.

        Raises UsageError inside a step, whose requests cannot be ended.
        """
        self._refuse_inside_step()
        for stream in list(self._running):
            stream.cut(EdgespecError(f"this text was ended before it was complete: {why}"))

    def _refuse_inside_step(self) -> None:
        if self._is_advancing:
            raise UsageError("on_step was called in the middle of a text: begin and end others after it")

    def keep(self) -> None:
        """Store the texts that ended for drafting; until then they can be forgotten."""
        while self._unkept:
            self._earlier_texts.keep(self._unkept.pop(0))

    def forget(self) -> None:
        """End the requests under way, and forget the texts that were not stored yet."""
        self.end_all("the engine was told to forget")
        self._unkept.clear()

    def _ended(self, stream: Stream) -> None:
        """Keep what later requests can use of a stream that has ended, and free the rest."""
        running = self._running.pop(stream)
        if running.batched and self.batcher:
            self.batcher.close(running.batched)
        if running.events:
            running.events.close()
        if running.n_steps:
            stream.energy_share = running.shares / running.n_steps
        self._release(running)
        result = stream.result
        if result.stop_reason in ("eog", "stop", "length"):
            unfinished = result.stop_reason == "length"
            self._knowledge.answered(running.prompt, len(result.token_ids), unfinished=unfinished)
        # Earlier turns of a conversation are kept already: keep the new part and a few tokens before it.
        self._unkept.append(stream.tokens[max(0, result.n_cached - _LEADING) :])

    def _release(self, running: RunningRequest) -> None:
        if running.session and self.batcher:
            self.batcher.sequences.end(running.session)
        if running.draft:
            self._pair.end_draft(running.draft)
        if running.drafter:
            self._knowledge.ended(running.drafter.scheduler)
