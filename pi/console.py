"""Shared by the tools in pi/: runs commands with their output in a log, and reports mistakes in one line."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from edgespec.cli.console import INTERRUPTED, err, message
from edgespec.errors import EdgespecError, UsageError, describe_os_error

_TAIL = 20  # lines of a log
_KEPT = ("PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME")  # of a user's environment
_CAUSES = {"No space left on device": "the disk is full"}

out = Console(highlight=False, soft_wrap=True)


def run(
    what: str,
    command: Sequence[str | Path],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    causes: Mapping[str, str] | None = None,
) -> None:
    """Run a command with all of its output in a log file, and say `what` before.

    `env` is its whole environment; None: this process's. Raises EdgespecError if there is no such program
    or the command fails. The message is the line that `causes` has for a text found in the log; if none
    is found, the end of the log is printed first.
    """
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    message(what)
    with log.open("w", encoding="utf-8") as stream:
        stream.write(shlex.join(map(str, command)) + "\n")
        stream.flush()
        try:
            code = subprocess.run(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                umask=0o022,  # file modes are part of a wheel's bytes
                check=False,
            ).returncode
        except FileNotFoundError as error:
            raise EdgespecError(f"{error.filename}: there is no such program") from error
    if code:
        text = log.read_text(encoding="utf-8", errors="replace")
        for sign, line in {**(causes or {}), **_CAUSES}.items():
            if sign in text:
                raise EdgespecError(f"{what}: {line} ({log})")
        err.print("\n".join(text.splitlines()[-_TAIL:]), markup=False)
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise EdgespecError(f"{what}: failed ({how}); all of its output is in {log}")
    message(f"{what}: done in {time.monotonic() - start:.0f} s")


def environment(**more: str) -> dict[str, str]:
    """Return an environment without the user's settings, such as CMAKE_ARGS, CPATH or PYTEST_ADDOPTS."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {"LC_ALL": "C.UTF-8", **kept, **more}


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, as all of ours are."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(action: Callable[[], int]) -> int:
    """Run a tool and return its exit code; a user's mistake, a full disk and Ctrl-C are one line each."""
    try:
        return action()
    except EdgespecError as error:
        message(str(error))
        return error.exit_code
    except OSError as error:
        message(describe_os_error(error))
        return EdgespecError.exit_code
    except KeyboardInterrupt:
        message("interrupted")
        return INTERRUPTED
    finally:
        sys.stdout.flush()


def json_of(log: str) -> dict[str, Any]:
    """Return the JSON object in a log, which begins on a line of its own."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(log, log.index("\n{") + 1)[0]
    return found
