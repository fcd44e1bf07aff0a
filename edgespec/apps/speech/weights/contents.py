"""The contents of a Whisper model, whatever its file: sizes, vocabulary, and tensors with OpenAI's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError

Floats = npt.NDArray[np.float32]

_MOST_LAYERS, _MOST_STATE, _MOST_CONTEXT = 128, 8192, 1 << 16
_MOST_VOCABULARY, _MULTILINGUAL, _LARGEST = 1 << 18, 51_865, 51_866
_MOST_MELS = 512
N_SPECIAL = 1608
"""The fewest special tokens: 2, 99 languages, 6, and 1501 timestamps."""


@dataclass(frozen=True, slots=True)
class WhisperSizes:
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


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a model that is to be converted."""

    shape: tuple[int, ...]
    """Rows first, as numpy and OpenAI have it."""
    read: Callable[[], Floats]
    """Reads the numbers, of that shape."""


@dataclass(frozen=True, slots=True)
class WhisperContents:
    """A whole model of any form, its numbers still in the file."""

    path: Path
    sizes: WhisperSizes
    tokens: tuple[bytes, ...]
    """The ordinary tokens in the order of their ids, which are their ranks in the byte-pair encoding."""
    alignment_heads: tuple[tuple[int, int], ...]
    """The decoder's (layer, head) whose attention follows the sound; () if the file does not say."""
    tensors: Mapping[str, SourceTensor]

    @property
    def own_heads(self) -> tuple[tuple[int, int], ...]:
        """The alignment heads; () if one of them is not in this model.

        Descriptions of distilled models still have those of the model that they were made from.
        """
        sizes = self.sizes
        is_whole = all(
            0 <= layer < sizes.n_text_layer and 0 <= head < sizes.n_text_head
            for layer, head in self.alignment_heads
        )
        return self.alignment_heads if is_whole else ()

    @property
    def is_multilingual(self) -> bool:
        """Whether it knows other languages than English."""
        return self.sizes.n_vocab >= _MULTILINGUAL


class BrokenModelError(Exception):
    """A file holds no whole Whisper model; `str(error)` says why."""


def n_ordinary(n_vocab: int) -> int:
    """Return how many of `n_vocab` tokens are ordinary: as many in new models, which have more languages."""
    return _MULTILINGUAL - N_SPECIAL if n_vocab >= _MULTILINGUAL else n_vocab - N_SPECIAL


def check_contents(contents: WhisperContents) -> None:
    """Raise EdgespecError if sizes are impossible, or tensors or tokens are missing or of another shape."""
    try:
        check_sizes(contents.sizes)
        _check_tokens(contents)
        for name, shape in expected_tensors(contents.sizes).items():
            tensor = contents.tensors.get(name)
            if tensor is None:
                raise BrokenModelError(f"the tensor {name} is missing")
            if tensor.shape != shape:
                raise BrokenModelError(f"the tensor {name} has the shape {tensor.shape}, not {shape}")
    except BrokenModelError as error:
        raise EdgespecError(f"{contents.path}: no whole Whisper model: {error}; download it again") from None


def check_sizes(sizes: WhisperSizes) -> None:
    """Raise BrokenModelError for sizes that no Whisper model has."""
    limits = {
        "n_mels": _MOST_MELS,
        "n_vocab": _MOST_VOCABULARY,
        "n_audio_ctx": _MOST_CONTEXT,
        "n_text_ctx": _MOST_CONTEXT,
        "n_audio_state": _MOST_STATE,
        "n_text_state": _MOST_STATE,
        "n_audio_head": _MOST_STATE,
        "n_text_head": _MOST_STATE,
        "n_audio_layer": _MOST_LAYERS,
        "n_text_layer": _MOST_LAYERS,
    }
    for name, most in limits.items():
        if not (name != "n_audio_layer") <= getattr(sizes, name) <= most:  # a decoder alone has no encoder
            raise BrokenModelError(f"{name} is {getattr(sizes, name)}")
    for part, state, heads in (
        ("audio", sizes.n_audio_state, sizes.n_audio_head),
        ("text", sizes.n_text_state, sizes.n_text_head),
    ):
        if state % heads:
            raise BrokenModelError(f"{state} {part} states are no multiple of {heads} heads")


def _check_tokens(contents: WhisperContents) -> None:
    n, n_vocab = len(contents.tokens), contents.sizes.n_vocab
    if n != n_ordinary(n_vocab) or n < 256:
        raise BrokenModelError(f"{n:,} ordinary tokens of {n_vocab:,}, not {n_ordinary(n_vocab):,}")
    if n_vocab > _LARGEST:
        raise BrokenModelError(f"{n_vocab:,} tokens, more than any of OpenAI's models has")


def expected_tensors(sizes: WhisperSizes) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model of these sizes, and their shapes, rows first."""
    audio, text = sizes.n_audio_state, sizes.n_text_state
    found: dict[str, tuple[int, ...]] = {}
    if sizes.n_audio_layer:
        found = {
            "encoder.conv1.weight": (audio, sizes.n_mels, 3),
            "encoder.conv1.bias": (audio,),
            "encoder.conv2.weight": (audio, audio, 3),
            "encoder.conv2.bias": (audio,),
            "encoder.positional_embedding": (sizes.n_audio_ctx, audio),
        }
        for layer in range(sizes.n_audio_layer):
            found |= _block(f"encoder.blocks.{layer}", audio, None)
        found |= _norm("encoder.ln_post", audio)
    found |= {
        "decoder.token_embedding.weight": (sizes.n_vocab, text),
        "decoder.positional_embedding": (sizes.n_text_ctx, text),
    }
    for layer in range(sizes.n_text_layer):
        found |= _block(f"decoder.blocks.{layer}", text, audio)
    return found | _norm("decoder.ln", text)


def _block(prefix: str, state: int, audio: int | None) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one block; `audio` is the width of the states that a decoder's block looks at."""
    found = _attention(f"{prefix}.attn", state, state)
    if audio is not None:
        found |= _attention(f"{prefix}.cross_attn", state, audio)
    found |= {f"{prefix}.mlp.0.weight": (4 * state, state), f"{prefix}.mlp.0.bias": (4 * state,)}
    found |= {f"{prefix}.mlp.2.weight": (state, 4 * state), f"{prefix}.mlp.2.bias": (state,)}
    return found | _norm(f"{prefix}.mlp_ln", state)


def _attention(prefix: str, state: int, source: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for part, width in (("query", state), ("key", source), ("value", source), ("out", state)):
        found[f"{prefix}.{part}.weight"] = (state, width)
        if part != "key":
            found[f"{prefix}.{part}.bias"] = (state,)
    return found | _norm(f"{prefix}_ln", state)


def _norm(prefix: str, state: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.weight": (state,), f"{prefix}.bias": (state,)}


def slices(tensor: SourceTensor, n: int) -> Iterator[SourceTensor]:
    """Cut a tensor into `n` of equally many rows. Raises BrokenModelError if that cannot be."""
    rows = tensor.shape[0] if tensor.shape else 0
    if rows == 0 or rows % n:
        raise BrokenModelError(f"a tensor of {rows} rows cannot be cut into {n}")
    size = rows // n
    for start in range(0, rows, size):
        yield SourceTensor((size, *tensor.shape[1:]), _row_reader(tensor, start, size))


def _row_reader(tensor: SourceTensor, start: int, size: int) -> Callable[[], Floats]:
    return lambda: tensor.read()[start : start + size]


def n_numbers(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)
