"""The report: what is in them, that nothing escapes into the page, that labels keep apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.apps.bench.commands.report import Chart, charts, pareto, print_report, write_report
from edgespec.apps.bench.rows import Report
from edgespec.apps.bench.runs import Cell
from toy_outcomes import CATEGORIES, UNREADABLE, lossy_outcome, toy_outcome

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A page, taken apart: fails where an element is not closed, or closed twice."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        if "style" not in self._open:
            self.texts.append(text)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def written(tmp_path):
    def written(outcome):
        write_report(Report(outcome), tmp_path / "page.html")
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    return written


def compare():
    return toy_outcome("compare", source="RAPL", accuracy=True, warnings=["The machine was busy."])


@pytest.fixture(scope="module")
def compare_page(tmp_path_factory):
    file = tmp_path_factory.mktemp("compare") / "page.html"
    write_report(Report(compare()), file)
    return file.read_text(encoding="utf-8")


# ---- the page ----


def test_everything_of_a_comparison_is_there(compare_page):
    page = Page(compare_page)
    for words in (
        "19 combinations of 4 targets, 1 skipped",
        "Fastest is row ",
        "The machine was busy.",
        "their vocabularies differ",
        "AMD EPYC 7B13",
        "docs/measuring.md",
        "576 runs: too many for a page",
        "70/164 (43 %)",
        "02" * 32,
        *CATEGORIES,
    ):
        assert words in page.text
    assert len(page.all("details")) == 18
    assert not any("open" in attributes for attributes in page.all("details"))
    titles = [chart.title for chart in charts(Report(compare())) if chart.rows]
    assert len(page.all("svg")) == len(titles) == 3
    assert all(title in page.text for title in titles)


def test_nothing_is_run_and_nothing_is_loaded(compare_page):
    page = Page(compare_page)
    assert {"script", "link", "img", "iframe", "object", "base"}.isdisjoint(tag for tag, _ in page.elements)
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes), tag
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert "@import" not in compare_page
    assert "http" not in compare_page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", compare_page))


def test_ids_are_unique_and_references_lead_somewhere(compare_page):
    page = Page(compare_page)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = re.findall(r"url\(#([^)]*)\)", compare_page)
    references += [a["xlink:href"][1:] for _, a in page.elements if "xlink:href" in a]
    references += [i for a in page.all("svg") for i in a["aria-labelledby"].split()]
    assert references
    assert set(references) <= set(ids)
    assert all(attributes["role"] == "img" and attributes["viewbox"] for attributes in page.all("svg"))


@pytest.mark.parametrize(
    "bad", ['<script>alert("1")</script>', "a & b' onload='x", "$x^2$", "_hidden", "模型"]
)
def test_names_are_text(written, bad):
    whole = toy_outcome("bench", source="RAPL", accuracy=True, names=(bad, f"{bad} draft"), warnings=[bad])
    cell = replace(
        whole.cells[0],
        kernels=bad,
        runs=tuple(replace(run, category=bad, stop_reason=bad) for run in whole.cells[0].runs),
    )
    skipped = Cell(bad, bad, bad, skipped=bad)
    outcome = replace(
        whole,
        cells=(cell, skipped),
        kind=bad,
        machine={bad: bad},
        settings={bad: [bad]},
        suite={bad: {bad: 1}},
    )
    text = written(outcome)
    page = Page(text)
    assert {"script"}.isdisjoint(tag for tag, _ in page.elements)
    assert not any("onload" in attributes for _, attributes in page.elements)
    assert page.text.count(bad) > 20
    drawings = Page("".join(re.findall(r"<svg.*?</svg>", text, flags=re.S)))
    assert bad[:15] in drawings.text, "in the charts too"


def test_an_estimate_is_called_one_everywhere(written):
    outcome = toy_outcome(source="assumed")
    page = Page(written(outcome))
    row = Report(outcome).rows[1]
    for value in (row.variant.joules_per_token, row.variant.joule_seconds):
        shown = f"{value:.3g}"
        assert shown in page.text
        assert page.text.count(shown) == page.text.count(f"{shown} (estimated)")
    assert "J/token, gross (estimated)" in page.text, "the axis says so"
    assert "estimated, not measured" in page.text
    assert "15 W assumed (estimated)" in page.text
    joules = outcome.cells[0].runs[0].energy.joules
    assert f"{joules:.1f} (estimated)" in page.text, "in the raw runs"
    assert "unavailable" in page.text, "net joules are not known"


def test_what_is_unavailable_says_why(written):
    page = Page(written(toy_outcome(source="unavailable")))
    assert f"Energy: unavailable: {UNREADABLE}" in page.text
    assert "Left out: neither joules nor accuracy" in page.text
    assert page.text.count("unavailable") > 10
    assert "it was not measured" in Page(written(toy_outcome())).text


def test_a_peer_has_its_own_kernels_and_memory():
    whole = toy_outcome(variants=("llama.cpp plain", "llama.cpp model-3"), accuracy=True)
    (cell,), (plain, *peers) = whole.cells, Report(whole).rows
    assert (plain["kernels"].text, plain["peak_rss_bytes"].value) == (cell.kernels, cell.peak_rss_bytes)
    assert [(row["kernels"].text, row["draft"].text) for row in peers] == [
        ("llama.cpp", "-"),
        ("llama.cpp", cell.draft),
    ]
    for row in peers:
        assert (row["peak_rss_bytes"].value, row["perplexity"].value) == (None, None)


# ---- the charts ----


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_pareto_front_is_what_no_point_beats(points):
    def beaten(i):
        x, y = points[i]
        return any(
            (other[0] <= x and other[1] >= y and other != (x, y)) or (other == (x, y) and j < i)
            for j, other in enumerate(points)
        )

    front = pareto(points)
    assert sorted(front) == [i for i in range(len(points)) if not beaten(i)]
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


@pytest.mark.parametrize(("key", "n"), [("energy", 24), ("accuracy", 24), ("acceptance", 18)])
def test_the_numbers_of_24_rows_do_not_cover_each_other(key, n):
    outcome = toy_outcome("compare", source=None if key == "accuracy" else "RAPL", accuracy=True)
    chart = next(chart for chart in charts(Report(outcome)) if chart.key == key)
    places = [place for place, _ in chart.numbers()]
    assert len(places) == n
    width, height = chart.size
    for i, (x, y) in enumerate(places):
        assert 0 < x < width
        assert 0 < y < height
        assert all(abs(x - a) > 9 or abs(y - b) > 8 for a, b in places[:i])


@given(st.floats(0.0, 1e4), st.floats(1e-6, 1e4))
def test_ticks_are_few_round_and_within_the_axis(low, width):
    chart = Chart("k", "t", "c", spans=((low, low + width), (0.0, 1.0)))
    ticks = chart.ticks(0)
    assert 1 <= len(ticks) <= 8
    assert all(low - 1e-6 * width <= value <= low + 1.000001 * width for value, _ in ticks)


# ---- files ----


def test_variants_that_are_not_exact_are_marked(written):
    outcome = lossy_outcome(source="RAPL", accuracy=True)
    page = Page(written(outcome))
    assert page.text.count("cascade@0.4 (not exact)") >= 6, "the results, the categories, the raw runs"
    assert "cascade@0.4 is not exact: the target saw 25 % of the tokens" in page.text
    for words in ("target saw", "target's best", "91.0 %", "0.0625", "50/164"):
        assert words in page.text
    row = next(row for row in Report(outcome).rows if not row.variant.exact)
    assert row["perplexity"].value is None, "the target's accuracy is not that of another text"


@pytest.mark.parametrize("busy", [True, False])
def test_beside_other_programs_it_says_that_scheduling_was_measured(written, capsys, busy):
    words = "measure scheduling, not kernels"
    line = "other programs kept 1.5 processors busy; stop them and run the benchmark again"
    outcome = toy_outcome(warnings=[line] if busy else ["plug it in"])
    print_report(Report(outcome))
    told = [capsys.readouterr().out, written(outcome), json.loads(Report(outcome).document())["busy"] or ""]
    assert [words in text for text in told] == [busy] * 3
