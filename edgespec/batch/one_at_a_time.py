"""An engine that writes one text at a time, as one that writes several writes one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from edgespec.engine import Engine
from edgespec.llama.weights import Model
from edgespec.options import Options
from edgespec.records import Result, Token
from edgespec.stream import Stream


class OneText:
    """The text that is being written."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._new: list[Token] = []
        self._failure: Exception | None = None
        self.finished = False

    @property
    def result(self) -> Result:
        """The result so far."""
        return self._stream.result

    def step(self) -> None:
        """Write a token."""
        try:
            token = next(self._stream, None)
        except Exception as error:  # noqa: BLE001 - told by `made`
            self._failure = error
            token = None
        if token:
            self._new.append(token)
        self.finished = token is None

    def made(self) -> list[Token]:
        """Return the tokens since the last call. Raises what ended the text."""
        if self._failure:
            raise self._failure
        new, self._new = self._new, []
        return new

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(Exception):
            self._stream.close()


class OneAtATime:
    """The engine."""

    parallel = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._text: OneText | None = None

    @property
    def target(self) -> Model:
        """The model."""
        return self._engine.target

    def has_room(self, n_prompt: int, n_predict: int | None) -> bool:
        """Return whether a text can begin."""
        return (self._text is None or self._text.finished) and n_prompt < self.target.n_ctx_train

    def stream(self, prompt: Sequence[int], options: Options) -> OneText:
        """Begin a text."""
        self._text = OneText(self._engine.stream(prompt, options))
        return self._text

    def step(self) -> None:
        """Write a token."""
        if self._text:
            self._text.step()
