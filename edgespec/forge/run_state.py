"""What `edgespec draft make` remembers of a run, so that a stopped one goes on: FOLDER/make.json.

The stages keep their own state (texts, checkpoints, judged parts); this says whose they are. A run that has
ended is remembered too: the next one may start from its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from edgespec.energy import Measurement
from edgespec.platform.files import write_atomically
from edgespec.platform.kept_file import KeptFile, parse_struct
from edgespec.platform.messages import MessageFn


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
    kept = KeptFile(
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
