"""Random LoRA adapters of a model, written with the gguf package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from edgespec.llama.gguf import read_gguf

ALL = r"blk\.\d+\.(attn|ffn)_(q|k|v|qkv|output|gate|up|down)(_exps)?\.weight"
"""Pattern of the matrices that adapters are mostly trained for."""

Tensors = dict[str, np.ndarray]


def write_adapter(
    path: Path,
    target: Path,
    *,
    rank: int = 4,
    kind: str = "F32",
    seed: int = 1,
    strength: float = 0.05,
    alpha: float | None = None,
    names: str = ALL,
    texts: dict[str, str] | None = None,
    change: Callable[[Tensors], object] = lambda _: None,
) -> Path:
    """Write an adapter of `rank` and return `path`.

    `kind`: type of its matrices. `strength`: about how large its products are beside those of the weights.
    `texts`: fields in place of its own. `change` may spoil the tensors, which are by name.
    """
    header = read_gguf(target)
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for weight in header.tensors:
        if re.fullmatch(names, weight.name):
            experts = weight.shape[2:][::-1]
            shapes = {"lora_a": (*experts, rank, weight.columns), "lora_b": (*experts, weight.rows, rank)}
            if weight.name == "token_embd.weight":
                shapes = {"lora_a": (weight.rows, rank), "lora_b": (weight.columns, rank)}
            for end, shape in shapes.items():
                scale = 1.0 if end == "lora_a" else strength / np.sqrt(rank)
                tensors[f"{weight.name}.{end}"] = rng.normal(0, scale, shape).astype(np.float32)
    change(tensors)
    texts = {
        "general.architecture": header.text("general.architecture"),
        "general.type": "adapter",
        "adapter.type": "lora",
        **(texts or {}),
    }
    writer = gguf.GGUFWriter(path, texts.pop("general.architecture"))
    for key, text in texts.items():
        writer.add_string(key, text)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, data in tensors.items():
        known = gguf.GGMLQuantizationType[kind]
        fits = data.shape[-1] % gguf.GGML_QUANT_SIZES[known][0] == 0 and data.dtype == np.float32
        if kind == "F32" or not fits:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, known), raw_dtype=known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
