"""Convert a Whisper model of another program to GGUF.

    convert_whisper(folder of CTranslate2 | folder of the hub | ggml-NAME.bin, out.gguf, "q8_0")

Matrices get the type asked for, where their rows are whole blocks of it, else F16; vectors and positions stay
F32. A convolution becomes a matrix whose rows hold the kernel of each input channel one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edgespec.apps.speech.weights import ctranslate2, safetensors, whisper_cpp
from edgespec.apps.speech.weights.reading import (
    BrokenModelError,
    SourceTensor,
    WhisperContents,
    blamed,
    check_contents,
    expected_tensors,
    heads_in,
    read_json,
    written_token,
)
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.gguf import (
    ALIGNMENT,
    BOOL,
    F32,
    INT32,
    TOKENS,
    UINT32,
    TensorInfo,
    aligned,
    block_size,
    encode_head,
    encode_number,
    encode_numbers,
    encode_tensor_info,
    encode_text,
    encode_texts,
    from_floats,
    type_number,
)
from edgespec.models.on_disk import ARCHITECTURE, CTRANSLATE2_MODEL, HUB_INDEX, HUB_WEIGHTS
from edgespec.platform.files import replacing

WHISPER_TYPES = ("q8_0", "q6_k", "q5_1", "q5_0", "q4_1", "q4_0", "f16", "f32")
"""The types that matrices can have."""

SIZE_KEYS = {
    "n_mels": "n_mels",
    "n_vocab": "vocab_size",
    "n_audio_ctx": "encoder.context_length",
    "n_audio_state": "encoder.embedding_length",
    "n_audio_head": "encoder.attention.head_count",
    "n_audio_layer": "encoder.block_count",
    "n_text_ctx": "decoder.context_length",
    "n_text_state": "decoder.embedding_length",
    "n_text_head": "decoder.attention.head_count",
    "n_text_layer": "decoder.block_count",
}
"""The keys of a GGUF file, after "whisper.", that hold the fields of `WhisperSizes`."""

_F16 = 1  # enum ggml_type


def read_whisper(path: Path) -> WhisperContents:
    """Return the contents of a model of another program, its numbers unread and nothing checked but lengths.

    Raises UsageError if nothing there is such a model, EdgespecError if it is damaged.
    """
    if not path.is_dir():
        contents, beside = whisper_cpp.read_whisper_cpp(path), path.with_name(safetensors.GENERATION_FILE)
        if not beside.is_file():
            return contents
        with blamed(beside):
            return replace(contents, alignment_heads=heads_in(read_json(beside)))
    if (path / CTRANSLATE2_MODEL).is_file():
        return ctranslate2.read_ctranslate2(path)
    if any((path / name).is_file() for name in (HUB_WEIGHTS, HUB_INDEX)):
        return safetensors.read_safetensors(path)
    raise UsageError(
        f"{path}: no Whisper model: neither {CTRANSLATE2_MODEL} (CTranslate2) nor {HUB_WEIGHTS} (the hub) is "
        "in it"
    )


def check_whisper_type(type_name: str, field: str = "") -> None:
    """Raise UsageError for a type that matrices cannot have; it names the `field`."""
    if type_name not in WHISPER_TYPES:
        known = ", ".join(WHISPER_TYPES)
        raise UsageError(f"a Whisper model cannot be {type_name!r} (known: {known})", field=field)


def convert_whisper(
    source: Path | WhisperContents,
    target: Path,
    type_name: str,
    *,
    name: str = "",
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write the model `source`, a path or what was read there, as a GGUF file with matrices of `type_name`.

    `target` appears complete or not at all. `on_progress` takes tensors done and all; an exception from it
    ends the work. Raises UsageError for an unknown type or a missing file, EdgespecError for a damaged model
    and where `target` cannot be written.
    """
    check_whisper_type(type_name)
    contents = read_whisper(source) if isinstance(source, Path) else source
    check_contents(contents)
    try:
        with replacing(target) as stream, blamed(contents.path):
            fields = _fields(contents, type_name, name or contents.path.stem)
            _write(stream, contents, type_name, fields, on_progress)
    except OSError as error:
        raise EdgespecError(f"cannot write {target}: {describe_os_error(error)}") from error


def _write(
    stream: BinaryIO,
    contents: WhisperContents,
    type_name: str,
    fields: list[bytes],
    on_progress: Callable[[int, int], None],
) -> None:
    wanted = type_number(type_name)
    infos, offset = [], 0
    for tensor, shape in expected_tensors(contents.sizes).items():
        stored = stored_shape(tensor, shape)
        info = TensorInfo(tensor, stored[::-1], _stored_type(tensor, stored, wanted), offset)
        infos.append(info)
        offset = aligned(offset + info.bytes)
    head = encode_head(len(infos), len(fields)) + b"".join(fields)
    head += b"".join(map(encode_tensor_info, infos))
    stream.write(head.ljust(aligned(len(head)), b"\0"))
    for done, info in enumerate(infos):
        on_progress(done, len(infos))
        stream.write(_encoded(info, contents.tensors[info.name]).ljust(aligned(info.bytes, ALIGNMENT), b"\0"))
    on_progress(len(infos), len(infos))


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor in the GGUF file, rows first: a convolution is a matrix there."""
    return (shape[0], shape[1] * shape[2]) if name.startswith("encoder.conv") and len(shape) == 3 else shape


def _stored_type(name: str, shape: tuple[int, ...], wanted: int) -> int:
    if len(shape) < 2 or name.endswith("positional_embedding"):
        return F32
    return wanted if shape[-1] % block_size(wanted) == 0 else _F16


def _encoded(info: TensorInfo, tensor: SourceTensor) -> bytes:
    numbers = np.ascontiguousarray(tensor.read(), np.float32).reshape(-1, info.columns)
    if not np.isfinite(numbers).all():
        raise BrokenModelError(f"the tensor {info.name} holds numbers that are not finite")
    if info.kind == F32:
        return numbers.astype("<f4").tobytes()
    return from_floats(numbers, info.kind).tobytes()


def _fields(contents: WhisperContents, type_name: str, name: str) -> list[bytes]:
    numbers = {key: getattr(contents.sizes, size) for size, key in SIZE_KEYS.items()}
    heads = np.array(contents.own_heads, np.int32).reshape(-1)
    return [
        encode_text("general.architecture", ARCHITECTURE),
        encode_text("general.name", name),
        encode_text("general.type", "model"),
        encode_text("edgespec.whisper.type", type_name),
        *(encode_number(f"whisper.{key}", UINT32, number) for key, number in numbers.items()),
        encode_number("whisper.multilingual", BOOL, contents.is_multilingual),
        encode_numbers("whisper.alignment_heads", INT32, heads),
        encode_text("tokenizer.ggml.model", "gpt2"),
        encode_texts(TOKENS, [written_token(token) for token in contents.tokens]),
    ]
