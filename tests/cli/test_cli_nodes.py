"""`--nodes`: text over nodes that are processes of their own, and what is said when one is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from subprocess import PIPE, Popen

import pytest

from command_line import COMMAND, failed, run_cli, started, user_environment
from edgespec.llama.node_addresses import read_addresses
from running_node import child_of, node
from server_app import serving
from slow_network import Proxy
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layer=3, n_ctx=4096)


def command(path, port, *options, n=3000):
    return (
        "run",
        "a b c",
        "--target",
        path,
        "--drafter",
        "none",
        "--threads",
        1,
        "--raw",
        "--nodes",
        f"127.0.0.1:{port}=2",
        "-n",
        n,
        "--logit-bias",
        "2=-inf",
        *options,
    )


def test_run_writes_the_same_text_as_without(tmp_path, path):
    env = user_environment(tmp_path)
    options = ("--drafter", "suffix", "--threads", 1, "--raw", "--seed", 3, "--json", "-n", 30)
    here = json.loads(run_cli("run", "a b c", "--target", path, *options, env=env).stdout)
    with node(tmp_path) as (ready, _):
        env["EDGESPEC_NODES"] = f"127.0.0.1:{ready['port']}=2"
        there = json.loads(run_cli("run", "a b c", "--target", path, *options, env=env).stdout)
    assert there["text"] == here["text"]
    assert there["kernels"] == f"stock, 1 + 127.0.0.1:{ready['port']} 2"


def test_what_is_measured_is_of_these_nodes(tmp_path, path):
    env = user_environment(tmp_path)
    models = ("--target", path, "--threads", 1)
    with node(tmp_path) as (ready, _):
        nodes = ("--nodes", f"127.0.0.1:{ready['port']}=2")
        measured = json.loads(run_cli("profile", *models, *nodes, "--json", env=env).stdout)
        bench = run_cli(
            "bench",
            *models,
            *nodes,
            "--variants",
            "suffix",
            "-n",
            4,
            "--rounds",
            1,
            "--per-category",
            1,
            "--category",
            "code",
            env=env,
        )
    assert measured["key"]["kernels"] == f"stock, 1 + 127.0.0.1:{ready['port']} 2"
    assert bench.returncode == 0, bench.stderr
    assert measured["key"]["kernels"] in bench.stdout


@pytest.mark.slow
def test_chat_goes_on_after_a_node_was_lost(tmp_path, path):
    env = user_environment(tmp_path)
    options = ("--target", path, "--threads", 1, "--drafter", "none", "--temp", 0, "-n", 20)
    with node(tmp_path) as (ready, process):
        nodes = f"127.0.0.1:{ready['port']}=2"
        chatting = [*COMMAND, "chat", *map(str, options), "--nodes", nodes]
        with Popen(chatting, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env) as chat:
            chat.stdin.write(b"a b\n")
            chat.stdin.flush()
            assert chat.stdout.read(1)
            os.kill(child_of(process.pid), signal.SIGKILL)
            assert process.stdout.readline()
            chat.stdin.write(b"a b\na b\n/quit\n")
            _, said = chat.communicate(timeout=60)
    assert said.decode().count("is lost: it closed the connection") == 1
    assert chat.returncode == 1


def begun(process):
    """Wait until text is written."""
    assert process.stdout.read(20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "it closed"), (signal.SIGSTOP, "no answer for 1 s")]
)
def test_a_lost_node_ends_run_in_one_line(tmp_path, path, number, why):
    env = user_environment(tmp_path) | {"EDGESPEC_NODE_WAIT": "1"}
    with node(tmp_path) as (ready, process), started(*command(path, ready["port"]), env=env) as run:
        begun(run)
        child = child_of(process.pid)
        os.kill(child, number)
        rest, said = run.communicate(timeout=60)
        os.kill(process.pid, signal.SIGKILL)
        if number == signal.SIGSTOP:
            os.kill(child, signal.SIGKILL)
    *statistics, error = said.decode().splitlines()
    assert run.returncode == 1
    assert rest.endswith(b"\n")
    assert any("tokens" in line for line in statistics)
    assert error.startswith(f"edgespec: error: the node 127.0.0.1:{ready['port']} is lost: {why}")


@pytest.mark.slow
def test_ctrl_c_during_a_pass_that_does_not_end(tmp_path, path):
    with (
        node(tmp_path) as (ready, _),
        Proxy(ready["port"]) as proxy,
        started(*command(path, proxy.port), env=user_environment(tmp_path)) as run,
    ):
        begun(run)
        proxy.stop_forwarding()
        time.sleep(0.3)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "Traceback" not in said.decode()


@pytest.mark.slow
def test_the_server_answers_503_and_goes_on_when_the_node_is_back(tmp_path, path):
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 8, "temperature": 0}
    with node(tmp_path) as (ready, process):
        nodes = read_addresses(f"127.0.0.1:{ready['port']}=2", unsafe=False)
        options = {"nodes": nodes, "kernels": "off", "n_threads": 1}
        with serving(path, engine_options=options) as served, served.client() as client:
            body["model"] = client.get("/v1/models").json()["data"][0]["id"]
            first = client.post("/v1/completions", json=body)
            assert first.status_code == 200, first.text
            os.kill(child_of(process.pid), signal.SIGKILL)
            assert process.stdout.readline()  # it serves again
            lost = client.post("/v1/completions", json=body)
            assert lost.status_code == 503
            assert lost.json()["error"]["code"] == "node_lost"
            assert f"the node 127.0.0.1:{ready['port']} is lost: it closed" in lost.json()["error"]["message"]
            again = client.post("/v1/completions", json=body)
            assert again.status_code == 200, again.text
            assert again.json()["choices"] == first.json()["choices"]
            child = child_of(process.pid)
            process.kill()
            os.kill(child, signal.SIGKILL)
            assert [client.post("/v1/completions", json=body).status_code for _ in range(3)] == [503] * 3
            assert len(served.log) == 4
            with node(tmp_path, port=ready["port"]):
                time.sleep(3.1)  # the server does not try more often
                assert client.post("/v1/completions", json=body).json()["choices"] == first.json()["choices"]


def test_no_node_is_one_line(tmp_path, path):
    process = run_cli(*command(path, 9), env=user_environment(tmp_path))
    failed(process, 1, "127.0.0.1:9: nothing listens on that port")


def test_a_bad_address_is_one_line(tmp_path, path):
    env = user_environment(tmp_path)
    failed(run_cli("run", "a", "--target", path, "--nodes", "a b", env=env), 2, "--nodes a b: ")


def test_a_bad_wait_is_one_line(tmp_path, path):
    env = user_environment(tmp_path) | {"EDGESPEC_NODE_WAIT": "soon"}
    with node(tmp_path) as (ready, _):
        failed(run_cli(*command(path, ready["port"]), env=env), 2, "EDGESPEC_NODE_WAIT=soon: must be seconds")
