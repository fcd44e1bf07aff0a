"""`edgespec ps`: the servers and nodes of this user that run here, from the system's own tables."""

from __future__ import annotations

import ipaddress
import os
import shlex
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from edgespec.cli.console import message, out, print_table
from edgespec.cli.groups import shown
from edgespec.cli.options import JsonOption
from edgespec.platform.files import lines_of, text_of

_SERVERS = ("serve", "node")
_LISTENS = "0A"  # a socket's state in /proc/net/tcp
_ACCEPTS = 1 << 16  # a socket's flag in /proc/net/unix
_ENDED = ("", "Z", "X")  # states of a process


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A server or node that runs."""

    pid: int
    command: str
    """`serve` or `node`, and its options."""
    addresses: tuple[str, ...]
    """HOST:PORT or unix:FILE of each socket that listens; empty while models are loaded."""
    seconds: float
    """Since it began."""
    models: tuple[str, ...] = ()
    """Of a server of several models, those that are loaded."""


@shown("Machine", "edgespec ps")
def ps_command(json: JsonOption = False) -> None:
    """List the servers and nodes of yours that run here: `kill PID` ends one."""
    found = [*running_servers()]
    if json:
        out.print_json(data={"servers": [asdict(one) for one in found]})
        return
    if not found:
        message("no `edgespec serve` and no `edgespec node` of yours runs here")
        return
    table = Table("pid", "address", "for", "command", box=None, pad_edge=False)
    for one in found:
        minutes = int(one.seconds // 60)
        since = f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
        command = one.command + (f" (loaded: {', '.join(one.models)})" if one.models else "")
        table.add_row(str(one.pid), " ".join(one.addresses) or "loading", since, command)
    print_table(table)


def running_servers(root: Path = Path("/")) -> Iterator[RunningProcess]:
    """Yield the servers and nodes of this user; `root`: the folder with `proc`."""
    listening, models = dict(_listening(root)), [*_models(root)]
    for folder in sorted((root / "proc").glob("[0-9]*"), key=lambda one: int(one.name)):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if folder.stat().st_uid != os.getuid() or not (options := _options(words)):
                continue
            links = [*_links(folder / "fd")]
            since = time.time() - folder.stat().st_mtime
        except OSError:  # it ended
            continue
        if _state(folder)[0] in _ENDED:
            continue
        addresses = tuple(dict.fromkeys(listening[link] for link in links if link in listening))
        loaded = tuple(name for parent, name in models if parent == folder.name)
        yield RunningProcess(int(folder.name), shlex.join(options), addresses, max(0.0, since), loaded)


def _models(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the processes that serve one model of several: the id of the server's process, and the name."""
    for folder in (root / "proc").glob("[0-9]*"):
        words = text_of(folder / "cmdline").split("\0")
        state, parent = _state(folder)
        if words[2:3] == ["-c"] and "import serve_model" in "".join(words[3:4]) and state not in _ENDED:
            name = next((word for word in words if word.startswith("--alias=")), "")
            yield parent, name.removeprefix("--alias=")


def _state(folder: Path) -> tuple[str, str]:
    """Return the state of a process, and the id of its parent; "" of one that is gone."""
    fields = text_of(folder / "stat").rpartition(")")[2].split()
    return (fields[0], fields[1]) if len(fields) > 1 else ("", "")


def _links(folder: Path) -> Iterator[str]:
    for file in folder.iterdir():
        with suppress(OSError):  # it was closed meanwhile
            yield str(file.readlink())


def _options(words: list[str]) -> list[str]:
    """Return the words of a command line from `serve` or `node` on; [] if it is another program's."""
    for i, word in enumerate(words[:3]):  # PYTHON -m edgespec, PYTHON /bin/edgespec
        is_ours = Path(word).name == "edgespec" and (i == 0 or "python" in Path(words[0]).name)
        if is_ours and words[i + 1 : i + 2] and words[i + 1] in _SERVERS:
            return words[i + 1 :]
    return []


def _listening(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the sockets that listen, as /proc/PID/fd names them, and their addresses."""
    for line in lines_of(root / "proc/net/unix")[1:]:
        _, _, _, flags, _, _, number, *path = line.split(maxsplit=7)
        if int(flags, 16) & _ACCEPTS and path:
            yield f"socket:[{number}]", f"unix:{path[0]}"
    for name in ("tcp", "tcp6"):
        for line in lines_of(root / "proc/net" / name)[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                host, _, port = fields[1].partition(":")
                yield f"socket:[{fields[9]}]", f"{_host(host)}:{int(port, 16)}"


def _host(digits: str) -> str:
    """Return an address of /proc/net/tcp: 32-bit words in the processor's order."""
    packed = b"".join(struct.pack("=I", int(digits[i : i + 8], 16)) for i in range(0, len(digits), 8))
    host = ipaddress.ip_address(packed)
    return f"[{host}]" if host.version == 6 else str(host)
