"""Wheels that need no compiler: what is refused, what pip makes of them, what is in dist/ if anything is."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from pi import DIST, ROOT, bare, manylinux, recipe

LLAMA = f"llama_cpp_python-{recipe.llama_version()}{manylinux.LOCAL_VERSION}"


def run_tool(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = None if path is None else {"PATH": path}
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )


# ---- what is refused ----


@pytest.mark.parametrize(
    ("machine", "missing"),
    [
        ("x86_64", "no x86_64-linux-gnu-gcc on this machine: apt install g++"),
        ("aarch64", "no aarch64-linux-gnu-gcc on this machine: apt install g++"),
    ],
)
def test_no_compiler(tmp_path: Path, machine: str, missing: str) -> None:
    ended = run_tool("pi.manylinux", machine, path=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert missing in ended.stderr


# ---- how they are made ----


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources as far as they are changed, and an empty dist/."""
    source = tmp_path / "source"
    for name, text in (
        (manylinux._PACKAGE_FILE, f'import x\n\n__version__ = "{recipe.llama_version()}"\n'),
        (
            manylinux._VARIANTS_FILE,
            "    add(armv8.6_2)\n" + "".join(f"    {line}" for line in manylinux._SME),
        ),
    ):
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text(text)
    monkeypatch.setattr(recipe, "llama_source", lambda: source)
    monkeypatch.setattr(manylinux, "DIST", tmp_path / "dist")
    monkeypatch.setattr(manylinux, "ROOT", tmp_path)
    return source


def test_the_copy_of_the_sources_has_its_own_version(build: Path) -> None:
    copy = manylinux._source()
    version = f'__version__ = "{recipe.llama_version()}+edgespec"\n\n\ndef _load_cpu_backend():\n'
    assert version in (copy / manylinux._PACKAGE_FILE).read_text()
    assert (copy / manylinux._VARIANTS_FILE).read_text().strip() == "add(armv8.6_2)"
    assert "+edgespec" not in (build / manylinux._PACKAGE_FILE).read_text()  # which the boards' are made from
    assert "SME" in (build / manylinux._VARIANTS_FILE).read_text()
    before = (copy / manylinux._VARIANTS_FILE).stat().st_mtime_ns
    assert manylinux._source() == copy
    assert (copy / manylinux._VARIANTS_FILE).stat().st_mtime_ns == before  # nothing to compile again


def test_other_sources_are_refused_by_name(build: Path) -> None:
    (build / manylinux._VARIANTS_FILE).write_text("add(armv8.6_2)\n")
    with pytest.raises(EdgespecError, match=r"CMakeLists.txt: not as pi/manylinux.py knows it: .*armv9.2_1"):
        manylinux._source()


def test_a_new_wheel_takes_the_place_of_an_older_one_for_the_same_machines(build: Path) -> None:
    for name in (
        "edgespec-1-cp311-abi3-manylinux_2_34_x86_64.whl",
        "edgespec-1-any-manylinux_2_34_aarch64.whl",
    ):
        (build / name).write_text(name)
        manylinux._publish(build / name)
    newer = build / "edgespec-2-cp311-abi3-manylinux_2_34_x86_64.whl"
    newer.write_text("newer")
    assert manylinux._publish(newer).read_text() == "newer"
    assert sorted(file.name for file in manylinux.DIST.iterdir()) == [
        "edgespec-1-any-manylinux_2_34_aarch64.whl",
        newer.name,
    ]


# ---- what pip makes of them ----


def fake_wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any", needs: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}-{version}-{tag}.whl"
    needs = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(file, "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def pip_download(folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    options = [
        "--isolated",
        "--disable-pip-version-check",
        "download",
        "--no-index",
        "--dest",
        folder / "got",
    ]
    command = [sys.executable, "-m", "pip", *options, "--find-links", folder, *what]
    env = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_pip_takes_the_wheel_with_a_local_version_for_the_pinned_one(tmp_path: Path) -> None:
    fake_wheel(tmp_path, "edgespec", "1", needs="llama-cpp-python==0.3.36")
    for version in ("0.3.36", "0.3.36+edgespec", "0.3.37"):
        fake_wheel(tmp_path, "llama_cpp_python", version)
    ended = pip_download(tmp_path, "edgespec")
    assert ended.returncode == 0, ended.stderr
    assert {file.name.split("-")[1] for file in (tmp_path / "got").glob("llama*")} == {"0.3.36+edgespec"}


# ---- what is in dist/, where somebody has built it ----

FEATURES = {
    "x86_64": {
        "x64",
        "sse42",
        "haswell",
        "alderlake",
        "skylakex",
        "cascadelake",
        "icelake",
        "zen4",
        "sapphirerapids",
    },
    "aarch64": {"armv8.0_1", "armv8.2_1", "armv8.2_2", "armv8.2_3", "armv8.6_1", "armv8.6_2"},
}


@pytest.fixture(params=manylinux.MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    if not list(DIST.glob(f"edgespec-*{request.param}.whl")):
        pytest.skip("no wheels in dist/: make wheels")
    return request.param


def contents(file: Path) -> tuple[set[str], email.message.Message]:
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, email.message_from_bytes(archive.read(metadata))


def test_edgespecs_wheel(machine: str) -> None:
    own, _ = bare._own_wheels(machine)
    assert re.fullmatch(rf"edgespec-[\d.]+-cp311-abi3-manylinux_2_\d\d_{machine}\.whl", own.name)
    names, metadata = contents(own)
    assert {
        f"edgespec/{name}.so"
        for name in ("_core.abi3", "edgespec_kernels", "edgespec_whisper", "rpc_transport")
    } <= names
    assert not any("libgomp" in name for name in names)  # one pool of threads for it and llama.cpp
    assert f"llama-cpp-python=={recipe.llama_version()}" in (metadata.get_all("Requires-Dist") or [])


def test_llama_cpps_wheel(machine: str) -> None:
    _, wheel = bare._own_wheels(machine)
    assert re.fullmatch(rf"{re.escape(LLAMA)}-py3-none-manylinux_2_\d\d_{machine}\.whl", wheel.name)
    names, metadata = contents(wheel)
    assert metadata["Version"] == recipe.llama_version() + manylinux.LOCAL_VERSION
    lib = {name.removeprefix("llama_cpp/lib/") for name in names if name.startswith("llama_cpp/lib/")}
    assert {
        "libllama.so",
        "libggml.so.0",
        "libggml-base.so.0",
        "libmtmd.so",
        "ggml_rpc.so",
        recipe.OPENMP,
    } <= lib
    assert {f"libggml-cpu-{name}.so" for name in FEATURES[machine]} <= lib
    assert not [name for name in names if name.startswith(("bin/", "lib/", "include/"))]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("llama_cpp/lib/llama_cpp.cmake") == (ROOT / "llama_cpp.cmake").read_bytes()


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_the_libraries_find_each_other_and_need_no_newer_c_library(machine: str, tmp_path: Path) -> None:
    for wheel in bare._own_wheels(machine):
        assert recipe.glibc(wheel) <= recipe.NEWEST_GLIBC
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    for library in tmp_path.glob("llama_cpp/lib/libggml-cpu-*.so"):
        said = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        assert re.search(r"RU?N?PATH.*\$ORIGIN", said), library
        assert "libgomp.so.1" in said
