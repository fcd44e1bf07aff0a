"""The history on disk: round trips, kills, damage, several processes at once, and its fingerprints."""

import errno
import functools
import os
import random
import resource
import signal
import stat
import struct
import tempfile
import time
import traceback
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.history import (
    MAX_TOKENS,
    History,
    HistoryUpdate,
    find_histories,
)
from edgespec.platform.kept import HISTORY

NAME = "qwen2-0123456789abcdef"
HEADER, HEAD = 32, 12  # bytes


@pytest.fixture
def messages():
    return []


@pytest.fixture
def history(tmp_path, messages):
    return History(NAME, root=tmp_path / "history", on_message=messages.append)


def documents(loaded):
    """The documents in what `load` returned."""
    ends = np.flatnonzero(loaded == -1)
    assert not len(loaded) or loaded[-1] == -1
    return [part.tolist()[bool(i) :] for i, part in enumerate(np.split(loaded, ends)[:-1])]


def in_child(function, *arguments):
    """Call a function in a forked process, which ends with 0 if it returns; the process's id."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - pytest must not go on in the child
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def header(*, magic=b"EDGEHIST", version=1, key=b"0123456789abcdef"):
    start = struct.pack("<8sI16s", magic, version, key)
    return start + struct.pack("<I", zlib.crc32(start))


# --- What goes in comes out -----------------------------------------------------------------------


def test_nothing_is_there_and_nothing_is_made(history, messages):
    assert history.load().dtype == np.int32
    assert len(history.load()) == 0
    assert not history.path.parent.exists()
    assert history.info().documents == 0
    assert history.info().modified is None
    assert history.clear() == []
    assert not messages


def test_round_trip(history, messages):
    assert history.append([1, 2, 3])
    assert history.append(np.array([0, 2**31 - 1], np.int32))
    assert history.append([])
    assert history.load().tolist() == [1, 2, 3, -1, 0, 2**31 - 1, -1]
    assert history.load().flags.writeable
    info = history.info()
    assert (info.path, info.tokenizer, info.documents, info.tokens) == (history.path, "qwen2", 2, 5)
    assert info.bytes == history.path.stat().st_size == HEADER + 2 * HEAD + 5 * 4
    assert abs(info.modified - time.time()) < 60
    assert info.problem == ""
    assert not messages


def test_the_format_is_what_the_docstring_says(history):
    history.append([7, 8])
    tokens = struct.pack("<2i", 7, 8)
    head = struct.pack("<II", 2, zlib.crc32(tokens))
    record = head + struct.pack("<I", zlib.crc32(head)) + tokens
    assert history.path.read_bytes() == header() + record


def test_modes(history):
    umask = os.umask(0)
    try:
        history.append([1])
        history.max_tokens = 4
        history.append([1, 2, 3])  # rewrites
    finally:
        os.umask(umask)
    assert stat.S_IMODE(history.path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in history.path.parent.iterdir()} == {0o600}


def test_the_newest_are_loaded_and_the_oldest_of_them_keeps_its_end(history):
    history.extend([[1, 2, 3], [4, 5], [6]])
    assert history.load(9).tolist() == [1, 2, 3, -1, 4, 5, -1, 6, -1]
    assert history.load(8).tolist() == [2, 3, -1, 4, 5, -1, 6, -1]
    assert history.load(6).tolist() == [4, 5, -1, 6, -1]
    assert history.load(4).tolist() == [5, -1, 6, -1]
    assert history.load(3).tolist() == [6, -1]
    assert [history.load(n).tolist() for n in (1, 0, -1)] == [[], [], []]


def test_an_id_the_model_does_not_have_ends_a_document(history):
    history.append([1, 99, 2])
    assert history.load(n_vocab=99).tolist() == [1, -1, 2, -1]
    assert history.load(n_vocab=100).tolist() == [1, 99, 2, -1]


def test_duplicates_are_not_stored_again(history):
    assert history.extend([[1, 2], [3], [1, 2]]) == HistoryUpdate(2, 3, 1)
    assert history.extend([[3], [4]]) == HistoryUpdate(1, 1, 1)
    assert history.load().tolist() == [1, 2, -1, 3, -1, 4, -1]
    before = history.path.stat()
    assert history.append([1, 2])
    assert history.path.stat() == before


@pytest.mark.parametrize("tokens", [[-1], [2**31], [1, -5, 2], np.array([2**40])])
def test_what_is_no_token_is_refused(history, tokens):
    with pytest.raises(ValueError, match="token ids"):
        history.append(tokens)
    assert not history.path.exists()


@pytest.mark.parametrize(
    "name", ["", "qwen2", "../x-0123456789abcdef", "q-0123456789abcdeF", "-1", f"{NAME}\n"]
)
def test_what_is_no_fingerprint_is_refused(name):
    with pytest.raises(ValueError, match="history"):
        History(name)


def test_it_is_bounded(history):
    history.max_tokens = 100
    for i in range(100):
        history.append([i] * 9)  # ten places each
        assert history.path.stat().st_size <= HEADER + 12 * (HEAD + 9 * 4)
        kept = documents(history.load())
        assert kept == [[j] * 9 for j in range(i + 1 - len(kept), i + 1)]
        assert len(kept) >= min(i + 1, 10)
    assert sorted(path.name for path in history.path.parent.iterdir()) == [f".{NAME}.lock", f"{NAME}.tokens"]


def test_a_long_document_keeps_its_end(history):
    history.max_tokens = 10
    history.append([1])
    history.append(list(range(100)))
    assert history.load().tolist() == [1, -1, *range(91, 100), -1]
    history.append(range(200))
    assert history.load().tolist() == [*range(191, 200), -1]


def test_one_extend_larger_than_the_bound(history):
    history.max_tokens = 10
    assert history.extend([[i, i] for i in range(20)]) == HistoryUpdate(20, 40, 0)
    assert documents(history.load()) == [[17, 17], [18, 18], [19, 19]]


def expected_load(stored, capacity):
    flat = []
    for document in reversed(stored):
        room = capacity - len(flat)
        if room < 2:
            break
        flat = [*document[-(room - 1) :], -1, *flat]
    return flat


_documents = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=12), max_size=8)


@given(
    batches=st.lists(_documents, max_size=5),
    bound=st.integers(2, 60),
    capacity=st.integers(0, 80),
    torn=st.binary(max_size=11),
)
@settings(max_examples=300, deadline=None)
def test_round_trips(batches, bound, capacity, torn):
    with tempfile.TemporaryDirectory() as directory:
        messages, stored = [], []
        history = History(NAME, root=Path(directory), max_tokens=bound, on_message=messages.append)
        for batch in batches:
            written = history.extend(batch).documents
            for document in batch:
                if document and document[-(bound - 1) :] not in stored:
                    stored.append(document[-(bound - 1) :])
            if sum(len(document) + 1 for document in stored) > bound * 5 // 4:
                room = bound
                for n, document in enumerate(reversed(stored)):  # noqa: B007
                    room -= len(document) + 1
                    if room < 0:
                        break
                stored = stored[-n:] if n else []
            if written:
                with history.path.open("ab") as file:
                    file.write(torn)  # shorter than a record's head: an unfinished one
        assert history.load(capacity).tolist() == expected_load(stored, capacity)
        assert not messages


@given(data=st.binary(max_size=200), with_header=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_survived(data, with_header):
    with tempfile.TemporaryDirectory() as directory:
        history = History(NAME, root=Path(directory))
        history.path.write_bytes(header() * with_header + data)
        history.info()
        assert len(history.load()) == 0
        assert history.append([1, 2])
        assert history.load().tolist() == [1, 2, -1]


# --- Kills ----------------------------------------------------------------------------------------

DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def test_truncated_anywhere_the_whole_records_stay(history, messages):
    ends = []
    for document in DOCUMENTS:
        history.append(document)
        ends.append(history.path.stat().st_size)
    whole = history.path.read_bytes()
    for size in range(len(whole) + 1):
        history.path.write_bytes(whole[:size])
        left = [document for document, end in zip(DOCUMENTS, ends, strict=True) if end <= size]
        assert documents(history.load()) == left
        assert history.info().documents == len(left)
        history.append([11])
        assert documents(history.load()) == [*left, [11]]
        history.append([12])
        assert documents(history.load()) == [*left, [11], [12]]
    assert not messages


def test_an_unfinished_record_of_zeros_or_wrong_bytes_is_cut_off(history, messages):
    """As after a power failure: the size is on the disk, the last bytes are not."""
    history.extend(DOCUMENTS)
    whole = history.path.read_bytes()
    for n in range(1, 60):
        history.path.write_bytes(whole + bytes(n))
        assert documents(history.load()) == DOCUMENTS
    history.append([11])
    torn = history.path.read_bytes()[:-4] + bytes(4)
    history.path.write_bytes(torn)
    assert documents(history.load()) == DOCUMENTS
    history.append([12])
    assert documents(history.load()) == [*DOCUMENTS, [12]]
    assert not messages


def killed_document(i):
    return np.arange(i, i + 20_000 + 7919 * i % 30_000)


def append_for_ever(history, first, report):
    for i in range(first, 1 << 20):
        assert history.append(killed_document(i))
        os.write(report, struct.pack("<i", i))


def test_a_killed_writer_loses_nothing_that_was_stored(tmp_path, messages):
    history = History(NAME, root=tmp_path, max_tokens=200_000, on_message=messages.append)
    next_document, moments = 0, random.Random(0)
    for _ in range(60):
        read, write = os.pipe()
        pid = in_child(append_for_ever, history, next_document, write)
        os.close(write)
        os.read(read, 4)
        time.sleep(moments.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
        reported = next_document
        while number := os.read(read, 4):
            reported = struct.unpack("<i", number)[0]
        os.close(read)
        kept = documents(history.load(1 << 20))
        last = kept[-1][0]
        assert last in (reported, reported + 1)  # killed between storing and reporting
        assert [document[0] for document in kept] == list(range(last + 1 - len(kept), last + 1))
        assert all(document == killed_document(document[0]).tolist() for document in kept)
        assert sum(map(len, kept)) > 100_000 or len(kept) == last + 1
        next_document = last + 1
    assert not messages
    assert not list(tmp_path.glob("*.set-aside*"))


def test_a_writer_killed_in_the_middle_of_a_write(history, messages, monkeypatch):
    """Each of the kernel's pages may be the last one written."""
    history.extend(DOCUMENTS)
    real = os.pwrite

    def dies(file, data, offset):
        real(file, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)

    def child(document):
        monkeypatch.setattr(os, "pwrite", dies)
        history.append(document)

    assert exit_code(in_child(child, range(100))) == -signal.SIGKILL
    assert history.path.stat().st_size > HEADER + 4 * HEAD + 4 * 10
    assert documents(history.load()) == DOCUMENTS
    history.max_tokens = 16
    assert exit_code(in_child(child, range(100))) == -signal.SIGKILL  # in the middle of rewriting
    assert documents(history.load()) == DOCUMENTS
    history.append(range(100))
    assert documents(history.load()) == [list(range(85, 100))]
    assert not list(history.path.parent.glob(".*.new"))
    assert not messages


