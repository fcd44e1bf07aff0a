"""`edgespec doctor --nodes`: real nodes of this machine, through the command."""

import json

import pytest

from command_line import failed, run_cli, user_environment
from running_node import node
from sshd import free_port
from tiny_gguf import write_tiny_gguf


@pytest.fixture
def model(tmp_path):
    return write_tiny_gguf(tmp_path / "four.gguf", n_layer=4)


def test_nodes_and_how_they_share_a_model(tmp_path, model):
    env = user_environment(tmp_path)
    with node(tmp_path) as (ready, _):
        name = f"127.0.0.1:{ready['port']}"
        process = run_cli("doctor", "--nodes", f"{name}=3", "--json", model, env=env)
        text = run_cli("doctor", "--nodes", f"{name}=3", model, env=env)
    assert process.returncode == 0
    report = json.loads(process.stdout)
    here, there = report["nodes"]
    assert (here["name"], here["round_trip_ms"]) == ("here", None)
    assert (there["name"], there["speed"]["kernels"], there["error"]) == (name, "stock", None)
    assert 0 < there["memory_bytes"] <= ready["memory_bytes"]
    assert there["round_trip_ms"] > 0
    assert there["bytes_per_s"] > 0
    (shared,) = report["models"]
    assert [(share["name"], share["layers"]) for share in shared["shares"]] == [("here", 1), (name, 3)]
    assert shared["alone_ms"] > 0
    assert shared["limit"].endswith("%)")
    assert f"{name}: llama.cpp's kernels are used there" in process.stderr

    assert text.returncode == 0
    assert "1 layer here (" in text.stdout
    assert f"3 layers on {name} (" in text.stdout
    assert "what limits it: the " in text.stdout


def test_a_node_that_cannot_be_used_is_shown_beside_the_others(tmp_path, model):
    with node(tmp_path) as (ready, _):
        names = f"127.0.0.1:{ready['port']}", f"127.0.0.1:{free_port()}"
        process = run_cli("doctor", "--nodes", ",".join(names), model, env=user_environment(tmp_path))
    assert process.returncode == 1
    assert f"{names[0]} " in process.stdout
    assert f"lost     {names[1]}: nothing listens on that port; " in process.stdout
    assert "no node makes a pass faster: none is used" in process.stdout.replace("\n", " ")


def test_layers_that_a_model_has_not_are_an_error_of_its_own(tmp_path, model):
    with node(tmp_path) as (ready, _):
        nodes = f"127.0.0.1:{ready['port']}=9"
        process = run_cli("doctor", "--nodes", nodes, "--json", model, env=user_environment(tmp_path))
    assert process.returncode == 1
    (shared,) = json.loads(process.stdout)["models"]
    assert shared["error"] == f"--nodes {nodes}: the model has 4 layers, and 9 are given to nodes"


def test_what_is_no_address_is_one_line(tmp_path):
    process = run_cli("doctor", "--nodes", "a,,b", env=user_environment(tmp_path))
    failed(process, 2, "--nodes: an empty name; name nodes as user@host or host:port")
