"""`edgespec node`: real nodes in processes of their own, and models whose layers they hold."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from pathlib import Path
from subprocess import TimeoutExpired

import numpy as np
import pytest

from command_line import failed, run_cli, user_environment
from edgespec.apps.nodes import weight_store
from edgespec.apps.nodes.rpc_client import RPCClient
from edgespec.errors import EdgespecError
from edgespec.llama import rpc
from remote_models import loaded, logits
from running_node import child_of, node
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny

TOKENS = [1, *np.random.default_rng(3).integers(5, 90, 40).tolist()]


def devices(ready):
    return rpc.load().connect(f"127.0.0.1:{ready['port']}")


def ended(process, *, timeout=20):
    """The exit code and what is on stderr."""
    try:
        return process.wait(timeout), process.stderr.read().decode()
    except TimeoutExpired:
        pytest.fail("the node goes on")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "rwkv7"])
def test_layers_on_a_node_have_the_bits_of_this_machine(kernels, tmp_path, name):
    path = make_tiny(name, tmp_path / "tiny.gguf", weights_type="q4_0")
    with loaded(path) as model:
        here = logits(model, TOKENS)
    with node(tmp_path, kernels=True) as (ready, _):
        assert ready["speed"]["kernels"] == kernels.name
        with loaded(path, devices(ready), output=True) as model:
            np.testing.assert_array_equal(logits(model, TOKENS), here)
            np.testing.assert_array_equal(logits(model, TOKENS), here)


def test_a_node_without_the_kernels_has_the_bits_of_llama_cpp(tmp_path):
    path = make_tiny("llama", tmp_path / "tiny.gguf", weights_type="q8_0")
    with loaded(path, kernels=False) as model:
        here = logits(model, TOKENS)
    with node(tmp_path, "--kernels", "off") as (ready, _):
        assert (ready["speed"]["kernels"], ready["speed"]["layer_ms"]) == ("stock", None)
        with loaded(path, devices(ready), kernels=False, output=True) as model:
            np.testing.assert_array_equal(logits(model, TOKENS), here)


@pytest.mark.slow
def test_weights_come_once_and_damaged_ones_again(tmp_path):
    path = write_tiny_gguf(tmp_path / "wide.gguf", n_layer=1, n_embd=1024, n_ff=2816)
    with loaded(path, kernels=False) as model:
        here = logits(model, TOKENS)
    kept = tmp_path / "kept"

    def files():
        return {file.name: file.stat().st_mtime_ns for file in kept.iterdir() if len(file.name) == 16}

    def same_bits(ready):
        with loaded(path, devices(ready), kernels=False, output=True) as model:
            np.testing.assert_array_equal(logits(model, TOKENS), here)

    with node(tmp_path) as (ready, _):
        same_bits(ready)
        first = files()
        assert len(first) == 7  # all matrices of the layer; the others are below 64 KB
        same_bits(ready)
        assert files() == first
    with node(tmp_path) as (ready, process):
        same_bits(ready)
        assert files() == first
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 0
    damaged = min(kept / name for name in first)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with node(tmp_path) as (ready, process):
        assert damaged.name not in files()
        same_bits(ready)
        assert files().keys() == first.keys()
        process.send_signal(signal.SIGINT)
        code, said = ended(process)
    assert (code, said.count("\n")) == (0, 1)
    assert f"{damaged}: damaged, deleted; the weights are sent again" in said


def test_a_write_that_fails_while_the_node_serves_costs_only_time(tmp_path):
    path = write_tiny_gguf(tmp_path / "wide.gguf", n_layer=1, n_embd=1024, n_ff=2816)
    with loaded(path, kernels=False) as model:
        here = logits(model, TOKENS)
    with node(tmp_path) as (ready, process):
        resource.prlimit(child_of(process.pid), resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for _ in range(2):
            with loaded(path, devices(ready), kernels=False, output=True) as model:
                np.testing.assert_array_equal(logits(model, TOKENS), here)
    assert {file.name for file in (tmp_path / "kept").iterdir()} <= {".lock", "checked.json"}


@pytest.mark.slow
def test_a_second_node_with_the_same_folder_keeps_nothing(tmp_path):
    path = write_tiny_gguf(tmp_path / "wide.gguf", n_layer=1, n_embd=1024, n_ff=2816)
    with node(tmp_path), node(tmp_path) as (ready, process):
        with loaded(path, devices(ready), kernels=False, output=True) as model:
            logits(model, TOKENS)
        assert weight_store.kept_bytes(tmp_path / "kept") == 0
        process.send_signal(signal.SIGINT)
        code, said = ended(process)
    assert (code, said.count("\n")) == (0, 1)
    assert f"{tmp_path / 'kept'}: another node keeps weights there: this one keeps none" in said


def test_interrupting_a_node_ends_its_server_and_its_announcement(tmp_path):
    with node(tmp_path) as (ready, process):
        child = child_of(process.pid)
        env = user_environment(tmp_path)
        running = json.loads(run_cli("node", "--describe", "--json", env=env).stdout)["running"]
        assert running == [ready]
        process.send_signal(signal.SIGINT)
        assert ended(process) == (0, "")
        assert not Path(f"/proc/{child}").exists()
        assert json.loads(run_cli("node", "--describe", "--json", env=env).stdout)["running"] == []


def test_a_node_whose_server_dies_serves_again(tmp_path):
    with node(tmp_path) as (ready, process):
        os.kill(child_of(process.pid), signal.SIGKILL)
        assert json.loads(process.stdout.readline()) == ready
        with RPCClient("node", "127.0.0.1", ready["port"]) as requests:
            assert requests.protocol == rpc.PROTOCOL
        process.send_signal(signal.SIGINT)
        code, said = ended(process)
    assert (code, said.count("\n")) == (0, 1)
    assert "a client made the node end (it was killed: perhaps there was no memory left); it serves" in said


def test_a_node_listens_to_this_machine_alone_unless_told_otherwise(tmp_path):
    elsewhere = "127.0.0.2"  # an address of this machine that only a listener on all addresses has
    with node(tmp_path) as (ready, _), pytest.raises(EdgespecError, match="nothing listens"):
        RPCClient("node", elsewhere, ready["port"])
    with node(tmp_path, "--unsafe-no-ssh") as (ready, process):
        with RPCClient("node", elsewhere, ready["port"]) as requests:
            assert requests.protocol == rpc.PROTOCOL
        process.send_signal(signal.SIGINT)
        assert "whoever reaches this port can run programs as you on this machine" in ended(process)[1]


# ---- what a client asks ----


def test_a_machine_describes_itself(kernels):
    node = json.loads(run_cli("node", "--describe", "--json", "--threads", 1, env=os.environ).stdout)
    assert (node["ggml"], node["protocol"]) == (rpc.GGML_VERSION, list(rpc.PROTOCOL))
    assert 0 < node["memory_bytes"] < node["total_bytes"]
    speed = node["speed"]
    assert (speed["kernels"], speed["reason"], speed["n_threads"]) == (kernels.name, "", 1)
    assert sorted(map(int, speed["layer_ms"])) == [1, 2, 4, 8]
    assert all(ms > 0 for ms in speed["layer_ms"].values())


def test_a_description_for_people_names_the_kernels_and_why(tmp_path):
    said = run_cli("node", "--describe", "--kernels", "off", env=user_environment(tmp_path)).stdout
    assert "kernels  stock kernels: --kernels off" in said
    assert "running  no node" in said


# ---- bad input ----


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = run_cli("node", "--port", port, env=user_environment(tmp_path))
    failed(process, 2, f"--port {port}: another program listens there")


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_memory_that_cannot_be_given_is_one_line(tmp_path, memory):
    process = run_cli("node", "--port", 0, "--memory", memory, env=user_environment(tmp_path))
    failed(process, 2, f"--memory {memory}: from 64 to ")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    process = run_cli("node", "--port", 0, "--cache", tmp_path / "file", env=user_environment(tmp_path))
    failed(process, 1, f"--cache {tmp_path / 'file'}: weights cannot be kept there: ")


def test_a_full_disk_keeps_nothing(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(weight_store, "LEAST_FREE", 1 << 60)
    assert not weight_store.prepare(tmp_path, said.append)
    assert "are free on that disk: weights are not kept" in said[0]


def test_files_that_were_checked_are_not_read_again(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    with weight_store.held(kept) as is_held:
        assert is_held
        assert weight_store.prepare(kept)
    (kept / "85944171f73967e8").write_bytes(b"foobar")  # of the hash's published test vectors
    (kept / "85944171f73967e9").write_bytes(b"foobar")
    said = []
    weight_store.prepare(kept, said.append)
    assert [file.name for file in kept.iterdir() if len(file.name) == 16] == ["85944171f73967e8"]
    assert weight_store.kept_bytes(kept) == 6
    assert len(said) == 1
    monkeypatch.setattr(weight_store, "_hash", lambda _file: pytest.fail("read again"))
    weight_store.prepare(kept)
