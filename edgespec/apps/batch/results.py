"""Results of a batch: a journal on disk that survives the end of the process at any moment, or a pipe.

    OUT.partial     first line: the batch; locked while a process works on it
    OUT             the results

Results in input order are collected in OUT.partial, and OUT is made of them at the end; results as they come
go to OUT. OUT.partial is removed last: while it exists, the batch is not finished.

A result is one write at the end of a file, so a killed process leaves at most one torn line, the last: it is
dropped, and its request is answered again. The file is synced once a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from filelock import lock_descriptor

from edgespec.errors import EdgespecError, OutputUnread, UsageError
from edgespec.platform.closing import Closing
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import write_all

# ---- requests and answers of a batch, and lines of its output ----


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to a request, as the server would send it."""

    status: int
    body: bytes
    """JSON: a completion, or {"error": ...}."""

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens ended a text of it."""
        choices = msgspec.json.decode(self.body).get("choices", [])
        return any(choice.get("finish_reason") == "length" for choice in choices)

    @classmethod
    def error(cls, status: int, body: dict[str, Any]) -> BatchAnswer:
        """Return an answer with an error; `body` as from `ApiError.body`."""
        return cls(status, msgspec.json.encode(body))


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input: its id, and the request to be answered."""

    place: int
    """Place of its result in the output, from 0; blank lines do not count."""
    custom_id: str
    url: str = ""
    """Route of the server; "": a plain prompt, whose fields are in `body`."""
    body: dict[str, Any] | None = None
    refused: BatchAnswer | None = None
    """Error of a line that is no request."""


def output_line(request: BatchRequest, answer: BatchAnswer, key: str) -> bytes:
    """Return a result as a line in OpenAI's batch format, with its newline; `key` names the batch."""
    line = {
        "id": f"batch_req_{key}_{request.place}",
        "custom_id": request.custom_id,
        "response": {
            "status_code": answer.status,
            "request_id": f"req_{key}_{request.place}",
            "body": msgspec.Raw(answer.body),
        },
        "error": None,
    }
    return msgspec.json.encode(line) + b"\n"


class _OutputStatus(msgspec.Struct):
    status_code: int


class _OutputLine(msgspec.Struct):
    id: str
    response: _OutputStatus


