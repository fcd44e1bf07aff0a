"""The file of a draft head that edgespec makes.

NAME.gguf = an ordinary GGUF of one block with `edgespec.head.*` in its metadata; `token_embd`, which is
its output matrix too, holds the rows of the kept ids of the target's output matrix;
after the last tensor, where no GGUF parser looks: the fusion matrix [We | Wf]
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.drafting.heads.matrices import EMBEDDINGS
from edgespec.errors import EdgespecError
from edgespec.llama.gguf import is_type, row_bytes, to_floats
from edgespec.llama.gguf_header import DRAFT_PREFIX, HEAD_PREFIX, GGUFHeader

TARGET = HEAD_PREFIX + "target"
TOKEN_IDS, N_VOCAB = DRAFT_PREFIX + "token_ids", DRAFT_PREFIX + "n_vocab"
FUSION_TYPE, FUSION_OFFSET = HEAD_PREFIX + "fusion_type", HEAD_PREFIX + "fusion_offset"
_AGAIN = "make it again with `edgespec draft make`"


class HeadFile(msgspec.Struct, frozen=True, eq=False):
    """The metadata of a draft head."""

    path: Path
    target_sha256: str
    """SHA-256 of the file of the target that it was made for."""
    n_vocab: int
    """Tokens of the target's vocabulary."""
    token_ids: npt.NDArray[np.int64]
    """Row of its logits -> id in the target's vocabulary, ascending."""
    n_embd: int
    """Elements of a hidden state, and of an embedding, of the target."""
    fusion_type: int
    """`enum ggml_type` of the fusion matrix, whose n_embd rows have 2 n_embd elements each."""
    fusion_offset: int
    """Where it starts in the file, bytes."""


def read_head(header: GGUFHeader) -> HeadFile | None:
    """Return the description of a head in its file; None for an ordinary model.

    Raises EdgespecError if the file is not as training wrote it.
    """
    path, gguf = header.path, header.gguf
    if not header.is_head:
        return None
    try:
        head = HeadFile(
            path=path,
            target_sha256=gguf.text(TARGET),
            n_vocab=int(gguf.number(N_VOCAB)),
            token_ids=gguf.numbers(TOKEN_IDS).astype(np.int64),
            n_embd=header.n_embd,
            fusion_type=int(gguf.number(FUSION_TYPE)),
            fusion_offset=int(gguf.number(FUSION_OFFSET)),
        )
    except KeyError:
        raise EdgespecError(f"{path}: damaged: incomplete {HEAD_PREFIX}* metadata; {_AGAIN}") from None
    ids = head.token_ids
    if not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= head.n_vocab:
        raise EdgespecError(f"{path}: damaged: its list of tokens is not ascending; {_AGAIN}")
    if any(tensor.name == EMBEDDINGS and tensor.rows != len(ids) for tensor in gguf.tensors):
        raise EdgespecError(f"{path}: damaged: its list of tokens does not fit its matrix; {_AGAIN}")
    size = row_bytes(head.fusion_type, 2 * head.n_embd) if is_type(head.fusion_type) else None
    if size is None or gguf.n_bytes < head.fusion_offset + head.n_embd * size:
        raise EdgespecError(
            f"{path}: the fusion matrix after its last tensor is missing (copied or requantized by another "
            f"program?); {_AGAIN}"
        )
    return head


def read_fusion(head: HeadFile) -> npt.NDArray[np.float32]:
    """Return the fusion matrix [We | Wf], shape (n_embd, 2 n_embd)."""
    n, size = head.n_embd, row_bytes(head.fusion_type, 2 * head.n_embd)
    raw = np.fromfile(head.path, np.uint8, n * size, offset=head.fusion_offset).reshape(n, size)
    return to_floats(raw, head.fusion_type, 2 * n)
