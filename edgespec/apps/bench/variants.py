"""The variants in which a benchmark answers a prompt: how a generation drafts, and whether it is exact."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import get_args

from edgespec.apps.bench.runs import PLAIN
from edgespec.decoding.choices import DrafterChoice, DrafterName, Signal
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.options import SPAN, Options, Span, Waking
from edgespec.drafting.plugin import find_drafter
from edgespec.errors import UsageError
from edgespec.platform.plugins import offered

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
    cascade: Waking | None = None
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
    """Return the names in `text`, with commas, the value of `field`. Raises UsageError."""
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
        return Variant(name, "auto", cascade=Waking(signal, float(found[3]) if found[3] else None, span=span))
    if found := _LENIENT.fullmatch(name):
        return Variant(name, "auto", lenience=Options(lenience=float(found[1])).lenience)
    return None
