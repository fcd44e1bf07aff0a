"""The folders of trainings, of each run one.

FOLDER/training/2/token_ids.npy    what the drafts of run 2 can say
FOLDER/training/2/head/            its training of a head: checkpoints while it goes on, then its best weights
                       name        of the draft that was kept of it
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from edgespec.energy import Measurement
from edgespec.forge.vocabulary_ranking import Ids
from edgespec.models.draft_records import Family
from edgespec.platform.files import replacing, write_atomically
from edgespec.platform.messages import MessageFn
from edgespec.platform.state_file import StateFile, parse_struct

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


@dataclass(frozen=True, slots=True)
class RunState:
    """A run: under way, stopped or ended."""

    key: str
    """What was asked for, as a hash: another request does not go on with this run."""
    number: int = 1
    """The runs for a target are numbered from 1."""
    until: int = 0
    """Tokens that the dataset is to have; 0: not decided yet."""
    written: bool = False
    """Whether the target has written its texts."""
    ended: bool = False
    kept: str | None = None
    """The draft that it made; None: none yet, or none was better."""
    joules: float | None = 0.0
    """So far; None: they cannot be measured."""
    joules_reason: str = ""
    """Why not."""
    sources: dict[str, int] = field(default_factory=dict)
    """Source -> tokens that this run was made from, and those before it, from whose weights it may start."""

    def with_sources(self, tokens: Mapping[str, int]) -> RunState:
        """Return the state with texts that the run is made from; what was deleted since stays counted."""
        names = [*tokens, *(name for name in self.sources if name not in tokens)]
        return replace(
            self, sources={name: max(tokens.get(name, 0), self.sources.get(name, 0)) for name in names}
        )

    def with_joules(self, measured: Measurement) -> RunState:
        """Return the state with what another part of the run took."""
        if measured.joules is None or self.joules is None:
            return replace(self, joules=None, joules_reason=self.joules_reason or measured.reason)
        return replace(self, joules=self.joules + measured.joules)


def key_of(request: object) -> str:
    """Return the hash of a request, which msgspec can encode."""
    return hashlib.sha256(msgspec.json.encode(request, enc_hook=str)).hexdigest()


def resumed(folder: Path, key: str, on_message: MessageFn, *, force: bool = False) -> RunState:
    """Return the run that goes on in `folder`, or a new one; `on_message` is told which. Raises OSError.

    `force`: a run that has ended without keeping a draft goes on too, so that it is kept.
    """
    kept = StateFile(
        folder / "make.json",
        lambda data: parse_struct(data, RunState),
        lock=".make.lock",
        on_message=on_message,
    )
    found = kept.read()
    if found is None:
        return RunState(key)
    if found.key == key and not found.ended:
        on_message("going on with the run that was stopped")
        return found
    if found.key == key and force and not found.kept:
        on_message("going on with the last run, which kept nothing: its drafts are judged again")
        return replace(found, ended=False)
    if not found.ended:
        on_message("the run that was stopped had other options: a new one begins, with the texts it wrote")
    return RunState(key, found.number + 1, sources=found.sources)


def save(folder: Path, state: RunState) -> None:
    """Write the state, whole or not at all. Raises OSError."""
    write_atomically(folder / "make.json", msgspec.json.encode(state))
