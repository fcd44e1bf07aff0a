"""The records of a benchmark, from which every table is made, and their JSON; the variants of its runs.

Outcome                the machine, the versions, the settings, the warnings
  Cell  x n            a target, a draft (or none) and kernels; or why it could not run
    Run x n            one generation: a prompt, a variant to generate, a round
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from edgespec.apps.bench.quantizations import FileFacts
from edgespec.decoding.choices import DrafterChoice, DrafterName, Signal
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.options import SPAN, Options, Span, WakePolicy
from edgespec.drafting.plugin import find_drafter
from edgespec.errors import UsageError
from edgespec.platform.files import own_file, write_atomically
from edgespec.platform.machine import BUSY
from edgespec.platform.metering import Measurement
from edgespec.platform.plugins import offered

PLAIN = "plain"
"""The variant that every other is compared with: the target alone, with the cell's kernels."""

PEER = "llama.cpp "
"""Prefix of the variants of llama.cpp, and of any other server."""

WorkProgressFn = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Run:
    """One generation. Times in seconds; None: a peer does not report it."""

    prompt: str
    """The prompt's id, unique in its suite."""
    category: str
    variant: str
    """PLAIN; a drafter ("auto", "model", ...), with "-GAMMA" for a fixed draft length; a variant that is not
    exact ("cascade@0.4", "lenience-0.5"); or a peer's variant."""
    round: int
    prompt_tokens: int
    tokens: int
    """Emitted tokens, without an end-of-generation token."""
    total_s: float
    """From the call to the last token; a peer's: as its client saw it."""
    ttft_s: float | None
    """From the call to the first token."""
    prefill_s: float | None
    """Time in which the target reads the prompt."""
    draft_prefill_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    rest_s: float | None = None
    n_emitted: int | None = None
    """Tokens emitted by the steps after the prompt's pass, with end-of-generation tokens: tau's numerator."""
    histogram: tuple[tuple[int, int, int], ...] | None = None
    """(drafted, accepted, steps): the source of tau, alpha and the acceptance by position."""
    stop_reason: str = ""
    text_sha256: str | None = None
    """`text_hash` of the emitted token ids."""
    energy: Measurement | None = None
    """None: not asked for. A Measurement without joules: could not be measured."""
    exact: bool = True
    """Whether the text is distributed as the target's own."""
    target_share: float = 1.0
    """Share of the tokens that the target wrote or verified."""
    agreement: float | None = None
    """Share of the tokens that are the target's likeliest at their place; None: exact variant, or sampled."""
    kl: float | None = None
    """Mean KL divergence, in nats, of each token's writer from the target; None: exact variant, or
    lenience."""
    right: bool | None = None
    """Whether the text is the prompt's answer, character by character; None: the prompt has none."""

    @property
    def whole_tokens_per_s(self) -> float | None:
        """Tokens over the time of the whole generation, reading the prompt included."""
        return self.tokens / self.total_s if self.total_s > 0 and self.tokens else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first over the time after the first."""
        if self.ttft_s is None or self.tokens < 2 or self.total_s <= self.ttft_s:
            return None
        return (self.tokens - 1) / (self.total_s - self.ttft_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of target, draft and kernels, measured or skipped."""

    target: str
    """The name of one of the outcome's models."""
    draft: str | None
    """The name of another of the outcome's models; None: no draft model."""
    kernels: str
    """The instruction set of edgespec's kernels, or "stock"; of a skipped cell "auto" or "off", as asked."""
    runs: tuple[Run, ...] = ()
    peak_rss_bytes: int | None = None
    """The largest resident memory of the process, mapped model files included."""
    skipped: str = ""
    """Why it could not run, in one line; "" if it ran."""


@dataclass(frozen=True, slots=True)
class AccuracyScore:
    """Accuracy of a target, compared with its best quantization."""

    target: str
    """The model, by name."""
    reference: str
    """The model it is compared with, by name; its own name for the reference itself."""
    kernels: str
    """The kernels used: the instruction set of edgespec's, or "stock"."""
    n_tokens: int
    """Scored tokens of the text."""
    perplexity: float
    kl: float | None
    """Mean Kullback-Leibler divergence from the reference, in nats a token; None for the reference itself."""
    kl_error: float | None
    """Standard error of `kl`."""
    top1: float | None
    """Share of places where both models prefer the same token."""
    passed: int | None = None
    """Arithmetic problems whose greedy answer was exactly right; None: not asked for."""
    n_problems: int | None = None


@dataclass(frozen=True, slots=True)
class ProblemsSolved:
    """Number of arithmetic problems that a variant that is not exact answers exactly."""

    target: str
    draft: str
    kernels: str
    variant: str
    passed: int
    n_problems: int
    target_share: float
    """Share of the answers' tokens that the target wrote or verified."""


@dataclass(frozen=True, slots=True)
class BenchmarkOutcome:
    """Everything recorded of a benchmark, as --json prints it and `compare` keeps it."""

    kind: str
    """"bench" or "compare"."""
    date: str
    """ISO 8601, to the second."""
    machine: Mapping[str, Any]
    """Facts of the machine and the versions: name -> text or number."""
    settings: Mapping[str, Any]
    """Settings asked for: temperature, tokens, rounds, seed, ..."""
    suite: Mapping[str, Any]
    """Name, file hash, prompts by category."""
    models: Mapping[str, FileFacts]
    """The models' facts, by name."""
    cells: tuple[Cell, ...]
    accuracy: tuple[AccuracyScore, ...] = ()
    """One for each target with each of the kernels compared."""
    warnings: tuple[str, ...] = ()
    solved: tuple[ProblemsSolved, ...] = ()
    """Problems solved by variants that are not exact, if asked for."""
    format: int = 3
    """Version of the JSON."""

    @property
    def busy(self) -> str | None:
        """A sentence about how reliable the figures are if other programs ran meanwhile; else None."""
        if not any(BUSY in line for line in self.warnings):
            return None
        return (
            "The machine was busy: these figures measure scheduling, not kernels, and a baseline that had to "
            "wait flatters the others."
        )


