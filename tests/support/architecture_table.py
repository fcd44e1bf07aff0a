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
    kinds: tuple[str, ...] = (DENSE,)
    """DENSE or EXPERTS; HYBRID or RECURRENT, if it is; MTP if it has a head that drafts."""
    metadata: Mapping[str, Value] = field(default_factory=dict)
    """Beyond COMMON, or in place of it, without the architecture's name before each key."""
    has: str = "^$"
    """Matches tensors among UNCOMMON that its published models have."""
    lacks: str = "^$"
    """Matches other tensors that they do not have, although the library would load them."""
    fused: bool = False
    """Whether queries, keys and values are products of one matrix."""
    embedding_scale: float = 1.0
    """What the library multiplies the embeddings by."""
    post_norm: float = 1.0
    """How much a layer adds, where a norm decides that: less in many layers, which would make chaos."""


N_LAYERS, N_EMBD = 2, 64

COMMON: dict[str, Value] = {
    "context_length": 1024,
    "embedding_length": N_EMBD,
    "block_count": N_LAYERS,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}

UNCOMMON = (
    r"attn_(q|k|v|qkv|output)\.bias|ffn_(gate|up|down)\.bias|rope_|scale$|dense_"
    r"|nextn\.(embed_tokens|shared_head_head)"
)
"""Matches tensors that the library loads where a file has them, and that few have."""

NOT_QUANTIZED = (
    r"norm|ffn_gate_inp\.|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv"
    r"|time_mix_([wavg]\d|lerp)"
)
"""Matches matrices that llama.cpp leaves as they are when it quantizes a model."""

_SSM: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * N_EMBD,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
_DELTA_NET: dict[str, Value] = {**_SSM, "ssm.inner_size": N_EMBD, "full_attention_interval": 2}
_EXPERTS: dict[str, Value] = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
_SHARED: dict[str, Value] = {**_EXPERTS, "expert_shared_feed_forward_length": 32}
_SIGMOID: dict[str, Value] = {
    **_EXPERTS,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}
