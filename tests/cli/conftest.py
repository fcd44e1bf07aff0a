"""What the tests of the command line share: a user with directories of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import user_environment


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The user's cache. A file whose tests may share one has a fixture of this name for itself."""
    return tmp_path / "cache"


@pytest.fixture
def environment(cache: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has no models, with stock kernels."""
    return user_environment(tmp_path, cache=cache)


@pytest.fixture
def with_kernels(cache: Path, tmp_path: Path) -> dict[str, str]:
    """The same with edgespec's kernels where they can be used. For files whose tests share a cache."""
    return user_environment(tmp_path, kernels=True, cache=cache)
