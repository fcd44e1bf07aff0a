"""What a token of an answer costs does not grow with the answer."""

from __future__ import annotations

import pytest

from edgespec.apps.server.choice_writers import AnswerText, ChoiceWriter
from edgespec.apps.server.responses.routes import OutputTextWriter
from edgespec.apps.server.responses.schema import OutputMessage
from edgespec.apps.server.tool_calls.answer_reader import PLAIN, AnswerForm
from edgespec.decoding.records import Token
from edgespec.llama.weights import Model


@pytest.mark.parametrize("expected", [PLAIN, AnswerForm({"f": {}})], ids=["text", "tools"])
def test_a_piece_of_a_stream_needs_no_text_before_it(
    tiny_target: Model, monkeypatch: pytest.MonkeyPatch, expected: AnswerForm
) -> None:
    written = AnswerText(tiny_target, keeps_tokens=True)
    writing = ChoiceWriter(written, expected)
    tokens = [Token(i, tiny_target.piece(i).decode(), "target", -1.0) for i in range(65, 91)] * 20
    with monkeypatch.context() as patched:
        patched.setattr(AnswerText, "text", property(lambda _: pytest.fail("all of the text was made")))
        n_taken = 0
        for token in tokens:
            n_taken += sum(len(part.tokens) for part in writing.add([token]))
            assert len(written._waiting) < 5
    assert written.text == "".join(token.text for token in tokens)
    assert n_taken > len(tokens) - 5


def test_logprobs_so_far_are_not_copied() -> None:
    writer = OutputTextWriter(OutputMessage(id="m"), 0)
    list(writer.begin())
    all_of_them = writer._part.logprobs
    for i in range(3):
        list(writer.add("x", [{"token": "x", "logprob": -i, "bytes": [120], "top_logprobs": []}]))
    assert writer._part.logprobs is all_of_them and len(all_of_them) == 3
