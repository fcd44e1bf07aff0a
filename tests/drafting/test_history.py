"""The history on disk: round trips, kills, damage, several processes at once, and files of version 1."""

import functools
import os
import random
import resource
import signal
import sqlite3
import stat
import struct
import time
import traceback
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.drafting.history import MAX_TOKENS, History, HistoryInfo, HistoryUpdate, find_histories
from edgespec.errors import EdgespecError
from edgespec.platform.kept import HISTORY, owner_of

NAME = "qwen2-0123456789abcdef"
DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def messages():
    return []


@pytest.fixture
def history(messages):
    return History(NAME, on_message=messages.append)


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


# --- What goes in comes out -----------------------------------------------------------------------


def test_nothing_is_there_and_nothing_is_made(history, messages):
    assert history.load().dtype == np.int32
    assert (len(history.load()), history.texts(), find_histories()) == (0, [], [])
    assert not history.path.parent.exists()
    assert not messages


def test_round_trip(history, messages):
    assert history.append([1, 2, 3])
    assert history.append(np.array([0, 2**31 - 1], np.int32))
    assert history.append([])
    assert History("other-0123456789abcdef").append([9])
    assert history.load().tolist() == [1, 2, 3, -1, 0, 2**31 - 1, -1]
    assert history.load().flags.writeable
    assert [text.tolist() for text in history.texts()] == [[1, 2, 3], [0, 2**31 - 1]]
    assert find_histories() == [HistoryInfo("other-0123456789abcdef", 1, 1), HistoryInfo(NAME, 2, 5)]
    assert find_histories()[1].tokenizer == "qwen2"
    assert not messages


def test_only_the_user_may_read_it(history):
    umask = os.umask(0)
    try:
        history.append([1])
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


def test_a_long_document_keeps_its_end(history):
    history.max_tokens = 10
    history.append([1])
    history.append(list(range(100)))
    assert history.load().tolist() == [*range(91, 100), -1]


_documents = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=12), max_size=8)


@given(batches=st.lists(_documents, max_size=5), bound=st.integers(2, 60), capacity=st.integers(0, 80))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_newest_within_the_bound_are_kept(batches, bound, capacity, messages):
    stored = []
    history = History(NAME, max_tokens=bound, on_message=messages.append)
    history.path.unlink(missing_ok=True)
    for batch in batches:
        new = []
        for document in batch:
            end = document[-(bound - 1) :]
            if end and end not in stored + new:
                new.append(end)
        stored += new
        while new and sum(len(document) + 1 for document in stored) > bound:
            stored.pop(0)
        history.extend(batch)
    flat = []
    for document in reversed(stored):
        room = capacity - len(flat)
        if room < 2:
            break
        flat = [*document[-(room - 1) :], -1, *flat]
    assert history.load(capacity).tolist() == flat
    assert not messages


# --- Version 1, a format of our own ---------------------------------------------------------------


def version_1(*texts):
    data = b"EDGEHIST" + bytes(24)
    for text in texts:
        tokens = struct.pack(f"<{len(text)}i", *text)
        data += struct.pack("<III", len(text), zlib.crc32(tokens), 0) + tokens
    return data


@pytest.mark.parametrize("reads_first", [True, False])
@pytest.mark.parametrize(("torn", "kept"), [(0, 4), (7, 3)])
def test_files_of_version_1_are_taken_over_once(history, messages, reads_first, torn, kept):
    old = history.path.with_name(f"{NAME}.tokens")
    old.parent.mkdir(parents=True)
    whole = version_1(*DOCUMENTS)
    old.write_bytes(whole[: len(whole) - torn])
    other = old.with_name("gpt-2.5-0123456789abcdef.tokens")
    other.write_bytes(version_1([11]))
    if reads_first:
        assert documents(history.load()) == DOCUMENTS[:kept]
    assert history.append([12])
    assert documents(history.load()) == [*DOCUMENTS[:kept], [12]]
    assert documents(History("gpt-2.5-0123456789abcdef").load()) == [[11]]
    assert not old.exists()
    assert not other.exists()
    assert not messages


# --- Kills and damage -----------------------------------------------------------------------------


def killed_document(i):
    return np.arange(i, i + 20_000 + 7919 * i % 30_000)


