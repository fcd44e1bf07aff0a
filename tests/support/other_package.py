"""A package of somebody else, made up for a test, that offers something by entry points."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from command_line import python_path
from edgespec.platform import plugins


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, entries: str, source: str) -> None:
    """Install their-package 1.0, whose only module is their_package, for this process and its children."""
    info = folder / "their_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    (folder / "their_package.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{python_path()}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "their_package", raising=False)
    plugins.groups.cache_clear()


def offer(monkeypatch: pytest.MonkeyPatch, name: str, place: str, group: str) -> None:
    """Let a package that is installed offer MODULE:NAME, its `place`, in a group, for this process."""
    every = plugins.entry_points()
    points = [point for one in every.groups for point in every.select(group=one)]
    also = EntryPoints([EntryPoint(name, place, group), *points])
    monkeypatch.setattr(plugins, "entry_points", lambda: also)
    plugins.groups.cache_clear()
