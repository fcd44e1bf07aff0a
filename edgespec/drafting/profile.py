"""A profile: what is known of a pair of models on this machine, and the JSON in which it is kept."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from edgespec.drafting.answer_lengths import ANSWER_TOKENS
from edgespec.drafting.costs import CONTEXTS, N_MAX, CostCurve
from edgespec.llama.backend import library_version
from edgespec.llama.fingerprints import file_fingerprint
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.platform.cpu import read_cpu

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
    """`file_fingerprint` of the target's file."""
    draft: str | None
    """Of the draft's, marked where it is the head in the target's own; None for a target alone."""
    target_name: str = field(compare=False)
    """The file's name without its ending; of no meaning, but for the profile's own name."""
    draft_name: str | None = field(compare=False)

    @classmethod
    def of(cls, target: GGUFHeader, draft: GGUFHeader | None, *, kernels: str, threads: int) -> ProfileKey:
        """Return the key of these models on this machine; `kernels` as Engine.kernels names them."""
        own = _OWN_HEAD if draft and draft.is_mtp else ""
        return cls(
            cpu=read_cpu().model,
            llama_cpp=library_version(),
            kernels=kernels,
            threads=threads,
            target=file_fingerprint(target),
            draft=file_fingerprint(draft) + own if draft else None,
            target_name=target.path.stem,
            draft_name=draft.path.stem + own if draft else None,
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
    """What is known of one ProfileKey."""

    key: ProfileKey
    target: CostCurve
    """Seconds."""
    draft: CostCurve | None = None
    """Seconds; None for a target alone, and until enough passes of the draft model were timed."""
    target_joules: CostCurve | None = None
    draft_joules: CostCurve | None = None
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


# ---- JSON ----


def as_json(profile: Profile) -> dict[str, Any]:
    """Return the JSON object that a profile's file holds. Raises ValueError for impossible numbers."""
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for entry in fields(profile):
        value = getattr(profile, entry.name)
        match value:
            case ProfileKey():
                value = asdict(value)
            case CostCurve():
                near, far = ([*map(_six_digits, side)] for side in value.passes)
                value = {"contexts": [*CONTEXTS], "passes": [near, far], "read": _six_digits(value.read)}
            case dict():
                value = json.loads(json.dumps(value, allow_nan=False))  # what a reader would get back
            case float():
                value = _six_digits(value)
        document[entry.name] = value
    try:
        from_json(document)
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


def from_json(document: dict[str, Any]) -> Profile:
    """Return the profile that `as_json` made an object of.

    Raises KeyError, TypeError, ValueError or OverflowError for what it cannot be.
    """
    key = ProfileKey(**document["key"])
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
    if draft is not None and key.draft is None:
        raise ValueError("draft is there, and key.draft is null")
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


def _curve(value: Any, name: str) -> CostCurve | None:  # noqa: ANN401 - whatever a file holds
    if value is None:
        return None
    stored: dict[str, Any] = _checked(value, dict, name)
    if stored["contexts"] != [*CONTEXTS]:
        raise ValueError(f"{name}.contexts are not {[*CONTEXTS]}")
    sides = []
    for side in _listed(stored["passes"], len(CONTEXTS), f"{name}.passes"):
        numbers = _listed(side, N_MAX, f"{name}.passes")
        sides.append(tuple(_number(number, f"{name}.passes") for number in numbers))
    return CostCurve((sides[0], sides[1]), _number(stored["read"], f"{name}.read"))


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
