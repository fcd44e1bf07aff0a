"""One generation as its reader sees it: tokens with their text, and the result so far."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from edgespec.decoding.loop import Loop
from edgespec.decoding.text import TextStream
from edgespec.energy import Measurement, Window
from edgespec.llama.weights import Model
from edgespec.platform.memory import peak_rss_bytes
from edgespec.records import (
    Logprobs,
    Origin,
    Provenance,
    Result,
    Stats,
    StopReason,
    Tally,
    Token,
    summarise,
)


class Stream:
    """An iterator over the tokens of one generation. `result` holds what has come so far."""

    def __init__(
        self,
        loop: Loop,
        model: Model,
        provenance: Provenance,
        *,
        stop: Sequence[str],
        called: float,
        window: Window | None,
    ) -> None:
        """Read `loop`, which writes tokens of `model`, until the text has one of the `stop` strings.

        `called`: when the text was asked for, by `time.perf_counter`. `window`: what counts its energy.
        """
        self._loop = loop
        self._model = model
        self._provenance = provenance
        self._text = TextStream(stop)
        self._n_prompt = len(loop.tokens)
        self._window = window
        self._energy: Measurement | None = None
        self._n_alone = 0
        self._parts: list[str] = []
        self._ids: list[int] = []
        self._tally = Tally()
        self._ttft_s: float | None = None
        self._called = called
        self._ended: float | None = None
        self._stop_reason: StopReason = "interrupted"
        self._note = ""
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """End the generation here; `result` stays."""
        self._tokens.close()
        self._end_energy()  # also where no token was ever asked for

    @property
    def timeline(self) -> list[int]:
        """The prompt and what was emitted."""
        return self._loop.tokens

    @property
    def result(self) -> Result:
        """The Result of the tokens so far; its stop_reason is "interrupted" until the end is known."""
        made_with = self._provenance
        return Result(
            text="".join(self._parts),
            token_ids=tuple(self._ids),
            prompt_tokens=self._n_prompt,
            stop_reason=self._stop_reason,
            seed=made_with.seed,
            target=made_with.target,
            draft=made_with.draft,
            kernels=made_with.kernels,
            sources=self._loop.sources(),
            note=self._note or self._loop.note(),
            stats=self._stats(),
            energy=self._energy,
            mode=made_with.mode,
            n_cached=self._loop.n_known,
            target_share=1.0 - self._n_alone / len(self._ids) if self._ids else 1.0,
        )

    def _end_energy(self) -> None:
        if self._window:
            self._energy, self._window = self._window.end(), None

    def _stats(self) -> Stats:
        return summarise(
            self._tally,
            n_prompt=self._loop.n_read,
            n_tokens=len(self._ids),
            ttft_s=self._ttft_s,
            total_s=(self._ended or time.perf_counter()) - self._called,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def _run(self) -> Generator[Token]:
        waiting: Token | None = None  # the last token, while text is held back with it
        emitted = self._emitted()
        try:
            for token, origin, said in emitted:
                if waiting:
                    yield waiting
                    waiting = None
                started = time.perf_counter()
                text = self._text.feed(self._model.piece(token))
                made = (
                    Token(token, text, origin, said.logprob, said.top) if said else Token(token, text, origin)
                )
                self._parts.append(made.text)
                self._ids.append(token)
                self._n_alone += origin == "alone"
                self._tally.rest_s += time.perf_counter() - started
                if self._text.stopped:
                    self._stop_reason = "stop"
                    yield made
                    return
                if self._text.holds:
                    waiting = made
                else:
                    yield made
            self._stop_reason = self._loop.stop_reason
        finally:
            emitted.close()
            self._ended = time.perf_counter()
            self._end_energy()
            self._note = self._loop.note()  # now: it speaks of tables that later texts go on changing
            held = self._text.finish()
            self._parts.append(held)
        if waiting:
            yield replace(waiting, text=waiting.text + held)

    def _emitted(self) -> Generator[tuple[int, Origin, Logprobs | None]]:
        """The loop's tokens with what is known of them, without an end-of-generation token."""
        events = self._loop.events()
        try:
            for event in events:
                event.add_to(self._tally)
                if self._ttft_s is None and event.tokens:
                    self._ttft_s = time.perf_counter() - self._called
                logprobs = event.logprobs or (None,) * len(event.tokens)
                for token, origin, said in zip(event.tokens, event.origins, logprobs, strict=True):
                    if not self._model.is_eog(token):
                        yield token, origin, said
        finally:
            events.close()
