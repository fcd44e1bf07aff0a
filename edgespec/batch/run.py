"""Runs a batch: as many requests at once as fit, the longest-waiting first, each result kept as it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from edgespec.batch.records import BatchAnswer, BatchRequest


class BatchWriter(Protocol):
    """What writes the answers: an engine in this process, or others elsewhere."""

    @property
    def n_free(self) -> int:
        """How many requests may begin now."""

    @property
    def n_running(self) -> int:
        """How many have begun, and have not been returned by `finished`."""

    @property
    def n_tokens(self) -> int:
        """Tokens written so far, those of unfinished answers included."""

    def begin(self, request: BatchRequest) -> None:
        """Begin a request; call it only while `n_free` is above 0."""

    def finished(self) -> list[tuple[BatchRequest, BatchAnswer]]:
        """Work for a moment, a second at most, and return the answers that are complete.

        A request that fails has an error as its answer: it ends neither the others nor the batch.
        """


class BatchResults(Protocol):
    """Where results are kept."""

    @property
    def n_done(self) -> int:
        """Results so far, those of earlier runs included."""

    @property
    def n_failed(self) -> int:
        """Of these, the ones with an error."""

    def has(self, request: BatchRequest, /) -> bool:
        """Return whether an earlier run answered this request."""

    def add(self, request: BatchRequest, answer: BatchAnswer, /) -> None:
        """Keep a result."""

    def sync(self) -> None:
        """Have results put on the disk, if a second has gone by since the last time."""


class BatchRate:
    """How fast a run goes: tokens a second over the last half minute, and the time that is left."""

    SPAN_S = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now; `clock` gives seconds."""
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._n_answers = 0
        self._n_answer_tokens = 0

    def note(self, n_tokens: int) -> None:
        """Note how many tokens were written since the beginning."""
        now = self._clock()
        if now - self._seen[-1][0] >= self.SPAN_S / 100:
            self._seen.append((now, n_tokens))
            while self._seen[1][0] <= now - self.SPAN_S:
                self._seen.popleft()

    def answered(self, answer: BatchAnswer) -> None:
        """Note a complete answer: those to come are taken to be as long as these on the average."""
        self._n_answers += 1
        self._n_answer_tokens += answer.n_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """None as long as there are no two moments to compare."""
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began else None

    def left_s(self, n_left: int) -> float | None:
        """Return the seconds that `n_left` requests will take, those that have begun included.

        None where nothing can be said yet.
        """
        rate = self.tokens_per_s
        if not rate or not self._n_answers:
            return None
        begun = self._seen[-1][1] - self._n_answer_tokens
        return max(0.0, n_left * self._n_answer_tokens / self._n_answers - begun) / rate


def run_batch(
    requests: Iterator[BatchRequest],
    writer: BatchWriter,
    results: BatchResults,
    pace: BatchRate,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Answer all requests that have no result yet. `on_progress` is called after each result and each pass.

    A request is read only when it can begin. Raises what reading, writing or keeping raises; the results
    until then are kept.
    """

    def keep(request: BatchRequest, answer: BatchAnswer) -> None:
        results.add(request, answer)
        pace.answered(answer)
        results.sync()
        on_progress()

    more = True
    while more or writer.n_running:
        while more and writer.n_free > 0:
            request = next(requests, None)
            if request is None:
                more = False
            elif results.has(request):
                continue
            elif request.refused:
                keep(request, request.refused)
            else:
                writer.begin(request)
        if writer.n_running:
            for request, answer in writer.finished():
                keep(request, answer)
            pace.note(writer.n_tokens)
            results.sync()
            on_progress()
