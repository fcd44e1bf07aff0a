"""Forward passes that a generation asks for while it runs, and how one runs by itself.

A generation yields the target's pass that it needs next and is sent the result. So one loop is written once,
and whoever runs it may answer many generations with one pass for all of them (`KVCache.forward`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from edgespec.decoding.session import ForwardResult, Inputs, ModelSession, SequenceTokens


class Forward(SequenceTokens):
    """A forward pass over tokens after a session's sequence."""

    __slots__ = ("session",)

    def __init__(
        self,
        session: ModelSession,
        tokens: Sequence[int],
        n_logits: int = 1,
        parents: Sequence[int] | None = None,
        *,
        inputs: Inputs | None = None,
        with_features: bool = False,
        with_last_states: bool = False,
    ) -> None:
        """Ask for a pass of `session`; the other arguments are the fields of SequenceTokens."""
        super().__init__(session.sequence, tokens, n_logits, parents, inputs, with_features, with_last_states)
        self.session = session

    @property
    def n_outputs(self) -> int:
        """Tokens whose logits the library computes."""
        return len(self.tokens) if self.with_features and self.session.all_logits else self.n_logits

    def run(self) -> ForwardResult:
        """Make the pass with nothing else in it, and return its result."""
        return self.session.cache.forward([self])[0]


class TargetForward(Forward):
    """A pass of the target, with which a step ends."""

    __slots__ = ()


class DraftForward(Forward):
    """A pass of the draft model, of which a step may have several."""

    __slots__ = ("finish",)

    finish: Callable[[ForwardResult], ForwardResult]
    """Returns what the draft model makes of the pass's result, and takes note of the pass."""


Event = TypeVar("Event")


def run_alone(work: Generator[Forward | Event, Any, None]) -> Generator[Event]:
    """Run one generation by itself: run the passes that it asks for, and yield the rest."""
    result: ForwardResult | None = None
    try:
        while True:
            made = work.send(result)
            result = None
            if isinstance(made, Forward):
                result = made.run()
            else:
                yield made
    except StopIteration:
        return
    finally:
        work.close()
