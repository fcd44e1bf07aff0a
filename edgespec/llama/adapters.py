"""LoRA adapters: files that are checked against their target, and the sets of them that passes apply.

The weights stay as they are: an adapter's small products are computed beside theirs. A context applies one
set at a time, so all tokens of a pass share it. What was computed with one set is of no use to another.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend, gguf
from edgespec.llama.backend import interruptible, llama
from edgespec.llama.choices import AdapterSet, Lora
from edgespec.llama.gguf import GGUF, TensorInfo
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.kernels import packing

_A, _B, _ALPHA = ".lora_a", ".lora_b", "adapter.lora.alpha"
_TEXTS = ("general.type", "adapter.type", "general.architecture")
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


class Adapters:
    """The adapters of a loaded model, numbered from 0, which are freed with it."""

    def __init__(self, loaded: Sequence[tuple[Any, str]] = ()) -> None:
        """Hold adapters that were `loaded`: the library's pointer, and a hash of the file."""
        self._handles, self._digests = [one[0] for one in loaded], [one[1] for one in loaded]

    def __len__(self) -> int:
        return len(self._handles)

    def set_of(self, scales: Mapping[int, float]) -> AdapterSet:
        """Return the set of these scales, by number. Raises UsageError."""
        for number in scales:
            if not 0 <= number < len(self):
                known = f"those loaded are 0 to {len(self) - 1}" if self else "none is loaded"
                raise UsageError(f"no adapter {number}: {known}", field="lora")
        return tuple((number, float(scales[number])) for number in sorted(scales) if scales[number])

    def key(self, applied: AdapterSet) -> str:
        """Return 16 hex digits that stand for a set, by the contents of its files; "" for none."""
        known = [(self._digests[number], scale) for number, scale in applied]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16] if known else ""

    def apply(self, context: llama.llama_context_p, applied: AdapterSet) -> None:
        """Have later passes of a context apply this set, and no other."""
        n = len(applied)
        handles = (llama.llama_adapter_lora_p_ctypes * n)(*(self._handles[number] for number, _ in applied))
        llama.llama_set_adapters_lora(context, handles, n, (ctypes.c_float * n)(*(one[1] for one in applied)))


def load_adapters(
    model: llama.llama_model_p, header: GGUFHeader, packed: Collection[str], given: Sequence[Lora]
) -> Adapters:
    """Load adapters of a model whose weights `packed` the kernels multiply, before there is any context."""
    loaded = []
    for path, _ in given:
        data = _as_loaded(check_adapter(path, header), packed)
        descriptor = os.memfd_create("lora", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file, packing(bool(packed)), interruptible():
            file.write(data)
            file.flush()
            backend.clear_log()
            handle = llama.llama_adapter_lora_init(model, f"/proc/self/fd/{descriptor}".encode())
        if not handle:
            raise EdgespecError(f"{path}: llama.cpp cannot load it: {backend.failure_reason()}")
        loaded.append((handle, hashlib.sha256(data).hexdigest()))
    return Adapters(loaded)


def check_adapter(path: Path, target: GGUFHeader) -> GGUF:
    """Return an adapter's metadata. Raises UsageError, and EdgespecError with its first wrong tensor."""
    read = gguf.read_gguf(path)
    for key, wanted in zip(_TEXTS, ("adapter", "lora", target.architecture), strict=True):
        if (found := read.text(key)) != wanted:
            problem = f"{key} is {found[:64]!r}, not {wanted!r}"
            raise EdgespecError(f"{path}: no LoRA adapter of {target.path.name}: {problem}")
    if "adapter.alora.invocation_tokens" in read.fields:
        raise EdgespecError(f"{path}: certain tokens activate it (aLoRA), which is not supported")
    if read.n_bytes < read.expected_bytes:
        problem = f"{read.n_bytes:,} of {read.expected_bytes:,} bytes"
        raise EdgespecError(f"{path}: incomplete: {problem}; download it again")
    parts = (target.gguf, *map(gguf.read_gguf, target.other_parts))
    weights = {tensor.name: tensor for part in parts for tensor in part.tensors}
    tensors = {tensor.name: tensor for tensor in read.tensors}
    for name, tensor in tensors.items():
        if wrong := _why_wrong(tensor, tensors, weights):
            raise EdgespecError(f"{path}: no LoRA adapter of {target.path.name}: {name}: {wrong}")
    return read


def _why_wrong(one: TensorInfo, found: Mapping[str, TensorInfo], weights: Mapping[str, TensorInfo]) -> str:
    """Return what is wrong with a tensor of an adapter, or with its pair; "" for nothing."""
    base, dot, end = one.name.rpartition(".")
    weight, a, b = weights.get(base), found.get(base + _A), found.get(base + _B)
    if dot + end not in (_A, _B):
        return f"its name ends neither with {_A} nor with {_B}"
    if weight is None or not weight.is_matrix:
        return f"the model has no matrix {base}"
    if base == _EMBEDDINGS and _OUTPUT not in weights:
        return "this matrix is also the model's output, which llama.cpp cannot adapt"
    if one.type in ("i8", "i16", "i32", "i64", "f64"):
        return f"its type, {one.type}, is none of weights"
    if a is None or b is None:
        return f"{base}{_B if a else _A} is missing"
    if base == _EMBEDDINGS:  # read by rows: both are transposed
        ends, ranks = {_A: (a.rows, weight.rows), _B: (b.rows, weight.columns)}, (a.columns, b.columns)
    else:
        ends, ranks = {_A: (a.columns, weight.columns), _B: (b.rows, weight.rows)}, (a.rows, b.columns)
    for size, wanted in (ends[dot + end], (one.n_matrices, weight.n_matrices)):
        if size != wanted:
            return f"its shape is {one.shape}, and the model's {weight.shape}"
    return "" if ranks[0] == ranks[1] > 0 else f"the rank of {_A} is {ranks[0]}, that of {_B} {ranks[1]}"


def _as_loaded(read: GGUF, packed: Collection[str]) -> bytes:
    """Return an adapter's file as llama.cpp is to read it.

    Beside weights that are `packed`, its matrices are of types that the kernels take: packed ones, or floats.
    """

    def kind_of(one: TensorInfo) -> int:
        fits = one.columns % max(32, gguf.block_size(one.kind)) == 0
        stays = not packed or (fits and one.name.rpartition(".")[0] in packed)
        return one.kind if stays else gguf.F32

    alpha = gguf.encode_number(_ALPHA, gguf.FLOAT32, read.number(_ALPHA) if _ALPHA in read.fields else 0.0)
    fields = [*(gguf.encode_text(key, read.text(key)) for key in _TEXTS), alpha]
    infos, start = gguf.encode_start(fields, [(one.name, one.shape, kind_of(one)) for one in read.tensors])
    data, written = np.memmap(read.path, np.uint8, "r"), [start]
    for one, info in zip(read.tensors, infos, strict=True):
        begin = read.data_start + one.offset
        raw = data[begin : begin + one.bytes]
        if info.kind != one.kind:
            rows = raw.reshape(-1, gguf.row_bytes(one.kind, one.columns))
            raw = gguf.to_floats(rows, one.kind, one.columns).view(np.uint8)
        written.append(gguf.padded(raw.tobytes()))
    return b"".join(written)
