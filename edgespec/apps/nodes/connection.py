"""The client's side of nodes: finds out what they are, and opens the ways to them.

    addresses -> ssh: what is each machine? -> tunnels -> the node's sizes and round trip -> Nodes

Versions are compared before anything is loaded. All ways are closed when `Nodes` is.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

from edgespec.apps.nodes.description import (
    LEAST_MEMORY,
    NodeDescription,
    NodeSpeed,
    RunningNode,
    network,
    running_nodes,
)
from edgespec.apps.nodes.rpc_client import RPCClient, check_protocol
from edgespec.apps.nodes.tunnel import ASK_S, LOOPBACK, NodeQuery, Tunnel
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import rpc
from edgespec.llama.kernels import STOCK
from edgespec.llama.node_addresses import NodeAddress
from edgespec.platform.closing import Closing
from edgespec.platform.cpu import read_cpu
from edgespec.platform.messages import MessageFn, silent


@dataclass(frozen=True, slots=True)
class ConnectedNode:
    """A node that can be used."""

    name: str
    address: NodeAddress
    endpoint: str
    """Address at which llama.cpp reaches it from here: "127.0.0.1:40123"."""
    processor: str
    """Processor's name; "" (and no speed) for a node that is reached without ssh on another machine."""
    speed: NodeSpeed | None
    memory_bytes: int
    """Memory that layers may take now."""
    round_trip_s: float
    """Time from here to the node and back, with the smallest request."""
    bytes_per_s: float | None = None
    """Bandwidth to the node; None: not measured."""


@dataclass(frozen=True, slots=True)
class _NodeRoute:
    """Route to a node, and its machine's description."""

    address: NodeAddress
    port: int
    machine: NodeDescription | None
    running: RunningNode | None


