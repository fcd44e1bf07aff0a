"""A writer of answers without models, and what tests ask of a batch's output."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from edgespec.apps.batch.lines import BatchAnswer, BatchRequest


class EchoWriter:
    """Answers each request with its own body, after as many rounds as the body's "rounds" says."""

    def __init__(self, parallel: int = 4, round_s: float = 0.0) -> None:
        self.parallel = parallel
        self.round_s = round_s
        self.begun: list[str] = []
        self.most_running = 0
        self.n_tokens = 0
        self._left: dict[BatchRequest, int] = {}
        self.bodies: dict[str, Any] = {}

    @property
    def n_free(self) -> int:
        return self.parallel - len(self._left)

    @property
    def n_running(self) -> int:
        return len(self._left)

    def begin(self, request: BatchRequest) -> None:
        assert self.n_free > 0
        assert request.body is not None
        self.begun.append(request.custom_id)
        self.bodies[request.custom_id] = request.body
        self._left[_key(request)] = request.body.get("rounds", 1)
        self.most_running = max(self.most_running, self.n_running)

    def finished(self) -> list[tuple[BatchRequest, BatchAnswer]]:
        if self.round_s:
            time.sleep(self.round_s)
        ended = []
        for request in [*self._left]:
            self._left[request] -= 1
            self.n_tokens += 1
            if self._left[request] <= 0:
                del self._left[request]
                body = self.bodies[request.custom_id]
                ended.append((request, BatchAnswer(200, json.dumps(body).encode())))
        return ended


def _key(request: BatchRequest) -> BatchRequest:
    """Return the request without its body, which has no hash."""
    return BatchRequest(request.place, request.custom_id, request.url)


def results(file: Path) -> list[dict[str, Any]]:
    """Return the lines of an output file; each must be whole."""
    data = file.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def custom_ids(file: Path) -> list[str]:
    return [line["custom_id"] for line in results(file)]


def write_lines(file: Path, lines: list[Any]) -> Path:
    """Write a file of requests; text stays as it is, anything else becomes JSON."""
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file
