"""A comparison in its folder: what is measured, what is kept, and what is measured again."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.apps.bench import measure as room
from edgespec.apps.bench import runs as kept_runs
from edgespec.apps.bench.compare import MTP, NO_DRAFT, SUFFIX, Combination, Comparison
from edgespec.apps.bench.measure import BenchSettings
from edgespec.apps.bench.quantizations import ModelFile
from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome, Cell, parse_variants
from edgespec.apps.bench.suites import Prompt, Suite
from edgespec.platform.processes import ReportingChild
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


@pytest.fixture
def compared(files, tmp_path):
    """Return a comparison of "target", or of `targets`, with drafts, by names in `files`."""

    def compared(*drafts: str, targets: tuple[str, ...] = ("target",), **more: Any) -> Comparison:
        own = {"rounds": 1, "n_threads": 1, "assume_watts": None, "folder": tmp_path / "out"}
        return Comparison(
            {name: ModelFile(name, files[name]) for name in targets},
            {name: ModelFile(name, files[name]) if name in files else None for name in drafts},
            {},
            ["off"],
            Suite("mine", "", PROMPTS),
            more.pop("settings", BenchSettings(parse_variants("auto"), 12)),
            **own | {"machine": {"processor": "this one"}} | more,
        )

    return compared


def measure(comparison: Comparison) -> list[str]:
    """Carry a comparison out; return the cells that gave runs, as progress tells them: "DRAFT ROUND"."""
    shown: list[str] = []
    comparison.measure(lambda what, _done, _total: shown.append(what))
    found = []
    for what in dict.fromkeys(shown):
        round_, name = what.removeprefix("round ").split(": ")
        found += [f"{name.split('+')[1]} {int(round_) - 1}"] if shown.count(what) > 1 else []
    return found


def outcome(comparison: Comparison) -> BenchmarkOutcome:
    return comparison.outcome({})


def cells_of(comparison: Comparison) -> tuple[Cell, ...]:
    return outcome(comparison).cells


def told(comparison: Comparison) -> tuple[str, ...]:
    """The warnings, but of what else this machine does while it tests."""
    return tuple(line for line in outcome(comparison).warnings if "other programs" not in line)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of runs, and when it was written."""
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.glob("out/runs/*")}


def test_names_and_variants():
    assert BOTH.name == "target+draft+kernels-off"
    assert (BOTH.draft_model, ALONE.draft_model, OF_TEXT.draft_model) == ("draft", None, None)
    settings = BenchSettings(parse_variants("auto,model-3,suffix,staged"))
    variants = [
        [variant.name for variant in each.restrict(settings).variants] for each in (BOTH, ALONE, OF_TEXT)
    ]
    assert variants == [["auto", "model-3", "suffix", "staged"], [], ["auto", "suffix"]]


def test_the_variants_of_a_head_in_the_targets_own_file(files, compared):
    head = Combination("target", MTP, "off")
    settings = BenchSettings(parse_variants("mtp-2,auto,cascade@0.4"), 12)
    names = [[variant.name for variant in each.restrict(settings).variants] for each in (head, BOTH, OF_TEXT)]
    assert names == [["mtp-2", "auto"], ["auto", "cascade@0.4"], ["auto"]]
    files["target"] = tiny("qwen35-mtp")
    comparison = compared(MTP, settings=settings)
    measure(comparison)
    (cell,) = cells_of(comparison)
    assert (cell.skipped, cell.draft) == ("", MTP)
    assert {run.variant for run in cell.runs} == {PLAIN, "mtp-2", "auto"}
    drafted = {n for run in cell.runs if run.variant == "mtp-2" for n, _, _ in run.histogram or ()}
    assert max(drafted) == 2


