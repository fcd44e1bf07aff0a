"""Load of other programs: measurements taken meanwhile are unreliable."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

from edgespec.platform.files import text_of

MOST_OTHER_LOAD = 0.15
"""Processors that other work may keep busy, on top of half of those the measurement leaves idle."""

BUSY = "processors busy"
"""Words of every warning about such a load."""

_UTIME, _CSTIME = 11, 14  # utime stime cutime cstime among what follows a process's name in its stat
_SHORTEST_S = 1.0  # ticks of /proc/stat are 10 ms: a shorter time shows little of other work


class OtherLoad:
    """Processors, of those this process may use, that other programs keep busy."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        """Start watching; `stat` is a parameter for tests, with its neighbours in /proc."""
        self._stat = stat
        self._began = self._now()

    def processors(self) -> float | None:
        """Return how many they kept busy on average since the start; None if unknown or within a second."""
        began, ended = self._began, self._now()
        if began is None or ended is None or ended[0] - began[0] < _SHORTEST_S:
            return None
        busy, own = ended[1] - began[1], ended[2] - began[2]
        return max(0.0, (busy - own) / (ended[0] - began[0]))

    def _now(self) -> tuple[float, float, float] | None:
        """Return seconds: the clock, the busy time of all processors, this process's and its children's."""
        usable = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines()]
            # user nice system idle iowait irq softirq steal: busy is all but idle and iowait
            rows = [[int(ticks) for ticks in line[1:9]] for line in lines if line and line[0] in usable]
            busy = sum(sum(row) - row[3] - row[4] for row in rows)
        except (OSError, ValueError, IndexError):
            return None
        own = os.times()
        # Linux adds a child's time to its parent's when it has ended: those that run are asked themselves.
        ended = own.children_user + own.children_system
        spent = own.user + own.system + ended + _of_children(self._stat.parent, "self")
        return perf_counter(), busy / os.sysconf("SC_CLK_TCK"), spent


def _of_children(proc: Path, process: str) -> float:
    """Return the CPU time of the processes that `process` started and that run, in seconds; 0 if unknown."""
    children = [text_of(listed).split() for listed in (proc / process / "task").glob("*/children")]
    spent = 0.0
    for child in [pid for pids in children for pid in pids]:
        # The name, in parentheses, may hold anything; the state is what follows it.
        facts = text_of(proc / child / "stat").rpartition(")")[2].split()
        if len(facts) > _CSTIME:
            spent += sum(map(int, facts[_UTIME : _CSTIME + 1])) / os.sysconf("SC_CLK_TCK")
            spent += _of_children(proc, child)
    return spent
