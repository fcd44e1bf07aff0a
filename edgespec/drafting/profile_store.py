"""Profiles stored in the cache directory: read, measured anew, and moved by what runs learn.

    edgespec profile   measure.py times the passes   \
                                                      >  update, under a lock  ->  a JSON file for each key
    every run          what it learned on the way    /

A file in `profiles` is named after the models and a hash of its key: all that the figures depend on. Nothing
here is needed: where the directory cannot be written, every run begins with a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.drafting.answer_lengths import MEAN_WEIGHT
from edgespec.drafting.costs import CONTEXTS, CostCurve
from edgespec.drafting.profile import FORMAT, VERSION, Profile, ProfileKey, as_text, from_json
from edgespec.errors import UsageError, describe_os_error
from edgespec.llama.backend import library_version
from edgespec.platform.cpu import read_cpu
from edgespec.platform.kept import PROFILES
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError, StateFile, parse_json

_HALF_AFTER = 200  # passes after which a run's curve weighs as much as it ever will
_MOST_WEIGHT = 0.5  # one noisy run must not spoil a measured curve
_FEWEST_RUNS = 3  # that costs rest on which nobody measured
_FEWEST_PASSES = 8  # that a first curve of a draft model rests on: the very first ones may be slow


def profile_path(key: ProfileKey) -> Path:
    """Return where the profile of `key` is, or would be. Raises UsageError: no home directory is known."""
    return PROFILES.path() / key.file_name


def load(key: ProfileKey, *, on_message: MessageFn = silent) -> Profile | None:
    """The record of `key`; None when nothing is, or nothing that can be used.

    A file that makes no sense is set aside, which is told to `on_message` in one line.
    """
    try:
        return _file(key, on_message).read()
    except (UsageError, NotADirectoryError):
        return None
    except OSError as error:
        on_message(f"{describe_os_error(error)}; the profile is not used")
        return None


def known_times(kernels: str, threads: int) -> dict[str, float]:
    """Return the seconds of a pass over one token, by the target's fingerprint, of profiles of this machine.

    Of those that were measured, or come from several runs; the least, since what disturbs one only adds some.
    """
    found: dict[str, float] = {}
    try:
        paths = [*PROFILES.files()]
    except UsageError:
        paths = []
    for path in paths:
        try:
            profile = from_json(parse_json(path.read_bytes(), form=FORMAT, version=VERSION))
        except (OSError, ValueError, DamagedFileError):
            continue  # those of speech too
        key = profile.key
        machine = key.cpu, key.llama_cpp, key.kernels, key.threads
        is_sure = profile.reliable or profile.runs >= _FEWEST_RUNS
        if is_sure and machine == (read_cpu().model, library_version(), kernels, threads):
            seconds = profile.target.at(CONTEXTS[0])[1]
            found[key.target] = min(seconds, found.get(key.target, seconds))
    return found


def update(
    key: ProfileKey, change: Callable[[Profile | None], Profile], *, on_message: MessageFn = silent
) -> Path | None:
    """Store what `change` makes of the stored profile of `key` (None: there is none), and return its file.

    Done under a lock, so what two processes store at a time is stored one after the other. None when it
    cannot be written. Raises ValueError for numbers that no profile may hold.
    """
    try:
        return store(key, change, on_message=on_message)
    except (OSError, UsageError):  # a cache that cannot be written only means to learn it again
        return None


def store(
    key: ProfileKey, change: Callable[[Profile | None], Profile], *, on_message: MessageFn = silent
) -> Path:
    """Do what `update` does; raise OSError or UsageError where nothing can be written."""
    file = _file(key, on_message)
    file.update(lambda stored: as_text(change(stored)).encode())
    return file.path


@dataclass(frozen=True, slots=True)
class TimedCurve:
    """A model's curve as a run knows it."""

    curve: CostCurve
    """Seconds."""
    n_passes: int
    """Timed passes that it rests on."""


def merge_learnt(
    key: ProfileKey,
    *,
    target: TimedCurve,
    draft: TimedCurve | None = None,
    acceptance: dict[str, Any] | None = None,
    answers: Sequence[int] = (),
    on_message: MessageFn = silent,
) -> Path | None:
    """Store what a run learned, and return the file as `update` does.

    The stored curves are moved towards `target` and `draft`, half the way at most; a first curve of the draft
    model is stored once it rests on enough passes. `acceptance` takes the place of the stored one. `answers`:
    lengths in tokens of the run's answers. Raises ValueError as `update` does.
    """

    def merge(stored: Profile | None) -> Profile:
        profile = stored or Profile(key, target.curve, None)
        answer_tokens = profile.answer_tokens
        for length in answers:
            answer_tokens += MEAN_WEIGHT * (max(1, length) - answer_tokens)
        return replace(
            profile,
            target=_moved(profile.target, target),
            draft=_of_draft(profile.draft, draft),
            acceptance=profile.acceptance if acceptance is None else acceptance,
            answer_tokens=answer_tokens,
            runs=profile.runs + 1,
        )

    return update(key, merge, on_message=on_message)


def _of_draft(stored: CostCurve | None, timed: TimedCurve | None) -> CostCurve | None:
    if stored and timed:
        return _moved(stored, timed)
    return timed.curve if timed and timed.n_passes >= _FEWEST_PASSES else stored


def _moved(stored: CostCurve, timed: TimedCurve) -> CostCurve:
    """Return the `stored` curve, moved towards the `timed` one: in ratios, as they err."""
    learned = timed.curve
    weight = min(_MOST_WEIGHT, _MOST_WEIGHT * max(0, timed.n_passes) / _HALF_AFTER)

    def moved(old: float, new: float) -> float:
        return float(old * (new / old) ** weight)

    near, far = (tuple(map(moved, old, new)) for old, new in zip(stored.passes, learned.passes, strict=True))
    return CostCurve((near, far), moved(stored.read, learned.read))


def _file(key: ProfileKey, on_message: MessageFn) -> StateFile[Profile]:
    path = profile_path(key)

    def parse(data: bytes) -> Profile:
        document = parse_json(data, form=FORMAT, version=VERSION)
        try:
            profile = from_json(document)
        except ValueError as error:
            printable = "".join(filter(str.isprintable, str(error)))[:200]  # it may quote the file
            raise DamagedFileError(f"damaged: {printable}") from None
        if profile.key != key:
            raise DamagedFileError("of another machine or other models")
        return profile

    return StateFile(path, parse, on_message=on_message)
