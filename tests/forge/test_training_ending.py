"""Signals that end a training at its next good moment."""

from __future__ import annotations

import signal

import pytest

from edgespec.forge.training.loop import ending


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number):
    before = signal.getsignal(number)
    with ending() as asked:
        assert not asked.is_set()
        signal.raise_signal(number)
        assert asked.is_set()
        assert signal.getsignal(number) is before, "a second one ends it at once"
    assert signal.getsignal(number) is before
