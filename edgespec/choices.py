"""Options whose value is one of a few words. Imports nothing heavy, since tab completion imports this."""

from __future__ import annotations

from typing import Literal, get_args

from edgespec.errors import UsageError

DrafterName = Literal["auto", "tree", "chain", "model", "mtp", "suffix", "staged", "none"]
"""What may draft. "auto" chooses among all drafters at each step; "chain" does so without branches, "tree"
with more branches (several tokens sampled for one position). "model", "mtp" (the head in the target's own
file), "suffix" (text seen before) and "staged" (the model, with the suffix store's guesses) use only that.
"none" decodes plainly."""

DRAFTLESS: tuple[DrafterName, ...] = ("none", "suffix")
"""Drafters that use no draft model."""

Rule = Literal["block", "chain", "match"]
"""How drafted tokens are accepted; all rules are exact (decoding/verify.py). With the match rule, the target
samples each position with that position's own coin, and drafted tokens (point masses) are kept as long as
they equal its samples. So the text for a seed does not depend on the drafts (drafter invariance: Daliri et
al., arXiv 2408.07978)."""

KernelsChoice = Literal["auto", "off"]
"""edgespec's own kernels if they can be used, or llama.cpp's."""

CacheType = Literal["f16", "q8_0"]
"""How the target's cache holds keys and values: as 16-bit floats, or in 8 bits with one scale per 32."""

Objective = Literal["latency", "energy"]
"""What drafting should save: time or joules."""

Signal = Literal["margin", "entropy"]
"""How sure a model is: the probability of its likeliest token minus that of the second (large is sure), or
the entropy of its distribution in nats (small is sure). Both are of the softmax of raw logits."""


def check_choice(field: str, value: str | None, choices: object) -> None:
    """Raise UsageError unless `value` is a word of `choices`, which is one of the types above."""
    if value not in get_args(choices):
        raise UsageError(f"must be one of {', '.join(get_args(choices))}", field=field, value=value)
