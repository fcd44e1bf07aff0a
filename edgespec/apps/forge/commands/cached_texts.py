"""The forge's part of `edgespec cache`: what drafts are made from, shown and deleted."""

from __future__ import annotations

from functools import partial

import msgspec
from rich.table import Table

from edgespec.apps.forge.draft_store import StoredDataset, delete_dataset, delete_user_texts, find_stored
from edgespec.cli.cache import Deletion, first_failure
from edgespec.cli.console import message, out, print_table
from edgespec.models.draft_records import draft_records
from edgespec.models.hub import format_size
from edgespec.platform.kept import FORGE

__all__ = ["deletion", "described", "find_stored", "name_drafts", "print_stored"]


def print_stored(kept: list[StoredDataset]) -> None:
    """Print a table of what is there for each target, and what of it is damaged."""
    table = Table("drafts for", "texts", "of yours", "size", "checkpoints", "path", box=None, pad_edge=False)
    for one in kept:
        table.add_row(
            one.target or "?",
            f"{one.texts:,}",
            f"{one.own_texts:,}",
            format_size(one.data_bytes),
            format_size(one.checkpoint_bytes) if one.checkpoint_bytes else "-",
            str(one.path),
        )
    table.columns[-1].overflow = "fold"
    print_table(table)
    for path in [path for one in kept for path in one.damaged]:
        out.print(f"{path}: damaged, not used; `edgespec cache clear` deletes it")


def described(kept: StoredDataset) -> dict[str, object]:
    """Return the object that --json prints of stored texts."""
    return msgspec.to_builtins(kept, enc_hook=str)  # type: ignore[no-any-return]


def deletion(*, whole: bool) -> Deletion | None:
    """Return how all of it is deleted, or only the user's texts; None: there is nothing."""
    kept = [one for one in find_stored() if whole or one.own_texts or one.damaged]
    if not kept:
        return None

    def run() -> None:
        if failed := first_failure(partial(_clear, one, everything=whole) for one in kept):
            raise failed

    n_texts = sum(one.texts if whole else one.own_texts for one in kept)
    return Deletion(f"{n_texts:,} texts {'and the checkpoints ' if whole else ''}in {FORGE.path()}", run)


def _clear(kept: StoredDataset, *, everything: bool) -> None:
    if everything:
        _, n_bytes = delete_dataset(kept.target or kept.target_sha256, kept.target_sha256)
        what = f"{kept.texts:,} texts and checkpoints, {format_size(n_bytes)}"
    else:
        what = f"{delete_user_texts(kept):,} of {kept.texts:,} texts: those of yours"
    out.print(f"{kept.path}: deleted, {what}")
    if not everything and kept.checkpoint_bytes and kept.own_texts:
        out.print(
            f"{kept.path}: its checkpoints may still know of these texts; `edgespec cache clear forge` "
            "deletes them"
        )


def name_drafts() -> None:
    """Print the drafts that were trained on the data being deleted."""
    for draft in draft_records(on_message=message):
        if draft.uses_own_texts:
            out.print(
                f"{draft.name}: kept, a draft trained on your texts, of which it may still know; "
                f"`edgespec draft remove {draft.name} --data` deletes it, and what is left of its training"
            )
