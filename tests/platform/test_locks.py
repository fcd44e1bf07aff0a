"""Locks between processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgespec.platform.files import locked

HOLDER = """
import sys, time
from pathlib import Path
from edgespec.platform.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock, until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "lock"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


def test_a_lock_of_another_process_is_waited_for_until_that_dies(holder, tmp_path):
    said = []

    def on_busy():
        said.append(holder.poll())
        holder.kill()

    with locked(tmp_path / "lock", on_busy):
        pass
    assert said == [None], "it held the lock"
    assert (tmp_path / "lock").exists()


def test_on_busy_may_refuse(holder, tmp_path):
    def refuse():
        raise RuntimeError("busy")

    with pytest.raises(RuntimeError, match="busy"), locked(tmp_path / "lock", refuse):
        pytest.fail("it is held elsewhere")


def test_a_free_lock_is_taken_at_once_and_again(tmp_path):
    for _ in range(2):
        with locked(tmp_path / "lock", lambda: pytest.fail("nobody holds it")):
            pass
