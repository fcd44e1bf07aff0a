"""Cost and gain of a draft model as runs saw them, kept in the cache: small JSON files.

So a draft runs from the first window on where it is known to pay, and `auto` leaves one alone that was seen
not to. A file is named after a hash of all that its figures depend on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edgespec.apps.speech.speech_model import check_speech_file
from edgespec.drafting.costs import CONTEXTS, guessed_curve
from edgespec.errors import UsageError
from edgespec.llama.gguf import GGUF, TensorInfo, read_gguf
from edgespec.llama.gguf_header import file_fingerprint
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
    """The record `kept` of a draft joined with what a run has `seen`; None: the run did without the draft."""
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
    """The record of `pair`; None if nothing is that can be used."""
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


# ---- what a draft costs, from the sizes in its file ----
#
# A draft has to encode each window, which takes as long as many tokens. It pays where the passes that it
# saves take longer.

EXPECTED_ACCEPTANCE = 0.85
"""Acceptance of a smaller model's tokens before any was tried."""

EXPECTED_TOKENS = 80.0
"""Tokens of a window before any was heard."""

MARGIN = 1.05
"""A draft has to save this many times what it costs."""

_OTHER_LANGUAGES = 0.95  # of the acceptance, where a draft knows English alone and the target all; a guess
_LONGEST = 16  # tokens drafted at once that the price reckons with
_GUESSED_MACS_PER_S = 310e9  # of an encoder, where 40 GB of weights are read in a second (costs.py)
_HEARD_BYTES = 34 / 32  # of a number of the keys and values that a decoder listens to


def decoder_bytes(path: Path) -> int:
    """Return the size of the decoder's weights, which each of its passes reads."""
    return sum(tensor.bytes for tensor in read_gguf(path).tensors if tensor.name.startswith("decoder."))


@dataclass(frozen=True, slots=True)
class SpeechModelCosts:
    """The costs of a Whisper model as its file tells them."""

    encoder_macs: float
    """Multiplications for a window: products of weights, and attention. 0: it has no encoder."""
    pass_bytes: float
    """Bytes that a pass of the decoder reads."""
    n_mels: int
    multilingual: bool

    @classmethod
    def of(cls, path: Path) -> SpeechModelCosts:
        """Read them from the file at `path`. Raises EdgespecError, or KeyError for one that is damaged."""
        gguf = read_gguf(path)
        n, width, n_layer = (
            float(gguf.number(f"whisper.encoder.{key}"))
            for key in ("context_length", "embedding_length", "block_count")
        )
        layers, state = (
            float(gguf.number(f"whisper.decoder.{key}")) for key in ("block_count", "embedding_length")
        )
        macs = n_layer * (12.0 * width * width * n + 2.0 * n * n * width) + 9.0 * n * width * width
        return cls(
            macs if n_layer else 0.0,
            decoder_bytes(path) + 2.0 * layers * n * state * _HEARD_BYTES,
            int(gguf.number("whisper.n_mels")),
            bool(gguf.number("whisper.multilingual")),
        )


@dataclass(slots=True)
class DraftPrice:
    """The time that a draft model would take and save in the next window."""

    encode_s: float
    """Time of its encoder for a window."""
    n_tokens: float = EXPECTED_TOKENS
    """Tokens expected of a window."""

    def saved_s(self, verify: Sequence[float], draft: Sequence[float], acceptance: float) -> float:
        """Return the seconds saved in a window by the best length of drafts.

        `verify` and `draft`: T(n) of the two models. A draft of g tokens emits (1 - a^(g + 1)) / (1 - a).
        """
        plain = verify[1]
        best = plain
        emitted, chance = 1.0, 1.0
        for n in range(1, _LONGEST + 1):
            chance *= acceptance
            emitted += chance
            best = min(best, (n * draft[1] + verify[n + 1]) / emitted)
        return self.n_tokens * (plain - best)


def expected_gain_s(
    target: SpeechModelCosts, draft: SpeechModelCosts, *, shares: bool, kernels: bool
) -> float:
    """Return the seconds that a draft is expected to save in a window, its encoder's taken off.

    `shares`: it hears what the target's encoder heard. Negative: it does not pay.
    """
    verify, drafts = (
        guessed_curve(int(one.pass_bytes), own_kernels=kernels).at(CONTEXTS[0]) for one in (target, draft)
    )
    acceptance = EXPECTED_ACCEPTANCE
    if target.multilingual and not draft.multilingual:
        acceptance *= _OTHER_LANGUAGES
    price = DraftPrice(0.0 if shares else draft.encoder_macs / _GUESSED_MACS_PER_S)
    return price.saved_s(verify, drafts, acceptance) - MARGIN * price.encode_s


def same_encoder(target: Path, draft: Path) -> bool:
    """Whether the encoders of two files are the same.

    The last layer's weights tell: they differ between any two encoders that were trained.
    """
    sides = []
    for gguf in (read_gguf(target), read_gguf(draft)):
        last = f"encoder.blocks.{int(gguf.number('whisper.encoder.block_count')) - 1}."
        sides.append(
            {tensor.name: _read(gguf, tensor) for tensor in gguf.tensors if tensor.name.startswith(last)}
        )
    return bool(sides[0]) and sides[0] == sides[1]


def _read(gguf: GGUF, tensor: TensorInfo) -> bytes:
    with gguf.path.open("rb") as file:
        file.seek(gguf.data_start + tensor.offset)
        return file.read(tensor.bytes)
