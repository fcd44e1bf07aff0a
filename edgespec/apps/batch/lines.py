"""The input of a batch: a file of requests, read a line at a time.

A line is one of these, all JSON:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}   OpenAI's batch format
    {"prompt": "Write a quicksort.", "max_tokens": 100}                                  a plain prompt
    {"messages": [...], "max_tokens": 100}                                               a conversation
    "Write a quicksort."                                                                 a plain prompt

Of a file NAME.txt each line is a plain prompt as it stands. Any other line is a refused request; blank lines
are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgespec.apps.batch.results import BatchAnswer, BatchRequest
from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.json_routes import strict_json
from edgespec.errors import EdgespecError, UsageError

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
