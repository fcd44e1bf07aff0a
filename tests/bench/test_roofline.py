"""bench/roofline.py: the limit of a product, and a run over a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import roofline
from edgespec.llama.kernels import Kernels
from roofline import Times, limit

SCRIPT = Path(roofline.__file__)


def test_a_product_is_bound_by_the_slower_of_reading_and_multiplying() -> None:
    assert limit(1000, 100, bandwidth=10.0, peak=10.0) == (100.0, "memory")
    assert limit(100, 1000, bandwidth=10.0, peak=10.0) == (100.0, "arithmetic")


def test_the_bandwidth_is_that_of_the_best_variant() -> None:
    times = Times()
    times.reads = {roofline.READS[0]: [1.0, 9.0, 2.0], roofline.READS[1]: [3.0, 3.0, 3.0]}
    assert times.bandwidth() == 3.0  # of medians: one lucky run is none


def test_every_type_that_is_packed_can_be_timed(kernels: Kernels, packable_path: Path) -> None:
    """The raw times of all types and n, and the table of the shares."""
    command = [sys.executable, SCRIPT, packable_path, "--rounds", "2", "--sizes", "1,9"]
    process = subprocess.run(
        [*command, "--context", "5", "--threads", "1", "--json"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    text, _, raw = process.stdout.partition("\n{")
    outcome = json.loads("{" + raw)
    assert {(row["type"], row["n"]) for row in outcome["seconds"]} == {
        (type_, n) for type_ in roofline.TYPES for n in (1, 9)
    }
    assert [row["n"] for row in outcome["passes"]] == [1, 9]
    for row in outcome["seconds"]:
        assert len(row["products"]) == 2
        assert min(row["products"]) > 0
    assert "register peak" in text
    assert "not products" in text
