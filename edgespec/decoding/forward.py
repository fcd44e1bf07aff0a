"""Forward passes that a generation asks for while it runs, and how one is run by itself.

A generation evaluates nothing: it yields what it wants and is sent the answer. So one loop is written once,
and whoever runs it may answer many generations at the same time: one pass of a model for all of them
(`KVCache.forward`), one decision over all that they could draft (`drafting.bids`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from edgespec.decoding.session import ForwardResult, Inputs, ModelSession, SequenceTokens


class Ask(ABC):
    """Something that a generation waits for."""

    __slots__ = ()

    @abstractmethod
    def answer(self) -> Any:  # noqa: ANN401 - each kind has its own
        """Return the answer for one generation that runs by itself."""


class Forward(SequenceTokens, Ask):
    """A forward pass over tokens after a session's sequence. Its answer is a ForwardResult."""

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

    def answer(self) -> ForwardResult:
        """Run it by itself."""
        return self.session.cache.forward([self])[0]


class TargetForward(Forward):
    """A pass of the target, with which a step ends."""

    __slots__ = ()


class DraftForward(Forward):
    """A pass of the draft model, of which a step may have several."""

    __slots__ = ()


Event = TypeVar("Event")


def run_alone(work: Generator[Ask | Event, Any, None]) -> Generator[Event]:
    """Run one generation by itself: answer what it asks for, and yield the rest."""
    answer: Any = None
    try:
        while True:
            made = work.send(answer)
            answer = None
            if isinstance(made, Ask):
                answer = made.answer()
            else:
                yield made
    except StopIteration:
        return
    finally:
        work.close()


Returned = TypeVar("Returned")


def run_to_end(work: Generator[Ask, Any, Returned]) -> Returned:
    """Return what `work` returns when all that it asks for is answered by itself."""
    answer: Any = None
    while True:
        try:
            answer = work.send(answer).answer()
        except StopIteration as end:
            found: Returned = end.value
            return found
