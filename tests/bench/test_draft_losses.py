"""bench/draft_losses.py: its drafts beside those of real generations, and its arithmetic on made-up texts."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import draft_losses
from draft_losses import (
    AS_IS,
    LATER,
    LONGEST,
    OUTSIDE,
    TEXT,
    WAYS,
    Judge,
    Judged,
    breakdown,
    judged_tokens,
    kinds_of,
    losses,
    perfect_cost,
    steps,
    tokens_a_pass,
)
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.llama.weights import Model
from edgespec.models.pull import hash_file
from head_window import read
from random_heads import write_random_head
from script import start
from tiny_gguf import CONTROL_TOKENS, N_WORDS

GREEDY = SamplingParams(temperature=0)
GAMMA = 4
N_PREDICT = 120
PROMPTS = ([3, 7, 9] * 5, [(7 * i * i + 3) % 250 for i in range(90)])


@pytest.fixture(scope="module")
def head(packable_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It lacks every second token."""
    return write_random_head(tmp_path_factory.mktemp("head") / "head.gguf", packable_path)


@pytest.fixture(scope="module")
def answers(packable_path: Path, head: Path) -> list[tuple[list[int], int, Counter[int]]]:
    """Texts, tokens of their prompts, and how many tokens of the drafts were accepted."""
    found = []
    with Engine(packable_path, head, profile=False, n_threads=1) as engine:
        for prompt in PROMPTS:
            result = engine.generate(prompt, params=GREEDY, n_predict=N_PREDICT, drafter="model", gamma=GAMMA)
            accepted = Counter(dict.fromkeys(range(GAMMA + 1), 0))
            for _, n_accepted, n_steps in result.stats.histogram:
                accepted[n_accepted] += n_steps
            found.append(([*prompt, *result.token_ids], len(prompt), accepted))
    return found


@pytest.fixture(scope="module")
def judge_all(
    packable_path: Path, answers: list[tuple[list[int], int, Counter[int]]]
) -> Iterator[Callable[[Path], list[Judged]]]:
    """Returns the texts as a head drafts them."""
    with Model(packable_path) as target:
        states = [read(target, tokens, 1)[1] for tokens, _, _ in answers]

        def judged(path: Path) -> list[Judged]:
            with Judge(target, path, gamma=GAMMA, longest=300, n_threads=1) as judge:
                return [
                    judge.judge(tokens, n_prompt, of_text)
                    for (tokens, n_prompt, _), of_text in zip(answers, states, strict=True)
                ]

        yield judged


@pytest.fixture(scope="module")
def judged(judge_all: Callable[[Path], list[Judged]], head: Path) -> list[Judged]:
    return judge_all(head)


def test_the_steps_are_those_of_a_generation(
    judged: list[Judged], answers: list[tuple[list[int], int, Counter[int]]]
) -> None:
    n_steps = 0
    for text, (_, _, real) in zip(judged, answers, strict=True):
        accepted = [n for _, n in steps(text, AS_IS, GAMMA)]
        # The last draft of a generation is shorter, as its last token is the target's own.
        left = real - Counter(accepted[:-1])
        assert left.total() == 1, (real, Counter(accepted))
        n_steps += len(accepted)
    assert tokens_a_pass(judged, AS_IS, GAMMA) == pytest.approx(2 * (N_PREDICT - 1) / n_steps)
    assert tokens_a_pass(judged, AS_IS, GAMMA) > 1.2, "little was accepted: it proves little"


def test_ways_of_judging(judged: list[Judged]) -> None:
    for text in judged:
        runs = text.runs
        assert (runs["rows"] == np.minimum(runs[AS_IS], GAMMA)).all(), "its rows are the target's own"
        for more, less in itertools.pairwise(("top 4", "top 3", "top 2", AS_IS)):
            assert (runs[more] >= np.minimum(runs[less], GAMMA)).all()
        assert (runs["outside"] >= np.minimum(runs[AS_IS], GAMMA)).all()
    assert tokens_a_pass(judged, "outside", GAMMA) > tokens_a_pass(judged, AS_IS, GAMMA)


@pytest.mark.slow
def test_rows_of_the_text_are_a_larger_vocabulary(
    judged: list[Judged], judge_all: Callable[[Path], list[Judged]], packable_path: Path, tmp_path: Path
) -> None:
    """At each place a draft is that of a head that keeps the tokens before it too."""
    for text in judged:
        assert (text.runs[TEXT] != text.runs[AS_IS]).any()
        (begin,) = np.flatnonzero(text.runs[TEXT] > text.runs[AS_IS])[:1]
        for at in (int(begin), text.first + 40):
            ids = sorted({*range(0, N_WORDS + len(CONTROL_TOKENS), 2), *text.tokens[:at]})
            path = write_random_head(tmp_path / f"{at}.gguf", packable_path, token_ids=ids)
            larger = next(one for one in judge_all(path) if one.tokens == text.tokens)
            assert text.runs[TEXT][at] == larger.runs[AS_IS][at]


def made_up(runs: list[int], ranks: list[int] | None = None) -> Judged:
    """A text that begins with a prompt of one token."""
    n = len(runs)
    by_way = {way: np.array(runs) for way in WAYS}
    of_ranks = np.array(ranks if ranks is not None else [-1] * n)
    return Judged([*range(n)], 2, by_way, {AS_IS: of_ranks, TEXT: of_ranks})


