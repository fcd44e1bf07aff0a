"""A draft whose output vocabulary was cut, as it is used: which tokens it knows, and how tokens enter.

    NAME.gguf = an ordinary GGUF with `edgespec.draft.*` in its metadata, whose tokens and whose matrices
                `token_embd` and `output` are those of the kept ids;
                after its last tensor, where no GGUF parser looks: the source's whole `token_embd`

So logits come for the kept tokens only, while any token of the full vocabulary can go in: as its row of
the full matrix, which the library takes in place of a token. `cutting.cut` writes such files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.backend import foreign_function
from edgespec.llama.gguf_fields import Field, read_fields
from edgespec.llama.gguf_header import GGUFHeader

PREFIX = "edgespec.draft."
SOURCE, TOKEN_IDS, N_VOCAB = PREFIX + "source", PREFIX + "token_ids", PREFIX + "n_vocab"
WIDTH, KIND = PREFIX + "embedding_length", PREFIX + "embedding_type"
OFFSET, SCALE = PREFIX + "embedding_offset", PREFIX + "embedding_scale"

_F32 = 0  # enum ggml_type


@dataclass(frozen=True, slots=True, eq=False)
class CutVocabulary:
    """What a cut draft says of itself."""

    path: Path
    source_sha256: str
    """Of the file that it was cut from."""
    n_vocab: int
    """Tokens of the full vocabulary."""
    token_ids: npt.NDArray[np.int64]
    """Row of its logits -> id in the full vocabulary, ascending."""
    width: int
    """Elements of an embedding."""
    kind: int
    """`enum ggml_type` of the embeddings."""
    offset: int
    """Where they start in the file, bytes."""
    scale: float
    """What the model's graph multiplies a token's embedding by, but not one that comes as a row."""


def read_cut(path: Path) -> CutVocabulary | None:
    """Return what the file says of its cut vocabulary; None where it is an ordinary model.

    Looks at the fields before the tokenizer's only, among which `cutting.cut` writes them. Raises
    EdgespecError where the file is not as `cutting.cut` made it.
    """
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        found: dict[str, Field] = {}
        for field in read_fields(data):
            if field.key.startswith("tokenizer."):
                break
            if field.key.startswith(PREFIX):
                found[field.key] = field
        if not found:
            return None
        try:
            cut = CutVocabulary(
                path=path,
                source_sha256=found[SOURCE].text,
                n_vocab=int(found[N_VOCAB].number),
                token_ids=found[TOKEN_IDS].numbers().astype(np.int64),
                width=int(found[WIDTH].number),
                kind=int(found[KIND].number),
                offset=int(found[OFFSET].number),
                scale=float(found[SCALE].number),
            )
        except (KeyError, ValueError):
            raise EdgespecError(
                f"{path}: damaged: incomplete {PREFIX}* metadata; make it again with `edgespec draft make`"
            ) from None
        if len(data) < cut.offset + cut.n_vocab * row_bytes(cut.kind, cut.width):
            raise EdgespecError(
                f"{path}: the embeddings after its last tensor are missing (copied or requantized by another "
                "program?); make it again with `edgespec draft make`"
            )
    return cut


def check_target(header: GGUFHeader) -> None:
    """Raise UsageError for a cut draft: it has not all tokens, so that it can only draft."""
    if read_cut(header.path):
        raise UsageError(f"{header.path}: a draft with a cut vocabulary; it cannot be a target")


class _Traits(ctypes.Structure):  # the start of struct ggml_type_traits
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


_traits = foreign_function("ggml_get_type_traits", ctypes.POINTER(_Traits), ctypes.c_int)
_row_size = foreign_function("ggml_row_size", ctypes.c_size_t, ctypes.c_int, ctypes.c_int64)


def row_bytes(kind: int, width: int) -> int:
    """Return the bytes of a row of `width` elements of the ggml type `kind`."""
    return int(_row_size(kind, width))


class Embeddings:
    """The rows of a cut draft's full embedding matrix as floats: what a Session takes for tokens.

    The matrix is mapped, so only pages with tokens that are used are in memory. The numbers are made by
    the library's own function, and so are bit for bit those it would look up itself.
    """

    def __init__(self, cut: CutVocabulary) -> None:
        """Map the matrix of `cut`."""
        size = row_bytes(cut.kind, cut.width)
        self._rows = np.memmap(cut.path, np.uint8, "r", cut.offset, (cut.n_vocab, size))
        self._kind, self._width, self._scale = cut.kind, cut.width, np.float32(cut.scale)

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the rows of `tokens`, shape (len(tokens), width); ids are of the full vocabulary."""
        raw = self._rows[np.asarray(tokens, np.int64)]
        if self._kind == _F32:
            rows = raw.view(np.float32)
        else:
            rows = np.empty((len(raw), self._width), np.float32)
            _traits(self._kind).contents.to_float(raw.ctypes.data, rows.ctypes.data, rows.size)
        return rows if self._scale == 1 else rows * self._scale


class Scatter:
    """Rows of a cut draft's logits as rows over the target's vocabulary: -inf for what was cut.

    One buffer, of which only the kept ids are ever written.
    """

    def __init__(self, token_ids: npt.NDArray[np.int64], n_vocab: int) -> None:
        """Spread rows over `n_vocab` tokens; row element i belongs to token_ids[i] if that is below."""
        self._ids = token_ids[: int(np.searchsorted(token_ids, n_vocab))]
        self._rows = np.full((1, n_vocab), -np.inf, np.float32)

    def __call__(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return `rows` spread; valid until the next call."""
        if len(rows) > len(self._rows):
            self._rows = np.full((len(rows), self._rows.shape[1]), -np.inf, np.float32)
        spread = self._rows[: len(rows)]
        for row, kept in zip(spread, rows, strict=True):
            row[self._ids] = kept[: len(self._ids)]
        return spread
