"""What is asked of a node through a plain socket, and who may be there instead of one."""

from __future__ import annotations

import socket
import threading

import pytest

from edgespec.apps.nodes.rpc_client import RPCClient
from edgespec.errors import EdgespecError


def answering(*parts):
    """The port of a server that answers its one client with `parts` and closes; without them it waits."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listening, listening.accept()[0] as client:
            client.recv(100)
            for part in parts:
                client.sendall(part)
            if not parts:
                client.recv(1)  # until the client gives up

    threading.Thread(target=serve, daemon=True).start()
    return listening.getsockname()[1]


def hello(port, timeout_s=5.0):
    RPCClient("a node", "127.0.0.1", port, timeout_s=timeout_s).close()


def test_the_protocol_of_a_server_is_read_in_pieces():
    answer = (28).to_bytes(8, "little") + bytes([6, 1, 2, 0]) + bytes(24)
    with pytest.raises(EdgespecError, match=r"a node: speaks version 6\.1\.2 of llama\.cpp's RPC protocol"):
        hello(answering(answer[:3], answer[3:]))


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"x", bytes(36), (28).to_bytes(8, "little")])
def test_another_kind_of_server_is_refused(answer):
    port = answering(answer)
    refused = "what listens there does not speak llama.cpp's RPC protocol 7; start|hangs up"
    with pytest.raises(EdgespecError, match=f"^a node: ({refused})"):
        hello(port)


def test_a_server_that_says_nothing_does_not_hang_us():
    with pytest.raises(EdgespecError, match=r"no answer within 0\.2 s; it may have another client"):
        hello(answering(), timeout_s=0.2)


def test_a_port_where_nothing_listens_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EdgespecError, match=r"^a node: nothing listens on that port; start `edgespec node`"):
        hello(port)