def test_a_perfect_length_is_the_cheapest_of_all() -> None:
    rng = random.Random(1)

    def cheapest(text: Judged, at: int, costs: list[float]) -> float:
        n = len(text.tokens)
        if at >= n:
            return 0.0
        longest = min(int(text.runs[AS_IS][at]), n - at)
        return min(costs[k] + cheapest(text, at + k + 1, costs) for k in range(longest + 1))

    for _ in range(20):
        text = made_up([rng.randrange(4) for _ in range(12)])
        costs = sorted(rng.uniform(1, 3) for _ in range(LONGEST + 1))
        cost, n_passes = perfect_cost([text], costs)
        assert cost == pytest.approx(cheapest(text, 2, costs))
        assert 10 / 4 <= n_passes <= 10
    assert perfect_cost([made_up([0, 0])], costs) == (0.0, 0)


def test_causes_and_places() -> None:
    text = made_up([0, 0, 2, 0, 0, 3, 0, 0, 0, 0], [-1, -1, OUTSIDE, 2, 3, LATER, 2, 2, 2, 4])
    text = text._replace(tokens=[7, 8, 1, 2, 7, 3, 4, 5, 6, 8])
    kinds = ["digit"] * 9 + ["end"]
    found = list(judged_tokens(text, AS_IS, 2, kinds))
    assert list(steps(text, AS_IS, 2)) == [(2, 2), (5, 2), (8, 0), (9, 0)]
    assert [(one.position, one.kind, one.cause, one.seen) for one in found] == [
        (1, "digit", "", ""),
        (2, "digit", "", ""),
        (1, "digit", "", ""),
        (2, "digit", "", ""),
        (1, "digit", "second", ""),
        (1, "end", "fourth", "answer"),
    ]
    assert [one.cause for one in judged_tokens(text, AS_IS, 3, kinds)][:3] == ["", "", "outside"]
    assert [one.seen for one in judged_tokens(text, AS_IS, 3, kinds)][2] == "prompt"
    by_kind = breakdown(found, lambda one: one.kind)
    assert by_kind[0] == {
        "value": "digit", "accepted": 4, "outside": 0, "second": 1, "third": 0, "fourth": 0, "later": 0,
    }  # fmt: skip
    whole = losses([text], [kinds], 3, [1.0 + 0.1 * n for n in range(LONGEST + 1)])
    assert whole.seen == {"prompt": 1, "answer": 0, "": 0}
    assert whole.lengths["perfect"]["over plain"] > max(
        one["over plain"] for one in whole.lengths["fixed"].values()
    )


def test_kinds_of_tokens() -> None:
    pieces = [
        b"def",
        b" main",
        b"Loop",
        b"(",
        b"x",
        b"1",
        b" 2",
        b"\n    ",
        b"_",
        b"name",
        b" ##",
        b"",
        b" wold",
    ]
    rare = [False] * 12 + [True]
    ends = [False] * 11 + [True, False]
    word, inside, mark = "start of a word", "inside a word", "punctuation"
    assert kinds_of(pieces, ends, rare) == [
        word, word, inside, mark, word, "digit", "digit", "whitespace", word, inside, mark, "end", "rare",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_script(
    packable_path: Path,
    head: Path,
    answers: list[tuple[list[int], int, Counter[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [tokens for tokens, _, _ in answers]
    arrays = {
        "tokens": np.concatenate(texts).astype(np.int32),
        "length": np.array([len(tokens) for tokens in texts], np.int32),
        "n_prompt": np.array([n_prompt for _, n_prompt, _ in answers], np.int32),
        "temperature": np.zeros(len(texts), np.float32),
        "source": np.array(["read"] * len(texts)),
        "key": np.zeros(len(texts), np.uint64),
        "target_sha256": np.array(hash_file(packable_path)),
    }
    np.savez(tmp_path / "texts.npz", **arrays)

    def run(*options: str) -> None:
        files = "--target", str(packable_path), "--draft", str(head), "--texts", str(tmp_path / "texts.npz")
        monkeypatch.setattr(sys, "argv", ["draft_losses.py", *files, "--threads", "1", *options])
        start(draft_losses.main)

    run("--gamma", str(GAMMA), "--json", "--times", "10,10,12,20", "--against", str(head))
    text = capsys.readouterr().out
    found = json.loads(text[text.index("\n{") :])
    assert found["step costs"][0] == 1.0
    assert found["step costs"][7] == pytest.approx(1.2 + 7 * 0.05)
    (of_head,) = found["losses"].values()
    assert of_head["prose"]["n_tokens"] == 2 * (N_PREDICT - 1)
    assert of_head["code"] is None
    assert "code: no texts" in text
    assert f"2 texts, {2 * (N_PREDICT - 1)} tokens" in text
    for options in (("--tokens", "0"), ("--gamma", "16"), ("--times", "1,2"), ("--draft-cost", "-1")):
        with pytest.raises(SystemExit) as ended:
            run(*options)
        assert ended.value.code == 2
    np.savez(tmp_path / "texts.npz", **{**arrays, "target_sha256": np.array("ab" * 32)})
    with pytest.raises(SystemExit, match="texts of another target"):
        run()
    with pytest.raises(SystemExit, match="no draft head that edgespec made for"):
        run("--against", str(packable_path))
