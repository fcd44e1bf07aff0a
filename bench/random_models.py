"""Writes models of random weights in the shapes of real ones: a pass of them costs what a real one's costs.

    qwen3-30b-a3b   128 experts of which 8 are used, q4_K; values and output in q6_K
    gpt-oss-20b     32 experts of which 4 are used, MXFP4; attention in q8_0
    1.5b-TYPE       the shape of the default target, all matrices of one type: 1.5b-f16, 1.5b-mxfp4, ...

A model with experts is cut to as many layers as fit in the size asked for. It has no tokenizer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from edgespec.errors import UsageError
from edgespec.llama.backend import foreign_function, llama
from edgespec.llama.gguf import F32, block_size, from_floats, row_bytes, type_number
from edgespec.llama.gguf_header import read_header, read_tensors
from edgespec.llama.session import Session
from edgespec.llama.weights import Model

_POOL_ROWS = 256  # random rows that the matrices of a type and a width are filled with


@dataclass(frozen=True)
class Shape:
    """A model's shape, in the words of GGUF's metadata."""

    architecture: str
    n_layer: int
    n_embd: int
    n_ff: int
    """Width of an expert, if there are any."""
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_experts: int = 0
    n_used: int = 0
    types: dict[str, str] = field(default_factory=dict)
    """Types of the matrices, by the last part of their name; "" for all others."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More metadata."""


_QWEN_1_5B = Shape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936)
_SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, 128, 8,
        {"": "q4_K", "output": "q6_K", "attn_v": "q6_K"},
        {"rope.freq_base": 1e6},
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, 32, 4,
        {"": "q8_0", **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "mxfp4")},
        {
            "attention.sliding_window": 128,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
}  # fmt: skip


def random_shape(name: str) -> Shape:
    """Return the shape of a name above. Raises UsageError for an unknown one."""
    if name.startswith("1.5b-"):
        type_number(name[5:])
        return Shape(**{**vars(_QWEN_1_5B), "types": {"": name[5:]}})
    if name not in _SHAPES:
        raise UsageError(f"unknown random model {name!r}; known: {', '.join(_SHAPES)}, 1.5b-TYPE")
    return _SHAPES[name]


def _tensors(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer and their shapes, rows of weights last."""
    q, kv, embd, ff = (
        shape.n_head * shape.head_dim,
        shape.n_head_kv * shape.head_dim,
        shape.n_embd,
        shape.n_ff,
    )
    tensors: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (embd,),
        "attn_q.weight": (q, embd),
        "attn_k.weight": (kv, embd),
        "attn_v.weight": (kv, embd),
        "attn_output.weight": (embd, q),
    }
    match shape.architecture:
        case "qwen2":
            tensors |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        case "qwen3moe":
            tensors |= {"attn_q_norm.weight": (shape.head_dim,), "attn_k_norm.weight": (shape.head_dim,)}
        case "gpt-oss":
            tensors |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
            tensors |= {"attn_output.bias": (embd,), "attn_sinks.weight": (shape.n_head,)}
    n = shape.n_experts
    if not n:
        tensors |= {"ffn_norm.weight": (embd,), "ffn_gate.weight": (ff, embd)}
        tensors |= {"ffn_up.weight": (ff, embd), "ffn_down.weight": (embd, ff)}
    else:
        tensors["post_attention_norm.weight" if shape.architecture == "gpt-oss" else "ffn_norm.weight"] = (
            embd,
        )
        tensors |= {"ffn_gate_inp.weight": (n, embd), "ffn_gate_exps.weight": (n, ff, embd)}
        tensors |= {"ffn_up_exps.weight": (n, ff, embd), "ffn_down_exps.weight": (n, embd, ff)}
    if shape.architecture == "gpt-oss":
        tensors |= {"ffn_gate_inp.bias": (n,), "ffn_gate_exps.bias": (n, ff)}
        tensors |= {"ffn_up_exps.bias": (n, ff), "ffn_down_exps.bias": (n, embd)}
    return {f"blk.{layer}.{name}": dimensions for name, dimensions in tensors.items()}


def _type_of(shape: Shape, name: str, dimensions: tuple[int, ...]) -> int:
    """Return the ggml type of a tensor: vectors, biases and routers are F32."""
    if len(dimensions) == 1 or name.endswith(".bias") or "ffn_gate_inp" in name:
        return F32
    wanted = shape.types.get(name.removesuffix(".weight").rsplit(".", 1)[-1], shape.types[""])
    kind = type_number(wanted)
    return kind if dimensions[-1] % block_size(kind) == 0 else type_number("q8_0")


def _bytes_of(kind: int, dimensions: tuple[int, ...]) -> int:
    return int(np.prod(dimensions[:-1])) * row_bytes(kind, dimensions[-1])


class _Pools:
    """Random rows, of which matrices are made: the quantizer would take longer than the measurement."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)
        self._rows: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}

    def floats(self, dimensions: tuple[int, ...], name: str) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self._rng.standard_normal(dimensions, np.float32)
        if len(dimensions) == 1 and "norm" in name:
            return 1 + np.float32(0.1) * values
        return values * np.float32(
            0.1 if name.endswith("bias") or len(dimensions) == 1 else 2 / dimensions[-1] ** 0.5
        )

    def matrix(self, kind: int, dimensions: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the bytes of a matrix: rows of the pool, from a random one on."""
        key = (kind, dimensions[-1])
        if key not in self._rows:
            rows = self._rng.standard_normal((_POOL_ROWS, dimensions[-1]), np.float32)
            self._rows[key] = from_floats(rows / np.float32(dimensions[-1] ** 0.5), kind)
        pool, n_rows = self._rows[key], int(np.prod(dimensions[:-1]))
        order = (np.arange(n_rows) * 7 + self._rng.integers(_POOL_ROWS)) % _POOL_ROWS
        matrix: npt.NDArray[np.uint8] = pool[order].reshape(*dimensions[:-1], -1)
        return matrix


def write_random(name: str, path: Path, *, most_bytes: int) -> Path:
    """Write the model `name` of at most `most_bytes` to `path`, by cutting layers, and return `path`."""
    shape = random_shape(name)
    ends = {"token_embd.weight": (shape.n_vocab, shape.n_embd), "output_norm.weight": (shape.n_embd,)}
    ends["output.weight"] = (shape.n_vocab, shape.n_embd)

    def size(tensors: dict[str, tuple[int, ...]]) -> int:
        return sum(_bytes_of(_type_of(shape, name, one), one) for name, one in tensors.items())

    pair = size(_tensors(shape, 0)) + size(_tensors(shape, 1))
    n_layer = min(shape.n_layer, int(2 * (most_bytes - size(ends)) // pair))
    if n_layer < 1:
        raise UsageError(f"{name}: not even one layer fits in {most_bytes / 1e9:g} GB")
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape, n_layer, name)
    tensors = {**ends, **{key: one for i in range(n_layer) for key, one in _tensors(shape, i).items()}}
    for key, dimensions in tensors.items():
        kind = _type_of(shape, key, dimensions)
        dtype = np.dtype(np.float32 if kind == F32 else np.uint8)
        writer.add_tensor_info(
            key,
            _stored(kind, dimensions),
            dtype,
            _bytes_of(kind, dimensions),
            gguf.GGMLQuantizationType(kind),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = _Pools()
    for key, dimensions in tensors.items():
        kind = _type_of(shape, key, dimensions)
        writer.write_tensor_data(
            pools.floats(dimensions, key) if kind == F32 else pools.matrix(kind, dimensions)
        )
    writer.close()
    return path


def _stored(kind: int, dimensions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as the writer wants it: rows in bytes, but for floats."""
    return dimensions if kind == F32 else (*dimensions[:-1], row_bytes(kind, dimensions[-1]))


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, n_layer: int, name: str) -> None:
    writer.add_name(f"random {name}, {n_layer} of {shape.n_layer} layers")
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in {
        "context_length": 8192,
        "embedding_length": shape.n_embd,
        "block_count": n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": shape.n_vocab,
        **(
            {
                "expert_count": shape.n_experts,
                "expert_used_count": shape.n_used,
                "expert_feed_forward_length": shape.n_ff,
            }
            if shape.n_experts
            else {}
        ),
        **shape.extra,
    }.items():
        adders: dict[type, Any] = {
            int: writer.add_uint32, float: writer.add_float32, str: writer.add_string
        }  # fmt: skip
        adders[type(value)](f"{shape.architecture}.{key}", value)


