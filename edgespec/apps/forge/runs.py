"""Runs of `edgespec draft make`, remembered so that a stopped one resumes: FOLDER is the target's dataset.

    FOLDER/make.json                   state of the last run; stages keep their own
    FOLDER/training/2/token_ids.npy    tokens that the drafts of run 2 can say
    FOLDER/training/2/head/            training of a head: checkpoints under way, then its best weights
                           name        the draft that was stored of it
    FOLDER/first-head.gguf             the head that learning from mistakes began with (guard.py)

A finished run is remembered too: the next one may start from its weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from edgespec.platform.files import write_atomically
from edgespec.platform.messages import MessageFn
from edgespec.platform.metering import Measurement
from edgespec.platform.state_file import StateFile, parse_struct

FIRST_HEAD = "first-head.gguf"
_STATE = "make.json"
TOKEN_IDS, _NAME = "token_ids.npy", "name"
_BEST, _CHECKPOINTS = "best.npz", ("latest.npz", "before.npz")  # training/loop.py


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run: under way, stopped or finished."""

    key: str
    """`DraftRequest.key`; another request does not resume this run."""
    number: int = 1
    until: int = 0
    """Tokens that the dataset is to have; 0: not decided yet."""
    written: bool = False
    ended: bool = False
    repeats: bool = False
    """Whether the run before was of the same request."""
    kept: str | None = None
    """The draft that was stored; None: none yet, or none was better."""
    joules: float | None = 0.0
    """None: they cannot be measured."""
    joules_reason: str = ""
    sources: dict[str, int] = field(default_factory=dict)
    """Source -> tokens that this run, and those before it, learnt from."""
    learnt: str = ""
    """SHA-256 of the last head that passed the guard: FIRST_HEAD is what its learning began with."""

    def with_sources(self, tokens: Mapping[str, int]) -> RunState:
        """Add sources of texts; a source that was deleted since stays counted."""
        names = [*tokens, *(name for name in self.sources if name not in tokens)]
        return replace(
            self, sources={name: max(tokens.get(name, 0), self.sources.get(name, 0)) for name in names}
        )

    def with_joules(self, measured: Measurement) -> RunState:
        """Add the energy of another part of the run."""
        if measured.joules is None or self.joules is None:
            return replace(self, joules=None, joules_reason=self.joules_reason or measured.reason)
        return replace(self, joules=self.joules + measured.joules)


def resume(folder: Path, key: str, on_message: MessageFn, *, force: bool = False) -> RunState:
    """Return the run in `folder` that goes on, or a new one; `on_message` is told which. Raises OSError.

    `force`: a finished run that stored no draft goes on too, to store one.
    """
    found = StateFile(
        folder / _STATE, lambda data: parse_struct(data, RunState), lock=".make.lock", on_message=on_message
    ).read()
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
    return RunState(
        key, found.number + 1, repeats=found.key == key, sources=found.sources, learnt=found.learnt
    )


def save(folder: Path, state: RunState) -> None:
    """Write the state atomically. Raises OSError."""
    write_atomically(folder / _STATE, msgspec.json.encode(state))


# ---- folders of trainings; `run` is FOLDER/training/NUMBER ----


def earlier_training(run: Path, name: str | None = None) -> Path | None:
    """Return the folder of the last training whose weights another one can start from.

    `name`: of the draft that has these weights; None: of any, or of none.
    """
    for other in _earlier_runs(run):
        training = other / "head"
        if (training / _BEST).exists() and name in (None, draft_of(training)):
            return training
    return None


def name_training(training: Path, name: str) -> None:
    """Note that the draft `name` has the weights of a training. Raises OSError."""
    if training.is_dir():
        write_atomically(training / _NAME, name)


def draft_of(training: Path | None) -> str | None:
    """Return the draft that has the weights of a training; None if none was stored."""
    file = training / _NAME if training else None
    return file.read_text(encoding="utf-8") if file and file.exists() else None


def tidy(run: Path, *, goes_on: bool, installed: str | None = None) -> None:
    """Delete from a finished run, and those before it, what later trainings do not start from.

    `goes_on`: the run may be resumed, so its checkpoints stay. The weights of the draft `installed` stay too.
    """
    for family in [path for path in run.glob("*") if path.is_dir()]:
        for name in _CHECKPOINTS if not goes_on else ():
            (family / name).unlink(missing_ok=True)
        for other in _earlier_runs(run):
            if installed is None or draft_of(other / family.name) != installed:
                shutil.rmtree(other / family.name, ignore_errors=True)
    for other in _earlier_runs(run):
        if not any(path.is_dir() for path in other.iterdir()):
            shutil.rmtree(other, ignore_errors=True)


def _earlier_runs(run: Path) -> list[Path]:
    others = [path for path in run.parent.glob("*") if path.name.isdecimal() and path != run]
    return sorted(others, key=lambda path: int(path.name), reverse=True)
