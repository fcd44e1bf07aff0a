"""A comparison in its folder: what is measured, what is kept, and what is measured again."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.apps.bench import measure as room
from edgespec.apps.bench import runs as kept_runs
from edgespec.apps.bench.compare import MTP, NO_DRAFT, SUFFIX, Combination, Comparison, ComparisonPlan
from edgespec.apps.bench.measure import BenchSettings
from edgespec.apps.bench.runs import PLAIN, Cell, keep
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.bench.variants import parse_variants
from edgespec.errors import UsageError
from edgespec.models.quantizations import ModelFile
from edgespec.platform.child import ReportingChild
from tiny_gguf import N_WORDS, write_tiny_gguf
from tiny_states import tiny

PROMPTS = (
    Prompt("a", "one", "the cat and the other dog ran in the rain"),
    Prompt("b", "two", "on and on it went, as the sun was out"),
)
BOTH, ALONE, OF_TEXT = (Combination("target", draft, "off") for draft in ("draft", NO_DRAFT, SUFFIX))


@pytest.fixture
def files(tiny_path, tiny_draft_path) -> dict[str, Path]:
    return {"target": tiny_path, "draft": tiny_draft_path}


def make_plan(files: dict[str, Path], *combinations: Combination, rounds=1, n_predict=12) -> ComparisonPlan:
    return ComparisonPlan(
        files={name: ModelFile(name, path) for name, path in files.items()},
        combinations=combinations,
        prompts=PROMPTS,
        settings=BenchSettings(parse_variants("auto"), n_predict),
        rounds=rounds,
        n_threads=1,
        assume_watts=None,
        machine={"processor": "this one"},
    )


def measure(plan: ComparisonPlan, folder: Path) -> tuple[Comparison, list[str]]:
    """Carry a plan out; return the cells that gave runs, as progress tells them: "DRAFT ROUND"."""
    comparison = Comparison(plan, folder)
    shown: list[str] = []

    def show(what: str, _done: int, _total: int) -> None:
        round_, name = what.removeprefix("round ").split(": ")
        shown.append(f"{name.split('+')[1]} {int(round_) - 1}")

    comparison.measure(show)
    return comparison, [what for what in dict.fromkeys(shown) if shown.count(what) > 1]


def cells_of(comparison: Comparison) -> tuple[Cell, ...]:
    return comparison.results()[0]


def told(comparison: Comparison) -> tuple[str, ...]:
    """The warnings, but of what else this machine does while it tests."""
    return tuple(line for line in comparison.results()[1] if "other programs" not in line)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of runs, and when it was written."""
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (folder / "runs").iterdir()}


def test_names_and_variants():
    assert BOTH.name == "target+draft+kernels-off"
    assert (BOTH.draft_model, ALONE.draft_model, OF_TEXT.draft_model) == ("draft", None, None)
    settings = BenchSettings(parse_variants("auto,model-3,suffix,staged"))
    variants = [
        [variant.name for variant in each.restrict(settings).variants] for each in (BOTH, ALONE, OF_TEXT)
    ]
    assert variants == [["auto", "model-3", "suffix", "staged"], [], ["auto", "suffix"]]


def test_the_variants_of_a_head_in_the_targets_own_file(tmp_path):
    head = Combination("target", MTP, "off")
    settings = BenchSettings(parse_variants("mtp-2,auto,cascade@0.4"), 12)
    names = [[variant.name for variant in each.restrict(settings).variants] for each in (head, BOTH, OF_TEXT)]
    assert names == [["mtp-2", "auto"], ["auto", "cascade@0.4"], ["auto"]]
    files = {"target": tiny("qwen35-mtp")}
    plan = replace(make_plan(files, head), settings=settings)
    comparison, _ = measure(plan, tmp_path)
    (cell,) = cells_of(comparison)
    assert (cell.skipped, cell.draft) == ("", MTP)
    assert {run.variant for run in cell.runs} == {PLAIN, "mtp-2", "auto"}
    drafted = {n for run in cell.runs if run.variant == "mtp-2" for n, _, _ in run.histogram or ()}
    assert max(drafted) == 2


