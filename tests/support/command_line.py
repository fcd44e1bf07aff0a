"""The `edgespec` command as tests call it: in the tests' own process, or started as a process of its own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen
from typing import IO, Any
from unittest import mock

import huggingface_hub.constants  # noqa: F401 - reads the environment when it is loaded: not a user's of `run_cli`

from edgespec.cli import main
from edgespec.llama import kernels as kernels_room
from edgespec.platform.files import cache_root

COMMAND = (sys.executable, "-m", "edgespec")
"""For tests of the process itself: signals, terminals, closed pipes, imports, exit codes."""


def python_path() -> str:
    """Return the PYTHONPATH with which a child Python finds the edgespec under test."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def copy_self_test(cache: Path) -> None:
    """Copy what the tests' own cache has of the kernels' self-test to a user's `cache`; it takes seconds."""
    (cache / "edgespec").mkdir(parents=True, exist_ok=True)
    for stored in cache_root().glob("selftest-*.json"):
        shutil.copy(stored, cache / "edgespec")


def user_environment(home: Path, *, kernels: bool = False, cache: Path | None = None) -> dict[str, str]:
    """Return the environment of a user who never ran edgespec, on a machine without a network.

    No packed weights are kept. Without `kernels`, edgespec's are off; with them, `copy_self_test` saves the
    user their self-test. The user's `cache` is in `home` by default.
    """
    cache = cache or home / "cache"
    if kernels:
        copy_self_test(cache)
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        "XDG_CACHE_HOME": str(cache),
        "XDG_CONFIG_HOME": str(home / "config"),
        "EDGESPEC_MODELS_DIR": str(home / "models"),
        "HF_HUB_OFFLINE": "1",
        "EDGESPEC_PACKED_WEIGHTS": "off",
        "EDGESPEC_KERNELS": os.environ.get("EDGESPEC_KERNELS", "") if kernels else "off",
    }


def failed(process: CompletedProcess[Any], code: int, *words: str) -> str:
    """Check the exit code, an empty stdout, and one line on stderr that has `words`; return that line."""
    out, line = (s.decode() if isinstance(s, bytes) else s for s in (process.stdout, process.stderr))
    assert (process.returncode, out) == (code, ""), line
    assert line.count("\n") == 1, line
    assert line.startswith("edgespec: error: ")
    for word in words:
        assert word in line
    return line


def run_cli(
    *arguments: object, env: Mapping[str, str], stdin: bytes = b"", cwd: Path | None = None, text: bool = True
) -> CompletedProcess[Any]:
    """Run `edgespec ARGUMENTS` in this process; return the same as for a process of its own.

    This saves a second per call for imports. `env` is the whole environment; `text` decodes the output.
    Standard input, output and error are files, for C as well as for Python.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as typed, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        typed.write(stdin)
        typed.seek(0)
        with (
            chdir(cwd or "."),
            mock.patch.dict(os.environ, env, clear=True),
            _kernels(),
            _standard_streams(typed, out, err),
        ):
            code = main(words)
        out.seek(0)
        err.seek(0)
        shown = out.read(), err.read()
    return CompletedProcess(words, code, *((part.decode() for part in shown) if text else shown))


@contextmanager
def started(*arguments: object, env: Mapping[str, str]) -> Iterator[Popen[bytes]]:
    """Start `edgespec ARGUMENTS` in a process of its own, without input; it does not outlive the test."""
    command = [*COMMAND, *map(str, arguments)]
    with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=dict(env)) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _kernels() -> Iterator[None]:
    """For EDGESPEC_KERNELS=off, hide the kernels, which this process may have loaded before.

    Otherwise they stay as this process loaded them: kernels can be neither unloaded nor changed.
    """
    loaded, off = kernels_room._loaded, kernels_room.word_of("EDGESPEC_KERNELS") == "off"
    assert off or not os.environ.get("EDGESPEC_KERNELS_ISA")
    if off:
        kernels_room._loaded = None
        if loaded and loaded.plugin:
            loaded.plugin.enable(False)  # who loads a model with the kernels enables them
    try:
        yield
    finally:
        if off:
            kernels_room._loaded = loaded


@contextmanager
def _standard_streams(*files: IO[bytes]) -> Iterator[None]:
    """Put these files in the place of standard input, output and error, for Python and for C."""
    names = ("stdin", "stdout", "stderr")
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in range(3)]
    try:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        with (
            open(0, closefd=False) as stdin,
            open(1, "w", closefd=False) as stdout,
            open(2, "w", closefd=False, buffering=1, errors="backslashreplace") as stderr,
            mock.patch.multiple(sys, **dict(zip(names, (stdin, stdout, stderr), strict=True))),
        ):
            yield
    finally:
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
