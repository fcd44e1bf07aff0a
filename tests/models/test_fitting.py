"""Which pairs a machine can hold."""

from __future__ import annotations

import pytest

from edgespec.cli.doctor_report import expected_bytes, fitting_pairs
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.footprint import PROCESS_BYTES, loaded_bytes, required_bytes
from edgespec.models.registry import Derivation, Entry, ModelShape, PairNames, Registry, load_registry
from edgespec.models.store import Stamp, Store
from edgespec.platform.machine import available_bytes
from pi_trees import PI_4_2GB, PI_4_4GB, PI_5_8GB, plant

SHAPE = ModelShape(cache=1000, heads=4, width=1000, vocabulary=1000)
GIB = 1 << 30


def entry(name: str, size: int | None, shape: ModelShape | None = SHAPE, **more: object) -> Entry:
    return Entry(name, size=size, shape=shape, quantization="Q8_0", **more)


def registry(pairs: dict[str, tuple[str, str]], *entries: Entry) -> Registry:
    return Registry(
        {entry.name: entry for entry in entries}, {name: PairNames(*pair) for name, pair in pairs.items()}
    )


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    """An empty store, and no models of the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Store(tmp_path / "models")


@pytest.mark.parametrize(
    ("pi", "too_large"),
    [(PI_4_2GB, {"pi-4gb", "qwen2.5-3b"}), (PI_4_4GB, {"qwen3-4b", "llama-3.1-8b"}), (PI_5_8GB, set())],
)
def test_boards(tmp_path, nothing_here, pi, too_large):
    known = load_registry()
    pairs = fitting_pairs(known, nothing_here, available_bytes(plant(tmp_path / "root", pi)))
    assert {row["pair"] for row in pairs} == set(known.pairs)
    assert [row["needed"] for row in pairs] == sorted(row["needed"] for row in pairs)
    assert too_large <= {row["pair"] for row in pairs if not row["fits"]}
    assert (pairs[0]["pair"], pairs[0]["fits"]) == ("pi-2gb", True), "the smallest fits on all boards"


@pytest.mark.parametrize("lacking", [0, 1])
def test_the_sum_of_both_and_the_process(nothing_here, lacking):
    both = registry({"p": ("a", "b")}, entry("a", 4000), entry("b", 500))
    needed = PROCESS_BYTES + loaded_bytes(4000, SHAPE, 2048) + loaded_bytes(500, SHAPE, 2048)
    assert fitting_pairs(both, nothing_here, needed - lacking) == [
        {"pair": "p", "target": "a", "draft": "b", "needed": needed, "fits": not lacking}
    ]


def test_what_is_not_known(nothing_here):
    found = registry(
        {"unknown": ("a", "bare"), "p": ("a", "a"), "sizeless": ("unsized", "a")},
        entry("a", 4000),
        entry("bare", 500, None),
        entry("unsized", None),
    )
    pairs = fitting_pairs(found, nothing_here, GIB)
    assert [(row["pair"], row["fits"]) for row in pairs] == [
        ("p", True),
        ("unknown", None),
        ("sizeless", None),
    ]
    assert [row["needed"] is None for row in pairs] == [False, True, True]
    assert [row["fits"] for row in fitting_pairs(found, nothing_here, None)] == [None] * 3


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
