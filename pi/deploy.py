"""Puts edgespec onto a board over ssh: `python -m pi.deploy pi@raspberrypi.local`.

    asks     processor, system, memory and disk (pi/probe.py): nothing is copied to a board that cannot run it
    gathers  the board's wheels in dist/, and other packages' wheels (pi/dependencies.py)
    copies   all of them, and installs them into a new venv there; the board needs no network
    checks   with `edgespec doctor` in that venv, which then takes the place of the old one
    serves   as a node, with --node (pi/node_service.py); a node that runs is restarted

On the board, FOLDER/venv is a link to the venv in use, so that the switch is atomic. The steps before it are
one remote command, which removes what it made if it fails or the connection is cut.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.sources import format_size
from edgespec.platform.cpu import BOARDS, Board
from edgespec.platform.ssh import FAILED
from pi import BUILD, DIST, console, probe
from pi.console import err, message, status
from pi.dependencies import download, folder_name
from pi.manifest import check_wheels, read_manifest, sha256
from pi.node_service import WISHES, Wish, look_after
from pi.ssh import Connection

DEFAULT_FOLDER = "edgespec"

_VENV_BYTES = 96 << 20  # an empty venv with pip, and the bytecode of what is installed
_SUMS = "SHA256SUMS"
_FOLDER = re.compile(r"[\w ./-]+")  # the folder is in pip's commands, which may be shell scripts
_STEP = re.compile(r"::(\w+)\n")

# $1 is the folder, the rest are the wheels to install; the archive with all wheels comes on stdin.
_INSTALL = r"""
set -eu
umask 022
into=$1
shift
mkdir -p "$into"
cd "$into"
exec 9<.
flock -n 9 || {
    echo "another deploy, maybe one that was cut off, is at work in $into; try again in a minute" >&2
    exit 1
}
old=$(readlink venv || :)
for leftover in .edgespec-venv-*; do [ "$leftover" = "$old" ] || rm -rf "$leftover"; done
new=$(mktemp -d .edgespec-venv-XXXXXX)
trap 'cd "$into"; rm -rf "$new"' EXIT
trap 'exit 1' HUP INT PIPE TERM
chmod 755 "$new"
echo ::copying >&2
tar -x --no-same-owner -C "$new"
cd "$new/wheels"
sha256sum --check --quiet --strict SHA256SUMS >&2
echo ::installing >&2
python3 -m venv "$into/$new" >&2
pip() { "$into/$new/bin/python" -m pip --isolated --disable-pip-version-check "$@" >&2; }
pip install --quiet --no-index --find-links . "$@"
cd "$into"
rm -r "$new/wheels"
echo ::doctor >&2
"$new/bin/edgespec" doctor
echo ::taking >&2
ln -s "$new" .edgespec-venv-link
trap - EXIT
mv -T .edgespec-venv-link venv
[ -z "$old" ] || rm -rf "$old" || :
echo ::done >&2
"""


def deploy(
    connection: Connection,
    *,
    board: Board | None = None,
    into: str = DEFAULT_FOLDER,
    dist: Path = DIST,
    kept: Path = BUILD,
    node: Wish = "keep",
) -> int:
    """Install edgespec on a board and return the exit code of `edgespec doctor` there.

    The connection must be open; `board` is found out by default. `into` is a folder there,
    below the home folder unless it is absolute. `dist` has the wheels of each board, and in `kept` other
    packages' wheels stay for the next time. `node`: whether the board becomes a node.

    Raises EdgespecError and UsageError. Unless 0 is returned, or the service alone failed, the board is left
    as it was.
    """
    into = into.removeprefix("~/")
    if not _FOLDER.fullmatch(into):
        raise UsageError(
            f"--into {into!r}: a folder's name here has letters, digits, spaces and . _ - / alone"
        )
    with status(f"asking {connection.host} what it is"):
        facts = probe.parse(connection.ask(probe.SCRIPT, into), connection.host)
    chosen = probe.choose_board(facts, board)
    manifest = read_manifest(dist / chosen.name)
    probe.check(facts, glibc=manifest.glibc)
    message(f"{facts.host}: {facts.describe()}")
    own = check_wheels(dist / chosen.name, manifest)
    with status(f"gathering wheels for Python {facts.python_text} on {manifest.machine}"):
        to = kept / folder_name(manifest.machine, facts.python_text)
        others = download(own, manifest.machine, facts.python_text, to, glibc=facts.glibc)
    wheels = [*own, *others]
    needed = _VENV_BYTES + sum(wheel.stat().st_size + _unpacked(wheel) for wheel in wheels)
    if facts.free < needed:
        raise EdgespecError(
            f"{facts.host}: {format_size(facts.free)} free for {facts.folder}, and {format_size(needed)} are "
            "needed; free some, or choose another disk with --into"
        )
    message(f"{chosen.title}: {len(own)} wheels of {dist / chosen.name}, {len(others)} of other packages")
    code = _install(connection, facts.folder, own, others)
    program = shlex.quote(f"{facts.folder}/venv/bin/edgespec")
    if code:
        message(f"`edgespec doctor` failed on {facts.host} (exit code {code}); nothing has changed there")
    else:
        look_after(connection, facts.folder, node)
        message(f'installed; on {facts.host}: {program} run "Write a quicksort in Python."')
    return code


# ---- wheels ----


def _unpacked(wheel: Path) -> int:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return sum(member.file_size for member in archive.infolist())
    except zipfile.BadZipFile as error:
        raise EdgespecError(f"{wheel}: damaged ({error}); delete it, and it is downloaded again") from None


# ---- the board ----


def _install(connection: Connection, folder: str, own: Sequence[Path], others: Sequence[Path]) -> int:
    """Copy and install wheels and put them to use; return the exit code of doctor, whose output is shown."""
    sys.stdout.flush()
    command = connection.command(_INSTALL, folder, *(wheel.name for wheel in own))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ssh:
        assert ssh.stdin is not None  # noqa: S101 - both are pipes, which the types do not know
        assert ssh.stderr is not None  # noqa: S101
        with suppress(BrokenPipeError), ssh.stdin:  # the remote command ended early; its stderr says why
            _send(ssh.stdin, [*own, *others])
        step, said = _follow(io.TextIOWrapper(ssh.stderr, errors="replace"))
    code = ssh.returncode
    if step == "doctor" and code != FAILED:
        return code
    if code == FAILED:
        raise EdgespecError(connection.explain("".join(said) or "connection closed"))
    if code or step != "done":
        reason = next((line.strip() for line in said if line.strip()), "no reason given")
        reason = reason.removeprefix("ERROR: ")
        raise EdgespecError(f"{connection.host}: {step} failed: {reason}; nothing has changed there")
    return 0


def _follow(stream: Iterable[str]) -> tuple[str, list[str]]:
    """Show what the remote command does until it ends; return its last step and that step's output."""
    step, said = "preparing", list[str]()
    with status("installing there") as shown:
        for line in stream:
            if found := _STEP.fullmatch(line):
                step, said = found[1], []
                if step == "doctor":
                    if shown:
                        shown.stop()
                    message("edgespec doctor there:")
            elif step == "doctor":
                err.out(line, end="")
            else:
                said.append(line)
    return step, said


