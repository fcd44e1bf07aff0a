"""What the tests of the server and of its page share: a server, one that says what a test says, a browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripted_chat import ScriptedChat, scripting
from server_app import Served, serving

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
"""The system's, by any of these names. None is downloaded: without one the tests are skipped."""


@pytest.fixture(scope="module")
def served(tiny_path: Path, tiny_draft_path: Path) -> Iterator[Served]:
    """The tiny pair's server, one for the tests of a file."""
    with serving(tiny_path, tiny_draft_path) as running:
        yield running


@pytest.fixture
def scripted() -> Iterator[ScriptedChat]:
    """One for each test: what a test has not read is not the next one's."""
    with scripting() as chat:
        yield chat


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for a file's tests: while it runs, no other event loop can in this thread."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip(f"no Chromium here, by any of the names {', '.join(CHROMIUM)}")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium refuses root
    with playwright.sync_playwright() as running:
        try:
            started = running.chromium.launch(executable_path=path, args=flags)
        except playwright.Error as error:
            pytest.skip(f"{path} does not start: {str(error).splitlines()[0]}")
        yield started
        started.close()
