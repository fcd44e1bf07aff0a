"""Files of results: refused before the work, whole or unchanged."""

import errno
import os
import stat
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform import files


def test_a_symlink_stays_one_and_a_file_keeps_its_mode(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    files.write_file(tmp_path / "link", b"new", field="csv")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def fail_with(error):
    def fail(_handle):
        raise error

    return fail


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_costs_nothing(tmp_path, monkeypatch, there):
    file = tmp_path / "a.csv"
    if there:
        file.write_bytes(b"old")
    before = list(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", fail_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(EdgespecError, match=r"csv .*a\.csv: cannot be written: No space left"):
        files.write_file(file, b"new", field="csv")
    assert list(tmp_path.iterdir()) == before
    assert not there or file.read_bytes() == b"old"


@pytest.mark.parametrize("room_for", [0, 1, 2])
def test_files_that_belong_together_are_replaced_together(tmp_path, monkeypatch, room_for):
    """A full disk changes none of them, however many find room."""
    new, file, *others = (tmp_path / name for name in ("new", "file", "record", "list"))
    for path in (new, file, *others):
        path.write_text(f"old {path.name}")
    synced, fsync = [], os.fsync

    def fill(handle):
        synced.append(handle)
        return fsync(handle) if len(synced) <= room_for else fail_with(OSError(errno.ENOSPC, "full"))(handle)

    monkeypatch.setattr(os, "fsync", fill)
    changes = [(other, "new") for other in others]
    if room_for == 2:
        files.replace_together(new, file, *changes)
        assert [path.read_text() for path in (file, *others)] == ["old new", "new", "new"]
    else:
        with pytest.raises(OSError, match="full"):
            files.replace_together(new, file, *changes)
        assert {path.read_text() for path in tmp_path.iterdir()} == {
            f"old {path.name}" for path in (new, file, *others)
        }
    assert len(list(tmp_path.iterdir())) == (3 if room_for == 2 else 4)


def test_a_folder_that_files_can_be_written_in(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "new", tmp_path / "a/b/c"):
        files.check_folder(path, "out")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    for path, words in {
        tmp_path / "file": "Not a directory",
        tmp_path / "file/a": "Not a directory",
        Path("/proc/a"): "",
    }.items():
        with pytest.raises(UsageError, match=rf"^out {path}: cannot be written: .*{words}"):
            files.check_folder(path, "out")


def test_interrupted(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        files.write_file(tmp_path / "a.csv", b"new", field="csv")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.csv", b"old")]


def refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    return {
        tmp_path / "missing/a.csv": "No such file",
        tmp_path / "file/a.csv": "Not a directory",
        tmp_path / "folder": "Is a directory",
        tmp_path / "loop": "cannot be written",
        tmp_path / ("x" * 300): "too long",
        Path("/proc/a.csv"): "/proc/a.csv",  # read-only, for root too
    }


def test_what_cannot_be_written_is_said_in_a_line_before_and_after(tmp_path):
    for path, words in refused(tmp_path).items():
        for call in (
            lambda path=path: files.check_writable(path, "report"),
            lambda path=path: files.write_file(path, b"new", field="report"),
        ):
            with pytest.raises(EdgespecError) as caught:
                call()
            line = str(caught.value)
            assert line.startswith(f"report {path}: cannot be written: ")
            assert words in line
            assert "\n" not in line
    with pytest.raises(UsageError):
        files.check_writable(tmp_path / "missing/a.csv", "report")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_and_a_read_only_file(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"old")
    (tmp_path / "a.csv").chmod(0o444)
    with pytest.raises(UsageError, match="Permission denied"):
        files.check_writable(tmp_path / "a.csv", "csv")
    with pytest.raises(EdgespecError, match="Permission denied"):
        files.write_file(tmp_path / "a.csv", b"new", field="csv")
    tmp_path.chmod(0o555)
    with pytest.raises(UsageError, match="Permission denied"):
        files.check_writable(tmp_path / "b.csv", "csv")
    tmp_path.chmod(0o755)


def test_the_check_leaves_nothing_behind(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    stamp = (tmp_path / "old").stat().st_mtime_ns
    for path in (tmp_path / "old", tmp_path / "new", Path("/dev/null")):
        files.check_writable(path, "csv")
    assert [file.name for file in tmp_path.iterdir()] == ["old"]
    assert ((tmp_path / "old").read_bytes(), (tmp_path / "old").stat().st_mtime_ns) == (b"old", stamp)


def test_a_text_file_is_read_or_refused_in_the_name_of_its_option(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf\xc3\xbcber\r\n")
    assert files.read_text_file(file, "text") == "über\n"
    file.write_bytes(b"\xff\xfe")
    for path, why in ((file, "not UTF-8 text"), (tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(UsageError, match=why) as refused:
            files.read_text_file(path, "text")
        assert (refused.value.field, refused.value.value) == ("text", path)
