"""Turns among processes: one at a time, and whoever waits comes before whoever has just had one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from edgespec.platform.turns import SharedTurns

OTHER = """
import sys
import time
from pathlib import Path
from edgespec.platform.turns import SharedTurns
turns = SharedTurns(Path(sys.argv[1]))
with turns:
    print("has", flush=True)
    sys.stdin.readline()
for _ in range(3):
    with turns, open(sys.argv[2], "a") as order:
        order.write("b")
        time.sleep(0.2)
print("done", flush=True)
sys.stdin.readline()
"""


def test_processes_take_turns_and_none_keeps_the_lock(tmp_path):
    turns, order = SharedTurns(tmp_path), tmp_path / "order"

    def take_three() -> None:
        for _ in range(3):
            with turns, order.open("a") as file:
                file.write("a")
                time.sleep(0.2)  # the other one waits by now

    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path), str(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"has\n"
        ours = threading.Thread(target=take_three)
        ours.start()
        time.sleep(0.2)
        other.stdin.write(b"\n")  # it lets go, and wants three more turns at once
        other.stdin.flush()
        ours.join()
        assert other.stdout.readline() == b"done\n"
        other.stdin.write(b"\n")
        other.stdin.flush()
    assert order.read_text() == "ababab"


def test_a_process_that_is_killed_loses_its_turn(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path), str(tmp_path / "order")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"has\n"
        other.kill()
    with SharedTurns(tmp_path):
        pass
