"""A training that waits between its steps, as `--when-idle` makes it, and signals while it waits."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from edgespec.forge.training.ending import Asked, ending
from edgespec.forge.training.loop import TrainingSettings, train
from tiny_training import ROWS, TinyTexts, tiny_head, write_target

SETTINGS = TrainingSettings(tokens=400, rows=ROWS, n_held_out=64, n_positions=2)


def test_waiting_is_no_training_and_ctrl_c_ends_it_with_a_checkpoint(tmp_path):
    target = write_target(tmp_path)
    folder, seen = tmp_path / "training", []

    def wait(now):
        seen.append((now.n_steps, now.elapsed_s))
        if now.n_steps == 1:
            time.sleep(3.0)
        elif now.n_steps == 2:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(600)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(tiny_head(target), TinyTexts(target, 30), SETTINGS, folder, on_progress=wait)
    took_s = time.monotonic() - began
    assert took_s < 300
    n_steps, elapsed_s = seen[-1]
    assert n_steps == 2
    assert elapsed_s <= took_s - 3.0
    assert any(folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number):
    """One that comes at work waits for a good moment, one that comes at a wait ends it."""
    before = signal.getsignal(number)
    waits = Asked()
    with ending(waits), waits.may_wait():
        signal.raise_signal(number)
        pytest.fail("the wait goes on")
    assert waits
    works = Asked()
    with ending(works):
        assert not works
        signal.raise_signal(number)
        assert works
        assert signal.getsignal(number) is before, "a second one ends it at once"
    assert signal.getsignal(number) is before


def test_another_interrupt_is_passed_on():
    with pytest.raises(KeyboardInterrupt), Asked().may_wait():
        raise KeyboardInterrupt
