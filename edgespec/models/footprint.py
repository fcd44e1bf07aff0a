"""What a loaded model takes of memory, told from its shape before it is loaded; and whether models fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.models.entries import Shape
from edgespec.platform.memory import available_bytes

PROCESS_BYTES = 64 << 20
"""What the process holds beside its models."""
USUAL_CTX = 2048
"""Tokens of context for which it is asked whether models fit, where nobody says how many are wanted."""
# Measured over Qwen2.5-Coder 1.5B and 0.5B, SmolLM2 and Gemma 3 270M: what a loaded model holds beside
# weights, cache and compute buffers (tokenizer tables, graph) for each token of its vocabulary.
_BYTES_PER_VOCAB = 400
CTX_STEP = 256
"""llama.cpp rounds contexts up to this many tokens."""


def required_bytes(header: GGUFHeader, n_ctx: int) -> int:
    """Return an estimate of the memory a loaded model with one session of `n_ctx` tokens holds."""
    return loaded_bytes(header.file_bytes, shape_of(header), n_ctx)


def shape_of(header: GGUFHeader) -> Shape:
    """Return what the header says of the memory that the model takes beside its weights."""
    return Shape(
        cache=header.kv_bytes(CTX_STEP) // CTX_STEP,
        heads=header.n_head,
        width=header.n_ff + 2 * header.n_embd,
        vocabulary=header.n_vocab,
    )


def loaded_bytes(
    file_bytes: int, shape: Shape, n_ctx: int, n_batch: int = 512, n_logits_max: int = 64
) -> int:
    """Return an estimate of the memory that a model of this size and shape holds with `n_ctx` tokens.

    Weights, the F16 cache, and an allowance for the compute buffers, in which the attention scores
    (heads x batch x context) and the logits rows dominate.
    """
    cache = shape.cache * math.ceil(n_ctx / CTX_STEP) * CTX_STEP
    floats = min(n_batch, n_ctx) * ((shape.heads + 1) * n_ctx + shape.width)
    floats += n_logits_max * shape.vocabulary
    return file_bytes + cache + 4 * floats + _BYTES_PER_VOCAB * shape.vocabulary


def fits_in_memory(
    models: Sequence[tuple[GGUFHeader, int]], root: Path = Path("/"), *, weights_loaded: bool = False
) -> None:
    """Raise EdgespecError, with the figures, when `models` (header, n_ctx) cannot fit together.

    With `weights_loaded`, only what their contexts will take is counted.
    """
    available = available_bytes(root)
    needs = [
        required_bytes(header, n_ctx) - (header.file_bytes if weights_loaded else 0)
        for header, n_ctx in models
    ]
    required = PROCESS_BYTES + sum(needs)
    if available is None or required <= available:
        return
    shares = ", ".join(
        f"{header.path.name} {_gib(need)}, of it {_gib(header.kv_bytes(n_ctx))} for {n_ctx} tokens of context"
        for (header, n_ctx), need in zip(models, needs, strict=True)
    )
    raise EdgespecError(
        f"not enough memory: about {_gib(required)} needed ({shares}), {_gib(available)} available; "
        "choose a smaller quantization or context, or close other programs"
    )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"
