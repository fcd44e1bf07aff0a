"""Fixtures shared by the rooms' tests: tiny random models, and the real default pair."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from command_line import copy_self_test, python_path
from edgespec.engine import pair as engine_pair
from edgespec.errors import EdgespecError
from edgespec.llama import kernels as kernels_room
from edgespec.llama.quantize import quantize
from edgespec.llama.weights import Model
from edgespec.models.store import Store
from edgespec.platform import plugins
from tiny_gguf import write_tiny_gguf
from toy_sessions import Clock

if not kernels_room.plugin_path().exists():
    # Each engine would say so; the tests of the guards ask for that themselves.
    os.environ["EDGESPEC_KERNELS"] = "off"

os.environ["EDGESPEC_PACKED_WEIGHTS"] = "off"  # 1 GB for the real pair, in each test's own cache

# `make test &` in a script starts with Ctrl-C ignored, which each child would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What runs learn and what is measured goes to a cache of the tests' own; the 1.6 GB of models do not.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
os.environ.setdefault("EDGESPEC_MODELS_DIR", str(Store.default().root))
_own_cache = Path(tempfile.mkdtemp(prefix="edgespec-tests-"))
atexit.register(shutil.rmtree, _own_cache, ignore_errors=True)
if IS_WORKER:
    copy_self_test(_own_cache)  # of the process that started it
os.environ["XDG_CACHE_HOME"] = str(_own_cache)

# Trainings of one shape share what JAX has compiled, whichever worker or child they are in.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="edgespec-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# Tests train for seconds, most of which XLA spent on optimizing. The second flag has it generate code as it
# did before, which is twice as fast; it ends a program that gives it a flag that it does not know.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    with suppress(PackageNotFoundError):
        if version("jaxlib").startswith("0.10."):
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

if IS_WORKER:
    gc.disable()  # until all tests are collected

REAL_PAIR = ("qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-0.5b-q4_0")


DURATIONS_FILE = Path(__file__).with_name("durations.json")
DURATIONS: dict[str, float] = json.loads(DURATIONS_FILE.read_text())
"""Seconds of a processor for each test of one or more, all its cases together, when it was stored last. Of a
file: its longest setup, a module's fixture, which whichever of its tests comes first has to pay."""
LONG_S, LONG_SETUP_S = 2.0, 5.0
"""`make test` leaves out what takes longer, but not what proves exactness; `make test-all` runs all."""
BEFORE_A_RELEASE = (
    "apps/forge/test_head_training.py",
    "apps/forge/test_learning_*.py",
    "apps/forge/test_ranking.py",
    "apps/forge/test_training*.py",
    "apps/server/test_client_programs.py",
    "apps/server/test_server_page*.py",
    "pi/*.py",
)
"""Trainings, clients of other makers, browsers, boards: files that `make test` does not even import."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run store how long each test took, and write what refusals say."""
    parser.addoption("--store-durations", action="store_true", help=f"write {DURATIONS_FILE.name}")
    parser.addoption("--write-messages", action="store_true", help="write refusals.json (with -n 0)")


def _test_of(nodeid: str) -> str:
    """Return a test without its case, and without the group that pytest-xdist adds."""
    return nodeid.partition("[")[0].partition("@")[0]


class _StoredDurations:
    """Adds up the seconds of a run's tests, those of all workers, and stores them when it ends.

    What did not run keeps its seconds, if its file is still there.
    """

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._setups: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, seconds = _test_of(report.nodeid), getattr(report, "processor_s", 0.0)  # of a worker that died
        if report.when == "setup" and seconds >= 1.0:
            file = test.partition("::")[0]
            self._setups[file] = max(self._setups[file], seconds)
        else:
            self._seconds[test] += seconds

    def pytest_sessionfinish(self) -> None:
        ran = {*self._seconds, *(test.partition("::")[0] for test in self._seconds)}
        kept = {
            name: spent
            for name, spent in DURATIONS.items()
            if name not in ran and (DURATIONS_FILE.parents[1] / name.partition("::")[0]).exists()
        }
        kept |= {name: round(s, 1) for name, s in (self._seconds + self._setups).items() if s >= 1.0}
        DURATIONS_FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")


def _processor_s(times: Callable[[], os.times_result] = os.times) -> float:
    """Return the seconds of a processor that this process has taken, with its children that have ended."""
    return sum(times()[:4])  # a test may have replaced the function


_spent = [0.0]  # up to the last phase of a test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Note in the report what a phase took; a busy machine changes little of that."""
    report = yield
    _spent.append(_processor_s())
    report.processor_s = _spent[-1] - _spent.pop(0)
    return report


def pytest_collection_finish() -> None:
    """Count from here on: the first test has not imported all others. What there is now stays to the end."""
    gc.freeze()
    gc.enable()
    _spent[:] = [_processor_s()]


