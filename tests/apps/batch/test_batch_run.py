"""Which requests run when, and what a pipe gets."""

from __future__ import annotations

import json
import os

import pytest

from batch_parts import EchoWriter, write_lines
from edgespec.apps.batch.commands.batch import run_batch
from edgespec.apps.batch.lines import PipedResults, open_input


def piped(tmp_path, bodies, in_order, writer):
    """Run these requests into a pipe; return the custom_ids in the order in which they came out."""
    found = open_input(write_lines(tmp_path / "in.jsonl", bodies), None)
    read_end, write_end = os.pipe()
    seen = []
    run_batch(
        found.requests(),
        writer,
        PipedResults(write_end, "a pipe", "key", in_order=in_order),
        lambda _n_tokens: seen.append(writer.n_running),
    )
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        return [json.loads(line)["custom_id"] for line in pipe]


def test_a_place_that_is_free_is_taken_at_once_by_the_longest_waiting(tmp_path):
    bodies = [{"custom_id": f"c{i}", "prompt": "p", "rounds": 50 if i == 0 else 2} for i in range(20)]
    writer = EchoWriter(parallel=3)
    came = piped(tmp_path, bodies, False, writer)
    assert writer.begun == [f"c{i}" for i in range(20)]
    assert writer.most_running == 3
    assert came == [*(f"c{i}" for i in range(1, 20)), "c0"]  # the long one held nobody up


def test_in_order_results_wait_for_those_before_them(tmp_path):
    bodies = [{"custom_id": f"c{i}", "prompt": "p", "rounds": 9 - i} for i in range(9)]
    bodies.insert(4, {"custom_id": "broken"})
    bodies.insert(4, "")
    came = piped(tmp_path, bodies, True, EchoWriter(parallel=4))
    assert came == ["c0", "c1", "c2", "c3", "broken", "c4", "c5", "c6", "c7", "c8"]


def test_requests_are_read_only_when_they_can_begin(tmp_path):
    found = open_input(write_lines(tmp_path / "in.jsonl", ['{"prompt": "p", "rounds": 3}'] * 100), None)
    n_read = 0

    def counting():
        nonlocal n_read
        for request in found.requests():
            n_read += 1
            yield request

    class StopsError(Exception):
        pass

    class Failing(EchoWriter):
        def finished(self):
            raise StopsError

    with pytest.raises(StopsError):
        run_batch(counting(), Failing(5), PipedResults(1, "", "", in_order=True))
    assert n_read == 5
