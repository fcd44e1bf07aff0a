"""Drafts worth pulling for a target that nothing on this disk drafts for: those of its family."""

from __future__ import annotations

import re

from edgespec.models.entries import Entry, Registry
from edgespec.models.found.facts import ModelFacts

_PADDING = 0.01  # of a vocabulary: sizes of one family are padded to different lengths
_MOST_OF_TARGET = 0.5  # bytes of a draft, in the target's


def draft_to_pull(registry: Registry, name: str, facts: ModelFacts, size: int) -> Entry | None:
    """Return the draft of the pairs of models.toml that fits a target best; None if its family has no pair.

    `name`: what the target is called. The family with the longest name counts that is in the target's names:
    "Qwen2.5-Coder" before "Qwen2.5". Its vocabulary has to be as large as the target's.
    """
    names = _plain(f"{name} {facts.title}")
    best: tuple[int, Entry] | None = None
    for pair in registry.pairs.values():
        target, draft = registry.entries[pair.target], registry.entries[pair.partner(writes=True)]
        family = _plain(target.family)
        shape = registry.shape(draft)
        if not family or family not in names or draft.packed or shape is None:
            continue
        if abs(shape.vocabulary - facts.n_vocab) > _PADDING * facts.n_vocab:
            continue
        if not 0 < expected_size(draft, registry) <= _MOST_OF_TARGET * size:
            continue
        if best is None or len(family) > best[0]:
            best = len(family), draft
    return best[1] if best else None


def expected_size(entry: Entry, registry: Registry) -> int:
    """Return the bytes to pull for an entry: for a derived one those of its base; 0 if unknown."""
    return entry.size or (registry.entries[entry.derived.base].size if entry.derived else 0) or 0


def _plain(name: str) -> str:
    """Return a name's letters and digits, by which "qwen2.5-coder" is "Qwen2.5 Coder"."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())
