"""What a generation asks for while it runs: passes of the models, and what to draft next.

A generation does not evaluate anything itself: it yields what it wants and is sent the answer. So one loop is
written once, and whoever runs it may answer many generations at the same time: one pass of a model for all of
them (`evaluate`), one decision over all that they could draft (`drafting.bids`). `alone` runs one by itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edgespec.llama.batch import Inputs
from edgespec.llama.outputs import Features, Rows
from edgespec.llama.session import Session


class Ask(ABC):
    """Something that a generation waits for."""

    __slots__ = ()

    @abstractmethod
    def answer(self) -> Any:  # noqa: ANN401 - each kind has its own
        """Return the answer for one generation that runs by itself."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A pass that was made."""

    rows: Rows
    """The logits that were asked for; valid until the next pass of that model."""
    seconds: float
    """Of the whole pass."""
    n_tokens: int
    """In the whole pass, others' among them."""
    features: Features | None = None
    """The hidden states of the tokens asked about, if they were asked for; valid as long as `rows`."""


@dataclass(frozen=True, slots=True)
class Pass(Ask):
    """Evaluate tokens after a session's timeline: the arguments of `Session.piece`. Answer: Evaluated."""

    session: Session
    tokens: Sequence[int]
    n_logits: int = 1
    parents: Sequence[int] | None = None
    inputs: Inputs | None = None
    with_features: bool = False
    """Whether the hidden states of the tokens are wanted."""

    @property
    def n_outputs(self) -> int:
        """Tokens whose logits the library computes."""
        return len(self.tokens) if self.with_features and self.session.all_logits else self.n_logits

    def answer(self) -> Evaluated:
        """Evaluate it by itself."""
        return evaluate([self])[0]


@dataclass(frozen=True, slots=True)
class TargetPass(Pass):
    """A pass of the target, with which a step ends."""


@dataclass(frozen=True, slots=True)
class DraftPass(Pass):
    """A pass of the draft model, of which a step may have several."""


def evaluate(passes: Sequence[Pass]) -> list[Evaluated]:
    """Make one pass for all `passes`, whose sessions share a cache. Raises what `Cache.eval` raises."""
    started = time.perf_counter()
    first, features = passes[0], None
    with_features = any(p.with_features for p in passes)
    if len(passes) == 1 and first.inputs is None and not with_features:
        rows = [first.session.eval(first.tokens, n_logits=first.n_logits, parents=first.parents)]
    else:
        pieces = [
            p.session.piece(p.tokens, n_logits=p.n_logits, parents=p.parents, inputs=p.inputs) for p in passes
        ]
        cache = first.session.cache
        rows = cache.eval(pieces, with_features=with_features)
        features = cache.features or None
    seconds = time.perf_counter() - started
    n_tokens = sum(len(p.tokens) for p in passes)
    return [
        Evaluated(found, seconds, n_tokens, features[i] if features else None) for i, found in enumerate(rows)
    ]


Made = TypeVar("Made")


def alone(work: Generator[Ask | Made, Any, None]) -> Generator[Made]:
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


def finished(work: Generator[Ask, Any, Returned]) -> Returned:
    """Return what `work` returns when all that it asks for is answered by itself."""
    answer: Any = None
    while True:
        try:
            answer = work.send(answer).answer()
        except StopIteration as end:
            found: Returned = end.value
            return found
