"""The choice of target and draft where none, or only one, was named.

target   the one named, else the user's default (`edgespec models default`), else the default pair's
draft    the one named, else the best made here for this very file of the target (draft_records.py),
         else that of the registry's first pair with the target. Where there is none, or it would have to
         be pulled first, a head in the target's own file drafts, if it has one (mtp_heads.py). `Pair` then
         looks for one on this disk (draft_search.py)
"""

from __future__ import annotations

import os
from pathlib import Path

from edgespec.decoding.choices import DRAFTLESS, DrafterName
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.draft_records import drafts_for
from edgespec.models.found.catalog import stored_model
from edgespec.models.mtp_heads import has_mtp_head
from edgespec.models.registry import DEFAULT_VARIABLE, load_registry, user_models_file
from edgespec.models.resolve import locate
from edgespec.models.store import Store


def choose_models(
    target: str | Path | None,
    draft: str | Path | None,
    drafter: DrafterName = "auto",
    *,
    writes: bool = False,
) -> tuple[str, str | None]:
    """Return the names of target and draft (None: no drafting), as given or chosen.

    `writes`: the draft is to write text of its own (a cascade), as heads and drafts made here cannot. Raises
    UsageError if a draft is wanted and none is known for this target.
    """
    target = _default_target() if target is None else target
    chosen, partner = load_registry().complete(
        None if target is None else str(target), None if draft is None else str(draft), writes=writes
    )
    if target is not None and partner is None:
        partner = _partner_of_same_file(chosen, writes=writes)
    if drafter == "mtp" and draft is not None:
        raise UsageError(f"the target's own head drafts: leave out {draft}", field="drafter", value=drafter)
    if drafter in (*DRAFTLESS, "mtp"):
        return chosen, None
    if draft is None and not writes:
        if made := drafts_for(chosen):
            return chosen, made[0].name
        if partner and not is_here(partner) and has_mtp_head(locate(chosen)):
            return chosen, None
    if partner is None and drafter != "auto":
        found = locate(chosen)  # complain about a mistyped target first
        if has_mtp_head(found) and not writes:
            return chosen, None
        raise UsageError(f"no draft is known for {chosen}: name a draft, or choose drafter none")
    return chosen, partner


def _default_target() -> str | None:
    """Return the user's default model; None: a pair's target. Raises EdgespecError if it is not there."""
    registry = load_registry()
    name = registry.default
    if not name or (name in registry.pairs and name not in registry.entries):
        return None
    try:
        locate(name)
    except EdgespecError as error:
        where = DEFAULT_VARIABLE if os.environ.get(DEFAULT_VARIABLE) else str(user_models_file())
        cure = "" if where == DEFAULT_VARIABLE else "; `edgespec models default NAME` sets another"
        raise UsageError(f"the default model ({where}) is not there: {error}{cure}") from None
    return name


def _partner_of_same_file(target: str, *, writes: bool) -> str | None:
    """Return the registered draft, if it is here, of a target in another program's store.

    Its file is one of the registry by the hash that the store records.
    """
    model, registry = stored_model(target), load_registry()
    if model is None or model.sha256 is None:
        return None
    names = [entry.name for entry in registry.entries.values() if entry.sha256 == model.sha256]
    partners = (registry.complete(name, None, writes=writes)[1] for name in names)
    return next((partner for partner in partners if partner and is_here(partner)), None)


def is_here(name: str) -> bool:
    """Say whether a model of the registry is on this machine."""
    registry = load_registry()
    return Store.default().is_present(registry.get(name), registry)
