"""Pieces of work at once: they end together."""

import threading

import pytest

from edgespec.models.pull import StopRequest, run_together


def test_all_run_at_once_and_are_waited_for():
    meeting, done = threading.Barrier(3), []

    def piece():
        meeting.wait(60)  # nobody gets past it alone
        done.append(1)

    run_together([piece] * 3, lambda: None)
    assert done == [1, 1, 1]


def test_one_that_fails_stops_the_others_and_is_what_is_raised():
    stop, ended = threading.Event(), []

    def works():
        try:
            stop.wait(60)
            raise StopRequest
        finally:
            ended.append(stop.is_set())

    def fails():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_together([works, fails, works], stop.set)
    assert ended == [True, True]


def test_one_that_does_not_end_is_left_behind():
    forever = threading.Event()

    def fails():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_together([forever.wait, fails], lambda: None)
    assert not forever.is_set()
    forever.set()