# --- Damage ---------------------------------------------------------------------------------------


def test_a_flipped_bit_is_never_a_wrong_token(history, messages):
    history.extend(DOCUMENTS)
    whole = history.path.read_bytes()
    last = len(whole) - 4 * len(DOCUMENTS[-1])
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        history.path.write_bytes(damaged)
        messages.clear()
        history._file._said.clear()
        kept = documents(history.load())
        aside = list(history.path.parent.glob("*.set-aside*"))
        if bit // 8 >= last:  # cannot be told from an unfinished record
            assert kept == DOCUMENTS[:-1]
            assert not messages
            assert not aside
        else:
            assert kept == []
            assert [path.read_bytes() for path in aside] == [bytes(damaged)]
            assert len(messages) == 1
            assert "\n" not in messages[0]
            assert f"set aside as {aside[0].name}" in messages[0]
        assert history.append([11])
        assert documents(history.load()) == [*kept, [11]]
        for path in aside:
            path.unlink()


def set_aside_names(history):
    return sorted(path.name for path in history.path.parent.glob("*.set-aside*"))


def test_what_was_set_aside_last_is_kept(history, messages):
    history.append([1])
    for n in range(3):
        history.path.write_bytes(b"another thing %d" % n)
        history._file._said.clear()
        assert "the next run sets it aside" in history.info().problem
        assert set_aside_names(history) == [f"{NAME}.tokens.set-aside"] * min(n, 1)
        assert history.append([n])
        assert history.load().tolist() == [n, -1]
    assert len(messages) == 3
    contents = [path.read_bytes() for path in history.info().set_aside]
    assert contents == [b"another thing 2"]
    assert [found.fingerprint for found in find_histories(history.path.parent)] == [NAME]
    history.path.unlink()
    assert [found.fingerprint for found in find_histories(history.path.parent)] == [NAME]


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (header(magic=b"EDGEHISX"), "not a history"),
        (b"short", "not a history"),
        (header(key=b"fedcba9876543210"), "of another tokenizer (fedcba9876543210)"),
        (header(version=0), "format (0)"),
        (header(version=2)[:-1] + b"?", "its header is wrong"),
    ],
)
def test_what_is_not_ours_is_set_aside(history, messages, start, reason):
    history.path.parent.mkdir()
    history.path.write_bytes(start)
    assert len(history.load()) == 0
    assert [reason in line for line in messages] == [True]
    assert set_aside_names(history) == [f"{NAME}.tokens.set-aside"]
    assert not history.path.exists()