def test_rounds_cells_and_runs(compared, tmp_path):
    progress = []
    comparison = compared("draft", NO_DRAFT, SUFFIX, rounds=2)
    assert {cell.skipped for cell in cells_of(comparison)} == {"not measured yet"}
    comparison.measure(lambda *now: progress.append(now))
    order = [(0, BOTH, 4), (0, ALONE, 2), (0, OF_TEXT, 4), (1, ALONE, 2), (1, OF_TEXT, 4), (1, BOTH, 4)]
    before = 0
    expected = []
    for round_, combination, n_runs in order:
        what = f"round {round_ + 1}: {combination.name}"
        expected += [(what, before + n, 20) for n in range(n_runs + 1)]
        before += n_runs
    assert progress == expected

    assert sorted(name.rsplit(".", 2)[0] for name in contents(tmp_path)) == sorted(
        f"target+{draft}+kernels-off.{round_}" for draft in ("draft", NO_DRAFT, SUFFIX) for round_ in (0, 1)
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


def test_what_is_there_is_not_measured_again(compared, tmp_path):
    first = compared("draft", NO_DRAFT)
    measure(first)
    before = contents(tmp_path)
    again = compared("draft", NO_DRAFT)
    assert (measure(again), contents(tmp_path), cells_of(again)) == ([], before, cells_of(first))

    longer, wider = compared("draft", NO_DRAFT, rounds=2), compared("draft", NO_DRAFT, SUFFIX)
    assert measure(longer) == ["none 1", "draft 1"]
    assert measure(wider) == ["suffix 0"]
    assert contents(tmp_path).items() > before.items()
    assert [len(cell.runs) for cell in cells_of(longer)] == [8, 4]
    assert [len(cell.runs) for cell in cells_of(wider)] == [4, 2, 4], "of the rounds that were asked for"


@pytest.mark.parametrize(
    "changed",
    [
        {"settings": BenchSettings(parse_variants("auto"), 13)},
        {"settings": BenchSettings(parse_variants("auto"), 12, 0.5)},
        {"suite": Suite("mine", "", PROMPTS[:1])},
        {"n_threads": 2},
        {"assume_watts": 5.0},
        {"machine": {"processor": "another"}},
    ],
    ids="".join,
)
def test_another_comparison_is_measured_beside_the_first(changed, compared, tmp_path):
    measure(compared(NO_DRAFT))
    before = contents(tmp_path)
    other = replace(compared(NO_DRAFT), **changed)
    assert measure(other) == ["none 0"]
    assert len(contents(tmp_path)) == 2
    assert contents(tmp_path).items() > before.items()
    assert measure(compared(NO_DRAFT)) == measure(other) == []


def test_another_model_of_the_same_name_is_measured(files, compared, tmp_path):
    measure(compared("draft"))
    files["draft"] = write_tiny_gguf(tmp_path / "draft.gguf", seed=9)
    assert measure(compared("draft")) == ["draft 0"]
    assert len(contents(tmp_path)) == 2


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
def test_damaged_files_are_measured_again(damage, compared, tmp_path):
    measure(compared(NO_DRAFT))
    (file,) = tmp_path.glob("out/runs/*")
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    comparison = compared(NO_DRAFT)
    assert measure(comparison) == ["none 0"]
    assert len(cells_of(comparison)[0].runs) == 2
    assert measure(compared(NO_DRAFT)) == []


def test_fresh_deletes_what_is_its_own(compared, tmp_path):
    compared(NO_DRAFT).discard()
    measure(compared("draft", NO_DRAFT))
    others = compared("draft", settings=BenchSettings(parse_variants("auto"), 13))
    measure(others)
    (tmp_path / "out/runs/target+draft+kernels-off.plot.json").write_text("mine")
    compared("draft", NO_DRAFT).discard()
    assert list(contents(tmp_path)) == ["target+draft+kernels-off.plot.json"]
    assert (tmp_path / "out/runs/target+draft+kernels-off.plot.json").read_text() == "mine"


# ---- cells that cannot run ----


def test_cells_that_cannot_run_are_skipped(files, compared, tmp_path):
    files |= {
        "other": write_tiny_gguf(tmp_path / "other.gguf", texts={i: f"@{i}@" for i in range(N_WORDS)}),
        "short": write_tiny_gguf(tmp_path / "short.gguf", n_ctx=30),
        "cut": tmp_path / "cut.gguf",
        "endless": write_tiny_gguf(tmp_path / "endless.gguf", n_ctx=2**31 - 1),
    }
    files["cut"].write_bytes(files["target"].read_bytes()[:-500])
    comparison = compared("other", "cut", NO_DRAFT, targets=("target", "short", "cut"))
    assert measure(comparison) == ["none 0"], "the rest goes on"
    cells = {(cell.target, cell.draft): cell for cell in cells_of(comparison)}
    assert len(cells.pop(("target", None)).runs) == 2
    reasons = {
        ("target", "other"): "other cannot draft for target",
        ("short", None): "a is left out: with 12 tokens of answer it needs a context of",
        ("cut", None): "cut: ",
        ("target", "cut"): "cut: ",
    }
    for cell, words in reasons.items():
        assert cells[cell].skipped.startswith(words), cells[cell].skipped
    for one in cells.values():
        assert one.skipped.count("\n") == 0
        assert one.kernels == "off"
        assert str(tmp_path) not in one.skipped
    assert told(comparison) == (), "the table says it"
    assert len(contents(tmp_path)) == 1

    huge = compared(NO_DRAFT, targets=("endless",), settings=BenchSettings((), 10**9))
    measure(huge)
    assert cells_of(huge)[0].skipped.startswith("not enough memory: about ")


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
def test_a_cell_that_crashes_is_skipped(act, reason, compared, crashing):
    crashing(act)
    comparison = compared(NO_DRAFT, "draft", rounds=2)
    assert measure(comparison) == ["draft 0", "draft 1"]
    alone, both = cells_of(comparison)
    assert alone.skipped.startswith(reason), alone.skipped
    assert (alone.runs, len(both.runs)) == ((), 8)


def test_a_cell_that_crashes_later_is_warned_of(compared, crashing):
    crashing("os.abort()", """b'"round":1' in data""")
    comparison = compared(NO_DRAFT, "draft", rounds=3)
    measure(comparison)
    assert [len(cell.runs) for cell in cells_of(comparison)] == [2, 12]
    (warning,) = told(comparison)
    assert warning.startswith("target+none+kernels-off was not measured in every round: its process ended by")
    crashing("os.abort()", "False")
    again = compared(NO_DRAFT, "draft", rounds=3)
    assert measure(again) == ["none 1", "none 2"], "it is tried again"
    assert (len(cells_of(again)[0].runs), told(again)) == (6, ())


def test_rounds_with_other_kernels_are_told(compared, tmp_path):
    comparison = compared(NO_DRAFT, rounds=2)
    measure(comparison)
    (file,) = tmp_path.glob("out/runs/*.1.*.json")
    file.write_text(file.read_text().replace('"kernels":"stock"', '"kernels":"avx2"'))
    (cell,) = cells_of(comparison)
    assert (cell.kernels, {run.round for run in cell.runs}) == ("avx2, stock", {0, 1})


def test_what_disturbed_a_cell_is_kept_with_it(compared, monkeypatch):
    monkeypatch.setattr(room.MachineWatch, "warnings", lambda _: ("the machine ran on its battery",))
    measure(compared(NO_DRAFT))
    monkeypatch.undo()
    comparison = compared(NO_DRAFT)
    assert measure(comparison) == [], "it goes on"
    assert outcome(comparison).warnings == (f"{ALONE.name}, round 1: the machine ran on its battery",)


def test_a_full_disk(compared, monkeypatch):
    comparison = compared(NO_DRAFT, SUFFIX)
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
    assert measure(compared(NO_DRAFT, SUFFIX)) == ["suffix 0"]
