"""The few requests of llama.cpp's RPC protocol that are made before a model is loaded.

The library ends its process where an answer is not as it should be. So a node is asked here first, through a
plain socket with a bounded time, and what it says of sizes is compared with what can be.

    request = command (1 byte), length (8 bytes), contents         answer = length (8 bytes), contents

All numbers are little-endian and lie without gaps (ggml-rpc.cpp, `#pragma pack`).
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.llama import rpc
from edgespec.platform.closing import Closing

TIMEOUT_S = 10.0
"""How long an answer may take. A node that has a client answers nobody else."""

_ALLOC_BUFFER, _GET_ALIGNMENT, _BUFFER_BASE, _SET_TENSOR = 0, 1, 3, 6
_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15
_CAPABILITIES = bytes(24)  # what a connection could be besides TCP: nothing
_DEVICE = struct.pack("<I", 0)

# rpc_tensor: id, type, buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data, name, use_count
_TENSOR = struct.Struct("<QIQ4I4II64si10QQQQ64si")
_INT8 = 24  # GGML_TYPE_I8

_MOST_BYTES = 1 << 46  # of memory: 64 TiB
_MOST_ALIGNMENT = 4096
_ROUND_TRIPS = 8
_BUFFER, _SEND_S = 16 << 20, 0.1


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory that a node reports, in bytes."""

    free: int
    total: int


class RPCClient(Closing):
    """A conversation with the node that listens at `host`:`port`.

    While it lasts the node has no other client. `name`: what errors call the node. Raises EdgespecError if
    nothing listens there, it does not answer, or speaks another protocol.
    """

    def __init__(self, name: str, host: str, port: int, *, timeout_s: float | None = None) -> None:
        self._name, self._timeout_s = name, timeout_s or TIMEOUT_S
        try:
            self._socket = socket.create_connection((host, port), self._timeout_s)
        except OSError as error:
            raise self._error(error) from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            major, minor, patch, *_ = self._ask(_HELLO, _CAPABILITIES, "28B")
            self.protocol = major, minor, patch
            """The version that the node speaks."""
            check_protocol(name, self.protocol)
        except OSError as error:
            self.close()
            raise self._error(error) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Hang up; the node is free for others."""
        self._socket.close()

    def check_sizes(self) -> NodeMemory:
        """Return the node's memory. Raises EdgespecError for devices and sizes that cannot be."""
        (n_devices,) = self._ask(_DEVICE_COUNT, b"", "<I")
        if n_devices != 1:
            raise EdgespecError(f"{self._name}: offers {n_devices} devices; edgespec uses nodes with one")
        (alignment,) = self._ask(_GET_ALIGNMENT, _DEVICE, "<Q")
        if not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise EdgespecError(f"{self._name}: wants memory in steps of {alignment} bytes, which cannot be")
        free, total = self._ask(_DEVICE_MEMORY, _DEVICE, "<QQ")
        if not free <= total <= _MOST_BYTES:
            raise EdgespecError(
                f"{self._name}: says that {free:,} bytes of {total:,} are free, which cannot be"
            )
        return NodeMemory(free, total)

    def round_trip_s(self) -> float:
        """Return the seconds until the answer to the smallest request comes: the least of a few."""
        times = []
        for _ in range(_ROUND_TRIPS):
            begun = time.perf_counter()
            self._ask(_DEVICE_COUNT, b"", "<I")
            times.append(time.perf_counter() - begun)
        return min(times)

    def bytes_per_s(self, round_trip_s: float) -> float | None:
        """Return how fast up to 32 MB get to the node; None if it has no memory for them."""
        buffer, size = self._ask(_ALLOC_BUFFER, _DEVICE + struct.pack("<Q", _BUFFER), "<QQ")
        if not buffer or size < _BUFFER:
            return None
        (base,) = self._ask(_BUFFER_BASE, struct.pack("<Q", buffer), "<Q")
        n_bytes = 1 << 18
        while True:
            row = (n_bytes, *3 * (1,)), (1, *3 * (n_bytes,))
            tensor = _TENSOR.pack(
                *(0, _INT8, buffer, *row[0], *row[1], 0, b"", 0, *10 * (0,), 0, 0, base, b"", 0)
            )
            begun = time.perf_counter()
            self._send(_SET_TENSOR, tensor + struct.pack("<BQ", 0, 0) + bytes(n_bytes))
            self._ask(_DEVICE_COUNT, b"", "<I")  # the node answers when it has taken all
            took = time.perf_counter() - begun - round_trip_s
            if took >= _SEND_S or n_bytes == _BUFFER:
                return n_bytes / max(took, 1e-6)
            n_bytes *= 2

    def _ask(self, command: int, contents: bytes, layout: str) -> tuple[int, ...]:
        answer = struct.Struct(layout)
        self._send(command, contents)
        length = self._receive(8)
        if len(length) != 8 or int.from_bytes(length, "little") != answer.size:  # else more may never come
            raise self._nonsense()
        received = self._receive(answer.size)
        if len(received) != answer.size:
            raise self._nonsense()
        return answer.unpack(received)

    def _receive(self, size: int) -> bytes:
        """Return `size` bytes, or fewer where the node closes after some of them."""
        received = b""
        try:
            while len(received) < size and (part := self._socket.recv(size - len(received))):
                received += part
        except OSError as error:
            raise self._error(error) from None
        if not received:
            raise self._error(ConnectionResetError())
        return received

    def _nonsense(self) -> EdgespecError:
        return EdgespecError(
            f"{self._name}: what listens there does not speak llama.cpp's RPC protocol {rpc.PROTOCOL[0]}; "
            "start `edgespec node` there, again if it runs"
        )

    def _send(self, command: int, contents: bytes) -> None:
        try:
            self._socket.sendall(struct.pack("<BQ", command, len(contents)) + contents)
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> EdgespecError:
        if isinstance(error, TimeoutError):
            return EdgespecError(
                f"{self._name}: no answer within {self._timeout_s:g} s; it may have another client"
            )
        if isinstance(error, ConnectionRefusedError):
            return EdgespecError(f"{self._name}: nothing listens on that port; start `edgespec node` there")
        if isinstance(error, (ConnectionResetError, BrokenPipeError)):  # through ssh: refused there
            return EdgespecError(f"{self._name}: hangs up: no node listens there, or it ends just now")
        return EdgespecError(f"{self._name}: {error.strerror or error}")


def check_protocol(name: str, spoken: tuple[int, int, int]) -> None:
    """Raise EdgespecError if a node that speaks this version of the protocol cannot be used."""
    major, minor, _ = rpc.PROTOCOL
    if spoken[0] != major or spoken[1] > minor:
        raise EdgespecError(
            f"{name}: speaks version {'.'.join(map(str, spoken))} of llama.cpp's RPC protocol, and edgespec "
            f"{'.'.join(map(str, rpc.PROTOCOL))}; install the same edgespec on both machines"
        )
