"""What tests of making drafts share: the least that can be asked for, and judging that is made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgespec.apps.bench.measure import CellTask, MeasuredCell
from edgespec.apps.bench.runs import PLAIN, Run
from edgespec.apps.forge.make import MakeRun
from edgespec.apps.forge.request import DraftRequest, EvaluationSettings
from random_heads import write_random_head


@pytest.fixture
def request_(tiny_path):
    """The least that can be asked for."""
    return DraftRequest(
        target=str(tiny_path),
        data_tokens=300,
        budget=50_000_000,
        answer_tokens=24,
        hours=1.0,
        keep=272,
        types=("q8_0",),
        evaluation=EvaluationSettings(n_predict=8, rounds=1, n_prompts=2, n_threads=1, kernels="off"),
    )


@pytest.fixture
def speeds(monkeypatch):
    """Runs of trials are made up: by the draft's file, how much faster than plain decoding it is."""
    gains = {}

    def measure(self, _on_count):
        name = self.draft.rpartition("/")[2] if self.draft else "none"
        gain = next((gain for part, gain in gains.items() if part in name), 1.0)

        def run(way, round_, seconds):
            return Run(
                "p", "c", way, round_, 5, 10, seconds, 0.1, 0.1,
                draft_s=0.2, verify_s=1.0, n_emitted=10, histogram=((4, 2, 5),),
            )  # fmt: skip

        runs = []
        for settings, first in self.sittings:
            way = settings.variants[0].name
            runs.append(run(PLAIN, first + self.round, 1.0))
            runs.append(run(way, first + self.round, 1.0 if way == "model" else 1.0 / gain))
        return MeasuredCell("stock", tuple(runs), 0, ())

    monkeypatch.setattr(CellTask, "measure", measure)
    return gains


@pytest.fixture
def jobs(tiny_path, monkeypatch):
    """The trainings asked for; each gives random heads, one a type. test_cli_draft.py really trains."""
    asked = []

    def train(self, token_ids, start, folder):
        asked.append(SimpleNamespace(token_ids=token_ids, start=start, run=self._run_folder))
        files = {type_: folder / f"head-{type_}.gguf" for type_ in self._request.types}
        for type_, path in files.items():
            write_random_head(path, tiny_path, seed=len(type_))
        acceptance = SimpleNamespace(by_position=(0.5,))
        return SimpleNamespace(n_tokens=1000, elapsed_s=360.0, acceptance=acceptance, history=()), files

    monkeypatch.setattr(MakeRun, "train", train)
    return asked
