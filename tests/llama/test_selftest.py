"""The self-test of the kernels: what the child finds, and how its answer is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgespec.llama import selftest, selftest_child
from edgespec.llama.kernel_timing import Prefetch
from edgespec.llama.kernels import Kernels
from edgespec.llama.selftest import FAILED, PrefetchChoice, self_test
from edgespec.llama.selftest_child import PREFETCHES, faster_prefetch, fewest_in_tiles
from edgespec.platform.processes import ChildExit, run_in_child

CRASHED = ChildExit(-signal.SIGSEGV, "")
WRONG = ChildExit(FAILED, "the logits differ from stock by 77%")
PASSED = ChildExit(0, "")
MEASURED = PrefetchChoice(Prefetch(1, 8192), gain=1.1, reason="")
BUSY = PrefetchChoice(reason="other programs kept 1.0 processors busy")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root / "edgespec"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "plugin.so"
    path.write_bytes(b"one")
    return path


class Children:
    """Takes the place of `run_in_child`: ends as `ended` and counts."""

    def __init__(self) -> None:
        self.ended = PASSED
        self.n = 0
        self.choice = MEASURED
        self.n_measured = 0

    def __call__(
        self, module: str, function: str, plugin: str, isa: str, measure: str, *, timeout_s: float
    ) -> ChildExit:
        assert callable(getattr(sys.modules[module], function))
        self.n += 1
        if self.ended.code != 0 or not measure:
            return self.ended
        self.n_measured += 1
        return msgspec.structs.replace(self.ended, said=msgspec.json.encode(self.choice).decode())


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    made = Children()
    monkeypatch.setattr(selftest, "run_in_child", made)
    return made


# ---- the child process ----


def test_a_child_s_end() -> None:
    assert run_in_child("gc", "get_threshold").code == 1  # a tuple is no exit code
    assert run_in_child("gc", "enable") == ChildExit(0, "")
    assert run_in_child("os", "abort").code == -signal.SIGABRT
    assert run_in_child("sys", "exit", "why not") == ChildExit(1, "why not")
    assert run_in_child("signal", "pause", timeout_s=0.3) == ChildExit(None, "")
    assert "no_such_module" in run_in_child("no_such_module", "f").complaint


def test_a_child_ends_with_its_parent(tmp_path: Path, child_environment: dict[str, str]) -> None:
    """The grandchild sleeps; killed is only the child that waits for it."""
    file = tmp_path / "pid"
    (tmp_path / "sleeper.py").write_text(
        "import os, time\n"
        f"def sleep():\n    open({str(file)!r}, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
    )
    environment = {**child_environment, "PYTHONPATH": f"{child_environment['PYTHONPATH']}:{tmp_path}"}
    program = "from edgespec.platform.processes import run_in_child; run_in_child('sleeper', 'sleep')"
    child = subprocess.Popen([sys.executable, "-c", program], env=environment)
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(file.read_text())
    child.kill()
    child.wait()
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the grandchild outlived its parent")


def test_the_real_plugin_passes(kernels: Kernels) -> None:
    assert kernels.plugin
    answer = self_test(kernels.plugin.path, kernels.plugin.isa)
    assert answer.reason == ""
    assert answer.certain
    assert answer.choice.prefetch in PREFETCHES
    assert (answer.choice.gain > 1) == (answer.choice.prefetch != PREFETCHES[0])
    if answer.choice.reason:  # whatever else the machine does meanwhile
        assert answer.choice.prefetch == PREFETCHES[0]
        assert any(word in answer.choice.reason for word in ("other programs kept", "too slow", "of memory"))


# ---- what the child can see ----


MODELS = range(len(selftest_child.MODELS))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    path, rows = tmp_path_factory.mktemp("selftest") / "model.gguf", []
    for model in MODELS:
        selftest_child.write_model(path, model)
        with selftest_child.open_model(path, use_kernels=False) as one:
            rows.append(selftest_child.logits(one, n_batch=8, n_threads=1))
    return rows


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model in MODELS for name in selftest_child.MODELS[model]]
)
def test_every_matrix_shows_in_the_logits(
    tmp_path: Path, stock: list[np.ndarray], model: int, name: str
) -> None:
    path = tmp_path / "other.gguf"
    selftest_child.write_model(path, model, other=name)
    with selftest_child.open_model(path, use_kernels=False) as one:
        rows = selftest_child.logits(one, n_batch=8, n_threads=1)
    assert selftest_child.difference(rows, stock[model]) > 5 * selftest_child.TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_rounding_does_not_show(tmp_path: Path, stock: list[np.ndarray], model: int) -> None:
    path = tmp_path / "model.gguf"
    selftest_child.write_model(path, model)
    with selftest_child.open_model(path, use_kernels=False) as one:
        rows = selftest_child.logits(one, n_batch=1, n_threads=2)
    assert selftest_child.difference(rows, stock[model]) < selftest_child.TOLERANCE / 3


def test_every_type_that_matters_is_in_the_model() -> None:
    types = {matrix.type for model in selftest_child.MODELS for matrix in model.values()}
    assert types >= {"q4_0", "q8_0", "q4_K", "q6_K", "q5_0", "q5_K", "q4_1", "iq4_nl", "q3_K"}
    assert types >= {"mxfp4", "f16", "bf16", "q2_K", "iq4_xs", "tq1_0", "tq2_0", "nvfp4"}
    assert types >= {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"}


# ---- the kept answer ----


@pytest.mark.parametrize("ended", [PASSED, WRONG])
def test_a_certain_answer_is_kept(children: Children, plugin: Path, ended: ChildExit) -> None:
    children.ended = ended
    first = self_test(plugin, "avx2")
    assert (first.passed, first.certain) == (ended is PASSED, True)
    children.ended = CRASHED
    assert self_test(plugin, "avx2") == first
    assert children.n == 1
    assert not self_test(plugin, "avx2", retest=True).passed
    assert children.n == 2


@pytest.mark.parametrize("ended", [CRASHED, ChildExit(None, ""), ChildExit(1, "no memory")])
def test_an_uncertain_answer_is_tried_again_after_a_day(
    children: Children, plugin: Path, cache: Path, ended: ChildExit
) -> None:
    children.ended = ended
    self_test(plugin, "avx2")
    self_test(plugin, "avx2")
    assert children.n == 1
    (file,) = cache.glob("selftest-*.json")
    for age in (2 * 24 * 60 * 60.0, -5.0):  # long ago, or from a clock that was wrong
        file.write_text(json.dumps(json.loads(file.read_text()) | {"when": time.time() - age}))
        self_test(plugin, "avx2")
    assert children.n == 3


def test_what_the_answer_depends_on(
    children: Children, plugin: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    self_test(plugin, "avx2")
    self_test(plugin, "avx-vnni")
    plugin.write_bytes(b"two")
    self_test(plugin, "avx2")
    monkeypatch.setattr(
        selftest, "read_cpu", lambda: msgspec.structs.replace(_real_cpu(), flags=frozenset({"avx2"}))
    )
    self_test(plugin, "avx2")
    other = plugin.with_name("libggml-cpu.so.0")
    other.write_bytes(b"another llama.cpp")
    monkeypatch.setattr(selftest, "_mapped_libraries", lambda _: {other})
    self_test(plugin, "avx2")
    assert children.n == 5
    assert len(list(cache.glob("selftest-*.json"))) == 5


_real_cpu = selftest.read_cpu


def test_the_libraries_are_those_in_use() -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {path.name.split(".so")[0] for path in selftest._mapped_libraries(maps)}
    assert names >= {"libggml", "libggml-base", "libllama"}
    assert any(name == "libggml-cpu" or name.startswith("libggml-cpu-") for name in names)  # or a variant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"reason": ""}',
        '{"reason": 5, "certain": true, "isa": "avx2", "when": 1.0}',
        '{"reason": "", "certain": true, "isa": "avx2", "when": "now"}',
        "[" * 100_000,
        "\udcff",
        '{"reason": "", "certain": true, "isa": "avx2", "when": 1.0, "choice": {"prefetch": {"level": "2"}}}',
    ],
)
def test_a_damaged_cache_means_to_test_again(
    children: Children, plugin: Path, cache: Path, text: str
) -> None:
    self_test(plugin, "avx2")
    (file,) = cache.glob("selftest-*.json")
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert self_test(plugin, "avx2").passed
    assert children.n == 2
    assert json.loads(file.read_text())["reason"] == ""


def test_a_cache_that_cannot_be_written(
    children: Children, plugin: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.write_text("a file where the directory should be")
    assert self_test(plugin, "avx2").passed
    assert self_test(plugin, "avx2").passed
    assert children.n == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", _no_home)
    assert self_test(plugin, "avx2").passed
    assert children.n_measured == 0  # each start would take that second


# ---- how weights are prefetched ----


def test_a_choice_is_kept_with_the_answer(children: Children, plugin: Path) -> None:
    assert self_test(plugin, "avx2").choice == MEASURED
    children.choice = BUSY
    assert self_test(plugin, "avx2").choice == MEASURED
    assert self_test(plugin, "avx2", retest=True).choice == BUSY
    assert children.n == children.n_measured == 2


@pytest.mark.parametrize("code", [-signal.SIGSEGV, None, 1])
def test_a_measurement_that_ends_the_child_keeps_no_kernels_out(
    children: Children, plugin: Path, code: int | None
) -> None:
    children.ended = ChildExit(code, "", msgspec.json.encode(BUSY).decode())
    children.choice = BUSY
    found = self_test(plugin, "avx2")
    assert (found.passed, found.certain, found.choice, found.outdated) == (True, True, BUSY, False)


def test_a_child_reports_that_it_passed_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], plugin: Path
) -> None:
    def crash(_plugin: Path, _isa: str) -> PrefetchChoice:
        raise MemoryError

    monkeypatch.setattr(selftest_child.kernels, "load_untested", lambda *_: "")
    monkeypatch.setattr(selftest_child, "_compare_all", lambda: "")
    monkeypatch.setattr(selftest_child, "_measured", crash)
    with pytest.raises(MemoryError):
        selftest_child.main(str(plugin), "avx2", "measure")
    assert "crashed" in msgspec.json.decode(capfd.readouterr().out, type=PrefetchChoice).reason


def test_a_busy_machine_is_measured_again_after_an_hour(
    children: Children, plugin: Path, cache: Path
) -> None:
    children.choice = BUSY
    assert self_test(plugin, "avx2").choice.prefetch == Prefetch()
    assert self_test(plugin, "avx2").choice == BUSY
    assert children.n == 1
    (file,) = cache.glob("selftest-*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"when": time.time() - 2 * 60 * 60}))
    children.choice = MEASURED
    assert self_test(plugin, "avx2").choice == MEASURED
    assert self_test(plugin, "avx2").choice == MEASURED
    assert children.n == 2


@pytest.mark.parametrize(
    ("gains", "noise", "is_chosen"),
    [
        ((0.9, 0.9), 0.0, False),
        ((1.0, 1.0), 0.02, False),
        ((1.0, 1.0), 0.3, False),
        ((1.0, 1.0), 1.0, False),
        ((1.02, 1.02), 0.0, False),  # hardly a gain
        ((1.3, 0.9), 0.0, False),  # slower for one size
        ((1.25, 1.25), 0.0, True),
        ((1.25, 1.25), 0.1, True),
    ],
)
def test_the_default_stays_unless_the_other_is_clearly_faster(
    gains: tuple[float, float], noise: float, is_chosen: bool
) -> None:
    rng = np.random.default_rng(5)
    rounds = [[gain * float(rng.lognormal(0, noise)) for gain in gains] for _ in range(30)]
    choice = faster_prefetch(rounds)
    assert not choice.reason
    assert (choice.prefetch == PREFETCHES[1]) == is_chosen
    assert choice.gain == pytest.approx(1.25 if is_chosen else 1.0, rel=noise + 1e-9)


@pytest.mark.parametrize("wins", [(), (64,), (32, 64), (16, 32, 64), (16,)])
def test_tile_registers_are_used_from_where_they_are_faster_on(wins: tuple[int, ...]) -> None:
    def seconds(n: int, wide_from: int) -> float:
        return 1.0 if not wide_from else 0.5 if n in wins else 1.5

    assert fewest_in_tiles(seconds) == (min(wins) if 64 in wins else 0)


def _no_home(_path: Path) -> Path:
    raise RuntimeError("no home directory")


def test_a_library_replaced_under_the_process(
    children: Children, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "_mapped_libraries", lambda _: {plugin.with_name("libggml.so (deleted)")})
    assert self_test(plugin, "avx2").passed
    assert self_test(plugin, "avx2").passed
    assert children.n == 2
