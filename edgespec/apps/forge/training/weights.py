"""Weights of a model's file as training reads them: its sizes, and tensors as floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.errors import UsageError
from edgespec.llama.gguf import TensorInfo, row_bytes, to_floats
from edgespec.llama.gguf_header import GGUFHeader

EMBEDDINGS, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The sizes of one decoder block."""

    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rope_base: float
    epsilon: float
    """RMS norms add it."""


class ModelWeights:
    """Tensors of a model's file, by name; the file is mapped."""

    def __init__(self, header: GGUFHeader) -> None:
        """Open the model of `header`. Raises UsageError for one that is split over several files."""
        if header.other_parts:
            raise UsageError(
                f"{header.path}: split over several files; join them with llama.cpp's gguf-split first"
            )
        self.header = header
        self._infos = {info.name: info for info in header.gguf.tensors}

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's shape and type. Raises UsageError for an unknown name."""
        if name not in self._infos:
            raise UsageError(f"{self.header.path}: has no tensor {name}; no draft can be trained for it")
        return self._infos[name]

    def rows(self, name: str, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """Return rows of a matrix (default all), shape (n, columns), dequantized by ggml."""
        info = self.info(name)
        size = row_bytes(info.kind, info.columns)
        start = self.header.gguf.data_start + info.offset
        raw = np.memmap(self.header.path, np.uint8, "r", start, (info.rows, size))
        return to_floats(np.ascontiguousarray(raw if rows is None else raw[rows]), info.kind, info.columns)

    def vector(self, name: str) -> Floats:
        """Return a vector, such as a norm's weights."""
        return np.asarray(self.rows(name)[0])

    def embed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
        """Return the input embeddings of tokens, shape (*tokens.shape, n_embd)."""
        used, where = np.unique(tokens, return_inverse=True)
        rows = self.rows(EMBEDDINGS, used).astype(np.float16)
        return rows[where.reshape(tokens.shape)]

    @property
    def output(self) -> str:
        """Return the name of the output matrix, which may be the embeddings."""
        return OUTPUT if OUTPUT in self._infos else EMBEDDINGS

    def shape(self) -> BlockShape:
        """Return the sizes of the model's blocks."""
        header = self.header

        def number(key: str, default: float) -> float:
            field = header.gguf.fields.get(f"{header.architecture}.{key}")
            return float(header.gguf.number(field.key)) if field else default

        n_head_kv = max(header.n_head_kv)
        if not n_head_kv:
            raise UsageError(
                f"{header.path}: a {header.architecture} model has no attention, whose sizes a head takes "
                "over; no head can be trained for it"
            )
        return BlockShape(
            n_embd=header.n_embd,
            n_ff=header.n_ff,
            n_head=header.n_head,
            n_head_kv=n_head_kv,
            head_dim=header.head_dim_k,
            rope_base=number("rope.freq_base", 10000.0),
            epsilon=number("attention.layer_norm_rms_epsilon", 1e-5),
        )
