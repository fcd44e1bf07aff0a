"""What is known of a pair of models on this machine, kept between runs.

    edgespec profile   measure.py times the passes      \
                                                         >  update, under a lock  ->  one JSON file a Key
    every run          what it learnt on the way         /

A file lies in the cache directory, in `profiles`, and is named after the models and the Key: all that
the figures depend on. Nothing here is needed: where the directory cannot be written, every run begins
with a guess.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from edgespec.drafting.costs import CONTEXTS, N_MAX, Curve
from edgespec.drafting.lengths import ANSWER_TOKENS, MEAN_WEIGHT
from edgespec.errors import UsageError, describe_os_error
from edgespec.llama.backend import library_version
from edgespec.llama.fingerprints import file_fingerprint
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.platform.cpu import read_cpu
from edgespec.platform.files import cache_root

FORMAT, VERSION = "edgespec profile", 1

MessageFn = Callable[[str], None]
"""Takes one line worth telling the user although the work goes on."""

_HALF_AFTER = 200  # passes after which a run's curve weighs as much as it ever will
_MOST_WEIGHT = 0.5  # one noisy run must not spoil a measured curve
_LONGEST_STEM = 60  # characters of a model's name in a file's


def _silent(_line: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Key:
    """All that a profile's figures depend on, and the models' names."""

    cpu: str
    """The processor's model name."""
    llama_cpp: str
    """The library's version, as it names itself."""
    kernels: str
    """The instruction set of edgespec's kernels, or "stock"."""
    threads: int
    target: str
    """`file_fingerprint` of the target's file."""
    draft: str | None
    """Of the draft's; None for a target alone."""
    target_name: str = field(compare=False)
    """The file's name without its ending; of no meaning, but for the profile's own name."""
    draft_name: str | None = field(compare=False)

    @classmethod
    def of(cls, target: GGUFHeader, draft: GGUFHeader | None, *, kernels: str, threads: int) -> Key:
        """Return the key of these models on this machine; `kernels` as Engine.kernels names them."""
        return cls(
            cpu=read_cpu().model,
            llama_cpp=library_version(),
            kernels=kernels,
            threads=threads,
            target=file_fingerprint(target),
            draft=file_fingerprint(draft) if draft else None,
            target_name=target.path.stem,
            draft_name=draft.path.stem if draft else None,
        )

    @property
    def file_name(self) -> str:
        """What the profile's file is called: the models, and a hash of everything."""
        facts = json.dumps([self.cpu, self.llama_cpp, self.kernels, self.threads, self.target, self.draft])
        names = [name for name in (self.target_name, self.draft_name) if name is not None]
        stems = "+".join(re.sub(r"[^A-Za-z0-9._@-]", "_", name)[:_LONGEST_STEM] for name in names)
        return f"{stems}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of one Key."""

    key: Key
    target: Curve
    """Seconds."""
    draft: Curve | None = None
    """Seconds; None for a target alone."""
    target_joules: Curve | None = None
    draft_joules: Curve | None = None
    measured: str | None = None
    """When `edgespec profile` measured the curves, as an ISO date; None: only learnt from runs."""
    spread: float = 0.0
    """Interquartile range over median of a pass's repeats, the median of all passes; 0 if not measured."""
    reliable: bool = False
    """Whether the curves were measured, with repeats that agree."""
    acceptance: dict[str, Any] = field(default_factory=dict)
    """What the predictor knows: its own JSON, kept as it is."""
    answer_tokens: float = ANSWER_TOKENS
    """Length of the last answers, a decaying mean."""
    runs: int = 0
    """Runs that added to it."""

    def with_learnt_of(self, earlier: Profile) -> Profile:
        """Return this profile, its curves measured anew, with what `earlier` had learnt from runs."""
        return replace(
            self,
            acceptance=earlier.acceptance,
            answer_tokens=earlier.answer_tokens,
            runs=earlier.runs,
        )


def profile_path(key: Key) -> Path:
    """Return where the profile of `key` is, or would be. Raises UsageError: no home directory is known."""
    return cache_root() / "profiles" / key.file_name


def load(key: Key, *, on_message: MessageFn = _silent) -> Profile | None:
    """Return what is stored for `key`; None when nothing is, or nothing that can be used.

    A file that makes no sense is renamed to NAME.json.set-aside (-2, -3, ... where that is taken); one
    of a newer edgespec is left as it is. Either is told to `on_message` in one line.
    """
    try:
        file = profile_path(key)
    except UsageError:
        return None
    try:
        return _read(file, key)
    except _Newer as error:
        on_message(str(error))
        return None
    except NotADirectoryError:
        return None
    except OSError as error:
        on_message(f"{describe_os_error(error)}; the profile is not used")
        return None
    except _Unusable as error:
        line = f"{error}; it is not used"
    # Looked at again under the lock: another process may have put a good one in its place.
    try:
        with _locked(file.parent):
            return _read_or_set_aside(file, key, on_message)
    except _Newer as error:
        line = str(error)
    except OSError:  # cannot be moved away: it stays
        pass
    on_message(line)
    return None


