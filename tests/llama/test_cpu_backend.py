"""Libraries that fit the processor: variants of llama.cpp's CPU backend, and what cannot be loaded."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.app import _explain
from edgespec.llama import backend

ROOT = Path(__file__).parents[2]
MAPS = (
    "7f00-7f01 r-xp 00000000 fe:00 1  /usr/lib/libc.so.6",
    "7f02-7f03 r-xp 00000000 fe:00 2  /x/llama_cpp/lib/libggml-cpu-armv8.2_2.so",
)


class Library:
    """ggml's registry: how many backends it has, and after it was told to look into a folder."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)
        self.looked_in: list[Path] = []

    def function(self, name: str, *_types: type | None) -> Callable[..., Any]:
        return {
            "ggml_backend_reg_count": lambda: self.counts[0],
            "ggml_backend_load_all_from_path": self.look,
        }[name]

    def look(self, folder: bytes) -> None:
        self.looked_in.append(Path(os.fsdecode(folder)))
        self.counts.pop(0)


@pytest.mark.parametrize(("counts", "looks"), [((1,), 0), ((0, 1), 1), ((0, 0), 1)])
def test_a_backend_is_looked_for_beside_the_library_where_none_is_linked(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], looks: int
) -> None:
    library = Library(*counts)
    monkeypatch.setattr(backend, "foreign_function", library.function)
    problem = backend._load_cpu_backend()
    assert library.looked_in == [backend.library_folder()] * looks
    if counts[-1]:
        assert problem == ""
    else:
        assert problem.startswith(f"{backend.library_folder()}: none of llama.cpp's CPU backends there")
        assert os.uname().machine in problem
        assert problem.endswith("install llama-cpp-python again, built for it")


def test_the_variant_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "lines_of", lambda _: list(MAPS))
    assert backend.cpu_backend() == "armv8.2_2"
    monkeypatch.setattr(backend, "lines_of", lambda _: [MAPS[0], MAPS[1].replace("-armv8.2_2", "")])
    assert backend.cpu_backend() == ""


def run_with(site: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "edgespec", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=site, check=False)


def test_a_library_for_another_processor_is_one_line(tmp_path: Path) -> None:
    package = Path(backend.llama.__file__).parent
    shutil.copytree(package, tmp_path / "llama_cpp", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    (tmp_path / "llama_cpp" / "lib" / "libllama.so").write_bytes(b"\x7fELF for another")
    ended = run_with(tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
    assert "edgespec: error: llama.cpp's library cannot be loaded: " in ended.stderr
    cure = f"install llama-cpp-python again, built for {os.uname().machine}\n"
    assert ended.stderr.endswith(f"libllama.so: file too short; {cure}")


def test_our_own_library_for_another_processor_is_one_line(tmp_path: Path) -> None:
    library = tmp_path / "_core.abi3.so"
    library.write_bytes(b"\x7fELF for another")
    spec = importlib.util.spec_from_file_location("edgespec._core", library)
    assert spec
    with pytest.raises(ImportError) as caught:
        importlib.util.module_from_spec(spec)
    line, code = _explain(caught.value)
    assert code == 1
    assert line.startswith("edgespec's library cannot be loaded: ")
    assert line.endswith(f"file too short; install edgespec again, built for {os.uname().machine}")


def test_the_package_that_is_imported_later_leaves_the_log_alone(tiny_path):
    """Its import sets a log that prints; who then asks for one gets it."""
    code = (
        "import sys; from edgespec.llama.weights import Model; import llama_cpp; from ctypes import c_void_p;"
        "Model(sys.argv[1]).close(); seen = [];"
        "log = llama_cpp.llama_log_callback(lambda level, text, data: seen.append(text));"
        "llama_cpp.llama_log_set(log, c_void_p(0)); Model(sys.argv[1]).close(); print(len(seen) > 1)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, tiny_path], capture_output=True, text=True, check=False
    )
    assert (process.stdout, process.stderr, process.returncode) == ("True\n", "", 0)
