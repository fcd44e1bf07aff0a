"""Fixtures shared by the rooms' tests: tiny random models, and the real default pair."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from command_line import copy_self_test, python_path
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

REAL_PAIR = ("qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-0.5b-q4_0")


DURATIONS_FILE = Path(__file__).with_name("durations.json")
DURATIONS: dict[str, float] = json.loads(DURATIONS_FILE.read_text())
"""Seconds of each test of a second or more, all its cases together, in the last whole run that was stored."""
LONG_S = 3.0
"""`make test` leaves out longer tests, but those that prove exactness; `make test-all` runs all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a whole run store how long each test took, and a run write what refusals say."""
    parser.addoption("--store-durations", action="store_true", help=f"write {DURATIONS_FILE.name}")
    parser.addoption("--write-messages", action="store_true", help="write refusals.json (with -n 0)")


def _test_of(nodeid: str) -> str:
    """Return a test without its case, and without the group that pytest-xdist adds."""
    return nodeid.partition("[")[0].partition("@")[0]


class _StoredDurations:
    """Adds up the seconds of a run's tests, those of all workers, and stores them when it ends."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_test_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {name: round(spent, 1) for name, spent in sorted(self._seconds.items()) if spent >= 1.0}
        DURATIONS_FILE.write_text(json.dumps(kept, indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Test the kernels before there are workers, once for all of them."""
    if IS_WORKER:
        return
    if config.option.store_durations:
        config.pluginmanager.register(_StoredDurations())
    if getattr(config.option, "dist", "no") != "no":
        kernels_room.load()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file together, and the real pair; begin with the groups that take longest; mark what is long."""
    spent: Counter[str] = Counter()
    for test, seconds in DURATIONS.items():
        spent[Path(test.partition("::")[0]).name] += seconds

    def group(item: pytest.Item) -> str:
        return "pair" if item.get_closest_marker("pair") else item.path.name

    spent["pair"] = max(spent.values(), default=0.0)
    for item in items:
        seconds = DURATIONS.get(_test_of(item.nodeid), 0.0)
        if seconds:
            item.add_marker(pytest.mark.slow)
        if seconds > LONG_S and not item.get_closest_marker("proof"):
            item.add_marker(pytest.mark.long)
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: -spent[group(item)])


@pytest.fixture(autouse=True)
def _installed_packages() -> Iterator[None]:
    """What a test installs, no other one sees."""
    yield
    plugins.offered.cache_clear()


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
