"""A kept file: what is damaged or of another format is set aside, nobody's change is lost."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from edgespec.platform.kept import DamagedFileError, StateFile, parse_json, parse_struct


def number(data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        raise DamagedFileError("not a number") from None


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def file(tmp_path: Path, lines: list[str]) -> StateFile[int]:
    return StateFile(tmp_path / "folder" / "n", number, on_message=lines.append)


def one_more(found: int | None) -> bytes:
    return b"%d" % ((found or 0) + 1)


def test_nothing_is_there_and_nothing_is_made(file: StateFile[int], lines: list[str]) -> None:
    assert (file.read(), file.peek(), lines) == (None, None, [])
    assert not file.path.parent.exists()


def test_what_is_written_is_read(file: StateFile[int], lines: list[str]) -> None:
    for expected in (1, 2, 3):
        file.update(one_more)
        assert file.read() == file.peek() == expected
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert sorted(path.name for path in file.path.parent.iterdir()) == [".lock", "n"]
    assert lines == []


@pytest.mark.parametrize("by", ["read", "update"])
def test_what_makes_no_sense_is_set_aside(file: StateFile[int], lines: list[str], by: str) -> None:
    file.path.parent.mkdir()
    for i in range(3):
        file.path.write_bytes(b"x%d" % i)
        with pytest.raises(DamagedFileError):
            file.peek()
        if by == "read":
            assert file.read() is None
            assert not file.path.exists()
        else:
            file.update(one_more)
            assert file.read() == 1
    assert {path.name: path.read_bytes() for path in file.path.parent.glob("*.set-aside*")} == {
        "n.set-aside": b"x2"
    }
    assert lines == [f"{file.path}: not a number; set aside as n.set-aside"]


def test_a_failure_leaves_the_file_as_it_was(file: StateFile[int], monkeypatch: pytest.MonkeyPatch) -> None:
    file.update(one_more)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            file.update(one_more)
    assert file.read() == 1
    assert sorted(path.name for path in file.path.parent.iterdir()) == [".lock", file.path.name]


def test_no_change_is_lost(tmp_path: Path) -> None:
    def work() -> None:
        mine = StateFile(tmp_path / "n", number)
        for _ in range(50):
            mine.update(one_more)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert StateFile(tmp_path / "n", number).read() == 200


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": "f", "version": 2, "x": 1e999}', "not JSON"),
        (b'{"format": "f", "version": 2, "x": NaN}', "not JSON"),
        (b"[]", "not of f"),
        (b'{"format": "g", "version": 2}', "not of f"),
        (b'{"format": "f"}', "of format"),
        (b'{"format": "f", "version": true}', "of format"),
        (b'{"format": "f", "version": 1}', "of format 1, and this edgespec has 2"),
        (b'{"format": "f", "version": 3}', "of format 3"),
    ],
)
def test_json_that_makes_no_sense(data: bytes, reason: str) -> None:
    with pytest.raises(DamagedFileError, match=reason):
        parse_json(data, form="f", version=2)


def test_json() -> None:
    document = {"format": "f", "version": 2}
    assert parse_json(b'{"format": "f", "version": 2}', form="f", version=2) == document
    assert parse_struct(b"[1, 2]", list[int]) == [1, 2]
    for data in (b"{", b'["x"]', b'"\xff"'):
        with pytest.raises(DamagedFileError):
            parse_struct(data, list[int])
