"""The first run: what it shows while it compiles and pulls, and how it ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import time
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

import install
from hub_server import FakeServer, wheel
from terminals import Terminal

ROOT = Path(__file__).parents[1]

# install.py, for another project: argv is its folder, what is to be pulled (or ""), and pip's command.
PROGRAM = """
import sys
from pathlib import Path
import install
install.ROOT = Path(sys.argv[1])
install.LOG = install.ROOT / "build" / "install.log"
install.PIP = sys.argv[3:]
install.requirements = lambda: []
sys.exit(install.main([sys.argv[2]] if sys.argv[2] else []))
"""

PYPROJECT = """
[build-system]
requires = ["scikit-build-core"]
build-backend = "scikit_build_core.build"
[project]
name = "tiny"
version = "1.0"
[tool.scikit-build]
wheel.packages = []
"""

CMAKE = """
cmake_minimum_required(VERSION 3.26)
project(tiny LANGUAGES C)
add_library(tiny MODULE a.c b.c c.c d.c)
add_custom_target(last ALL COMMAND sh ${CMAKE_SOURCE_DIR}/last.sh)
add_dependencies(last tiny)
install(TARGETS tiny DESTINATION tiny)
"""

CONTENT = b"GGUF" + bytes(range(256)) * 2000
PART = "/files/fake-1-py3-none-any.whl"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package of which ninja compiles four files."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    for name in "abcd":
        (folder / f"{name}.c").write_text(f"int {name}(void) {{ return 1; }}\n")
    (folder / "last.sh").write_text("true\n")
    return folder


@pytest.fixture
def server():
    """A package index with one model, m."""
    server = FakeServer()
    name, body = wheel("fake", "1", {"fake/data/m.bin": CONTENT})
    server.wheels[name] = body
    yield server
    server.close()


@pytest.fixture
def environment(tmp_path: Path, server: FakeServer) -> dict[str, str]:
    config = tmp_path / "config" / "edgespec"
    config.mkdir(parents=True)
    (config / "models.toml").write_text(
        f"[models.m]\nsize = {len(CONTENT)}\n"
        'sources = [{ kind = "wheels", packages = ["fake==1"], member = "*/data/*.bin" }]\n'
    )
    unwanted = re.compile(r"PIP_.*|.*_proxy", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if not unwanted.fullmatch(name)} | {
        "PIP_INDEX_URL": f"{server.url}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "EDGESPEC_MODELS_DIR": str(tmp_path / "models"),
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C",
    }


def pip(project: Path) -> list[str]:
    """The real pip, which builds `project` with the tools of this environment."""
    where = ["--target", str(project.parent / "site")]
    options = ["--verbose", "--progress-bar", "off", "--no-build-isolation", "--no-deps", "--no-index"]
    return [sys.executable, "-m", "pip", "install", *options, *where, str(project)]


def command(project: Path, pulled: str, pip: list[str]) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(project), pulled, *pip]


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process is there, and not only as an entry that nobody has taken note of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def replay(project: Path, output: str, code: int = 0) -> list[str]:
    """A pip that prints this."""
    file = project / "output"
    file.write_text(output)
    print_it = f"import sys; print(open({str(file)!r}).read(), end=''); sys.exit({code})"
    return [sys.executable, "-c", print_it]


def test_of_llama_cpp_only_what_edgespec_needs_is_compiled(
    project: Path, environment: dict[str, str]
) -> None:
    (project / "CMakeLists.txt").write_text("""
        cmake_minimum_required(VERSION 3.21)
        project(llama_cpp LANGUAGES NONE)
        option(LLAVA_BUILD "as llama-cpp-python has it" ON)
        set(LLAMA_BUILD_COMMON ON CACHE BOOL "as llama-cpp-python has it" FORCE)
        message(STATUS "multimodal ${LLAVA_BUILD}, common ${LLAMA_BUILD_COMMON}, user's ${MINE}")
    """)
    done = run(command(project, "", pip(project)), environment | {"CMAKE_ARGS": "-DMINE='a b'"})
    assert done.returncode == 0, done.stderr
    log = (project / "build" / "install.log").read_text()
    assert "multimodal OFF, common OFF, user's a b" in log


def test_its_wheel_is_kept_out_of_the_users_cache(project: Path, environment: dict[str, str]) -> None:
    tell = [sys.executable, "-c", "import os; print(os.environ['PIP_CACHE_DIR'])"]
    log = project / "build" / "install.log"
    assert run(command(project, "", tell), environment | {"XDG_CACHE_HOME": "/x"}).returncode == 0
    recipe = hashlib.sha256((ROOT / "llama_cpp.cmake").read_bytes()).hexdigest()
    assert log.read_text() == f"/x/edgespec/pip/{recipe[:12]}\n"
    assert run(command(project, "", tell), environment | {"PIP_CACHE_DIR": "/mine"}).returncode == 0
    assert log.read_text() == "/mine\n"


def test_a_real_compile_and_a_pull_beside_it_in_a_terminal(
    project: Path, server: FakeServer, environment: dict[str, str]
) -> None:
    (project / "last.sh").write_text(f"while ! test -e {project}/go; do sleep 0.1; done\n")
    server.stall[PART] = [100_000]
    with Terminal(command(project, "m", pip(project)), environment) as terminal:
        terminal.expect(r"installing packages")
        terminal.expect(r"compiling tiny +\S+ +5/6 steps")
        terminal.expect(r"pulling m +\S+ +\d\d\.\d/512\.0 kB .* left\s+\S compiling tiny")  # both at once
        server.release.set()
        (project / "go").touch()
        assert terminal.wait() == 0
    assert (project.parent / "models" / "m.gguf").read_bytes() == CONTENT
    assert list((project.parent / "site" / "tiny").glob("libtiny*"))


def test_the_same_in_lines(project: Path, environment: dict[str, str]) -> None:
    done = run(command(project, "m", pip(project)), environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert {"installing packages", "compiling tiny", "pulling m (512 kB)", "checking m (512 kB)"} < set(lines)
    assert "compiling tiny: 100%, 6 of 6 steps" in lines
    assert "\x1b" not in done.stderr


def test_a_compile_that_fails_is_one_line_with_what_the_compiler_said(
    project: Path, server: FakeServer, environment: dict[str, str]
) -> None:
    (project / "c.c").write_text("int c(void) { return wrong; }\n")
    server.stall[PART] = [100_000]  # the pull does not keep the failure waiting
    done = run(command(project, "m", pip(project)), environment)
    assert not server.release.is_set()
    assert done.returncode == 1
    log = project / "build" / "install.log"
    assert done.stderr.splitlines()[-1] == (
        f"edgespec: error: tiny was not compiled; all that pip and the compilers said is in {log}"
    )
    assert "c.c:1:22: error: 'wrong' undeclared" in done.stderr
    assert len(done.stderr.splitlines()) < 30
    assert "FAILED" in log.read_text()


def test_too_little_memory_is_named(project: Path, environment: dict[str, str]) -> None:
    sign = "c++: fatal error: Killed signal terminated program cc1plus"
    output = "  Building wheel for llama-cpp-python (pyproject.toml): started\n  [1/193] /usr/bin/g++\n"
    output += f"  FAILED: x.cpp.o\n  {sign}\nERROR: Failed\n"
    done = run(command(project, "", replay(project, output, 1)), environment)
    assert done.returncode == 1
    assert "edgespec: error: llama-cpp-python was not compiled: not enough memory" in done.stderr
    assert sign in done.stderr


def test_without_an_index_it_is_pips_own_reason(project: Path, environment: dict[str, str]) -> None:
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    asked = [sys.executable, "-m", "pip", "install", "--verbose", "fake==1"]
    done = run(command(project, "", asked), environment)
    assert done.returncode == 1
    assert "edgespec: error: the package registry cannot be reached" in done.stderr.splitlines()[-1]


def test_a_pull_that_fails_is_a_line_and_the_install_completes(
    project: Path, server: FakeServer, environment: dict[str, str]
) -> None:
    server.wheels.clear()
    done = run(command(project, "m", pip(project)), environment)
    assert done.returncode == 0
    assert "edgespec: cannot pull m; wheels fake==1: fake==1: No matching distribution" in done.stderr
    assert list((project.parent / "site" / "tiny").glob("libtiny*"))
    done = run(command(project, "nobody", pip(project)), environment)
    assert done.returncode == 0
    assert "edgespec: no model is called 'nobody'" in done.stderr


@pytest.mark.parametrize("how", ["a key", signal.SIGTERM])
def test_stopped_in_both_it_leaves_no_process_and_the_pull_goes_on(
    project: Path, server: FakeServer, environment: dict[str, str], how: str | signal.Signals
) -> None:
    pid_file = project / "pid"
    (project / "last.sh").write_text(
        f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 60\n"
    )
    server.stall[PART] = [100_000]
    with Terminal(command(project, "m", pip(project)), environment) as terminal:
        wait_until(lambda: pid_file.exists() and server.waiting)
        compiler = int(pid_file.read_text())
        assert is_alive(compiler)
        if isinstance(how, signal.Signals):
            os.kill(terminal.pid, how)
        else:
            terminal.type("\x03")
        assert "ERROR" not in terminal.expect("edgespec: error: interrupted")  # pip says so too, in the log
        assert terminal.wait() == 130
    assert not is_alive(compiler)
    assert not list((project.parent / "models").glob("*.wheels/*"))
    server.release.set()
    (project / "last.sh").write_text("true\n")
    done = run(command(project, "m", pip(project)), environment)
    assert done.returncode == 0, done.stderr
    assert (project.parent / "models" / "m.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("arguments", "pulled"),
    [
        (["run"], "default"),
        (["run", "RUN=--temp 0 -n 60"], "default"),
        (["run", "RUN=--temp 0 --target my.gguf"], ""),
        (["run", "RUN=--pair=smollm2"], ""),
        (["run", "RUN=-t my.gguf"], ""),
        (["run", "RUN=--drafter none"], ""),
        (["serve", "SERVE=--port 9000"], "default"),
        (["serve", "SERVE=--draft none"], ""),
        (["test"], "default"),
        (["test", "TEST=-m 'not pair'"], ""),
        (["lint"], ""),
        ([], ""),
    ],
)
def test_make_pulls_the_default_pair_only_where_it_will_be_run(arguments: list[str], pulled: str) -> None:
    # Not the variables of the `make test` that may run this.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "TEST"
    }
    shown = subprocess.run(
        ["make", "--dry-run", "--print-data-base", "--always-make", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    commands = shown.stdout.partition("# Make data base")[0]
    asked = re.search(r"install\.py *(\w*)$", commands, re.MULTILINE)
    assert (asked[1] if asked else "") == pulled


# ---- wheels of dist/ ----

LIBRARY = f"llama_cpp_python-0.3.36+edgespec-py3-none-manylinux_2_34_{platform.machine()}.whl"
OWN = f"edgespec-0.1.0-py3-none-manylinux_2_34_{platform.machine()}.whl"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with wheels of both packages in dist/, on a machine without a compiler."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "llama_cpp.cmake").write_text("recipe")
    put(tmp_path, LIBRARY)
    put(tmp_path, OWN)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "DIST", tmp_path / "dist")
    monkeypatch.setattr(install, "RECIPE", tmp_path / "llama_cpp.cmake")
    monkeypatch.setattr(install, "compiler_lacking", lambda: "no C and C++ compiler")
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    return tmp_path


def put(clone: Path, name: str, recipe: str | bytes | None = "recipe") -> None:
    """Make a wheel with this recipe, or a file that is no wheel."""
    if isinstance(recipe, bytes):
        (clone / "dist" / name).write_bytes(recipe)
        return
    with zipfile.ZipFile(clone / "dist" / name, "w") as archive:
        if recipe is not None:
            archive.writestr("llama_cpp/lib/llama_cpp.cmake", recipe)


def test_without_a_compiler_both_wheels_are_installed(clone: Path) -> None:
    dist = clone / "dist"
    assert install.requirements() == ["--find-links", str(dist), f"{dist / OWN}[serve]"]


def test_what_is_compiled_where_there_is_a_compiler(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All, but llama.cpp's library where it is that of this machine and this recipe, and nobody says how."""
    monkeypatch.setattr(install, "compiler_lacking", lambda: "")
    everything = ["--editable", ".[serve]"]
    assert install.requirements() == ["--find-links", str(clone / "dist"), *everything]
    with monkeypatch.context() as patched:
        patched.setenv("CMAKE_ARGS", "-DGGML_BLAS=ON")
        assert install.requirements() == everything
    for content in ("another", None, b"PK"):
        put(clone, LIBRARY, content)
        assert install.requirements() == everything
    (clone / "dist" / LIBRARY).unlink()
    put(clone, "llama_cpp_python-0.3.36+edgespec-py3-none-manylinux_2_34_s390x.whl")
    assert install.requirements() == everything


