"""Which earlier weights a training begins with, and which tokens that binds it to."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgespec.forge.runs import earlier_token_ids, earlier_training, write_token_ids

ALL = ("head", "shallow", "whole")


def trained(run: Path, family: str, ids: range) -> Path:
    write_token_ids(run, np.array(ids))
    (run / family).mkdir()
    (run / family / "best.npz").touch()
    return run / family


def test_a_head_goes_on_with_other_tokens(tmp_path: Path) -> None:
    head = trained(tmp_path / "1", "head", range(8))
    run, other = tmp_path / "2", np.arange(1, 9)
    assert earlier_token_ids(run, 8, ("head",)) is None
    assert earlier_token_ids(run, 8, ALL) is None, "there is no training that needs these tokens"
    assert earlier_training(run, "head", other) == head
    assert earlier_training(run, "whole", other) is None


def test_others_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    whole = trained(tmp_path / "1", "whole", range(8))
    trained(tmp_path / "2", "head", range(1, 9))
    run = tmp_path / "3"
    assert earlier_token_ids(run, 8, ("head",)) is None
    assert earlier_token_ids(run, 9, ALL) is None, "another number of them was asked for"
    ids = earlier_token_ids(run, 8, ALL)
    assert ids is not None and ids.tolist() == list(range(8))
    assert earlier_training(run, "whole", ids) == whole
    assert earlier_training(run, "whole", np.arange(1, 9)) is None
