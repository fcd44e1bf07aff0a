"""Programs in the place of llama.cpp's: one that prints what it is told to, and edgespec's own server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FAKE = """\
#!{python}
import json, sys
from pathlib import Path
here = Path(__file__)
say = json.loads(here.with_suffix(".json").read_text())
given = dict(zip(sys.argv, sys.argv[1:]))
files = {{option: Path(given[option]).read_text() for option in ("--prompts",) if option in given}}
here.with_suffix(".asked").write_text(json.dumps(dict(argv=sys.argv[1:], files=files)))
print(say["out"], end="")
print(say["log"], end="", file=sys.stderr)
sys.exit(say["code"])
"""
SERVER = """\
#!{python}
import json, os, sys
from pathlib import Path
from edgespec.cli import main
given = dict(zip(sys.argv, sys.argv[1:]))
called = Path(__file__ + ".called")
called.write_text(json.dumps(dict(argv=sys.argv[1:], pid=os.getpid())))
called.rename(__file__ + (".drafted" if "-md" in given else ".plain"))
draft = ["-d", given["-md"]] if "-md" in given else ["--drafter", "none"]
served = ["-t", given["-m"], "--threads", given["-t"], "--port", given["--port"], "--prefix-cache", "0"]
sys.exit(main(["serve", *served, *draft]))
"""


def fake(program: Path, *, out: str = "", log: str = "", code: int = 0) -> None:
    """Write a program that prints and ends like that."""
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    program.with_suffix(".json").write_text(json.dumps({"out": out, "log": log, "code": code}))


def asked(program: Path) -> dict[str, Any]:
    """What the fake was last called with."""
    found: dict[str, Any] = json.loads(program.with_suffix(".asked").read_text())
    return found


def fake_server(folder: Path) -> Path:
    """Write edgespec's server as the llama-server of a new folder."""
    folder.mkdir()
    program = folder / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    return folder


def started(folder: Path, how: str) -> dict[str, Any]:
    """What the server of `fake_server` was last started with: "plain" or "drafted"."""
    found: dict[str, Any] = json.loads((folder / f"llama-server.{how}").read_text())
    return found


def option(argv: list[str], name: str) -> str:
    assert argv.count(name) == 1, argv
    return argv[argv.index(name) + 1]
