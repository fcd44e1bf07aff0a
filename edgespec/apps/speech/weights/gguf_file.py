"""Read Whisper models that are GGUF files already, to convert them to another type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgespec.apps.speech.weights.contents import (
    BrokenModelError,
    Floats,
    SourceTensor,
    WhisperContents,
    WhisperSizes,
    expected_tensors,
)
from edgespec.apps.speech.weights.convert import SIZE_KEYS, stored_shape
from edgespec.apps.speech.weights.reading import blamed, token_bytes
from edgespec.errors import EdgespecError
from edgespec.llama import ggml_types
from edgespec.llama.gguf import GGUF, TOKENS, TensorInfo
from edgespec.llama.gguf_header import GGUFHeader, check_complete_file, other_kind
from edgespec.models.whisper_files import ARCHITECTURE

_CHOOSE = "choose a Whisper model, such as whisper-base (`edgespec models list` shows all)"
NO_WHISPER = f"a language model, which writes text; {_CHOOSE}"
"""Problem of a model that is none of speech."""


def check_speech_file(path: Path, name: str = "") -> GGUFHeader:
    """Return the header of a complete Whisper model. Raises EdgespecError for any other file."""
    header = check_complete_file(path)
    if header.architecture != ARCHITECTURE:
        kind = other_kind(header)
        raise EdgespecError(f"{name or path}: {f'{kind}; {_CHOOSE}' if kind else NO_WHISPER}")
    return header


def read_whisper_gguf(path: Path) -> WhisperContents:
    """Return the model in a GGUF file, its numbers unread. Raises EdgespecError."""
    gguf = check_speech_file(path).gguf
    with blamed(path):
        try:
            sizes = WhisperSizes(
                **{name: int(gguf.number(f"whisper.{key}")) for name, key in SIZE_KEYS.items()}
            )
        except KeyError as error:
            raise BrokenModelError(f"it has no {error}") from None
        heads = gguf.integers("whisper.alignment_heads")
        return WhisperContents(
            path,
            sizes,
            tuple(token_bytes(token.decode(errors="replace")) for token in gguf.texts(TOKENS)),
            tuple(zip(heads[::2], heads[1::2], strict=False)),
            _tensors(gguf, sizes),
        )


def _tensors(gguf: GGUF, sizes: WhisperSizes) -> dict[str, SourceTensor]:
    """Return the tensors, each convolution in its own shape again."""
    wanted = expected_tensors(sizes)
    found = {}
    for info in gguf.tensors:
        shape = info.shape[::-1]
        if stored_shape(info.name, wanted.get(info.name, shape)) == shape:
            shape = wanted.get(info.name, shape)
        found[info.name] = SourceTensor(shape, _reader(gguf, info, shape))
    return found


def _reader(gguf: GGUF, info: TensorInfo, shape: tuple[int, ...]) -> Callable[[], Floats]:
    def read() -> Floats:
        raw = np.fromfile(gguf.path, np.uint8, info.bytes, offset=gguf.data_start + info.offset)
        if raw.size < info.bytes:
            raise BrokenModelError(f"it ends within the tensor {info.name}")
        n_bytes = ggml_types.row_bytes(info.kind, info.columns)
        return ggml_types.to_floats(raw.reshape(-1, n_bytes), info.kind, info.columns).reshape(shape)

    return read
