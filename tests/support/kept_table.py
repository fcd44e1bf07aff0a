"""The table of docs/start.md of all that is kept, made from the rows of `edgespec.platform.kept`.

python tests/support/kept_table.py      writes it there
"""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.platform.kept import EVERYTHING

PAGE = Path(__file__).parents[2] / "docs" / "start.md"
HEAD = "| | what | place | deleted by |\n|---|---|---|---|\n"


def table() -> str:
    """Return the table in Markdown."""
    return HEAD + "".join(
        f"| {row.name}{', yours' if row.personal else ''} | {row.holds} | {row.shown} | {row.deleted_by} |\n"
        for row in EVERYTHING
    )


if __name__ == "__main__":
    PAGE.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: table(), PAGE.read_text()))