def peer_of(variant: str) -> str | None:
    """Return the program whose variant this is, with its own kernels and memory; None: edgespec."""
    return PEER.strip() if variant.startswith(PEER) else None


def rotated(these: Sequence[_T], n: int) -> tuple[_T, ...]:
    """Return `these` rotated by `n` places, so that over all `n` each is first equally often."""
    first = n % len(these)
    return (*these[first:], *these[:first])


def text_hash(token_ids: Iterable[int]) -> str:
    """Return the SHA-256 of token ids written as decimal numbers separated by spaces."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()


def store(file: Path, key: str, value: object) -> None:
    """Store a value under a key, for `read_kept`. Raises OSError."""
    write_atomically(file, msgspec.json.encode((key, value)) + b"\n")


def is_kept(file: Path) -> bool:
    """Whether `store` wrote a file, by its beginning: the key is a SHA-256."""
    try:
        with own_file(file) as descriptor:
            return re.match(rb'\["[0-9a-f]{64}",', os.pread(descriptor, 68, 0)) is not None
    except OSError:
        return False


def read_kept(file: Path, key: str, kind: type[_T]) -> _T | None:
    """Return the value of `kind` that `store` wrote; None if it has another key, or is missing or damaged."""
    try:
        if not is_kept(file):
            return None
        stored_key, value = msgspec.json.decode(file.read_bytes(), type=tuple[str, Any])
        return msgspec.convert(value, kind) if stored_key == key else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


_VARIANT = re.compile(r"([a-z]+)(?:-([0-9]{1,9}))?")
_NUMBER = r"[0-9]{1,3}(?:\.[0-9]{1,9})?"
_CASCADE = re.compile(rf"cascade(?:-(margin|entropy))?(?:-(rest|[0-9]{{1,9}}))?(?:@({_NUMBER}))?")
_LENIENT = re.compile(rf"lenience-({_NUMBER})")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of drafting that is measured: drafter, length, and what is not exact."""

    name: str
    drafter: str
    """A word of `DrafterName`, or the name of one that a user wrote."""
    gamma: int | None = None
    cascade: WakePolicy | None = None
    lenience: float = 1.0

    @property
    def chosen(self) -> DrafterChoice:
        """The drafter, of a user's code as it is now. Raises UsageError."""
        return find_drafter(self.drafter)

    @property
    def needs_model(self) -> bool:
        """Whether this variant needs a draft model."""
        return self.drafter in ("model", "staged") or self.cascade is not None

    @property
    def exact(self) -> bool:
        """Whether its texts are distributed as the target's own."""
        return self.cascade is None and self.lenience == 1.0


PLAIN_VARIANT = Variant(PLAIN, "none")


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Return the variants named in `text`, separated by commas: drafters, with "-GAMMA" for a fixed length.

    Variants that are not exact: "cascade", with "-SIGNAL", "-SPAN" and "@THRESHOLD" for other values than the
    defaults, and "lenience-L". Plain decoding, always measured, is not named. Raises UsageError.
    """
    found = []
    for name in names_in(text, "variants"):
        try:
            found.append(_lossy(name) or _drafting(name))
        except UsageError as error:
            raise UsageError(str(error.problem), field="variants", value=name) from None
    return tuple(found)


def names_in(text: str, field: str) -> list[str]:
    """Return the comma-separated names in `text`, the value of `field`. Raises UsageError."""
    names = [name for name in (part.strip() for part in text.split(",")) if name]
    if not names:
        raise UsageError("name at least one", field=field)
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"{twice[0]} is named twice", field=field)
    return names


def _drafting(name: str) -> Variant:
    if ":" in name or name in offered("edgespec.drafters"):
        find_drafter(name)
        return Variant(name, name)
    found = _VARIANT.fullmatch(name)
    drafters = [drafter for drafter in get_args(DrafterName) if drafter != "none"]
    if not found or found[1] not in drafters:
        raise UsageError(
            f"must be one of {', '.join(drafters)}, or such as model-3, cascade@0.4, lenience-0.5"
        )
    gamma = int(found[2]) if found[2] else None
    if gamma is not None and not 1 <= gamma <= MAX_GAMMA:
        raise UsageError(f"the length must be 1 to {MAX_GAMMA}")
    return Variant(name, found[1], gamma)


def _lossy(name: str) -> Variant | None:
    """Return the variant that is not exact named `name`; None if there is no such variant."""
    if found := _CASCADE.fullmatch(name):
        signal: Signal = "entropy" if found[1] == "entropy" else "margin"
        span: Span = "rest" if found[2] == "rest" else int(found[2] or SPAN)
        threshold = float(found[3]) if found[3] else None
        return Variant(name, "auto", cascade=WakePolicy(signal, threshold, span=span))
    if found := _LENIENT.fullmatch(name):
        return Variant(name, "auto", lenience=Options(lenience=float(found[1])).lenience)
    return None