def test_rounds_cells_and_runs(files, tmp_path):
    plan = make_plan(files, BOTH, ALONE, OF_TEXT, rounds=2)
    progress = []
    comparison = Comparison(plan, tmp_path)
    assert {cell.skipped for cell in cells_of(comparison)} == {"not measured yet"}
    comparison.measure(lambda *now: progress.append(now))
    names = {combination: combination.name for combination in plan.combinations}
    order = [(0, BOTH, 4), (0, ALONE, 2), (0, OF_TEXT, 4), (1, ALONE, 2), (1, OF_TEXT, 4), (1, BOTH, 4)]
    before = 0
    expected = []
    for round_, combination, n_runs in order:
        what = f"round {round_ + 1}: {names[combination]}"
        expected += [(what, before + n, 20) for n in range(n_runs + 1)]
        before += n_runs
    assert progress == expected

    assert sorted(contents(tmp_path)) == sorted(
        f"target+{draft}+kernels-off.{round_}.json"
        for draft in ("draft", NO_DRAFT, SUFFIX)
        for round_ in (0, 1)
    )
    both, alone, of_text = cells_of(comparison)
    assert [cell.draft for cell in (both, alone, of_text)] == ["draft", None, SUFFIX]
    assert told(comparison) == ()
    for cell, variants in ((both, [PLAIN, "auto"]), (alone, [PLAIN]), (of_text, [PLAIN, "auto"])):
        assert (cell.target, cell.kernels, cell.skipped) == ("target", "stock", "")
        assert cell.peak_rss_bytes > 10 << 20
        assert sorted((run.prompt, run.variant, run.round) for run in cell.runs) == sorted(
            (prompt.id, variant, round_) for prompt in PROMPTS for variant in variants for round_ in (0, 1)
        )
        texts = {(run.prompt, run.text_sha256) for run in cell.runs}
        assert len(texts) == 2, "of each prompt one text, however it is made"
    assert both.runs[0].variant != both.runs[2].variant, "who goes first changes"


def test_what_is_there_is_not_measured_again(files, tmp_path):
    plan = make_plan(files, BOTH, ALONE)
    first, _ = measure(plan, tmp_path)
    before = contents(tmp_path)
    again, seen = measure(plan, tmp_path)
    assert (seen, contents(tmp_path), cells_of(again)) == ([], before, cells_of(first))

    longer, seen = measure(replace(plan, rounds=2), tmp_path)
    assert seen == ["none 1", "draft 1"]
    wider, seen = measure(replace(plan, combinations=(*plan.combinations, OF_TEXT)), tmp_path)
    assert seen == ["suffix 0"]
    assert contents(tmp_path).items() > before.items()
    assert [len(cell.runs) for cell in cells_of(longer)] == [8, 4]
    assert [len(cell.runs) for cell in cells_of(wider)] == [4, 2, 4], "of the rounds that were asked for"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: replace(plan, prompts=PROMPTS[:1]), "other prompts"),
        (lambda plan: replace(plan, settings=replace(plan.settings, n_predict=13)), "other settings"),
        (lambda plan: replace(plan, settings=replace(plan.settings, temperature=0.5)), "other settings"),
        (lambda plan: replace(plan, n_threads=2), "other threads"),
        (lambda plan: replace(plan, assume_watts=5.0, machine={}), "other assume_watts, machine"),
    ],
)
def test_another_comparison_is_refused(change, words, files, tmp_path):
    plan = make_plan(files, ALONE)
    Comparison(plan, tmp_path)
    before = (tmp_path / "comparison.json").read_bytes()
    with pytest.raises(UsageError, match=words) as caught:
        Comparison(change(plan), tmp_path)
    assert "--fresh" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "comparison.json").read_bytes() == before


def test_another_model_of_the_same_name_is_refused(files, tmp_path):
    plan = make_plan(files, BOTH)
    Comparison(plan, tmp_path)
    others = {**files, "draft": write_tiny_gguf(tmp_path / "draft.gguf", seed=9)}
    # Also when it was left out in between.
    Comparison(make_plan({"target": files["target"]}, ALONE), tmp_path)
    with pytest.raises(UsageError, match=r"\(other draft\)"):
        Comparison(make_plan(others, BOTH), tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[: len(data) // 2],
        lambda _: b"\xff\xfe",
        lambda _: b'{"target": "target", "draft": null, "kernels": "stock"}',
        lambda data: data.replace(b'["', b'["0', 1),
    ],
)
def test_damaged_files_are_measured_again(damage, files, tmp_path):
    plan = make_plan(files, ALONE)
    measure(plan, tmp_path)
    (file,) = (tmp_path / "runs").iterdir()
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    comparison, seen = measure(plan, tmp_path)
    assert seen == ["none 0"]
    assert len(cells_of(comparison)[0].runs) == 2
    assert measure(plan, tmp_path)[1] == []


