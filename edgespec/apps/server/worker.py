"""The thread that runs the engine for all requests at once.

Before each pass waiting requests begin while the engine has room, in turns by client (request_worker.py);
each pass then serves all that run. A request that must end does so after the pass, so the others are not
disturbed. A pass is interrupted only if all requests under way must end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Unpack

from edgespec.apps.server.request_worker import (
    Outcome,
    QueuedRequest,
    QueueLimits,
    QueuePlace,
    RequestWorker,
    Start,
    cancelled_as,
)
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result, Token
from edgespec.decoding.session import as_ints
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError
from edgespec.platform.processes import Cancellation

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedGeneration(QueuedRequest[Token, Result]):
    """A request for a text that waits for the worker."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    """The prompt as C ints: while it waits, they are compared before each pass with the cache."""
    options: Options
    stream: Stream | None = None
    """Its generation, once it runs."""


class Worker(RequestWorker[QueuedGeneration, Token, Result]):
    """Runs generations on its own thread, as many at once as the engine may.

    `engine` was made with `cancellation` as its signals; from `start` to the end of `stop` only that thread
    uses it. `on_end` is called there or on the event loop.
    """

    def __init__(self, engine: Engine, cancellation: Cancellation, **limits: Unpack[QueueLimits]) -> None:
        """Let as many requests run at once as the engine holds."""
        super().__init__("edgespec worker", parallel=engine.parallel, **limits)
        self._engine, self._cancellation = engine, cancellation

    def run(
        self, tokens: Sequence[int], options: Options, *, client: str, follows: bool = False
    ) -> Start[Token, Result]:
        """Return a function that begins a generation in the turn of `client`: its tokens, then its Result.

        The tokens of a step come together. Before them come its places in the queue, if it must wait, and the
        progress of reading its prompt, if that takes several passes. Leaving ends the generation after the
        current pass, or removes it from the queue. `follows`: it takes the place of an earlier text of the
        same request, and a full queue does not refuse it. Beginning raises QueueFull and ShuttingDown.
        """
        request = partial(QueuedGeneration, client, prompt=tokens, tokens=as_ints(tokens), options=options)
        return partial(self._ask, request, follows=follows)

    def _interrupt(self) -> None:
        self._cancellation.cancel()

    def _has_room(self, request: QueuedGeneration) -> bool:
        options = request.options
        return self._engine.has_room(request.tokens, options.n_predict, options.lora)

    def _begin(self, request: QueuedGeneration) -> None:
        try:
            request.stream = self._engine.stream(request.prompt, request.options)
        except BaseException as error:  # noqa: BLE001 - it ends this request, not the thread
            self._end(request, error)

    def _step(self) -> None:
        """Run a pass for all requests under way; send their tokens, and end those that must end."""
        for request in [*self._running]:
            if request.cancelled:
                self._end(request)
        if not self._running:
            return
        error: Exception | None = None
        try:
            with self.turns:
                self._engine.step()
        except Exception as raised:  # noqa: BLE001 - no single request's: a request's own comes with its tokens
            error = raised
        except BaseException:  # noqa: BLE001 - raised to end the pass; it must not end this thread
            # What interrupted this pass must not interrupt the next one. Whoever asked for it is marked.
            self._cancellation.drain()
        for request in [*self._running]:
            self._hand_over(request, error)

    def _hand_over(self, request: QueuedGeneration, error: Exception | None) -> None:
        """Send a request's new tokens to its reader, and end it if it is complete or its pass failed."""
        assert request.stream  # noqa: S101 - for the type checker: a request without one has ended
        try:
            request.hand_over(request.stream.made())
            progress = request.stream.prompt_progress
            if progress.n_read < progress.n_tokens and progress != request.progress:
                request.progress = progress
                request.notify(QueuePlace(0, progress))
        except BaseException as raised:  # noqa: BLE001 - it ends this request, not the thread
            self._end(request, raised)
            return
        if error and not request.stream.finished:
            self._end(request, error)
        elif request.stream.finished or request.cancelled:
            self._end(request)

    def _end(self, request: QueuedGeneration, error: BaseException | None = None) -> None:
        """Remove `request` from those under way, and notify its reader of its end."""
        if request.stream:
            with contextlib.suppress(Exception):
                request.stream.close()
        is_interrupt = not (error is None or isinstance(error, Exception))
        end: Result | BaseException
        if request.stream and (error is None or (is_interrupt and request.cancelled)):
            end = request.stream.result
        elif error and not is_interrupt:
            end = error
        else:
            end = EdgespecError("the generation was interrupted")
        result = end if isinstance(end, Result) else None
        outcome = _outcome(request, end)
        if request.cancelled and outcome in ("cancelled", "timed out"):
            end = request.cancelled
        self._leave(request, outcome, end, result)


def _outcome(request: QueuedGeneration, end: Result | BaseException) -> Outcome:
    if isinstance(end, Result) and end.stop_reason != "interrupted":
        return "finished"
    if request.cancelled:
        return cancelled_as(request.cancelled)
    return "failed"
