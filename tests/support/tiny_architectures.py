"""Architectures of tiny models that the kernels can run whole: arguments of `write_tiny_gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_gguf import write_tiny_gguf

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"vectors": {"attn_q.bias": 256, "attn_k.bias": 128, "attn_v.bias": 128}},
    "gemma3": {
        "n_layer": 6,  # the sixth looks back on everything, the others on a window
        "head_dim": 128,
        "vectors": {
            "attn_q_norm.weight": 128,
            "attn_k_norm.weight": 128,
            "post_attention_norm.weight": 256,
            "post_ffw_norm.weight": 256,
        },
        "extra": {
            "gemma3.attention.key_length": 128,
            "gemma3.attention.value_length": 128,
            "gemma3.attention.sliding_window": 64,
            "gemma3.rope.freq_base": 1e6,
        },
    },
}


def write_architecture(directory: Path, name: str, n_ctx: int) -> Path:
    """Write a model of one of the ARCHITECTURES with float32 weights, to be quantized."""
    shape = {"n_embd": 256, "n_ff": 512, "n_head": 4, "n_head_kv": 2, "n_ctx": n_ctx, **ARCHITECTURES[name]}
    return write_tiny_gguf(directory / f"{name}.gguf", architecture=name, **shape)
