"""One engine used by several threads, and streams that others end: no part of a text looks like the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec import Engine, Options, SamplingParams
from edgespec.errors import EdgespecError, UsageError

PROMPTS = ["the quick", "brown fox", "jumps over", "the lazy dog"]
GREEDY = Options(params=SamplingParams(temperature=0), n_predict=24)


@pytest.fixture(scope="module")
def texts(tiny_path: Path) -> list[str]:
    """What a thread alone writes for each prompt."""
    with Engine(tiny_path, drafter="none") as engine:
        return [engine.generate(prompt, GREEDY).text for prompt in PROMPTS]


@pytest.fixture(params=["none", "suffix"])
def engine(tiny_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tiny_path, drafter=request.param) as engine:
        yield engine


def read(engine: Engine, prompt: str) -> str:
    """Read a stream token by token."""
    return "".join(token.text for token in engine.stream(prompt, GREEDY))


def in_threads(work: Callable[[str], str]) -> list[str]:
    """Return what `work` gives for each prompt three times over, all in threads at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(work, PROMPTS * 3))


def test_threads_take_turns(engine: Engine, texts: list[str]) -> None:
    assert in_threads(lambda prompt: engine.generate(prompt, GREEDY).text) == texts * 3


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_threads_share_passes(tiny_path: Path, texts: list[str], how: str) -> None:
    with Engine(tiny_path, drafter="none", parallel=len(PROMPTS)) as engine:

        def work(prompt: str) -> str:
            return engine.generate(prompt, GREEDY).text if how == "generate" else read(engine, prompt)

        assert in_threads(work) == texts * 3


def test_streams_in_threads_replace_each_other_with_an_error_or_are_whole(
    engine: Engine, texts: list[str]
) -> None:
    def work(prompt: str) -> str:
        try:
            return read(engine, prompt)
        except EdgespecError as error:
            assert "ended before it was complete" in str(error)
            return "replaced"

    found = in_threads(work)
    assert all(text in ("replaced", whole) for text, whole in zip(found, texts * 3, strict=True))
    assert any(text != "replaced" for text in found), "the last one to begin is whole"


def test_a_replaced_stream_says_so(engine: Engine, texts: list[str]) -> None:
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert engine.generate(PROMPTS[1], GREEDY).text == texts[1]
    with pytest.raises(EdgespecError, match="began another; read it first, or choose parallel"):
        next(stream)
    assert stream.result.stop_reason == "interrupted"
    assert texts[0].startswith(stream.result.text)


@pytest.mark.parametrize("end", ["close", "forget"])
def test_a_stream_of_an_engine_that_ended_it(tiny_path: Path, end: str) -> None:
    with Engine(tiny_path, drafter="none") as engine:
        stream = engine.stream(PROMPTS[0], GREEDY)
        next(stream)
        getattr(engine, end)()
        with pytest.raises(EdgespecError, match="ended before it was complete"):
            list(stream)


def test_a_stream_that_its_reader_closed_ends_quietly(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert list(stream) == []
    engine.generate(PROMPTS[1], GREEDY)
    assert list(stream) == []


def test_a_complete_stream_stays_so(engine: Engine, texts: list[str]) -> None:
    stream = engine.stream(PROMPTS[0], GREEDY)
    assert "".join(token.text for token in stream) == texts[0]
    engine.generate(PROMPTS[1], GREEDY)
    assert list(stream) == []
    assert stream.result.stop_reason == "length"


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_text_inside_on_step_is_refused(tiny_path: Path, texts: list[str], parallel: int) -> None:
    with Engine(tiny_path, drafter="suffix", parallel=parallel) as engine:
        with pytest.raises(UsageError, match="on_step"):
            engine.generate(PROMPTS[0], GREEDY, on_step=lambda _step: engine.generate(PROMPTS[1], GREEDY))
        assert engine.generate(PROMPTS[1], GREEDY).text == texts[1]
