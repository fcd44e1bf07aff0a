"""The threshold that wakes the target of a cascade, as it was calibrated for a pair and stored.

    CACHE/profiles/TARGET+DRAFT-HASH.calibration.json       a choice for each signal and span (teacher.py)

It depends on the models alone, where a profile depends on the machine too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from edgespec.decoding.choices import Signal
from edgespec.decoding.options import Span, Waking
from edgespec.errors import MessageFn, UsageError, describe_os_error, silent
from edgespec.llama.gguf_header import GGUFHeader, file_fingerprint
from edgespec.platform.kept import PROFILES, DamagedFileError, StateFile, parse_struct

FORMAT = 1

_LONGEST_STEM = 60  # characters of a model's name in a file's

LossMeasure = Literal["tokens", "pass@1"]
"""Unit of a loss: tokens that the target would have written otherwise. Older files have problems, too."""


@dataclass(frozen=True, slots=True)
class ThresholdPoint:
    """Loss and savings of one threshold."""

    threshold: float
    window: int
    loss: float
    """Share of the tokens that the small model writes and that are not the target's likeliest."""
    error: float
    """Its standard error, over prompts."""
    target_share: float
    """Share of the tokens that the target writes."""
    kl: float | None = None
    """Mean divergence from the target of the model that writes, in nats a token; 0 for the target itself."""


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """The threshold of one signal and span, and what it was chosen from."""

    signal: Signal
    span: Span
    measure: LossMeasure
    asked: float
    """The loss that was allowed."""
    point: ThresholdPoint
    curve: tuple[ThresholdPoint, ...]
    """From the small model alone to the target alone."""
    suite: str
    n_prompts: int
    n_tokens: int
    date: str

    @property
    def waking(self) -> Waking:
        """The options of a cascade with this threshold."""
        return Waking(self.signal, self.point.threshold, self.point.window, self.span)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The thresholds that were found for a pair, by signal and span."""

    target: str
    """`file_fingerprint` of its file."""
    draft: str
    choices: dict[str, ThresholdChoice] = field(default_factory=dict)
    """The choice for each signal and span, such as "margin 16"."""
    format: int = FORMAT

    def with_choices(self, choices: Sequence[ThresholdChoice]) -> Calibration:
        """Return the calibration with `choices` in place of older ones of the same signal and span."""
        return replace(self, choices={**self.choices, **{_name(c.signal, c.span): c for c in choices}})


def calibration_path(target: GGUFHeader, draft: GGUFHeader) -> Path:
    """Return where the calibration of a pair is, or would be. Raises UsageError: no home directory."""
    names = "+".join(
        re.sub(r"[^A-Za-z0-9._@-]", "_", one.path.stem)[:_LONGEST_STEM] for one in (target, draft)
    )
    digest = hashlib.sha256(
        json.dumps([file_fingerprint(target), file_fingerprint(draft)]).encode()
    ).hexdigest()[:16]
    return PROFILES.path() / f"{names}-{digest}.calibration.json"


def load(target: GGUFHeader, draft: GGUFHeader) -> Calibration:
    """Return the stored calibration of a pair, an empty one where nothing is stored.

    Raises UsageError for a damaged file, having set it aside.
    """
    problems: list[str] = []
    try:
        found = _file(target, draft, problems.append).read()
    except OSError as error:
        raise UsageError(f"{describe_os_error(error)}; give a threshold") from None
    if problems:
        raise UsageError(f"{problems[0]}; run `edgespec calibrate`, or give a threshold")
    return found or _empty(target, draft)


def check_storable(target: GGUFHeader, draft: GGUFHeader) -> None:
    """Raise what `store` would, before the work: UsageError for no home directory."""
    with suppress(DamagedFileError):  # which `store` sets aside
        _file(target, draft, silent).peek()


def store(target: GGUFHeader, draft: GGUFHeader, choices: Sequence[ThresholdChoice]) -> Path:
    """Store `choices` with those of other signals and spans, and return the file.

    Raises OSError where it cannot be written.
    """
    file = _file(target, draft, silent)

    def with_choices(kept: Calibration | None) -> bytes:
        calibration = (kept or _empty(target, draft)).with_choices(choices)
        return msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"

    file.update(with_choices)
    return file.path


def _empty(target: GGUFHeader, draft: GGUFHeader) -> Calibration:
    return Calibration(file_fingerprint(target), file_fingerprint(draft))


def _file(target: GGUFHeader, draft: GGUFHeader, on_message: MessageFn) -> StateFile[Calibration]:
    path, empty = calibration_path(target, draft), _empty(target, draft)

    def parse(data: bytes) -> Calibration:
        found = parse_struct(data, Calibration)
        if (found.format, found.target, found.draft) != (FORMAT, empty.target, empty.draft):
            raise DamagedFileError("of other models")
        try:
            _ = [choice.waking for choice in found.choices.values()]  # refuses what no threshold can be
        except UsageError as error:
            raise DamagedFileError(f"damaged: {error}") from None
        return found

    return StateFile(path, parse, on_message=on_message)


def calibrated(target: GGUFHeader, draft: GGUFHeader, waking: Waking) -> Waking:
    """Return `waking` with the threshold and window that were chosen for its signal and span.

    Raises UsageError where none was: what to run.
    """
    found = load(target, draft).choices.get(_name(waking.signal, waking.span))
    if found is None:
        raise UsageError(
            f"no threshold is known of these models for the signal {waking.signal} and the span "
            f"{waking.span}; run `edgespec calibrate` with them and this span, or give a threshold"
        )
    return found.waking


def _name(signal: Signal, span: Span) -> str:
    return f"{signal} {span}"
