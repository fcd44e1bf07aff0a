"""`bench --clients` and `compare --clients` as a user types them, with tiny models."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from command_line import failed, run_cli
from edgespec.apps.bench.runs import BenchmarkOutcome

QUICK = (
    "--threads",
    1,
    "-n",
    4,
    "--variants",
    "suffix",
    "--rounds",
    2,
    "--clients",
    "3,1",
    "--assume-watts",
    5,
)
POINTS = [(1, "plain"), (1, "suffix"), (3, "plain"), (3, "suffix")]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path, tiny_path: Path, tiny_draft_path: Path) -> Path:
    """A pair, and three prompts."""
    for name, path in (("target", tiny_path), ("draft", tiny_draft_path)):
        (tmp_path / f"{name}.gguf").symlink_to(path)
    lines = [
        json.dumps({"question_id": i, "category": f"about {i % 2}", "turns": [f"the cat and {i}"]})
        for i in range(3)
    ]
    (tmp_path / "suite.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def run(folder: Path, environment: dict[str, str]) -> Run:
    def run(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        suite = arguments if "--suite" in arguments else ("--suite", "suite.jsonl", *arguments)
        return run_cli(command, *map(str, suite), env=environment, cwd=folder)

    return run


@pytest.fixture
def bench(run: Run) -> Run:
    return lambda *arguments: run("bench", "-t", "target.gguf", *arguments)


def outcome_of(process: subprocess.CompletedProcess[str]) -> BenchmarkOutcome:
    assert process.returncode == 0, process.stderr
    return msgspec.convert(json.loads(process.stdout)["outcome"], BenchmarkOutcome)


def test_the_table_of_a_bench(bench: Run) -> None:
    process = bench(*QUICK)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    rows = [line.split() for line in lines if line.strip().startswith(("1 ", "3 "))]
    assert [(int(row[0]), row[1]) for row in rows] == POINTS
    assert {row[-1] for row in rows} == {"6/6"}
    assert "n / T(n)" in process.stdout
    assert any(line.startswith("Most tokens a second: ") for line in lines)
    assert "Outputs: all 24 identical" in process.stdout
    assert "2 rounds" in process.stderr


def test_everything_of_a_bench_in_files(bench: Run, folder: Path) -> None:
    files = {name: folder / f"x.{name}" for name in ("csv", "report", "png")}
    options = [part for name, file in files.items() for part in (f"--{name}", file)]
    process = bench(*QUICK, "--json", *options)
    outcome = outcome_of(process)
    assert outcome.settings["clients"] == "1, 3"
    (cell,) = outcome.cells
    assert cell.runs == ()
    assert len(cell.throughput) == 2 * len(POINTS)
    assert {one.n for one in cell.passes} == {1, 3}
    points = json.loads(process.stdout)["curves"][0]
    assert [(point["at_once"], point["variant"]) for point in points] == POINTS
    rows = [*csv.DictReader(files["csv"].open())]
    assert [(int(row["texts_at_once"]), row["variant"]) for row in rows] == POINTS
    assert files["report"].read_text().count("<svg") == 1
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_the_budget_is_said(bench: Run) -> None:
    process = bench(*QUICK, "--budget", "0.001s")
    assert process.returncode == 0, process.stderr
    assert "1 of 4 figures of round 1; the budget of 0.001 s was spent" in process.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clients", "0"), ("clients", "different numbers from 1 to 256")),
        (("--clients", ""), ("clients",)),
        (("--clients", "1,4"), ("clients 4", "only 3 prompts")),
        (("--clients", "1,2", "--variants", "cascade@0.4"), ("variants cascade@0.4", "not exact")),
        (("--clients", "1,2", "--peer", "llama.cpp", "--bin", "."), ("--clients and --peer",)),
    ],
)
def test_what_is_refused(bench: Run, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    failed(bench(*options), 2, *words)


@pytest.mark.slow
def test_a_comparison(run: Run) -> None:
    matrix = ("--targets", "target.gguf", "--drafts", "none,suffix", "--no-accuracy", *QUICK)
    outcome = outcome_of(run("compare", *matrix, "--json"))
    alone, suffix = outcome.cells
    assert {one.variant for one in alone.throughput} == {"plain"}
    assert len(alone.throughput) == 2 * 2
    assert len(suffix.throughput) == 2 * len(POINTS)
    assert {(one.n, one.round) for one in suffix.passes} == {(1, 0), (3, 0), (1, 1), (3, 1)}
    table = run("compare", *matrix)
    assert table.returncode == 0, table.stderr
    assert table.stdout.count("n / T(n)") == 2
    assert "target, drafted by suffix" in table.stdout
    failed(run("compare", *matrix[:-4], "--clients", "1,4"), 2, "clients 4", "only 3 prompts")
