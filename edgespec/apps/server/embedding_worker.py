"""The thread that embeds texts, those of several requests in one pass.

Each pass takes a text of every request under way in turn, as many as it holds: a request of thousands of
texts does not keep others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Never, Unpack

import numpy as np

from edgespec.apps.embed.embedder import Embedder
from edgespec.apps.embed.vector_model import PASS_TEXTS, Vectors
from edgespec.apps.server.request_worker import QueuedRequest, QueueLimits, RequestWorker, Start, cancelled_as
from edgespec.platform.processes import Cancellation


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """The vectors of a request's texts, or their scores."""

    rows: Vectors
    n_tokens: int


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedTexts(QueuedRequest[Never, EmbeddedTexts]):
    """A request for the vectors of texts."""

    texts: Sequence[Sequence[int]]
    rows: list[Vectors] = field(default_factory=list)
    """Those that are there, in the order of the texts."""

    def unread(self) -> Iterator[tuple[QueuedTexts, Sequence[int]]]:
        """Yield the request with each text that has no vector yet."""
        return ((self, text) for text in islice(self.texts, len(self.rows), None))


class EmbeddingWorker(RequestWorker[QueuedTexts, Never, EmbeddedTexts]):
    """Embeds texts on its own thread, which alone uses `embedder` from `start` to the end of `stop`."""

    def __init__(self, embedder: Embedder, cancellation: Cancellation, **limits: Unpack[QueueLimits]) -> None:
        """Embed with `embedder`, which was made with the interrupt of `cancellation`."""
        super().__init__("edgespec embeddings", parallel=PASS_TEXTS, **limits)
        self.embedder, self._cancellation = embedder, cancellation

    def run(self, texts: Sequence[Sequence[int]], *, client: str) -> Start[Never, EmbeddedTexts]:
        """A function that begins a request in the turn of `client`; it has no parts.

        To leave ends the work after the pass under way. Beginning raises QueueFull and ShuttingDown.
        """
        return partial(self._ask, partial(QueuedTexts, client, texts=texts))

    def _interrupt(self) -> None:
        self._cancellation.cancel()

    def _has_room(self, request: QueuedTexts) -> bool:
        return len(self._running) < self.parallel

    def _begin(self, request: QueuedTexts) -> None:
        """Do nothing yet: `_step` reads it."""

    def _step(self) -> None:
        """Make a pass over texts of all requests that run; end those that have all, or must end."""
        for request in [*self._running]:
            if request.cancelled:
                self._end(request, request.cancelled)
        in_turn = chain.from_iterable(zip_longest(*(request.unread() for request in self._running)))
        texts = [*islice(filter(None, in_turn), PASS_TEXTS)]
        if not texts:
            return
        del texts[self.embedder.n_fitting(len(tokens) for _, tokens in texts) :]
        try:
            with self.turns:
                rows = self.embedder.forward([tokens for _, tokens in texts])
        except Exception as error:  # noqa: BLE001 - it ends these requests, not the thread
            for request in dict.fromkeys(request for request, _ in texts):
                self._end(request, error)
            return
        except BaseException:  # noqa: BLE001 - raised to end the pass; it must not end this thread
            self._cancellation.drain()  # or it would end the next pass; whoever asked for it is marked
            return
        for (request, _), row in zip(texts, rows, strict=True):
            request.rows.append(row)
        for request in [*self._running]:
            if len(request.rows) == len(request.texts):
                self._end(request, EmbeddedTexts(np.stack(request.rows), sum(map(len, request.texts))))

    def _end(self, request: QueuedTexts, end: EmbeddedTexts | BaseException) -> None:
        if isinstance(end, EmbeddedTexts):
            self._leave(request, "finished", end, end)
        else:
            self._leave(request, cancelled_as(end) if request.cancelled else "failed", end, None)