def test_files_of_another_comparison_are_measured_again(files, tmp_path):
    measure(make_plan(files, ALONE, n_predict=4), tmp_path)
    (tmp_path / "comparison.json").unlink()
    comparison, seen = measure(make_plan(files, ALONE), tmp_path)
    assert seen == ["none 0"]
    assert {run.tokens for run in cells_of(comparison)[0].runs} == {12}
    # Copied over another round's, and over another cell's.
    (file,) = (tmp_path / "runs").iterdir()
    file.with_name(f"{ALONE.name}.1.json").write_bytes(file.read_bytes())
    assert measure(make_plan(files, ALONE, rounds=2), tmp_path)[1] == ["none 1"]
    file.with_name(f"{OF_TEXT.name}.0.json").write_bytes(file.read_bytes())
    assert measure(make_plan(files, OF_TEXT), tmp_path)[1] == ["suffix 0"]


def test_a_damaged_plan(files, tmp_path):
    plan = make_plan(files, ALONE)
    measure(plan, tmp_path)
    before = contents(tmp_path)
    for data in (b"", b"[]", b'{"mine": 1}', b"\xff"):
        (tmp_path / "comparison.json").write_bytes(data)
        for act in (lambda: Comparison(plan, tmp_path), lambda: Comparison.discard(tmp_path)):
            with pytest.raises(UsageError, match=r"comparison\.json: .*plan.*; delete it, or") as caught:
                act()
            assert "\n" not in str(caught.value)
        assert (tmp_path / "comparison.json").read_bytes() == data
    (tmp_path / "comparison.json").unlink()
    assert measure(plan, tmp_path)[1] == []
    assert contents(tmp_path) == before


def test_fresh_deletes_what_is_its_own(files, tmp_path):
    Comparison.discard(tmp_path / "missing")
    measure(make_plan(files, BOTH, ALONE), tmp_path)
    measure(make_plan({"target": files["target"]}, OF_TEXT), tmp_path)
    for name in ("accuracy-target+kernels-off.json", "problems-target+kernels-auto.json"):
        keep(tmp_path / name, "0" * 64, [])
    mine = ["notes.txt", "accuracy-mine+kernels-off.json", "runs/mine.json", "runs/mine+x+kernels-off.0.json"]
    mine += ["runs/target+draft+kernels-off.plot.json", "models/target-q8_0.gguf"]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    Comparison.discard(tmp_path)
    left = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    assert sorted(left) == sorted(mine)
    Comparison.discard(tmp_path)
    assert {(tmp_path / name).read_text() for name in mine} == {"mine"}


# ---- cells that cannot run ----


def test_cells_that_cannot_run_are_skipped(files, tmp_path):
    files |= {
        "other": write_tiny_gguf(tmp_path / "other.gguf", texts={i: f"@{i}@" for i in range(N_WORDS)}),
        "short": write_tiny_gguf(tmp_path / "short.gguf", n_ctx=30),
        "cut": tmp_path / "cut.gguf",
        "endless": write_tiny_gguf(tmp_path / "endless.gguf", n_ctx=2**31 - 1),
    }
    files["cut"].write_bytes(files["target"].read_bytes()[:-500])
    others = [
        Combination(*names, "off")
        for names in (("target", "other"), ("short", "none"), ("cut", "none"), ("target", "cut"))
    ]
    comparison, seen = measure(make_plan(files, *others, ALONE), tmp_path / "out")
    assert seen == ["none 0"], "the rest goes on"
    *skipped, measured = cells_of(comparison)
    assert len(measured.runs) == 2
    for cell, words in zip(
        skipped,
        (
            "other cannot draft for target",
            "a: with 12 tokens of answer it needs a context of",
            "cut: ",
            "cut: ",
        ),
        strict=True,
    ):
        assert cell.skipped.startswith(words), cell.skipped
        assert "\n" not in cell.skipped
        assert cell.kernels == "off"
    assert str(tmp_path) not in "".join(cell.skipped for cell in skipped)
    assert told(comparison) == (), "the table says it"
    assert list(contents(tmp_path / "out")) == ["target+none+kernels-off.0.json"]

    huge = make_plan(files, Combination("endless", "none", "off"), n_predict=10**9)
    comparison, _ = measure(huge, tmp_path / "huge")
    assert cells_of(comparison)[0].skipped.startswith("not enough memory: about ")


