"""The table of docs/start.md of all that is kept, made from the rows of `edgespec.platform.kept`.

python tests/support/kept_table.py      writes it there
"""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.platform.kept import EVERYTHING, Kept

PAGE = Path(__file__).parents[2] / "docs" / "start.md"
HEAD = "| | what | place, and what else deletes it |\n|---|---|---|\n"


ROOTS = {
    "cache": "~/.cache/edgespec",
    "config": "~/.config/edgespec",
    "models": "~/.cache/edgespec/models",
    "home": "~",
}


def place(row: Kept) -> str:
    """Return where it is kept by default, in Markdown."""
    return row.where or ", ".join(f"`{ROOTS[row.root]}/{place.rstrip('/')}`" for place in row.places)


def deleted_by(row: Kept) -> str:
    """Return what deletes it, in Markdown; nothing for what the sentence before the table says."""
    said = "`edgespec cache clear`" if row.personal else f"`edgespec cache clear {row.name}`"
    return "" if row.deleted_by == said else f"; {row.deleted_by}"


def table() -> str:
    """Return the table in Markdown."""
    return HEAD + "".join(
        f"| {row.name}{', yours' if row.personal else ''} | {row.holds} | {place(row)}{deleted_by(row)} |\n"
        for row in EVERYTHING
    )


if __name__ == "__main__":
    PAGE.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: table(), PAGE.read_text()))
