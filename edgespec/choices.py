"""Options that are one word of a few, and what the words mean. Imports nothing heavy: completion reads it."""

from __future__ import annotations

from typing import Literal, get_args

from edgespec.errors import UsageError

DrafterName = Literal["auto", "tree", "chain", "model", "suffix", "staged", "none"]
"""What may draft: "auto" chooses at each step among all there is, "chain" the same without branches, "tree"
with more of them (several tokens sampled for one position); "model", "suffix" (text seen before) and "staged"
(the model, with the suffix store's guesses) force one; "none" decodes plainly."""

Rule = Literal["block", "chain", "match"]
"""How drafted tokens are accepted, all exactly (decoding/verify.py). The match rule: the target samples each
position with a coin of that position, and drafted tokens, point masses all, are kept while they are what it
samples. So the text for a seed does not depend on what was drafted (drafter invariance: Daliri et al., arXiv
2408.07978)."""

KernelsChoice = Literal["auto", "off"]
"""edgespec's own kernels where they can be used, or llama.cpp's."""

Objective = Literal["latency", "energy"]
"""What drafting is to save: time, or joules."""

Signal = Literal["margin", "entropy"]
"""What says that a model is sure: how far its likeliest token is ahead of the next one, in probability
(large is sure), or the entropy of its distribution in nats (small is sure). Of the softmax of raw logits."""


def check_choice(field: str, value: str | None, choices: object) -> None:
    """Raise UsageError unless `value` is one of the words of `choices`, one of the types above."""
    if value not in get_args(choices):
        raise UsageError(f"must be one of {', '.join(get_args(choices))}", field=field, value=value)
