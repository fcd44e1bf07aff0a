"""An engine for several texts at once, made of one for one text: what a batch sees of it is the same."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.decoding.options import Options
from edgespec.decoding.records import Result, Token
from edgespec.engine.engine import Engine
from edgespec.errors import UsageError
from edgespec.llama.weights import Model


class ReplayedText:
    """A text that was written before, of which each step gives a token."""

    def __init__(self, tokens: list[Token], result: Result, failure: Exception | None, n_cells: int) -> None:
        self._tokens = tokens
        self.result = result
        self._failure = failure
        self.n_cells = n_cells
        self._n_shown = self._n_taken = 0
        self.closed = False

    @property
    def finished(self) -> bool:
        return self._failure is not None or self._n_shown == len(self._tokens)

    def step(self) -> None:
        self._n_shown = min(self._n_shown + 1, len(self._tokens))

    def made(self) -> list[Token]:
        if self.finished:
            self.closed = True
        if self._failure:
            raise self._failure
        new = self._tokens[self._n_taken : self._n_shown]
        self._n_taken = self._n_shown
        return new

    def close(self) -> None:
        self.closed = True


class SharedEngine:
    """Texts take a cell for each token of prompt and answer; `failing` prompts fail when they run."""

    def __init__(self, engine: Engine, *, parallel: int, n_cells: int = 1 << 20) -> None:
        self.engine = engine
        self.parallel = parallel
        self.n_cells = n_cells
        self.texts: list[ReplayedText] = []
        self.most_running = 0
        self.most_cells = 0
        self.failing: set[int] = set()
        """Lengths of prompts whose texts fail."""

    @property
    def target(self) -> Model:
        return self.engine.target

    @property
    def running(self) -> list[ReplayedText]:
        return [text for text in self.texts if not text.closed]

    def has_room(self, prompt: Sequence[int], n_predict: int | None) -> bool:
        used, n_prompt = sum(text.n_cells for text in self.running), len(prompt)
        return len(self.running) < self.parallel and used + n_prompt + (n_predict or 0) <= self.n_cells

    def stream(self, prompt: Sequence[int], options: Options) -> ReplayedText:
        if not self.has_room(prompt, options.n_predict):
            raise UsageError("there is no room for one more text")
        stream = self.engine.stream(prompt, options)
        tokens = [*stream]
        failure = RuntimeError("the text /secret/path failed") if len(prompt) in self.failing else None
        text = ReplayedText(tokens, stream.result, failure, len(prompt) + (options.n_predict or 0))
        self.texts.append(text)
        self.most_running = max(self.most_running, len(self.running))
        self.most_cells = max(self.most_cells, sum(text.n_cells for text in self.running))
        return text

    def step(self) -> None:
        assert self.running, "a pass over nothing"
        for text in self.running:
            text.step()
