"""bench/long_texts.py and its conversations: their texts, its figures, and edgespec's real server."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest

import long_texts
from conversations import MAKERS, Conversation, Sources
from edgespec.errors import UsageError
from edgespec.llama import kernels
from edgespec.llama.weights import Model
from long_texts import AUTO, PLAIN, Runs, TurnRun
from script import shown_spread
from tiny_gguf import write_tiny_gguf

PEER = f"{sys.executable} {Path(__file__).parents[1] / 'support' / 'fake_llama_server.py'}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=8192, peak=0.7)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path, vocab_only=True) as opened:
        yield opened


def made(model: Model, kind: str, n_tokens: int = 4000, n_turns: int = 4, seed: int = 1) -> Conversation:
    return MAKERS[kind](model, n_tokens, n_turns, seed)


def n_tokens(model: Model, prompt: list[dict[str, str]]) -> int:
    return sum(len(model.tokenize(one["content"], add_special=False, parse_special=False)) for one in prompt)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_seed_makes_one_conversation(model: Model, kind: str) -> None:
    assert made(model, kind) == made(model, kind)
    assert made(model, kind) != made(model, kind, seed=2)


@pytest.mark.parametrize("kind", MAKERS)
def test_turns_only_append(model: Model, kind: str) -> None:
    prompts = list(made(model, kind).prompts())
    assert len(prompts) == {"agent": 4, "document": 1, "chat": 24}[kind]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
        assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
        assert all(message["content"] for message in after)


@pytest.mark.parametrize("length", [4000, 12_000])
def test_lengths_are_near_those_asked_for(model: Model, length: int) -> None:
    first, *_, last = [n_tokens(model, one) for one in made(model, "agent", length, 10).prompts()]
    assert first == pytest.approx(length, rel=0.05)
    assert last == pytest.approx(length * 4 / 3, rel=0.1)
    assert n_tokens(model, next(made(model, "document", length).prompts())) == pytest.approx(length, rel=0.02)
    for turn in made(model, "chat", length).turns:
        assert n_tokens(model, [{"content": turn.answer}]) == pytest.approx(length // 200, abs=4)


def test_an_edit_is_of_a_function_that_was_read(model: Model) -> None:
    conversation = made(model, "agent", 12_000, 3)
    for i, turn in enumerate(conversation.turns, 1):
        name = turn.question.rpartition("rename `")[2].partition("`")[0]
        assert f"def {name}(" in conversation.system
        assert f"to `{name}_{i}`" in turn.question
        assert f"def {name}_{i}(" in turn.answer


def test_the_question_is_about_what_the_document_has(model: Model) -> None:
    for seed in range(5):
        (turn,) = made(model, "document", 3000, seed=seed).turns
        document, _, name = turn.question.rpartition("\n\nWhat does the document say about ")
        assert f"# {name.removesuffix('?')}\n" in document


def test_excerpts_have_functions(model: Model) -> None:
    sources = Sources(model, "a seed")
    read = [one for _ in range(3) for one in sources.excerpts(800)]
    files = [one.file for one in read]
    assert len(files) == len(set(files)) >= 12
    functions = [(one, code) for one in read for code in one.functions.values()]
    assert len(functions) > 3
    for one, code in functions:
        assert code in one.text
        assert isinstance(ast.parse(dedent(code)).body[0], ast.FunctionDef)
    assert sources.count(sources.code(500)) == pytest.approx(500, abs=8)


@pytest.mark.slow
def test_no_module_is_read_twice(model: Model) -> None:
    sources = Sources(model, "a seed")
    with pytest.raises(UsageError, match="the standard library here is too short"):
        while True:
            sources.excerpts(40, 1)


@pytest.mark.parametrize(
    ("kind", "lengths", "field"),
    [
        ("agent", (10, 1), "tokens"),
        pytest.param("document", (10**8, 1), "tokens", marks=pytest.mark.slow),
        pytest.param("chat", (12_000, 10**4), "turns", marks=pytest.mark.slow),
    ],
)
def test_lengths_that_cannot_be_made(model: Model, kind: str, lengths: tuple[int, int], field: str) -> None:
    with pytest.raises(UsageError) as refused:
        MAKERS[kind](model, *lengths, 0)
    assert refused.value.field == field


def run(
    name: str, turn: int, total_s: float, *, round_: int = 0, text: str = "a", joules: float | None = 2.0
):
    return TurnRun("agent", name, round_, turn, 100 + turn, 8, total_s / 2, total_s, joules, text)


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        run(name, turn, seconds * (turn + 1) * (round_ + 1), round_=round_)
        for round_ in range(3)
        for turn in range(3)
        for name, seconds in (("peer", 4.0), (PLAIN, 2.0), (AUTO, 1.0))
    ]
    runs = Runs(found)
    assert runs.contenders == [AUTO, PLAIN, "peer"]
    assert runs.ratios("agent", "peer") == [4.0, 4.0, 4.0]
    assert runs.differing() == []
    long_texts.show(runs, "nothing counts")
    printed = capsys.readouterr().out
    assert "agent: 3 turns, prompts of 100 to 102 tokens" in printed
    row = next(line for line in printed.splitlines() if line.startswith(PLAIN))
    # Rounds of 12, 24 and 36 s; first tokens at 1, 2, 3 s, the median of turns 2 and 3, and at 3, 6, 9 s.
    cells = ("24.00 (18.00 - 30.00)", "2.00 (2.00 - 2.00)", "2.00 (1.50 - 2.50)", "5.00 (3.75 - 6.25)")
    for cell in (*cells, "6.00 (4.50 - 7.50)", "6.00 (6.00 - 6.00)"):
        assert cell in row
    assert "no joules: nothing counts" in printed


def test_a_text_that_differs_is_named() -> None:
    found = [run(AUTO, 0, 1.0), run(PLAIN, 0, 1.0), run(AUTO, 1, 1.0, text="b"), run(PLAIN, 1, 1.0)]
    assert Runs([*found, run("peer", 0, 1.0, text="c")]).differing() == ["agent, round 1, turn 2"]


def test_joules_are_known_of_whole_rounds_alone() -> None:
    found = [run(AUTO, turn, 1.0, round_=round_) for round_ in range(2) for turn in range(2)]
    runs = Runs([*found[:-1], replace(found[-1], joules=None)])
    assert runs.joules("agent", AUTO) == [4.0]
    assert shown_spread([]) == "-"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "agent,prose"), "prose: must be of agent, document, chat"),
        (("--tokens", "0"), "must be 1 or more"),
        (("--turns", "-1"), "must be 1 or more"),
        (("--peer", "llama.cpp"), "must be NAME=COMMAND"),
        (("--peer", "one=/x", "--peer", "one=/y"), "none twice"),
    ],
)
def test_options_that_are_refused(
    path: Path, options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("--target", str(path), "--only", "chat", "--turns", "1", "--tokens", "1000", "--rounds", "1")
    monkeypatch.setattr(sys, "argv", ["script", *small, *options])
    with pytest.raises(UsageError, match=words):
        long_texts.main()


@pytest.mark.slow
def test_servers_are_asked_turn_by_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.load()  # tests the kernels once, for all servers
    small = ("--tokens", "2000", "--turns", "1", "--rounds", "1", "--threads", "1", "--json")
    monkeypatch.setattr(sys, "argv", ["script", "--target", str(path), "--peer", f"fake={PEER}", *small])
    long_texts.main()
    printed = capsys.readouterr()
    found = json.loads(printed.out[printed.out.index("\n{") :])
    assert list(found["prompts"][0]) == ["agent", "document", "chat"]
    asked = [(one["kind"], one["turn"], one["contender"]) for one in found["runs"]]
    turns = [("agent", 0), ("document", 0), *(("chat", turn) for turn in range(6))]
    orders = ([AUTO, PLAIN, "fake"], [PLAIN, "fake", AUTO], ["fake", AUTO, PLAIN])
    assert asked == [(kind, turn, name) for kind, turn in turns for name in orders[turn % 3]]
    for one in found["runs"]:
        assert 0 < one["first_s"] <= one["total_s"]
        assert one["tokens"] <= {"agent": 128, "document": 128, "chat": 64}[one["kind"]]
    ours = {(one["kind"], one["turn"], one["contender"]): one["prompt_tokens"] for one in found["runs"]}
    assert all(ours[kind, turn, AUTO] == ours[kind, turn, PLAIN] for kind, turn in turns)
    assert ours["agent", 0, AUTO] == pytest.approx(2000, rel=0.1)
    assert "edgespec's texts, auto and plain: the same" in printed.out
    assert "round 1, chat, turn 6, fake:" in printed.err
