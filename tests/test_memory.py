"""Pages of mapped files: taken out of resident memory, and back when they are read."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgespec import weights
from edgespec.memory import MappedPages, peak_rss_bytes, total_bytes
from edgespec.weights import Model

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


def test_nothing_mapped(tmp_path: Path) -> None:
    assert MappedPages([tmp_path / "none.gguf"]).drop() == 0


def test_what_a_packed_model_no_longer_needs(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped at the start, then a step at a time once something was packed, and at the end."""
    drops: list[float] = []
    progress = 0.0

    class Pages:
        def __init__(self, files: tuple[Path, ...]) -> None:
            assert files == (tiny_path,)

        def drop(self) -> None:
            drops.append(progress)

    class Packing:
        on = True

        def begun(self) -> bool:
            return progress >= 0.2

    with Model(tiny_path) as model:
        monkeypatch.setattr(weights, "MappedPages", Pages)
        monkeypatch.setattr(weights, "_DROP_EVERY", model.header.file_bytes // 4)
        drop = weights._page_dropper(tiny_path, model.header, Packing())  # type: ignore[arg-type]
    for progress in (0.0, 0.1, 0.3, 0.4, 0.5, 0.95, 0.97, 1.0):
        drop(progress)
    assert drops == [0.0, 0.3, 0.95, 1.0]


def test_the_machine(tmp_path: Path) -> None:
    total = total_bytes()
    assert total is not None
    assert total > peak_rss_bytes() > 1 << 20
    assert total_bytes(tmp_path) is None