def read_output_line(line: bytes, key: str) -> tuple[int, bool] | None:
    """Return the place of a line of `output_line`, and whether it failed; None: not of this batch."""
    try:
        found = msgspec.json.decode(line, type=_OutputLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    prefix, _, place = found.id.rpartition("_")
    if prefix != f"batch_req_{key}" or not (place.isascii() and place.isdecimal()):
        return None
    return int(place), found.response.status_code != 200


def answer_text(line: bytes) -> bytes:
    """Return the answer of a line of `output_line` as text with a newline; if it failed, the reason."""
    body = json.loads(line)["response"]["body"]
    if error := body.get("error"):
        return f"[failed: {error['message']}]\n".encode()
    text = "".join(one.get("text") or one.get("message", {}).get("content") or "" for one in body["choices"])
    return text.strip("\n").encode(errors="replace") + b"\n"


# ---- where they are written ----


class FailedLine(NamedTuple):
    """A request that could not be answered."""

    place: int
    custom_id: str
    reason: str


_MOST_NAMED = 5


def with_failed(failed: list[FailedLine], place: int, line: bytes) -> list[FailedLine]:
    """Return the first of `failed` and of the failed result at `place`, a line of `output_line`."""
    if len(failed) == _MOST_NAMED and place > failed[-1].place:
        return failed
    found = json.loads(line)
    error = found["response"]["body"].get("error") or {}
    new = FailedLine(place, found["custom_id"], str(error.get("message", "no reason is known")))
    return sorted([*failed, new])[:_MOST_NAMED]


FORMAT = "edgespec batch"
VERSION = 1
_BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()
_LONGEST_FIRST_LINE = 1 << 20

_SYNC_S = 1.0  # most work lost when the machine loses power
_ABSENT = -1


class Journal(Closing):
    """The results of one batch, those of earlier runs included. A context manager."""

    def __init__(
        self,
        out: Path,
        belongs_to: Mapping[str, Any],
        n_requests: int,
        *,
        in_order: bool,
        as_text: bool = False,
        restart: bool = False,
        on_message: MessageFn = silent,
    ) -> None:
        """Begin, or resume an earlier run; with `restart`, delete its results. `as_text`: OUT is no JSON.

        `belongs_to` must be the same for a run to resume: "input_sha256", "target_sha256", and options by
        their fields' names. Raises UsageError where OUT is something else or belongs to something else,
        EdgespecError where another process writes it, OSError.
        """
        self.out = out.resolve()
        self.partial = self.out.with_name(f"{self.out.name}.partial")
        self.in_order = in_order
        self._as_text = as_text
        self.key = str(belongs_to["input_sha256"])[:16]
        self.n_done = self.n_failed = 0
        self.n_cut = 0
        """Answers of this run that a limit of tokens cut."""
        self.failed: list[FailedLine] = []
        """The first that failed, in the input's order."""
        self._on_message = on_message
        self._places = array("q", [_ABSENT]) * n_requests  # where each result begins in the results' file
        self._synced = time.monotonic()
        self._dirty = False
        self._results = _ABSENT
        self._lock = _locked(self.partial, self.out)
        try:
            if restart:
                os.ftruncate(self._lock, 0)
                for file in (self.out, self._new):
                    file.unlink(missing_ok=True)
            self._open({"format": FORMAT, "version": VERSION, "in_order": in_order, **belongs_to})
        except BaseException:
            with contextlib.suppress(OSError):
                if os.fstat(self._lock).st_size == 0:  # nothing was begun
                    self.partial.unlink(missing_ok=True)
            self.close()
            raise

    @property
    def _new(self) -> Path:
        return self.out.with_name(f"{self.out.name}.partial.new")

    @property
    def complete(self) -> bool:
        """Whether every request has its result."""
        return self.n_done == len(self._places)

    def has(self, request: BatchRequest) -> bool:
        """Whether the request has its result."""
        return self._places[request.place] != _ABSENT

    def add(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Write a result. Raises EdgespecError; the file is then unchanged."""
        line = output_line(request, answer, self.key)
        self._append(self._results, line)
        self._places[request.place] = self._end
        self._end += len(line)
        self.n_done += 1
        self.n_cut += answer.is_cut
        if answer.status != 200:
            self.n_failed += 1
            self.failed = with_failed(self.failed, request.place, line)
        self._dirty = True

    def sync(self, *, now: bool = False) -> None:
        """Sync the results to disk, at once or if the last time was a second ago. Raises EdgespecError."""
        if self._dirty and (now or time.monotonic() >= self._synced + _SYNC_S):
            with self._telling():
                os.fsync(self._results)
            self._synced, self._dirty = time.monotonic(), False

    def finish(self) -> None:
        """Complete OUT; every request must have its result. Raises EdgespecError."""
        self.sync(now=True)
        with self._telling():
            if self.in_order:
                self._make_out()
            self.partial.unlink()
            _sync_folder(self.out.parent)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        files, self._lock, self._results = {self._lock, self._results}, _ABSENT, _ABSENT
        for file in files - {_ABSENT}:
            os.close(file)

    # ---- resuming ----

    def _open(self, header: dict[str, Any]) -> None:
        data = json.dumps(header).encode() + b"\n"
        found = _first_line(self._lock)
        if not found.endswith(b"\n") and data.startswith(found[: len(_BEGINNING)]):  # new, or never begun
            self._refuse_existing()
            os.ftruncate(self._lock, 0)
            self._end = 0
            self._append(self._lock, data)
            with self._telling():
                os.fsync(self._lock)
            found = data
            if not self.in_order:
                os.close(os.open(self.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            _sync_folder(self.out.parent)
        else:
            self._check(found, header)
        if self.in_order:
            self._results, self._end = self._lock, len(found)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._results, self._end = os.open(self.out, flags, 0o666), 0
        self._recover()
        if self.in_order and not self.complete:
            self._refuse_existing()

    def _refuse_existing(self) -> None:
        if self.out.exists():
            raise UsageError(
                f"{self.out} is there already: choose another -o, or --restart to throw it away",
            )

    def _check(self, first_line: bytes, wanted: Mapping[str, Any]) -> None:
        """Raise UsageError if the earlier run belongs to another batch."""
        try:
            found = json.loads(first_line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise UsageError(f"{self.partial} is no batch of edgespec: choose another -o, or --restart")
        go_on = "go on with the same, choose another -o, or --restart"
        for name in {**wanted, **found}:
            was, value = found.get(name), wanted.get(name)
            if was == value:
                continue
            if name in _WHAT:
                raise UsageError(f"{self.partial} was begun with another {_WHAT[name]}: {go_on}")
            begun, now = ("nothing" if said is None else said for said in (was, value))
            raise UsageError(f"{self.partial} was begun with {begun}, not {now}: {go_on}", field=name)

    def _recover(self) -> None:
        """Read the results of earlier runs, and drop a torn line."""
        start = self._end
        with open(self._results, "rb", closefd=False) as file:
            file.seek(start)
            for line in file:
                written = read_output_line(line, self.key) if line.endswith(b"\n") else None
                place, failed = written or (_ABSENT, False)
                if not 0 <= place < len(self._places):
                    self._refuse_foreign(line)
                    break
                if self._places[place] == _ABSENT:
                    self.n_done += 1
                    if failed:
                        self.n_failed += 1
                        self.failed = with_failed(self.failed, place, line)
                    self._places[place] = self._end
                self._end += len(line)
        if n_torn := os.fstat(self._results).st_size - self._end:
            os.ftruncate(self._results, self._end)
            self._on_message(f"dropped {n_torn} bytes that were not written to their end; they come again")

    def _refuse_foreign(self, line: bytes) -> None:
        """Raise UsageError for a complete line that no batch wrote: it must not be dropped as torn."""
        try:
            if not line.endswith(b"\n") or not isinstance(json.loads(line), dict):
                return
        except (ValueError, RecursionError):
            return
        file = self.partial if self.in_order else self.out
        raise UsageError(f"{file} has lines of something else: choose another -o, or --restart")

    # ---- writing ----

    def _append(self, file: int, data: bytes) -> None:
        with self._telling():
            try:
                write_all(file, data, self._end)
            except BaseException:
                os.ftruncate(file, self._end)
                raise

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            done = f"{self.n_done} of {len(self._places)} requests are done and kept"
            raise EdgespecError(
                f"{self.out}: {error.strerror}; {done}: the same command goes on from there"
            ) from None

    def _make_out(self) -> None:
        try:
            with self._new.open("wb") as new, open(self._lock, "rb", closefd=False) as file:
                for number, place in enumerate(self._places):
                    file.seek(place)
                    line = file.readline()
                    new.write(_spaced_text(number, line) if self._as_text else line)
                new.flush()
                os.fsync(new.fileno())
            self._new.replace(self.out)
        except BaseException:  # Ctrl-C too
            with contextlib.suppress(OSError):
                self._new.unlink(missing_ok=True)
            raise
        _sync_folder(self.out.parent)


_WHAT = {
    "version": "version of edgespec",
    "in_order": "order of results",
    "input_sha256": "input",
    "is_text": "kind of input (.txt or .jsonl)",
    "chat_template": "chat template",
    "target_sha256": "target model",
}
"""Facts of `belongs_to` that are no options."""


def _locked(partial: Path, out: Path) -> int:
    """Open or make the file, and lock it. Raises EdgespecError if another process has it."""
    while True:
        try:
            file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"-o {out}: {error.strerror}") from None
        try:
            if not lock_descriptor(file, blocking=False):
                os.close(file)
                raise EdgespecError(
                    f"{out} is being written by another `edgespec batch`: wait for it, or choose another -o"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), partial.stat()):
                    return file
        except OSError as error:
            os.close(file)
            raise EdgespecError(f"{partial} cannot be locked: {error.strerror}; choose another -o") from None
        os.close(file)  # the process that had it finished, and removed it


def _first_line(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return stream.readline(_LONGEST_FIRST_LINE)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _spaced_text(place: int, line: bytes) -> bytes:
    return (b"\n" if place else b"") + answer_text(line)


class PipedResults:
    """Results for a pipe, as they come or in order. A batch that ends early begins anew."""

    def __init__(self, file: int, name: str, key: str, *, in_order: bool, as_text: bool = False) -> None:
        """Write to a file descriptor; `name` is for errors. `as_text`: the answers alone, in order."""
        self._as_text = as_text
        self._file = file
        self._name = name
        self._key = key
        self._in_order = in_order
        self._waiting: dict[int, bytes] = {}  # later results, by place
        self._next = 0
        self.n_done = self.n_failed = 0
        self.n_cut = 0
        """Answers of this run that a limit of tokens cut."""
        self.failed: list[FailedLine] = []
        """The first that failed, in the input's order."""

    def has(self, _request: BatchRequest) -> bool:
        """Return False: there are no earlier results."""
        return False

    def add(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Write a result, or hold it until those before it are there. Raises EdgespecError."""
        line = output_line(request, answer, self._key)
        self.n_done += 1
        self.n_cut += answer.is_cut
        if answer.status != 200:
            self.n_failed += 1
            self.failed = with_failed(self.failed, request.place, line)
        if not self._in_order:
            self._write(line)
            return
        self._waiting[request.place] = line
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._write(_spaced_text(self._next, ready) if self._as_text else ready)
            self._next += 1

    def sync(self) -> None:
        """Do nothing: results are written at once."""

    def finish(self) -> None:
        """Do nothing: results are written at once."""

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BrokenPipeError:
            raise OutputUnread from None
        except OSError as error:
            raise EdgespecError(f"{self._name}: {error.strerror}") from None
