"""Turns among processes: one at a time, and whoever waits comes before whoever has just had one."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from edgespec.platform.turns import SharedTurns

OTHER = """
import sys
from pathlib import Path
from edgespec.platform.turns import SharedTurns
from test_turns import until_another_waits
folder = Path(sys.argv[1])
turns = SharedTurns(folder)
with turns:
    print("has", flush=True)
    sys.stdin.readline()
for i in range(3):
    with turns, open(sys.argv[2], "a") as order:
        order.write("b")
        if i < 2:
            until_another_waits(folder)
print("done", flush=True)
"""


def until_another_waits(folder: Path) -> None:
    """Wait until a process waits for its turn: it holds the second file meanwhile."""
    with (folder / "next").open("a") as file, suppress(BlockingIOError):
        while True:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.001)


@pytest.fixture
def other(tmp_path, child_environment):
    """A process that has a turn, until it is told to go on."""
    path = f"{child_environment['PYTHONPATH']}:{Path(__file__).parent}"
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path), str(tmp_path / "order")],
        env=child_environment | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"has\n"
        yield other
        other.kill()


def test_processes_take_turns_and_none_keeps_the_lock(other, tmp_path):
    turns, order = SharedTurns(tmp_path), tmp_path / "order"

    def take_three() -> None:
        for _ in range(3):
            with turns, order.open("a") as file:
                file.write("a")
                until_another_waits(tmp_path)

    ours = threading.Thread(target=take_three)
    ours.start()
    until_another_waits(tmp_path)
    other.stdin.write(b"\n")  # it lets go, and wants three more turns at once
    other.stdin.flush()
    ours.join()
    assert other.stdout.readline() == b"done\n"
    assert order.read_text() == "ababab"


def test_a_process_that_is_killed_loses_its_turn(other, tmp_path):
    other.kill()
    with SharedTurns(tmp_path):
        pass
