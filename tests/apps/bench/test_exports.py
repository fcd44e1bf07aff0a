"""Files of a benchmark: what is in the CSV and the JSON, and that no failure costs the old file."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import msgspec
import pytest

from edgespec.apps.bench.rows import Report
from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome, Cell
from edgespec.apps.bench.summary import OVERALL, summarise_cell
from toy_outcomes import CATEGORIES, lossy_outcome, toy_outcome

# ---- CSV and JSON ----


@pytest.fixture
def rows_of(tmp_path):
    """Write an outcome's CSV and read its rows again."""

    def rows_of(outcome):
        file = tmp_path / "a.csv"
        Report(outcome).write_csv(file)
        return list(csv.DictReader(io.StringIO(file.read_text())))

    return rows_of


def test_a_row_for_each_cell_category_and_variant(rows_of):
    outcome = toy_outcome(source="RAPL", variants=("auto", "model-4"), accuracy=True)
    rows = rows_of(outcome)
    places = [(row["category"], row["variant"]) for row in rows]
    assert places == [(c, w) for c in (OVERALL, *CATEGORIES) for w in (PLAIN, "auto", "model-4")]
    auto = summarise_cell(outcome.cells[0])[0].variants[1]
    assert float(rows[1]["decode_tokens_per_s"]) == auto.decode_tokens_per_s
    assert float(rows[1]["net_joules_per_token"]) == auto.net_joules_per_token
    assert float(rows[1]["speedup_low"]) <= float(rows[1]["speedup"]) <= float(rows[1]["speedup_high"])
    assert rows[1]["acceptance_by_position"].count(" ") == len(auto.acceptance_by_position) - 1
    assert (rows[1]["energy_estimated"], rows[1]["runs"], rows[1]["compared"]) == ("no", "16", "16")
    assert (rows[0]["speedup"], rows[0]["identical"]) == ("", ""), "plain is compared with nothing"
    assert (rows[0]["perplexity"], rows[0]["problems"], rows[0]["skipped"]) == ("9.1", "164", "")


def test_what_is_unavailable_is_an_empty_field_and_an_estimate_is_called_one(rows_of):
    for source, joules, estimated in (
        ("unavailable", False, ""),
        (None, False, ""),
        ("assumed", True, "yes"),
    ):
        row = rows_of(toy_outcome(source=source))[1]
        assert (bool(row["gross_joules_per_token"]), row["energy_estimated"]) == (joules, estimated)
        assert row["net_joules_per_token"] == ""


def test_what_was_skipped_is_in_the_csv_with_the_same_columns(rows_of):
    skipped = Cell("a", None, "auto", skipped="no, and why")
    whole = toy_outcome()
    for cells in ((skipped,), (skipped, *whole.cells)):
        rows = rows_of(replace(whole, cells=cells))
        assert list(rows[0]) == list(rows_of(whole)[0])
        assert (rows[0]["skipped"], rows[0]["decode_tokens_per_s"], rows[0]["runs"]) == (
            "no, and why",
            "",
            "",
        )


def test_the_json_holds_the_raw_runs_and_the_summaries():
    outcome = toy_outcome("compare", source="RAPL", accuracy=True)
    data = Report(outcome).document()
    assert data.count(b"\n") == 1
    found = json.loads(data)
    written = msgspec.json.decode(msgspec.json.encode(outcome), type=BenchmarkOutcome)
    assert msgspec.convert(found["outcome"], BenchmarkOutcome) == written
    assert [bool(one) for one in found["summary"]] == [bool(cell.runs) for cell in outcome.cells]
    assert found["summary"][0][0]["category"] == OVERALL


# ---- files ----


def test_variants_that_are_not_exact_are_marked_as_such(rows_of):
    outcome = lossy_outcome("compare", accuracy=True)
    found = {
        row["variant"]: row
        for row in rows_of(outcome)
        if row["category"] == "overall" and row["draft"] != "none"
    }
    cascade, lenient, auto = (found[variant] for variant in ("cascade@0.4", "lenience-0.5", "auto"))
    assert [row["exact"] for row in (cascade, lenient, auto)] == ["no", "no", "yes"]
    assert [row["target_share"] for row in (cascade, lenient, auto)] == ["0.25", "1.0", "1.0"]
    assert (cascade["agreement_with_target"], cascade["kl_from_target_nats_per_token"]) == ("0.91", "0.0625")
    assert (auto["agreement_with_target"], auto["kl_from_target_nats_per_token"]) == ("", "")
    assert (cascade["problems_passed"], cascade["problems"], cascade["perplexity"]) == ("50", "164", "")
    assert auto["perplexity"]
    summary = json.loads(Report(outcome).document())["summary"]
    variants = {variant["variant"]: variant for variant in summary[0][0]["variants"]}
    assert (variants["cascade@0.4"]["exact"], variants["cascade@0.4"]["target_share"]) == (False, 0.25)
    assert variants["auto"]["exact"] is True
