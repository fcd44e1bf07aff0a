"""Whisper's encoder and decoder on ggml: the Python side of csrc/whisper.

    WhisperModel.open(path)
      -> encode(mel)      -> EncodedAudio    one window of sound, as every decoder layer hears it
      -> cache(audio, n)  -> DecoderCache    the KV cache of n sequences that share it

A token's logits are the same bits whatever shares its pass, on any number of threads, where edgespec's
kernels run (`WhisperModel.kernels`). Ids, shapes and the file are checked here and in the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WhisperDims:
    """The sizes of a Whisper model, with OpenAI's names."""

    n_mels: int
    n_vocab: int
    n_audio_ctx: int
    """Encoder states of a window: 1500, half of its mel frames."""
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    """0 for a draft that has only a decoder and takes the target's encoder states."""
    n_text_ctx: int
    """The most tokens of a sequence: 448."""
    n_text_state: int
    n_text_head: int
    n_text_layer: int
    multilingual: bool = True
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Decoder layer and head whose attention follows the sound, for times of words; may be empty."""


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Tokens that a forward pass appends to one sequence: a chain, which may end with a tree."""

    sequence: int
    tokens: Sequence[int]
    n_logits: int = 1
    """Number of tokens, at the end, whose logits are wanted."""
    parents: Sequence[int] | None = None
    """Index, within the tree, of the node before each of the last len(parents) tokens; -1: the chain's end.
    After the pass the trunk, the first node of each depth, stays in the cache."""


class EncodedAudio:
    """One window of sound as the decoder sees it: keys and values of every layer's cross attention."""

    def __init__(self, model: WhisperModel) -> None:
        """For `WhisperModel.encode` and `cross_from` only."""
        self.model = model

    def states(self) -> Floats:
        """Return the encoder's states, shape (n_audio_ctx, n_audio_state): what `cross_from` takes."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the memory; caches that were made with it keep it alive."""


class DecoderCache:
    """The KV cache of some sequences (beams) that listen to the same window."""

    def __init__(self, audio: EncodedAudio, n_sequences: int) -> None:
        """For `WhisperModel.cache` only."""
        self.audio, self.n_sequences = audio, n_sequences

    def forward(self, batch: Sequence[SequenceBatch]) -> list[Floats]:
        """Run one pass over all of `batch`; return for each its logits, shape (n_logits, n_vocab).

        The arrays are the caller's. Raises EdgespecError if a sequence would be longer than n_text_ctx;
        ValueError for a token, sequence or parent that cannot be. Nothing is changed then.
        """
        raise NotImplementedError

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens that the sequence holds."""
        raise NotImplementedError

    def rewind(self, sequence: int, n_keep: int) -> None:
        """Take back all but the first `n_keep` tokens of the sequence."""
        raise NotImplementedError

    def reorder(self, sources: Sequence[int]) -> None:
        """Let sequence i go on from what sequence sources[i] holds; nothing is copied.

        `sources` may be shorter than the number of sequences; the others become empty.
        """
        raise NotImplementedError

    def cross_attention(self, tokens: Sequence[int]) -> Floats:
        """Return where the alignment heads listen, shape (n_alignment_heads, n_tokens, n_audio_ctx).

        Softmaxed weights of one pass over `tokens` from position 0, which leaves the cache as it is.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free the memory."""


class WhisperModel:
    """A Whisper model in memory."""

    dims: WhisperDims
    path: Path
    kernels: str
    """The instruction set of edgespec's kernels, or "stock"."""
    kernels_reason: str
    """Why ggml's own kernels are used, in one line; "" if edgespec's are."""

    @classmethod
    def open(cls, path: Path, *, n_threads: int = 0, kernels: bool = True) -> WhisperModel:
        """Load a GGUF of architecture "whisper". `n_threads` 0: as many as pay on this machine.

        Raises EdgespecError, in one line, if it is no such file or damaged, or the library is not built.
        """
        raise EdgespecError(f"{path}: Whisper is not built yet")

    def encode(self, mel: Floats) -> EncodedAudio:
        """Encode one window. `mel`: shape (n_mels, 2 n_audio_ctx), as OpenAI's log-mel spectrogram."""
        raise NotImplementedError

    def cross_from(self, states: Floats) -> EncodedAudio:
        """Return a window from another model's `EncodedAudio.states`, of the same shape."""
        raise NotImplementedError

    def cache(self, audio: EncodedAudio, n_sequences: int = 1) -> DecoderCache:
        """Return an empty cache for sequences that listen to `audio`, of this model."""
        return DecoderCache(audio, n_sequences)

    def close(self) -> None:
        """Free the memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
