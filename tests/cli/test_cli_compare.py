"""`edgespec compare` as a user types it, with tiny models."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from command_line import COMMAND, run_cli, user_environment
from edgespec.apps.bench.runs import BenchmarkOutcome
from edgespec.llama.kernels import plugin_path
from tiny_gguf import N_WORDS, write_tiny_gguf

TEXT = "the cat and the other dog ran in the rain; on and on it went, as the sun was out. " * 20

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_path, tiny_draft_path, packable_path) -> Path:
    """Two models, a draft of theirs and one of another family; prompts and a text."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "target.gguf").write_bytes(tiny_path.read_bytes())
    (folder / "packable-q4_k_m.gguf").write_bytes(packable_path.read_bytes())
    (folder / "draft.gguf").write_bytes(tiny_draft_path.read_bytes())
    write_tiny_gguf(folder / "other.gguf", texts={i: f"@{i}@" for i in range(N_WORDS)})
    prompts = {"a": "the cat and the other dog", "b": "on and on it went"}
    (folder / "suite.jsonl").write_text(
        "".join(
            json.dumps({"question_id": name, "category": f"about {name}", "turns": [text]}) + "\n"
            for name, text in prompts.items()
        )
    )
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def environment(environment):
    return environment | {"MARK_OF_THE_TEST": uuid.uuid4().hex}


def arguments_of(arguments: tuple[object, ...]) -> list[str]:
    """The command, short and the same on every machine: where energy is counted, idling would be timed."""
    common = ("--suite", "suite.jsonl", "-n", 12, "--threads", 1, "--assume-watts", 5)
    return ["compare", *map(str, (*common, *arguments))]


@pytest.fixture
def compare(environment, folder) -> Run:
    def compare(*arguments):
        return run_cli(*arguments_of(arguments), env=environment, cwd=folder)

    return compare


@pytest.fixture
def started(environment, folder):
    """Start the command, wait for a line on stderr, and return the process."""
    processes = []

    def started(*arguments, until: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments_of(arguments)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stderr
        while not process.stderr.readline().startswith(until):
            assert process.poll() is None
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def left_over(mark: str) -> list[str]:
    """The processes that were started with this mark, after giving them a while to end."""
    for _ in range(600):
        found = list(_marked(mark.encode()))
        if not found:
            break
        time.sleep(0.1)
    return found


def _marked(mark: bytes) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark in (process / "environ").read_bytes():
                yield (process / "cmdline").read_text()
        except OSError:  # it has ended, or is another user's
            continue


def outcome_of(process: subprocess.CompletedProcess[str]) -> BenchmarkOutcome:
    return msgspec.convert(json.loads(process.stdout)["outcome"], BenchmarkOutcome)


def texts(outcome: BenchmarkOutcome) -> list[tuple[object, ...]]:
    return sorted(
        (cell.target, str(cell.draft), cell.kernels, run.prompt, run.variant, run.round, run.text_sha256)
        for cell in outcome.cells
        for run in cell.runs
    )


def contents(out: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (out / "runs").iterdir()}


def kept_cells(out: Path) -> list[str]:
    """The names of the files of runs, without their keys."""
    return sorted(name.rsplit(".", 2)[0] for name in contents(out))


# ---- the matrix ----


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, folder):
    """The whole of it, once: what it wrote and said."""
    names = ("--targets", "target.gguf,packable-q4_k_m.gguf", "--drafts", "draft.gguf,suffix,none,other.gguf")
    files = ("--csv", "table.csv", "--report", "page.html", "--text", "text.txt", "--text-tokens", 600)
    arguments = (*names, "--kernels", "auto,off", "--rounds", 1, *files, "-o", "matrix", "--json")
    environment = user_environment(tmp_path_factory.mktemp("home"), kernels=True)
    return run_cli(*arguments_of(arguments), env=environment, cwd=folder)


