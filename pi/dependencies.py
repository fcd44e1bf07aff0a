"""Downloads other packages' wheels for a machine, so that it needs no network.

Wheels downloaded before are used again as long as they fit: then the package registry is not asked, and a
machine set up later gets the same versions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.models.hub import one_line

_GLIBC = 36  # 2.36: Raspberry Pi OS bookworm's
_OLDEST_GLIBC = 17  # 2.17: manylinux2014's, the oldest that wheels for ARM are built for

# pip evaluates a package's markers for the Python that it runs in, so on a laptop it would miss what only a
# board needs. So it is given the values of a board's Python.
_PIP = """\
import json, sys
from pip._vendor.packaging import markers
here = markers.default_environment()
there = {**here, **json.loads(sys.argv.pop(1))}
markers.default_environment = lambda: dict(there)
from pip._internal.cli.main import main
sys.exit(main())
"""


def download(wheels: Sequence[Path], machine: str, python: str, to: Path) -> list[Path]:
    """Return the wheels in `to` that the given ones need, on this kind of machine ("aarch64").

    `python` ("3.11.2") is that machine's, whose C library is Debian bookworm's or newer. Raises EdgespecError
    if the registry cannot be reached, or has no fitting wheel.
    """
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=to) as folder:
        new = Path(folder)
        arguments = _arguments(wheels, machine, python)
        arguments += ["--dest", folder, "--find-links", str(to)]
        failure = _pip(["--no-index", *arguments], machine, python)
        if failure is not None:
            for file in new.iterdir():
                file.unlink()
            failure = _pip(arguments, machine, python)
        if failure is not None:
            raise EdgespecError(f"packages for Python {python} on {machine}: {_reason(failure)}")
        own = {wheel.name for wheel in wheels}
        needed = sorted(file.name for file in new.iterdir() if file.name not in own)
        for name in needed:
            (new / name).replace(to / name)
    return [to / name for name in needed]


def folder_name(machine: str, python: str) -> str:
    """Return the name of the folder for such wheels: "wheels-aarch64-cp311"."""
    return f"wheels-{machine}-{_tag(python)}"


def _arguments(wheels: Sequence[Path], machine: str, python: str) -> list[str]:
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC, _OLDEST_GLIBC - 1, -1)]
    platforms.append(f"manylinux2014_{machine}")
    arguments = ["--only-binary=:all:", "--implementation=cp"]
    arguments += [f"--python-version={'.'.join(python.split('.')[:2])}"]
    arguments += [f"--platform={platform}" for platform in platforms]
    arguments += [f"--abi={abi}" for abi in (_tag(python), "abi3", "none")]
    return [*arguments, *map(str, wheels)]


def _tag(python: str) -> str:
    return "cp" + "".join(python.split(".")[:2])


def _pip(arguments: Sequence[str], machine: str, python: str) -> str | None:
    """Return pip's output if it failed, else None. Its index and proxies are the user's own settings."""
    there = {
        "implementation_version": python,
        "platform_machine": machine,
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
    }
    command = [sys.executable, "-P", "-c", _PIP, json.dumps(there), "download", "--quiet", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout + process.stderr if process.returncode else None


def _reason(output: str) -> str:
    """Return what pip's output says went wrong, in one line."""
    if unreachable := re.search(r"after connection broken by '(.+?)': /", output):
        return one_line(f"the package registry cannot be reached: {unreachable[1]}")
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if not line.startswith("WARNING")]
    return one_line("\n".join(reversed(lines)))
