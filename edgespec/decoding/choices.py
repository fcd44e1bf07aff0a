"""Options of decoding whose value is one of a few words. Light to import: tab completion imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

DrafterName = Literal["auto", "tree", "chain", "model", "mtp", "suffix", "staged", "none"]
"""The drafter: what may draft. "auto" chooses among all drafters at each step; "chain" does so without
branches, "tree" with more branches (several tokens sampled for one position). "model", "mtp" (the head in
the target's own file), "suffix" (text seen before) and "staged" (the model, with the suffix store's
guesses) use only that. "none" decodes plainly."""


class NamedDrafter(msgspec.Struct, frozen=True):
    """A drafter that a user wrote (drafting/plugin.py)."""

    name: str
    """Its name among the sources of drafts."""
    make: Callable[[], Any]
    """Makes one for a text."""

    def __str__(self) -> str:
        return self.name


DrafterChoice = DrafterName | NamedDrafter
"""The drafter of a generation."""

DRAFTLESS: tuple[DrafterName, ...] = ("none", "suffix")
"""Drafters that use no draft model."""


def is_plugin(drafter: DrafterChoice | str | None) -> bool:
    """Whether this drafter, or the one of this name, was written by a user."""
    return drafter is not None and drafter not in get_args(DrafterName)


def is_draftless(drafter: DrafterChoice | str) -> bool:
    """Whether this drafter, or the one of this name, uses no draft model."""
    return is_plugin(drafter) or drafter in DRAFTLESS


Rule = Literal["block", "chain", "match"]
"""How drafted tokens are accepted; all rules are exact (generate.py). With the match rule, the target
samples each position with that position's own coin, and drafted tokens (point masses) are kept as long as
they equal its samples. So the text for a seed does not depend on the drafts (drafter invariance: Daliri et
al., arXiv 2408.07978)."""

Objective = Literal["latency", "energy"]
"""The goal of drafting: to save time or joules."""

Signal = Literal["margin", "entropy"]
"""How sure a model is: the probability of its likeliest token minus that of the second (large is sure), or
the entropy of its distribution in nats (small is sure). Both are of the softmax of raw logits."""
