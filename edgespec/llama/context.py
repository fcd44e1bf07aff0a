"""Make a llama_context with the settings that edgespec's sessions need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.choices import CacheType
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.weights import Model

_FLASH_ATTN_DISABLED, _FLASH_ATTN_ENABLED = 0, 1
_CACHE_TYPES = {"f16": 1, "q8_0": 8}  # enum ggml_type
_POOLING_NONE = 0
_QUANTIZED_TOGETHER = 32  # numbers of a head in Q8_0


def with_cache_type(header: GGUFHeader, cache_type: CacheType) -> GGUFHeader:
    """Return the header of the same model with caches in `cache_type`; raise UsageError if it cannot be."""
    for width in (header.head_dim_k, header.head_dim_v):
        if cache_type != "f16" and width % _QUANTIZED_TOGETHER:
            problem = f"its heads' width, {width}, must be a multiple of {_QUANTIZED_TOGETHER}; leave it out"
            raise UsageError(f"{header.path}: {problem}", field="cache_type", value=cache_type)
    return replace(header, cache_type=cache_type)


def create_context(  # noqa: PLR0913 - sizes, each by its name
    model: Model,
    *,
    n_ctx: int,
    n_threads: int,
    n_batch: int,
    n_logits_max: int,
    n_sequences: int,
    n_snapshots: int = 0,
    on_operation: Any = None,  # noqa: ANN401 - a function of ctypes
) -> llama.llama_context_p:
    """Return a context of `n_ctx` tokens for `n_sequences` sequences; the caller frees it.

    `n_batch`: most tokens of a pass. `n_logits_max`: most rows of logits. `n_snapshots`: earlier states that
    the last pass leaves of each sequence, where a model keeps a state. `on_operation`: a
    `ggml_backend_sched_eval_callback`, kept by the caller. Raises EdgespecError if the library fails.
    """
    params = llama.llama_context_default_params()
    params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP if model.is_mtp else llama.LLAMA_CONTEXT_TYPE_DEFAULT
    params.ctx_other = model.context_beside
    params.n_ctx = n_ctx
    # n_batch == n_ubatch keeps the rows of logits in the order of the tokens.
    params.n_batch = params.n_ubatch = n_batch
    params.n_outputs_max = max(n_logits_max, n_sequences)  # the library plans a pass with one for each
    params.n_seq_max = n_sequences
    params.n_rs_seq = n_snapshots
    params.kv_unified = n_sequences > 1  # sequences can share cells of one cache
    params.n_threads = params.n_threads_batch = n_threads
    params.type_k = params.type_v = _CACHE_TYPES[model.header.cache_type]
    # edgespec's kernels get attention only this way; llama.cpp's own flash attention is slower than without,
    # but it alone reads a quantized cache.
    flash = model.uses_kernels or model.header.cache_type != "f16"
    params.flash_attn_type = _FLASH_ATTN_ENABLED if flash else _FLASH_ATTN_DISABLED
    params.pooling_type = _POOLING_NONE  # hidden states, where they are asked for, are those of each token
    params.offload_kqv = model.remote is not None  # a node holds the cache of its layers
    params.no_perf = True
    if on_operation is not None:
        params.cb_eval = on_operation
    params.swa_full = True  # a sliding window that drops tokens cannot be rewound
    context: llama.llama_context_p | None = backend.create(
        lambda _: llama.llama_init_from_model(model.handle, params), llama.llama_free, model.remote
    )
    if context is None:
        reason = backend.failure_reason()
        raise EdgespecError(f"{model.path}: no context of {n_ctx} tokens: {reason}; choose a smaller context")
    if not model.is_causal:
        llama.llama_set_causal_attn(context, False)
    return context
