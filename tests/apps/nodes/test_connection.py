"""Reaching nodes: real ones, through a real ssh and sshd, and what is said where that does not work."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import sshd as sshd_room
from command_line import COMMAND, python_path, user_environment
from edgespec.apps.nodes import connection as tunnel_room
from edgespec.apps.nodes import rpc_client as requests_room
from edgespec.apps.nodes.connection import connect
from edgespec.apps.nodes.rpc_client import RPCClient
from edgespec.errors import EdgespecError
from edgespec.llama import rpc
from edgespec.llama.node_addresses import read_addresses
from remote_models import loaded, logits
from running_node import answering, node
from tiny_models import make_tiny

TOKENS = [1, *np.random.default_rng(3).integers(5, 90, 20).tolist()]
HELLO = bytes([*rpc.PROTOCOL, 0]) + bytes(24)
SIZES = {
    14: HELLO,
    15: struct.pack("<I", 1),
    1: struct.pack("<Q", 64),
    11: struct.pack("<QQ", 1 << 30, 2 << 30),
}
"""The answers of a node with 1 GiB: hello, devices, alignment, memory."""


INSTALLED = f'exec {" ".join(COMMAND)} "$@"'


@dataclass
class Machine:
    """Another machine: what its sessions find."""

    home: Path

    @property
    def environment(self):
        names = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "EDGESPEC_KERNELS", "PYTHONPATH")
        own = {name: value for name, value in user_environment(self.home).items() if name in names}
        return {"PATH": f"{self.home / 'bin'}:/usr/bin:/bin", "HOME": str(self.home), **own}

    def has_edgespec(self, script=INSTALLED, folder="bin"):
        file = self.home / folder / "edgespec"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine")


@pytest.fixture
def server(tmp_path, machine, monkeypatch):
    """An sshd of the machine; `ssh` finds it, and is let in."""
    with sshd_room.serving(tmp_path / "sshd", machine) as server:
        monkeypatch.setenv("PATH", f"{sshd_room.ssh_for(server, tmp_path)}:{os.environ['PATH']}")
        yield server


def connected(text, **options):
    return connect(read_addresses(text, unsafe=False), **options)


def problem(text):
    """The line that the connection is refused with."""
    with pytest.raises(EdgespecError) as refused:
        connected(text).close()
    line = str(refused.value)
    assert "\n" not in line
    return line


def wait_until(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- through ssh ----


def test_a_tunnel_to_a_node_computes_what_this_machine_does(server, machine, tmp_path):
    machine.has_edgespec()
    path = make_tiny("llama", tmp_path / "tiny.gguf", weights_type="q8_0")
    with loaded(path, kernels=False) as model:
        here = logits(model, TOKENS)
    said = []
    with node(machine.home) as (ready, process), connected(server.host, on_message=said.append) as nodes:
        (found,) = nodes.nodes
        assert (found.name, found.speed.kernels) == (server.host, "stock")
        assert 0 < found.memory_bytes <= ready["memory_bytes"]
        assert 0 < found.round_trip_s < 1
        assert found.endpoint != f"127.0.0.1:{ready['port']}"
        with loaded(path, rpc.load().connect(found.endpoint), kernels=False, output=True) as model:
            np.testing.assert_array_equal(logits(model, TOKENS), here)
        assert nodes.lost == {}
        nodes.close()
        wait_until(lambda: refuses(found.endpoint))
        assert nodes.lost == {}
        assert process.poll() is None
    (line,) = said
    assert line.startswith(f"{server.host}: llama.cpp's kernels are used there (")
    assert line.endswith("); drafting will hardly pay over it")


def refuses(endpoint):
    host, _, port = endpoint.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_an_ssh_that_ends_is_noticed(server, machine):
    machine.has_edgespec()
    with node(machine.home), connected(server.host) as nodes:
        assert nodes.lost == {}
        (ssh,) = children("ssh")
        os.kill(ssh, signal.SIGKILL)
        wait_until(lambda: nodes.lost)
        assert nodes.lost == {server.host: f"{server.host}: ssh was ended by signal 9; begin again"}
        assert refuses(nodes.nodes[0].endpoint)
        nodes.close()
        assert nodes.lost == {}


def test_an_sshd_that_ends_is_noticed(server, machine):
    machine.has_edgespec()
    with node(machine.home), connected(server.host) as nodes:
        (ssh,) = children("ssh")
        for pid in sessions_of(server):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: nodes.lost)
        assert nodes.lost[server.host].startswith(f"{server.host}: ")
        assert "\n" not in nodes.lost[server.host]
        assert not Path(f"/proc/{ssh}/exe").exists()


def children(name):
    """The children of this process that run the program `name`."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(int(pid))
    return found


def sessions_of(server):
    """The processes of sshd that serve who is logged in."""
    parent = server.process.pid
    return map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())


