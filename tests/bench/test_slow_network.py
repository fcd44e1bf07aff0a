"""bench/slow_network.py: what passes through it, what it counts, and what it holds up."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from slow_network import Link, Proxy, proxies


@pytest.fixture
def port():
    """Something that answers each request of llama.cpp's form with eight bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def serve(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            while header := connection.recv(9, socket.MSG_WAITALL):
                (size,) = struct.unpack_from("<Q", header, 1)
                while size:
                    size -= len(connection.recv(min(size, 1 << 16)))
                connection.sendall(header[:1] * 8)


def ask(connection, command, size):
    connection.sendall(struct.pack("<BQ", command, size) + bytes(size))
    assert connection.recv(8, socket.MSG_WAITALL) == bytes([command]) * 8


def test_it_counts_what_passes(port):
    with proxies([port], Link(round_trip_s=0.001, bits_per_s=1e9)) as (proxy,):
        with socket.create_connection(("127.0.0.1", proxy.get_port())) as connection:
            ask(connection, 10, 5)
            ask(connection, 10, 700_000)
            ask(connection, 16, 0)
        found = proxy.traffic()
    assert found.bytes_to_node == 3 * 9 + 700_005
    assert (found.bytes_from_node, found.round_trips) == (24, 3)
    assert found.requests == {"graph_compute": (2, 18 + 700_005), "graph_recompute": (1, 9)}


def test_stopped_it_passes_nothing_and_then_all(port):
    with Proxy(port) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        ask(connection, 16, 4)
        proxy.stop_forwarding()
        connection.sendall(struct.pack("<BQ", 1, 0))
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(8)
        connection.settimeout(20)
        proxy.go_on()
        assert connection.recv(8, socket.MSG_WAITALL) == bytes([1]) * 8


def test_cut_connections_end_and_new_ones_can_be_made(port):
    with Proxy(port) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
            ask(connection, 16, 4)
            proxy.cut()
            assert connection.recv(8) == b""
        with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
            ask(connection, 16, 4)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))
