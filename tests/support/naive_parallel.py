"""An engine for several texts that shares nothing between them: each text is written whole when it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from edgespec import Engine
from edgespec.options import Options
from edgespec.records import Result, Token


class NaiveText:
    """A text that hands out one token a step."""

    def __init__(self, tokens: Sequence[Token], result: Result) -> None:
        self.result = result
        self._tokens = deque(tokens)
        self._made: list[Token] = []
        self.closed = False

    @property
    def finished(self) -> bool:
        return self.closed or not self._tokens

    def step(self) -> None:
        if self._tokens:
            self._made.append(self._tokens.popleft())

    def made(self) -> list[Token]:
        made, self._made = self._made, []
        return made

    def close(self) -> None:
        self.closed = True


class NaiveParallel(Engine):
    """An `Engine` with room for `parallel` texts; `most_at_once` is how many it ever ran."""

    def __init__(self, *arguments: Any, parallel: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.room = parallel
        self.most_at_once = 0
        self.texts: list[NaiveText] = []

    def _running(self) -> list[NaiveText]:
        return [text for text in self.texts if not text.finished]

    def has_room(self, n_prompt: int, n_predict: int | None) -> bool:
        return len(self._running()) < self.room

    def stream(self, prompt: Any, options: Options | None = None, **keywords: Any) -> Any:
        whole = super().stream(prompt, options, **keywords)
        tokens = [*whole]
        self.texts.append(NaiveText(tokens, whole.result))
        self.most_at_once = max(self.most_at_once, len(self._running()))
        return self.texts[-1]

    def step(self) -> None:
        for text in self._running():
            text.step()
