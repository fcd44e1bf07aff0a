"""What a token of an answer costs does not grow with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from edgespec.apps.server.choice_writers import AnswerHead, AnswerText, ChatChoiceWriter, TextChoiceWriter
from edgespec.apps.server.response_schema import TokenLogprob
from edgespec.apps.server.responses.routes import OutputTextWriter
from edgespec.apps.server.responses.schema import OutputMessage
from edgespec.apps.server.streaming import AnswerWriter, RequestRun
from edgespec.apps.server.tool_calls.answer_reader import PLAIN, AnswerForm
from edgespec.decoding.records import Token
from edgespec.llama.weights import Model


class CountingWriter(AnswerWriter[str, str]):
    """Counts how often it writes."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def add(self, index: int, made: Sequence[str], /) -> str:
        self.written.append(f"{index}: {''.join(made)}")
        return ""

    def finish(self, index: int, end: str, /) -> str:
        return end

    def whole(self, ends: Sequence[str], /) -> str:
        return " ".join(ends)


@pytest.mark.parametrize("n", [1, 300])
def test_an_answer_that_does_not_stream_is_written_once(n: int) -> None:
    def start(end: str) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
        def begin(send: Callable[[Any], None]) -> Callable[[], None]:
            for _ in range(n):
                send(["x"])
            asyncio.get_running_loop().call_soon(send, end)
            return lambda: None

        return begin

    async def answer() -> tuple[bytes, list[str]]:
        writer = CountingWriter()
        run = RequestRun[str, str]([start("a"), start("b")], print, parallel=2)
        gone = asyncio.Event()

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        request = Request({"type": "http", "headers": []}, receive)
        return bytes((await run.answer(request, writer, streams=False)).body), writer.written

    assert asyncio.run(answer()) == (b"a b", [f"0: {'x' * n}", f"1: {'x' * n}"])


@pytest.mark.parametrize("expected", [None, PLAIN, AnswerForm({"f": {}})], ids=["text", "chat", "tools"])
def test_a_piece_of_a_stream_needs_no_text_before_it(
    tiny_target: Model, monkeypatch: pytest.MonkeyPatch, expected: AnswerForm | None
) -> None:
    head, written = AnswerHead("id", 0, "m", "fp"), AnswerText(tiny_target, keeps_tokens=True)
    writing = ChatChoiceWriter(head, written, expected) if expected else TextChoiceWriter(head, written)
    tokens = [Token(i, tiny_target.piece(i).decode(), "target", -1.0) for i in range(65, 91)] * 20
    with monkeypatch.context() as patched:
        patched.setattr(AnswerText, "text", property(lambda _: pytest.fail("all of the text was made")))
        n_taken = n_unread = 0
        for token in tokens:
            for chunk in writing.add([token]):
                if expected:
                    n_taken += len(chunk.choices[0].logprobs.content)
            n_unread = max(n_unread, sum(map(len, written._unread)) if expected else 0)
            assert len(written._waiting) < 5
    assert n_unread < 20
    assert written.text == "".join(token.text for token in tokens)
    assert not expected or n_taken > len(tokens) - 5


def test_logprobs_so_far_are_not_copied() -> None:
    writer = OutputTextWriter(OutputMessage(id="m"), 0)
    list(writer.begin())
    all_of_them = writer._part.logprobs
    for i in range(3):
        list(writer.add("x", [TokenLogprob(token="x", logprob=-i, bytes=[120], top_logprobs=[])]))
    assert writer._part.logprobs is all_of_them and len(all_of_them) == 3
