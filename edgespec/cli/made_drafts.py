"""Tables and JSON of the drafts that were made on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.table import Table

from edgespec.models.draft_records import DraftRecord

_SHORT = 12  # digits of a SHA-256 that are shown: enough to tell files apart

_SOURCES = {
    "prompt:built-in": "built-in",
    "prompt:history": "history",
    "prompt:file": "files",
    "read": "texts read",
    "rejected": "texts with rejected drafts",
    "recordings": "recordings",
}


def described(draft: DraftRecord) -> dict[str, Any]:
    """Return a draft's record as an object for JSON."""
    facts: dict[str, Any] = msgspec.to_builtins(draft)
    return facts | {"gain": draft.gains.mean, "uses_own_texts": draft.uses_own_texts}


def full_table(drafts: Sequence[DraftRecord]) -> Table:
    """Return a table with all facts of each draft."""
    table = Table("draft", "target", "SHA-256", "made from", box=None, pad_edge=False)
    for title in ("trained on", "hours", "accepted", "c", "greedy", "at 0.8"):
        table.add_column(title, justify="right")
    table.add_column("made")
    for draft in drafts:
        table.add_row(
            draft.name,
            draft.target_name,
            draft.target_sha256[:_SHORT],
            sources_text(draft.data),
            _short(draft.tokens_seen) if draft.tokens_seen else "-",
            f"{draft.hours:.1f}" if draft.hours else "-",
            acceptance_text(draft.acceptance),
            f"{draft.cost_ratio:.2f}",
            f"{draft.gains.greedy:.2f}x",
            f"{draft.gains.sampled:.2f}x",
            draft.made[:10],
        )
    return table


def acceptance_text(shares: Sequence[float]) -> str:
    """Return shares by position, such as "0.61 0.55 0.50"."""
    return " ".join(f"{share:.2f}" for share in shares) or "-"


def sources_text(tokens: Mapping[str, int]) -> str:
    """Return tokens by source, such as "built-in 1.2 M, history 30 k tokens"; "-" for none."""
    parts = [f"{_SOURCES.get(source, source)} {_short(n)}" for source, n in tokens.items() if n]
    return ", ".join(parts) + " tokens" if parts else "-"


def _short(n: int) -> str:
    for size, unit in ((1_000_000, " M"), (1_000, " k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)
