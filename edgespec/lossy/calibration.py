"""The threshold that wakes the target of a cascade: what was measured of a pair, kept beside its profile.

    CACHE/profiles/TARGET+DRAFT-HASH.calibration.json       a choice for each signal and span (tradeoff.py)

Unlike a profile it does not depend on the machine: only on the models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from edgespec.choices import Signal
from edgespec.errors import UsageError
from edgespec.llama.fingerprints import file_fingerprint
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.options import Span, Waking
from edgespec.platform.files import cache_root, write_atomically

FORMAT = 1

_LONGEST_STEM = 60  # characters of a model's name in a file's

Measure = Literal["tokens", "pass@1"]
"""What is lost: tokens that the target would have written otherwise, or problems of HumanEval solved."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one threshold costs and saves."""

    threshold: float
    window: int
    loss: float
    """Share of the tokens, or of the problems that the target alone solves less those solved so."""
    error: float
    """Its standard error, over prompts."""
    target_share: float
    """Share of the tokens that the target writes."""
    kl: float | None = None
    """Mean divergence of what writes a token from the target, in nats a token; 0 where that is itself."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The threshold of one signal and span, and what it was chosen from."""

    signal: Signal
    span: Span
    measure: Measure
    asked: float
    """The loss that was allowed."""
    point: Point
    curve: tuple[Point, ...]
    """From the small model alone to the target alone."""
    suite: str
    n_prompts: int
    n_tokens: int
    date: str

    @property
    def waking(self) -> Waking:
        """What a cascade is told."""
        return Waking(self.signal, self.point.threshold, self.point.window, self.span)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All choices of a pair."""

    target: str
    """`file_fingerprint` of its file."""
    draft: str
    choices: dict[str, Choice] = field(default_factory=dict)
    """By signal and span, as "margin 16"."""
    format: int = FORMAT

    def with_choices(self, choices: Sequence[Choice]) -> Calibration:
        """Return it with these in place of older ones of the same signal and span."""
        return replace(self, choices={**self.choices, **{_name(c.signal, c.span): c for c in choices}})


def calibration_path(target: GGUFHeader, draft: GGUFHeader) -> Path:
    """Return where the calibration of a pair is, or would be. Raises UsageError: no home directory."""
    names = "+".join(
        re.sub(r"[^A-Za-z0-9._@-]", "_", one.path.stem)[:_LONGEST_STEM] for one in (target, draft)
    )
    digest = hashlib.sha256(
        json.dumps([file_fingerprint(target), file_fingerprint(draft)]).encode()
    ).hexdigest()[:16]
    return cache_root() / "profiles" / f"{names}-{digest}.calibration.json"


def load(target: GGUFHeader, draft: GGUFHeader) -> Calibration:
    """Return what is kept of a pair, an empty calibration where nothing is.

    Raises UsageError for a file that makes no sense, or is a newer edgespec's.
    """
    empty = Calibration(file_fingerprint(target), file_fingerprint(draft))
    file = calibration_path(target, draft)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Calibration)
        _ = [choice.waking for choice in found.choices.values()]  # refuses what no threshold can be
    except FileNotFoundError:
        return empty
    except (msgspec.MsgspecError, UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"{file}: damaged ({error}); delete it and run `edgespec calibrate`") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; give --threshold") from None
    if found.format != FORMAT or (found.target, found.draft) != (empty.target, empty.draft):
        raise UsageError(
            f"{file}: of another edgespec or other models; delete it and run `edgespec calibrate`"
        )
    return found


def store(target: GGUFHeader, draft: GGUFHeader, choices: Sequence[Choice]) -> Path:
    """Keep `choices`, beside those of other signals and spans, and return the file. Raises OSError."""
    try:
        kept = load(target, draft)
    except UsageError:  # damaged, or another's: what is new takes its place
        kept = Calibration(file_fingerprint(target), file_fingerprint(draft))
    file = calibration_path(target, draft)
    data = msgspec.json.format(msgspec.json.encode(kept.with_choices(choices)), indent=1)
    write_atomically(file, data + b"\n")
    return file


def calibrated(target: GGUFHeader, draft: GGUFHeader, waking: Waking) -> Waking:
    """Return `waking` with the threshold and window that were chosen for its signal and span.

    Raises UsageError where none was: what to run.
    """
    kept = load(target, draft)
    found = kept.choices.get(_name(waking.signal, waking.span))
    if found is None:
        span = "" if waking.span == Waking().span else f" --span {waking.span}"
        raise UsageError(
            f"--mode cascade: no threshold is known of these models for --signal {waking.signal}{span}; "
            f"run `edgespec calibrate{span}` with them, or give --threshold"
        )
    return found.waking


def _name(signal: Signal, span: Span) -> str:
    return f"{signal} {span}"
