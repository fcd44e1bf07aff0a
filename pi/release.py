"""A release out of the wheels of dist/: `python -m pi.release x86_64 aarch64`, the end of `make release`.

    the wheels   of this version, for each kind of processor
    SHA256SUMS   for `sha256sum --check SHA256SUMS`
    NOTES.md     what CHANGELOG.md says of this version, and how it is installed
                   ->  dist/release/

Nothing is uploaded. It is refused unless the commit is the one tagged with the version (needs.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from edgespec.cli.console import message
from edgespec.errors import EdgespecError
from pi import DIST, needs, recipe
from pi.console import Parser, main, out
from pi.manylinux import LOCAL_VERSION
from pi.needs import MACHINES

_SUMS, _NOTES = "SHA256SUMS", "NOTES.md"
_INSTALL = """\

### Install

With the wheels of this release in one folder, on Linux with Python 3.11 or newer, without a compiler:

    sha256sum --check --ignore-missing SHA256SUMS
    pip install edgespec --find-links .
"""


def release(machines: Sequence[str]) -> Path:
    """Write dist/release in the place of an older one, and return it.

    Raises EdgespecError for sources that are not a release's, and for wheels that are missing, damaged or
    of another version; UsageError for an unknown kind of processor.
    """
    needs.known_machines(machines)
    needs.sources_of_release()
    wheels = [wheel for machine in machines for wheel in needs.wheels_of(machine)]
    for wheel in wheels:
        _check(wheel)
    folder, new = DIST / "release", DIST / ".release.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for wheel in wheels:
        os.link(wheel, new / wheel.name)
    sums = "".join(f"{recipe.sha256(wheel)}  {wheel.name}\n" for wheel in wheels)
    (new / _SUMS).write_text(sums, encoding="utf-8")
    (new / _NOTES).write_text(f"{needs.notes()}\n{_INSTALL}", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    out.print(sums, end="")
    message(
        f"{folder}: {len(wheels)} wheels, {_SUMS} and {_NOTES}. Nothing was uploaded: push the tag "
        f"v{needs.version()}, and upload these files to its release, with {_NOTES} as the text"
    )
    return folder


def _check(wheel: Path) -> None:
    package, found, *_ = wheel.name.split("-")
    wanted = needs.version() if package == "edgespec" else recipe.llama_version() + LOCAL_VERSION
    if found != wanted:
        raise EdgespecError(f"{wheel}: version {found}, and this commit has {wanted}; make wheels")
    try:
        with zipfile.ZipFile(wheel) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        damaged = str(error)
    if damaged:
        raise EdgespecError(f"{wheel}: damaged ({damaged}); delete it, and make wheels")


def _main() -> int:
    parser = Parser(
        prog="python -m pi.release",
        description="Put wheels, checksums and notes of a tagged commit into dist/release.",
        epilog="Example: python -m pi.release x86_64",
    )
    parser.add_argument("machines", nargs="+", metavar="MACHINE", help=", ".join(MACHINES))
    release(parser.parse_args().machines)
    return 0


if __name__ == "__main__":
    sys.exit(main(_main))
