"""`edgespec node`: this machine holds layers of models that other machines run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.console import message, out
from edgespec.cli.groups import shown
from edgespec.cli.options import ThreadsOption
from edgespec.errors import EdgespecError, UsageError, describe_os_error

_LOOPBACK = "127.0.0.1"
_OPEN = (
    "whoever reaches this port can run programs as you on this machine: the protocol has no password and was "
    "not made for open networks"
)


@shown("Machine", "edgespec node --threads 4")
def node_command(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; one that is not loopback is open.")] = (
        _LOOPBACK
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = 50052,
    threads: ThreadsOption = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that keeps large tensors, which then come over the network once.",
            show_default="none are kept",
        ),
    ] = None,
) -> int:
    """Hold layers of models for other machines, until Ctrl-C: `edgespec run --rpc HOST:PORT`.

    It is llama.cpp's RPC server, for one client at a time. Clients connect through an ssh tunnel
    (docs/many-machines.md).
    """
    from edgespec.llama import rpc
    from edgespec.platform.files import expand_user
    from edgespec.platform.machine import default_threads

    folder = expand_user(cache).absolute() if cache else None
    if folder:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(describe_os_error(error), field="cache", value=str(cache)) from None
    _check_free(host, port)
    if not host.startswith("127."):
        message(f"--host {host}: {_OPEN}")
    out.print(f"node ready on {host}:{port}, {threads or default_threads()} threads (Ctrl-C ends it)")
    out.file.flush()
    rpc.serve(host, port, n_threads=threads or default_threads(), cache=folder)
    raise EdgespecError(f"{host}:{port}: llama.cpp's RPC server could not listen there")


def _check_free(host: str, port: int) -> None:
    """Raise UsageError if the address cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"{reason}; choose another address", field="port", value=port) from None
