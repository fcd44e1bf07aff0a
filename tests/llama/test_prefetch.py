"""How weights are fetched ahead: which candidate is chosen, and what a measurement that fails leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.llama import prefetch as room
from edgespec.llama.kernel_timing import Prefetch
from edgespec.llama.kernels import Kernels
from edgespec.llama.prefetch import CANDIDATES, PrefetchChoice, choose, measure, unmeasured
from edgespec.platform.machine import cache_bytes, physical_cores
from fake_plugin import compile_library

DEFAULT, NEARER, *_, FAR = CANDIDATES
Rounds = list[dict[Prefetch, list[float]]]


def rounds(speed: Callable[[Prefetch, int], float], noise: float = 0.0, n: int = 30) -> Rounds:
    """Times of six products, each `speed(candidate, product)` times as fast as the default's, and noise."""
    rng = np.random.default_rng(5)
    return [
        {
            candidate: [
                (1 + product) * float(rng.lognormal(0, noise)) / speed(candidate, product)
                for product in range(6)
            ]
            for candidate in CANDIDATES
        }
        for _ in range(n)
    ]


def test_the_default_stays_where_nothing_is_faster() -> None:
    assert choose(rounds(lambda candidate, _: 1.0 if candidate == DEFAULT else 0.9)) == (DEFAULT, 1.0)


@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
def test_the_default_stays_where_all_is_noise(noise: float) -> None:
    assert choose(rounds(lambda *_: 1.0, noise)) == (DEFAULT, 1.0)


def test_a_gain_that_is_hardly_one_is_left() -> None:
    assert choose(rounds(lambda candidate, _: 1.02 if candidate == FAR else 1.0)) == (DEFAULT, 1.0)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_what_is_clearly_faster_is_chosen(noise: float) -> None:
    speeds = {FAR: 1.25, NEARER: 1.1}
    best, gain = choose(rounds(lambda candidate, _: speeds.get(candidate, 1.0), noise))
    assert best == FAR
    assert gain == pytest.approx(1.25, rel=noise + 1e-9)


def test_what_is_slower_for_one_product_is_not_chosen() -> None:
    by_product = rounds(lambda candidate, product: 1.0 if candidate == DEFAULT else 1.3 if product else 0.9)
    assert choose(by_product) == (DEFAULT, 1.0)


def test_the_machine_of_the_tests_can_be_measured(kernels: Kernels) -> None:
    """Whatever else it does meanwhile: then there is a reason."""
    assert kernels.plugin
    choice = measure(kernels.plugin.path, kernels.plugin.isa)
    assert choice.prefetch in CANDIDATES
    assert time.time() - choice.when < 60
    if choice.reason:
        assert any(word in choice.reason for word in ("other programs kept", "too slow", "of memory"))
        assert choice.prefetch == DEFAULT
    assert (choice.gain > 1) == (choice.prefetch != DEFAULT)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int other(void) { return 0; }", "install edgespec again"),
        (
            "#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { abort(); }",
            "exit code -6",
        ),
    ],
)
def test_a_plugin_that_cannot_be_timed(tmp_path: Path, source: str, reason: str) -> None:
    choice = measure(compile_library(source, tmp_path / "plugin.so"), "avx2")
    assert reason in choice.reason
    assert choice.prefetch == DEFAULT
    assert not choice.outdated


def test_a_measurement_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TIMEOUT_S", 2.0)
    source = "#include <unistd.h>\n__attribute__((constructor)) static void f(void) { for (;;) pause(); }"
    choice = measure(compile_library(source, tmp_path / "plugin.so"), "avx2")
    assert choice.reason == "it did not end within 2 s"


def test_only_what_was_not_measured_is_outdated_and_only_after_an_hour() -> None:
    assert PrefetchChoice().outdated  # never tried
    assert not unmeasured("busy").outdated
    assert PrefetchChoice(reason="busy", when=time.time() - 3601).outdated
    assert PrefetchChoice(reason="busy", when=time.time() + 3601).outdated  # a clock that was wrong
    assert not PrefetchChoice(reason="", when=0.0).outdated


def test_caches_are_counted_once(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, kind, size) in enumerate(
            [(1, "Data", "32K"), (1, "Instruction", "32K"), (2, "Unified", "1024K"), (3, "Unified", "32768K")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "type").write_text(f"{kind}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text("0-3\n" if level == 3 else f"{cpu}\n")
    (tmp_path / "cpu3" / "cache" / "index2" / "size").unlink()
    assert cache_bytes(tmp_path) == (4 * 64 + 3 * 1024 + 32768) << 10
    assert cache_bytes(tmp_path / "none") == 0
    assert physical_cores() >= 1
