"""Writes the runs that README.md and docs/ show: `python tests/support/examples.py`, on a quiet machine.

An example is a fenced block: a command line, its text ([...]: not shown) and its statistics, followed by the
release and the instruction set that wrote it.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from command_line import run_cli, user_environment
from edgespec.cli.console import wrapped
from edgespec.llama import kernels
from edgespec.models.store import Store

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "measuring.md"]
EXAMPLE = re.compile(
    r"^(?P<fence>`{3,})\n\$ (?P<command>[^\n]*)\n(?P<text>.*?)\n\n(?P<figures>prompt .*?)\n(?P=fence)\n\n"
    r"Written by edgespec (?P<release>\S+) with `(?P<kernels>[\w-]+)`",
    re.M | re.S,
)
HIDDEN = "[...]"
_COLUMNS = 110


def examples() -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield each example with its page."""
    for page in PAGES:
        for found in EXAMPLE.finditer(page.read_text(encoding="utf-8")):
            yield page, found


def run_example(command: str, home: Path, *options: str) -> CompletedProcess[Any]:
    """Run an example's command, as a new user does whose home is `home`."""
    words = shlex.split(command)
    if words[0] == "make":
        (prompt,) = re.findall(r"^PROMPT \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        words = ["edgespec", "run", *shlex.split(words[2].removeprefix("RUN=")), prompt]
    models = os.environ.get("EDGESPEC_MODELS_DIR") or str(Store.default().root)
    env = user_environment(home, kernels=True) | {"EDGESPEC_MODELS_DIR": models}
    process = run_cli(*words[1:], *options, env=env, cwd=home)
    assert process.returncode == 0, process.stderr
    return process


def written(found: re.Match[str]) -> str:
    """Return an example as it is on this machine."""
    with tempfile.TemporaryDirectory() as home:
        process = run_example(found["command"], Path(home))
    text = HIDDEN if found["text"] == HIDDEN else wrapped(process.stdout.rstrip("\n"), _COLUMNS)
    lines = [f"{found['fence']}\n$ {found['command']}\n{text}\n\n{process.stderr.strip()}\n{found['fence']}"]
    return "\n\n".join([*lines, f"Written by edgespec {version('edgespec')} with `{kernels.load().name}`"])


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(EXAMPLE.sub(written, page.read_text(encoding="utf-8")), encoding="utf-8")