def test_a_directory_that_cannot_be_used_is_one_line(tmp_path, messages):
    (tmp_path / "file").write_text("")
    history = History(NAME, root=tmp_path / "file" / "history", on_message=messages.append)
    assert len(history.load()) == 0
    assert len(messages) == 1
    assert "the history cannot be read: " in messages[0]
    assert not history.append([1])
    assert not history.append([1])
    assert len(messages) == 2
    assert "the history cannot be written, nothing is added: " in messages[1]
    assert "Not a directory" in history.info().problem


def test_a_directory_in_the_place_of_the_file(history, messages):
    history.path.mkdir(parents=True)
    assert len(history.load()) == 0
    assert not history.append([1])
    assert len(messages) == 2
    assert str(history.path) in messages[0]


def as_nobody(function, *arguments):
    """Call in a child that is not root: root may read and write everything."""
    if os.geteuid() == 0:
        os.setuid(65534)
    function(*arguments)


@pytest.mark.parametrize("readable", [True, False])
def test_permissions_are_one_line(messages, readable):
    with tempfile.TemporaryDirectory() as directory:  # below tmp_path, nobody sees anything
        Path(directory).chmod(0o755)
        history = History(NAME, root=Path(directory) / "history", on_message=messages.append)
        history.append([1])

        def child():
            assert history.load().tolist() == ([1, -1] if readable else [])
            assert len(messages) == (0 if readable else 1)
            assert not history.append([2])
            assert not history.append([3])
            assert len(messages) == (1 if readable else 2)
            assert "Permission denied" in messages[-1]

        history.path.chmod(0o444 if readable else 0)
        history.path.parent.chmod(0o555)
        (history.path.parent / f".{NAME}.lock").chmod(0)
        assert exit_code(in_child(as_nobody, child)) == 0
        history.path.parent.chmod(0o700)


