"""Which models run where none, or only one, was named: the one place that decides it.

target   as named, else the default pair's
draft    as named, else the best that was made here for this very file of the target (made_drafts.py),
         else that of the registry's first pair with the target
"""

from __future__ import annotations

from pathlib import Path

from edgespec.choices import DrafterName
from edgespec.errors import UsageError
from edgespec.models.made_drafts import drafts_for
from edgespec.models.registry import load_registry
from edgespec.models.resolve import locate


def choose_models(
    target: str | Path | None,
    draft: str | Path | None,
    drafter: DrafterName = "auto",
    *,
    writes: bool = False,
) -> tuple[str, str | None]:
    """Return the names of target and draft (None: no drafting), as given or chosen.

    `writes`: the draft is to write text of its own (a cascade), as drafts made here cannot. Raises UsageError
    if a draft is wanted and none is known for this target.
    """
    chosen, partner = load_registry().complete(
        None if target is None else str(target), None if draft is None else str(draft)
    )
    if drafter in ("none", "suffix"):
        return chosen, None
    if draft is None and not writes and (made := drafts_for(chosen)):
        return chosen, made[0].name
    if partner is None and drafter != "auto":
        locate(chosen)  # complain about a mistyped target first
        raise UsageError(f"no draft is known for {chosen}: name a draft, or choose drafter none")
    return chosen, partner
