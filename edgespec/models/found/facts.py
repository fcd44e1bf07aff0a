"""The facts that a model's header tells, read once: a scan of a large store then only looks at file times.

cache_root()/model_facts.json    path -> identity of the model's files, its facts
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.llama.gguf import TensorInfo, type_name
from edgespec.llama.gguf_header import (
    GGUFHeader,
    check_complete_file,
    other_kind,
    read_tensors,
    tokenizer_fingerprint,
)
from edgespec.llama.kernel_coverage import multiplied
from edgespec.llama.kernel_timing import MatrixShape
from edgespec.llama.quantize import QUANT_TYPES
from edgespec.models.entries import Entry, Registry
from edgespec.models.footprint import shape_of
from edgespec.models.found.files import FoundModel, real_path
from edgespec.models.hub_names import other_files
from edgespec.platform.kept import MODEL_FACTS
from edgespec.platform.state_file import FileEntry, FileTable, StoredFiles, identity_of

_MOST = 2000  # files that are remembered: the oldest are forgotten
_TYPES = {number: name.upper() for name, number in QUANT_TYPES.items()} | {
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 26: "IQ3_S",
    27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 31: "IQ1_M", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""`enum llama_ftype` -> name."""


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts of a model's header."""

    kind: str
    """The kind of file it is, if no text-generating model; else ""."""
    architecture: str
    title: str
    """`general.name`, or ""."""
    parameters: int
    """Weights in the file; an embedding that is stored twice counts twice."""
    quantization: str
    """Such as "Q4_K_M"; of a mixture without a name, the type of most bytes."""
    vocabulary: str
    """Fingerprint of its tokenizer (`tokenizer_fingerprint`); "" without one."""
    n_vocab: int
    ends: tuple[int, ...]
    """Ids of the tokens that end a text and begin one, -1 for none: a draft has to have the target's."""
    n_ctx_train: int
    shape: tuple[int, int, int]
    """Cache bytes of a token, attention heads, and `ModelShape.width`."""
    pass_bytes: int
    """Bytes of weights that a pass over one token reads: of a layer of experts, those that it uses."""
    matrices: tuple[MatrixShape, ...]
    """The matrices that a pass multiplies with; those of one type and width are counted as one."""


class _FileFacts(FileEntry, frozen=True):
    facts: ModelFacts


class FactsReader:
    """Reads the facts of many models; `save` stores what was new."""

    def __init__(self) -> None:
        """Begin with what is stored; without a cache every header is read."""
        self._table = FileTable(MODEL_FACTS.path(), StoredFiles[_FileFacts], _MOST)
        self._known = self._table.read()
        self._new: dict[str, _FileFacts] = {}

    def read(self, model: FoundModel) -> ModelFacts:
        """Return the facts of a model. Raises EdgespecError for a file that is no whole GGUF."""
        try:
            path = real_path(model.path)
            files = identity_of(path, *other_files(model.path))
        except OSError as error:
            raise EdgespecError(describe_os_error(error)) from None
        known = self._known.get(str(path))
        if known and known.files == files:
            return known.facts
        facts = facts_of(check_complete_file(model.path))
        self._new[str(path)] = self._known[str(path)] = _FileFacts(files=files, facts=facts)
        return facts

    def save(self) -> None:
        """Store new facts; where nothing can be stored, they are read again the next time."""
        if self._new:
            self._table.add(self._new)
            self._new = {}


def facts_of(header: GGUFHeader) -> ModelFacts:
    """Return the facts of one header, without the cache."""
    kind = other_kind(header)
    if not kind and header.is_head:
        kind = "a draft head that edgespec made"
    tensors = read_tensors(header)
    has_words = header.has_tokenizer and not header.is_head
    shape = shape_of(header) if not kind else None
    return ModelFacts(
        kind=kind,
        architecture=header.architecture,
        title=header.name,
        parameters=sum(tensor.rows * tensor.columns * tensor.n_matrices for tensor in tensors),
        quantization=_quantization(header, tensors),
        vocabulary=tokenizer_fingerprint(header) if has_words else "",
        n_vocab=header.n_vocab,
        ends=tuple(_token(header, name) for name in ("eos", "bos")),
        n_ctx_train=header.n_ctx_train,
        shape=(shape.cache, shape.heads, shape.width) if shape else (0, 0, 0),
        pass_bytes=_pass_bytes(header, tensors),
        matrices=_merged(multiplied(tensors)),
    )


def _token(header: GGUFHeader, name: str) -> int:
    return next(iter(header.gguf.integers(f"tokenizer.ggml.{name}_token_id")), -1)


def _quantization(header: GGUFHeader, tensors: Sequence[TensorInfo]) -> str:
    named = next(iter(header.gguf.integers("general.file_type")), -1)
    if name := _TYPES.get(named):
        return name
    n_bytes: Counter[int] = Counter()
    for tensor in tensors:
        n_bytes[tensor.kind] += tensor.bytes
    return type_name(n_bytes.most_common(1)[0][0]).upper() if n_bytes else ""


def _merged(matrices: Sequence[MatrixShape]) -> tuple[MatrixShape, ...]:
    rows: Counter[tuple[int, int]] = Counter()
    for one in matrices:
        rows[one.type, one.columns] += one.rows
    return tuple(MatrixShape(kind, n, columns) for (kind, columns), n in rows.items())


def _pass_bytes(header: GGUFHeader, tensors: Sequence[TensorInfo]) -> int:
    def number(name: str) -> int:
        return next(iter(header.gguf.integers(f"{header.architecture}.{name}")), 0)

    experts, used = number("expert_count"), number("expert_used_count")
    share = used / experts if 0 < used < experts else 1.0
    looked_up = sum(tensor.bytes for tensor in tensors if tensor.name == "token_embd.weight")
    if not any(tensor.name == "output.weight" for tensor in tensors):
        looked_up = 0
    all_bytes = sum(tensor.bytes * (share if tensor.n_matrices > 1 else 1.0) for tensor in tensors)
    return int(all_bytes) - looked_up


# ---- a draft worth pulling for a target that nothing on this disk drafts for: one of its family ----

_PADDING = 0.01  # of a vocabulary: sizes of one family are padded to different lengths
_MOST_OF_TARGET = 0.5  # bytes of a draft, in the target's


def draft_to_pull(registry: Registry, name: str, facts: ModelFacts, size: int) -> Entry | None:
    """Return the draft of the pairs of models.toml that fits a target best; None if its family has no pair.

    `name`: what the target is called. The family with the longest name counts that is in the target's names:
    "Qwen2.5-Coder" before "Qwen2.5". Its vocabulary has to be as large as the target's.
    """
    names = _plain(f"{name} {facts.title}")
    best: tuple[int, Entry] | None = None
    for pair in registry.pairs.values():
        target, draft = registry.entries[pair.target], registry.entries[pair.partner(writes=True)]
        family = _plain(target.family)
        shape = registry.shape(draft)
        if not family or family not in names or draft.packed or shape is None:
            continue
        if abs(shape.vocabulary - facts.n_vocab) > _PADDING * facts.n_vocab:
            continue
        if not 0 < registry.bytes_to_pull(draft) <= _MOST_OF_TARGET * size:
            continue
        if best is None or len(family) > best[0]:
            best = len(family), draft
    return best[1] if best else None


def _plain(name: str) -> str:
    """Return a name's letters and digits, by which "qwen2.5-coder" is "Qwen2.5 Coder"."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())
