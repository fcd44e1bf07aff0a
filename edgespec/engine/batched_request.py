"""One request of a batcher: its generation, and the part of it that the next pass takes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from edgespec.decoding.forward import TargetForward
from edgespec.decoding.generate import Generation, GenerationEvent
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.drafting.scheduler import Scheduler
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.llama.session import Session

PREFILL_CHUNK = 64
"""Most prompt tokens prefilled in a pass in which others decode."""


@dataclass(eq=False, slots=True)
class BatchedRequest:
    """A generation under way, and who is told of its events."""

    generation: Generation
    session: Session
    drafter: TreeDrafter | None
    """None for a request that is decoded plainly, or whose drafter decides by itself."""
    on_made: Callable[[GenerationEvent], None]
    on_end: Callable[[BaseException | None], None]
    """Called when it ends by itself, or with what ended it."""
    work: Generator[TargetForward | GenerationEvent, Any] = field(init=False)
    ask: TargetForward | None = None
    """The pass it waits for; None: it can go on, or drafts."""
    n_held: int = 0
    """Tokens of the sequence before the target's pass that it asks for."""
    is_preempted: bool = False
    is_running: bool = True

    def __post_init__(self) -> None:
        self.work = self.generation.work()

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of its drafter."""
        return self.drafter.scheduler if self.drafter else None

    @property
    def n_pending(self) -> int:
        """Tokens that the target's next pass always has for it; at most a chunk of a prompt."""
        return min(self.generation.n_pending, PREFILL_CHUNK)

    @property
    def n_rest(self) -> int:
        """Tokens that must be evaluated before it goes on, where it waits for the target."""
        assert self.ask  # noqa: S101 - for the type checker
        return self.n_held + len(self.ask.tokens) - self.session.n_past

    @property
    def is_prefilling(self) -> bool:
        """Whether it has more to read than a step can draft."""
        return self.ask is not None and self.n_rest > MAX_GAMMA + 2

    def rewind_lost_rows(self) -> None:
        """Take back tokens that an interrupted pass left in the cache, if their logits are wanted."""
        if self.ask and self.n_rest < self.ask.n_logits:
            self.session.rewind(self.n_held)

    def part(self, n: int) -> TargetForward:
        """Return the pass over the next `n` tokens of what it waits for."""
        ask = self.ask
        assert ask  # noqa: S101 - for the type checker
        n_past = self.session.n_past
        if n_past == self.n_held and n >= len(ask.tokens):
            return ask
        n = min(n, self.n_rest)
        if ask.with_features and n_past < self.n_held:  # read before it was preempted: without
            return TargetForward(self.session, self.generation.tokens[n_past : self.n_held][:n], 0)
        tokens = [*self.generation.tokens[n_past : self.n_held], *ask.tokens[max(0, n_past - self.n_held) :]]
        if n == len(tokens):
            return TargetForward(
                self.session,
                tokens,
                ask.n_logits,
                ask.parents,
                with_features=ask.with_features,
                with_last_states=ask.with_last_states,
            )
        n = min(n, len(tokens) - ask.n_logits)
        return TargetForward(self.session, tokens[:n], 0, with_features=ask.with_features)
