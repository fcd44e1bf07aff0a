"""Contents of a Whisper model, whatever its file, read from bytes that are not trusted.

Every length is checked before it is used.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.mel import Floats
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import check_file

_MULTILINGUAL, _LARGEST = 51_865, 51_866
_MOST = {"mels": 512, "vocab": 1 << 18, "ctx": 1 << 16, "state": 8192, "head": 8192, "layer": 128}
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

        Descriptions of distilled models still list those of the original model.
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
    """A file holds no complete Whisper model; `str(error)` says why."""


def n_ordinary(n_vocab: int) -> int:
    """Return how many of `n_vocab` tokens are ordinary; new models have as many, but more languages."""
    return _MULTILINGUAL - N_SPECIAL if n_vocab >= _MULTILINGUAL else n_vocab - N_SPECIAL


def check_contents(contents: WhisperContents) -> None:
    """Raise EdgespecError if sizes are impossible, or tensors or tokens are missing or of another shape."""
    with blamed(contents.path):
        check_sizes(contents.sizes)
        _check_tokens(contents)
        for name, shape in expected_tensors(contents.sizes).items():
            tensor = contents.tensors.get(name)
            if tensor is None:
                raise BrokenModelError(f"the tensor {name} is missing")
            if tensor.shape != shape:
                raise BrokenModelError(f"the tensor {name} has the shape {tensor.shape}, not {shape}")


def check_sizes(sizes: WhisperSizes) -> None:
    """Raise BrokenModelError for sizes that no Whisper model has."""
    for size in fields(sizes):
        number, most = getattr(sizes, size.name), _MOST[size.name.rpartition("_")[2]]
        if not (size.name != "n_audio_layer") <= number <= most:  # a decoder alone has no encoder
            raise BrokenModelError(f"{size.name} is {number}")
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


_MOST_JSON = 64 << 20  # bytes
_MOST_DIMENSIONS = 4


class ByteReader:
    """A file in memory, read from its start on; raises BrokenModelError where it ends too early."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.at = 0
        """Where the next value begins."""

    @property
    def is_at_end(self) -> bool:
        """Whether all bytes have been read."""
        return self.at >= len(self.data)

    def skip(self, n: int) -> int:
        """Pass over `n` bytes and return where they begin."""
        start = self.at
        if n < 0 or n > len(self.data) - start:
            raise BrokenModelError(f"it ends at byte {len(self.data):,}, where more should follow")
        self.at = start + n
        return start

    def numbers(self, code: str) -> tuple[int, ...]:
        """Read little-endian numbers, given as in `struct`."""
        layout = struct.Struct(f"<{code}")
        values: tuple[int, ...] = layout.unpack_from(self.data, self.skip(layout.size))
        return values

    def number(self, code: str) -> int:
        """Read one little-endian number; `code` is that of `struct`. Raises BrokenModelError."""
        return self.numbers(code)[0]

    def bytes(self, n: int) -> bytes:
        """Read `n` bytes. Raises BrokenModelError where the file ends before."""
        start = self.skip(n)
        return self.data[start : start + n]

    def shape(self, code: str, n: int) -> tuple[int, ...]:
        """Read the sizes of `n` dimensions; their product is no more than the file could hold."""
        if not 0 <= n <= _MOST_DIMENSIONS:
            raise BrokenModelError(f"a tensor has {n} dimensions")
        shape = self.numbers(f"{n}{code}")
        if min(shape, default=1) < 1 or math.prod(shape) > 8 * len(self.data):
            raise BrokenModelError(f"a tensor has the shape {shape}, more than the file holds")
        return shape


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, for reading. Raises UsageError if it cannot be read, EdgespecError if empty."""
    check_file(path)
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise EdgespecError(f"{path}: an empty file; download it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    yield data  # not closed: arrays may look at it; it goes with the last of them


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Turn an error in the block into one line that names the file."""
    try:
        yield
    except BrokenModelError as error:
        raise EdgespecError(f"{path}: incomplete Whisper model: {error}; download it again") from None


def array_reader(
    data: mmap.mmap | bytes, start: int, shape: tuple[int, ...], kind: str
) -> Callable[[], Floats]:
    """A reader of arrays of the numpy type `kind`, or of "bf16", as floats."""

    def read() -> Floats:
        code = "<u2" if kind == "bf16" else kind
        raw: npt.NDArray[Any] = np.frombuffer(data, code, math.prod(shape), start).reshape(shape)
        if kind == "bf16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    return read


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file says
    """Return the contents of a JSON file. Raises UsageError if it is not there, EdgespecError if damaged."""
    check_file(path)
    try:
        if path.stat().st_size > _MOST_JSON:
            raise EdgespecError(f"{path}: too large for a description of a model")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise EdgespecError(f"{path}: damaged: no valid JSON; download it again") from None


def heads_in(description: object) -> tuple[tuple[int, int], ...]:
    """Return the alignment heads that a JSON description of a model names; () if it names none."""
    found = description.get("alignment_heads") if isinstance(description, dict) else None
    if not isinstance(found, list):
        return ()
    pairs = []
    for pair in found:
        match pair:
            case [int(layer), int(head)]:
                pairs.append((layer, head))
            case _:
                raise BrokenModelError(f"the alignment heads {str(found)[:80]} are no pairs")
    return tuple(pairs)


def _byte_letters() -> dict[str, int]:
    """Return the letters that stand for bytes: printable ones for themselves, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


LETTERS = _byte_letters()
"""The byte behind each letter of a token's written form."""
_LETTER_OF = {byte: letter for letter, byte in LETTERS.items()}

END_OF_TEXT = "<|endoftext|>"


def token_bytes(written: str) -> bytes:
    """Return the bytes of a token in its written form. Raises BrokenModelError for other letters."""
    try:
        return bytes(LETTERS[letter] for letter in written)
    except KeyError:
        raise BrokenModelError(
            f"the token {written[:40]!r} is not written as byte-level tokens are"
        ) from None


def written_token(token: bytes) -> bytes:
    """Return the written form of a token in GGUF files."""
    return "".join(_LETTER_OF[byte] for byte in token).encode()


def ordinary_tokens(written: list[str]) -> tuple[bytes, ...]:
    """Return the tokens before the special ones, which begin with <|endoftext|>."""
    n = written.index(END_OF_TEXT) if END_OF_TEXT in written else len(written)
    return tuple(map(token_bytes, written[:n]))
