"""The results of a batch for a pipe, or another file of which nothing can be read back."""

from __future__ import annotations

import os

from edgespec.batch.records import Answer, Request, output_line
from edgespec.errors import EdgespecError


class PipedResults:
    """Writes results as they come or in order. Nothing is kept: a batch that ends early begins anew."""

    def __init__(self, file: int, name: str, key: str, *, in_order: bool) -> None:
        """Write to a file descriptor; `name` is for errors, `key` names the batch."""
        self._file = file
        self._name = name
        self._key = key
        self._in_order = in_order
        self._waiting: dict[int, bytes] = {}  # results whose place has not come
        self._next = 0
        self.n_done = 0
        self.n_failed = 0

    def has(self, _request: Request) -> bool:
        """Return False: nothing was done before."""
        return False

    def add(self, request: Request, answer: Answer) -> None:
        """Write a result, or keep it until those before it are there. Raises EdgespecError."""
        line = output_line(request, answer, self._key)
        self.n_done += 1
        self.n_failed += answer.status != 200
        if not self._in_order:
            self._write(line)
            return
        self._waiting[request.place] = line
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._write(ready)
            self._next += 1

    def sync(self) -> None:
        """Do nothing: whoever reads has it already."""

    def finish(self) -> None:
        """Do nothing: all is written."""

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise EdgespecError(f"{self._name}: {error.strerror}") from None
