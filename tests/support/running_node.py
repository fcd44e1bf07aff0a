"""Nodes for tests: real ones in processes of their own, and one that answers as a test wants."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

from command_line import started, user_environment
from edgespec.llama.placement import Placement, RemoteLayers

_ports: set[int] = set()
"""Of all nodes so far: ggml remembers for good what the first one at an endpoint said of its sizes."""


@contextmanager
def node(
    home: Path, *options: object, kernels: bool = False, port: int = 0
) -> Iterator[tuple[dict[str, Any], Popen[bytes]]]:
    """A running node: what it said when it was ready, and its process."""
    env = user_environment(home, kernels=kernels)
    arguments = ("node", "--port", port, "--json", "--threads", 1, "--cache", home / "kept", *options)
    with started(*arguments, env=env) as process:
        assert process.stdout
        assert process.stderr
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        ready = json.loads(line)
        _ports.add(ready["port"])
        yield ready, process


def child_of(pid: int) -> int:
    """The server's process: the only child of the node's."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def placement(n_home: int, *layers: tuple[dict[str, Any], int]) -> Placement:
    """The first layers here, and as many as each pair says on its node."""
    addresses = [(f"127.0.0.1:{ready['port']}", n) for ready, n in layers]
    return Placement(n_home, tuple(RemoteLayers(address, address, n) for address, n in addresses))


@contextmanager
def answering(answers: dict[int, bytes]) -> Iterator[int]:
    """A server of the RPC protocol with these answers by command; its port. To others it does not answer.

    Without an answer to a hello it hangs up at once.
    """
    with _listener() as listener:
        thread = threading.Thread(target=_answer, args=(listener, answers), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _listener() -> socket.socket:
    """Listen at a port that no node of this process had: what it says of sizes is asked for."""
    while True:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if port not in _ports:
            _ports.add(port)
            return listener
        listener.close()


def _answer(listener: socket.socket, answers: dict[int, bytes]) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                while head := connection.recv(9, socket.MSG_WAITALL):
                    command, size = struct.unpack("<BQ", head)
                    connection.recv(size, socket.MSG_WAITALL)
                    if command not in answers:
                        break
                    connection.sendall(struct.pack("<Q", len(answers[command])) + answers[command])
