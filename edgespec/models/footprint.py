"""Estimate, before loading, how much memory models take, and check whether they fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import OutOfMemory
from edgespec.llama.cache_types import possible_types, with_cache_type
from edgespec.llama.choices import CacheType
from edgespec.llama.gguf_header import GGUFHeader, read_tensors
from edgespec.llama.kernel_coverage import multiplied, packing_growth
from edgespec.llama.rollback import RollbackSize
from edgespec.models.entries import ModelShape
from edgespec.platform.memory import memory_left

PROCESS_BYTES = 64 << 20
"""Memory of the process without its models."""
USUAL_CTX = 2048
"""Tokens of context to assume if none are given."""
# Measured over Qwen2.5-Coder 1.5B and 0.5B, SmolLM2 and Gemma 3 270M: what a loaded model holds beside
# weights, cache and compute buffers (tokenizer tables, graph) for each token of its vocabulary.
_BYTES_PER_VOCAB = 400
CTX_STEP = 256
"""llama.cpp rounds contexts up to this many tokens."""

DRAFT_MARKS = 8
"""Earlier states that a draft model can go back to: it drafts a token a pass, mostly no more of them."""
_FEWEST_SNAPSHOTS, _MOST_SNAPSHOTS = 8, 32
_SNAPSHOTS_SHARE = 1 / 16
# Of the file's bytes, for all snapshots: writing larger ones costs more than reading accepted tokens again
# (docs/measurements/kernels.md).


def target_rollback(header: GGUFHeader, *, parallel: int = 1, drafts: bool = True) -> RollbackSize:
    """The room that a target's cache sets aside to take drafts back: as many tokens as a draft should have.

    Several texts at once, one that is decoded plainly, and states that are large beside the weights do
    without snapshots: each is a state of memory.
    """
    if not header.has_snapshots or parallel > 1 or not drafts:
        return RollbackSize()
    affordable = int(_SNAPSHOTS_SHARE * header.file_bytes) // max(1, header.state_bytes)
    if affordable < _FEWEST_SNAPSHOTS:
        return RollbackSize()
    return RollbackSize(n_snapshots=min(_MOST_SNAPSHOTS, affordable))


def draft_rollback() -> RollbackSize:
    """The room that a draft model's cache sets aside."""
    return RollbackSize(n_marks=DRAFT_MARKS)


def states_bytes(header: GGUFHeader, rollback: RollbackSize, n_sequences: int = 1) -> int:
    """Return the bytes of the states in a cache of a model that keeps such; else 0."""
    return rollback.n_states(n_sequences) * header.state_bytes


def required_bytes(header: GGUFHeader, n_ctx: int) -> int:
    """Return the estimated memory of a loaded model with one session of `n_ctx` tokens."""
    return loaded_bytes(weight_bytes(header), shape_of(header), n_ctx)


def weight_bytes(header: GGUFHeader) -> int:
    """Return the bytes of the weights in memory: the file's, and what packing for the kernels adds.

    Of a header that stands for a part of its file, such as the layers that are not on nodes, the same share.
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

    With `weights_loaded`, the weights are not counted. `more_states`: bytes of states beside those of one
    text that drafts.
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
    """Return the models of a pair with a context of `n_ctx`, of the draft at most what it was trained for."""
    return [(header, n_ctx)] + ([(draft, min(draft.n_ctx_train, n_ctx))] if draft else [])


def fitting_tokens(
    header: GGUFHeader,
    draft: GGUFHeader | None = None,
    root: Path = Path("/"),
    *,
    weights_loaded: bool = False,
    more_states: int = 0,
) -> dict[CacheType, int]:
    """Return how many tokens of context fit in memory, by the type of the cache that the model can have.

    At most what it was trained for. `draft`: the header of a draft that has as many. Others as for
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
