"""Which tensors a GGUF file holds; of the weights themselves nothing is read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from edgespec.llama.backend import foreign_function
from edgespec.llama.gguf_header import GGUFHeader, open_gguf


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file."""

    name: str
    type: str
    """As ggml names it: "q4_K"."""
    columns: int
    rows: int
    n_matrices: int
    """More than 1 for the experts of a layer, which lie in one tensor."""
    bytes: int

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, not a norm's or a bias's vector."""
        return self.rows > 1


_gguf, _id = ctypes.c_void_p, ctypes.c_int64
_n_tensors = foreign_function("gguf_get_n_tensors", _id, _gguf)
_name = foreign_function("gguf_get_tensor_name", ctypes.c_char_p, _gguf, _id)
_type = foreign_function("gguf_get_tensor_type", ctypes.c_int, _gguf, _id)
_ne = foreign_function("gguf_get_tensor_ne", ctypes.POINTER(ctypes.c_int64), _gguf, _id)
_size = foreign_function("gguf_get_tensor_size", ctypes.c_size_t, _gguf, _id)
_type_name = foreign_function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)


def read_tensors(header: GGUFHeader) -> list[FileTensor]:
    """Return the tensors of a file, or of all files of a split model, in their order."""
    tensors = []
    for path in (header.path, *header.other_parts):
        with open_gguf(path) as context:
            for i in range(_n_tensors(context)):
                columns, rows, *more = _ne(context, i)[:4]
                tensors.append(
                    FileTensor(
                        name=_name(context, i).decode(errors="replace"),
                        type=_type_name(_type(context, i)).decode(),
                        columns=columns,
                        rows=rows,
                        n_matrices=more[0] * more[1],
                        bytes=_size(context, i),
                    )
                )
    return tensors
