"""Stand-ins for sessions: language models that are functions of the prefix, on a clock of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgespec.decoding.session import Forward, ForwardResult, SequenceTokens
from edgespec.drafting.draft_model import DraftModel


def evaluate(model: DraftModel, tokens: Sequence[int], guesses: Sequence[int] = ()) -> ForwardResult:
    """The result of the pass of a draft model, which nobody shares."""
    asked = model.ask(tokens, guesses)
    return asked.finish(asked.run()) if isinstance(asked, Forward) else asked


def run(model: DraftModel, tokens: Sequence[int], guesses: Sequence[int] = ()) -> np.ndarray:
    """The logits after `tokens` and after each guess."""
    return evaluate(model, tokens, guesses).rows


class Clock:
    """A clock that moves only when a pass is paid for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ToySession:
    """What Generation and DraftModel need of a Session. `logits(prefix)` is the model."""

    def __init__(
        self,
        logits: Callable[[tuple[int, ...]], np.ndarray],
        n_vocab: int,
        *,
        clock: Clock | None = None,
        cost: Callable[[int], float] = lambda n: 0.0,
        growth: float = 0.0,
        is_eog: Callable[[int], bool] = lambda token: False,
        n_ctx: int = 1 << 20,
    ) -> None:
        self.model = SimpleNamespace(
            n_vocab=n_vocab, is_eog=is_eog, path="toy", name="toy", keeps_state=False
        )
        self.cache = self
        self.sequence = 0
        self.n_ctx = n_ctx
        self.most_drafted = n_ctx
        self.tokens: list[int] = []
        self.passes: list[int] = []
        self._logits, self._clock, self._cost = logits, clock, cost
        self._growth = growth  # seconds of each token for each one before it

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    n_held = n_past

    def drop_first(self, n_tokens: int) -> bool:
        """Nothing is dropped: what a toy says depends on all of its tokens."""
        return False

    def pay(self, n_tokens: int) -> None:
        """Let the clock move on by a pass over `n_tokens`."""
        if self._clock:
            self._clock.now += self._cost(n_tokens) + self._growth * n_tokens * self.n_past

    def forward(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        """The pass of a cache that this session has for itself."""
        (part,) = parts
        started = time.perf_counter()
        rows = self.eval(part.tokens, n_logits=part.n_logits, parents=part.parents)
        return [ForwardResult(rows, time.perf_counter() - started, len(part.tokens))]

    def eval(
        self, tokens: Sequence[int], *, n_logits: int = 1, parents: Sequence[int] | None = None
    ) -> np.ndarray:
        self.passes.append(len(tokens))
        self.pay(len(tokens))
        n_tree = len(parents or ())
        assert parents is None or n_logits == n_tree + 1
        self.tokens += tokens[: len(tokens) - n_tree]
        n = len(self.tokens)
        rows = [self._logits(tuple(self.tokens[:i])) for i in range(n - n_logits + n_tree + 1, n + 1)]
        before = tuple(self.tokens)
        texts: list[tuple[int, ...]] = []
        for i, (token, parent) in enumerate(zip(tokens[len(tokens) - n_tree :], parents or (), strict=True)):
            texts.append((*(texts[parent] if parent >= 0 else before), token))
            rows.append(self._logits(texts[-1]))
            if len(texts[-1]) == n + i + 1:  # the trunk stays
                self.tokens.append(token)
        return np.array(rows, np.float32).reshape(n_logits, self.model.n_vocab)

    def rewind(self, n_keep: int) -> int:
        assert 0 <= n_keep <= len(self.tokens)
        del self.tokens[n_keep:]
        return n_keep

    def clear(self) -> None:
        self.rewind(0)

    def close(self) -> None:
        pass


class ToyStateSession(ToySession):
    """A model that keeps a state: it goes back to where one of its last `n_marks` passes began."""

    def __init__(
        self,
        logits: Callable[[tuple[int, ...]], np.ndarray],
        n_vocab: int,
        *,
        n_marks: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(logits, n_vocab, **options)
        self.model.keeps_state = True
        self._n_marks, self._marks = n_marks, [0]

    def eval(
        self, tokens: Sequence[int], *, n_logits: int = 1, parents: Sequence[int] | None = None
    ) -> np.ndarray:
        assert parents is None or list(parents) == list(range(-1, len(parents) - 1)), "a chain"
        if n_logits > 1 or self._n_marks > 1:
            self._marks = [*self._marks, self.n_past][-self._n_marks :]
        return super().eval(tokens, n_logits=n_logits, parents=parents)

    def rewind(self, n_keep: int) -> int:
        if n_keep < self.n_past:
            n_keep = max((n for n in self._marks if n <= n_keep), default=0)
            self._marks = [n for n in self._marks if n <= n_keep]
        return super().rewind(n_keep)
