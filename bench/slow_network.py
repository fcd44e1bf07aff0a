"""A slow network between a client and a node: a TCP proxy on this machine, with a delay and a rate.

    client  ->  Proxy  ->  edgespec node

The kernel's own means (tc with netem) is not on every machine and needs root. What passes is
delayed by half of the round trip in each direction, and goes no faster than the rate, in each direction by
itself. What a real network adds is not here: headers (6 % of the rate with Ethernet), packets that are lost,
and TCP's slow start after a pause. The proxy counts what passes, and which requests of llama.cpp's RPC
protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.managers import BaseManager

from edgespec.platform.closing import Closing

_CHUNK = 1 << 18
_QUEUE_S = 0.005  # what the line may hold before it takes more: no sender is far ahead of the rate
_PR_SET_TIMERSLACK = 29

_HEADER = 9  # a request's command, one byte, and its size, eight bytes
_COMMANDS = (  # enum rpc_cmd in llama.cpp's ggml-rpc.cpp
    "alloc_buffer",
    "get_alignment",
    "get_max_size",
    "buffer_get_base",
    "free_buffer",
    "buffer_clear",
    "set_tensor",
    "set_tensor_hash",
    "get_tensor",
    "copy_tensor",
    "graph_compute",
    "get_device_memory",
    "init_tensor",
    "get_alloc_size",
    "hello",
    "device_count",
    "graph_recompute",
    "memset_tensor",
)


@dataclass(frozen=True, slots=True)
class Link:
    """The delay and rate of a network."""

    round_trip_s: float = 0.0
    bits_per_s: float | None = None
    """In each direction; None: as fast as this machine."""


@dataclass(slots=True)
class Traffic:
    """The traffic since the beginning."""

    bytes_to_node: int = 0
    bytes_from_node: int = 0
    round_trips: int = 0
    """How often the node spoke after the client had: each such time the client may have waited for it."""
    requests: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number and bytes of requests, by command."""


class _Requests:
    """Counts the requests in a stream of bytes that comes in pieces."""

    def __init__(self, found: dict[str, tuple[int, int]]) -> None:
        self._found = found
        self._header = b""
        self._to_skip = 0

    def read(self, piece: bytes) -> None:
        at = 0
        while at < len(piece):
            if self._to_skip:
                skipped = min(self._to_skip, len(piece) - at)
                self._to_skip -= skipped
                at += skipped
                continue
            more = piece[at : at + _HEADER - len(self._header)]
            self._header += more
            at += len(more)
            if len(self._header) == _HEADER:
                self._to_skip = int.from_bytes(self._header[1:], "little")
                name = _COMMANDS[self._header[0]] if self._header[0] < len(_COMMANDS) else "unknown"
                n, size = self._found.get(name, (0, 0))
                self._found[name] = n + 1, size + _HEADER + self._to_skip
                self._header = b""


class Proxy(Closing):
    """Listens on `port` of this machine and passes what comes to another port of it, and back."""

    port: int
    """The port to connect to."""

    def __init__(self, port_of_node: int, link: Link = Link()) -> None:
        self._to = port_of_node
        self._link = link
        self._traffic = Traffic()
        self._asked = False
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def get_port(self) -> int:
        """Return the port to connect to, where the proxy is in another process."""
        return self.port

    def traffic(self) -> Traffic:
        """Return what has passed, of all connections."""
        now = self._traffic
        return Traffic(now.bytes_to_node, now.bytes_from_node, now.round_trips, dict(now.requests))

    def set_link(self, link: Link) -> None:
        """Make the network another one, from now on."""
        self._link = link

    def stop_forwarding(self) -> None:
        """Pass nothing more, as a node that hangs; connections stay open."""
        self._passing.clear()

    def go_on(self) -> None:
        """End `stop_forwarding`; what came meanwhile is passed."""
        self._passing.set()

    def cut(self) -> None:
        """Break all connections, as a node that dies; new ones can be made."""
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the other side has closed it
                one.shutdown(socket.SHUT_RDWR)
        self._passing.set()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()
        self._sockets.clear()
        self._threads.clear()

    def close(self) -> None:
        """Listen no more and break all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                node = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                client.close()
                continue
            for one in (client, node):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, node]
            requests = _Requests(self._traffic.requests)
            for carry in (
                threading.Thread(target=self._carry, args=(client, node, requests), daemon=True),
                threading.Thread(target=self._carry, args=(node, client, None), daemon=True),
            ):
                carry.start()
                self._threads.append(carry)

    def _carry(self, source: socket.socket, sink: socket.socket, requests: _Requests | None) -> None:
        """Pass what comes from `source` until either side closes; `requests`: towards the node."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # wake when asked to, not 50 us later
        with contextlib.suppress(OSError):  # a connection that breaks ends both directions
            for piece in self._delayed(source, requests):
                self._passing.wait()
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _delayed(self, source: socket.socket, requests: _Requests | None) -> Iterator[bytes]:
        """Yield what comes from `source`, each piece when the network would have brought it."""
        on_the_variant: deque[tuple[float, bytes]] = deque()
        free_s = 0.0  # when the line has taken all that came
        is_open = True
        while is_open or on_the_variant:
            now = time.perf_counter()
            while on_the_variant and on_the_variant[0][0] <= now:
                yield on_the_variant.popleft()[1]
            takes = is_open and free_s - now < _QUEUE_S
            wait_s = max(0.0, on_the_variant[0][0] - now) if on_the_variant else None
            if not takes:
                time.sleep(wait_s or 0.0)
            elif select.select([source], [], [], wait_s)[0]:
                piece = source.recv(_CHUNK)
                link, now = self._link, time.perf_counter()
                free_s = max(free_s, now) + 8 * len(piece) / (link.bits_per_s or float("inf"))
                is_open = bool(piece)
                if piece:
                    on_the_variant.append((free_s + link.round_trip_s / 2, piece))
                    self._count(piece, requests)

    def _count(self, piece: bytes, requests: _Requests | None) -> None:
        traffic = self._traffic
        if requests:
            traffic.bytes_to_node += len(piece)
            requests.read(piece)
            self._asked = True
            return
        traffic.bytes_from_node += len(piece)
        traffic.round_trips += self._asked
        self._asked = False


class _Manager(BaseManager):
    def proxy(self, port_of_node: int, link: Link) -> Proxy:  # registered below
        raise NotImplementedError


_Manager.register(
    "proxy", Proxy, exposed=("get_port", "traffic", "set_link", "stop_forwarding", "go_on", "cut", "close")
)


@contextmanager
def proxies(ports: list[int], link: Link) -> Iterator[list[Proxy]]:
    """Run a proxy for each node in a process of their own, which no engine keeps from running."""
    with _Manager(ctx=get_context("spawn")) as manager:
        made = [manager.proxy(port, link) for port in ports]
        try:
            yield made
        finally:
            for one in made:
                with contextlib.suppress(OSError, EOFError):  # that process was ended with this one
                    one.close()