def test_a_damaged_file_that_cannot_be_renamed_is_not_written_to(history, messages, monkeypatch):
    history.append([1])
    history.path.write_bytes(b"damaged")
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no", "x"))
    )
    assert len(history.load()) == 0
    assert not history.append([2])
    assert history.path.read_bytes() == b"damaged"
    assert len(messages) == 2


@pytest.mark.parametrize("rewriting", [False, True])
@pytest.mark.parametrize("fits", [0, 30])
def test_a_full_disk_leaves_the_file_as_it_was(history, messages, monkeypatch, rewriting, fits):
    history.extend(DOCUMENTS)
    before = history.path.read_bytes()
    real, left = os.pwrite, fits

    def full(file, data, offset):
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n, left = real(file, data[:left], offset), 0
        return n

    monkeypatch.setattr(os, "pwrite", full)
    if rewriting:
        history.max_tokens = 16
    assert not history.append(range(15))
    assert history.path.read_bytes() == before
    assert len(messages) == 1
    assert "No space left on device" in messages[0]
    assert sorted(path.name for path in history.path.parent.iterdir()) == [f".{NAME}.lock", history.path.name]
    monkeypatch.undo()
    assert history.append(range(15))


def test_a_real_limit_leaves_the_file_as_it_was(history):
    history.extend(DOCUMENTS)
    before = history.path.read_bytes()

    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, len(before) + 50))
        assert not history.append(range(1000))

    assert exit_code(in_child(child)) == 0
    assert history.path.read_bytes() == before


