"""The tables in the terminal: what a pipe reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.cells import cell_len

from command_line import python_path
from edgespec.apps.bench.commands.report import print_report
from edgespec.apps.bench.rows import Report, headline
from edgespec.apps.bench.runs import Cell
from edgespec.cli.console import WordWrap, wrapped
from terminals import Terminal
from toy_outcomes import CATEGORIES, LOSSY, UNREADABLE, lossy_outcome, toy_outcome


@pytest.fixture
def printed(capsys):
    def printed(outcome):
        print_report(Report(outcome))
        captured = capsys.readouterr()
        assert captured.err == ""
        assert "\x1b[" not in captured.out, "piped output is plain"
        return captured.out

    return printed


def test_a_cell_by_category_with_overall_last(printed):
    text = printed(toy_outcome(source="RAPL"))
    lines = text.splitlines()
    assert lines[0] == "qwen2.5-coder-1.5b-q4_k_m, drafted by qwen2.5-coder-0.5b-q4_0"
    first = [line.split()[0] for line in lines if line]
    start = first.index("category") + 1
    assert first[start : start + 5] == [*CATEGORIES, "overall"]
    code = next(line for line in lines if line.startswith("code"))
    assert code.endswith("/4")
    assert " [1." in code
    assert "J/token" in text
    assert "net" in text
    assert max(map(len, map(str.rstrip, lines[: lines.index("")] + lines[2:10]))) <= 100


@pytest.mark.parametrize("source", ["RAPL", "assumed", "unavailable"])
def test_the_table_of_a_cell_fits_100_columns(printed, source):
    lines = printed(toy_outcome(source=source, variants=("auto", "model-4"))).splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("category")]
    assert len(heads) == 2, "a table for each variant"
    for head in heads:
        assert max(len(line.rstrip()) for line in lines[head - 3 : head + 6]) <= 100


def test_estimated_and_unavailable_joules_are_called_so(printed):
    text = printed(toy_outcome(source="assumed"))
    assert "(estimated)" in text.partition("overall")[0]
    assert "from 15 W assumed (estimated)." in text
    text = printed(toy_outcome(source="unavailable"))
    assert text.count("unavailable") == 6, "five lines of a table and the reason"
    assert f"Energy: unavailable: {UNREADABLE}\n" in text


def test_several_cells_in_numbered_rows(printed):
    outcome = toy_outcome("compare", source="RAPL", accuracy=True)
    text = printed(outcome)
    title, *lines = text.splitlines()
    assert title == "19 combinations of 4 targets, 1 skipped"
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(i) for i in range(1, 25)]
    for row, there in zip(rows, Report(outcome).rows, strict=True):
        assert row[:5] == [there[name].text for name in ("row", "target", "draft", "kernels", "variant")]
    assert "phi-3-mini-q4_k_m" in text
    assert "their vocabularies differ" in text
    assert text.count("reference") == 4, "the best quantization, with two kernels, is compared with nothing"
    assert "70/164 (43 %)" in text


def test_no_name_is_markup_or_shortened(printed):
    name, draft = "[red]a[/red] [not repeated] [/]", "d" * 90
    text = printed(toy_outcome(names=(name, draft)))
    assert text.startswith(f"{name}, drafted by {draft}\n")
    whole = toy_outcome(names=(name, draft))
    text = printed(replace(whole, cells=(*whole.cells, Cell(name, draft, "auto", skipped="[b]because[/b]"))))
    assert text.count(name) >= 3
    assert "[b]because[/b]" in text
    assert text.count(draft) >= 2, "plain decoding has none"


def test_nothing_repeated(printed):
    whole = toy_outcome()
    run, other = (
        next(r for r in whole.cells[0].runs if r.variant == variant) for variant in ("plain", "auto")
    )
    text = printed(replace(whole, cells=(replace(whole.cells[0], runs=(run, other)),)))
    assert "[too few]" in text
    assert "too few for an interval; 1 prompt)" in text


def test_only_skipped(printed):
    text = printed(replace(toy_outcome(), cells=(Cell("a", "b", "auto", skipped="too large"),)))
    assert "too large" in text
    assert "tokens/s" not in text


def test_variants_that_are_not_exact_are_marked_as_such(printed):
    text = printed(lossy_outcome())
    assert text.count("(not exact)") == 2, "a table each"
    line = "cascade@0.4 is not exact: the target saw 25 % of the tokens; 91.0 % are those that it likes best"
    assert f"{line}; KL 0.0625 nats a token; exact match 50/164 (30 %)." in text
    assert "lenience-0.5 is not exact: the target saw 100 % of the tokens; 98.0 %" in text
    assert "auto is 1." in text, "the headline is of an exact variant"

    rows = printed(lossy_outcome("compare"))
    for variant in LOSSY:
        n = sum(variant in line and "(not" in line for line in rows.splitlines())
        assert n >= 12, "each row is marked"
    outcome = lossy_outcome("compare")
    assert "not exact" not in headline(Report(outcome))


def test_identical_texts_are_counted_of_exact_variants_only(printed):
    exact, lossy = printed(toy_outcome(variants=("auto",))), printed(lossy_outcome())
    (n,) = re.findall(r"Outputs: .*?(\d+) identical", exact)
    assert f"{n} identical" in lossy


# ---- in a terminal and in a pipe ----

ROWS = [
    ("qwen2.5-coder-1.5b-q4_k_m", "Apache-2.0", "1.12 GB", "present, comes with edgespec"),
    (
        "hf:someone-with-a-long-name/a-repository-GGUF:Q4_K_M",
        "-",
        "5.03 GB",
        "absent, 5.03 GB to pull, unverified",
    ),
]
TABLE = f"""
from rich.table import Table
from edgespec.cli.console import print_table
table = Table("name", "licence", "size", "state", box=None, pad_edge=False)
table.columns[2].justify = "right"
for row in {ROWS!r}:
    table.add_row(*row)
