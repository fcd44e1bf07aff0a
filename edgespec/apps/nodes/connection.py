"""The client's side of nodes: finds out what they are, and opens the ways to them.

    addresses -> ssh: what is each machine? -> tunnels -> the node's sizes and round trip -> Nodes

Versions are compared before anything is loaded. All ways are closed when `Nodes` is.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import rpc
from edgespec.llama.kernels import STOCK
from edgespec.llama.node_addresses import NodeAddress
from edgespec.platform.closing import Closing
from edgespec.platform.cpu import read_cpu
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.ssh import FAILED, explain, remote_command

# ---- ssh: questions, and tunnels to a node's port ----
#
#     here                                                   there
#     127.0.0.1:LOCAL  ->  ssh -L  ~~ network ~~  sshd  ->  127.0.0.1:PORT
#          stdin (a pipe)  ->  ssh  ~~~~~~~~~~~~  sshd  ->  a shell, which reads a byte every 5 s
#
# The pipe keeps the tunnel open: when this process ends, by `kill -9` too, the system closes the pipe, and
# the shell there ends its sshd, and so the tunnel. (A signal at the parent's death would come when the
# thread that started ssh ends.) It does so too when no byte has come for 20 s, because the network is gone
# or this machine sleeps: sshd itself would keep the tunnel for hours, and the node its client. A word that
# the shell prints says that the tunnel is open.

LOOPBACK = "127.0.0.1"

# What the user's configuration says otherwise holds no more. ServerAlive: a network that is gone ends ssh
# within 15 s.
_OPTIONS = (
    *("BatchMode=yes", "RequestTTY=no", "RemoteCommand=none", "PermitLocalCommand=no"),
    *("ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"),
)
# A connection that is shared with other programs would live on without this one.
_OWN = ("ControlMaster=no", "ControlPath=none", "ExitOnForwardFailure=yes", "GatewayPorts=no")

_ASK = r"""
for program in edgespec ~/.local/bin/edgespec ~/edgespec/venv/bin/edgespec; do
    command -v "$program" >/dev/null 2>&1 && exec "$program" node --describe --json
done
exit 127
"""
_MISSING, _USAGE = 127, 2
_OPEN = b"open\n"
# The sshd of this session is the next above; between them may be the user's shell. An old busybox knows no
# such `timeout`.
_HOLD = r"""
echo open
timeout 9 true 2>/dev/null || exec cat >/dev/null
above=$PPID
while [ "$(timeout "$1" head -c 1 2>/dev/null)" ]; do :; done
while [ "$above" -gt 1 ] && read -r name <"/proc/$above/comm"; do
    case $name in sshd*|dropbear*) kill "$above"; exit ;; esac
    above=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$above/status")
done
"""
_BEAT_S, _SILENT_S = 5.0, 20

ASK_S = 120.0
"""Seconds that an answer may take: a first look at a slow board tests the kernels."""
_OPEN_S = 30.0
_END_S = 2.0


class NodeQuery(Closing):
    """`edgespec node --describe --json` on the machine `host`, under way from the start."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = _start(
            *("-o", "ClearAllForwardings=yes", "--", host, remote_command(_ASK)),
            stdin=subprocess.DEVNULL,
            stdout=self._said.fileno(),
            stderr=self._complaints.fileno(),
        )

    def answer(self, within_s: float) -> bytes:
        """Return the JSON. Raises EdgespecError if ssh fails or edgespec is not there."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise EdgespecError(
                f"{self._host}: no answer within {within_s:g} s; try by hand: "
                f"ssh {self._host} edgespec node --describe"
            ) from None
        self._complaints.seek(0)
        complaint = self._complaints.read().decode(errors="replace")
        if code == FAILED:
            raise EdgespecError(explain(self._host, complaint))
        if code == _MISSING:
            raise EdgespecError(
                f"{self._host}: no edgespec there, neither on its PATH nor in ~/.local/bin nor in "
                "~/edgespec/venv/bin; install it there, on a board by `make deploy`"
            )
        if code == _USAGE:
            raise EdgespecError(
                f"{self._host}: the edgespec there knows no nodes; install this version there"
            )
        if code:
            reason = (complaint.strip().splitlines() or [f"exit code {code}"])[-1]
            raise EdgespecError(f"{self._host}: {reason.removeprefix('edgespec: error: ')}")
        self._said.seek(0)
        return self._said.read()

    def close(self) -> None:
        """End ssh, if it still runs."""
        _end(self._process)
        self._said.close()
        self._complaints.close()


class Tunnel(Closing):
    """A way from `local_port` of this machine to 127.0.0.1:`port` of the machine `host`.

    It is being opened from the start; `wait` until it is open. ssh ends when this process does.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.local_port = _unused_port()
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        forward = f"{LOOPBACK}:{self.local_port}:{LOOPBACK}:{port}"
        self._process = _start(
            *(part for option in _OWN for part in ("-o", option)),
            *("-L", forward, "--", host, remote_command(_HOLD, str(_SILENT_S))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints.fileno(),
        )

    def wait(self) -> None:
        """Return when the tunnel is open. Raises EdgespecError if it cannot be opened."""
        assert self._process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
        deadline, said = time.monotonic() + _OPEN_S, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # A shell there may print something of its own before.
            while not said.endswith(_OPEN):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise EdgespecError(f"{self.host}: ssh has opened no tunnel within {_OPEN_S:g} s")
                part = self._process.stdout.read1(1 << 12)  # type: ignore[attr-defined]  # a BufferedReader
                if not part:
                    self._process.wait()
                    raise EdgespecError(self._reason())
                said = (said + part)[-len(_OPEN) :]
        self._beats.start()

    def _beat(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: it is a pipe
        with suppress(OSError):
            while not self._closed.wait(_BEAT_S):
                os.write(self._process.stdin.fileno(), b".")

    @property
    def ended(self) -> str:
        """Why ssh has ended by itself, as a line; "" while the tunnel is open, and after `close`."""
        return self._reason() if not self._closed.is_set() and self._process.poll() is not None else ""

    def _reason(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"{self.host}: ssh was ended by signal {-code}; begin again"
        self._complaints.seek(0)
        return explain(self.host, self._complaints.read().decode(errors="replace"))

    def close(self) -> None:
        """Close the tunnel and end ssh."""
        self._closed.set()
        if self._beats.is_alive():
            self._beats.join()
        _end(self._process)
        self._complaints.close()


def _start(*arguments: str, stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    if not (ssh := shutil.which("ssh")):
        raise EdgespecError("no ssh on this machine; apt install openssh-client")
    options = [part for option in _OPTIONS for part in ("-o", option)]
    return subprocess.Popen(
        [ssh, *options, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        # Ctrl-C goes to the terminal's whole process group: ssh would end before its user does.
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


def _unused_port() -> int:
    """Return a port that nobody listens on; if another program takes it meanwhile, ssh says so and ends."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


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
        """Close the tunnels to all nodes."""
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
    with ExitStack() as opened:
        hosts = dict.fromkeys(address.host for address in addresses if not address.direct)
        questions = {host: opened.enter_context(NodeQuery(host)) for host in hosts}
        return {host: read_description(host, question.answer(ask_s)) for host, question in questions.items()}


def read_description(host: str, answer: bytes) -> NodeDescription:
    """The output of `edgespec node --describe --json` on `host`.

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
