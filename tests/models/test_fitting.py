"""Which pairs a machine can hold, and which of them is the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.doctor_report import PairFit, ReadingSpeed, best_pair, expected_bytes, fitting_pairs
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.entries import Derivation, Entry, ModelShape, PairNames, Registry
from edgespec.models.footprint import PROCESS_BYTES, loaded_bytes, required_bytes
from edgespec.models.registry import load_registry
from edgespec.models.store import Stamp, Store
from pi_trees import PI_4_2GB, PI_4_4GB, PI_5_8GB, plant

SHAPE = ModelShape(cache=1000, heads=4, width=1000, vocabulary=1000)
GIB = 1 << 30


def entry(name: str, size: int | None, shape: ModelShape | None = SHAPE, **more: object) -> Entry:
    return Entry(name, size=size, shape=shape, quantization="Q8_0", **more)


def registry(pairs: dict[str, tuple[str, str]], *entries: Entry) -> Registry:
    return Registry(
        {entry.name: entry for entry in entries}, {name: PairNames(*pair) for name, pair in pairs.items()}
    )


def memory(root: Path, total: int, available: int) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total >> 10} kB\nMemAvailable: {available + 1023 >> 10} kB\n"
    )
    return root


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    """An empty store, and no models of the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Store(tmp_path / "models")


@pytest.mark.parametrize(
    ("pi", "best", "too_large"),
    [
        (PI_4_2GB, "pi-2gb", {"pi-4gb", "qwen2.5-3b"}),
        (PI_4_4GB, "pi-4gb", {"qwen3-4b", "llama-3.1-8b"}),
        (PI_5_8GB, "qwen3-4b", set()),
    ],
)
def test_boards(tmp_path, nothing_here, pi, best, too_large):
    root = plant(tmp_path / "root", pi)
    known = load_registry()
    pairs = fitting_pairs(known, nothing_here, root)
    assert best_pair(pairs, known, root) == best
    assert {fit.pair for fit in pairs} == set(known.pairs)
    assert [fit.needed for fit in pairs] == sorted(fit.needed for fit in pairs)
    assert too_large <= {fit.pair for fit in pairs if not fit.fits}
    assert pairs[0].pair == "pi-2gb"
    assert pairs[0].fits, "the smallest fits on all boards"


def test_the_sum_of_both_and_the_process(tmp_path, nothing_here):
    both = registry({"p": ("a", "b")}, entry("a", 4000), entry("b", 500))
    needed = PROCESS_BYTES + loaded_bytes(4000, SHAPE, 2048) + loaded_bytes(500, SHAPE, 2048)
    enough, short = needed, needed - 1024
    (fit,) = fitting_pairs(both, nothing_here, memory(tmp_path / "enough", GIB, enough))
    assert fit == PairFit("p", "a", "b", needed, fits=True)
    (fit,) = fitting_pairs(both, nothing_here, memory(tmp_path / "short", GIB, short))
    assert fit == PairFit("p", "a", "b", needed, fits=False)


def test_what_is_not_known(tmp_path, nothing_here):
    found = registry(
        {"unknown": ("a", "bare"), "p": ("a", "a"), "sizeless": ("unsized", "a")},
        entry("a", 4000),
        entry("bare", 500, None),
        entry("unsized", None),
    )
    pairs = fitting_pairs(found, nothing_here, memory(tmp_path / "root", GIB, GIB))
    assert [(fit.pair, fit.fits) for fit in pairs] == [("p", True), ("unknown", None), ("sizeless", None)]
    assert [fit.needed is None for fit in pairs] == [False, True, True]
    silent = tmp_path / "silent"
    pairs = fitting_pairs(found, nothing_here, silent)
    assert [fit.fits for fit in pairs] == [None] * 3
    assert best_pair(pairs, found, silent) is None


def test_a_derived_model_is_about_as_large_as_its_bits_say(nothing_here):
    base = entry("base", 8_600_000)
    derived = Entry("derived", derived=Derivation("base", "q4_0", pure=True))
    found = registry({}, base, derived)
    assert expected_bytes(derived, found, nothing_here) == loaded_bytes(4_600_000, SHAPE, 2048)
    strange = Entry("strange", derived=Derivation("base", "q9_9"))
    assert expected_bytes(strange, registry({}, base, strange), nothing_here) is None


def test_the_header_of_a_file_that_is_here_wins(tmp_path, nothing_here, tiny_path):
    mine = entry("mine", tiny_path.stat().st_size, path=tiny_path)
    header = check_model_file(tiny_path)
    n_ctx = min(2048, header.n_ctx_train)
    assert expected_bytes(mine, registry({}, mine), nothing_here) == required_bytes(header, n_ctx)
    pulled = entry("pulled", 9)
    nothing_here.root.mkdir(exist_ok=True)
    nothing_here.file(pulled).write_bytes(b"no model!")
    nothing_here.write_stamp(pulled, Stamp("a" * 64, 9, "test"))
    assert nothing_here.is_present(pulled, registry({}, pulled))
    assert expected_bytes(pulled, registry({}, pulled), nothing_here) == loaded_bytes(9, SHAPE, 2048)


def fit(name: str, needed: int, *, fits: bool = True, speed: float | None = None) -> PairFit:
    return PairFit(name, "a", "a", needed, fits, speed)


@pytest.mark.parametrize(
    ("pairs", "best"),
    [
        ([], None),
        ([fit("small", GIB), fit("large", 2 * GIB)], "large"),
        ([fit("small", GIB), fit("large", 2 * GIB, fits=False)], "small"),
        ([fit("small", GIB), fit("all", 4 * GIB)], "small"),  # nothing would be left
        ([fit("all", 4 * GIB)], None),
        ([fit("small", 2 * GIB), fit("large", 2 * GIB + (32 << 20))], "large"),
        ([fit("large", 2 * GIB), fit("small", 2 * GIB + (32 << 20))], "large"),  # the last in the registry
        ([fit("small", GIB, speed=9), fit("large", 2 * GIB, speed=4)], "small"),  # the larger is too slow
        ([fit("small", GIB, speed=20), fit("large", 2 * GIB, speed=8)], "large"),
        ([fit("small", GIB, speed=5), fit("large", 2 * GIB, speed=2)], "small"),  # none is readable
    ],
)
def test_the_best(tmp_path, pairs, best):
    known = registry(dict.fromkeys(("small", "large", "all"), ("a", "a")), entry("a", 1))
    assert best_pair(pairs, known, memory(tmp_path / "root", 4 * GIB, 4 * GIB)) == best


def test_the_speed_of_a_pair_is_that_of_reading_its_target(tmp_path, nothing_here):
    known = registry(
        {"plain": ("a", "a"), "experts": ("b", "a")}, entry("a", GIB), entry("b", 10 * GIB, params="30B-A3B")
    )
    found = fitting_pairs(known, nothing_here, memory(tmp_path / "root", GIB, GIB), ReadingSpeed(10.0 * GIB))
    assert {fit.pair: fit.tokens_per_s for fit in found} == {"plain": 10.0, "experts": 10.0}
