"""The folders of trainings, of each run one.

FOLDER/training/2/token_ids.npy    what the drafts of run 2 can say
FOLDER/training/2/head/            its training of a head: checkpoints while it goes on, then its best weights
                       name        of the draft that was kept of it
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from edgespec.forge.ranking import Ids
from edgespec.models.made_drafts import Family
from edgespec.platform.files import replacing, write_atomically

_CUT, _NAME = "token_ids.npy", "name"  # of a run; of the draft that a training became
_BEST, _CHECKPOINTS = "best.npz", ("latest.npz", "before.npz")  # of a training: loop.py, checkpoint.py


def earlier_cut(run: Path, size: int, families: Iterable[Family]) -> Ids | None:
    """Return the tokens that trainings of `families` begin with weights of; None: none need any.

    Those of the last run beside `run` that had so many. A head's weights do not depend on its tokens: its
    output matrix is the target's.
    """
    bound = [family for family in families if family != "head"]
    for other in _earlier_runs(run):
        ids = read_cut_ids(other)
        if ids is not None and len(ids) == size and any((other / one / _BEST).exists() for one in bound):
            return ids
    return None


def earlier_training(run: Path, family: Family, token_ids: Ids) -> Path | None:
    """Return the folder of the last training that one of a family with these tokens can begin with.

    It is in a run beside `run`, and of the same tokens unless it is a head's.
    """
    for other in _earlier_runs(run):
        ids = read_cut_ids(other)
        fits = family == "head" or (ids is not None and np.array_equal(ids, token_ids))
        if fits and (other / family / _BEST).exists():
            return other / family
    return None


def read_cut_ids(run: Path) -> Ids | None:
    """Return the tokens that the drafts of a run can say; None: not chosen yet."""
    file = run / _CUT
    if not file.exists():
        return None
    ids: Ids = np.load(file)
    return ids


def write_cut_ids(run: Path, token_ids: Ids) -> None:
    """Keep the tokens that the drafts of a run can say. Raises OSError."""
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(run / _CUT) as stream:
        np.save(stream, token_ids)


def name_training(run: Path, family: Family, name: str) -> None:
    """Note that the draft `name` has the weights of a training. Raises OSError."""
    if (run / family).is_dir():
        write_atomically(run / family / _NAME, name)


def name_of(training: Path | None) -> str | None:
    """Return the draft that has the weights of a training; None: it was not kept, or there is no training."""
    file = training / _NAME if training else None
    return file.read_text(encoding="utf-8") if file and file.exists() else None


def tidy(run: Path, *, goes_on: bool) -> None:
    """Leave of a run that has ended, and of those before it, only what later trainings start from.

    `goes_on`: it may go on after all, from its last checkpoints.
    """
    for family in [path for path in run.glob("*") if path.is_dir()]:
        for name in _CHECKPOINTS if not goes_on else ():
            (family / name).unlink(missing_ok=True)
        for other in _earlier_runs(run):
            shutil.rmtree(other / family.name, ignore_errors=True)
    for other in _earlier_runs(run):
        if not any(path.is_dir() for path in other.iterdir()):
            shutil.rmtree(other, ignore_errors=True)


def _earlier_runs(run: Path) -> list[Path]:
    """Return the folders of the runs beside `run`, the last first."""
    others = [path for path in run.parent.glob("*") if path.name.isdecimal() and path != run]
    return sorted(others, key=lambda path: int(path.name), reverse=True)
