"""The system's Chromium, headless, for tests. None is downloaded: without one they are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for a file's tests: while it runs, no other event loop can in this thread."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium here, by any of the names {', '.join(NAMES)}")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium refuses root
    with playwright.sync_playwright() as running:
        try:
            started = running.chromium.launch(executable_path=path, args=flags)
        except playwright.Error as error:
            pytest.skip(f"{path} does not start: {str(error).splitlines()[0]}")
        yield started
        started.close()