CRASHES = """
import io, os, sys
from edgespec.apps.bench import measure

def _in_child():
    data = sys.stdin.buffer.read()
    if b'"suffix"' not in data and b'"draft":null' in data and {when}:
        {act}
    sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    return measure._in_child()
"""


@pytest.fixture
def crashing(tmp_path, monkeypatch):
    """Let the processes of ALONE crash."""

    def crashing(act: str, when: str = "True") -> None:
        (tmp_path / "crashes.py").write_text(CRASHES.format(act=act, when=when))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setattr(
            room, "ReportingChild", lambda _module, what, request: ReportingChild("crashes", what, request)
        )

    return crashing


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("os.abort()", "its process ended by signal 6: "),
        ("os.kill(os.getpid(), 9)", "its process ended by signal 9: it may have run out of memory"),
        ("os._exit(7)", "its process ended with code 7: "),
        ("raise ValueError('of no use')", "its process ended with code 1: ValueError: of no use"),
    ],
)
def test_a_cell_that_crashes_is_skipped(act, reason, files, tmp_path, crashing):
    crashing(act)
    comparison, seen = measure(make_plan(files, ALONE, BOTH, rounds=2), tmp_path)
    assert seen == ["draft 0", "draft 1"]
    alone, both = cells_of(comparison)
    assert alone.skipped.startswith(reason), alone.skipped
    assert (alone.runs, len(both.runs)) == ((), 8)


def test_a_cell_that_crashes_later_is_warned_of(files, tmp_path, crashing):
    crashing("os.abort()", """b'"round":1' in data""")
    comparison, _ = measure(make_plan(files, ALONE, BOTH, rounds=3), tmp_path)
    assert [len(cell.runs) for cell in cells_of(comparison)] == [2, 12]
    (warning,) = told(comparison)
    assert warning.startswith("target+none+kernels-off was not measured in every round: its process ended by")
    crashing("os.abort()", "False")
    comparison, seen = measure(make_plan(files, ALONE, BOTH, rounds=3), tmp_path)
    assert seen == ["none 1", "none 2"], "it is tried again"
    assert (len(cells_of(comparison)[0].runs), told(comparison)) == (6, ())


def test_rounds_with_other_kernels_are_told(files, tmp_path):
    plan = make_plan(files, ALONE, rounds=2)
    comparison, _ = measure(plan, tmp_path)
    file = tmp_path / "runs" / f"{ALONE.name}.1.json"
    file.write_text(file.read_text().replace('"kernels":"stock"', '"kernels":"avx2"'))
    (cell,) = cells_of(comparison)
    assert (cell.kernels, {run.round for run in cell.runs}) == ("avx2, stock", {0, 1})


def test_what_disturbed_a_cell_is_kept_with_it(files, tmp_path, monkeypatch):
    monkeypatch.setattr(room.MachineWatch, "warnings", lambda _: ("the machine ran on its battery",))
    measure(make_plan(files, ALONE), tmp_path)
    monkeypatch.undo()
    comparison, seen = measure(make_plan(files, ALONE), tmp_path)
    assert seen == [], "it goes on"
    assert comparison.results()[1] == (f"{ALONE.name}, round 1: the machine ran on its battery",)


# ---- a folder that cannot be written to ----


def test_a_full_disk(files, tmp_path, monkeypatch):
    plan = make_plan(files, ALONE, OF_TEXT)
    comparison = Comparison(plan, tmp_path)
    write = kept_runs.write_atomically

    def full(file: Path, text: str) -> None:
        if SUFFIX in file.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write(file, text)

    monkeypatch.setattr(kept_runs, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        comparison.measure(lambda *_: None)
    assert [len(cell.runs) for cell in cells_of(comparison)] == [2, 0]
    monkeypatch.undo()
    assert measure(plan, tmp_path)[1] == ["suffix 0"]


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/no/such"])
def test_a_folder_that_cannot_be(folder, files, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=r"^out .*: ") as caught:
        Comparison(make_plan(files, ALONE), tmp_path / folder)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_plan_is_kept(files, tmp_path):
    Comparison(make_plan(files, BOTH), tmp_path)
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["models"].keys() == {"target", "draft"}
    assert [prompt["id"] for prompt in document["conditions"]["prompts"]] == ["a", "b"]
