"""One generation for its reader: tokens with their text, and the result so far."""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edgespec.decoding.generate import Loop
from edgespec.decoding.records import (
    PromptProgress,
    Result,
    Stats,
    Step,
    StopReason,
    Token,
    summarise,
)
from edgespec.errors import EdgespecError
from edgespec.platform.machine import peak_rss_bytes
from edgespec.platform.metering import Measurement, MeterWindow
from edgespec.platform.processes import HomeLock

if TYPE_CHECKING:
    from edgespec.engine.pair import Pair, Plan


class Stream:
    """An iterator over the tokens of one generation. `result` holds what has come so far.

    The loop reports to it (`append`, `end`); a token becomes text when the reader takes it. Threads
    may read streams of one engine, each its own: the engine's lock lets one at a time proceed.
    """

    def __init__(
        self, loop: Loop, pair: Pair, plan: Plan, *, called: float, window: MeterWindow | None
    ) -> None:
        """Read the tokens that `loop` writes, until the text ends by the options of `plan`.

        `called`: the time of the call, by `time.perf_counter`. `window`: counts its energy.
        """
        self._loop, self._pair, self._plan = loop, pair, plan
        options, self._model = plan.options, pair.target
        self._text = TextStream(options.stop)
        self._is_end = options.ends(self._model.is_eog)
        self._is_last = options.until() if options.until else _never
        self._n_prompt = len(loop.tokens)
        self._window = window
        self._energy: Measurement | None = None
        self.energy_share = 1.0
        """Its share of the energy measured while it ran together with other requests."""
        self._n_alone = 0
        self._parts: list[str] = []
        self._ids: list[int] = []
        self._ttft_s: float | None = None
        self._called = called
        self._ended: float | None = None
        self._stop_reason: StopReason = "interrupted"
        self._note = ""
        self._plain_rate: float | None = None
        self._emitted: deque[Token] = deque()  # no text yet
        self._waiting: Token | None = None  # the last token, while text is held back with it
        self._end_token: Token | None = None
        self._loop_ended = False
        self._error: BaseException | None = None
        self.advance: Callable[[], None] = self.close
        """Advances the loop; set by its driver."""
        self.lock = HomeLock("the engine")
        """The lock held while texts of the engine advance; set by the loop's driver."""
        self.confirm: Callable[[], None] = lambda: None
        """Called before the text is complete, which it may `cut`; set by its driver."""
        self.on_closed: Callable[[Stream], None] = lambda _stream: None
        """Called once, when nothing more will come; set by its driver."""

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        while True:
            with self.lock:  # for a pass at most: other threads have their turn between two
                if token := self._next_token():
                    return token
                self._raise()
                if self.finished:
                    raise StopIteration
                try:
                    self.advance()
                except BaseException:
                    self.close()
                    raise

    def made(self) -> list[Token]:
        """Return the tokens made since the last call, without computing anything.

        Raises the error that ended the generation, once no tokens are left.
        """
        tokens = []
        with self.lock:
            while token := self._next_token():
                tokens.append(token)
            if not tokens:
                self._raise()
        return tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self._ended is not None

    def close(self) -> None:
        """End the generation here; `result` stays. In a forked child, do nothing."""
        if not self.lock.is_here:
            return
        with self.lock:
            if not self.finished:
                self._finish()

    def cut(self, error: EdgespecError) -> None:
        """End the generation, unasked by its reader, who gets `error` when reading on."""
        if not self.finished:
            self._finish()
            self._loop_ended, self._error = True, error

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was emitted."""
        return self._loop.tokens

    @property
    def prompt_progress(self) -> PromptProgress:
        """How much of the prompt was read; any thread may ask, even while a pass runs."""
        return PromptProgress(self._loop.n_prompt_read, self._n_prompt)

    @property
    def result(self) -> Result:
        """The Result of the tokens so far; its stop_reason is "interrupted" until the end is known."""
        with self.lock:
            return self._result()

    def _result(self) -> Result:
        pair, plan = self._pair, self._plan
        return Result(
            text="".join(self._parts),
            token_ids=tuple(self._ids),
            prompt_tokens=self._n_prompt,
            stop_reason=self._stop_reason,
            seed=plan.coins.seed if plan.is_reproducible else None,
            target=pair.target_name,
            draft=pair.draft.name if plan.uses_model else None,
            kernels=pair.kernels,
            sources=self._loop.sources(),
            note=self._note or self._loop.note(),
            stats=self._stats(),
            plain_tokens_per_s=self._plain_rate if self.finished else self._loop.plain_rate(),
            energy=self._energy,
            mode=plan.mode,
            n_cached=self._loop.n_known,
            prompt_logprobs=tuple(self._loop.prompt_logprobs),
            end_token=self._end_token,
            target_share=1.0 - self._n_alone / len(self._ids) if self._ids else 1.0,
        )

    # ---- told by whoever runs the loop ----

    def append(self, made: Step) -> None:
        """Append the tokens of a step of the loop."""
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._called
        logprobs = made.logprobs or (None,) * len(made.tokens)
        for token, origin, said in zip(made.tokens, made.origins, logprobs, strict=True):
            new = Token(token, "", origin, said.logprob, said.top) if said else Token(token, "", origin)
            if not self._is_end(token):
                self._emitted.append(new)
            elif said:
                self._end_token = new

    def end(self, error: BaseException | None = None) -> None:
        """Note that the loop ended, by itself or because of `error`."""
        self._loop_ended, self._error = True, error

    # ---- tokens with their text ----

    def _next_token(self) -> Token | None:
        """Return the next token; None if none is there."""
        if self.finished:
            return None
        if self._waiting and self._emitted:
            token, self._waiting = self._waiting, None
            return token
        while self._emitted:
            made = self._write(self._emitted.popleft())
            if self._is_last(made) or self._text.stopped:
                self.confirm()
                if self.finished:
                    return None
                self._stop_reason = "stop"
                self._finish()
                return made
            if not self._text.holds:
                return made
            if self._emitted:
                return made
            self._waiting = made
        if self._loop_ended:
            self.confirm()
            if self.finished:
                return None
            self._stop_reason = self._loop.stop_reason
            waiting, self._waiting = self._waiting, None
            held = self._finish()
            return replace(waiting, text=waiting.text + held) if waiting else None
        return None

    def _write(self, token: Token) -> Token:
        started = time.perf_counter()
        piece = self._model.piece(token.id)
        # A control token, which shows no text, also ends a stop string that has begun.
        text = self._text.feed(piece) if piece or not self._text.holds else self._text.finish()
        self._parts.append(text)
        self._ids.append(token.id)
        self._n_alone += token.origin == "alone"
        self._loop.tally.rest_s += time.perf_counter() - started
        return replace(token, text=text)

    def _finish(self) -> str:
        """End it; return the text that was held back."""
        self._ended = time.perf_counter()
        self._emitted.clear()
        if self._window:
            self._energy, self._window = self._window.end(), None
        self.on_closed(self)
        if self._energy:
            self._energy = self._energy.part(self.energy_share)
        self._note = self._loop.note()  # now: it describes tables that later texts change
        self._plain_rate = self._loop.plain_rate()
        held = self._text.finish()
        self._parts.append(held)
        return held

    def _raise(self) -> None:
        error = self._error
        if error and self._loop_ended and not self._emitted:
            self.close()
            self._error = None
            raise error

    def _stats(self) -> Stats:
        return summarise(
            self._loop.tally,
            n_prompt=self._loop.n_read,
            n_tokens=len(self._ids),
            ttft_s=self._ttft_s,
            total_s=(self._ended or time.perf_counter()) - self._called,
            peak_rss_bytes=peak_rss_bytes(),
        )


def _never(_token: Token) -> bool:
    return False


class TextStream:
    """Turns the bytes of successive tokens into text.

    Bytes of an unfinished character wait for the rest of it. Text that may be the beginning of a
    stop string waits until it is decided. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; it and what follows are not part of the text."""

    @property
    def holds(self) -> bool:
        """Whether text waits because it may be the beginning of a stop string."""
        return bool(self._held)

    def feed(self, piece: bytes) -> str:
        """Return the text that became certain with `piece`."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(piece)
        found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[0]]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back for a stop string that did not come.

        An unfinished character is dropped: half of it is not text.
        """
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