class Nodes(Closing):
    """Nodes that were connected to. Closing them ends the tunnels; the nodes go on."""

    def __init__(self, nodes: Sequence[ConnectedNode], tunnels: dict[str, Tunnel]) -> None:
        self.nodes = tuple(nodes)
        self._tunnels = tunnels

    @property
    def lost(self) -> dict[str, str]:
        """The nodes whose tunnel has ended: name -> why, as a line; connect again for them."""
        reasons = {name: tunnel.ended for name, tunnel in self._tunnels.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def close(self) -> None:
        """Close all tunnels."""
        for tunnel in self._tunnels.values():
            tunnel.close()


def connect(
    addresses: Sequence[NodeAddress],
    *,
    on_message: MessageFn = silent,
    bandwidth: bool = False,
    ask_s: float = ASK_S,
) -> Nodes:
    """Open the ways to nodes, and return them in their order.

    `bandwidth`: measure it, with up to 32 MB for each node. `ask_s`: how long each machine may take to say
    what it is. Raises EdgespecError where llama.cpp's RPC backend is missing here, for a machine that is not
    reached, has no node or another version, and for a node that has another client, no memory, or says what
    cannot be; nothing is open then.
    """
    rpc.require()
    machines = _ask_machines(addresses, ask_s)
    ways = [_way(address, machines.get(address.host)) for address in addresses]
    _check_each_once(ways)
    with ExitStack() as opened:
        tunnels = {
            way.address.name: opened.enter_context(Tunnel(way.address.host, way.port))
            for way in ways
            if not way.address.direct
        }
        for tunnel in tunnels.values():
            tunnel.wait()
        nodes = [_examine(way, tunnels.get(way.address.name), bandwidth=bandwidth) for way in ways]
        opened.pop_all()
    for node in nodes:
        _tell(node, on_message)
    return Nodes(nodes, tunnels)


def _ask_machines(addresses: Sequence[NodeAddress], ask_s: float) -> dict[str, NodeDescription]:
    """Ask all machines that ssh reaches, at once."""
    with ExitStack() as opened:
        hosts = dict.fromkeys(address.host for address in addresses if not address.direct)
        questions = {host: opened.enter_context(NodeQuery(host)) for host in hosts}
        return {host: read_description(host, question.answer(ask_s)) for host, question in questions.items()}


def read_description(host: str, answer: bytes) -> NodeDescription:
    """Return what `edgespec node --describe --json` said on `host`.

    Raises EdgespecError if it is of another version, or cannot be.
    """
    line = (answer.strip().splitlines() or [b""])[-1]  # a shell may print something of its own before
    try:
        installed = str(msgspec.json.decode(line, type=dict[str, object])["edgespec"])
        if installed != version("edgespec"):
            raise EdgespecError(
                f"{host}: edgespec {installed} is there, and {version('edgespec')} here; install the same "
                "one on both machines"
            )
        found = msgspec.json.decode(line, type=NodeDescription)
    except (msgspec.DecodeError, KeyError) as error:
        raise EdgespecError(
            f"{host}: `edgespec node --describe` there says what is not understood"
        ) from error
    if found.ggml != rpc.ggml_version():
        raise EdgespecError(
            f"{host}: ggml {found.ggml} is there, and {rpc.ggml_version()} here; install the same "
            "llama-cpp-python on both machines"
        )
    check_protocol(host, found.protocol)
    for node in found.running:
        _check_sizes(f"{host}:{node.port}", node, found.total_bytes)
    return found


def _check_sizes(name: str, node: RunningNode, total: int | None) -> None:
    times = node.speed.layer_ms
    if node.memory_bytes < 0 or (total is not None and node.memory_bytes > total):
        raise EdgespecError(f"{name}: offers {node.memory_bytes:,} bytes of {total:,}, which cannot be")
    if times is not None and not (times and all(n > 0 and 0 < ms < 1e6 for n, ms in times.items())):
        raise EdgespecError(f"{name}: says of its speed what cannot be; restart the node")


def _way(address: NodeAddress, machine: NodeDescription | None) -> _NodeRoute:
    """Return which node the address means."""
    host = address.host
    if machine is None:
        here = running_nodes() if host == LOOPBACK else ()
        assert address.port is not None  # noqa: S101 - direct addresses have one
        running = next((node for node in here if node.port == address.port), None)
        return _NodeRoute(address, address.port, None, running)
    ports = [node.port for node in machine.running]
    if address.port is not None:  # another user's node is not in the list
        running = next((node for node in machine.running if node.port == address.port), None)
        return _NodeRoute(address, address.port, machine, running)
    if not ports:
        raise EdgespecError(f"{host}: no node runs there; start it: ssh {host} edgespec node")
    if len(ports) > 1:
        listed = ", ".join(f"{host}:{port}" for port in ports)
        raise UsageError(f"several nodes run there; choose of {listed}", field="nodes", value=host)
    return _NodeRoute(address, ports[0], machine, machine.running[0])


def _check_each_once(ways: Sequence[_NodeRoute]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for way in ways:
        # A machine may have several names, and this one may be reached through ssh too.
        known = way.machine.network if way.machine else network() if way.running else ""
        others = {
            seen.setdefault((host, way.port), way.address.name) for host in (way.address.host, known) if host
        }
        if other := next(iter(others - {way.address.name}), None):
            raise UsageError(f"that is the same node as {other}", field="nodes", value=way.address.name)


def _examine(way: _NodeRoute, tunnel: Tunnel | None, *, bandwidth: bool) -> ConnectedNode:
    """Ask the node itself. Raises EdgespecError if it cannot be used."""
    name, machine, running = way.address.name, way.machine, way.running
    host, port = (LOOPBACK, tunnel.local_port) if tunnel else (_ipv4(way.address), way.port)
    with RPCClient(name, host, port) as requests:
        memory = requests.check_sizes().free
        round_trip_s = requests.round_trip_s()
        bytes_per_s = requests.bytes_per_s(round_trip_s) if bandwidth else None
    if running:
        memory = min(memory, running.memory_bytes)  # llama.cpp's CPU device tells of all that there is
    if memory < LEAST_MEMORY:
        raise EdgespecError(
            f"{name}: {memory >> 20} MB of memory are free for layers: too few; close other programs there, "
            "or leave the node out"
        )
    processor = machine.processor if machine else read_cpu().model if running else ""
    speed = running.speed if running else machine.speed if machine else None
    return ConnectedNode(
        name=name,
        address=way.address,
        endpoint=f"{host}:{port}",
        processor=processor,
        speed=speed,
        memory_bytes=memory,
        round_trip_s=round_trip_s,
        bytes_per_s=bytes_per_s,
    )


def _ipv4(address: NodeAddress) -> str:
    """Return the numeric address, which is all that llama.cpp connects to here."""
    try:
        return socket.gethostbyname(address.host)
    except OSError as error:
        reason = error.strerror or error
        raise EdgespecError(f"{address.name}: {reason}; check the name, or give the address") from None


def _tell(node: ConnectedNode, on_message: MessageFn) -> None:
    if node.speed is None:
        on_message(f"{node.name}: its speed is not known; it counts as the slowest of the others")
    elif node.speed.kernels == STOCK:
        on_message(
            f"{node.name}: llama.cpp's kernels are used there ({node.speed.reason}); drafting will hardly "
            "pay over it"
        )
