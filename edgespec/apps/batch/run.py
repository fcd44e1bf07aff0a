"""The loop of a batch: as many requests at once as fit, in order, each result written as it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from edgespec.apps.batch.records import BatchAnswer, BatchRequest


class BatchWriter(Protocol):
    """Answers requests: with an engine in this process, or on other machines."""

    @property
    def n_free(self) -> int:
        """Requests that may begin now."""

    @property
    def n_running(self) -> int:
        """Requests that `finished` has yet to return."""

    @property
    def n_tokens(self) -> int:
        """Tokens so far, unfinished answers included."""

    def begin(self, request: BatchRequest) -> None:
        """Begin a request; only while `n_free` is above 0."""

    def finished(self) -> list[tuple[BatchRequest, BatchAnswer]]:
        """Work for a second at most, and return complete answers; a failed request has an error as answer."""


class BatchResults(Protocol):
    """Takes the results."""

    @property
    def n_done(self) -> int:
        """Results so far, earlier runs included."""

    @property
    def n_failed(self) -> int:
        """Results with an error."""

    def has(self, request: BatchRequest, /) -> bool:
        """Whether the request has a result."""

    def add(self, request: BatchRequest, answer: BatchAnswer, /) -> None:
        """Write a result."""

    def sync(self) -> None:
        """Sync results to disk if the last time was a second ago."""


class BatchRate:
    """Speed of a run over the last half minute, and the time that is left."""

    SPAN_S = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])
        self.n_cut = 0
        """Answers that a limit of tokens cut."""
        self._n_answers = 0
        self._n_answer_tokens = 0

    def note(self, n_tokens: int) -> None:
        """Note the tokens written since the beginning."""
        now = self._clock()
        if now - self._seen[-1][0] >= self.SPAN_S / 100:
            self._seen.append((now, n_tokens))
            while self._seen[1][0] <= now - self.SPAN_S:
                self._seen.popleft()

    def answered(self, answer: BatchAnswer) -> None:
        """Note a complete answer."""
        self._n_answers += 1
        self.n_cut += answer.is_cut
        self._n_answer_tokens += answer.n_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None at the beginning."""
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began else None

    def left_s(self, n_left: int) -> float | None:
        """Estimate the seconds for `n_left` requests, begun ones included; None: no estimate yet.

        Short answers end first, so the complete ones say too little of the others: an answer's mean length is
        all tokens over the answers that ended, and a begun one is expected to have that much before it.
        """
        rate = self.tokens_per_s
        if not rate or not self._n_answers:
            return None
        n_tokens = max(self._seen[-1][1], self._n_answer_tokens)
        return n_left * n_tokens / self._n_answers / rate


def run_batch(
    requests: Iterator[BatchRequest],
    writer: BatchWriter,
    results: BatchResults,
    pace: BatchRate,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Answer all requests without a result, reading each only when it can begin.

    `on_progress` is called after each result and each pass. Raises what `requests`, `writer` and `results`
    raise; results until then stay.
    """

    def add(request: BatchRequest, answer: BatchAnswer) -> None:
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
                add(request, request.refused)
            else:
                writer.begin(request)
        if writer.n_running:
            for request, answer in writer.finished():
                add(request, answer)
            pace.note(writer.n_tokens)
            results.sync()
            on_progress()
