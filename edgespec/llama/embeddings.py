"""Use a draft with a cut vocabulary: it takes all tokens as input, but can predict only those kept.

    NAME.gguf = an ordinary GGUF with `edgespec.draft.*` in its metadata; its token list and its matrices
                `token_embd` and `output` hold the kept ids only;
                after the last tensor, where no GGUF parser looks: the source's whole `token_embd`

A token goes in as its row of the whole `token_embd`, which the library accepts in place of the token.
`cutting.cut` writes such files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.ggml_types import is_type, row_bytes, to_floats
from edgespec.llama.gguf_header import GGUFHeader

PREFIX = "edgespec.draft."
SOURCE, TOKEN_IDS, N_VOCAB = PREFIX + "source", PREFIX + "token_ids", PREFIX + "n_vocab"
WIDTH, KIND = PREFIX + "embedding_length", PREFIX + "embedding_type"
OFFSET, SCALE = PREFIX + "embedding_offset", PREFIX + "embedding_scale"


@dataclass(frozen=True, slots=True, eq=False)
class CutVocabulary:
    """The metadata of a cut draft."""

    path: Path
    source_sha256: str
    """SHA-256 of the file that it was cut from."""
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
    """Factor that the model's graph applies to the embedding of a token, but not to a row given instead."""


def read_cut(header: GGUFHeader) -> CutVocabulary | None:
    """Return the cut vocabulary of a model's file; None for an ordinary model.

    Raises EdgespecError if the file is not as `cutting.cut` made it.
    """
    path, gguf = header.path, header.gguf
    if header.is_head or not any(key.startswith(PREFIX) for key in gguf.fields):
        return None
    try:
        cut = CutVocabulary(
            path=path,
            source_sha256=gguf.text(SOURCE),
            n_vocab=int(gguf.number(N_VOCAB)),
            token_ids=gguf.numbers(TOKEN_IDS).astype(np.int64),
            width=int(gguf.number(WIDTH)),
            kind=int(gguf.number(KIND)),
            offset=int(gguf.number(OFFSET)),
            scale=float(gguf.number(SCALE)),
        )
    except KeyError:
        raise EdgespecError(
            f"{path}: damaged: incomplete {PREFIX}* metadata; make it again with `edgespec draft make`"
        ) from None
    if not is_type(cut.kind) or gguf.n_bytes < cut.offset + cut.n_vocab * row_bytes(cut.kind, cut.width):
        raise EdgespecError(
            f"{path}: the embeddings after its last tensor are missing (copied or requantized by another "
            "program?); make it again with `edgespec draft make`"
        )
    return cut


def check_target(header: GGUFHeader) -> None:
    """Raise UsageError for a draft that lacks tokens, so that it cannot be a target."""
    if header.is_head:
        raise UsageError(f"{header.path}: a draft head; it cannot be a target")
    if read_cut(header):
        raise UsageError(f"{header.path}: a draft with a cut vocabulary; it cannot be a target")


class Embeddings:
    """A cut draft's full embedding matrix: gives a Session the rows of tokens, as floats.

    The matrix is mapped, so that only the pages of used tokens are in memory. The library's own function
    converts the rows: they are bit for bit those it would look up.
    """

    def __init__(self, cut: CutVocabulary) -> None:
        """Map the matrix of `cut`."""
        size = row_bytes(cut.kind, cut.width)
        self._rows = np.memmap(cut.path, np.uint8, "r", cut.offset, (cut.n_vocab, size))
        self._kind, self._width, self._scale = cut.kind, cut.width, np.float32(cut.scale)

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the rows of `tokens`, shape (len(tokens), width); ids are of the full vocabulary."""
        raw = self._rows[np.asarray(tokens, np.int64)]
        rows = to_floats(raw, self._kind, self._width)
        return rows if self._scale == 1 else rows * self._scale
