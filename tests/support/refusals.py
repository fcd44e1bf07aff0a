"""Refusals: rows of what is asked, and tests/refusals.json with what is said (`pytest --write-messages`)."""

from __future__ import annotations

import json
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "refusals.json"
MESSAGES: dict[str, str] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
"""What is said of each row; the rows have the exit code or status, and the option or field that is named."""


def rows(file: Path) -> list[str]:
    """Return the rows of a table: the lines of `file` without comments."""
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def check_message(asked: str, said: str, *, write: bool) -> None:
    """Check that a row says what it said when the messages were last written; `write` writes them."""
    if write:
        MESSAGES[asked] = said
        GOLDEN.write_text(json.dumps(dict(sorted(MESSAGES.items())), indent=0, ensure_ascii=False) + "\n")
    assert said == MESSAGES.get(asked), "read it, then write it: pytest -n 0 --write-messages"


def check_all_asked(asked: set[str], *, write: bool) -> None:
    """Check that no message is left of a row that is gone; `asked`: all rows of a kind."""
    kinds = {one.split()[0] for one in asked}
    for gone in [one for one in MESSAGES if one.split()[0] in kinds and one not in asked]:
        assert write, f"no row asks for this: {gone}"
        del MESSAGES[gone]