def test_neither_a_compiler_nor_a_wheel_is_one_line(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for file in (clone / "dist").iterdir():
        file.unlink()
    monkeypatch.setattr(install, "LOG", clone / "build" / "install.log")
    assert install.main([]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "no C and C++ compiler, and " in said.err
    assert "apt install gcc g++ python3-dev, or run `make wheels`" in said.err


def test_it_imports_what_the_makefile_installs_before_it():
    """A new `.venv` has nothing else: one more import and `make run` would fail on a fresh clone."""
    (installed,) = re.findall(r"install (.*) # which show and pull", (ROOT / "Makefile").read_text())
    script = "import sys; had = {*sys.modules}; import install; print(*{*sys.modules} - had)"
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in process.stdout.split()} - sys.stdlib_module_names
    owners = packages_distributions()
    wanted = {name.lower() for each in installed.split() for name in needs(each)}
    foreign = {name for name in imported if name in owners and not wanted & {*map(str.lower, owners[name])}}
    assert foreign <= {"edgespec"}


def needs(name: str) -> set[str]:
    """Return a distribution and all that it requires."""
    found, left = set(), [name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            with contextlib.suppress(PackageNotFoundError):
                left += [
                    re.split(r"[^\w.-]", line)[0] for line in requires(name) or () if "extra ==" not in line
                ]
    return found
