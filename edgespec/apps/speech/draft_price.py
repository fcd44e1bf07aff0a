"""The price of a draft model in a window of sound, and what is expected of one before it was tried.

A draft has to encode each window, which takes as long as many tokens. It pays where the passes that it saves
take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.drafting.costs import CONTEXTS, guessed_curve
from edgespec.llama.gguf import GGUF, TensorInfo, read_gguf

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
    """Return whether the encoders of two files are the same.

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
