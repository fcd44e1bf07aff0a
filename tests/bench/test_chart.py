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


def test_the_table_takes_the_place_of_an_older_one() -> None:
    older = "before\n\n| | llama.cpp | edgespec |\n|---|---|---|\n| one | 1.0 | 2.0 |\n\n| another |\n|---|\n"
    assert chart.with_table(older) == f"before\n\n{chart.table()}\n| another |\n|---|\n"


@pytest.mark.parametrize("row", chart.rows(), ids=lambda row: row.label)
def test_the_parts_of_a_factor_are_those_of_the_raw_runs(row: chart.Row) -> None:
    assert row.kernels * row.drafts == pytest.approx(row.ratio)
    assert row.llama_cpp < row.plain, "edgespec's kernels decode plainly faster than llama.cpp"


def test_a_target_that_was_made_is_called_synthetic() -> None:
    (row,) = [line for line in chart.table().splitlines() if "7B" in line]
    assert "*synthetic*" in row
    assert "synthetic" in chart.larger_target().label
