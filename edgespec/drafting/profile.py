"""A profile: the costs of a pair's passes on this machine, and the share of drafted tokens that is accepted.

    edgespec profile   measure.py times the passes   \
                                                      >  store, under a lock  ->  a JSON file for each key
    every run          what it learned on the way    /

A curve is T(n): the cost of one pass over n tokens with all their logits, at two lengths of context; between
them it is interpolated, beyond them extended. A run starts from the stored curve, or from a guess based on
the file's size, and `PassCosts` updates it with every timed pass.

A file in `profiles` is named after the models and a hash of its key: all that the figures depend on. It is
optional: if the directory cannot be written, every run begins with a guess.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.errors import MessageFn, UsageError, describe_os_error, silent
from edgespec.llama.backend import library_version
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.platform.kept import PROFILES, DamagedFileError, StateFile, parse_json
from edgespec.platform.machine import read_cpu

# ---- curves ----

N_MAX = MAX_GAMMA + 1
"""Longest pass in a curve: the longest draft and the token before it."""

CONTEXTS = (128, 2048)
"""Tokens already in the cache, for which curves are made."""

Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e300)]
_Side = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=N_MAX, max_length=N_MAX)]


class CostCurve(msgspec.Struct, frozen=True):
    """T(n) of one model on one machine, with its kernels and threads; in seconds, or in joules."""

    passes: tuple[_Side, _Side]
    """Element [i][n - 1]: one pass over n = 1 .. N_MAX tokens at context CONTEXTS[i]."""
    read: Positive
    """Cost of a token in prefill, where many are read at once without logits."""
    contexts: tuple[Literal[128], Literal[2048]] = (128, 2048)
    """CONTEXTS, for a profile's file: one with others is not read."""

    def times(self, factor: float) -> CostCurve:
        """Return all costs times `factor`: seconds times watts are joules."""
        near, far = (tuple(factor * cost for cost in side) for side in self.passes)
        return CostCurve((near, far), factor * self.read)

    def at(self, n_past: int) -> list[float]:
        """Return T(0) = 0, T(1) .. T(N_MAX) after `n_past` tokens, in the curve's unit."""
        share = _share_of_growth(n_past)
        return [0.0, *(max(a + (b - a) * share, a * 0.5) for a, b in zip(*self.passes, strict=True))]


def _share_of_growth(n_past: int) -> float:
    """Return the share, 0 to 1 and beyond, of T's growth between the two contexts at `n_past` tokens."""
    return max((n_past - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0]), -CONTEXTS[0] / CONTEXTS[1])


# T(n) / T(1) of edgespec's kernels and of llama.cpp's (1.5B Q4_K_M, context 128), for the first steps on a
# machine that was never measured: those of the processor on which a further token costs most. Guesses that
# were too low made first answers slower than plain ones; guesses that are too high cost little.
_SHAPES = {
    True: {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.0, 16: 3.8, 33: 7.6},
    False: {1: 1.0, 2: 1.9, 4: 3.1, 8: 5.1, 16: 6.0, 33: 9.0},
}
_GUESSED_BYTES_PER_S = 40e9
_NO_PASS = 1e-3  # of T: the curves are of positive numbers
# What the longer context adds, over T(1): the cache is read once, and each of n tokens attends to all of it.
_GUESSED_GROWTH = (0.06, 0.08)


def guessed_curve(file_bytes: int, *, own_kernels: bool) -> CostCurve:
    """Return the curve to expect of a model of that size before any of its passes was timed.

    Decoding one token reads every weight once, so T(1) follows the file's size. The first real steps correct
    the scale of the whole curve.
    """
    one = file_bytes / _GUESSED_BYTES_PER_S
    near = tuple(one * factor for factor in interpolated(_SHAPES[own_kernels]))
    once, each = (one * share for share in _GUESSED_GROWTH)
    far = tuple(cost + once + each * n for n, cost in enumerate(near, 1))
    return CostCurve((near, far), read=near[-1] / N_MAX)


def block_curve(curve: CostCurve, n_block: int) -> CostCurve:
    """Return the costs of drafting with a head that drafts `n_block` - 1 tokens in one pass over `n_block`.

    T(1) is the cost of one more token of a draft, which needs no pass; all others are that of the pass that
    begins it. A curve made this way is unchanged by it.
    """
    near, far = ((_NO_PASS * side[n_block - 1], *[side[n_block - 1]] * (N_MAX - 1)) for side in curve.passes)
    return CostCurve((near, far), curve.read)


