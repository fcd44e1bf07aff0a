"""The lines of a batch: a file of requests, and a file or a pipe of their results.

A request is one of these, all JSON:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}   OpenAI's batch format
    {"prompt": "Write a quicksort.", "max_tokens": 100}                                  a plain prompt
    {"messages": [...], "max_tokens": 100}                                               a conversation
    "Write a quicksort."                                                                 a plain prompt

In a file NAME.txt each line is a plain prompt as it stands. Any other line is a refused request; blank lines
are skipped. The file of results survives the end of the process at any moment:

    OUT.partial     what the batch belongs to, then a line for each result as it comes; locked by its process
    OUT             the results, written from OUT.partial at the end

A result is one write at the end of the file, so a killed process leaves at most one torn line, the last: it
is cut off, and its request is answered again. The file is synced once a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from filelock import lock_descriptor

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.json_routes import strict_json
from edgespec.errors import EdgespecError, MessageFn, OutputUnread, UsageError, silent
from edgespec.platform.closing import Closing
from edgespec.platform.files import replacing
from edgespec.platform.kept import write_all

# ---- requests and answers of a batch, and lines of its output ----


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to a request, as the server would send it."""

    status: int
    body: bytes
    """JSON: a completion, or {"error": ...}."""

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


class PipedResults:
    """Results for a pipe, as they come or in order. An interrupted batch starts over."""

    def __init__(self, file: int, name: str, key: str, *, in_order: bool, as_text: bool = False) -> None:
        """Write to a file descriptor; `name` is for errors. `as_text`: only the answers, in order."""
        self._file, self._name, self._key = file, name, key
        self._in_order, self._as_text = in_order, as_text
        self._waiting: dict[int, bytes] = {}  # later results, by place
        self._next = self.n_done = self.n_failed = 0
        self.n_cut = 0
        """Answers of this run that a limit of tokens cut."""
        self.failed: list[FailedLine] = []
        """The first that failed, in the input's order."""

    def has(self, _request: BatchRequest) -> bool:
        """Whether the request has its result."""
        return False

    def add(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Write a result, or hold it until those before it are there. Raises EdgespecError."""
        line = output_line(request, answer, self._key)
        self._write(request.place, line)
        self._count(line)

    def sync(self) -> None:
        """Make what is written survive a power failure. Raises EdgespecError."""

    def finish(self) -> None:
        """Complete the output; every request must have its result. Raises EdgespecError."""

    def _count(self, line: bytes) -> int | None:
        """Count a result, and return its place; None: the line is no result of this batch, or torn."""
        try:
            found = msgspec.json.decode(line)
            status, body = found["response"]["status_code"], found["response"]["body"]
            batch, _, digits = found["id"].rpartition("_")
            place = int(digits)
            if batch != f"batch_req_{self._key}" or not line.endswith(b"\n"):
                return None
            self.n_done += 1
            self.n_cut += any(one.get("finish_reason") == "length" for one in body.get("choices", []))
            if status != 200:
                self.n_failed += 1
                reason = (body.get("error") or {}).get("message", "no reason is known")
                named = [*self.failed, FailedLine(place, found["custom_id"], str(reason))]
                self.failed = sorted(named)[:_MOST_NAMED]
            return place
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def _write(self, place: int, line: bytes) -> None:
        self._waiting[place if self._in_order else self._next] = line
        while (ready := self._waiting.pop(self._next, None)) is not None:
            rest = memoryview(self._shown(self._next, ready))
            self._next += 1
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except BrokenPipeError:
                raise OutputUnread from None
            except OSError as error:
                raise EdgespecError(f"{self._name}: {error.strerror}") from None

    def _shown(self, number: int, line: bytes) -> bytes:
        return b"\n" * (number > 0) + answer_text(line) if self._as_text else line


FORMAT, VERSION = "edgespec batch", 2
_LONGEST_FIRST_LINE = 1 << 20
_SYNC_S = 1.0  # most work lost when the machine loses power
_CLOSED = -1


class Journal(PipedResults, Closing):
    """The results of one batch in a file, those of earlier runs included. A context manager."""

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
        """Begin, or resume an earlier run; with `restart`, delete its results. `as_text`: OUT is plain text.

        `belongs_to` must be the same for a run to resume: "input_sha256", "target_sha256", and options by
        their fields' names. Raises UsageError if OUT is something else or belongs to something else,
        EdgespecError if another process writes it, OSError.
        """
        key = str(belongs_to["input_sha256"])[:16]
        super().__init__(_CLOSED, str(out), key, in_order=in_order, as_text=as_text)
        self.out, self.partial = out.resolve(), partial_of(out)
        self._n_requests = n_requests
        self._begins: dict[int, int] = {}  # place of a result: where its line begins in the file
        self._end = 0
        self._synced = time.monotonic()
        self._file = _locked(self.partial, out)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            if restart:
                os.ftruncate(self._file, 0)
                self.out.unlink(missing_ok=True)
            self._open({"format": FORMAT, "version": VERSION, **belongs_to}, on_message)
            stack.pop_all()

    @property
    def complete(self) -> bool:
        """Whether every request has its result."""
        return self.n_done == self._n_requests

    def has(self, request: BatchRequest) -> bool:
        """Whether the request has its result."""
        return request.place in self._begins

    def sync(self) -> None:
        """Sync the results to disk, at most once a second. Raises EdgespecError."""
        if time.monotonic() >= self._synced + _SYNC_S:
            with self._telling():
                os.fsync(self._file)
            self._synced = time.monotonic()

    def finish(self) -> None:
        """Write OUT from the results; every request must have one. Raises EdgespecError."""
        with self._telling():
            with replacing(self.out) as file, open(self._file, "rb", closefd=False) as found:
                for number, place in enumerate(sorted(self._begins) if self._in_order else self._begins):
                    found.seek(self._begins[place])
                    file.write(self._shown(number, found.readline()))
            self.partial.unlink()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        file, self._file = self._file, _CLOSED
        if file != _CLOSED:
            os.close(file)

    def _open(self, header: dict[str, Any], on_message: MessageFn) -> None:
        """Read the results of earlier runs and cut off a torn line, or write the first line."""
        with open(self._file, "rb", closefd=False) as file:
            if first := file.readline(_LONGEST_FIRST_LINE):
                self._check(first, header)
            elif self.out.exists():
                self.partial.unlink()
            else:
                first = json.dumps(header).encode() + b"\n"
                self._append(first)
            self._end = len(first)
            for line in file:
                place = self._count(line)
                if place is None:
                    break
                self._begins[place] = self._end
                self._end += len(line)
        self.n_cut = 0
        if not self.complete:
            refuse_existing(self.out)
        if n_torn := os.fstat(self._file).st_size - self._end:
            os.ftruncate(self._file, self._end)
            on_message(f"dropped an unfinished result ({n_torn} bytes): its request is answered again")

    def _check(self, first_line: bytes, wanted: Mapping[str, Any]) -> None:
        """Raise UsageError if the earlier run belongs to another batch."""
        try:
            found = json.loads(first_line) if first_line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise UsageError(f"{self.partial} is no batch of edgespec: choose another -o, or --restart")
        begun, go_on = (
            f"{self.partial} was begun with",
            "continue with the same, choose another -o, or --restart",
        )
        for name in {**wanted, **found}:
            was, now = found.get(name), wanted.get(name)
            if was != now and name in _WHAT:
                raise UsageError(f"{begun} another {_WHAT[name]}: {go_on}")
            if was != now:
                was, now = ("nothing" if said is None else said for said in (was, now))
                raise UsageError(f"{begun} {was}, not {now}: {go_on}", field=name)

    def _write(self, place: int, line: bytes) -> None:
        begins = self._end
        self._append(line)
        self._begins[place] = begins

    def _append(self, data: bytes) -> None:
        """Write at the end of the file, or leave it unchanged. Raises EdgespecError."""
        with self._telling():
            try:
                write_all(self._file, data, self._end)
            except BaseException:
                os.ftruncate(self._file, self._end)
                raise
        self._end += len(data)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            done = f"{self.n_done} of {self._n_requests} requests are done and kept"
            raise EdgespecError(
                f"{self.out}: {error.strerror}; {done}: run the same command again to resume"
            ) from None


_WHAT = {
    "version": "version of edgespec",
    "input_sha256": "input",
    "is_text": "kind of input (.txt or .jsonl)",
    "chat_template": "chat template",
    "target_sha256": "target model",
}
"""Facts of `belongs_to` that are no options."""


def partial_of(out: Path) -> Path:
    """Return the file that holds the results until all are complete."""
    out = out.resolve()
    return out.with_name(f"{out.name}.partial")


def refuse_existing(out: Path) -> None:
    """Raise UsageError if there is a file that a new batch would overwrite."""
    if out.exists():
        raise UsageError(f"{out} is there already: choose another -o, or --restart to throw it away")


def _locked(partial: Path, out: Path) -> int:
    """Open or make the file, and lock it. Raises UsageError, EdgespecError if another process has it."""
    try:
        while True:
            file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not lock_descriptor(file, blocking=False):
                os.close(file)
                raise EdgespecError(
                    f"{out} is being written by another `edgespec batch`: wait for it, or choose another -o"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), partial.stat()):
                    return file
            os.close(file)  # the process that had it finished, and removed it
    except OSError as error:
        raise UsageError(f"-o {out}: {partial.name} cannot be locked: {error.strerror}") from None


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PLAIN = ""
"""The url of a plain prompt or conversation."""

MAX_LINE = 16 << 20
"""Most bytes of a line: four times what the server takes by default."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BatchInput:
    """An open file of requests, read once."""

    file: BinaryIO
    name: str
    sha256: str
    n_bytes: int
    n_requests: int
    """Lines that are not blank."""
    is_text: bool = False
    """Whether each line is a prompt as it stands, and no JSON."""

    def requests(self) -> Iterator[BatchRequest]:
        """Yield the requests as the file was when it was opened, reading no further than asked.

        Raises EdgespecError at the end if the file has changed.
        """
        names: set[str] = set()
        self.file.seek(0)
        digest = hashlib.sha256()
        for place, (number, line) in enumerate(_lines(self.file, self.n_bytes, digest)):
            yield _request(place, number, line, names, is_text=self.is_text)
        if digest.hexdigest() != self.sha256:
            raise EdgespecError(
                f"{self.name} was changed while it was read: begin anew with --restart, and leave it alone"
            )

    def line_numbers(self) -> Iterator[int]:
        """Yield the number of each request's line, from 1, as editors count."""
        self.file.seek(0)
        return (number for number, _ in _lines(self.file, self.n_bytes, hashlib.sha256()))


def open_input(path: Path, spool_folder: Path | None) -> BatchInput:
    """Open a file of requests, "-" for standard input, and read it once for its SHA-256 and length.

    A pipe is copied to a temporary file in `spool_folder`, by default the system's. Raises UsageError and
    OSError.
    """
    is_stdin = str(path) == "-"
    name = "standard input" if is_stdin else str(path)
    if is_stdin and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no requests: name a file, or pipe them in")
    try:
        file: BinaryIO = sys.stdin.buffer if is_stdin else path.open("rb")
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    with ExitStack() as stack:  # closes the file if there is nothing in it
        stack.enter_context(file)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            copy = stack.enter_context(tempfile.TemporaryFile(dir=spool_folder))
            shutil.copyfileobj(file, copy)
            copy.flush()
            file = copy
        file.seek(0)
        n_bytes = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256()
        n_requests = sum(1 for _ in _lines(file, n_bytes, digest))
        if n_requests == 0:
            raise UsageError(f"{name}: there is no request in it")
        stack.pop_all()
    return BatchInput(file, name, digest.hexdigest(), n_bytes, n_requests, path.suffix.lower() == ".txt")


def _lines(file: BinaryIO, n_bytes: int, digest: hashlib._Hash) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and content of the lines that are not blank; None for a line that is too long.

    Numbers are those of editors. Reads at most `n_bytes`, all into `digest`.
    """

    def read(most: int) -> bytes:
        nonlocal n_bytes
        part = file.readline(min(most, n_bytes))
        n_bytes -= len(part)
        digest.update(part)
        return part

    number = 0
    while line := read(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = read(MAX_LINE)
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield number, line


def _request(place: int, number: int, line: bytes | None, names: set[str], *, is_text: bool) -> BatchRequest:
    """Return the request of a line; `names` are the custom_ids so far."""
    given: str | None = None
    refused: BatchAnswer | None = None
    body: dict[str, Any] | None
    try:
        if line is None:
            raise ApiError(400, f"the line is longer than {MAX_LINE >> 20} MiB", code="line_too_long")
        content = _prompt(line) if is_text else _parsed(line)
        given = _custom_id(content)
        if given in names:
            raise ApiError(400, f"custom_id {given[:80]!r} is that of an earlier line", param="custom_id")
        url, body = _url_and_body(content)
    except ApiError as error:
        refused, url, body = BatchAnswer.error(error.status, error.body()), "", None
    name = given if given is not None and given not in names else _free_name(number, names)
    names.add(name)
    return BatchRequest(place, name, url, body, refused)


def _prompt(line: bytes) -> dict[str, Any]:
    try:
        return {"prompt": line.decode().strip()}
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the line is not UTF-8 text at byte {error.start}") from None


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        content = strict_json(line)
    except json.JSONDecodeError as error:
        why = error.msg.replace("line 1 column", "column")  # of this line, not of the file's first
        hint = 'a plain prompt is a JSON string, "in quotation marks"'
        raise ApiError(400, f"the line is not valid JSON: {why}; {hint}", code="invalid_json") from None
    if isinstance(content, str):
        content = {"prompt": content}
    if not isinstance(content, dict):
        raise ApiError(400, "the line is neither a JSON object nor a string", code="invalid_request")
    return content


def _custom_id(content: dict[str, Any]) -> str | None:
    given = content.get("custom_id")
    if given is not None and not (isinstance(given, str) and given):
        raise ApiError(400, "custom_id: must be a string that is not empty", param="custom_id")
    return given


def _url_and_body(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return url and body of a line's request. Raises ApiError."""
    if not content.keys() & {"url", "body", "method"}:
        if ("prompt" in content) == ("messages" in content):
            raise ApiError(400, "the line must have url and body, or prompt, or messages")
        return PLAIN, {name: value for name, value in content.items() if name != "custom_id"}
    method, url, body = content.get("method"), content.get("url"), content.get("body")
    if method not in (None, "POST"):
        raise ApiError(400, f"method: {str(method)[:20]!r}; must be POST", param="method")
    if url not in (CHAT, TEXT):
        raise ApiError(
            400, f"url: {str(url)[:80]!r}; must be {CHAT} or {TEXT}", param="url", code="invalid_url"
        )
    if not isinstance(body, dict):
        raise ApiError(400, "body: must be an object", param="body")
    return str(url), body


def _free_name(number: int, names: set[str]) -> str:
    name = f"line-{number}"
    while name in names:
        name += "-"
    return name