CLIENT = """
import sys
from edgespec.llama.node_addresses import read_addresses
from edgespec.apps.nodes.connection import connect
nodes = connect(read_addresses(sys.argv[1], unsafe=False))
print(nodes.nodes[0].endpoint, flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_no_tunnel(server, machine):
    machine.has_edgespec()
    env = {**os.environ, "PYTHONPATH": python_path()}
    with (
        node(machine.home),
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, server.host],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        endpoint = client.stdout.readline().strip()
        assert not refuses(endpoint)
        client.kill()
        wait_until(lambda: refuses(endpoint))


def test_a_client_that_sleeps_lets_the_node_go(server, machine, monkeypatch):
    machine.has_edgespec()
    monkeypatch.setattr(tunnel_room, "_BEAT_S", 0.3)
    monkeypatch.setattr(tunnel_room, "_SILENT_S", 3)
    with node(machine.home) as (ready, _), connected(server.host) as nodes:
        host, _, port = nodes.nodes[0].endpoint.partition(":")
        with RPCClient("client", host, int(port)) as requests:
            time.sleep(4)
            assert requests.check_sizes().free
            (ssh,) = children("ssh")
            os.kill(ssh, signal.SIGSTOP)
            try:
                with RPCClient("other", "127.0.0.1", ready["port"], timeout_s=30):
                    pass
            finally:
                os.kill(ssh, signal.SIGCONT)
            wait_until(lambda: nodes.lost)
            assert "the connection was lost" in nodes.lost[server.host]


def test_no_node_runs_there(server, machine):
    machine.has_edgespec()
    assert problem(server.host) == (
        f"{server.host}: no node runs there; start it: ssh {server.host} edgespec node"
    )
    closed = sshd_room.free_port()
    assert problem(f"{server.host}:{closed}") == (
        f"{server.host}:{closed}: hangs up: no node listens there, or it ends just now"
    )


def test_several_nodes_run_there(server, machine):
    machine.has_edgespec()
    with node(machine.home) as (first, _), node(machine.home) as (second, _):
        ports = sorted((first["port"], second["port"]))
        both = [f"{server.host}:{port}" for port in ports]
        assert problem(server.host) == (
            f"nodes {server.host}: several nodes run there; choose of {', '.join(both)}"
        )
        with connected(",".join(both)) as nodes:
            assert [found.name for found in nodes.nodes] == both
            assert len({found.endpoint for found in nodes.nodes}) == 2


def test_two_names_of_one_node(server, machine, monkeypatch):
    machine.has_edgespec()
    with node(machine.home) as (ready, _):
        both = f"{server.host},{server.host}:{ready['port']}"
        assert problem(both).endswith(f": that is the same node as {server.host}")
        monkeypatch.setenv("XDG_CACHE_HOME", user_environment(machine.home)["XDG_CACHE_HOME"])
        directly = f"{server.host},127.0.0.1:{ready['port']}"
        assert problem(directly).endswith(f": that is the same node as {server.host}")


def test_a_port_that_the_users_configuration_forwards_too(server, machine, tmp_path):
    machine.has_edgespec()
    with node(machine.home), socket.create_server(("127.0.0.1", 0)) as taken:
        with (tmp_path / "ssh_config").open("a") as config:  # the one that the fixture `server` uses
            config.write(f"LocalForward 127.0.0.1:{taken.getsockname()[1]} 127.0.0.1:9\n")
        assert "a LocalForward of your ~/.ssh/config wants a port that is taken" in problem(server.host)


@pytest.mark.parametrize("folder", [".local/bin", "edgespec/venv/bin"])
def test_edgespec_is_found_where_it_is_installed(server, machine, folder):
    machine.has_edgespec(folder=folder)
    assert "no node runs there" in problem(server.host)


def test_no_edgespec_there(server):
    assert problem(server.host).startswith(f"{server.host}: no edgespec there, neither on its PATH nor in ")


def running(memory_bytes, ms):
    """A node that a machine says runs there."""
    speed = {"kernels": "avx2", "reason": "", "n_threads": 1, "layer_ms": {"1": ms}}
    return {"host": "127.0.0.1", "port": 50052, "pid": 1, "memory_bytes": memory_bytes, "speed": speed}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"edgespec": "0.0.9"}, "edgespec 0.0.9 is there, and "),
        ({"ggml": "0.1.2"}, "ggml 0.1.2 is there, and "),
        ({"protocol": [8, 0, 0]}, "speaks version 8.0.0 of llama.cpp's RPC protocol, and edgespec 7.0.0; "),
        ({"protocol": "seven"}, "`edgespec node --describe` there says what is not understood"),
        ({"running": [running(1 << 60, 1.0)]}, "50052: offers 1,152,921,504,606,846,976 bytes of "),
        ({"running": [running(1 << 30, -1.0)]}, "50052: says of its speed what cannot be; "),
        ({"running": [{"port": 1}]}, "`edgespec node --describe` there says what is not understood"),
    ],
)
def test_another_version_there(server, machine, tmp_path, changes, line):
    machine.has_edgespec()
    described = subprocess.run(
        [*COMMAND, "node", "--describe", "--json"],
        env={**os.environ, **machine.environment, "PATH": os.environ["PATH"]},
        check=True,
        capture_output=True,
    ).stdout
    text = tmp_path / "described.json"
    text.write_text(json.dumps(json.loads(described) | changes))
    machine.has_edgespec(f"cat {text}")
    assert problem(server.host).removeprefix(f"{server.host}:").strip().startswith(line)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("exit 2", "the edgespec there knows no nodes; install this version there"),
        ("echo edgespec: error: no home >&2; exit 1", "no home"),
        ("echo welcome", "`edgespec node --describe` there says what is not understood"),
    ],
)
def test_an_edgespec_there_that_fails(server, machine, script, line):
    machine.has_edgespec(script)
    assert problem(server.host) == f"{server.host}: {line}"


def test_a_host_that_is_not_there(server):
    line = problem("pi@no-such-board.invalid")
    assert line.startswith("pi@no-such-board.invalid: Could not resolve hostname no-such-board.invalid: ")


def test_a_refused_port(server):
    server.stop()
    assert "Connection refused; switch ssh on there" in problem(server.host)


def test_a_key_that_is_not_known_there(server):
    server.identity.unlink()
    sshd_room.make_key(server.identity)
    assert "Permission denied (publickey).; let this machine's key in" in problem(server.host)


def test_a_machine_whose_key_is_not_known(server):
    server.known_hosts.write_text("")
    assert "Host key verification failed.; connect once by hand" in problem(server.host)


# ---- directly ----


def test_a_node_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", user_environment(tmp_path)["XDG_CACHE_HOME"])
    with node(tmp_path) as (ready, _):
        with connected(f"localhost:{ready['port']}", bandwidth=True) as nodes:
            (found,) = nodes.nodes
            assert found.endpoint == f"127.0.0.1:{ready['port']}"
            assert found.speed.n_threads == 1
            assert found.bytes_per_s > 1e6
        with RPCClient("other", "127.0.0.1", ready["port"]):  # it was left free
            monkeypatch.setattr(requests_room, "TIMEOUT_S", 0.2)
            assert problem(f"localhost:{ready['port']}") == (
                f"localhost:{ready['port']}: no answer within 0.2 s; it may have another client"
            )


def test_a_name_without_an_address_is_one_line():
    with pytest.raises(EdgespecError) as refused:
        connect(read_addresses("no-such-board.invalid", unsafe=True))
    assert str(refused.value).startswith("no-such-board.invalid: ")
    assert str(refused.value).endswith("; check the name, or give the address")


def test_nothing_listens():
    port = sshd_room.free_port()
    assert problem(f"127.0.0.1:{port}") == (
        f"127.0.0.1:{port}: nothing listens on that port; start `edgespec node` there"
    )


def test_a_speed_that_is_not_known_is_said():
    said = []
    with answering(SIZES) as port, connected(f"127.0.0.1:{port}", on_message=said.append) as nodes:
        assert nodes.nodes[0].memory_bytes == 1 << 30
    assert said == [f"127.0.0.1:{port}: its speed is not known; it counts as the slowest of the others"]


NO_NODE = "what listens there does not speak llama.cpp's RPC protocol 7; start `edgespec node` there"


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ({14: b"HTTP/1.1 400 Bad Request\r\n"}, NO_NODE),
        ({14: bytes([6, 0, 0, 0]) + bytes(24)}, "speaks version 6.0.0 of llama.cpp's RPC protocol"),
        ({14: bytes([7, 1, 0, 0]) + bytes(24)}, "speaks version 7.1.0 of llama.cpp's RPC protocol"),
        ({15: struct.pack("<I", 0)}, "offers 0 devices; "),
        ({15: struct.pack("<I", 3)}, "offers 3 devices; "),
        ({15: bytes(3)}, NO_NODE),
        ({1: bytes(9)}, NO_NODE),
        ({1: struct.pack("<Q", 0)}, "wants memory in steps of 0 bytes, which cannot be"),
        ({1: struct.pack("<Q", 96)}, "wants memory in steps of 96 bytes, which cannot be"),
        (
            {11: struct.pack("<QQ", 2 << 30, 1 << 30)},
            "says that 2,147,483,648 bytes of 1,073,741,824 are free",
        ),
        ({11: struct.pack("<QQ", 1, (1 << 64) - 1)}, "says that 1 bytes of 18,446,744,073,709,551,615 are"),
        ({11: struct.pack("<QQ", 60 << 20, 1 << 30)}, "60 MB of memory are free for layers: too few; "),
    ],
)
def test_a_node_that_lies_or_has_nothing(answers, line):
    with answering(SIZES | answers) as port:
        assert problem(f"127.0.0.1:{port}").startswith(f"127.0.0.1:{port}: {line}")