def test_the_matrix(matrix, folder):
    assert matrix.returncode == 0, matrix.stderr
    outcome = outcome_of(matrix)
    assert outcome.kind == "compare"
    assert [(cell.target, cell.draft) for cell in outcome.cells] == [
        (target, draft)
        for _ in ("auto", "off")
        for target in ("target", "packable-q4_k_m")
        for draft in ("draft", "suffix", None, "other")
    ]
    measured = [cell for cell in outcome.cells if not cell.skipped]
    skipped = [cell for cell in outcome.cells if cell.skipped]
    assert len(measured) == 12
    assert {cell.draft for cell in skipped} == {"other"}
    assert [cell.kernels for cell in skipped] == ["auto", "auto", "off", "off"]
    assert all("other cannot draft for " in cell.skipped for cell in skipped)
    assert {len(cell.runs) for cell in measured if cell.draft} == {4}
    assert {len(cell.runs) for cell in measured if not cell.draft} == {2}
    assert {cell.kernels for cell in measured[6:]} == {"stock"}
    if plugin_path().exists() and "kernels" not in matrix.stderr.replace("+kernels-", ""):
        assert [cell.kernels != "stock" for cell in measured[:6]] == [False] * 3 + [True] * 3
    assert all(run.energy and run.energy.estimated for cell in measured for run in cell.runs)
    # At temperature 0 drafts change no text.
    prompts = {(*line[:1], *line[2:4]) for line in texts(outcome)}
    assert len({(*line[:1], *line[2:4], line[-1]) for line in texts(outcome)}) == len(prompts)
    assert kept_cells(folder / "matrix") == sorted(
        f"{target}+{draft}+kernels-{kernels}.0"
        for target in ("target", "packable-q4_k_m")
        for draft in ("draft", "suffix", "none")
        for kernels in ("auto", "off")
    )


def test_the_matrix_tells_where_it_is(matrix):
    lines = [line for line in matrix.stderr.splitlines() if line.startswith("round 1: ")]
    assert len(lines) == 16
    assert lines[0] == "round 1: target+draft+kernels-auto"
    assert "\x1b[" not in matrix.stdout + matrix.stderr


def test_the_matrix_has_accuracies(matrix, folder):
    accuracy = {one.target: one for one in outcome_of(matrix).accuracy}
    assert accuracy.keys() == {"target", "packable-q4_k_m"}
    assert {name: (one.reference, one.kl, one.passed) for name, one in accuracy.items()} == {
        name: (name, None, None) for name in accuracy
    }
    assert len(list((folder / "matrix").glob("accuracy.*.json"))) == 4, "of two targets with two kernels"


def test_the_matrix_is_written_in_files(matrix, folder):
    assert matrix.returncode == 0
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["target"] for row in rows} == {"target", "packable-q4_k_m"}
    page = (folder / "page.html").read_text()
    for word in ("packable-q4_k_m", "suffix", "other cannot draft for"):
        assert word in page


def test_two_names_of_one_file_are_measured_once(compare, folder, tmp_path):
    copies = [tmp_path / "twin.gguf", tmp_path / "small.gguf"]
    for copy, name in zip(copies, ("target", "draft"), strict=True):
        copy.write_bytes((folder / f"{name}.gguf").read_bytes())
    names = ("--targets", f"target.gguf,{copies[0]}", "--drafts", f"draft.gguf,none,{copies[1]}")
    process = compare(*names, "--rounds", 1, "--no-accuracy", "-o", tmp_path / "out", "--json")
    assert process.returncode == 0, process.stderr
    cells = outcome_of(process).cells
    assert [(cell.target, cell.draft) for cell in cells] == [("target", "draft"), ("target", None)]
    for name, other in (("twin", "target"), ("small", "draft")):
        assert f"edgespec: {name} is the same file as {other}: it is measured once\n" in process.stderr


# ---- stopped and taken up again ----

PAIR = ("--targets", "target.gguf", "--drafts", "draft.gguf,none,suffix", "--rounds", 2, "--no-accuracy")


