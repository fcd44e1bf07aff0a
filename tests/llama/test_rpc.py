"""llama.cpp's RPC backend and its connections: they fit the ggml that is installed, and each other."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path

import pytest

from command_line import failed, run_cli, user_environment
from edgespec.errors import EdgespecError
from edgespec.llama import rpc
from tiny_gguf import write_tiny_gguf

MISSING = r"llama\.cpp's RPC backend, which nodes need, is missing: install .* \(no \S+/ggml_rpc\.so\)"


@pytest.fixture
def without_backend(monkeypatch, tmp_path):
    monkeypatch.setattr(rpc, "backend_path", lambda: tmp_path / "ggml_rpc.so")
    monkeypatch.setattr(rpc, "_loaded", None)


def test_its_versions_are_those_that_the_connections_are_made_for():
    header = Path(sysconfig.get_path("purelib"), "include", "ggml-rpc.h").read_text()
    versions = [int(n) for n in re.findall(r"#define RPC_PROTO_\w+_VERSION +(\d+)", header)]
    assert tuple(versions) == rpc.PROTOCOL
    assert rpc.ggml_version() == rpc.GGML_VERSION


def test_it_is_loaded_once():
    assert rpc.load() is rpc.load()


def test_another_ggml_is_refused(monkeypatch):
    monkeypatch.setattr(rpc, "GGML_VERSION", "0.1.0")
    monkeypatch.setattr(rpc, "_loaded", None)
    with pytest.raises(EdgespecError, match=r"are made for ggml 0\.1\.0, and 0\.25\.3 is installed; install"):
        rpc.load()


def test_nothing_installed_is_one_line(without_backend):
    with pytest.raises(EdgespecError, match=MISSING):
        rpc.load()


def test_commands_say_what_is_missing(without_backend, tmp_path):
    env = user_environment(tmp_path)
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    remote = ("run", "a", "--target", model, "--drafter", "none", "--raw", "--nodes", "127.0.0.1:1")
    for command in (("node", "--port", 0), remote):
        assert re.search(MISSING, failed(run_cli(*command, env=env), 1))
    found = run_cli("doctor", "--json", env=env)
    assert found.returncode == 0
    assert re.search(MISSING, json.loads(found.stdout)["nodes"]["reason"])
