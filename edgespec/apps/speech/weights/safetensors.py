"""Read Whisper models of the hub: a folder with config.json, vocab.json and safetensors files.

file = length of the description, description (JSON: name -> type, shape, first and last byte), data
"""

from __future__ import annotations

import json
import math
import mmap
import re
from pathlib import Path

from edgespec.apps.speech.weights.reading import (
    BrokenModelError,
    ByteReader,
    SourceTensor,
    WhisperContents,
    WhisperSizes,
    array_reader,
    blamed,
    heads_in,
    mapped,
    ordinary_tokens,
    read_json,
)
from edgespec.errors import UsageError
from edgespec.models.on_disk import HUB_INDEX, HUB_WEIGHTS

CONFIG_FILE, GENERATION_FILE, VOCABULARY_FILE = "config.json", "generation_config.json", "vocab.json"

_TYPES = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("bf16", 2)}
# The fields of WhisperSizes, in their order.
_SIZES = (
    *("num_mel_bins", "vocab_size", "max_source_positions", "d_model", "encoder_attention_heads"),
    *("encoder_layers", "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers"),
)
_MOST_HEADER = 32 << 20  # bytes
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_PARTS = {
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}
_OTHERS = {
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}


def read_safetensors(folder: Path) -> WhisperContents:
    """Return the model in `folder`, its numbers unread. Raises UsageError and EdgespecError."""
    tensors: dict[str, SourceTensor] = {}
    for path in _weight_files(folder):
        with mapped(path) as data, blamed(path):
            tensors |= _tensors(data)
    with blamed(folder):
        config, generation = read_json(folder / CONFIG_FILE), folder / GENERATION_FILE
        heads = heads_in(read_json(generation)) if generation.exists() else ()
        named = {ours: tensor for name, tensor in tensors.items() if (ours := our_name(name))}
        return WhisperContents(folder, _sizes(config), _vocabulary(folder), heads, named)


def our_name(name: str) -> str:
    """Return OpenAI's name of a tensor of the hub; "" for one that no model needs, such as a tied copy."""
    name = name.removeprefix("model.")
    if layer := _LAYER.fullmatch(name):
        part, _, kind = layer[3].rpartition(".")
        return f"{layer[1]}.blocks.{layer[2]}.{_PARTS[part]}.{kind}" if part in _PARTS else ""
    return _OTHERS.get(name, name if name.startswith("encoder.conv") else "")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / HUB_INDEX
    if (folder / HUB_WEIGHTS).exists() or not index.exists():
        return [folder / HUB_WEIGHTS]
    with blamed(index):
        match read_json(index):
            case {"weight_map": dict(places)}:
                names = sorted({str(name) for name in places.values()})
            case _:
                raise BrokenModelError("it names no files of weights")
        for name in names:
            if "/" in name or not name.endswith(".safetensors"):
                raise BrokenModelError(f"it names the file {name[:60]!r}")
    for name in names:
        if not (folder / name).exists():
            raise UsageError(f"{folder / name}: no such file; the model needs all {len(names)} files")
    return [folder / name for name in names]


def _tensors(data: mmap.mmap) -> dict[str, SourceTensor]:
    reader = ByteReader(data)
    length = reader.number("Q")
    if length > _MOST_HEADER:
        raise BrokenModelError(f"a description of {length:,} bytes")
    try:
        described = json.loads(reader.bytes(length))
    except (ValueError, RecursionError):
        raise BrokenModelError("its description is no valid JSON") from None
    if not isinstance(described, dict):
        raise BrokenModelError("its description is no table")
    tensors, start = {}, reader.at
    for name, facts in described.items():
        if name == "__metadata__":
            continue
        match facts:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
                pass
            case _:
                raise BrokenModelError(f"the tensor {name[:60]!r} is not described")
        if kind not in _TYPES:
            raise BrokenModelError(f"the tensor {name[:60]!r} has the type {kind[:20]}, not F32, F16 or BF16")
        if not all(isinstance(n, int) and 0 < n < 1 << 31 for n in shape):
            raise BrokenModelError(f"the tensor {name[:60]!r} has no proper shape")
        code, size = _TYPES[kind]
        sizes = tuple(shape)
        if not 0 <= first <= last <= len(data) - start or last - first != math.prod(sizes) * size:
            raise BrokenModelError(
                f"the tensor {name[:60]!r} is cut off, or of another length than its shape"
            )
        tensors[name] = SourceTensor(sizes, array_reader(data, start + first, sizes, code))
    return tensors


def _sizes(config: object) -> WhisperSizes:
    if not isinstance(config, dict) or config.get("model_type") != "whisper":
        raise BrokenModelError(f"{CONFIG_FILE} describes no Whisper model")

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise BrokenModelError(f"{CONFIG_FILE} has no number {key}")
        return value

    return WhisperSizes(*map(number, _SIZES))


def _vocabulary(folder: Path) -> tuple[bytes, ...]:
    found = read_json(folder / VOCABULARY_FILE)
    if not isinstance(found, dict) or not all(isinstance(number, int) for number in found.values()):
        raise BrokenModelError(f"{VOCABULARY_FILE} is no table of tokens")
    written = sorted(found, key=lambda token: found[token])
    if [found[token] for token in written] != list(range(len(written))):
        raise BrokenModelError(f"the ids in {VOCABULARY_FILE} are not 0 to {len(written) - 1:,}")
    return ordinary_tokens(written)
