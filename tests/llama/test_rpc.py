"""llama.cpp's RPC backend: its files are as they were published, and fit the ggml that is installed."""

from __future__ import annotations

import hashlib
import re
import sysconfig
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
