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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from architecture_table import ARCHITECTURES, COMMON, MTP, NOT_QUANTIZED, UNCOMMON, Architecture, Value
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import foreign_function, llama
from edgespec.llama.gguf import (
    BOOL,
    F32,
    FLOAT32,
    INT32,
    MERGES,
    TOKEN_TYPES,
    TOKENS,
    UINT32,
    TensorInfo,
    block_size,
    encode_number,
    encode_numbers,
    encode_start,
    encode_text,
    encode_texts,
    from_floats,
    padded,
    type_number,
)
from edgespec.llama.kernels import packing
from tiny_vocabulary import BOS, CHAT_TEMPLATE, CONTROL, EOS, N_WORDS, NORMAL, successors, vocabulary
from tiny_vocabulary import MERGES as TINY_MERGES

__all__ = ["ARCHITECTURES", "MTP", "Architecture", "make_tiny"]

# Standard deviations: of the embeddings in the first layer (smaller where they are the output matrix too, or
# each token would be followed by itself), and of the logits.
_EMBEDDING, _TIED, _PEAK = 0.7, 0.25, 2.0

Rows = npt.NDArray[np.float32]


class _InitParams(ctypes.Structure):  # struct gguf_init_params
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _Tensor(ctypes.Structure):  # the start of struct ggml_tensor
    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


_gguf_init = foreign_function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams)
_gguf_free = foreign_function("gguf_free", None, ctypes.c_void_p)
_tensor_name = foreign_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)


def make_tiny(
    name: str | Architecture,
    path: Path,
    *,
    seed: int = 1,
    weights_type: str = "f32",
    metadata: Mapping[str, Value] | None = None,
    post_norm: float | None = None,
    tokens: Sequence[str] = (),
) -> Path:
    """Write a random model of one of the ARCHITECTURES, or of another, to `path` and return `path`.

    It writes text as any model does; the same arguments write the same bytes. `weights_type` is ggml's name
    of the type of the matrices that llama.cpp would quantize. `metadata`, and `post_norm`, which says how
    much its layers change: in place of the architecture's own. `tokens`: more of them, control
    tokens if they are ASCII. Raises EdgespecError if it cannot be made.
    """
    architecture = ARCHITECTURES[name] if isinstance(name, str) else name
    if metadata:
        architecture = replace(architecture, metadata={**architecture.metadata, **metadata})
    if post_norm is not None:
        architecture = replace(architecture, post_norm=post_norm)
    fields = [*_fields(architecture, f"tiny {seed}"), *_tokenizer_fields(architecture, tokens)]
    shapes = _wanted_tensors(architecture.gguf_name, fields)
    weights = {
        tensor: _weights(tensor, shape, np.random.default_rng((seed, *tensor.encode())))
        for tensor, shape in shapes.items()
        if not re.search(architecture.lacks, tensor)
        and (re.search(architecture.has, tensor) or not re.search(UNCOMMON, tensor))
    }
    _make_predictable(weights, architecture, np.random.default_rng(seed))
    if architecture.fused:
        weights = _fused(weights)
    _write(path, fields, [_tensor(tensor, rows, weights_type) for tensor, rows in weights.items()])
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
        return encode_numbers(key, BOOL if isinstance(value[0], bool) else UINT32, np.array(value))
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32}
    return encode_number(key, kinds[type(value)], value)


