"""Cut of a model's output vocabulary: a smaller file of the same model, which can say fewer tokens.

A small model spends much of a pass on logits of tokens that never come. Rows of a quantized matrix are
quantized one by one, so they can be left out as bytes: the other logits do not change by a bit. Inputs keep
the full vocabulary (embeddings.py). To any other program the file is an ordinary model.

`TensorChanges` are what a draft learned, and which layers it lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama import embeddings, gguf_encoding
from edgespec.llama.ggml_types import block_size, from_floats, to_floats, type_number
from edgespec.llama.gguf import (
    FLOAT32,
    MERGES,
    SCORES,
    TOKEN_TYPES,
    TOKENS,
    UINT32,
    UINT64,
    Field,
    TensorInfo,
    aligned,
)
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.platform.files import replacing

INPUT_SCALES: dict[str, Callable[[int], float]] = {
    "llama": lambda _: 1.0,
    "qwen2": lambda _: 1.0,
    "qwen3": lambda _: 1.0,
    "gemma3": math.sqrt,
}
"""Architecture -> factor of a token's embedding, by its width, in the architecture's graph.

A test shows for each that the cut model's logits are the full model's.
"""

_EMBEDDINGS = "token_embd.weight"
_CUT_TENSORS = (_EMBEDDINGS, "output.weight", "output.bias")
_NORMAL, _UNUSED = 1, 5  # enum llama_token_type
_CHUNK = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class SourceVocabulary:
    """Tokens of a model's file."""

    n_vocab: int
    required: npt.NDArray[np.int64]
    """Ids that every cut keeps, ascending: tokens that are no plain text (control, end of generation, byte),
    tokens of a single byte, and tokens that the tokenizer's settings name."""
    unused: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorChanges:
    """Tensors of a cut model that are not the source's."""

    layers: tuple[int, ...]
    type_: str
    """ggml's type of matrices; Q8_0 or F16 where a row is not a whole number of its blocks."""
    tensor: Callable[[str], npt.NDArray[np.float32] | None]
    """Weights by name in the new file, without cut rows; None: the source's."""


def check_source(header: GGUFHeader) -> None:
    """Raise UsageError for a model whose vocabulary cannot be cut."""
    if header.other_parts:
        raise UsageError(
            f"{header.path}: split over several files; join them with llama.cpp's gguf-split first"
        )
    if header.architecture not in INPUT_SCALES:
        known = ", ".join(INPUT_SCALES)
        raise UsageError(
            f"{header.path}: a {header.architecture} model; the vocabulary can be cut of {known} models only"
        )
    if embeddings.read_cut(header):
        raise UsageError(f"{header.path}: its vocabulary is cut already; name the model it was made from")


def read_vocabulary(header: GGUFHeader) -> SourceVocabulary:
    """Return the tokens of a model that `check_source` accepts."""
    gguf = header.gguf
    texts = gguf.texts(TOKENS)
    types = gguf.numbers(TOKEN_TYPES) if TOKEN_TYPES in gguf.fields else np.full(len(texts), _NORMAL)
    named = [token for field in gguf.fields.values() if (token := _named_token(field)) is not None]
    # Byte-level BPE writes each byte as one character; elsewhere bytes have a type of their own.
    is_bpe = header.tokenizer == "gpt2"
    single = [i for i, text in enumerate(texts) if is_bpe and len(text.decode(errors="replace")) == 1]
    special = np.flatnonzero((types != _NORMAL) & (types != _UNUSED))
    required = np.unique(np.concatenate([special, np.array([*single, *named], np.int64)]))
    return SourceVocabulary(
        len(texts), required[(required >= 0) & (required < len(texts))], np.flatnonzero(types == _UNUSED)
    )


def cut(
    header: GGUFHeader,
    path: Path,
    token_ids: npt.NDArray[np.int64],
    *,
    source_sha256: str,
    changes: TensorChanges | None = None,
) -> None:
    """Write the model of `header`, which `check_source` accepts, with only the tokens `token_ids` as `path`.

    `token_ids`: ascending, with all of `SourceVocabulary.required`. The file is complete or missing. Raises
    EdgespecError when it cannot be written, UsageError for an unknown type.
    """
    with _mapped(header.path) as data:
        writing = _CutFile(data, header, np.asarray(token_ids, np.int64), source_sha256, changes)
        try:
            with replacing(path) as file:
                writing.write(file)
        except OSError as error:
            raise EdgespecError(f"cannot write {path}: {describe_os_error(error)}") from error


