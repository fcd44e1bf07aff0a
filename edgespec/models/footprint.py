"""Facts from a model's header: the memory it will take once loaded, and what lists show.

cache_root()/model_facts.json    path -> identity of the model's files, its facts
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgespec.errors import EdgespecError, OutOfMemory, describe_os_error
from edgespec.llama.cache_types import possible_types, with_cache_type
from edgespec.llama.choices import CacheType
from edgespec.llama.gguf import TensorInfo, type_name
from edgespec.llama.gguf_header import (
    GGUFHeader,
    check_complete_file,
    other_kind,
    read_tensors,
    tokenizer_fingerprint,
)
from edgespec.llama.kernel_timing import MatrixShape
from edgespec.llama.kernels import multiplied, packing_growth
from edgespec.llama.quantize import QUANT_TYPES
from edgespec.llama.rollback import RollbackSize
from edgespec.models.on_disk import FoundModel, real_path
from edgespec.models.registry import Entry, ModelShape, Registry, other_files
from edgespec.platform.kept import MODEL_FACTS, FileEntry, FileTable, StoredFiles, identity_of
from edgespec.platform.machine import memory_left

PROCESS_BYTES = 64 << 20
"""Memory of the process without its models."""
USUAL_CTX = 2048
"""Tokens of context to assume if none are given."""
# Measured over Qwen2.5-Coder 1.5B and 0.5B, SmolLM2 and Gemma 3 270M: what a loaded model holds beside
# weights, cache and compute buffers (tokenizer tables, graph) for each token of its vocabulary.
_BYTES_PER_VOCAB = 400
MAX_DRAFT_CTX = 2048
"""Most tokens of context of a draft: more make it read longer, and few more of its tokens are accepted."""
CTX_STEP = 256
"""llama.cpp rounds contexts up to this many tokens."""

DRAFT_MARKS = 8
"""Earlier states that a draft model can go back to: it drafts a token a pass, mostly no more of them."""
_FEWEST_SNAPSHOTS, _MOST_SNAPSHOTS = 8, 32
_SNAPSHOTS_SHARE = 1 / 16
# Of the file's bytes, for all snapshots: writing larger ones costs more than reading accepted tokens again
# (docs/measurements/kernels.md).


def target_rollback(header: GGUFHeader, *, parallel: int = 1, drafts: bool = True) -> RollbackSize:
    """Return the room that a target's cache reserves for rewinding: as many tokens as a draft should have.

    Snapshots, which each take the memory of a state, are left out for several texts at once, for plain
    decoding, and if states are large compared with the weights.
    """
    if not header.has_snapshots or parallel > 1 or not drafts:
        return RollbackSize()
    affordable = int(_SNAPSHOTS_SHARE * header.file_bytes) // max(1, header.state_bytes)
    if affordable < _FEWEST_SNAPSHOTS:
        return RollbackSize()
    return RollbackSize(n_snapshots=min(_MOST_SNAPSHOTS, affordable))


def draft_rollback() -> RollbackSize:
    """Return the room that a draft model's cache reserves for rewinding."""
    return RollbackSize(n_marks=DRAFT_MARKS)


def states_bytes(header: GGUFHeader, rollback: RollbackSize, n_sequences: int = 1) -> int:
    """Return the bytes of the recurrent states in a cache; 0 for a model without them."""
    return rollback.n_states(n_sequences) * header.state_bytes


def required_bytes(header: GGUFHeader, n_ctx: int) -> int:
    """Return the estimated memory of a loaded model with one session of `n_ctx` tokens."""
    return loaded_bytes(weight_bytes(header), shape_of(header), n_ctx)


def weight_bytes(header: GGUFHeader) -> int:
    """Return the bytes of the weights in memory: the file's, and those that packing for the kernels adds.

    A header may stand for a part of its file, such as the layers that are not on nodes: then the same share.
    """
    tensors = read_tensors(header)
    share = min(1.0, header.file_bytes / max(1, sum(tensor.bytes for tensor in tensors)))
    return header.file_bytes + int(share * packing_growth(multiplied(tensors)))


