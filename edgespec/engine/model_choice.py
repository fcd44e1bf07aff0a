"""The choice of target and draft if none, or only one, was named.

target   the one named, else the user's default (`edgespec models default`), else the default pair's
draft    the one named, else the best made here for this very file of the target, else that of the registry's
         first pair with the target, or with a file of its hash (draft_records.py). Where there is none, or it
         would have to be pulled first, a head in the target's own file drafts, if it has one.
         `Pair` then looks for one on this disk (draft_search.py)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from edgespec.decoding.choices import DrafterChoice, is_draftless
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.choices import Lora, read_lora
from edgespec.models.draft_records import drafts_for, is_here, paired_draft
from edgespec.models.registry import DEFAULT_VARIABLE, Entry, load_registry, user_models_file
from edgespec.models.resolve import ModelRef, locate
from edgespec.models.store import Store
from edgespec.platform.plugins import OWN_HEADS, load_all, offered

# ---- models that have a drafting head in their own file ----


def has_own_head(model: Path | Entry) -> bool:
    """Whether a model has a usable head: its file says so, or models.toml if the file is not here yet."""
    file = model if isinstance(model, Path) else Store.default().file(model)
    if not file.is_file():
        return isinstance(model, Entry) and model.mtp
    # Not at the top: it loads the library, and the command line imports this module for completion.
    from edgespec.llama.gguf_header import check_model_file

    try:
        header = check_model_file(file)
    except EdgespecError:
        return False  # whoever loads it says what is wrong with it
    return not all(head.why_not(header) for head in load_all(OWN_HEADS).values())


# ---- the choice ----


class ChosenModels(NamedTuple):
    """A target and its draft."""

    target: ModelRef
    draft: ModelRef | None
    """None: no draft model."""


def choose_models(
    target: str | Path | None,
    draft: str | Path | None,
    drafter: DrafterChoice = "auto",
    *,
    writes: bool = False,
) -> tuple[str, str | None]:
    """Return the names of the models that `choose_refs` returns."""
    chosen = choose_refs(target, draft, drafter, writes=writes)
    return chosen.target.name, chosen.draft.name if chosen.draft else None


def choose_refs(
    target: str | Path | None,
    draft: str | Path | None,
    drafter: DrafterChoice = "auto",
    *,
    writes: bool = False,
) -> ChosenModels:
    """Return target and draft, as given or chosen.

    `writes`: the draft is to write text of its own (a cascade), as heads and drafts made here cannot. Raises
    UsageError if a draft is wanted and none is known for this target.
    """
    target = _default_target() if target is None else target
    name, partner = load_registry().complete(
        None if target is None else str(target), None if draft is None else str(draft), writes=writes
    )
    chosen = ModelRef(name)
    own_head = drafter in offered(OWN_HEADS)
    if own_head and draft is not None:
        raise UsageError(f"the target's own head drafts: leave out {draft}", field="drafter", value=drafter)
    if is_draftless(drafter) or own_head:
        return ChosenModels(chosen, None)
    partner = partner or paired_draft(chosen, writes=writes)
    if draft is None and not writes:
        if made := drafts_for(chosen):
            return ChosenModels(chosen, ModelRef(made[0].name))
        if partner and not is_here(partner) and has_own_head(chosen.found):
            return ChosenModels(chosen, None)
    if partner is None and drafter != "auto":
        found = chosen.found  # complain about a mistyped target first
        if has_own_head(found) and not writes:
            return ChosenModels(chosen, None)
        raise UsageError(f"no draft is known for {name}: name a draft, or choose drafter none")
    return ChosenModels(chosen, ModelRef(partner) if partner else None)


def adapters_of(target: ModelRef, given: str | Iterable[str]) -> tuple[Lora, ...]:
    """Return a target's adapters: those `given`, else those of models.toml, beside it. Raises UsageError."""
    if given or not isinstance(target.found, Entry):
        return tuple(map(read_lora, [given] if isinstance(given, str) else given))
    named = map(read_lora, target.found.lora)
    return tuple(Lora(user_models_file().parent / one.path, one.scale) for one in named)


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
