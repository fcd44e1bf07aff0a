"""Tiny random models of every architecture that matters, made from metadata alone.

    metadata of the architecture -> llama.cpp says which tensors it wants -> random weights -> a GGUF file

The library's `llama_model_init_from_user` asks for the tensors. The file is written here and not by its
`llama_model_save_to_file`, which refuses some architectures and adds fields that no published model has.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend
from edgespec.llama.architecture_table import ARCHITECTURES, COMMON, UNCOMMON, Architecture, Value
from edgespec.llama.backend import foreign_function, llama
from edgespec.llama.ggml_types import F32
from edgespec.llama.gguf import (
    BOOL,
    FLOAT32,
    INT32,
    MERGES,
    TOKEN_TYPES,
    TOKENS,
    UINT32,
    TensorInfo,
    aligned,
)
from edgespec.llama.gguf_encoding import (
    encode_head,
    encode_number,
    encode_numbers,
    encode_tensor_info,
    encode_text,
    encode_texts,
)
from edgespec.llama.kernels import packing
from edgespec.llama.tiny_vocabulary import BOS, CHAT_TEMPLATE, EOS, N_WORDS, successors, vocabulary
from edgespec.llama.tiny_vocabulary import MERGES as TINY_MERGES

__all__ = ["ARCHITECTURES", "Architecture", "make_tiny"]

# What the text before changes in the logits, and what the last token alone says (see `_follow_successors`),
# are about as large: so tests see a state that is wrong, and a draft is right often enough.
_EMBEDDING, _MATRIX = 0.7, 1.0
_PEAK = 2.0  # standard deviation of the logits

Rows = npt.NDArray[np.float32]


class _InitParams(ctypes.Structure):  # struct gguf_init_params
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _Tensor(ctypes.Structure):  # the start of struct ggml_tensor
    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


_gguf_init = foreign_function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams)
_gguf_free = foreign_function("gguf_free", None, ctypes.c_void_p)
_tensor_name = foreign_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)


def make_tiny(name: str, path: Path, *, seed: int = 1, tokenizer: bool = True) -> Path:
    """Write a random model of one of the ARCHITECTURES to `path`, with float32 weights, and return `path`.

    It writes text as any model does; the same arguments write the same bytes. Without `tokenizer` it has
    as many tokens, but no texts for them. Raises UsageError for an unknown name, EdgespecError if the
    library cannot make it.
    """
    if name not in ARCHITECTURES:
        raise UsageError(f"unknown architecture {name!r}; known: {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    fields = [*_fields(architecture, f"tiny {name} {seed}"), *_tokenizer_fields(architecture, tokenizer)]
    shapes = _wanted_tensors(name, fields)
    weights = {
        tensor: _weights(tensor, shape, np.random.default_rng((seed, *tensor.encode())))
        for tensor, shape in shapes.items()
        if not re.search(UNCOMMON, tensor) or (architecture.with_ and re.search(architecture.with_, tensor))
        if not (architecture.without and re.search(architecture.without, tensor))
    }
    _follow_successors(weights, seed)
    _write(path, fields, weights)
    return path


# ---- metadata ----


def _fields(architecture: Architecture, name: str) -> list[bytes]:
    fields = [encode_text("general.architecture", architecture.gguf_name), encode_text("general.name", name)]
    metadata = COMMON | dict(architecture.metadata)
    return fields + [_field(f"{architecture.gguf_name}.{key}", value) for key, value in metadata.items()]


def _field(key: str, value: Value) -> bytes:
    if isinstance(value, str):
        return encode_text(key, value)
    if isinstance(value, tuple):
        return encode_numbers(key, UINT32, np.array(value))
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32}
    return encode_number(key, kinds[type(value)], value)


def _tokenizer_fields(architecture: Architecture, tokenizer: bool) -> list[bytes]:
    texts, types = vocabulary()
    size = encode_number(f"{architecture.gguf_name}.vocab_size", UINT32, len(texts))
    if not tokenizer:
        return [size, encode_text("tokenizer.ggml.model", "no_vocab")]
    return [
        size,
        encode_text("tokenizer.ggml.model", "gpt2"),
        encode_text("tokenizer.ggml.pre", "gpt-2"),
        encode_texts(TOKENS, [text.encode() for text in texts]),
        encode_numbers(TOKEN_TYPES, INT32, np.array(types)),
        encode_texts(MERGES, [merge.encode() for merge in TINY_MERGES]),
        encode_number("tokenizer.ggml.eos_token_id", UINT32, EOS),
        encode_number("tokenizer.ggml.bos_token_id", UINT32, BOS),
        encode_number("tokenizer.ggml.add_bos_token", BOOL, False),
        encode_text("tokenizer.chat_template", CHAT_TEMPLATE),
    ]


# ---- tensors ----


def _wanted_tensors(name: str, fields: list[bytes]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors, in ggml's order, that the library loads for these fields."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(tensor: int, _data: object) -> None:
        shape = tuple(_Tensor.from_address(tensor).ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        shapes[_tensor_name(tensor).decode()] = shape

    callback = llama.llama_model_set_tensor_data_t(note)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mtp = True
    with packing(False), _metadata(fields) as metadata:
        model = backend.create(
            lambda _: llama.llama_model_init_from_user(metadata, callback, None, params),
            llama.llama_model_free,
        )
        if model is None:
            raise EdgespecError(f"llama.cpp cannot make a tiny {name}: {backend.failure_reason()}")
        llama.llama_model_free(model)
    return shapes


@contextmanager
def _metadata(fields: list[bytes]) -> Iterator[ctypes.c_void_p]:
    """`fields` as the library's `struct gguf_context`, which it reads from a file in memory."""
    handle = os.memfd_create("edgespec-architecture")
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(encode_head(0, len(fields)) + b"".join(fields))
        metadata = _gguf_init(f"/proc/self/fd/{handle}".encode(), _InitParams(True, None))
    finally:
        os.close(handle)
    try:
        yield ctypes.c_void_p(metadata)
    finally:
        _gguf_free(metadata)