# ---- how many experts a pass touches ----


class _Tensor(ctypes.Structure):  # the start of struct ggml_tensor
    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


_get_name = foreign_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
_get = foreign_function(
    "ggml_backend_tensor_get", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


@contextmanager
def _choices_noted(n_used: int) -> Iterator[list[int]]:
    """Contexts made inside note, for each layer of each pass, how many experts its tokens choose."""
    touched: list[int] = []
    make = llama.llama_init_from_model

    def note(tensor: int, ask: bool, _data: object) -> bool:
        if not _get_name(tensor).startswith(b"ffn_moe_argsort"):
            return not ask
        if not ask:
            n_experts, n_tokens = _Tensor.from_address(tensor).ne[:2]
            order = np.empty((n_tokens, n_experts), np.int32)
            _get(tensor, order.ctypes.data, 0, order.nbytes)
            touched.append(len(np.unique(order[:, :n_used])))
        return True

    callback = llama.ggml_backend_sched_eval_callback(note)

    def noting(model: Any, params: Any) -> Any:  # noqa: ANN401 - ctypes of llama_cpp
        params.cb_eval = callback
        return make(model, params)

    llama.llama_init_from_model = noting
    try:
        yield touched
    finally:
        llama.llama_init_from_model = make


def experts_limit(path: Path, sizes: list[int], n_context: int) -> dict[int, tuple[float, float]]:
    """Return, for passes of each of `sizes` tokens, the experts touched per layer and the limit of T(n)/T(1).

    The limit is the bytes of weights that a pass has to read over those of one token's, experts counted on
    stock kernels. {} for a model without experts. Passes have the tokens that `verify_cost.py` gives them.
    """
    header = read_header(path)
    counts = (header.gguf.integers(f"{header.architecture}.expert_{which}count") for which in ("", "used_"))
    n_experts, n_used = (sum(count) for count in counts)
    if not n_experts:
        return {}
    read = [tensor for tensor in read_tensors(header) if tensor.name != "token_embd.weight"]
    experts = sum(tensor.bytes for tensor in read if "_exps.weight" in tensor.name)
    others = sum(tensor.bytes for tensor in read) - experts
    means: dict[int, float] = {}
    with (
        Model(path, kernels=False, header=header) as model,
        _choices_noted(n_used) as touched,
        Session(model, n_ctx=n_context + max(sizes), n_threads=1) as session,
    ):
        session.eval([(101 + 7 * i) % model.n_vocab for i in range(n_context)], n_logits=0)
        for size in {1, *sizes}:
            touched.clear()
            session.eval([(11 + 13 * j) % model.n_vocab for j in range(size)], n_logits=size)
            session.rewind(n_context)
            means[size] = float(np.mean(touched))

    def n_bytes(size: int) -> float:
        return others + experts * means[size] / n_experts

    return {size: (means[size], n_bytes(size) / n_bytes(1)) for size in sizes}
