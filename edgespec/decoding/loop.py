"""The interface of generation loops: a loop has a task, and its events tell what it wrote, and the time.

There are two: `Generation` (generate.py) is exact, `Cascade` (lossy/cascade.py) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.decoding.choices import Rule
from edgespec.decoding.grammar.constraint import Constraint
from edgespec.decoding.options import Options
from edgespec.decoding.records import Logprobs, Origin, StopReason, Tally
from edgespec.decoding.sampling import Coins
from edgespec.platform.metering import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a loop: the options, and what was decided where they leave it open."""

    options: Options
    rule: Rule
    coins: Coins
    constraint: Constraint | None = None
    """The options' grammar as a constraint of this text alone; the loop closes it at the end."""


class Event(Protocol):
    """Something that a loop has done; without tokens unless it says otherwise."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that were emitted."""
        return ()

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each of `tokens` comes from."""
        return ()

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        """Logprobs of each of `tokens`; none if not asked for."""
        return ()

    def add_to(self, tally: Tally) -> None:
        """Add what it counts, and the seconds that it took, to the totals of a text."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The target read the prompt, or in a cascade what it had not read, and sampled a token.

    `token` is None where none was asked for.
    """

    token: int | None
    seconds: float
    logprobs: tuple[Logprobs, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first token, which the prompt's pass gave; empty if none was emitted."""
        return () if self.token is None else (self.token,)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """("target",) for the first token; empty if none was emitted."""
        return () if self.token is None else ("target",)

    def add_to(self, tally: Tally) -> None:
        """Add the seconds in which the target read the prompt."""
        tally.prefill_s += self.seconds


@dataclass(frozen=True, slots=True)
class DraftPrefill(Event):
    """The drafter, or a cascade's small model, read the prompt."""

    seconds: float

    def add_to(self, tally: Tally) -> None:
        """Add the seconds in which the draft model read the prompt."""
        tally.draft_prefill_s += self.seconds


class Loop(Protocol):
    """Writes one text, step by step: plain, drafted or cascaded decoding."""

    mark: Callable[[Phase], None]
    """Told at the end of each phase which one it was; may be replaced before the first event."""
    stop_reason: StopReason
    """"interrupted" until the end is known."""

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was emitted."""

    @property
    def n_known(self) -> int:
        """Tokens at the start of the prompt that the target's cache held already."""

    @property
    def n_read(self) -> int:
        """Tokens that the target read in its prefills."""

    @property
    def n_prompt_read(self) -> int:
        """Tokens of the prompt that were read so far, `n_known` ones included; any thread may ask."""

    @property
    def prompt_logprobs(self) -> Sequence[Logprobs]:
        """Logprobs of each token of the prompt but the first, where asked for."""

    def events(self) -> Generator[Event]:
        """Write. After the last event, and when closed early, the caches hold a beginning of `tokens`."""

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted of each source of drafts."""

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now; None: not known."""

    def note(self) -> str:
        """Say in one sentence what was drafted or left to the small model, and why."""


def unmarked(_phase: Phase) -> None:
    """Do nothing at the end of a phase: nobody counts what it took."""