def interpolated(known: dict[int, float]) -> list[float]:
    """Return values for n = 1 .. N_MAX, linear between the `known` n; 1 and N_MAX must be known."""
    points = sorted(known.items())
    values = []
    for n in range(1, N_MAX + 1):
        left, right = next(pair for pair in itertools.pairwise(points) if pair[1][0] >= n)
        share = (n - left[0]) / (right[0] - left[0])
        values.append(left[1] + (right[1] - left[1]) * share)
    return values


# ---- as passes of a run move them ----

_GAIN = 0.25  # of an error, by which T(n) moves with a pass over n tokens
_TRUSTED = 0.3  # of its logarithm: no pass counts for more, lest one beside a busy process spoil the curve
_COMMON, _NEAR, _REACH = 0.3, 0.4, 1.5  # of that: shared by all n; by those near, in square roots of n
_SCALING = 4  # passes that a guess takes its scale from
_MOST = math.log(2.0)  # that it rises in one of these
_READ = 0.3  # weight of a prompt in the mean of what reading costs
_TIMED = 8  # passes over one token after which T(1) is known

_ROOTS = np.sqrt(np.arange(1, N_MAX + 1))
_ALIKE = _COMMON + _NEAR * np.exp(-np.abs(_ROOTS[:, None] - _ROOTS) / _REACH)
_ALIKE += (1.0 - _COMMON - _NEAR) * np.eye(N_MAX)


