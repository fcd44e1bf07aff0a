"""Install edgespec for the Python that runs this, and show the progress; `make` calls it.

    .venv/bin/python install.py [PAIR]

    pip install --editable '.[serve]'    compiles llama.cpp and edgespec's core; its output: build/install.log
    the files of PAIR                    are pulled meanwhile; if that fails, the run that needs them does it

Wheels of `make wheels` in dist/ that fit this Python, this processor and these sources are taken instead:
llama.cpp's always, edgespec's where there is no compiler.

Imports only the parts of edgespec that need no llama.cpp, and of packages only rich, huggingface-hub,
packaging and msgspec.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from edgespec.cli.console import INTERRUPTED, message, print_error
from edgespec.cli.progress import PullDisplay
from edgespec.errors import EdgespecError, describe_os_error
from edgespec.models.pull import Puller, PullProgress, StopRequest, run_together
from edgespec.models.wheels import pip_reason
from edgespec.platform.kept import BUILDS
from pi.needs import TO_COMPILE, compiler_lacking

ROOT = Path(__file__).resolve().parent
RECIPE = ROOT / "llama_cpp.cmake"
LOG = ROOT / "build" / "install.log"
DIST = ROOT / "dist"
PIP = [sys.executable, "-m", "pip", "install", "--verbose", "--progress-bar", "off"]

_NAMES = {"llama-cpp-python": "llama.cpp for this CPU", "edgespec": "edgespec's own core"}
_BUILD = re.compile(r" *Building (?:wheel|editable) for (\S+) \(pyproject\.toml\)(.*)")
_STEP = re.compile(r" *\[ *(\d+)(?:/(\d+)|%)\] ")  # ninja counts steps, make percent
_SIGN = re.compile(r"(?:^|\s)(?:fatal )?error: |FAILED: |CMake Error|^ *ERROR: ")
_CAUSES = {
    "No space left on device": "the disk is full",
    "Killed signal terminated program": "not enough memory; close other programs, or add swap",
}
_SHOWN = 12  # lines of the log
_WIDTH = 300  # most characters of a line to show; longer ones are compiler commands
_PATIENCE_S = 5.0


def _environment() -> dict[str, str]:
    """Return pip's environment: compile only what edgespec needs of llama.cpp, and cache wheels separately.

    From pip's own cache, other projects would get that wheel, which lacks images and audio. Each version of
    `RECIPE` has its own cache, because pip does not see that a wheel was compiled with another one.
    """
    part = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={RECIPE}"
    key = hashlib.sha256(RECIPE.read_bytes()).hexdigest()[:12]
    return (
        {"PIP_CACHE_DIR": str(BUILDS.path() / key)}
        | os.environ
        | {
            "CMAKE_ARGS": f"{os.environ.get('CMAKE_ARGS', '')} {shlex.quote(part)}",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
    )


def requirements() -> list[str]:
    """Return what pip is asked for. Raises EdgespecError where neither wheels nor a compiler are here."""
    library = _fitting_library()
    links = ["--find-links", str(DIST)] if library else []
    lacking = compiler_lacking()
    if not lacking:
        return [*links, "--editable", ".[serve]"]
    own = _newest(DIST.glob("edgespec-*.whl"))
    if not (library and own):
        absent = " and ".join(["llama-cpp-python"] * (not library) + ["edgespec"] * (not own))
        raise EdgespecError(
            f"{lacking}, and {DIST} has no wheel of {absent} that fits {_here()} and these sources; "
            f"{TO_COMPILE}, or run `make wheels` on a machine with them and copy dist/"
        )
    return [*links, f"{own}[serve]"]


def _here() -> str:
    return f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"


def _fitting_library() -> Path | None:
    """Return llama.cpp's wheel in dist/, if it is of the pinned version and compiled with `RECIPE`."""
    if os.environ.get("CMAKE_ARGS"):  # the user wants it compiled in another way
        return None
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    (pinned,) = (line for line in dependencies if line.startswith("llama-cpp-python=="))
    return _newest(
        wheel
        for wheel in DIST.glob("llama_cpp_python-*.whl")
        if wheel.name.split("-")[1].partition("+")[0] == pinned.partition("==")[2] and _has_recipe(wheel)
    )