def _tokenizer_fields(architecture: Architecture, tokens: Sequence[str]) -> list[bytes]:
    texts, types = vocabulary()
    texts, types = [*texts, *tokens], [*types, *(CONTROL if token.isascii() else NORMAL for token in tokens)]
    return [
        encode_number(f"{architecture.gguf_name}.vocab_size", UINT32, len(texts)),
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
            file.write(encode_start(fields, [])[1])
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
    if re.search(r"norm|_ln|scale", name) and not name.endswith("bias"):
        return 1 + np.float32(0.1) * normal
    if "rope_" in name:  # what frequencies are divided by
        return 1 + np.abs(normal)
    if "lerp" in name:
        return rng.random(shape[::-1], np.float32)
    if name.endswith("ssm_a"):  # how fast a state decays: slowly
        return np.float32(-0.02) - np.float32(0.1) * np.abs(normal)
    if "time_mix_w0" in name:  # the same
        return np.float32(0.3) * normal - 3
    if len(shape) == 1 or shape[0] == 1:  # biases, sinks, ssm_d
        return np.float32(0.3) * normal
    return normal / np.float32(math.sqrt(shape[0]))


def _make_predictable(weights: dict[str, Rows], architecture: Architecture, rng: np.random.Generator) -> None:
    """Give the model logits of a sensible spread, in which each word prefers its own successor.

    With embeddings of this size, what the text before changes in the logits and what the last word alone says
    are about as large: a test sees a state that is wrong, and a draft is right often enough.
    """
    shape = weights["token_embd.weight"].shape
    n_embd = shape[1]
    embedding: Rows = rng.standard_normal(shape, np.float32)
    embedding[N_WORDS:] *= np.float32(0.1)  # a text shall not end by chance
    size = np.float32((_EMBEDDING if "output.weight" in weights else _TIED) / architecture.embedding_scale)
    weights["token_embd.weight"] = embedding * size
    if "output.weight" in weights:
        rows = np.float32(0.1) * rng.standard_normal(shape, np.float32)
        noise = rng.standard_normal((N_WORDS, n_embd), np.float32)
        rows[successors()] = np.float32(0.7) * (embedding[:N_WORDS] + noise)
        weights["output.weight"] = rows * np.float32(_PEAK / math.sqrt(n_embd))
    else:
        weights["output_norm.weight"] *= np.float32(_PEAK / (math.sqrt(n_embd) * size))
    for name, values in weights.items():
        if re.search(r"post_\w*norm", name):
            weights[name] = values * np.float32(architecture.post_norm)
        # An MTP head goes on from the embedding of the last word.
        elif name.endswith("nextn.eh_proj.weight"):
            values[:, :n_embd] += np.eye(n_embd, dtype=np.float32)
        elif name.endswith("nextn.embed_tokens.weight"):
            weights[name] = weights["token_embd.weight"]
        elif name.endswith("nextn.shared_head_head.weight"):
            weights[name] = weights["output.weight"]


def _fused(weights: dict[str, Rows]) -> dict[str, Rows]:
    """Return the weights with one matrix for queries, keys and values."""
    fused = {}
    for name, rows in weights.items():
        if name.endswith("attn_q.weight"):
            others = (weights[name.replace("attn_q", f"attn_{other}")] for other in "kv")
            fused[name.replace("attn_q", "attn_qkv")] = np.concatenate([rows, *others])
        elif not name.endswith(("attn_k.weight", "attn_v.weight")):
            fused[name] = rows
    return fused


def _tensor(name: str, rows: Rows, weights_type: str) -> tuple[TensorInfo, bytes]:
    """Return a tensor as a file has it, but for its offset."""
    kind = type_number(weights_type)
    shape = rows.shape[::-1]
    keep = len(shape) < 2 or not name.endswith(".weight") or re.search(NOT_QUANTIZED, name)
    if kind == F32 or keep or shape[0] % block_size(kind):
        return TensorInfo(name, shape, F32, 0), rows.tobytes()
    return TensorInfo(name, shape, kind, 0), from_floats(rows.reshape(-1, shape[0]), kind).tobytes()


def _write(path: Path, fields: list[bytes], tensors: list[tuple[TensorInfo, bytes]]) -> None:
    _, start = encode_start(fields, [(info.name, info.shape, info.kind) for info, _ in tensors])
    try:
        with path.open("wb") as file:
            for part in (start, *(data for _, data in tensors)):
                file.write(padded(part))
    except OSError as error:
        raise EdgespecError(f"cannot write {path}: {error.strerror}") from error
