"""Use a draft head: one block that goes on from the target's hidden states, and the file that it is in.

    NAME.gguf = an ordinary GGUF of one block with `edgespec.head.*` in its metadata; `token_embd`, which is
                its output matrix too, holds the rows of the kept ids of the target's output matrix;
                after the last tensor, where no GGUF parser looks: the fusion matrix [We | Wf]

Its input for token t after a token with the hidden state f is We e(t) + Wf f, with e the target's own input
embedding, which is read in the target's file. Its own hidden state takes f's place where the target has not
been. (EAGLE, arXiv 2401.15077.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.decoding.session import Features
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.ggml_types import from_floats, is_type, row_bytes, to_floats, type_number
from edgespec.llama.gguf import read_gguf
from edgespec.llama.gguf_header import DRAFT_PREFIX, HEAD_PREFIX, GGUFHeader
from edgespec.llama.kernels import Plugin
from edgespec.platform.forks import finalize

TARGET = HEAD_PREFIX + "target"
TOKEN_IDS, N_VOCAB = DRAFT_PREFIX + "token_ids", DRAFT_PREFIX + "n_vocab"
FUSION_TYPE, FUSION_OFFSET = HEAD_PREFIX + "fusion_type", HEAD_PREFIX + "fusion_offset"
_EMBEDDINGS = "token_embd.weight"
_AGAIN = "make it again with `edgespec draft make`"
_REMEMBERED = 1024  # tokens: 6 MB for a target of 1,536 elements


@dataclass(frozen=True, slots=True, eq=False)
class HeadFile:
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


def check_target(header: GGUFHeader) -> None:
    """Raise UsageError for a draft head, which cannot be a target."""
    if header.is_head:
        raise UsageError(f"{header.path}: a draft head; it cannot be a target")


def read_head(header: GGUFHeader) -> HeadFile | None:
    """The description of a head in its file; None for an ordinary model.

    Raises EdgespecError if the file is not as training made it.
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
    if any(tensor.name == _EMBEDDINGS and tensor.rows != len(ids) for tensor in gguf.tensors):
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


class TargetEmbeddings:
    """The input embeddings of a target: rows of its own file, as floats.

    The matrix is mapped, so that only the pages of used tokens are in memory.
    """

    def __init__(self, header: GGUFHeader) -> None:
        """Map the matrix of the target's file. Raises EdgespecError if it has none."""
        for path in (header.path, *header.other_parts):
            gguf = header.gguf if path == header.path else read_gguf(path)
            for tensor in gguf.tensors:
                if tensor.name == _EMBEDDINGS:
                    size = row_bytes(tensor.kind, tensor.columns)
                    start = gguf.data_start + tensor.offset
                    self._rows = np.memmap(path, np.uint8, "r", start, (tensor.rows, size))
                    self._kind, self.n_embd = tensor.kind, tensor.columns
                    return
        raise EdgespecError(f"{header.path}: no {_EMBEDDINGS} in it; a head cannot draft for it")

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the rows of `tokens`, shape (len(tokens), n_embd)."""
        return to_floats(self._rows[np.asarray(tokens, np.int64)], self._kind, self.n_embd)


class Fusion:
    """The input of a head in place of tokens: the fusion matrix times embedding and hidden state.

    What embeddings give is remembered: the same few hundred tokens make most of a text.
    """

    def __init__(
        self,
        head: HeadFile,
        embeddings: TargetEmbeddings,
        *,
        n_threads: int = 1,
        plugin: Plugin | None = None,
    ) -> None:
        """Load the matrix of `head`; `embeddings` are those of its target; `plugin`: kernels to use."""
        n, floats = head.n_embd, read_fusion(head)
        self._n_embd, self._embeddings = n, embeddings
        self._of_embedding, self._of_state = (
            EightBitMatrix(half, n_threads, plugin) for half in (floats[:, :n], floats[:, n:])
        )
        self._of_token: dict[int, npt.NDArray[np.float32]] = {}

    def __call__(self, tokens: Sequence[int], features: Features) -> npt.NDArray[np.float32]:
        """Return the inputs for `tokens`, the first of them after features[0]; both of one length.

        Shape (len(tokens), n_embd).
        """
        if features.shape != (len(tokens), self._n_embd):
            raise ValueError(f"hidden states of shape {features.shape} for {len(tokens)} tokens")
        inputs = np.empty((len(tokens), self._n_embd), np.float32)
        self._of_state.multiply(np.ascontiguousarray(features), inputs)
        self._remember(tokens)
        for i, token in enumerate(tokens):
            inputs[i] += self._of_token[token]
        return inputs

    def _remember(self, tokens: Sequence[int]) -> None:
        unknown = set(tokens).difference(self._of_token)
        if not unknown:
            return
        if len(self._of_token) + len(unknown) > _REMEMBERED:
            self._of_token.clear()
            unknown = set(tokens)
        found = np.empty((len(unknown), self._n_embd), np.float32)
        self._of_embedding.multiply(self._embeddings(list(unknown)), found)
        self._of_token.update(zip(unknown, found, strict=True))


# ---- a matrix with 8 bits a number ----

_Q8_0 = type_number("q8_0")
_Floats = npt.NDArray[np.float32]


class EightBitMatrix:
    """A matrix of Q8_0 and its products. Two threads must not use it at once.

    Not multiplied by numpy: threads of its library wait busily for 30 ms after each product, on the
    processors that the target's pass needs then.
    """

    def __init__(self, matrix: _Floats, n_threads: int, plugin: Plugin | None) -> None:
        """Quantize `matrix`, (rows, columns); `plugin`: the kernels, where they are used.

        Raises MemoryError.
        """
        rows = from_floats(np.ascontiguousarray(matrix), _Q8_0)
        self._rows = None if plugin else rows
        self._n_threads = n_threads
        if plugin:
            make, self._multiply, free = plugin.matrices()
            self._address = make(_Q8_0, *matrix.shape, rows.ctypes.data, rows.nbytes)
            if not self._address:
                raise MemoryError(f"no memory for a matrix of {matrix.shape}")
            finalize(self, free, self._address)

    def multiply(self, vectors: _Floats, out: _Floats) -> None:
        """Write the products with `vectors`, (n, columns), into `out`, (n, rows), both contiguous.

        Raises ValueError for others.
        """
        if self._rows is not None:
            _core.multiply(self._rows, vectors, out)
            return
        if not (
            vectors.flags.c_contiguous and out.flags.c_contiguous and out.dtype == vectors.dtype == np.float32
        ):
            raise ValueError("vectors and products must be contiguous float32")
        sizes = vectors.ctypes.data, vectors.size, out.ctypes.data, out.size
        if self._multiply(self._address, len(vectors), *sizes, self._n_threads) != 0:
            raise ValueError(f"vectors of shape {vectors.shape}, products of {out.shape}: not of this matrix")