def cell_bytes(header: GGUFHeader) -> int:
    """Return the bytes of the cache for one token, at least 1: recurrent models have no cache of tokens."""
    return max(1, header.kv_bytes(CTX_STEP) // CTX_STEP)


def session_bytes(header: GGUFHeader, n_ctx: int) -> int:
    """Return the estimated memory of a session of `n_ctx` tokens, without the weights."""
    return loaded_bytes(0, shape_of(header), n_ctx)


def shape_of(header: GGUFHeader) -> ModelShape:
    """Return the figures of the header that determine the model's memory without its weights."""
    return ModelShape(
        cache=cell_bytes(header),
        heads=header.n_head if header.cache_type == "f16" else 0,  # flash attention keeps no scores
        width=header.n_ff + 2 * header.n_embd,
        vocabulary=header.n_vocab,
        states=states_bytes(header, target_rollback(header)),
    )


def loaded_bytes(
    file_bytes: int, shape: ModelShape, n_ctx: int, n_batch: int = 512, n_logits_max: int = 64
) -> int:
    """Return the estimated memory of a model of this size and shape with `n_ctx` tokens of context.

    That is the weights, the cache, states, and an allowance for the compute buffers: mostly attention
    scores (heads x batch x context) and rows of logits.
    """
    cache = shape.cache * math.ceil(n_ctx / CTX_STEP) * CTX_STEP
    floats = min(n_batch, n_ctx) * ((shape.heads + 1) * n_ctx + shape.width)
    floats += n_logits_max * shape.vocabulary
    return file_bytes + cache + shape.states + 4 * floats + _BYTES_PER_VOCAB * shape.vocabulary


def fits_in_memory(
    models: Sequence[tuple[GGUFHeader, int]],
    root: Path = Path("/"),
    *,
    weights_loaded: bool = False,
    more_states: int = 0,
) -> None:
    """Raise OutOfMemory, with the figures, if `models` (header, n_ctx) do not fit together.

    With `weights_loaded`, the weights are not counted. `more_states`: bytes of states in addition to those of
    one drafting text.
    """
    left = memory_left(root)
    needs = _needs(models, weights_loaded=weights_loaded)
    required = PROCESS_BYTES + sum(needs) + max(0, more_states)
    if left is None or required <= left.bytes:
        return
    shares = ", ".join(
        f"{header.path.name} {_gib(need)}, of it {_gib(header.kv_bytes(n_ctx))} for {n_ctx} tokens of context"
        + (f" and {_gib(shape_of(header).states)} for states" if header.state_bytes else "")
        for (header, n_ctx), need in zip(models, needs, strict=True)
    )
    raise OutOfMemory(
        f"not enough memory: about {_gib(required)} needed ({shares}), {_gib(left.bytes)} available"
        + (f" under {left.limit}" if left.limit else "")
        + "; choose a smaller quantization or context, or "
        + ("raise that limit" if left.limit else "close other programs")
    )


def with_draft(header: GGUFHeader, draft: GGUFHeader | None, n_ctx: int) -> list[tuple[GGUFHeader, int]]:
    """Return the models of a pair with a context of `n_ctx`, the draft's capped at the most that it has."""
    return [(header, n_ctx)] + ([(draft, min(draft.n_ctx_train, n_ctx, MAX_DRAFT_CTX))] if draft else [])


def fitting_tokens(
    header: GGUFHeader,
    draft: GGUFHeader | None = None,
    root: Path = Path("/"),
    *,
    weights_loaded: bool = False,
    more_states: int = 0,
) -> dict[CacheType, int]:
    """Return how many tokens of context fit in memory, for each cache type that the model can have.

    They are capped at what it was trained for. `draft`: the header of its draft. Other arguments as for
    `fits_in_memory`.
    """
    left = memory_left(root)
    sizes = range(CTX_STEP, header.n_ctx_train + CTX_STEP, CTX_STEP)

    def fitting(typed: GGUFHeader) -> int:
        def required(size: int) -> int:
            models = with_draft(typed, draft, min(size, typed.n_ctx_train))
            return PROCESS_BYTES + sum(_needs(models, weights_loaded=weights_loaded)) + max(0, more_states)

        n = len(sizes) if left is None else bisect_right(sizes, left.bytes, key=required)
        return min(n * CTX_STEP, header.n_ctx_train)

    return {one: fitting(with_cache_type(header, one)) for one in possible_types(header)}


def _needs(models: Sequence[tuple[GGUFHeader, int]], *, weights_loaded: bool) -> list[int]:
    needed = session_bytes if weights_loaded else required_bytes
    return [needed(header, n_ctx) for header, n_ctx in models]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"


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
    """Reads the facts of many models; `save` stores the new ones."""

    def __init__(self) -> None:
        """Begin with the stored facts; without them every header is read."""
        self._table = FileTable(MODEL_FACTS.path(), StoredFiles[_FileFacts], _MOST)
        self._known = self._table.read()
        self._new: dict[str, _FileFacts] = {}

    def read(self, model: FoundModel) -> ModelFacts:
        """Return the facts of a model. Raises EdgespecError for an incomplete or invalid GGUF file."""
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
        """Store new facts; if that fails, they are read again next time."""
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

    `name`: the target's. The family with the longest name that occurs in the target's names counts:
    "Qwen2.5-Coder" before "Qwen2.5". Its vocabulary must be as large as the target's.
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
    """Return a name's letters and digits in lower case, so that "qwen2.5-coder" equals "Qwen2.5 Coder"."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())
