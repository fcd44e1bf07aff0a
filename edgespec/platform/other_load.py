"""Other programs' work, which makes what is measured beside it unreliable."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

MOST_OTHER_LOAD = 0.15
"""Processors, beside half of those the measurement leaves idle, that other work may keep busy."""

_JUDGED_S = 1.0  # ticks of /proc/stat are 10 ms: less time says nothing of other work


class OtherLoad:
    """How many processors other programs keep busy, of those this process may use."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        """Begin to watch; `stat` is the kernel's file, so that tests can bring their own."""
        self._stat = stat
        self._began = self._now()

    def processors(self) -> float | None:
        """Return their number since the beginning; None where the kernel does not say, or too early."""
        began, ended = self._began, self._now()
        if began is None or ended is None or ended[0] - began[0] < _JUDGED_S:
            return None
        busy, own = ended[1] - began[1], ended[2] - began[2]
        return max(0.0, (busy - own) / (ended[0] - began[0]))

    def _now(self) -> tuple[float, float, float] | None:
        """Return the seconds of the clock, of the processors when busy, and of this process.

        Its children are its own work too; Linux adds their time when they have ended.
        """
        usable = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines()]
            # user nice system idle iowait irq softirq steal: all but idle and waiting for a disk
            rows = [[int(ticks) for ticks in line[1:9]] for line in lines if line and line[0] in usable]
            busy = sum(sum(row) - row[3] - row[4] for row in rows)
        except (OSError, ValueError, IndexError):
            return None
        own = os.times()
        spent = own.user + own.system + own.children_user + own.children_system
        return perf_counter(), busy / os.sysconf("SC_CLK_TCK"), spent
