"""The records of a benchmark: raw runs, in cells, in one outcome. Every table is made from these.

    Outcome                the machine, the versions, the settings, what was warned of
      Cell  x n            a target, a draft (or none) and kernels; or why it could not run
        Run x n            one generation: a prompt, a way to generate, a round

They are written as JSON and read again: a comparison that was stopped goes on from its cells' files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from edgespec.energy import Measurement
from edgespec.errors import EdgespecError
from edgespec.models.quantizations import ModelFacts

PLAIN = "plain"
"""The way that every other is compared with: the target alone, with the cell's kernels."""

PEER = "llama.cpp "
"""The ways of another program begin with it: their kernels and memory are not edgespec's."""

FORMAT = 1
"""Of the JSON; another one is not read."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Run:
    """One generation. Times in seconds; what a peer does not tell is None."""

    prompt: str
    """The prompt's id, unique in its suite."""
    category: str
    way: str
    """PLAIN; a drafter ("auto", "model", ...), with "-GAMMA" where the length was fixed; one that is not
    exact ("cascade@0.4", "lenience-0.5"); or a peer."""
    round: int
    prompt_tokens: int
    tokens: int
    """Emitted, without an end-of-generation token."""
    total_s: float
    """From the call to the last token; of a peer: reading the prompt and decoding, as it says itself."""
    ttft_s: float | None
    """To the first token."""
    prefill_s: float | None
    """The target reading the prompt."""
    draft_prefill_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    rest_s: float | None = None
    n_emitted: int | None = None
    """Emitted by the steps after the prompt's pass, end-of-generation tokens included: tau's numerator."""
    histogram: tuple[tuple[int, int, int], ...] | None = None
    """(drafted, accepted, steps): the source of tau, alpha and the acceptance by position."""
    stop_reason: str = ""
    text_sha256: str | None = None
    """Of the emitted token ids, as decimal numbers with spaces."""
    energy: Measurement | None = None
    """None where it was not asked for; a Measurement without joules where it could not be had."""
    exact: bool = True
    """Whether the text is distributed as the target's own."""
    target_share: float = 1.0
    """Of the tokens, the share that the target wrote or judged."""
    agreement: float | None = None
    """Of the tokens, the share that the target likes best after those before; None: exact, or random."""
    kl: float | None = None
    """Mean KL divergence of what wrote each token from the target, nats; None: exact, or lenient."""

    @property
    def whole_tokens_per_s(self) -> float | None:
        """Tokens over the whole generation, the prompt's reading included."""
        return self.tokens / self.total_s if self.total_s > 0 and self.tokens else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first over the time after the first."""
        if self.ttft_s is None or self.tokens < 2 or self.total_s <= self.ttft_s:
            return None
        return (self.tokens - 1) / (self.total_s - self.ttft_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination that was measured, or `skipped` for a reason."""

    target: str
    """The name of one of the outcome's models."""
    draft: str | None
    """Another's; None: no draft model."""
    kernels: str
    """The instruction set of edgespec's kernels, or "stock"; of a skipped cell, as was asked: auto or off."""
    runs: tuple[Run, ...] = ()
    peak_rss_bytes: int | None = None
    """The largest resident memory of the process, mapped model files included."""
    skipped: str = ""
    """Why it could not run, in one line; "" where it did."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What a target's answers are worth beside those of the best quantization of it."""

    target: str
    """The model, by name."""
    reference: str
    """The model it is compared with, by name; its own name for the reference itself."""
    kernels: str
    """With which it was computed: the instruction set of edgespec's, or "stock"."""
    n_tokens: int
    """Scored tokens of the text."""
    perplexity: float
    kl: float | None
    """Mean Kullback-Leibler divergence from the reference, in nats a token; None for the reference itself."""
    kl_error: float | None
    """Its standard error."""
    top1: float | None
    """Share of tokens where both prefer the same one."""
    passed: int | None = None
    """HumanEval problems whose tests the greedy answer passed; None: not asked for."""
    n_problems: int | None = None


@dataclass(frozen=True, slots=True)
class Solved:
    """What a way that is not exact solves of HumanEval."""

    target: str
    draft: str
    kernels: str
    way: str
    passed: int
    n_problems: int
    target_share: float
    """Of the answers' tokens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All of a benchmark."""

    kind: str
    """bench or compare."""
    date: str
    """ISO 8601, to the second."""
    machine: Mapping[str, Any]
    """Facts of the machine and the versions: name -> text or number."""
    settings: Mapping[str, Any]
    """What was asked for: temperature, tokens, rounds, seed, ..."""
    suite: Mapping[str, Any]
    """Name, file hash, prompts by category."""
    models: Mapping[str, ModelFacts]
    """By name."""
    cells: tuple[Cell, ...]
    accuracy: tuple[Accuracy, ...] = ()
    """Of each target with each of the kernels that were compared."""
    warnings: tuple[str, ...] = ()
    solved: tuple[Solved, ...] = ()
    """By ways that are not exact, where it was asked for."""
    format: int = FORMAT

    def accuracy_of(self, cell: Cell) -> Accuracy | None:
        """Return the accuracy of a cell's target with its kernels; None where it was not measured."""
        wanted = cell.target, cell.kernels
        return next((one for one in self.accuracy if (one.target, one.kernels) == wanted), None)

    def solved_by(self, cell: Cell, way: str) -> Solved | None:
        """Return what a way that is not exact solves; None where it was not asked for."""
        wanted = cell.target, cell.draft, cell.kernels, way
        return next((s for s in self.solved if (s.target, s.draft, s.kernels, s.way) == wanted), None)


def rotated(these: Sequence[_T], n: int) -> tuple[_T, ...]:
    """Return `these` in their order, beginning `n` places later: each is first as often."""
    first = n % len(these)
    return (*these[first:], *these[:first])


def as_json(record: object) -> bytes:
    """Return a record, one of those above or made of them, as one line of JSON."""
    return msgspec.json.encode(record)


def from_json(kind: type[_T], data: bytes | str, where: str) -> _T:
    """Return the record of `kind` that `as_json` made `data` of; `where` names its file.

    Raises EdgespecError in one line when it is no such record, or one of another format.
    """
    try:
        found = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        what = kind.__name__.lower()
        raise EdgespecError(f"{where}: holds no {what} that edgespec wrote: {error}") from None
    if isinstance(found, Outcome) and found.format != FORMAT:
        raise EdgespecError(f"{where}: written in format {found.format}; this edgespec reads {FORMAT}")
    return found
