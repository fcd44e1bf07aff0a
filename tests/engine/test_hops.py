"""How many calls lie between a reader of a stream and the library: each one more is one to read."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.llama import kv_cache

MOST = 7


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_calls_from_a_stream_to_the_library(
    tiny_path: Path, tiny_draft_path: Path, drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From `Stream.__next__` to `llama_decode`, in passes over a prompt, over a token and over a draft."""
    chains: set[tuple[str, ...]] = set()
    library, model_of = kv_cache.llama.llama_decode, kv_cache.llama.llama_get_model

    def recorded(context, batch):
        names = [frame.function for frame in inspect.stack()[1:]]
        if "__next__" in names and model_of(context) == engine.target.handle:
            chains.add((*reversed(names[: names.index("__next__")]), "llama_decode"))
        return library(context, batch)

    monkeypatch.setattr(kv_cache.llama, "llama_decode", recorded)
    with Engine(tiny_path, tiny_draft_path, drafter=drafter) as engine:
        written = list(engine.stream("one two three", n_predict=20, gamma=2 if drafter == "model" else None))
    assert written and chains
    assert max(map(len, chains)) <= MOST, sorted(chains, key=len)[-1]
