"""Long work that makes way for the user: it runs while the machine is idle and on mains, and waits otherwise.

    watch = IdleWatch(on_message=message)
    for batch in batches:
        watch.pause()       returns at once, or when the machine has been idle for a minute again
        train(batch)

It stops within seconds of other work, and goes on after a minute without any.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edgespec.errors import EdgespecError
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.other_load import OtherLoad
from edgespec.platform.power_supply import on_battery

IDLE_S = 60.0
"""Seconds without a disturbance after which the machine is idle."""

RECENT_S = 10.0
"""Seconds over which other programs' load is averaged."""

MOST_OTHERS = 0.25
"""Processors that other programs may keep busy on an idle machine: what a desktop does by itself."""

_LOOK_EVERY_S = 5.0


class Load(Protocol):
    """Other programs' load since it was made."""

    def processors(self) -> float | None:
        """Return how many processors they kept busy, on average; None if that is unknown."""


class IdleWatch:
    """Says whether the machine is idle and on mains, and waits for it.

    Idle: in the last minute there were no RECENT_S in which other programs kept more than MOST_OTHERS
    processors busy, and nobody typed in a terminal. Keys that a graphical program gets are not seen, only the
    work that follows from them.
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        load: Callable[[], Load] | None = None,
        on_message: MessageFn = silent,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start watching.

        `root`: where /proc, /sys and /dev are. `load` starts to watch other programs' load, by default in
        `root`. `on_message` gets a line when work has to wait, and one when it goes on. `clock` and `sleep`:
        seconds.
        """
        self._root = root
        self._load = load or (lambda: OtherLoad(root / "proc/stat"))
        self._on_message = on_message
        self._clock, self._sleep = clock, sleep
        self._free_since = self._next_look = clock()
        self._loads: deque[tuple[float, Load]] = deque([(clock(), self._load())])

    def pause(self) -> None:
        """Wait until the machine is idle and on mains; Ctrl-C ends the wait.

        Called before each piece of work: it costs nothing but a look at the clock, and every few seconds one
        at the machine. At the first call it waits until the machine was watched for IDLE_S. Raises
        EdgespecError where other programs' load cannot be read.
        """
        began = self._clock()
        if began < self._next_look:
            return
        if reason := self.reason():
            self._on_message(f"waiting until the machine is idle and on mains: {reason}")
            while self.reason():
                self._sleep(_LOOK_EVERY_S)
            self._on_message(
                f"the machine is idle and on mains: going on after {self._clock() - began:.0f} s"
            )
        self._next_look = self._clock() + _LOOK_EVERY_S

    def reason(self) -> str:
        """Return why no work should be done now, "" if it should. Raises EdgespecError as `pause` does."""
        now, disturbance = self._clock(), self._disturbance()
        if disturbance:
            self._free_since = now
            return disturbance
        quiet_s = now - self._free_since
        return "" if quiet_s >= IDLE_S else f"quiet for {quiet_s:.0f} s, {IDLE_S:.0f} are wanted"

    def _disturbance(self) -> str:
        if on_battery(self._root):
            return "it runs on its battery"
        busy = self._others()
        if busy > MOST_OTHERS:
            return f"other programs keep {busy:.1f} processors busy"
        if self._typed():
            return "somebody types in a terminal"
        return ""

    def _others(self) -> float:
        """Return how many processors other programs kept busy over RECENT_S, or since the watch began."""
        now = self._clock()
        while len(self._loads) > 1 and now - self._loads[1][0] >= RECENT_S:
            self._loads.popleft()
        began, load = self._loads[0]
        busy = load.processors()
        if busy is None and now - began >= RECENT_S:
            raise EdgespecError(
                f"{self._root / 'proc/stat'}: other programs' load cannot be read, so nobody knows when this "
                "machine is idle; start the work without waiting for that"
            )
        if now > self._loads[-1][0]:
            self._loads.append((now, self._load()))
        return busy or 0.0

    def _typed(self) -> bool:
        """Say whether a terminal was read from in RECENT_S: Linux then renews its access time."""
        for pattern in ("tty[0-9]*", "pts/[0-9]*"):
            for terminal in (self._root / "dev").glob(pattern):
                try:
                    if time.time() - terminal.stat().st_atime < RECENT_S:
                        return True
                except OSError:  # closed by now
                    continue
        return False