def save(profile: Profile, *, on_message: MessageFn = _silent) -> Path | None:
    """Store `profile` in place of what is stored for its key, and return its file.

    None when the directory cannot be written, or when a newer edgespec's file is there, which is told
    to `on_message`. Raises ValueError for numbers that no profile may hold.
    """
    return update(profile.key, lambda _stored: profile, on_message=on_message)


def update(
    key: Key, change: Callable[[Profile | None], Profile], *, on_message: MessageFn = _silent
) -> Path | None:
    """Store what `change` makes of the stored profile of `key` (None: there is none); returns as `save`.

    Done under a lock, so what two processes store at a time is stored one after the other.
    """
    try:
        return store(key, change, on_message=on_message)
    except (OSError, UsageError):  # a cache that cannot be written only means to learn it again
        return None


def store(
    key: Key, change: Callable[[Profile | None], Profile], *, on_message: MessageFn = _silent
) -> Path | None:
    """As `update`, but raises OSError or UsageError where nothing can be written."""
    file = profile_path(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.parent):
        try:
            profile = change(_read_or_set_aside(file, key, on_message))
        except _Newer as error:
            on_message(str(error))
            return None
        _write(file, as_text(profile))
    return file


def merge_learnt(
    key: Key,
    *,
    target: Curve,
    target_passes: int,
    draft: Curve | None = None,
    draft_passes: int = 0,
    acceptance: dict[str, Any] | None = None,
    answers: Sequence[int] = (),
    on_message: MessageFn = _silent,
) -> Path | None:
    """Store what a run learnt, and return the file as `save` does.

    `target`, `draft`: the curves as they are known now, in seconds, and from how many timed passes. The
    stored curves are moved towards them, half the way at most. `acceptance` takes the place of the
    stored one. `answers`: lengths in tokens of the run's answers. Raises ValueError as `save` does.
    """

    def merge(stored: Profile | None) -> Profile:
        profile = stored or Profile(key, target, draft)
        answer_tokens = profile.answer_tokens
        for length in answers:
            answer_tokens += MEAN_WEIGHT * (max(1, length) - answer_tokens)
        return replace(
            profile,
            target=_moved(profile.target, target, target_passes),
            draft=profile.draft and (_moved(profile.draft, draft, draft_passes) if draft else profile.draft),
            acceptance=profile.acceptance if acceptance is None else acceptance,
            answer_tokens=answer_tokens,
            runs=profile.runs + 1,
        )

    return update(key, merge, on_message=on_message)


def _moved(stored: Curve, learnt: Curve, n_passes: int) -> Curve:
    """Return the `stored` curve, moved towards what was `learnt` from `n_passes`: in ratios, as they err."""
    weight = min(_MOST_WEIGHT, _MOST_WEIGHT * max(0, n_passes) / _HALF_AFTER)

    def moved(old: float, new: float) -> float:
        return float(old * (new / old) ** weight)

    near, far = (tuple(map(moved, old, new)) for old, new in zip(stored.passes, learnt.passes, strict=True))
    return Curve((near, far), moved(stored.read, learnt.read))


# ---- files ----


class _Unusable(Exception):  # noqa: N818 - as below
    """The file makes no sense; the line says which and why."""


class _Newer(Exception):  # noqa: N818 - the file is fine, but not for us
    """The file is of a newer edgespec; the line says which."""


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of all profiles; it goes with the process, however that ends."""
    # Never deleted: a process that waits for a deleted lock file would hold a lock nobody sees.
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(file: Path, key: Key) -> Profile | None:
    """Return the profile in `file`, None if there is no file; raises _Unusable, _Newer or OSError."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        raise _Unusable(f"{file}: damaged: not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _Unusable(f"{file}: not a profile of edgespec")
    version = document.get("version")
    if type(version) is not int or version < VERSION:
        raise _Unusable(f"{file}: damaged: no version")
    if version > VERSION:
        raise _Newer(f"{file}: of a newer edgespec (version {version}); it is not used and stays as it is")
    try:
        profile = _parse(document)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        printable = "".join(filter(str.isprintable, reason))[:200]  # it may quote the file
        raise _Unusable(f"{file}: damaged: {printable}") from None
    if profile.key != key:
        raise _Unusable(f"{file}: of another machine or other models")
    return profile