def append_for_ever(history, first, report):
    for i in range(first, 1 << 20):
        assert history.append(killed_document(i))
        os.write(report, struct.pack("<i", i))


def test_a_killed_writer_loses_nothing_that_was_stored(messages):
    history = History(NAME, max_tokens=200_000, on_message=messages.append)
    next_document, moments = 0, random.Random(0)
    for _ in range(30):
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
        next_document = last + 1
    assert not messages
    assert not list(history.path.parent.glob("*.set-aside*"))


def test_a_flipped_bit_is_never_a_wrong_token(history):
    history.extend([list(range(1000 * i, 1000 * i + 300)) for i in range(20)])
    expected = documents(history.load())
    whole = history.path.read_bytes()
    places = random.Random(1)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        history.path.write_bytes(damaged)
        assert all(document in expected for document in documents(history.load()))
        assert history.append([11])
        assert documents(history.load())[-1] == [11]
        for path in history.path.parent.glob("*.set-aside"):
            path.unlink()


def foreign(path, *, version):
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE texts (a)")
        db.execute(f"PRAGMA user_version={version}")
    db.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(b"damaged" * 100), "file is not a database"),
        (functools.partial(foreign, version=3), "of format 3"),
        (functools.partial(foreign, version=0), "of format 0"),
    ],
)
def test_what_is_not_ours_is_set_aside_and_told_once(history, messages, spoil, reason):
    history.append([1])
    spoil(history.path)
    spoiled = history.path.read_bytes()
    for look in (history.texts, find_histories):
        with pytest.raises(EdgespecError, match=reason):
            look()
    assert len(history.load()) == 0
    assert history.append([2])
    assert history.load().tolist() == [2, -1]
    (line,) = messages
    assert line == f"{history.path}: {reason}; set aside as texts.db.set-aside"
    aside = history.path.with_name("texts.db.set-aside")
    assert aside.read_bytes() == spoiled
    assert owner_of(aside) is owner_of(history.path) is HISTORY


def test_a_folder_that_cannot_be_used_is_one_line(history, messages):
    history.path.parent.parent.mkdir(parents=True)
    history.path.parent.write_text("")
    assert len(history.load()) == 0
    assert not history.append([1])
    assert not history.append([1])
    (line,) = [line for line in messages if "cannot be written, nothing is added: " in line]
    assert str(history.path.parent) in line


def test_a_folder_in_the_place_of_the_file(history, messages):
    history.path.mkdir(parents=True)
    assert len(history.load()) == 0
    assert not history.append([1])
    assert len(messages) == 2
    assert str(history.path) in messages[0]


def test_a_full_disk_leaves_the_texts_as_they_were(history, messages):
    history.extend(DOCUMENTS)
    size = history.path.stat().st_size

    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5000, size + 5000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        assert not history.append(range(100_000))
        assert "nothing is added" in messages[0]

    assert exit_code(in_child(child)) == 0
    assert documents(history.load()) == DOCUMENTS
    assert history.append(range(100_000))


# --- Several processes ----------------------------------------------------------------------------


def written(writer, i):
    return [writer, i, *range(i % 50)]


def write_all(history, writer, n):
    for i in range(n):
        assert history.append(written(writer, i))


def read_until(history, stop):
    """Read while others write: whole documents only, and nothing to say."""
    history._say = pytest.fail
    while not stop.exists():
        for writer, i, *rest in documents(history.load(1 << 20)):
            assert [writer, i, *rest] == written(writer, i)


@pytest.mark.parametrize("max_tokens", [MAX_TOKENS, 1000])
def test_writers_at_once(tmp_path, messages, max_tokens):
    history = History(NAME, max_tokens=max_tokens, on_message=messages.append)
    n_writers, n = 4, 100
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
    assert sum(len(document) + 1 for document in kept) <= max_tokens
    assert len(kept) == n_writers * n or max_tokens == 1000
    assert not messages


def test_one_damaged_file_is_set_aside_once_by_many(history):
    history.append([1])
    history.path.write_bytes(b"damaged" * 100)
    pids = [in_child(functools.partial(history.append, [i])) for i in range(8)]
    assert [exit_code(pid) for pid in pids] == [0] * 8
    assert [path.name for path in history.path.parent.glob("*.set-aside*")] == ["texts.db.set-aside"]
    assert sorted(history.load().tolist()) == [-1] * 8 + list(range(8))
