"""Tiny EAGLE-3 and DFlash files for tiny random targets, as llama.cpp's converter writes published ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import numpy as np

from tiny_vocabulary import BOS, EOS, IM_END, MERGES, vocabulary

N_EMBD = 64  # of the targets
MASK = IM_END  # of DFlash heads
_HEADS, _N_FF = 4, 96


def write_eagle(
    path: Path,
    target: Path,
    *,
    n_embd: int = N_EMBD,
    own: bool = True,
    kept: int | None = None,
    quantized: bool = False,
    **changed,
) -> Path:
    """Write an EAGLE-3 head for a tiny target, whose successor of each word it often knows.

    `own`: its file holds embeddings and an output matrix, else the target's are used. `kept`: it drafts only
    so many tokens, by a list. `quantized`: its matrices are Q8_0. `changed`: metadata or tensors, by name;
    None leaves one out.
    """
    rng = np.random.default_rng(7)
    random = partial(_random, rng)
    embeddings, output = _matrices(target)
    narrow = np.eye(n_embd, N_EMBD, dtype=np.float32)
    if n_embd != N_EMBD:
        narrow = random(n_embd, N_EMBD)
    tokens = _kept(rng, len(output), kept)
    # Each token attends to its own kind, and says its embedding: what follows it stands in the output matrix.
    kind = 6 * random(n_embd, n_embd)
    first_half = np.eye(n_embd, 2 * n_embd, dtype=np.float32)
    tensors = {
        "fc.weight": random(n_embd, 3 * N_EMBD, 0.5),
        "output_norm.weight": np.ones(n_embd, np.float32),
        "blk.0.attn_norm.weight": np.ones(n_embd, np.float32),
        "blk.0.attn_norm_2.weight": np.ones(n_embd, np.float32),
        "blk.0.attn_q.weight": kind @ first_half,
        "blk.0.attn_k.weight": kind @ first_half,
        "blk.0.attn_v.weight": first_half,
        "blk.0.attn_output.weight": np.eye(n_embd, dtype=np.float32),
        "blk.0.ffn_norm.weight": np.ones(n_embd, np.float32),
        "blk.0.ffn_gate.weight": random(_N_FF, n_embd),
        "blk.0.ffn_up.weight": random(_N_FF, n_embd),
        "blk.0.ffn_down.weight": random(n_embd, _N_FF, 0.3),
    }
    if own:
        tensors["token_embd.weight"] = embeddings @ narrow.T
        tensors["output.weight"] = output[tokens] @ narrow.T
    if kept is not None:
        tensors["d2t"] = tokens.astype(np.int64)
    fields = _fields(n_embd, n_blocks=1) | {"target_layers": [0, 1, 1], "target_hidden_size": N_EMBD}
    _change(fields, tensors, changed)
    _write(path, "eagle3", fields, tensors, quantized=quantized)
    return path


def write_dflash(
    path: Path, target: Path, *, own: bool = True, kept: int | None = None, n_block: int = 6, **changed
) -> Path:
    """Write a DFlash head of blocks of `n_block` tokens; else as write_eagle.

    With its own matrices it often knows the successor of the last word; with the target's it knows nothing.
    """
    rng = np.random.default_rng(7)
    random = partial(_random, rng)
    embeddings, output = _matrices(target)
    tokens = _kept(rng, len(output), kept)
    # Keys and queries are made of a number that all embeddings share, so that they depend on the place alone:
    # a mask attends to the token before it, and takes its embedding.
    embeddings = embeddings * np.float32(0.5)
    embeddings[:, 0] = 1.0
    embeddings[MASK, 1:] = 0.0
    width = N_EMBD // _HEADS
    place = np.zeros((_HEADS, width, N_EMBD), np.float32)
    place[:, : width // 2, 0] = 1.0
    angles = 1e4 ** (-2 * np.arange(width // 2) / width)
    before = np.zeros_like(place)
    before[:, : width // 2, 0], before[:, width // 2 :, 0] = np.cos(angles), -np.sin(angles)
    others = np.eye(N_EMBD, dtype=np.float32)
    others[0, 0] = 0.0
    tensors = {
        "fc.weight": random(N_EMBD, 2 * N_EMBD),
        "enc.output_norm.weight": np.ones(N_EMBD, np.float32),
        "output_norm.weight": np.ones(N_EMBD, np.float32),
    }
    for i in range(2):
        tensors |= {
            f"blk.{i}.attn_norm.weight": np.ones(N_EMBD, np.float32),
            f"blk.{i}.attn_q.weight": before.reshape(N_EMBD, N_EMBD) if i == 0 else random(N_EMBD, N_EMBD),
            f"blk.{i}.attn_k.weight": place.reshape(N_EMBD, N_EMBD) if i == 0 else random(N_EMBD, N_EMBD),
            f"blk.{i}.attn_v.weight": others if i == 0 else random(N_EMBD, N_EMBD),
            f"blk.{i}.attn_output.weight": others if i == 0 else random(N_EMBD, N_EMBD, 0.2),
            f"blk.{i}.attn_q_norm.weight": np.full(width, 4.0 if i == 0 else 1.0, np.float32),
            f"blk.{i}.attn_k_norm.weight": np.full(width, 4.0 if i == 0 else 1.0, np.float32),
            f"blk.{i}.ffn_norm.weight": np.ones(N_EMBD, np.float32),
            f"blk.{i}.ffn_gate.weight": random(_N_FF, N_EMBD),
            f"blk.{i}.ffn_up.weight": random(_N_FF, N_EMBD),
            f"blk.{i}.ffn_down.weight": random(N_EMBD, _N_FF, 0.2),
        }
    if own:
        tensors["token_embd.weight"] = embeddings
        tensors["output.weight"] = output[tokens]
    if kept is not None:
        tensors["d2t"] = tokens.astype(np.int64)
    fields = _fields(N_EMBD, n_blocks=2) | {"target_layers": [0, 1], "block_size": n_block, "mask": MASK}
    _change(fields, tensors, changed)
    _write(path, "dflash", fields, tensors, quantized=False)
    return path


def _random(rng: np.random.Generator, rows: int, columns: int, size: float = 1.0) -> np.ndarray:
    return (size * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def _matrices(target: Path) -> tuple[np.ndarray, np.ndarray]:
    """A target's embeddings and output matrix."""
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(target).tensors}
    embeddings = weights["token_embd.weight"]
    return embeddings, weights.get("output.weight", embeddings)


def _kept(rng: np.random.Generator, n_vocab: int, kept: int | None) -> np.ndarray:
    return np.arange(n_vocab) if kept is None else np.sort(rng.permutation(n_vocab)[:kept])


def _fields(n_embd: int, *, n_blocks: int) -> dict:
    return {
        "context_length": 1024,
        "embedding_length": n_embd,
        "block_count": n_blocks,
        "feed_forward_length": _N_FF,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "texts": vocabulary(),
    }


def _change(fields: dict, tensors: dict, changed: dict) -> None:
    for name, value in changed.items():
        (fields if name in fields or "." not in name or "attention" in name else tensors)[name] = value
    if "d2t" in changed:
        tensors["d2t"] = fields.pop("d2t")


def _write(path: Path, architecture: str, fields: dict, tensors: dict, *, quantized: bool) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    texts, types = fields.pop("texts")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    if (mask := fields.pop("mask", None)) is not None:
        writer.add_mask_token_id(mask)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    for name, values in tensors.items():
        if values is None:
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and values.ndim == 2 else None
        data = np.ascontiguousarray(values)
        writer.add_tensor(name, gguf.quants.quantize(data, kind) if kind else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
