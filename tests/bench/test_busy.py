"""bench/busy.py: its processes, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from busy import STOCK, busy_processes, measured, report, speeds
from edgespec.apps.bench.runs import PLAIN, Run


def run(variant: str, seconds: float, *, text: str = "same", turn: int = 0) -> Run:
    return Run(
        *("1", "humaneval", variant, turn),
        prompt_tokens=10,
        tokens=30,
        total_s=seconds,
        ttft_s=None,
        prefill_s=None,
        draft_prefill_s=None,
        text_sha256=text,
    )


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_processes_end_with_their_block_also_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), busy_processes(2) as processes:
        assert all(map(is_running, processes))
        raise KeyboardInterrupt
    assert len(processes) == 2
    assert not any(map(is_running, processes))


def test_each_round_is_beside_each_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busy.compared", lambda *_: [run(PLAIN, 1.0)])
    runs = measured({}, [], [], [0, 1], 2)
    assert {n: [one.round for one in some] for n, some in runs.items()} == {0: [0, 1], 1: [0, 1]}


def test_the_table() -> None:
    runs = {
        0: [run(STOCK, 2.0, text="its own"), run(PLAIN, 1.0), run(PLAIN, 2.0), run(PLAIN, 3.0)],
        2: [run(STOCK, 4.0, text="its own"), run(PLAIN, 3.0)],
    }
    assert speeds(runs[0])[PLAIN][0] == 15.0
    head, none, two, texts = report(runs)
    assert head.split() == ["busy", "processes", *STOCK.split(), PLAIN]
    assert (none.split()[:2], two.split()[:2]) == (["0", "15.0"], ["2", "7.5"])
    assert "the same" in texts
    assert report({0: runs[0], 2: [*runs[2], run(PLAIN, 3.0, text="another")]})[-1] == "TEXTS DIFFER"
