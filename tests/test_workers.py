"""How `make test` spreads tests over two workers."""

from __future__ import annotations

import pytest


def test_the_tests_of_a_file_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("one process runs all tests")
    # pytest-xdist sets this ending, and needs it. Without it each worker makes the fixtures of each file.
    assert request.node.nodeid.endswith("@test_workers.py")