def _read_or_set_aside(file: Path, key: Key, on_message: MessageFn) -> Profile | None:
    """Return as `_read`, having moved away a file that makes no sense. The lock is held."""
    try:
        return _read(file, key)
    except _Unusable as error:
        names = (f"{file.name}.set-aside{f'-{i}' if i > 1 else ''}" for i in range(1, 10_000))
        aside = next(path for name in names if not os.path.lexists(path := file.with_name(name)))
        file.rename(aside)
        on_message(f"{error}; set aside as {aside.name}")
        return None


def _write(file: Path, text: str) -> None:
    """Write the file so that a reader sees the old text or the new, and nobody else sees either."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # of mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# ---- the JSON document ----


def as_json(profile: Profile) -> dict[str, Any]:
    """Return the JSON object that a profile's file holds. Raises ValueError for impossible numbers."""
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for entry in fields(profile):
        value = getattr(profile, entry.name)
        match value:
            case Key():
                value = asdict(value)
            case Curve():
                near, far = ([*map(_six_digits, side)] for side in value.passes)
                value = {"contexts": [*CONTEXTS], "passes": [near, far], "read": _six_digits(value.read)}
            case dict():
                value = json.loads(json.dumps(value, allow_nan=False))  # what a reader would get back
            case float():
                value = _six_digits(value)
        document[entry.name] = value
    try:
        _parse(document)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not a profile: {error}") from error
    return document


def as_text(profile: Profile) -> str:
    """Return that object as the file has it, for people to read. Raises ValueError as `as_json`."""
    return _laid_out(as_json(profile)) + "\n"


def _laid_out(value: Any, indent: str = "") -> str:  # noqa: ANN401 - any JSON
    """Return JSON that people can read: a list of numbers is one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {_laid_out(item, inner)}" for key, item in value.items()]
        brackets = "{}"
    elif isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
        items = [_laid_out(item, inner) for item in value]
        brackets = "[]"
    else:
        return json.dumps(value, allow_nan=False)
    return brackets[0] + "".join(f"\n{inner}{item}," for item in items)[:-1] + f"\n{indent}{brackets[1]}"


def _six_digits(number: float) -> float:
    return float(f"{number:.6g}")


def _finite(text: str) -> float:
    """Return a number of a JSON text; Python would also read NaN and Infinity, and 1e999 as such."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse(document: dict[str, Any]) -> Profile:
    """Return the profile; raises KeyError, TypeError, ValueError or OverflowError for what it cannot be."""
    key = Key(**document["key"])
    text_or_null = (str, type(None))
    kinds = (str, str, str, int, str, text_or_null, str, text_or_null)
    for entry, kind in zip(fields(key), kinds, strict=True):
        _checked(getattr(key, entry.name), kind, f"key.{entry.name}")
    measured = _checked(document["measured"], (str, type(None)), "measured")
    if measured is not None:
        datetime.fromisoformat(measured)
    target = _curve(document["target"], "target")
    if target is None:
        raise ValueError("target is null")
    draft = _curve(document["draft"], "draft")
    if (draft is None) != (key.draft is None):
        raise ValueError("draft and key.draft: one is null")
    runs: int = _checked(document["runs"], int, "runs")
    return Profile(
        key=key,
        target=target,
        draft=draft,
        target_joules=_curve(document["target_joules"], "target_joules"),
        draft_joules=_curve(document["draft_joules"], "draft_joules"),
        measured=measured,
        spread=_number(document["spread"], "spread", zero=True),
        reliable=_checked(document["reliable"], bool, "reliable"),
        acceptance=_checked(document["acceptance"], dict, "acceptance"),
        answer_tokens=_number(document["answer_tokens"], "answer_tokens"),
        runs=int(_number(runs, "runs", zero=True)),
    )


def _curve(value: Any, name: str) -> Curve | None:  # noqa: ANN401 - whatever a file holds
    if value is None:
        return None
    stored: dict[str, Any] = _checked(value, dict, name)
    if stored["contexts"] != [*CONTEXTS]:
        raise ValueError(f"{name}.contexts are not {[*CONTEXTS]}")
    sides = []
    for side in _listed(stored["passes"], len(CONTEXTS), f"{name}.passes"):
        numbers = _listed(side, N_MAX, f"{name}.passes")
        sides.append(tuple(_number(number, f"{name}.passes") for number in numbers))
    return Curve((sides[0], sides[1]), _number(stored["read"], f"{name}.read"))


def _checked(value: Any, kind: Any, name: str) -> Any:  # noqa: ANN401 - a type, or a tuple of them
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):  # a bool is no number
        raise TypeError(f"{name} has the wrong type")
    return value


def _listed(value: Any, length: int, name: str) -> list[Any]:  # noqa: ANN401
    if len(_checked(value, list, name)) != length:
        raise ValueError(f"{name}: {len(value)} instead of {length}")
    return list(value)


def _number(value: Any, name: str, *, zero: bool = False) -> float:  # noqa: ANN401
    number = float(_checked(value, (int, float), name))
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"{name} is not a possible number")
    return number
