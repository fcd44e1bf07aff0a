"""Work that waits while the machine is busy or on battery: made-up machines, and a real Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from edgespec.errors import EdgespecError
from edgespec.forge.idle import IDLE_S, IdleWatch
from energy_trees import battery, plug, write


class Machine:
    """A machine whose other programs keep `busy(second)` processors busy, and whose time only sleep moves."""

    def __init__(self, root, busy=lambda _second: 0.0):
        self.root, self.busy, self.now, self.lines = root, busy, 0.0, []
        self.on_sleep = lambda: None
        self.watch = IdleWatch(
            root=root,
            load=lambda: Since(self),
            on_message=self.lines.append,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds):
        self.now += seconds
        self.on_sleep()

    def work(self, seconds):
        """Work in pieces of a second; return how long it took."""
        began = self.now
        for _ in range(seconds):
            self.watch.pause()
            self.now += 1.0
        return self.now - began


class Since:
    """The load since it was made."""

    def __init__(self, machine):
        self.machine, self.began = machine, machine.now

    def processors(self):
        seconds = range(int(self.began), int(self.machine.now))
        return sum(map(self.machine.busy, seconds)) / len(seconds) if seconds else None


def test_an_idle_machine_is_watched_for_a_minute_then_never_waits(tmp_path):
    machine = Machine(tmp_path, lambda _: 0.1)
    assert machine.work(1) == IDLE_S + 1
    assert machine.work(500) == 500
    assert machine.lines == [
        "waiting until the machine is idle and on mains: quiet for 0 s, 60 are wanted",
        "the machine is idle and on mains: going on after 60 s",
    ]


def test_other_work_stops_it_within_seconds_and_for_a_minute_after_its_end(tmp_path):
    machine = Machine(tmp_path, lambda second: 1.5 * (200 <= second < 230))
    machine.work(1)
    machine.lines.clear()
    while not machine.lines:
        machine.work(1)
        assert machine.now < 300
    stops, goes_on = machine.lines
    assert stops.startswith("waiting until the machine is idle and on mains: other programs keep ")
    began = machine.now - 1 - int(goes_on.split()[-2])
    assert 200 < began < 210
    assert 290 < machine.now < 310
    assert machine.work(100) == 100


def test_battery(tmp_path):
    laptop = battery(tmp_path, status="Charging")
    cable = plug(tmp_path)
    machine = Machine(tmp_path)
    machine.work(60)
    machine.lines.clear()
    write(laptop / "status", "Discharging")
    write(cable / "online", 0)

    def plug_in():
        if machine.now > 1000:
            write(laptop / "status", "Charging")

    machine.on_sleep = plug_in
    machine.work(10)
    assert machine.now > 1000 + IDLE_S
    assert len(machine.lines) == 2
    assert machine.lines[0] == "waiting until the machine is idle and on mains: it runs on its battery"


def test_typing(tmp_path):
    terminal = tmp_path / "dev/pts/3"
    write(terminal, "")
    typed = time.time()
    os.utime(terminal, (typed, typed))
    machine = Machine(tmp_path)
    machine.now = IDLE_S
    assert machine.watch.reason() == "somebody types in a terminal"
    os.utime(terminal, (typed - 3600, typed))  # something is printed there now, but nobody types
    machine.now *= 2
    assert machine.watch.reason() == ""


def test_a_load_that_cannot_be_read(tmp_path):
    now = 0.0
    watch = IdleWatch(root=tmp_path, clock=lambda: now)
    now = IDLE_S
    with pytest.raises(EdgespecError, match="proc/stat: other programs' load cannot be read") as raised:
        watch.reason()
    assert "\n" not in str(raised.value)


_WAITING = """
from edgespec.forge.idle import IdleWatch
IdleWatch(on_message=lambda line: print(line, flush=True)).pause()
"""


def test_ctrl_c_ends_the_wait(child_environment):
    with subprocess.Popen(
        [sys.executable, "-c", _WAITING],
        env=child_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        try:
            assert child.stdout.readline().startswith(b"waiting until the machine is idle")
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=10) == -signal.SIGINT
            assert b"KeyboardInterrupt" in child.stderr.read()
        finally:
            child.kill()