def pytest_configure(config: pytest.Config) -> None:
    """Test the kernels before there are workers, once for all of them."""
    if IS_WORKER:
        return
    if config.option.store_durations:
        config.pluginmanager.register(_StoredDurations())
    if getattr(config.option, "dist", "no") != "no":
        kernels_room.load()


def _is_quick(config: pytest.Config) -> bool:
    """Whether only such tests were asked for as are not long."""
    return config.option.markexpr.startswith(("not long", "not slow"))


@cache
def _is_for_a_release(path: Path) -> bool:
    return any(path.match(f"tests/{pattern}") for pattern in BEFORE_A_RELEASE)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the files of a whole run, each worker from another one on: pytest rewrites a file's assertions
    where it is imported first, and in a new clone all workers would rewrite all files.
    """
    folder = Path(__file__).parent
    if not IS_WORKER or [*map(Path, session.config.args)] != [folder]:
        return
    files = [
        file for file in sorted(folder.rglob("test_*.py")) if not pytest_ignore_collect(file, session.config)
    ]
    place = int(os.environ["PYTEST_XDIST_WORKER"][2:]) / int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = int(place * len(files))
    sys.path[:0] = {str(file.parent): None for file in files}
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # which is told when the file is collected
            importlib.import_module(file.stem)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what would be left out."""
    return True if _is_quick(config) and _is_for_a_release(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a file together, and the real pair; begin with the groups that take longest; mark what is long."""
    spent: dict[str, dict[str, float]] = {}
    for item in items:
        test, is_for_a_release = _test_of(item.nodeid), _is_for_a_release(item.path)
        seconds, setup = DURATIONS.get(test, 0.0), DURATIONS.get(test.partition("::")[0], 0.0)
        if seconds or setup or is_for_a_release:
            item.add_marker(pytest.mark.slow)
        is_long = seconds > LONG_S or setup > LONG_SETUP_S or is_for_a_release
        is_long = is_long and not item.get_closest_marker("proof")
        if is_long:
            item.add_marker(pytest.mark.long)
        group = "pair" if item.get_closest_marker("pair") else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
        if not (is_long and _is_quick(config)):
            spent.setdefault(group, {})[test] = seconds
    order = {group: -sum(seconds.values()) for group, seconds in spent.items()} | {"pair": -math.inf}
    items.sort(key=lambda item: order.get(item.get_closest_marker("xdist_group").args[0], 0.0))


_default_threads = engine_pair.default_threads


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let engines of tiny models have one thread where a test asks for no number.

    Several wait for each other longer than they compute, beside other workers most of all.
    """
    n_threads = _default_threads() if item.get_closest_marker("pair") else 1
    engine_pair.default_threads = lambda: n_threads


@pytest.fixture(autouse=True)
def _installed_packages() -> Iterator[None]:
    """What a test installs, no other one sees."""
    yield
    plugins.groups.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time as toy sessions spend it; what a scheduler decides by it is the same in every run."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target's file. Copy it before damaging it."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "target.gguf", seed=1)


@pytest.fixture(scope="session")
def tiny_draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary."""
    directory = tmp_path_factory.mktemp("tiny")
    return write_tiny_gguf(directory / "draft.gguf", seed=2, n_layer=1, n_embd=32, n_ff=64, n_head=2)


@pytest.fixture(scope="session")
def packable_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with matrices that edgespec's kernels take, Q4_K and Q6_K."""
    directory = tmp_path_factory.mktemp("packable")
    source = write_tiny_gguf(directory / "f32.gguf", n_embd=256, n_ff=512, n_head=4, n_head_kv=2)
    quantize(source, directory / "q4_k_m.gguf", "q4_k_m")
    return directory / "q4_k_m.gguf"


@pytest.fixture(scope="session")
def tiny_target(tiny_path: Path) -> Iterator[Model]:
    with Model(tiny_path) as model:
        yield model


@pytest.fixture(scope="session")
def tiny_draft(tiny_draft_path: Path) -> Iterator[Model]:
    with Model(tiny_draft_path) as model:
        yield model


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """Paths of the real target and draft, pulled on first use. For tests marked `pair`."""
    models = importlib.import_module("edgespec.models.resolve")
    try:
        target, draft = (Path(models.resolve(name)) for name in REAL_PAIR)
    except EdgespecError as error:
        pytest.skip(f"the 1.6 GB pair could not be downloaded: {error}")
    return target, draft


@pytest.fixture(scope="session")
def kernels() -> kernels_room.Kernels:
    """The kernels, in use in this process. For tests that make no sense without them."""
    if not kernels_room.plugin_path().exists():
        pytest.skip(f"the kernels are not built: no {kernels_room.plugin_path()}")
    if kernels_room.word_of("EDGESPEC_KERNELS") == "off":
        pytest.skip("EDGESPEC_KERNELS=off")
    loaded = kernels_room.load()
    assert loaded.available, loaded.reason
    return loaded


@pytest.fixture
def child_environment() -> dict[str, str]:
    """An environment in which a child Python finds the edgespec under test."""
    return {**os.environ, "PYTHONPATH": python_path()}
