"""Run a node: llama.cpp's RPC server in a child process, which is started again if a client makes it end.

edgespec node                  watches, ends with Ctrl-C
  child: serve_here            loads the kernels, serves a device of them; prints nothing itself
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import msgspec

from edgespec.apps.nodes import weight_store
from edgespec.apps.nodes.description import (
    LEAST_MEMORY,
    NodeSpeed,
    RunningNode,
    announced,
    measure_speed,
    memory_to_give,
)
from edgespec.apps.nodes.rpc_client import RPCClient
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import kernels, rpc
from edgespec.llama.choices import KernelsChoice
from edgespec.platform.child import ChildExit, ReportingChild, answer, say
from edgespec.platform.messages import MessageFn, silent

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"  # noqa: S104 - only with --unsafe-no-ssh

_UNKNOWN = 1 << 40  # bytes, where the system does not say how much memory is free
_READY_S = 60.0
_MOST_ENDS, _ENDS_S = 5, 60.0  # so many in so many seconds: something is wrong with this machine


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Where a node listens, and what of the machine it gives to clients."""

    port: int
    """Port; 0: a free one."""
    n_threads: int
    folder: Path
    """Folder of the stored weights."""
    kernels: KernelsChoice = "auto"
    memory_bytes: int | None = None
    """Memory that clients may take; None: all that is free. Only edgespec's kernels keep to it."""
    everywhere: bool = False
    """Whether other machines reach the port, and with it this one's user."""

    @property
    def host(self) -> str:
        """The address to listen on."""
        return EVERYWHERE if self.everywhere else LOOPBACK


class _Service(msgspec.Struct, frozen=True):
    """The request to the child process."""

    host: str
    port: int
    n_threads: int
    memory_bytes: int
    folder: str | None
    kernels: KernelsChoice


def run_node(
    options: NodeOptions, on_ready: Callable[[RunningNode], None], on_message: MessageFn = silent
) -> NoReturn:
    """Serve until an exception such as Ctrl-C ends it; `on_ready` is called when clients can come.

    Raises UsageError for a port that cannot be listened on, EdgespecError if there is no memory or no RPC
    backend, or the server cannot begin or ends again and again.
    """
    rpc.require()
    memory = _memory(options)
    options = replace(options, port=free_port(options.host, options.port))
    ends: list[float] = []
    with weight_store.held(options.folder, on_message) as is_ours:
        while True:
            keeps = is_ours and weight_store.prepare(options.folder, on_message)
            folder = str(options.folder) if keeps else None
            service = _Service(options.host, options.port, options.n_threads, memory, folder, options.kernels)
            ended = _serve_once(service, on_ready)
            ends = [*(end for end in ends if time.monotonic() - end < _ENDS_S), time.monotonic()]
            if len(ends) == _MOST_ENDS:
                raise EdgespecError(f"the node has ended {_MOST_ENDS} times in a minute: {_reason(ended)}")
            on_message(f"a client made the node end ({_reason(ended)}); it serves again")


def _memory(options: NodeOptions) -> int:
    """Return the bytes that clients may take."""
    wanted, free = options.memory_bytes, memory_to_give()
    if wanted is not None and (wanted < LEAST_MEMORY or (free is not None and wanted > free)):
        most = (_UNKNOWN if free is None else free) >> 20
        raise UsageError(
            f"from {LEAST_MEMORY >> 20} to {most} MB can be given", field="memory", value=wanted >> 20
        )
    if free is not None and free < LEAST_MEMORY:
        raise EdgespecError(f"{free >> 20} MB of memory are free for layers: too few; close other programs")
    return wanted or free or _UNKNOWN


def free_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0. Raises UsageError if it cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            problem = error.strerror or "nobody can listen there"
            if error.errno == errno.EADDRINUSE:
                problem = "another program listens there, perhaps another node; choose another port"
            raise UsageError(problem, field="port", value=port) from None
        found: int = probe.getsockname()[1]
        return found


def _serve_once(service: _Service, on_ready: Callable[[RunningNode], None]) -> ChildExit:
    """Run the server until it ends. Raises EdgespecError if it ended before it was ready."""
    conversation = ReportingChild("edgespec.apps.nodes.serving", "serve_here", service)
    ready = False
    with closing(iter(conversation)) as said:
        for _, speed in said:
            node = RunningNode(
                host=service.host,
                port=service.port,
                pid=os.getpid(),
                memory_bytes=service.memory_bytes,
                speed=msgspec.convert(speed, NodeSpeed, str_keys=True),
            )
            with announced(node):
                on_ready(node)
                ready = True
                for _ in said:
                    pass
    if not ready:
        raise EdgespecError(f"the node cannot serve: {_reason(conversation.ended)}")
    return conversation.ended


def _reason(ended: ChildExit) -> str:
    if ended.code == -9:
        return "it was killed: perhaps there was no memory left"
    complaint = ended.complaint.removeprefix("edgespec: error: ").partition(" - the model file")[0]
    return complaint or f"exit code {ended.code}"


def chosen_kernels(choice: KernelsChoice) -> kernels.Kernels:
    """Load the kernels that a node uses into this process."""
    return kernels.load() if choice == "auto" else kernels.Kernels("--kernels off", declined=True)


# ---- in the child ----


def serve_here() -> int:
    """In the child: serve; return the exit code. What is wrong goes to stderr."""
    return answer(_Service, _serve)


def _serve(service: _Service) -> None:
    loaded = chosen_kernels(service.kernels)
    library = rpc.load()
    speed = measure_speed(loaded, service.n_threads)
    cpu = rpc.cpu_device()
    device = loaded.plugin.node_device(cpu, service.memory_bytes) if loaded.plugin else cpu
    threading.Thread(target=_tell_when_ready, args=(service.port, speed), daemon=True).start()
    folder = None if service.folder is None else Path(service.folder)
    library.serve(
        f"{service.host}:{service.port}",
        device,
        n_threads=service.n_threads,
        kept=folder,
        least_free=weight_store.LEAST_FREE,
    )
    raise EdgespecError(f"llama.cpp's server cannot listen on port {service.port}")


def _tell_when_ready(port: int, speed: NodeSpeed) -> None:
    """Send the one pair of the conversation when the server answers."""
    begun = time.monotonic()
    while time.monotonic() - begun < _READY_S:
        try:
            RPCClient("this node", LOOPBACK, port, timeout_s=_READY_S).close()
        except EdgespecError:  # it does not listen yet
            time.sleep(0.02)
        else:
            say("ready", speed)
            return
