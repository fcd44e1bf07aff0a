"""A server whose model writes what a test says: a grammar holds each answer to its text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgespec.decoding.grammars import Grammar
from server_app import Served


@contextlib.contextmanager
def writing(served: Served, *texts: str) -> Iterator[list[str]]:
    """Have the next answers of `served` be `texts` while entered; yield their prompts, which come."""
    model, run, left, prompts = served.engine.target, served.worker.run, [*texts], list[str]()

    def scripted(tokens: list[int], options: Any, **rest: Any) -> Any:
        prompts.append(b"".join(model.piece(token, special=True) for token in tokens).decode())
        return run(tokens, replace(options, grammar=Grammar.from_choice(model, [left.pop(0)])), **rest)

    served.worker.run = scripted  # type: ignore[assignment,method-assign]
    try:
        yield prompts
    finally:
        del served.worker.run
    assert not left, "all texts were asked for"
