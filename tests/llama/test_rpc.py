"""llama.cpp's RPC backend: its files are as they were published, and fit the ggml that is installed."""

from __future__ import annotations

import hashlib
import re
import socket
import sysconfig
import threading
import tomllib
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from edgespec.llama import rpc

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "rpc"
RECORD = tomllib.loads((SOURCES / "vendored.toml").read_text(encoding="utf-8"))["ggml"]


def test_the_files_are_those_that_were_published():
    found = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in SOURCES.iterdir()
        if file.name != "vendored.toml"
    }
    assert found == RECORD["files"]


@pytest.mark.parametrize("name", ["ggml", "ggml-alloc", "ggml-backend", "ggml-cpp", "ggml-rpc", "gguf"])
def test_its_headers_are_those_of_the_installed_library(name):
    installed = Path(sysconfig.get_path("purelib"), "include", f"{name}.h")
    if not installed.exists():
        pytest.skip("this llama-cpp-python was installed without its headers")
    assert installed.read_bytes() == (SOURCES / installed.name).read_bytes()


def test_its_versions_are_those_of_the_files():
    header = (SOURCES / "ggml-rpc.h").read_text()
    versions = [int(n) for n in re.findall(r"#define RPC_PROTO_\w+_VERSION +(\d+)", header)]
    assert tuple(versions) == rpc.PROTOCOL
    assert RECORD["protocol"] == ".".join(map(str, versions))
    assert RECORD["version"] == rpc.GGML_VERSION == rpc.ggml_version()


def test_its_licence_goes_with_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "csrc/rpc/LICENSE.ggml" in project["license-files"]
    assert RECORD["licence"] in project["license"]


def test_it_is_loaded_once():
    assert rpc.load() is rpc.load()


def test_another_ggml_is_refused(monkeypatch):
    monkeypatch.setattr(rpc, "GGML_VERSION", "0.1.0")
    monkeypatch.setattr(rpc, "_loaded", None)
    with pytest.raises(EdgespecError, match=r"is that of ggml 0\.1\.0, and 0\.25\.3 is installed; install"):
        rpc.load()


def test_nothing_installed_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(rpc, "library_path", lambda: tmp_path / "ggml_rpc.so")
    monkeypatch.setattr(rpc, "_loaded", None)
    with pytest.raises(
        EdgespecError, match=r"RPC backend is not installed \(Linux only\): no .*ggml_rpc\.so"
    ):
        rpc.load()


# ---- who is at a port ----


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


def test_the_protocol_of_a_server_is_read_in_pieces():
    answer = (28).to_bytes(8, "little") + bytes([6, 1, 2, 0]) + bytes(24)
    assert rpc.spoken_protocol("127.0.0.1", answering(answer[:3], answer[3:]), timeout_s=5) == (6, 1, 2)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"x", bytes(36), (28).to_bytes(8, "little")])
def test_another_kind_of_server_is_refused(answer):
    port = answering(answer)
    refused = "not a server of llama.cpp's RPC protocol 7|it hangs up"
    with pytest.raises(EdgespecError, match=f"127.0.0.1:{port}: ({refused})"):
        rpc.spoken_protocol("127.0.0.1", port, timeout_s=5)


def test_a_server_that_says_nothing_does_not_hang_us():
    with pytest.raises(EdgespecError, match=r"no answer within 0\.2 s; it may have another client"):
        rpc.spoken_protocol("127.0.0.1", answering(), timeout_s=0.2)


def test_a_port_where_nothing_listens_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EdgespecError, match=f"127.0.0.1:{port}: Connection refused"):
        rpc.spoken_protocol("127.0.0.1", port, timeout_s=5)