_WINDOW: dict[str, Value] = {"attention.sliding_window": 32}
# Every second layer looks back on everything.
_WINDOWS: dict[str, Value] = {**_WINDOW, "attention.sliding_window_pattern": 2}
_YARN: dict[str, Value] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.07,
}
_SECTIONS: dict[str, Value] = {"rope.dimension_sections": (3, 3, 2, 0)}
_SHORT_CONVOLUTION: dict[str, Value] = {"shortconv.l_cache": 3, "attention.head_count_kv": (0, 2)}
_BIASES, _TIED = r"attn_[qkv]\.bias", r"^output\.weight"
_OWN_TOKENS = r"nextn\.(embed_tokens|shared_head_head)\.weight"
_ROOT = N_EMBD**0.5

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", has="rope_freqs"),
    "qwen2": Architecture("qwen2", has=_BIASES),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3moe", (EXPERTS,), _EXPERTS),
    "qwen35": Architecture("qwen35", (DENSE, HYBRID), {**_DELTA_NET, **_SECTIONS}),
    "qwen35moe": Architecture("qwen35moe", (EXPERTS, HYBRID), {**_DELTA_NET, **_SECTIONS, **_SHARED}),
    "qwen3next": Architecture("qwen3next", (EXPERTS, HYBRID), {**_DELTA_NET, **_SHARED}, lacks="ssm_in"),
    "gemma2": Architecture(
        "gemma2",
        metadata={**_WINDOWS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        lacks=_TIED,
        embedding_scale=_ROOT,
    ),
    "gemma3": Architecture("gemma3", metadata=_WINDOWS, lacks=_TIED, embedding_scale=_ROOT),
    "gemma3n": Architecture(  # the library knows only that the layers from the 21st on share a cache
        "gemma3n", metadata={**_WINDOWS, "block_count": 22}, lacks=_TIED, embedding_scale=_ROOT, post_norm=0.3
    ),
    "gemma4": Architecture(
        "gemma4",
        metadata={
            **_WINDOW,
            "block_count": 4,
            "attention.sliding_window_pattern": (True, False, True, False),
            "attention.shared_kv_layers": 2,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "rope.dimension_count_swa": 16,
            "embedding_length_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
        },
        has="rope_freqs",
        lacks=_TIED,
        embedding_scale=_ROOT,
        post_norm=0.6,
    ),
    "openai-moe": Architecture("gpt-oss", (EXPERTS,), {**_EXPERTS, **_WINDOW, **_YARN}, has="bias"),
    "lfm2": Architecture("lfm2", (DENSE, HYBRID), _SHORT_CONVOLUTION),
    "lfm2moe": Architecture(
        "lfm2moe", (EXPERTS, HYBRID), {**_SIGMOID, **_SHORT_CONVOLUTION, "expert_shared_count": 0}
    ),
    "granite-hybrid": Architecture(
        "granitehybrid",
        (EXPERTS, HYBRID),
        {
            **_SSM,
            **_SHARED,
            "attention.head_count_kv": (0, 2),
            "attention.scale": 0.2,
            "embedding_scale": 4.0,
            "residual_scale": 0.7,
            "logit_scale": 1.2,
            "rope.scaling.finetuned": False,  # no rotation
        },
        embedding_scale=4.0,
    ),
    "nemotron-h": Architecture(
        "nemotron_h",
        (DENSE, HYBRID),
        {
            **_SSM,
            "block_count": 4,
            "feed_forward_length": (0, 96, 0, 96),
            "attention.head_count_kv": (0, 0, 2, 0),
        },
    ),
    "falcon-h1": Architecture("falcon-h1", (DENSE, HYBRID), _SSM, lacks="ssm_norm"),
    "mamba2": Architecture("mamba2", (DENSE, RECURRENT), {**_SSM, "attention.head_count": 0}),
    "rwkv7": Architecture(
        "rwkv7",
        (DENSE, RECURRENT),
        {
            "attention.head_count": 0,
            "embedding_length": 128,
            "wkv.head_size": 64,  # the only one that the library computes rightly
            "token_shift_count": 2,
            "attention.decay_lora_rank": 8,
            "attention.iclr_lora_rank": 8,
            "attention.value_residual_mix_lora_rank": 8,
            "attention.gate_lora_rank": 8,
        },
    ),
    "mistral3": Architecture("mistral3", metadata={**_YARN, "attention.temperature_scale": 0.1}),
    "phi3": Architecture(
        "phi3", metadata={"rope.scaling.original_context_length": 128}, has="rope_factors", fused=True
    ),
    "olmo2": Architecture("olmo2", metadata=_WINDOWS),
    "glm4": Architecture("glm4", metadata={"rope.dimension_count": 8}, has=_BIASES),
    "glm4-moe": Architecture(
        "glm4moe", (EXPERTS,), {**_SIGMOID, "rope.dimension_count": 8}, has=_BIASES + "|" + _OWN_TOKENS
    ),
    "deepseek2": Architecture(
        "deepseek2",
        (EXPERTS,),
        {
            **_SIGMOID,
            **_YARN,
            "rope.dimension_count": 16,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 32,
            "attention.kv_lora_rank": 32,
            "attention.key_length": 48,
            "attention.value_length": 32,
            "attention.key_length_mla": 32,
            "attention.value_length_mla": 16,
        },
        has=_OWN_TOKENS,
    ),
    "smollm3": Architecture("smollm3", metadata={"block_count": 4}),  # every fourth layer has no rotation
    "exaone4": Architecture("exaone4", has="rope_freqs"),
    "seed-oss": Architecture("seed_oss", has=_BIASES),
}
"""By the name that llama.cpp's sources give it; "-mtp" marks one with the head that drafts."""


def _with_mtp(architecture: Architecture) -> Architecture:
    metadata = {**architecture.metadata, "block_count": N_LAYERS + 1, "nextn_predict_layers": 1}
    return replace(architecture, kinds=(*architecture.kinds, MTP), metadata=metadata)


ARCHITECTURES |= {
    f"{name}-mtp": _with_mtp(ARCHITECTURES[name])
    for name in ("qwen35", "qwen35moe", "qwen3next", "glm4-moe", "deepseek2")
}