class _CutFile:
    """A file to write, and its source."""

    def __init__(
        self,
        data: mmap,
        header: GGUFHeader,
        token_ids: npt.NDArray[np.int64],
        source_sha256: str,
        changes: TensorChanges | None,
    ) -> None:
        self._data, self._ids, self._gguf = data, token_ids, header.gguf
        self._sha256, self._changes = source_sha256, changes
        self._scale = INPUT_SCALES[header.architecture](header.n_embd)
        self._vocab_size = f"{header.architecture}.vocab_size"
        self._n_layer = f"{header.architecture}.block_count"
        self._n_vocab = header.n_vocab
        self._embeddings = next(info for info in self._gguf.tensors if info.name == _EMBEDDINGS)

    def write(self, file: BinaryIO) -> None:
        pairs = self._new_infos()
        infos = [new for _, new in pairs]
        # Any offset of the embeddings takes eight bytes, so 0 stands for it here.
        start = aligned(len(self._metadata(infos, 0)), self._gguf.alignment)
        end = start + max(info.offset + info.bytes for info in infos)
        offset = aligned(end, self._gguf.alignment)
        file.write(self._metadata(infos, offset))
        for old, new in pairs:
            self._pad(file, start + new.offset)
            changed = self._changes.tensor(new.name) if self._changes else None
            if changed is not None or new.kind != old.kind:
                floats = self._floats(old) if changed is None else np.atleast_2d(changed)
                file.write(from_floats(floats, new.kind).tobytes())
            elif old.name in _CUT_TENSORS:
                file.write(self._rows(old)[self._ids].tobytes())
            else:
                self._copy(file, old)
        self._pad(file, offset)
        self._copy(file, self._embeddings)

    def _metadata(self, infos: list[TensorInfo], offset: int) -> bytes:
        own = [
            gguf_encoding.encode_text(embeddings.SOURCE, self._sha256),
            gguf_encoding.encode_number(embeddings.N_VOCAB, UINT32, self._n_vocab),
            gguf_encoding.encode_numbers(embeddings.TOKEN_IDS, UINT32, self._ids),
            gguf_encoding.encode_number(embeddings.WIDTH, UINT32, self._embeddings.shape[0]),
            gguf_encoding.encode_number(embeddings.KIND, UINT32, self._embeddings.kind),
            gguf_encoding.encode_number(embeddings.OFFSET, UINT64, offset),
            gguf_encoding.encode_number(embeddings.SCALE, FLOAT32, self._scale),
        ]
        # The architecture comes first, as everywhere.
        fields = [self._encode(field) for field in self._gguf.fields.values()]
        fields[1:1] = own
        head = gguf_encoding.encode_head(len(infos), len(fields))
        return head + b"".join(fields) + b"".join(map(gguf_encoding.encode_tensor_info, infos))

    def _encode(self, field: Field) -> bytes:
        """Encode a field of the source for the cut model."""
        if field.key == TOKENS:
            texts = self._gguf.texts(TOKENS)
            return gguf_encoding.encode_texts(field.key, [texts[i] for i in self._ids])
        if field.key in (SCORES, TOKEN_TYPES):
            kept = self._gguf.numbers(field.key)[self._ids]
            return gguf_encoding.encode_numbers(field.key, field.kind, kept)
        if field.key == MERGES:
            return gguf_encoding.encode_texts(field.key, self._kept_merges())
        if field.key == self._vocab_size:
            return gguf_encoding.encode_number(field.key, field.kind, len(self._ids))
        if field.key == self._n_layer and self._changes:
            return gguf_encoding.encode_number(field.key, field.kind, len(self._changes.layers))
        token = _named_token(field)
        if token is not None and 0 <= token < self._n_vocab:
            row = int(np.searchsorted(self._ids, token))
            return gguf_encoding.encode_number(field.key, field.kind, row)
        return self._gguf.raw(field)

    def _kept_merges(self) -> list[bytes]:
        """Return the merges whose parts and result are kept tokens."""
        texts = self._gguf.texts(TOKENS)
        kept = {texts[i] for i in self._ids}
        found = []
        for merge in self._gguf.texts(MERGES):
            left, _, right = merge.partition(b" ")
            if left in kept and right in kept and left + right in kept:
                found.append(merge)
        return found

    def _new_infos(self) -> list[tuple[TensorInfo, TensorInfo]]:
        """Return pairs of the source's tensor and the new file's."""
        pairs, offset = [], 0
        for old in self._gguf.tensors:
            name = self._new_name(old.name)
            if name is None:
                continue
            shape = old.shape
            if old.name in _CUT_TENSORS:
                shape = (*shape[:-1], len(self._ids))
            new = TensorInfo(name, shape, self._new_kind(old), offset)
            pairs.append((old, new))
            offset = aligned(offset + new.bytes, self._gguf.alignment)
        return pairs

    def _new_name(self, name: str) -> str | None:
        """Return a tensor's name in the new file; None: its layer is left out."""
        if self._changes is None or not name.startswith("blk."):
            return name
        _, layer, part = name.split(".", 2)
        layers = self._changes.layers
        return f"blk.{layers.index(int(layer))}.{part}" if int(layer) in layers else None

    def _new_kind(self, old: TensorInfo) -> int:
        if self._changes is None or not old.is_matrix:
            return old.kind
        kinds = [type_number(name) for name in (self._changes.type_, "q8_0", "f16")]
        return next(kind for kind in kinds if old.columns % block_size(kind) == 0)

    def _floats(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        """Return a matrix of the source without cut rows."""
        rows = self._rows(info)
        rows = rows[self._ids] if info.name in _CUT_TENSORS else rows
        return to_floats(rows, info.kind, info.columns)

    def _rows(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """Return a matrix of the source as rows of bytes; a vector's elements are rows."""
        size = info.bytes
        raw = np.frombuffer(self._data, np.uint8, size, self._gguf.data_start + info.offset)
        return raw.reshape(info.shape[-1], size // info.shape[-1])

    def _copy(self, file: BinaryIO, info: TensorInfo) -> None:
        start = self._gguf.data_start + info.offset
        end = start + info.bytes
        for at in range(start, end, _CHUNK):
            file.write(self._data[at : min(end, at + _CHUNK)])

    @staticmethod
    def _pad(file: BinaryIO, offset: int) -> None:
        file.write(bytes(offset - file.tell()))


def _named_token(field: Field) -> int | None:
    """Return the token that a field such as tokenizer.ggml.eos_token_id names; None for other fields."""
    names_one = field.key.startswith("tokenizer.ggml.") and field.key.endswith("_token_id")
    return field.value if names_one and isinstance(field.value, int) else None


@contextmanager
def _mapped(path: Path) -> Iterator[mmap]:
    file = path.open("rb")
    with file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        yield data
