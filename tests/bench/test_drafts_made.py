"""bench/drafts_made.py: its arithmetic and its tables, on made-up runs."""

from __future__ import annotations

import pytest

from drafts_made import STOCK, accepted, class_ratio, goals, verdicts
from edgespec.apps.bench.runs import PLAIN, Run
from edgespec.apps.bench.suites import HUMAN_EVAL, Prompt, Suite
from ratios import Ratios

SPEC = Suite(
    "question.jsonl", "00", tuple(Prompt(f"q{i}", name, "") for i, name in enumerate(("rag", "translation")))
)
HUMAN = Suite(HUMAN_EVAL, "00", (Prompt("h", "humaneval", ""),))


def run(variant, total_s, category="humaneval", prompt="h", turn=0, **changes):
    """A generation of 101 tokens whose first takes a second."""
    facts = {"prompt_tokens": 10, "tokens": 101, "ttft_s": 1.0, "prefill_s": 1.0, **changes}
    return Run(prompt=prompt, category=category, variant=variant, round=turn, total_s=total_s, **facts)


@pytest.fixture
def runs():
    """Twice plain on HumanEval, 1.5 and 0.9 times on the two others; 50 drafted tokens in half a second."""
    drafted = {"draft_s": 0.5, "histogram": ((2, 1, 20), (1, 1, 10)), "n_emitted": 100}
    found = []
    for turn in range(2):
        for prompt, category, gain in (("h", "humaneval", 2), ("q0", "rag", 1.5), ("q1", "translation", 0.9)):
            where = {"category": category, "prompt": prompt, "turn": turn}
            found += [run(STOCK, 22.0, **where), run(PLAIN, 11.0, **where)]
            found.append(run("mine", 11.0 / gain, **where, **drafted))
    return sorted(found, key=lambda one: [STOCK, PLAIN, "mine"].index(one.variant))


def test_means_over_the_categories_of_a_suite(runs):
    ratios = Ratios(runs)
    assert class_ratio(ratios, "mine", PLAIN, HUMAN.categories) == pytest.approx(2.0)
    assert class_ratio(ratios, "mine", STOCK, HUMAN.categories) == pytest.approx(4.0)
    assert class_ratio(ratios, "mine", PLAIN, SPEC.categories) == pytest.approx((1.5 * 0.9) ** 0.5)
    assert class_ratio(ratios, "mine", PLAIN, HUMAN.categories, decoding=True) == pytest.approx(10 / 4.5)
    assert class_ratio(ratios, "mine", PLAIN, ["unknown"]) is None


def test_goals(runs):
    assert goals(HUMAN) == [(PLAIN, 2.15)]
    assert goals(SPEC) == [(PLAIN, 1.55)]
    assert goals(Suite("default", "00", (Prompt("1", "code", ""),))) == []
    assert verdicts(Ratios(runs), ["mine"], [HUMAN, SPEC]) == [
        "MISSED: mine: no category below 1.0; lowest 0.900, translation",
        "MISSED: mine: human-eval at 2.15 times plain: 2.000",
        "MISSED: mine: question.jsonl at 1.55 times plain: 1.162",
    ]


def test_what_is_accepted():
    """Each position given those before it, and only where something was drafted there."""
    histogram = ((3, 0, 4), (3, 1, 3), (3, 2, 2), (3, 3, 1), (1, 1, 10), (0, 0, 99))
    runs = [run("mine", 1.0, histogram=histogram), run("other", 1.0, histogram=((5, 5, 5),))]
    assert accepted(runs, "mine") == pytest.approx([16 / 20, 3 / 6, 1 / 3])
    assert accepted([run("mine", 1.0, histogram=((3, 0, 4),))], "mine") == [0.0]
    assert accepted([run("mine", 1.0)], "mine") == []
