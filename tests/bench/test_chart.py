"""The README's picture and table: what bench/chart.py computes from the committed raw runs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

import chart

README = (chart.ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", chart.THEMES, ids=lambda theme: theme.name)
def test_the_committed_picture_is_that_of_the_raw_runs(theme: chart.Theme) -> None:
    committed = (chart.IMAGES / f"speed-{theme.name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(committed)
    assert committed == chart.draw(theme, chart.rows()), "run bench/chart.py"


def test_the_readme_shows_both_pictures() -> None:
    for theme in chart.THEMES:
        assert f"docs/images/speed-{theme.name}.svg" in README


@pytest.mark.parametrize(
    "row", [chart.one_answer(), chart.larger_target(), chart.many_clients(16)], ids=lambda row: row.label
)
def test_the_readme_s_table_has_the_numbers_of_the_raw_runs(row: chart.Row) -> None:
    cells = rf"\| {row.llama_cpp:.1f} \| {row.edgespec:.1f} \| \*\*{row.ratio:.1f}\*\* \|"
    assert re.search(cells, README), f"no row with {cells}"
