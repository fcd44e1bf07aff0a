"""Install edgespec for the Python that runs this, and show the progress; `make` calls it.

    .venv/bin/python install.py [PAIR]

    pip install --editable '.[serve]'    compiles llama.cpp and edgespec's core; its output: build/install.log
    the files of PAIR                    are pulled meanwhile; if that fails, the run that needs them does it

Wheels of `make wheels` in dist/ are taken instead: llama.cpp's if made with this recipe, edgespec's where no
compiler is. Imports only parts of edgespec that need no llama.cpp, rich, huggingface-hub and msgspec.
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
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from msgspec.structs import replace

from edgespec.cli.console import INTERRUPTED, message, print_error
from edgespec.cli.progress import PullDisplay
from edgespec.errors import EdgespecError, describe_os_error
from edgespec.models.pull import Puller, PullProgress, pip_reason
from edgespec.models.registry import Entry
from edgespec.platform.kept import BUILDS
from pi.needs import TO_COMPILE, compiler_lacking

ROOT = Path(__file__).resolve().parent
RECIPE = ROOT / "llama_cpp.cmake"
LOG = ROOT / "build" / "install.log"
DIST = ROOT / "dist"
PIP = [sys.executable, "-m", "pip", "install", "--verbose", "--progress-bar", "off"]

_BUILD = re.compile(r" *Building (?:wheel|editable) for (\S+) \(pyproject\.toml\)(.*)")
_STEP = re.compile(r" *\[ *(\d+)(?:/(\d+)|%)\] ")  # ninja counts steps, make percent
_PATIENCE_S = 1.0
_SIGN = re.compile(r"^.*(?:error: |FAILED: |CMake Error|ERROR: )(?:.*\n?){1,12}", re.MULTILINE)


def environment() -> dict[str, str]:
    """Return pip's environment: compile only what edgespec needs of llama.cpp, and cache wheels separately.

    From pip's own cache, other projects would get that wheel, which lacks images and audio. Each version of
    `RECIPE` has its own cache, because pip does not see that a wheel was compiled with another one.
    """
    cache = {"PIP_CACHE_DIR": str(BUILDS.path() / hashlib.sha256(RECIPE.read_bytes()).hexdigest()[:12])}
    flags = f"{os.environ.get('CMAKE_ARGS', '')} {shlex.quote(f'-DCMAKE_PROJECT_llama_cpp_INCLUDE={RECIPE}')}"
    return cache | os.environ | {"CMAKE_ARGS": flags, "PIP_NO_INPUT": "1"}


def requirements() -> list[str]:
    """Return what pip is asked for. Raises EdgespecError where neither wheels nor a compiler are here."""
    here, lacking = f"*{platform.machine()}.whl", compiler_lacking()
    compiled_as_told = os.environ.get("CMAKE_ARGS")  # by the user, in another way
    library = not compiled_as_told and any(map(_has_recipe, DIST.glob(f"llama_cpp_python-{here}")))
    own = max(DIST.glob(f"edgespec-{here}"), key=lambda wheel: wheel.stat().st_mtime, default=None)
    links = ["--find-links", str(DIST)] if library else []
    if not lacking:
        return [*links, "--editable", ".[serve]"]
    if library and own:
        return [*links, f"{own}[serve]"]
    raise EdgespecError(
        f"{lacking}, and {DIST} lacks wheels of both packages for {platform.machine()} and these sources; "
        f"{TO_COMPILE}, or run `make wheels` on a machine with them and copy dist/"
    )


def _has_recipe(wheel: Path) -> bool:
    if not zipfile.is_zipfile(wheel):
        return False
    recipe = zipfile.Path(wheel, "llama_cpp/lib/llama_cpp.cmake")
    return recipe.exists() and recipe.read_bytes() == RECIPE.read_bytes()


def follow(pip: subprocess.Popen[str], display: PullDisplay, stopped: Event) -> None:
    """Show the progress that pip's output tells until it has ended. Raises EdgespecError if it failed."""
    building = ""
    display.show("installing", "packages", 0, None)
    with LOG.open("w", encoding="utf-8") as log:
        for line in pip.stdout or ():
            log.write(line)
            if build := _BUILD.match(line):
                display.hide(building or "packages")
                building = "" if "finished with status 'done'" in build[2] else build[1]
                display.show("compiling" if building else "installing", building or "packages", 0, None)
            elif building and (step := _STEP.match(line)):
                display.show("compiling", building, int(step[1]), int(step[2] or 100), "steps")
    if pip.wait() and not stopped.is_set():
        output = LOG.read_text(encoding="utf-8")
        if sign := _SIGN.search(re.sub(r"(?m)^.{300,}\n", "", output)):  # without compilers' commands
            display.on_message(sign[0])
        why = f"{building} was not compiled" if building else pip_reason(output)
        if "Killed signal" in output:
            why += ": not enough memory; close other programs, or add swap"
        raise EdgespecError(f"{why}; all that pip and the compilers said is in {LOG}")
    display.hide(building or "packages")


def install(name: str | None = None) -> None:
    """Install edgespec, and pull the pair or model `name`. Raises EdgespecError if the installation fails."""
    command, puller, stopped = [*PIP, *requirements()], Puller(), Event()
    entries: list[Entry] = []
    try:
        missing = puller.plan(puller.expand(name)) if name else []
        entries = [entry for entry in missing if not entry.derived]  # what quantizes is not compiled yet
    except EdgespecError as error:
        message(str(error))
    LOG.parent.mkdir(exist_ok=True)
    with (
        PullDisplay([entry.size for entry in entries]) as display,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that the compilers end with it, and only they
        ) as pip,
    ):

        def on_progress(progress: PullProgress) -> None:
            if stopped.is_set():
                sys.exit()  # ends this thread alone
            display.on_progress(progress)

        def pull() -> None:
            try:
                replace(puller, on_progress=on_progress, on_message=display.on_message).ensure_all(entries)
            except EdgespecError as error:
                display.on_message(f"edgespec: {error}")

        pulling = Thread(target=pull, daemon=True)
        pulling.start()
        try:
            follow(pip, display, stopped)
            pulling.join()
        except BaseException:
            stopped.set()  # the pull, which a later one continues
            for how in (signal.SIGINT, signal.SIGKILL):  # pip may delete its temporary files
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(pip.pid, how)
                    pip.wait(5)
            pulling.join(_PATIENCE_S)  # it may hang on a dead network
            raise


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0, 1 failure, 130 interrupted."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: end pip and the compilers too
        signal.signal(ending, signal.default_int_handler)
    try:
        install(*arguments)
    except (EdgespecError, OSError) as error:
        print_error(describe_os_error(error) if isinstance(error, OSError) else str(error))
        return EdgespecError.exit_code
    except KeyboardInterrupt:
        print_error("interrupted; call make again to resume")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