def _weights(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Rows:
    """Return random weights of a size that keeps the numbers in a layer near 1."""
    normal: Rows = rng.standard_normal(shape[::-1], np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * normal
    if name.endswith("ssm_a"):  # how fast a state decays
        return np.float32(-0.02) - np.float32(0.1) * np.abs(normal)
    if len(shape) == 1 or shape[0] == 1:  # biases, sinks, ssm_d
        return np.float32(0.3) * normal
    scale = _EMBEDDING if name == "token_embd.weight" else _MATRIX / math.sqrt(shape[0])
    return np.float32(scale) * normal


def _follow_successors(weights: dict[str, Rows], seed: int) -> None:
    """Make the model prefer for each word the successor that all tiny models prefer."""
    embedding, output = weights["token_embd.weight"], weights.get("output.weight")
    if output is None:
        return
    rng = np.random.default_rng(seed)
    n_embd = embedding.shape[1]
    noise = rng.standard_normal((N_WORDS, n_embd), np.float32)
    rows = np.float32(0.1) * rng.standard_normal(output.shape, np.float32)
    rows[successors()] = np.float32(0.7) * (embedding[:N_WORDS] / np.float32(_EMBEDDING) + noise)
    weights["output.weight"] = rows * np.float32(_PEAK / math.sqrt(n_embd))


def _write(path: Path, fields: list[bytes], weights: dict[str, Rows]) -> None:
    infos, offset = [], 0
    for name, values in weights.items():
        infos.append(TensorInfo(name, values.shape[::-1], F32, offset))
        offset = aligned(offset + values.nbytes)
    head = b"".join([encode_head(len(infos), len(fields)), *fields, *map(encode_tensor_info, infos)])
    try:
        with path.open("wb") as file:
            file.write(head.ljust(aligned(len(head)), b"\0"))
            for values in weights.values():
                data = values.tobytes()
                file.write(data.ljust(aligned(len(data)), b"\0"))
    except OSError as error:
        raise EdgespecError(f"cannot write {path}: {error.strerror}") from error