def test_the_first_write_may_fail_too(history, messages, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert not history.append([1])
    monkeypatch.undo()
    assert len(history.load()) == 0
    assert history.append([1])
    assert history.load().tolist() == [1, -1]
    assert len(messages) == 1


# --- Several processes ----------------------------------------------------------------------------


def written(writer, i):
    return [writer, i, *range(i % 50)]


def write_all(history, writer, n):
    for i in range(n):
        assert history.append(written(writer, i))


def read_until(history, stop):
    """Read while others write: whole documents only, and nothing to say."""
    history._file._on_message = pytest.fail
    while not stop.exists():
        for writer, i, *rest in documents(history.load(1 << 20)):
            assert [writer, i, *rest] == written(writer, i)


@pytest.mark.parametrize("max_tokens", [MAX_TOKENS, 1000])
def test_writers_at_once(tmp_path, messages, max_tokens):
    history = History(NAME, root=tmp_path / "history", max_tokens=max_tokens, on_message=messages.append)
    n_writers, n = 4, 200
    readers = [in_child(read_until, history, tmp_path / "stop") for _ in range(2)]
    writers = [in_child(write_all, history, writer, n) for writer in range(n_writers)]
    ended = [exit_code(pid) for pid in writers]
    (tmp_path / "stop").touch()
    assert [*ended, *(exit_code(pid) for pid in readers)] == [0] * (n_writers + 2)
    kept = documents(history.load(1 << 20))
    for writer in range(n_writers):
        # What is kept is the end of the one order in which all wrote.
        mine = [i for w, i, *_ in kept if w == writer]
        assert mine == list(range(n - len(mine), n))
    if max_tokens == MAX_TOKENS:
        assert len(kept) == n_writers * n
    places = sum(len(document) + 1 for document in kept)
    oldest = max(map(len, kept)) + 1
    assert min(max_tokens, places) - oldest <= places <= max_tokens * 5 // 4
    assert not messages
    assert not list(history.path.parent.glob("*.set-aside*"))


def test_one_damaged_file_is_set_aside_once_by_many(history):
    history.append([1])
    history.path.write_bytes(b"damaged")
    pids = [in_child(functools.partial(history.append, [i])) for i in range(8)]
    assert [exit_code(pid) for pid in pids] == [0] * 8
    assert set_aside_names(history) == [f"{NAME}.tokens.set-aside"]
    assert sorted(history.load().tolist()) == [-1] * 8 + list(range(8))


def test_a_reader_sets_nothing_aside_while_another_process_writes(history):
    """What looks damaged may be half of one write and half of another."""
    history.append([1])
    whole = history.path.read_bytes()
    history.path.write_bytes(b"damaged")

    begin, go = os.pipe()

    def child():
        os.read(begin, 1)
        assert history.load().tolist() == [1, -1]

    pid = in_child(child)  # before the lock is taken: a forked process shares what is open
    with history._locked():
        os.write(go, b"!")
        time.sleep(0.2)
        assert set_aside_names(history) == []
        history.path.write_bytes(whole)
    assert exit_code(pid) == 0
    assert set_aside_names(history) == []
    os.close(begin)
    os.close(go)


# --- Forgetting -----------------------------------------------------------------------------------


def test_clear(history):
    history.append([1])
    history.path.write_bytes(b"damaged")
    history.append([2])
    history.path.with_name(f".{history.path.name}.new").touch()  # of a killed process
    history.path.with_name("notes.txt").touch()
    aside = history.path.with_name(f"{NAME}.tokens.set-aside")
    assert history.clear()[:2] == [history.path, aside]
    left = sorted(path.name for path in history.path.parent.iterdir())
    assert left == [f".{NAME}.lock", "notes.txt"]
    assert history.clear() == []
    assert find_histories(history.path.parent) == []
    history.append([3])
    assert history.load().tolist() == [3, -1]


def test_the_directory_is_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert HISTORY.path() == tmp_path / "edgespec" / "history"
    assert History(NAME).path == HISTORY.path() / f"{NAME}.tokens"
    assert find_histories() == []
    History(NAME).append([1])
    assert [found.path for found in find_histories()] == [HISTORY.path() / f"{NAME}.tokens"]