def test_killed_and_taken_up_again(compare, started, environment, folder, tmp_path):
    out = tmp_path / "out"
    process = started(*PAIR, "-o", out, until="round 2: target+suffix")  # second of round 2
    process.kill()
    process.communicate()
    assert left_over(environment["MARK_OF_THE_TEST"]) == []
    before = contents(out)
    assert len(before) == 4

    resumed = compare(*PAIR, "-o", out, "--json")
    assert resumed.returncode == 0, resumed.stderr
    after = contents(out)
    assert after.items() > before.items(), "what was there is the same, and was not written again"
    assert len(after) == 6
    whole = compare(*PAIR, "-o", tmp_path / "whole", "--json")
    assert texts(outcome_of(resumed)) == texts(outcome_of(whole))
    assert len(texts(outcome_of(whole))) == 2 * 2 * (2 + 1 + 2)

    more = compare(*PAIR, "-o", out, "--rounds", 3, "--kernels", "off,auto", "--json")
    assert contents(out).items() > after.items()
    assert len(texts(outcome_of(more))) == 2 * 3 * 2 * (2 + 1 + 2)


def test_interrupted(started, environment, folder, tmp_path):
    out = tmp_path / "out"
    process = started(*PAIR, "-o", out, until="round 2: target+suffix")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert f"edgespec: stopped; run the same command again to resume from {out}" in stderr.splitlines()
    assert "Traceback" not in stderr
    for word in ("plain", "auto", "suffix", "identical"):
        assert word in stdout, "the table so far"
    assert left_over(environment["MARK_OF_THE_TEST"]) == []
    assert len(contents(out)) == 4


def test_interrupted_while_accuracy_is_measured(started, environment, folder, tmp_path):
    out = tmp_path / "out"
    arguments = ("--targets", "target.gguf", "--drafts", "none", "--rounds", 1, "-o", out)
    process = started(*arguments, until="accuracy of target")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "plain" in stdout
    assert left_over(environment["MARK_OF_THE_TEST"]) == []


# ---- quantizations and accuracy ----


def test_quantizations_and_problems(compare, folder, tmp_path):
    out = tmp_path / "out"
    arguments = (
        "--targets",
        "target.gguf",
        "--quants",
        "q8_0,q4_0",
        "--drafts",
        "none",
        "--rounds",
        1,
        "-o",
        out,
        "--text",
        "text.txt",
        "--text-tokens",
        600,
        "--problems",
        2,
        "--json",
    )
    process = compare(*arguments)
    assert process.returncode == 0, process.stderr
    outcome = outcome_of(process)
    assert {name: (model.quantization, model.made_from) for name, model in outcome.models.items()} == {
        "target-q8_0": ("Q8_0", "target"),
        "target-q4_0": ("Q4_0", "target"),
        "target": ("", ""),  # which the others are judged by
    }
    assert [(cell.target, len(cell.runs)) for cell in outcome.cells] == [
        ("target-q8_0", 2),
        ("target-q4_0", 2),
    ]
    scores = {one.target: one for one in outcome.accuracy}
    fine, coarse = scores["target-q8_0"], scores["target-q4_0"]
    assert (fine.reference, coarse.reference) == ("target", "target")
    assert scores["target"].kl is None
    assert coarse.kl > fine.kl > 0
    quantized = tmp_path / "models" / "quantized"
    made = {file: file.stat().st_mtime_ns for file in quantized.iterdir()}
    assert len(made) == 2
    assert "edgespec cache clear quantized" in process.stderr
    assert [(one.passed, one.n_problems) for one in (fine, coarse)] == [(0, 2), (0, 2)]
    assert scores["target"].n_problems is None, "it is no target"
    (answers,) = out.glob("runs/problems-target-q8_0+none+kernels-auto.0.*.json")
    assert [run["right"] for run in json.loads(answers.read_text())[1]["runs"]] == [False, False]

    again = compare(*arguments)
    assert outcome_of(again).accuracy == outcome.accuracy
    assert not [line for line in again.stderr.splitlines() if line.startswith(("accuracy", "round", "quant"))]
    assert {file: file.stat().st_mtime_ns for file in quantized.iterdir()} == made
