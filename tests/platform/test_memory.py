"""Expected memory; and pages of mapped files: taken out of resident memory, and back when they are read."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from edgespec.llama.gguf import row_bytes
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kernel_timing import MatrixShape
from edgespec.llama.kernels import packing_growth
from edgespec.models import footprint
from edgespec.models.footprint import loaded_bytes, required_bytes, shape_of, weight_bytes
from edgespec.models.registry import load_registry
from edgespec.models.store import Store
from edgespec.platform.machine import MappedPages, peak_rss_bytes, total_bytes

N_BYTES = 8 << 20


@contextmanager
def mapped(path: Path, access: int = mmap.ACCESS_READ) -> Iterator[mmap.mmap]:
    """A mapping of the whole file, every page of it read."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=access) as mapping:
        assert sum(mapping[:: mmap.PAGESIZE])
        yield mapping


def resident_bytes(path: Path) -> list[int]:
    """The resident bytes of each mapping of `path` in this process."""
    found, sizes = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(f" {path}")
        elif found and line.startswith("Rss:"):
            sizes.append(int(line.split()[1]) * 1024)
    return sizes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a file, mapped (twice).gguf"
    path.write_bytes(os.urandom(N_BYTES))
    return path


def test_pages_go_and_come_back(file: Path) -> None:
    pages = MappedPages([file])
    with mapped(file) as mapping:
        assert resident_bytes(file) == [N_BYTES]
        assert pages.drop() == N_BYTES
        assert resident_bytes(file) == [0]
        assert mapping[:] == file.read_bytes()
        assert resident_bytes(file) == [N_BYTES]


def test_a_symlink_is_its_file(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    pages = MappedPages([link])
    with mapped(file):
        assert pages.drop() == N_BYTES


def test_other_mappings_stay(file: Path, tmp_path: Path) -> None:
    """Earlier ones, those of other files, and those that can be written to."""
    other = tmp_path / "other.gguf"
    other.write_bytes(os.urandom(N_BYTES))
    with mapped(file), mapped(other):
        pages = MappedPages([file])
        with mapped(file, mmap.ACCESS_COPY) as private:
            private[0:4] = b"mine"
            assert pages.drop() == 0
            assert private[0:4] == b"mine"
        assert resident_bytes(file) == resident_bytes(other) == [N_BYTES]


def test_the_machine(tmp_path: Path) -> None:
    total = total_bytes()
    assert total is not None
    assert total > peak_rss_bytes() > 1 << 20
    assert total_bytes(tmp_path) is None


# ---- expected memory ----


def test_a_header_and_its_shape(tiny_path: Path) -> None:
    header = check_model_file(tiny_path)
    shape = shape_of(header)
    assert (shape.heads, shape.width) == (header.n_head, header.n_ff + 2 * header.n_embd)
    for n_ctx in (1, 256, 300):
        assert shape.cache * -(-n_ctx // 256) * 256 == header.kv_bytes(n_ctx)
        assert required_bytes(header, n_ctx) == loaded_bytes(weight_bytes(header), shape, n_ctx)


def test_weights_that_are_larger_in_memory(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of one bit are packed as whole numbers: a file that fits may not fit once it is loaded."""
    one_bit, four_bits = (
        MatrixShape(kind, 1024, 2048) for kind in (GGMLQuantizationType.IQ1_S, GGMLQuantizationType.Q4_0)
    )
    in_file = row_bytes(one_bit.type, one_bit.columns) * one_bit.rows
    if not packing_growth([one_bit]):
        pytest.skip("the kernels are not built, or not for this processor")
    assert in_file / 2 < packing_growth([one_bit]) < 2 * in_file
    assert packing_growth([four_bits]) == 0
    header = check_model_file(tiny_path)
    monkeypatch.setattr(footprint, "multiplied", lambda _: [one_bit])
    assert weight_bytes(header) > header.file_bytes
    part = replace(header, file_bytes=header.file_bytes // 4)
    assert weight_bytes(part) - part.file_bytes < (weight_bytes(header) - header.file_bytes) / 2
    monkeypatch.setenv("EDGESPEC_KERNELS", "off")
    assert weight_bytes(header) == header.file_bytes


@pytest.mark.pair
def test_models_toml_says_what_the_headers_say(pair: tuple[Path, Path]) -> None:
    """Of all models that are here: those of the default pair are."""
    registry, store = load_registry(), Store.default()
    here = [entry for entry in registry.entries.values() if store.is_present(entry, registry)]
    assert len(here) >= len(pair)
    for entry in here:
        if not entry.path and not entry.converted:  # a user's own may say nothing; Whisper has another test
            header = check_model_file(store.file(entry))
            assert registry.shape(entry) == shape_of(header), entry.name
            assert entry.size in (None, header.file_bytes)
            assert header.n_ctx_train >= 2048, "the usual context"
