"""What tests of making drafts share: the least that can be asked for, and judging that is made up."""

from __future__ import annotations

import pytest

from edgespec.benchmark.runs import PLAIN, Run
from edgespec.forge.builder import TrainingRequest
from edgespec.forge.data_stage import DataRequest
from edgespec.forge.evaluation_process import EvaluationSettings, EvaluationTask
from edgespec.forge.make import MakeRequest


@pytest.fixture
def request_(tiny_path):
    """The least that can be asked for."""
    return MakeRequest(
        target=str(tiny_path),
        data=DataRequest(tokens=300, budget=50_000_000, n_predict=24),
        training=TrainingRequest(hours=1.0, keep=272, types=("q8_0",)),
        evaluation=EvaluationSettings(n_predict=8, rounds=1, n_prompts=2, n_threads=1, kernels="off"),
    )


@pytest.fixture
def speeds(monkeypatch):
    """Runs of trials are made up: by the draft's file, how much faster than plain decoding it is."""
    gains = {}

    def runs(self):
        name = self.draft.rpartition("/")[2] if self.draft else "none"
        gain = next((gain for part, gain in gains.items() if part in name), 1.0)

        def run(way, round_, seconds):
            return Run(
                "p", "c", way, round_, 5, 10, seconds, 0.1, 0.1,
                draft_s=0.2, verify_s=1.0, n_emitted=10, histogram=((4, 2, 5),),
            )  # fmt: skip

        if self.round is None:
            yield from (run(PLAIN, 0, 1.0), run("model", 0, 1.0))
            return
        for round_ in (self.round, self.round + self.settings.rounds):
            yield from (run(PLAIN, round_, 1.0), run("auto", round_, 1.0 / gain))

    monkeypatch.setattr(EvaluationTask, "runs", runs)
    return gains