print_table(table)
"""
MANY = """
from edgespec.apps.bench.commands.report import print_report
from edgespec.apps.bench.rows import Report
from toy_outcomes import toy_outcome
print_report(Report(toy_outcome(source="assumed")))
"""


def shown(code, columns):
    """Return the lines that a terminal of so many columns gets; None: that a pipe gets."""
    paths = {"PYTHONPATH": f"{python_path()}:{Path(__file__).parents[1] / 'support'}"}
    command, environment = [sys.executable, "-c", code], os.environ | paths
    if columns is None:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    with Terminal(command, environment, columns=columns) as terminal:
        assert terminal.wait() == 0
        return terminal.rest().replace("\r", "")


@pytest.mark.parametrize("columns", [20, 40, 80, 120, None])
def test_every_cell_is_whole_and_no_line_is_too_long(columns):
    text = shown(TABLE, columns)
    for cell in (cell for row in ROWS for cell in row):
        assert cell in " ".join(text.split())
    lines = text.splitlines()
    if columns is None:
        assert [line.split()[0] for line in lines] == ["name", *(row[0] for row in ROWS)], "a row is a line"
    elif columns == 20:
        assert lines[:3] == [ROWS[0][0], "  licence", f"    {ROWS[0][1]}"]
    elif columns <= 80:
        assert lines[:4] == [ROWS[0][0], *(f"  {n}  {c}" for n, c in zip(NAMES, ROWS[0][1:], strict=True))]


NAMES = ("licence", "size   ", "state  ")


PATH = "/home/someone/a/folder/with/a/long/name/of/more/than/forty/columns/model.gguf"
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then once more because a line has to be long enough.",
    f"edgespec: {PATH}: not a GGUF file, or one that was cut off while it was copied to this place",
    "\u4e2d\u6587" * 50,
    "mixed \u4e2d\u6587\u6587\u672c with words, " * 5,
]


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_break_between_words(width, pieces):
    """Whatever pieces a text comes in; only what is longer than a line goes over its end."""
    for text in SENTENCES:
        wrap = WordWrap(width)
        written = "".join(wrap.feed(text[i : i + pieces]) for i in range(0, len(text), pieces)) + wrap.end()
        assert written == wrapped(text, width)
        lines = written.split("\n")
        assert "".join(written.split()) == "".join(text.split()), "nothing is lost"
        assert set(re.findall(r"[!-~]+", written)) <= set(re.findall(r"[!-~]+", text)), "no word is broken"
        assert all(cell_len(line) <= width or line.strip() == f"{PATH}:" for line in lines)
        assert all(
            cell_len(one) + cell_len(two.split()[0]) >= width - 2
            for one, two in pairwise(lines)
            if "\u4e2d" not in two
        )


def test_code_and_short_lines_of_an_answer_stay_as_they_are():
    long = "print('a line of code that is longer than the terminal is wide')"
    text = f"```python\nif x:\n    {long}\n{long}\n```\n\n    {long}\n\tx\n  - short  item \n"
    wrap = WordWrap(40, indent=0, is_answer=True)
    assert wrap.feed(text) + wrap.end() == text
    assert "\n" in wrap.feed(long + " ") + wrap.end()


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize(
    "where", ["print_line('model', text)", "message(text)", "print_line('a', text, to=err)"]
)
def test_reports_and_messages_break_between_words_in_a_terminal(where, columns):
    code = f"from edgespec.cli.console import err, message, print_line\ntext = {SENTENCES[0]!r}\n{where}"
    lines = shown(code, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()).endswith(SENTENCES[0])
    assert all(line.startswith(" " * 9) for line in lines[1:]) or "message" in where


LATE = r"""
from edgespec.cli.console import message
from edgespec.cli.render import TextWriter
from edgespec.decoding.records import Token
writer, text = TextWriter(show_draft=False), ["Once ", "upon", " a time\n", "there was", " a fox"]
for number, piece in enumerate(text):
    writer.write(Token(number, piece, "target"))
    if number in (1, 4): message(f"problem {number}")
writer.finish("".join(text))
"""


@pytest.mark.parametrize("columns", [40, None])
def test_a_message_waits_for_the_end_of_a_line_of_the_text(columns):
    """In a terminal, and where both streams are one pipe."""
    code = LATE if columns else f"import os; os.dup2(1, 2)\n{LATE}"
    lines = ["Once upon a time", "edgespec: problem 1", "there was a fox", "edgespec: problem 4"]
    assert shown(code, columns).splitlines() == lines


@pytest.mark.parametrize("columns", [40, 80])
def test_a_table_of_many_figures_in_a_narrow_terminal(columns):
    text = shown(MANY, columns)
    piped = shown(MANY, None)
    row = next(line for line in piped.splitlines() if line.startswith("overall"))
    assert "\u2026" not in text
    assert all(word in text for word in row.split())
    lines = text[text.index("\ncode") : text.index("kernels")].splitlines()
    assert max(map(len, lines)) <= columns


def test_a_row_in_a_pipe_is_a_line_however_long():
    long = "x" * 700
    code = TABLE.replace("\nprint_table", f"\ntable.add_row({long!r}, 'a', 'b', 'c')\nprint_table")
    assert re.search(f"^{long} +a +b  c *$", shown(code, None), re.M)
