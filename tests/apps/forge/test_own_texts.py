"""Prompts and texts of the user's own: from the history, from files."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from edgespec.apps.forge.data_stage import (
    CONTEXT,
    PASSAGE,
    HistoryTexts,
    all_prompts,
    file_prompts,
    file_texts,
    in_turns,
)
from edgespec.apps.forge.dataset import BUILT_IN, FROM_FILE, FROM_HISTORY, READ, is_held_out
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt
from edgespec.drafting.history import History
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import tokenizer_fingerprint
from edgespec.llama.weights import Model
from tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


ANSWER = " and so the answer goes on and on, for quite a while, until it ends at some time."


def history_of(model: Model, documents: list[list[int]]) -> History:
    """A history of these documents alone."""
    history = History(tokenizer_fingerprint(model.header))
    history.path.unlink(missing_ok=True)
    history.extend(documents)
    return history


def asked(model: Model, question: str) -> list[int]:
    return model.tokenize_chat([{"role": "user", "content": question}])


def said(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=False)


def test_the_history_gives_prompts_and_whole_texts(tmp_path: Path, tiny_target: Model) -> None:
    questions = [asked(tiny_target, f"What is number {i}?") for i in range(30)]
    answers = [said(tiny_target, f"{i}{ANSWER}") for i in range(30)]
    documents = [q + a for q, a in zip(questions, answers, strict=True)]
    found = HistoryTexts(tiny_target, history_of(tiny_target, documents))
    prompts, texts = list(found.prompts()), list(found.texts())
    assert [list(prompt.tokens) for prompt in prompts] == questions[::-1]
    assert all(prompt.source == FROM_HISTORY and prompt.n_prompt == len(prompt.tokens) for prompt in prompts)
    assert [list(text.tokens) for text in texts] == documents[::-1]
    assert all(
        text.source == READ and text.n_prompt == p.n_prompt for text, p in zip(texts, prompts, strict=True)
    )
    assert all(is_held_out(t.key) == is_held_out(p.key) for t, p in zip(texts, prompts, strict=True))


def test_a_later_turn_of_a_conversation_is_read_only(tmp_path: Path, tiny_target: Model) -> None:
    first = asked(tiny_target, "What is it?") + said(tiny_target, ANSWER * 50)
    later = said(tiny_target, "on and on") + asked(tiny_target, "And then?") + said(tiny_target, ANSWER)
    found = HistoryTexts(tiny_target, history_of(tiny_target, [first, later]))
    assert [list(prompt.tokens) for prompt in found.prompts()] == [asked(tiny_target, "What is it?")]
    text = next(iter(found.texts()))
    assert list(text.tokens) == later
    assert list(text.tokens[text.n_prompt :]) == said(tiny_target, ANSWER)


def test_of_a_model_without_a_template_the_first_part_is_the_prompt(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "raw.gguf", chat_template=None)
    with Model(path) as model:
        documents = [said(model, f"{i}{ANSWER * 20}") for i in range(4)]
        found = HistoryTexts(model, history_of(model, documents))
        assert [list(p.tokens) for p in found.prompts()] == [d[:CONTEXT] for d in documents[::-1]]


def test_a_text_is_cut_into_passages_that_hold_all_of_it(tmp_path: Path, tiny_target: Model) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"This is line {i}, and it says so.\n" for i in range(100)))
    tokens = said(tiny_target, path.read_text())
    texts, prompts = list(file_texts(path, tiny_target)), list(file_prompts(path, tiny_target))
    assert all(len(text.tokens) <= PASSAGE and text.n_prompt == CONTEXT for text in texts)
    whole = list(texts[0].tokens) + [token for text in texts[1:] for token in text.tokens[text.n_prompt :]]
    assert whole == tokens
    assert [p.tokens for p in prompts if isinstance(p, TokenPrompt)] == [
        text.tokens[:CONTEXT] for text in texts
    ]
    assert {prompt.source for prompt in prompts} == {FROM_FILE}
    assert all(is_held_out(t.key) == is_held_out(p.key) for t, p in zip(texts, prompts, strict=True))


def test_a_document_longer_than_a_passage_is_read_in_parts(tmp_path: Path, tiny_target: Model) -> None:
    question, answer = asked(tiny_target, "Well?" * 10), said(tiny_target, ANSWER * 40)
    found = HistoryTexts(tiny_target, history_of(tiny_target, [question + answer]))
    parts = list(found.texts(longest=256))
    assert all(len(part.tokens) <= 256 for part in parts)
    assert [token for part in parts for token in part.tokens[part.n_prompt :]] == answer
    long_question = asked(tiny_target, "Well?" * 200)
    found = HistoryTexts(tiny_target, history_of(tiny_target, [long_question + answer]))
    parts = list(found.texts(longest=256))
    assert [token for part in parts for token in part.tokens[part.n_prompt :]] == answer


def test_a_suite_gives_its_prompts_and_nothing_to_read(tmp_path: Path, tiny_target: Model) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [{"question_id": i, "category": "mine", "turns": [f"Question {i}?"]} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert list(file_prompts(path, tiny_target)) == [
        TextPrompt(FROM_FILE, (f"Question {i}?",)) for i in range(3)
    ]
    assert list(file_texts(path, tiny_target)) == []


def test_what_is_asked_is_the_users_own_and_built_in_in_turns(
    tmp_path: Path, tiny_target: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # other tests' texts are a history too
    path = tmp_path / "book.txt"
    path.write_text("".join(f"This is line {i}, and it says so.\n" for i in range(60)))
    found = list(islice(all_prompts(tiny_target, [path]), 20))
    assert [one.source for one in found[:6]] == [FROM_FILE, READ, BUILT_IN] * 2
    assert [one.source for one in found[-8:]] == [BUILT_IN] * 8
    with pytest.raises(EdgespecError, match="the history has 0 tokens"):
        all_prompts(tiny_target, from_history=True)


def test_sources_are_taken_in_turns() -> None:
    one = [TextPrompt("a", (str(i),)) for i in range(2)]
    other = [TextPrompt("b", (str(i),)) for i in range(4)]
    found = [
        (prompt.source, prompt.turns[0]) for prompt in in_turns(one, other) if isinstance(prompt, TextPrompt)
    ]
    assert found == [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1"), ("b", "2"), ("b", "3")]
    assert list(islice(in_turns(), 1)) == []
