"""Signals that end a training at its next good moment."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("jax", reason="drafts are trained with JAX: pip install 'edgespec[forge]'")

from edgespec.apps.forge.training.loop import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number):
    before = signal.getsignal(number)
    with stop_signals() as asked:
        assert not asked.is_set()
        signal.raise_signal(number)
        assert asked.is_set()
        assert signal.getsignal(number) is before, "a second one ends it at once"
    assert signal.getsignal(number) is before
