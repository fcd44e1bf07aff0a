"""One generation as its reader sees it: tokens with their text, and the result so far."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from edgespec.decoding.generate import DraftPrefill, Generation, Prefill
from edgespec.decoding.text import TextStream
from edgespec.drafting.trees import TreeDrafter
from edgespec.energy import Measurement, Window
from edgespec.llama.weights import Model
from edgespec.lossy.cascade import Alone, Cascade
from edgespec.platform.memory import peak_rss_bytes
from edgespec.records import Logprobs, Mode, Origin, Result, Stats, StopReason, Tally, Token, summarise


class Stream:
    """An iterator over the tokens of one generation. `result` holds what has come so far."""

    def __init__(
        self,
        generation: Generation | Cascade,
        model: Model,
        chain: TreeDrafter | None,
        *,
        stop: Sequence[str],
        seed: int | None,
        called: float,
        names: tuple[str, str | None],
        kernels: str,
        window: Window | None,
        mode: Mode = "exact",
    ) -> None:
        self._generation = generation
        self._model = model
        self._chain = chain
        self._text = TextStream(stop)
        self._n_prompt = len(generation.tokens)
        self._seed = seed
        self._names = names
        self._kernels = kernels
        self._window = window
        self._energy: Measurement | None = None
        self._mode = mode
        self._n_alone = 0
        self._parts: list[str] = []
        self._ids: list[int] = []
        self._tally = Tally()
        self._prefill_s = self._draft_prefill_s = 0.0
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
        return self._generation.tokens

    @property
    def result(self) -> Result:
        """The Result of the tokens so far; its stop_reason is "interrupted" until the end is known."""
        return Result(
            text="".join(self._parts),
            token_ids=tuple(self._ids),
            prompt_tokens=self._n_prompt,
            stop_reason=self._stop_reason,
            seed=self._seed,
            target=self._names[0],
            draft=self._names[1],
            kernels=self._kernels,
            sources=self._chain.sources() if self._chain else {},
            note=self._note or self._chain_note(),
            stats=self._stats(),
            energy=self._energy,
            mode=self._mode,
            n_cached=0 if isinstance(self._generation, Cascade) else self._generation.n_known,
            target_share=1.0 - self._n_alone / len(self._ids) if self._ids else 1.0,
        )

    def _chain_note(self) -> str:
        if isinstance(self._generation, Cascade):
            return self._generation.note()
        if self._chain is None:
            return "nothing was drafted: no drafter was asked for, or none can be used"
        return self._chain.note()

    def _end_energy(self) -> None:
        if self._window:
            self._energy, self._window = self._window.end(), None

    def _stats(self) -> Stats:
        return summarise(
            self._tally,
            n_prompt=self._n_read,
            n_tokens=len(self._ids),
            prefill_s=self._prefill_s,
            ttft_s=self._ttft_s,
            total_s=(self._ended or time.perf_counter()) - self._called,
            draft_prefill_s=self._draft_prefill_s,
            peak_rss_bytes=peak_rss_bytes(),
        )

    @property
    def _n_read(self) -> int:
        """Tokens that the target read in `prefill_s`: the prompt, in a cascade what it read when woken."""
        generation = self._generation
        return generation.n_read if isinstance(generation, Cascade) else self._n_prompt - generation.n_known

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
            self._stop_reason = self._generation.stop_reason
        finally:
            emitted.close()
            self._ended = time.perf_counter()
            self._end_energy()
            self._note = self._chain_note()  # now: the scheduler is the engine's, and goes on to other texts
            held = self._text.finish()
            self._parts.append(held)
        if waiting:
            yield replace(waiting, text=waiting.text + held)

    def _emitted(self) -> Generator[tuple[int, Origin, Logprobs | None]]:
        """The loop's tokens with what is known of them, without an end-of-generation token."""
        events = self._generation.events()
        try:
            for event in events:
                if isinstance(event, DraftPrefill):
                    self._draft_prefill_s += event.seconds
                    continue
                tokens: list[tuple[int, Origin]]
                said: Sequence[Logprobs] = ()
                if isinstance(event, Prefill):  # of a cascade each time that the target is woken
                    self._prefill_s += event.seconds
                    tokens, said = [(event.token, "target")], event.logprobs
                elif isinstance(event, Alone):
                    self._tally.draft_s += event.seconds
                    tokens = [] if event.token is None else [(event.token, "alone")]
                else:
                    self._tally.add(event)
                    tokens, said = list(zip(event.tokens, event.origins, strict=True)), event.logprobs
                if self._ttft_s is None and tokens:
                    self._ttft_s = time.perf_counter() - self._called
                for (token, origin), logprobs in zip_longest(tokens, said):
                    if not self._model.is_eog(token):
                        yield token, origin, logprobs
        finally:
            events.close()
