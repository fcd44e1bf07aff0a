"""Tiny random models that read images: a text model and the mmproj beside it, for projectors that people use.

    write_tower("gemma3", folder)   ->   folder/gemma3.gguf, folder/mmproj-gemma3.gguf

The encoders have the tensors of the published ones, in their order of layers, but small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from architecture_table import ARCHITECTURES, N_EMBD, Architecture
from tiny_models import make_tiny

_WIDTH, _HEADS, _FF, _LAYERS, _PATCH = 32, 2, 48, 2, 8

_SECTIONS = {"rope.dimension_sections": (4, 2, 2, 0)}
_VISION = ("<|vision_start|>", "<|vision_end|>")


@dataclass(frozen=True)
class Tower:
    """One kind of projector, and the text model that it goes with."""

    text: Architecture
    projector: str
    """`clip.projector_type`."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes of the projector's own tensors, as numpy has them."""
    n_patches: int = 64
    """Rows of learned positions; 0: it has none."""
    image_size: int = 64
    tokens: tuple[str, ...] = ()
    """Control tokens around its images."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    """Endings of tensors among the usual ones that it does not have."""
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of more tensors of each layer."""


def _linear(name: str, n_in: int, n_out: int = N_EMBD) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}


TOWERS: dict[str, Tower] = {
    "gemma3": Tower(
        ARCHITECTURES["gemma3"],
        "gemma3",
        {"mm.input_projection.weight": (_WIDTH, N_EMBD), "mm.soft_emb_norm.weight": (_WIDTH,)},
        tokens=("<start_of_image>", "<end_of_image>"),
        metadata={"clip.vision.projector.scale_factor": 2, "clip.use_gelu": True},
    ),
    "qwen2.5vl": Tower(
        Architecture("qwen2vl", metadata=_SECTIONS, has=r"attn_[qkv]\.bias"),
        "qwen2.5vl_merger",
        {
            "v.patch_embd.weight.1": (_WIDTH, 3, _PATCH, _PATCH),
            **_linear("mm.0", 4 * _WIDTH, 4 * _WIDTH),
            **_linear("mm.2", 4 * _WIDTH),
        },
        n_patches=0,
        tokens=_VISION,
        metadata={"clip.vision.n_wa_pattern": 2, "clip.vision.window_size": 32, "clip.use_silu": True},
        lacks=("ln1.bias", "ln2.bias", "post_ln.bias", "patch_embd.bias"),
        extra={"ffn_gate.weight": (_FF, _WIDTH), "ffn_gate.bias": (_FF,)},
    ),
    "qwen3vl": Tower(
        Architecture("qwen3vl", metadata={**_SECTIONS, "n_deepstack_layers": 1}),
        "qwen3vl_merger",
        {
            "v.patch_embd.weight.1": (_WIDTH, 3, _PATCH, _PATCH),
            **_linear("mm.0", 4 * _WIDTH, 4 * _WIDTH),
            **_linear("mm.2", 4 * _WIDTH),
            "v.deepstack.0.norm.weight": (4 * _WIDTH,),
            "v.deepstack.0.norm.bias": (4 * _WIDTH,),
            **_linear("v.deepstack.0.fc1", 4 * _WIDTH, 4 * _WIDTH),
            **_linear("v.deepstack.0.fc2", 4 * _WIDTH),
        },
        tokens=_VISION,
        metadata={"clip.use_gelu": True},
        lacks=(
            "attn_q.weight",
            "attn_k.weight",
            "attn_v.weight",
            "attn_q.bias",
            "attn_k.bias",
            "attn_v.bias",
        ),
        extra={"attn_qkv.weight": (3 * _WIDTH, _WIDTH), "attn_qkv.bias": (3 * _WIDTH,)},
    ),
    "llava": Tower(
        ARCHITECTURES["llama"],
        "mlp",
        {**_linear("mm.0", _WIDTH), **_linear("mm.2", N_EMBD), "v.class_embd": (_WIDTH,)},
        n_patches=65,
        metadata={"clip.has_llava_projector": True},
    ),
    "idefics3": Tower(
        ARCHITECTURES["llama"],
        "idefics3",
        {"mm.model.fc.weight": (N_EMBD, 4 * _WIDTH)},
        n_patches=16,
        image_size=32,
        tokens=(
            "ĊĊ",
            "<fake_token_around_image>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
        ),
        metadata={
            "clip.vision.projector.scale_factor": 2,
            "clip.vision.preproc_image_size": 64,
            "clip.use_gelu": True,
        },
    ),
    "pixtral": Tower(
        ARCHITECTURES["llama"],
        "pixtral",
        {**_linear("mm.1", _WIDTH), **_linear("mm.2", N_EMBD), "v.token_embd.img_break": (N_EMBD,)},
        n_patches=0,
        tokens=("[IMG_END]",),
        metadata={"clip.use_silu": True},
        lacks=("bias", "post_ln.weight"),
        extra={"ffn_gate.weight": (_FF, _WIDTH)},
    ),
    "gemma4": Tower(
        ARCHITECTURES["gemma4"],
        "gemma4v",
        {"mm.input_projection.weight": (N_EMBD, _WIDTH), "v.position_embd.weight": (2, 1536, _WIDTH)},
        n_patches=0,
        tokens=("<|image>", "<image|>"),
        metadata={"clip.use_gelu": True},
        lacks=("bias", "post_ln.weight"),
        extra={
            "ffn_gate.weight": (_FF, _WIDTH),
            "attn_q_norm.weight": (_WIDTH // _HEADS,),
            "attn_k_norm.weight": (_WIDTH // _HEADS,),
            "attn_post_norm.weight": (_WIDTH,),
            "ffn_post_norm.weight": (_WIDTH,),
        },
    ),
}


def write_tower(
    kind: str, folder: Path, *, seed: int = 1, width: int = N_EMBD, weights_type: str = "f32"
) -> tuple[Path, Path]:
    """Write a text model and its mmproj of one of the TOWERS into `folder`, and return both paths.

    The same arguments write the same bytes. With another `width` than the text model's they do not fit.
    `weights_type`: of the matrices of the text model, and of the mmproj's layers.
    """
    tower = TOWERS[kind]
    target = make_tiny(
        tower.text, folder / f"{kind}.gguf", seed=seed, tokens=tower.tokens, weights_type=weights_type
    )
    path = folder / f"mmproj-{kind}.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name(f"tiny {kind}")
    facts: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": tower.projector,
        "clip.vision.image_size": tower.image_size,
        "clip.vision.patch_size": _PATCH,
        "clip.vision.embedding_length": _WIDTH,
        "clip.vision.feed_forward_length": _FF,
        "clip.vision.projection_dim": width,
        "clip.vision.block_count": _LAYERS,
        "clip.vision.attention.head_count": _HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_mean": [0.5, 0.45, 0.4],
        "clip.vision.image_std": [0.25, 0.3, 0.28],
        **tower.metadata,
    }
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in facts.items():
        add.get(type(value), writer.add_string)(key, value)
    for name, shape in _shapes(tower).items():
        rng = np.random.default_rng((seed, *name.encode()))
        own = tuple(width if size == N_EMBD else size for size in shape)
        weights = _weights(name, own, rng)
        if weights_type != "f32" and name.startswith("v.blk.") and len(own) == 2 and not own[1] % 32:
            of = gguf.GGMLQuantizationType[weights_type.upper()]
            writer.add_tensor(name, gguf.quants.quantize(weights, of), raw_dtype=of)
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target, path


def _shapes(tower: Tower) -> dict[str, tuple[int, ...]]:
    vector = (_WIDTH,)
    layer: dict[str, tuple[int, ...]] = {
        "ln1.weight": vector,
        "ln1.bias": vector,
        "ln2.weight": vector,
        "ln2.bias": vector,
        **{f"attn_{part}.weight": (_WIDTH, _WIDTH) for part in ("q", "k", "v", "out")},
        **{f"attn_{part}.bias": vector for part in ("q", "k", "v", "out")},
        **_linear("ffn_up", _WIDTH, _FF),
        **_linear("ffn_down", _FF, _WIDTH),
        **tower.extra,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (_WIDTH, 3, _PATCH, _PATCH),
        "v.patch_embd.bias": vector,
        "v.post_ln.weight": vector,
        "v.post_ln.bias": vector,
    }
    if tower.n_patches:
        shapes["v.position_embd.weight"] = (tower.n_patches, _WIDTH)
    shapes |= {f"v.blk.{i}.{name}": shape for i in range(_LAYERS) for name, shape in layer.items()}
    usual = {name: shape for name, shape in shapes.items() if not name.endswith(tower.lacks or "\0")}
    return usual | dict(tower.tensors)


def _weights(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(shape, np.float32)
    if "norm" in name or ".ln" in name or "_ln" in name:
        return 0.1 * normal + (0 if name.endswith("bias") else 1)
    if len(shape) == 1:
        return 0.3 * normal
    return normal / np.float32(np.sqrt(np.prod(shape[1:])))