def _has_recipe(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read("llama_cpp/lib/llama_cpp.cmake") == RECIPE.read_bytes()
    except (zipfile.BadZipFile, KeyError):
        return False


def _newest(wheels: Iterable[Path]) -> Path | None:
    """Return the newest of the wheels that this Python can install."""
    supported = set(sys_tags())
    fitting = [wheel for wheel in wheels if supported & _tags(wheel)]
    return max(fitting, key=lambda wheel: wheel.stat().st_mtime, default=None)


def _tags(wheel: Path) -> frozenset[Tag]:
    try:
        return parse_wheel_filename(wheel.name)[3]
    except InvalidWheelFilename:
        return frozenset()


class Installation:
    """Runs pip and shows the progress that its output tells."""

    def __init__(self, display: PullDisplay) -> None:
        """Start pip; `run` follows it. Raises EdgespecError if something is missing that pip would need."""
        command = [*PIP, *requirements()]
        self._display = display
        self._building = ""
        self._begun_s = 0.0
        self._stopped = Event()
        LOG.parent.mkdir(exist_ok=True)
        self._pip = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that `stop` ends the compilers too, and only them
        )

    def run(self) -> None:
        """Show the progress until pip has ended. Raises EdgespecError if it failed."""
        assert self._pip.stdout  # noqa: S101 - for the type checker: it is a pipe
        self._display.show("installing", "packages", 0, None)
        with LOG.open("w", encoding="utf-8") as log:
            for line in self._pip.stdout:
                log.write(line)
                self._follow(line)
        if self._pip.wait() and not self._stopped.is_set():
            self._fail(LOG.read_text(encoding="utf-8"))
        self._display.hide("packages")

    def _follow(self, line: str) -> None:
        """Show the progress of compiling that a line of pip's output tells."""
        if build := _BUILD.match(line):
            package, rest = build.groups()
            if not self._building:
                self._building, self._begun_s = _NAMES.get(package, package), time.monotonic()
                self._display.hide("packages")
                self._display.show("compiling", self._building, 0, None)
            elif "finished with status 'done'" in rest:
                took = _format_time(time.monotonic() - self._begun_s)
                self._display.hide(self._building)
                self._display.on_message(f"edgespec: compiled {self._building} in {took}")
                self._display.show("installing", "packages", 0, None)
                self._building = ""
        elif self._building and (step := _STEP.match(line)):
            self._display.show("compiling", self._building, int(step[1]), int(step[2] or 100), "steps")

    def _fail(self, output: str) -> None:
        for line in telling_lines(output):
            self._display.on_message(line)
        what = f"{self._building} was not compiled" if self._building else pip_reason(output)
        cause = next((f": {cause}" for sign, cause in _CAUSES.items() if sign in output), "")
        raise EdgespecError(f"{what}{cause}; all that pip and the compilers said is in {LOG}")

    def stop(self) -> None:
        """End pip and all that it started; first give it time to delete its temporary files."""
        self._stopped.set()
        for how in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._pip.pid, how)
            with suppress(subprocess.TimeoutExpired):
                self._pip.wait(_PATIENCE_S)


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def telling_lines(output: str) -> list[str]:
    """Return the lines of pip's output from the first one with an error; none if there is no error."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and len(line) <= _WIDTH]
    first = next((number for number, line in enumerate(lines) if _SIGN.search(line)), len(lines))
    return lines[first : first + _SHOWN]


class Pull:
    """Pulls the files of a pair or model that can be had without llama.cpp."""

    def __init__(self, name: str) -> None:
        """Find out what is missing. Raises EdgespecError: no such name, or no room on the disk."""
        self._stopped = Event()
        self._puller = Puller()
        self._entries = self._puller.expand(name)
        self.sizes = [entry.size for entry in self._puller.plan(self._entries) if not entry.derived]
        """Bytes of each file to pull."""

    def run(self, display: PullDisplay) -> None:
        """Pull the files; a failure becomes one message."""

        def on_progress(progress: PullProgress) -> None:
            if self._stopped.is_set():
                raise StopRequest
            display.on_progress(progress)

        puller = replace(self._puller, on_progress=on_progress, on_message=display.on_message)
        try:
            puller.download(self._entries)
        except EdgespecError as error:
            display.on_message(f"edgespec: {error}")

    def stop(self) -> None:
        """End the pull; a later one can continue it."""
        self._stopped.set()


def install(name: str | None = None) -> None:
    """Install edgespec, and pull the pair or model `name`. Raises EdgespecError if the installation fails."""
    pull = None
    try:
        pull = Pull(name) if name else None
    except EdgespecError as error:
        message(str(error))
    with PullDisplay(pull.sizes if pull else ()) as display:
        installation = Installation(display)
        if pull:
            run_together([installation.run, partial(pull.run, display)], partial(_stop, pull, installation))
        else:
            run_together([installation.run], installation.stop)


def _stop(pull: Pull, installation: Installation) -> None:
    pull.stop()
    installation.stop()


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0, 1 failure, 130 interrupted."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: end pip and the compilers too
        signal.signal(ending, signal.default_int_handler)
    try:
        install(*arguments)
    except EdgespecError as error:
        print_error(str(error))
        return error.exit_code
    except OSError as error:
        print_error(describe_os_error(error))
        return EdgespecError.exit_code
    except KeyboardInterrupt:
        print_error("interrupted; make goes on where it was")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
