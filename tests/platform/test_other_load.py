"""Other programs' load, from a /proc/stat of our own."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from edgespec.platform import other_load as room
from edgespec.platform.other_load import OtherLoad


def test_other_load(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(room, "perf_counter", lambda: now)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2})
    own = SimpleNamespace(user=1.0, system=1.0, children_user=0.0, children_system=0.0)
    monkeypatch.setattr(os, "times", lambda: own)
    hz = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"

    def write(cpu0: float, cpu1: float, cpu2: float) -> None:
        rows = [
            f"cpu{i} {int(busy * hz)} 0 0 12345 77 0 0 0 9 9" for i, busy in enumerate((cpu0, cpu1, cpu2))
        ]
        stat.write_text("cpu 1 2 3\n" + "\n".join(rows) + "\nintr 1\n")

    write(10, 10, 10)
    load = OtherLoad(stat)
    assert load.processors() is None, "too early"
    now += 10
    own.user += 3
    own.children_user += 2
    write(17, 20, 10.5)  # of 7.5 s, 5 were our own; cpu1 is not ours to use
    assert load.processors() == pytest.approx(0.25)
    for text in ("", "cpu0 x\n", "cpu0 1 2\n"):
        stat.write_text(text)
        load.processors()  # never raises
    assert OtherLoad(tmp_path / "none").processors() is None
