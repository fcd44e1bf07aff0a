"""Fixtures shared by the rooms' tests: tiny random models, and the real default pair."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf

from edgespec.errors import EdgespecError
from edgespec.weights import Model

DEFAULT_PAIR = ("qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-0.5b-q4_0")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target's file. Copy it before damaging it."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "target.gguf", seed=1)


@pytest.fixture(scope="session")
def tiny_draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary."""
    directory = tmp_path_factory.mktemp("tiny")
    return write_tiny_gguf(directory / "draft.gguf", seed=2, n_layer=1, n_embd=32, n_ff=64, n_head=2)


@pytest.fixture(scope="session")
def tiny_target(tiny_path: Path) -> Iterator[Model]:
    with Model(tiny_path) as model:
        yield model


@pytest.fixture(scope="session")
def tiny_draft(tiny_draft_path: Path) -> Iterator[Model]:
    with Model(tiny_draft_path) as model:
        yield model


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """Paths of the real target and draft, pulled on first use. For tests marked `pair`."""
    pull = importlib.import_module("edgespec.pull")
    try:
        target, draft = (Path(pull.resolve(name)) for name in DEFAULT_PAIR)
    except EdgespecError as error:
        pytest.skip(f"the 1.6 GB pair could not be downloaded: {error}")
    return target, draft


@pytest.fixture
def child_environment() -> dict[str, str]:
    """An environment in which a child Python finds the edgespec under test."""
    root = str(Path(__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
