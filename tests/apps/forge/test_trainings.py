"""Which earlier weights a training begins with."""

from __future__ import annotations

from pathlib import Path

from edgespec.apps.forge.make import draft_of, earlier_training


def trained(run: Path) -> Path:
    (run / "head").mkdir(parents=True)
    (run / "head" / "best.npz").touch()
    return run / "head"


def test_a_training_goes_on_from_the_last_one_that_has_weights(tmp_path: Path) -> None:
    assert earlier_training(tmp_path / "1") is None
    trained(tmp_path / "1")
    second = trained(tmp_path / "2")
    (tmp_path / "3" / "head").mkdir(parents=True)
    assert earlier_training(tmp_path / "4") == second
    assert draft_of(second) is None
    (second / "name").write_text("mine")
    assert draft_of(second) == "mine"
