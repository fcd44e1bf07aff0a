"""What a token of an answer costs does not grow with the answer."""

from __future__ import annotations

import pytest

from edgespec.apps.server.answer_events import AnswerEvents, AnswerText
from edgespec.apps.server.tool_calls.answer_reader import PLAIN, AnswerForm
from edgespec.decoding.records import Token
from edgespec.llama.weights import Model


@pytest.mark.parametrize("expected", [PLAIN, AnswerForm({"f": {}})], ids=["text", "tools"])
def test_a_piece_of_a_stream_needs_no_text_before_it(
    tiny_target: Model, monkeypatch: pytest.MonkeyPatch, expected: AnswerForm
) -> None:
    written = AnswerText(tiny_target, keeps_tokens=True)
    events = AnswerEvents(written, expected)
    tokens = [Token(i, tiny_target.piece(i).decode(), "target", -1.0) for i in range(65, 91)] * 20
    with monkeypatch.context() as patched:
        patched.setattr(AnswerText, "text", property(lambda _: pytest.fail("all of the text was made")))
        n_taken = 0
        for token in tokens:
            n_taken += sum(len(event.tokens) for event in events.add([token]))
            assert len(written._waiting) < 5
    assert written.text == "".join(token.text for token in tokens)
    assert n_taken > len(tokens) - 5