def _send(stream: IO[bytes], wheels: Sequence[Path]) -> None:
    """Write an archive with the wheels and their checksums: one that was cut short is not installed."""
    sums = "".join(f"{sha256(wheel)}  {wheel.name}\n" for wheel in wheels).encode()
    total = sum(wheel.stat().st_size for wheel in wheels)
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    if not err.is_terminal:
        message(f"copying {format_size(total)}")
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        task = bars.add_task("", total=total)
        _add(stream, _SUMS, len(sums), io.BytesIO(sums))
        for wheel in wheels:
            with bars.open(wheel, "rb", total=total, task_id=task) as content:
                _add(stream, wheel.name, wheel.stat().st_size, content)
        stream.write(bytes(2 * tarfile.BLOCKSIZE))


def _add(stream: IO[bytes], name: str, size: int, content: IO[bytes]) -> None:
    """Write a file of the archive. A TarFile would write on into a connection that is gone."""
    header = tarfile.TarInfo(f"wheels/{name}")
    header.size = size
    stream.write(header.tobuf())
    shutil.copyfileobj(content, stream)
    stream.write(bytes(-size % tarfile.BLOCKSIZE))


# ---- the command ----


def _parser() -> argparse.ArgumentParser:
    parser = console.Parser(
        prog="python -m pi.deploy",
        description="Install edgespec on a Raspberry Pi over ssh, from the wheels of `make pi`, and run "
        "`edgespec doctor` there. A failure leaves the board as it was.",
        epilog="Example: python -m pi.deploy pi@raspberrypi.local --identity ~/.ssh/pi",
    )
    parser.add_argument("host", metavar="USER@HOST", help="the board, as ssh knows it")
    parser.add_argument("--port", type=int, help="ssh's port there")
    parser.add_argument("--identity", type=Path, metavar="FILE", help="the private key to log in with")
    parser.add_argument(
        "-o",
        dest="options",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of ssh, as in `ssh -o`; what ~/.ssh/config says holds too",
    )
    parser.add_argument(
        "--board",
        choices=[board.name for board in BOARDS],
        help="whose wheels to install (default: what the board is found to be)",
    )
    parser.add_argument(
        "--dist",
        type=Path,
        default=DIST,
        metavar="FOLDER",
        help="where the wheels of each board are (default: dist/ of the repository)",
    )
    parser.add_argument(
        "--into",
        default=DEFAULT_FOLDER,
        metavar="FOLDER",
        help="where on the board, below the home folder or absolute (default: %(default)s)",
    )
    parser.add_argument(
        "--node",
        action=argparse.BooleanOptionalAction,
        help="have the board hold layers of other machines' models, from its start on, or no more; without "
        "either a node that is there is restarted",
    )
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    asked = _parser().parse_args(arguments)
    board = next((board for board in BOARDS if board.name == asked.board), None)
    with Connection(
        asked.host, port=asked.port, identity=asked.identity, options=asked.options
    ) as connection:
        node = WISHES[asked.node]
        return deploy(connection, board=board, into=asked.into, dist=asked.dist, kept=BUILD, node=node)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: doctor's, or 1 for a failure and 2 for a wrong request."""
    return console.main(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
