"""The training loop: it learns, ends when it should, and goes on as if it had never been ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from edgespec.apps.forge.request import StageContext
from edgespec.apps.forge.training.batches import BEST, CHECKPOINT
from edgespec.apps.forge.training.head import HeadFamily
from edgespec.apps.forge.training.loop import Training, TrainingSettings
from edgespec.apps.forge.training.weights import ModelWeights
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import read_header
from tiny_training import IDS, ROWS, TinyTexts, tiny_head, write_target

SETTINGS = TrainingSettings(
    tokens=3000, rate=3e-2, checkpoint_s=0.0, evaluate_s=1e9, rows=ROWS
)  # a hundred steps
STILL = replace(SETTINGS, rate=0.0, vector_rate=0.0)


def trained_in(folder, target, dataset, settings=SETTINGS, *, start=None, **listeners):
    training = Training(tiny_head(target), dataset, settings, folder, StageContext(**listeners))
    return training.run(start)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def dataset(target):
    return TinyTexts(target, 40)


@pytest.fixture(scope="module")
def whole(target, dataset, tmp_path_factory):
    """A training that nobody ended, the folder of it, and what it told."""
    folder = tmp_path_factory.mktemp("whole") / "training"
    told = []
    return trained_in(folder, target, dataset, on_progress=lambda *step: told.append(step)), folder, told


def end_after(n_steps: int):
    """End a training in its step of that number, whose checkpoint is not written."""
    calls = iter(range(1 << 30))  # the first before any step

    def on_progress(*_step):
        if next(calls) == n_steps:
            raise KeyboardInterrupt

    return on_progress


def test_a_training_learns(whole):
    trained, folder, told = whole
    assert trained.n_tokens >= 3000
    assert min(trained.acceptance.by_position[:3]) > 0.3  # of 140 tokens
    assert trained.acceptance == trained.history[-1][2]
    assert (folder / BEST).exists()
    assert told[-1][1] == 1.0


def test_a_step_is_compiled_once(target, dataset, tmp_path, monkeypatch):
    """Weights and moments have the same types before the first step as after it."""
    loss, n_traced, told = HeadFamily.loss, 0, []

    def counted(*inputs):
        nonlocal n_traced
        n_traced += 1
        return loss(*inputs)

    monkeypatch.setattr(HeadFamily, "loss", counted)
    trained_in(
        tmp_path, target, dataset, replace(SETTINGS, tokens=600), on_progress=lambda *step: told.append(step)
    )
    assert len(told) > 4
    assert n_traced == 1


@pytest.mark.parametrize("n_steps", [3, 17])
def test_it_goes_on_as_if_it_had_never_ended(target, dataset, whole, tmp_path, n_steps):
    with pytest.raises(KeyboardInterrupt):
        trained_in(tmp_path, target, dataset, on_progress=end_after(n_steps))
    messages = []
    trained = trained_in(tmp_path, target, dataset, on_message=messages.append)
    assert messages == []
    assert trained.n_tokens == whole[0].n_tokens
    jax.tree.map(np.testing.assert_array_equal, trained.params, whole[0].params)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_training_begins_anew(target, dataset, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained_in(tmp_path, target, dataset, on_progress=end_after(3))
    damaged(tmp_path / CHECKPOINT)
    messages, told = [], []

    def on_progress(*step):
        told.append(step)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained_in(tmp_path, target, dataset, on_message=messages.append, on_progress=on_progress)
    (line,) = messages
    assert f"{CHECKPOINT}: damaged" in line and line.endswith("; training begins anew")
    assert told[0][1] == 0.0


def test_it_ends_when_acceptance_no_longer_rises(target, dataset, tmp_path):
    trained = trained_in(tmp_path, target, dataset, replace(STILL, evaluate_s=0.0, patience=2))
    assert len(trained.history) == 3


def test_a_second_training_starts_from_the_first_ones_weights(target, dataset, whole, tmp_path):
    settings = replace(STILL, tokens=1)
    trained = trained_in(tmp_path, target, dataset, settings, start=whole[1])
    jax.tree.map(np.testing.assert_array_equal, trained.params, whole[0].params)
    with pytest.raises(EdgespecError, match=r"best\.npz: cannot start from it"):
        trained_in(tmp_path / "b", target, dataset, settings, start=tmp_path / "none")
    wider = HeadFamily(ModelWeights(read_header(target)), "5a" * 32, IDS, 128)
    with pytest.raises(EdgespecError, match=r"latest\.npz: of a training with other settings"):
        Training(wider, dataset, settings, tmp_path, StageContext()).run()
