"""Layers on two nodes: real ones in processes of their own, llama.cpp's RPC backend between."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from command_line import failed, run_cli, user_environment
from edgespec.llama.rpc import _n_fitting
from tiny_gguf import write_tiny_gguf

PROGRAM = (sys.executable, "-m", "edgespec")
GREEDY = ("--raw", "--temp", "0", "--no-cache", "--stats", "none")
PLAIN = (*GREEDY, "--drafter", "none")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("home")
    return user_environment(home, cache=home / "cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_tiny_gguf(path, n_layer=4, n_ctx=4096, peak=4.0))


def start(environment: dict[str, str], *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start a node; return it and its HOST:PORT once it is ready."""
    port = free_port()
    node = subprocess.Popen(
        [*PROGRAM, "node", "--port", str(port), "--threads", "1", *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert node.stdout
    assert f"node ready on 127.0.0.1:{port}, 1 threads" in node.stdout.readline()
    while "transport" not in node.stdout.readline():  # what the RPC server itself says last
        assert node.poll() is None
    return node, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def nodes(environment: dict[str, str]) -> Iterator[str]:
    started = [start(environment) for _ in range(2)]
    yield ",".join(address for _, address in started)
    for node, _ in started:
        node.kill()
        node.communicate()


@pytest.mark.parametrize("drafting", [("--drafter", "none"), ("--drafter", "suffix"), ("--draft", "MODEL")])
def test_the_text_is_that_of_one_machine(
    environment: dict[str, str], model: str, nodes: str, drafting: tuple[str, str]
) -> None:
    """On the same kernels, llama.cpp's, a layer computes the same anywhere; drafts change nothing."""
    given = (*GREEDY, "-n", "40", "--target", model, "one two one two one two")
    here = run_cli("run", *given, "--drafter", "none", "--kernels", "off", env=environment)
    drafts = [model if word == "MODEL" else word for word in drafting]
    there = run_cli("run", *given, *drafts, "--rpc", nodes, env=environment)
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout == here.stdout
    assert len(here.stdout) > 40


def test_a_node_dies_in_the_middle_of_a_text(environment: dict[str, str], model: str) -> None:
    (first, one), (second, other) = start(environment), start(environment)
    command = [*PROGRAM, "run", *PLAIN, "-n", "3500", "--target", model, "--rpc", f"{one},{other}", "one two"]
    client = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    try:
        assert client.stdout
        begun = client.stdout.read(20)
        second.kill()
        _rest, said = client.communicate(timeout=60)
    finally:
        for process in (first, second, client):
            process.kill()
            process.wait()
    assert client.returncode == 1
    assert len(begun) == 20, "the text so far"
    (line,) = said.decode().splitlines()
    assert line.startswith("edgespec: error: a node of --rpc is lost")


def test_a_node_that_is_not_there(environment: dict[str, str], model: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    ended = run_cli("run", *PLAIN, "--target", model, "--rpc", address, "hi", env=environment)
    failed(ended, 1, f"--rpc {address}: Connection refused; look whether `edgespec node` runs there")


def test_a_port_that_is_taken(environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        failed(run_cli("node", "--port", port, env=environment), 2, f"--port {port}: Address already in use")


def test_how_many_of_the_last_layers_fit() -> None:
    assert [_n_fitting([3, 1, 2], room) for room in (0, 1, 2, 3, 5, 6, 9)] == [0, 0, 1, 2, 2, 3, 3]
