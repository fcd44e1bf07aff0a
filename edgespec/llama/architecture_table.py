"""What a tiny model of each architecture is made from: the metadata of its published models, but small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Value = bool | int | float | str | tuple[int, ...]
"""A number, a text, or an integer for each layer."""

DENSE, EXPERTS, HYBRID, RECURRENT, MTP = "dense", "experts", "hybrid", "recurrent", "mtp"


@dataclass(frozen=True)
class Architecture:
    """One architecture that the library knows."""

    gguf_name: str
    """`general.architecture` of its files."""
    kinds: tuple[str, ...]
    """DENSE or EXPERTS; HYBRID or RECURRENT, if it is; MTP if it has a head that drafts."""
    metadata: Mapping[str, Value] = field(default_factory=dict)
    """Beyond COMMON, or in place of it, without the architecture's name before each key."""
    without: str = ""
    """Matches tensors that the library would load but its published models do not have."""
    with_: str = ""
    """Matches tensors among UNCOMMON that they do have."""


N_LAYERS = 2

COMMON: dict[str, Value] = {
    "context_length": 1024,
    "embedding_length": 64,
    "block_count": N_LAYERS,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}

UNCOMMON = (
    r"attn_(q|k|v|qkv|output)\.bias|ffn_(gate|up|down)\.bias|rope_|scale$|dense_"
    r"|nextn\.(embed_tokens|shared_head_head)"
)
"""Matches tensors that the library loads where a file has them, and that few have."""

_SSM: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
_EXPERTS: dict[str, Value] = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}
_SHARED: dict[str, Value] = {**_EXPERTS, "expert_shared_feed_forward_length": 32}
_DELTA_NET: dict[str, Value] = {
    **_SSM,
    "ssm.inner_size": 64,
    "full_attention_interval": 2,
    "rope.dimension_sections": (3, 3, 2, 0),
}

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture("qwen3moe", (EXPERTS,), _EXPERTS),
    "qwen35": Architecture("qwen35", (DENSE, HYBRID), _DELTA_NET),
    "qwen35moe": Architecture("qwen35moe", (EXPERTS, HYBRID), {**_DELTA_NET, **_SHARED}),
    "openai-moe": Architecture(
        "gpt-oss", (EXPERTS,), {**_EXPERTS, "attention.sliding_window": 32}, with_=r"bias"
    ),
    "lfm2": Architecture(
        "lfm2", (DENSE, HYBRID), {"shortconv.l_cache": 3, "attention.head_count_kv": (0, 2)}
    ),
    "mamba2": Architecture("mamba2", (DENSE, RECURRENT), {**_SSM, "attention.head_count": 0}),
}
"""By the name that llama.cpp's sources give it; "-mtp" marks one with the head that drafts."""


def _with_mtp(architecture: Architecture) -> Architecture:
    metadata = {**architecture.metadata, "block_count": N_LAYERS + 1, "nextn_predict_layers": 1}
    return replace(architecture, kinds=(*architecture.kinds, MTP), metadata=metadata)


ARCHITECTURES |= {f"{name}-mtp": _with_mtp(ARCHITECTURES[name]) for name in ("qwen35", "qwen35moe")}
