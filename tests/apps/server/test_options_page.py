"""The page of the options is the tables of options, as they are."""

from __future__ import annotations

from options_page import PAGE, page


def test_the_page_is_made_from_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/support/options_page.py"
