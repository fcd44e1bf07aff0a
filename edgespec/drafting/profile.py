"""A profile: costs and acceptance of a pair of models on this machine, and the JSON of its file."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Annotated, Any

import msgspec

from edgespec.drafting.answer_lengths import ANSWER_TOKENS
from edgespec.drafting.costs import CostCurve, Positive
from edgespec.llama.backend import library_version
from edgespec.llama.gguf_header import GGUFHeader, file_fingerprint
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
    """The same for the draft, marked where it is the head in the target's file; None for a target alone."""
    target_name: str = field(compare=False)
    """The file's name without its ending; used for the profile's own name only."""
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
        """The name of the profile's file: both models, and a hash of all fields of the key."""
        facts = json.dumps([self.cpu, self.llama_cpp, self.kernels, self.threads, self.target, self.draft])
        names = [name for name in (self.target_name, self.draft_name) if name is not None]
        stems = "+".join(re.sub(r"[^A-Za-z0-9._@-]", "_", name)[:_LONGEST_STEM] for name in names)
        return f"{stems}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs and acceptance for one ProfileKey."""

    key: ProfileKey
    target: CostCurve
    """Seconds."""
    draft: CostCurve | None = None
    """Seconds; None for a target alone, and until enough passes of the draft model were timed."""
    target_joules: CostCurve | None = None
    draft_joules: CostCurve | None = None
    measured: str | None = None
    """When `edgespec profile` measured the curves, as an ISO date; None: only learned from runs."""
    spread: Annotated[float, msgspec.Meta(ge=0.0, le=1e300)] = 0.0
    """Interquartile range over median of a pass's repeats, the median of all passes; 0 if not measured."""
    reliable: bool = False
    """Whether the curves were measured, with repeats that agree."""
    acceptance: dict[str, Any] = field(default_factory=dict)
    """The predictor's own JSON."""
    answer_tokens: Positive = ANSWER_TOKENS
    """Length of the last answers, a decaying mean."""
    runs: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Runs that added to it."""

    def with_learned_of(self, earlier: Profile) -> Profile:
        """Return this profile, whose curves are new, with what `earlier` had learned from runs."""
        return replace(
            self,
            acceptance=earlier.acceptance,
            answer_tokens=earlier.answer_tokens,
            runs=earlier.runs,
        )


# ---- JSON ----


def as_json(profile: Profile) -> dict[str, Any]:
    """Return the JSON object that a profile's file holds. Raises ValueError for impossible numbers."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(profile)}, allow_nan=False)
    document: dict[str, Any] = json.loads(text)  # what a reader would get back
    from_json(document)  # refuses what could not be read again
    return document


def as_text(profile: Profile) -> str:
    """Return that object as the file has it, a field a line. Raises ValueError for impossible numbers."""
    items = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in as_json(profile).items())
    return "{\n" + ",\n".join(items) + "\n}\n"


def from_json(document: dict[str, Any]) -> Profile:
    """Return the profile that `as_json` made an object of. Raises ValueError for what it cannot be."""
    if missing := {entry.name for entry in fields(Profile)} - document.keys():
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
