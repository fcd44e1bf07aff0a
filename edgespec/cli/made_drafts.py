"""How commands show the drafts that were made on this machine: a table, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from edgespec.models.made_drafts import MadeDraft

_SHORT = 12  # digits of a SHA-256 that are shown: enough to tell files apart

_SOURCES = {
    "prompt:built-in": "built-in",
    "prompt:history": "history",
    "prompt:file": "files",
    "read": "texts read",
}


def described(draft: MadeDraft) -> dict[str, Any]:
    """Return a draft's record as JSON has it."""
    return asdict(draft) | {"gain": draft.gains.mean, "uses_own_texts": draft.uses_own_texts}


def drafts_table(drafts: Sequence[MadeDraft]) -> Table:
    """Return a table with a row for each draft."""
    table = Table("draft", "family", "target", "SHA-256", "made from", "accepted", "c", "gain", box=None)
    table.pad_edge = False
    for draft in drafts:
        table.add_row(
            draft.name,
            draft.family,
            draft.target_name,
            draft.target_sha256[:_SHORT],
            made_from(draft),
            " ".join(f"{share:.2f}" for share in draft.acceptance) or "-",
            f"{draft.cost_ratio:.2f}",
            f"{draft.gains.mean:.2f}x",
        )
    table.columns[0].no_wrap = True  # names are for copying: in a narrow terminal other columns shrink
    return table


def made_from(draft: MadeDraft) -> str:
    """Return what a draft was made from, such as "built-in 1.2 M, history 30 k tokens"."""
    parts = [f"{_SOURCES.get(source, source)} {_short(n)}" for source, n in draft.data.items() if n]
    return ", ".join(parts) + " tokens" if parts else "-"


def _short(n: int) -> str:
    for size, unit in ((1_000_000, " M"), (1_000, " k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)
