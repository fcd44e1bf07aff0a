"""Other programs' load, from a /proc/stat of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.platform import machine as room
from edgespec.platform.machine import OtherLoad, _of_children


def write_child(proc, parent, child, *, utime, name="child"):
    """A process `child` of `parent`, of that many seconds, as Linux shows it."""
    listed = proc / parent / "task/1/children"
    listed.parent.mkdir(parents=True)
    listed.write_text(f"99999 {child} ")  # the first has ended
    ticks = int(utime * os.sysconf("SC_CLK_TCK"))
    (proc / child).mkdir()
    (proc / child / "stat").write_text(
        f"{child} ({name}) S 70 1 1 0 -1 4194304 9 9 0 0 {ticks} 0 0 0 20 0 1\n"
    )


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
    write_child(tmp_path, "self", "71", utime=1, name="a (b) c")
    write_child(tmp_path, "71", "72", utime=1)
    assert load.processors() == pytest.approx(0.05), "children that run are our own, too"
    for text in ("", "cpu0 x\n", "cpu0 1 2\n"):
        stat.write_text(text)
        load.processors()  # never raises
    assert OtherLoad(tmp_path / "none").processors() is None


def test_a_child_that_works_is_no_other_program(child_environment):
    """Two processes, one of which works: both count as one's own."""
    load = OtherLoad()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], env=child_environment) as child:
        before = _of_children(Path("/proc"), "self")
        deadline = time.monotonic() + 60
        while _of_children(Path("/proc"), "self") < before + 0.5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _of_children(Path("/proc"), "self") >= before + 0.5
        began, ended = load._began, load._now()
        child.kill()
    assert ended[2] - began[2] >= 0.5
