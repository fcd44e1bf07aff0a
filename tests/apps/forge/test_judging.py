"""Drafts judged through the real loop, with tiny models."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from edgespec.apps.bench.runs import PLAIN, Run
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.forge.evaluation import Candidate, DraftTiming, EvaluationSettings, Evaluator
from edgespec.apps.forge.request import StageContext
from edgespec.errors import EdgespecError

SETTINGS = EvaluationSettings(n_predict=12, rounds=2, n_threads=1, kernels="off")
QUESTIONS = (Prompt("a", "test", "the wind in the reeds"), Prompt("b", "test", tokens=(5, 6, 7, 8)))


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))


@pytest.fixture
def judging(tmp_path, tiny_path):
    def judging(**more):
        return Evaluator(tiny_path, QUESTIONS, SETTINGS, tmp_path / "judging", StageContext(**more))

    return judging


def a_run(variant, round_=0, *, histogram=None, draft_s=0.0, verify_s=1.0, n_emitted=10):
    return Run(
        "p", "c", variant, round_, 5, 10, 1.0, 0.1, 0.1,
        draft_s=draft_s, verify_s=verify_s, n_emitted=n_emitted, histogram=histogram,
    )  # fmt: skip


def test_what_a_timing_says():
    plain = [a_run(PLAIN, verify_s=1.0), a_run(PLAIN, verify_s=3.0), a_run(PLAIN, verify_s=1.0)]
    steps = ((4, 0, 2), (4, 1, 2), (4, 4, 4), (2, 2, 1))
    found = DraftTiming.of([*plain, a_run("model", histogram=steps, draft_s=1.36)])
    assert found.cost_ratio == pytest.approx(1.36 / 34 / 0.1)
    assert found.acceptance == pytest.approx((7 / 9, 5 / 7, 1.0, 1.0))
    with pytest.raises(EdgespecError, match="drafted nothing"):
        DraftTiming.of([*plain, a_run("model", histogram=((0, 0, 5),))])


def test_drafts_beside_plain_decoding(judging, tiny_path, tiny_draft_path, tmp_path):
    seen, said = [], []
    contenders = [
        Candidate("small", tiny_path),  # two of one name
        Candidate("small", tiny_draft_path),
        Candidate("none", None),
    ]
    found = judging(on_progress=lambda *step: seen.append(step), on_message=said.append).evaluate(contenders)
    assert said == []
    assert [one.candidate for one in found] == contenders
    itself, small, none = found
    assert itself.timing.acceptance == pytest.approx((1.0,) * 4), "it is its own target"
    assert small.timing.cost_ratio > 0
    assert none.timing is None
    for one in found:
        assert one.rounds == 2
        variants = Counter((run.variant, run.round, run.prompt) for run in one.runs)
        assert set(variants.values()) == {1}
        assert len(variants) == 2 * 2 * 2 * 2, "2 variants, 2 temperatures, 2 rounds, 2 questions"
        assert one.greedy.speedup.n_ratios == one.sampled.speedup.n_ratios == 4
        assert one.greedy.n_identical == one.greedy.n_compared == 4, "drafting changes no text"
        assert one.gains.greedy == one.greedy.speedup.median
    assert [share for _, share, _ in seen] == sorted(share for _, share, _ in seen)
    assert seen[-1][1] == pytest.approx(1.0)


def test_what_was_judged_is_not_judged_again(judging, tiny_draft_path, tmp_path):
    candidate = Candidate("small", tiny_draft_path)
    first = judging().evaluate([candidate])
    files = sorted((tmp_path / "judging").rglob("*.json"))
    assert len(files) == 3, "the timing and two rounds"
    seen = []
    assert judging(on_progress=lambda *step: seen.append(step)).evaluate([candidate]) == first
    assert seen == []
    files[0].write_text(files[0].read_text()[:-9])
    again = judging(on_progress=lambda *step: seen.append(step)).evaluate([candidate])
    assert len({detail for *_, detail in seen}) == 1, "the damaged part alone"
    assert again[0].candidate == candidate
    assert json.loads(files[0].read_text())[1]


def test_who_cannot_run_is_left_out(judging, tiny_draft_path, tmp_path):
    stranger = tmp_path / "stranger.gguf"
    stranger.write_bytes(b"GGUF and nothing")
    said = []
    found = judging(on_message=said.append).evaluate(
        [Candidate("stranger", stranger), Candidate("small", tiny_draft_path)]
    )
    assert [one.candidate.name for one in found] == ["small"]
    (line,) = said
    assert line.startswith("stranger is left out: ")
    with pytest.raises(EdgespecError, match="no draft could be evaluated"):
        judging().evaluate([Candidate("stranger", stranger)])
