"""The README's picture and table: what bench/chart.py computes from the committed raw runs."""

from __future__ import annotations

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


def test_the_readme_has_the_table_of_the_raw_runs() -> None:
    assert chart.table() in README, "run bench/chart.py"
    assert README.count("| llama.cpp | edgespec |") == 1


@pytest.mark.parametrize("row", chart.rows(), ids=lambda row: row.label)
def test_the_parts_of_a_factor_are_those_of_the_raw_runs(row: chart.Row) -> None:
    assert row.kernels * row.drafts == pytest.approx(row.ratio)
    assert row.llama_cpp < row.plain, "edgespec's kernels decode plainly faster than llama.cpp"
