"""Cost and gain of a draft model as runs saw them, kept in the cache: small JSON files.

So a draft runs from the first window on where it is known to pay, and `auto` leaves one alone that was seen
not to. A file is named after a hash of all that its figures depend on.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edgespec.apps.speech.speech_model import check_speech_file
from edgespec.errors import UsageError
from edgespec.llama.fingerprints import file_fingerprint
from edgespec.platform.cpu import read_cpu
from edgespec.platform.kept import PROFILES
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError, NewerFormatError, StateFile, parse_json

_FORMAT, _VERSION = "edgespec speech draft", 1
_WEIGHT = 0.5  # of a run in what is kept
_TRIALS = 0.01  # share of the time of decoding that trials of a draft may take which did not pay before

_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]


@dataclass(frozen=True, slots=True)
class SpeechPair:
    """A target and a draft on this machine: all that their figures depend on."""

    target: str
    """`file_fingerprint` of the target's file."""
    draft: str
    cpu: str
    kernels: str
    """The instruction set of edgespec's kernels, or "stock"."""
    threads: int

    @classmethod
    def of(cls, target: Path, draft: Path, *, kernels: str, threads: int) -> SpeechPair:
        """Return the pair of two files."""
        ours, theirs = (file_fingerprint(check_speech_file(path)) for path in (target, draft))
        return cls(ours, theirs, read_cpu().model, kernels, threads)

    @property
    def path(self) -> Path:
        """The file of its figures. Raises UsageError: no home directory is known."""
        digest = hashlib.sha256("\n".join(map(str, astuple(self))).encode()).hexdigest()
        return PROFILES.path() / f"speech-{digest[:16]}.json"


class SpeechDraftCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Cost and gain of a draft, as runs saw them."""

    encode_s: _Seconds
    """Time of the draft's encoder for a window."""
    plain_s: _Seconds
    """Time of a token without the draft."""
    drafted_s: _Seconds
    """Time of a token with it."""
    n_tokens: _Seconds
    """Tokens of a window that is sound from end to end."""
    n_drafted: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Windows with the draft since the last without it, which shows anew what a token takes then."""
    left_alone: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Runs in a row that did without it."""

    @property
    def gain_s(self) -> float:
        """Seconds saved in such a window, the encoder's taken off."""
        return self.n_tokens * (self.plain_s - self.drafted_s) - self.encode_s

    @property
    def is_due(self) -> bool:
        """Whether a draft that did not pay is to be weighed anew: other recordings may suit it.

        The more it lost, the more runs lie between.
        """
        lost = -self.gain_s / (self.n_tokens * self.plain_s)
        return lost >= 0.0 and self.left_alone >= lost / _TRIALS


def joined(kept: SpeechDraftCosts | None, seen: SpeechDraftCosts | None) -> SpeechDraftCosts | None:
    """Return what was `kept` of a draft with what a run has `seen`; None: the run did without the draft."""
    if kept and seen:
        values = {
            name: getattr(kept, name) + _WEIGHT * (getattr(seen, name) - getattr(kept, name))
            for name in ("encode_s", "plain_s", "drafted_s", "n_tokens")
        }
        return SpeechDraftCosts(**values, n_drafted=seen.n_drafted)
    return msgspec.structs.replace(kept, left_alone=kept.left_alone + 1) if kept else seen


class _Stored(msgspec.Struct):
    format: Literal["edgespec speech draft"]
    version: Literal[1]
    pair: SpeechPair
    costs: SpeechDraftCosts


def load_costs(pair: SpeechPair, *, on_message: MessageFn = silent) -> SpeechDraftCosts | None:
    """Return what is kept of `pair`; None if nothing is that can be used."""
    try:
        return _file(pair, on_message).read()
    except (OSError, UsageError):
        return None


def keep_costs(pair: SpeechPair, seen: SpeechDraftCosts | None, *, on_message: MessageFn = silent) -> None:
    """Keep what a run has `seen` of `pair`, `joined` with what was kept before.

    Where nothing can be written, nothing is kept.
    """

    def change(kept: SpeechDraftCosts | None) -> bytes:
        new = joined(kept, seen)
        if new is None:
            raise UsageError("nothing is known of this draft", field="seen")
        document = {"format": _FORMAT, "version": _VERSION, "pair": asdict(pair), "costs": new}
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

    try:
        _file(pair, on_message).update(change)
    except NewerFormatError as error:
        on_message(str(error))
    except (OSError, UsageError):  # it is learned again
        return


def _file(pair: SpeechPair, on_message: MessageFn) -> StateFile[SpeechDraftCosts]:
    path = pair.path

    def parse(data: bytes) -> SpeechDraftCosts:
        document = parse_json(path, data, form=_FORMAT, version=_VERSION)
        try:
            stored = msgspec.convert(document, _Stored)
        except msgspec.ValidationError as error:
            raise DamagedFileError(f"damaged: {error}") from None
        if stored.pair != pair:
            raise DamagedFileError("of another machine or other models")
        return stored.costs

    return StateFile(path, parse, on_message=on_message)