class PassCosts:
    """T(n) of one model, updated by every timed pass.

    For each n a mean of log(time of a pass now / time by the curve), with one common scale: a pass over n
    tokens informs that n most, and others less. One more number is the slope over the context.
    """

    def __init__(self, curve: CostCurve, *, guessed: bool = False, unsure: bool = False) -> None:
        """Start from `curve`; a `guessed` one takes its scale from the first passes.

        `unsure`: the curve was not measured, or on a busy machine. A guess is always unsure.
        """
        self._curve = curve
        self._near, far = (np.array(side) for side in curve.passes)
        self._growth = far - self._near
        self._logs = np.zeros(N_MAX)
        self._log_growth = self._log_read = 0.0
        self._n_scaling = _SCALING if guessed else 0
        self._unread = guessed
        self._n_plain = 0 if guessed or unsure else _TIMED
        self.n_observed = 0

    def _before(self, n_past: int) -> tuple[np.ndarray, np.ndarray]:
        """Return T(1) .. T(N_MAX) by only the curve, and the part of it that the context adds."""
        added = math.exp(self._log_growth) * _share_of_growth(n_past) * self._growth
        return np.maximum(self._near + added, 0.5 * self._near), added

    def at(self, n_past: int) -> list[float]:
        """Return T(0) .. T(N_MAX) after `n_past` tokens."""
        costs: list[float] = (self._before(n_past)[0] * np.exp(self._logs)).tolist()
        # While all steps draft none is over one token: what was known of those may be from a slower hour.
        return [0.0, min(costs), *costs[1:]]

    def seconds(self, n: int, n_past: int) -> float:
        """Return T(n) after `n_past` tokens, for any n."""
        return extended(self.at(n_past), [n])[0]

    def read(self, n_tokens: int, n_past: int) -> float:
        """Return the seconds of prefilling `n_tokens` into a cache of `n_past`, without logits."""
        if n_tokens < N_MAX:
            return self.at(n_past)[n_tokens]
        return self._read(n_tokens, n_past) * math.exp(self._log_read)

    def _read(self, n_tokens: int, n_past: int) -> float:
        """Return the seconds before any prefill was timed; the curve's figure is for its longer context."""
        longer, usual = (self._before(n)[1][-1] for n in (n_past + n_tokens // 2, CONTEXTS[1] // 2))
        read = self._curve.read
        return n_tokens * max(read + float(longer - usual) / N_MAX, read * 0.5)

    def observe(self, n: int, n_past: int, seconds: float) -> None:
        """Learn that a pass over `n` <= N_MAX tokens after `n_past` took `seconds`."""
        self.n_observed += 1
        self._n_plain += n == 1
        costs, added = self._before(n_past)
        error = math.log(max(seconds, 1e-9) / costs[n - 1]) - float(self._logs[n - 1])
        if self._n_scaling:
            # The very first pass of a small model may take 20 times as long as the next: if it were believed,
            # there would be no next. So a guess rises in steps, and falls to what was really seen.
            self._n_scaling -= 1
            self._logs += min(_MOST, error)
            return
        error = _GAIN * max(-_TRUSTED, min(_TRUSTED, error))
        grown = max(0.0, float(added[n - 1] / costs[n - 1]))
        self._logs += (1.0 - grown) * error * _ALIKE[n - 1]
        self._log_growth += 2.0 * grown * error

    def observe_read(self, n_tokens: int, n_past: int, seconds: float) -> None:
        """Learn that `n_tokens` of a prompt were prefilled after `n_past` in `seconds`."""
        if n_tokens >= N_MAX:
            error = math.log(max(seconds, 1e-9) / self._read(n_tokens, n_past)) - self._log_read
            self._log_read += error if self._unread else _READ * error
            self._unread = False

    @property
    def knows_plain(self) -> bool:
        """Whether T(1) was measured, or timed in some passes, instead of guessed."""
        return self._n_plain >= _TIMED

    def curve(self) -> CostCurve:
        """Return the present curve."""
        far = self._near + math.exp(self._log_growth) * self._growth
        near, far = (tuple((side * np.exp(self._logs)).tolist()) for side in (self._near, far))
        return CostCurve((near, far), self._curve.read * math.exp(self._log_read))


def extended(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return T(n) for each n of `sizes`, from T(0) .. T(N_MAX); beyond, T grows as in its upper half."""
    end = len(costs) - 1
    slope = max(0.0, (costs[end] - costs[end // 2]) / (end - end // 2))
    return [costs[n] if n <= end else costs[end] + slope * (n - end) for n in sizes]


def alike(costs: Sequence[float], n: int) -> list[float]:
    """Return each text's share S(0) .. S(N_MAX) of a pass in which `n` texts have equally many tokens."""
    return [cost / n for cost in extended(costs, range(0, n * N_MAX + 1, n))]


class Clocks(NamedTuple):
    """Costs of the target's and the draft model's passes, in seconds, updated by every pass."""

    target: PassCosts
    draft: PassCosts | None


# ---- what a file holds ----

FORMAT, VERSION = "edgespec profile", 1

_LONGEST_STEM = 60  # characters of a model's name in a file's
_OWN_HEAD = "@mtp"  # of a draft that is the head in the target's file, not a model in it


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """All that a profile's figures depend on, and the models' names."""

    cpu: str
    """The processor's model name."""
    llama_cpp: str
    """The library's version, as it names itself."""
    kernels: str
    """The instruction set of edgespec's kernels, or "stock"."""
    threads: int
    target: str
    """`GGUFHeader.fingerprint` of the target's file."""
    draft: str | None
    """The same for the draft, marked where it is the head in the target's file; None for a target alone."""
    target_name: str = field(compare=False)
    """The file's name without its ending; used for the profile's own name only."""
    draft_name: str | None = field(compare=False)

    @classmethod
    def of(cls, target: GGUFHeader, draft: GGUFHeader | None, *, kernels: str, threads: int) -> ProfileKey:
        """Return the key of these models on this machine; `kernels`: named as by Engine.kernels."""
        own = _OWN_HEAD if draft and draft.is_part else ""
        return cls(
            cpu=read_cpu().model,
            llama_cpp=library_version(),
            kernels=kernels,
            threads=threads,
            target=target.fingerprint(),
            draft=draft.fingerprint() + own if draft else None,
            target_name=target.path.stem,
            draft_name=draft.path.stem + own if draft else None,
        )

    @property
    def file_name(self) -> str:
        """The name of the profile's file: both models, and a hash of all fields of the key."""
        facts = json.dumps([self.cpu, self.llama_cpp, self.kernels, self.threads, self.target, self.draft])
        names = [name for name in (self.target_name, self.draft_name) if name is not None]
        stems = "+".join(re.sub(r"[^A-Za-z0-9._@-]", "_", name)[:_LONGEST_STEM] for name in names)
        return f"{stems}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


class Profile(msgspec.Struct, frozen=True):
    """Costs and acceptance for one ProfileKey."""

    key: ProfileKey
    target: CostCurve
    """Seconds."""
    draft: CostCurve | None = None
    """Seconds; None for a target alone, and until enough passes of the draft model were timed."""
    target_watts: Positive | None = None
    """Watts in the target's passes; None if `edgespec profile` could not count them."""
    draft_watts: Positive | None = None
    measured: str | None = None
    """When `edgespec profile` measured the curves, as an ISO date; None: only learned from runs."""
    spread: Annotated[float, msgspec.Meta(ge=0.0, le=1e300)] = 0.0
    """Interquartile range over median of a pass's repeats, the median of all passes; 0 if not measured."""
    reliable: bool = False
    """Whether the curves were measured, with repeats that agree."""
    acceptance: dict[str, Any] = msgspec.field(default_factory=dict)
    """The JSON of the acceptance tables, of greedy and of sampled texts."""
    runs: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Runs that added to it."""

    def as_text(self) -> str:
        """Return the JSON object of its file, a line per field. Raises ValueError for impossible numbers."""
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(self)}
        from_json(document)  # refuses what could not be read again
        items = {name: json.dumps(value, allow_nan=False) for name, value in document.items()}
        return "{\n" + ",\n".join(f'  "{name}": {text}' for name, text in items.items()) + "\n}\n"


def from_json(document: dict[str, Any]) -> Profile:
    """Return the profile in the JSON text `document`. Raises ValueError for impossible values."""
    # Earlier versions kept curves of joules in place of watts: of such a profile the energy is not known.
    optional = {"target_watts", "draft_watts"}
    if missing := set(Profile.__struct_fields__) - document.keys() - optional:
        raise ValueError(f"no {min(missing)}")
    try:
        profile = msgspec.convert(document, Profile)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if profile.measured is not None:
        datetime.fromisoformat(profile.measured)
    if profile.draft and profile.key.draft is None:
        raise ValueError("draft is there, and key.draft is null")
    return profile


# ---- files ----

_HALF_AFTER = 200  # passes after which a run's curve weighs as much as it ever will
_MOST_WEIGHT = 0.5  # one noisy run must not spoil a measured curve
_FEWEST_PASSES = 8  # that a first curve of a draft model rests on: the very first ones may be slow


def profile_path(key: ProfileKey) -> Path:
    """Return where the profile of `key` is, or would be. Raises UsageError: no home directory is known."""
    return PROFILES.path() / key.file_name


def _file(key: ProfileKey, on_message: MessageFn) -> StateFile[Profile]:
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

    return StateFile(profile_path(key), parse, on_message=on_message)


def load(key: ProfileKey, *, on_message: MessageFn = silent) -> Profile | None:
    """Return the profile of `key`; None if there is no usable one.

    An invalid file is set aside, and `on_message` gets a line about it.
    """
    try:
        return _file(key, on_message).read()
    except (UsageError, NotADirectoryError):
        return None
    except OSError as error:
        on_message(f"{describe_os_error(error)}; the profile is not used")
        return None


def store(
    key: ProfileKey, change: Callable[[Profile | None], Profile], *, on_message: MessageFn = silent
) -> Path:
    """Store the result of `change` on the stored profile of `key` (None: there is none); return its file.

    This is done under a lock, one process after the other. Raises OSError or
    UsageError if nothing can be written, and ValueError for numbers that no profile may hold.
    """
    file = _file(key, on_message)
    file.update(lambda stored: change(stored).as_text().encode())
    return file.path


class TimedCurve(NamedTuple):
    """A model's curve as updated by a run."""

    curve: CostCurve
    """Seconds."""
    n_passes: int
    """Timed passes that it rests on."""


def store_learned(
    key: ProfileKey,
    target: TimedCurve,
    draft: TimedCurve | None = None,
    acceptance: dict[str, Any] | None = None,
    *,
    on_message: MessageFn = silent,
) -> Path | None:
    """Store what a run learned; return the file, or None if it cannot be written.

    The stored curves are moved towards `target` and `draft`, at most halfway; a first curve of the draft
    model is stored once it is based on enough passes. `acceptance` replaces the stored one.
    """

    def merge(stored: Profile | None) -> Profile:
        profile = stored or Profile(key, target.curve)
        drafted = profile.draft
        if draft and drafted:
            drafted = _moved(drafted, draft)
        elif draft and draft.n_passes >= _FEWEST_PASSES:
            drafted = draft.curve
        return msgspec.structs.replace(
            profile,
            target=_moved(profile.target, target),
            draft=drafted,
            acceptance=profile.acceptance if acceptance is None else acceptance,
            runs=profile.runs + 1,
        )

    try:
        return store(key, merge, on_message=on_message)
    except (OSError, UsageError):
        return None


def _moved(stored: CostCurve, timed: TimedCurve) -> CostCurve:
    """Return the `stored` curve, moved towards the `timed` one in ratios, since their errors are ratios."""
    learned, n_passes = timed
    weight = _MOST_WEIGHT * min(1.0, max(0, n_passes) / _HALF_AFTER)

    def moved(old: Sequence[float], new: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(a * (b / a) ** weight) for a, b in zip(old, new, strict=True))

    near, far = map(moved, stored.passes, learned.passes)
    return CostCurve((near, far), moved([stored.read], [learned.read])[0])
