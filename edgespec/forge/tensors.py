"""Reads tensors of a GGUF file as floats, whole or some of their rows, by ggml's own functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError
from edgespec.llama.ggml_types import to_floats
from edgespec.llama.gguf_header import GGUFHeader, read_tensors

OUTPUT, EMBEDDINGS = "output.weight", "token_embd.weight"


class Tensors:
    """The tensors of one file. It is mapped, so that only what is read of it is in memory."""

    def __init__(self, header: GGUFHeader) -> None:
        """Map the file of `header`. Raises EdgespecError for a model split over several files."""
        if header.other_parts:
            raise EdgespecError(
                f"{header.path}: split over several files; join them with llama.cpp's gguf-split first"
            )
        self._path = header.path
        self._data_start = header.gguf.data_start
        self._infos = {info.name: info for info in read_tensors(header)}
        self._data = np.memmap(header.path, np.uint8, "r")

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in numpy's order: the rows first."""
        return self._infos[name].shape[::-1]

    def floats(self, name: str, rows: npt.NDArray[np.int64] | slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return a vector, shape (n,), or `rows` of a matrix, shape (n, columns).

        Raises EdgespecError if the file has no such tensor, or if it is not a vector or a matrix.
        """
        info = self._infos.get(name)
        if info is None or info.n_matrices > 1:
            raise EdgespecError(f"{self._path}: no tensor {name!r} of one or two dimensions")
        start = self._data_start + info.offset
        raw = self._data[start : start + info.bytes].reshape(info.rows, -1)
        if not info.is_matrix:
            return to_floats(np.ascontiguousarray(raw), info.kind, info.columns).reshape(-1).copy()
        return to_floats(np.ascontiguousarray(raw[rows]), info.kind, info.columns)

    @property
    def output(self) -> str:
        """Name of the matrix that gives the logits: the embeddings' own where it is tied to them."""
        return OUTPUT if OUTPUT in self else EMBEDDINGS
