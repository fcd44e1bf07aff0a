"""Tiny files of published heads for tiny random targets, as llama.cpp's converter writes them."""

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
    norms: bool = False,
    **changed,
) -> Path:
    """Write an EAGLE-3 head for a tiny target, whose successor of each word it often knows.

    `own`: its file holds embeddings and an output matrix, else the target's are used. `kept`: it drafts only
    so many tokens, by a list. `quantized`: its matrices are Q8_0. `norms`: it is one of EAGLE-3.1, whose
    states go through a norm first. `changed`: metadata or tensors, by name; None leaves one out.
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
    if norms:
        tensors["enc.output_norm.weight"] = (1 + 0.3 * rng.standard_normal(3 * N_EMBD)).astype(np.float32)
        fields["norm_before_fc"] = True
    _change(fields, tensors, changed)
    _write(path, "eagle3", fields, tensors, quantized=quantized)
    return path


def write_dflash(
    path: Path,
    target: Path,
    *,
    own: bool = True,
    kept: int | None = None,
    n_block: int = 6,
    markov: int = 0,
    top_k: int = 0,
    quantized: bool = False,
    **changed,
) -> Path:
    """Write a DFlash head of blocks of `n_block` tokens; else as write_eagle.

    With its own matrices it often knows the successor of the last word; with the target's it knows nothing.
    `markov`: it is a DSpark head, with a Markov head of this rank. `top_k`: it is a DFlash 2 head, whose
    selector has so many candidates.
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
    if markov:
        fields |= _add_markov(tensors, random, embeddings, output[tokens], markov)
    if top_k:
        fields |= _add_selector(tensors, random, embeddings, output, top_k)
    _change(fields, tensors, changed)
    _write(path, "dflash", fields, tensors, quantized=quantized)
    return path


def _add_markov(
    tensors: dict, random: partial, embeddings: np.ndarray, output: np.ndarray, rank: int
) -> dict:
    """Add the parts of DSpark, which often know the successor of the token before; return the metadata."""
    low = np.eye(N_EMBD, rank, dtype=np.float32)
    tensors |= {
        "markov_w1.weight": embeddings @ low,
        "markov_w2.weight": 2 * output @ low,
        "conf_proj.weight": random(1, N_EMBD + rank),
        "conf_proj.bias": np.array([0.5], np.float32),
    }
    return {"sample_from_anchor": True, "has_confidence_head": True}


def _add_selector(
    tensors: dict, random: partial, embeddings: np.ndarray, output: np.ndarray, top_k: int
) -> dict:
    """Add the parts of DFlash 2, whose pairs are often those of a token and its successor."""
    group, kernel = 16, 2
    gate = 0.02 * random(N_EMBD, N_EMBD)
    gate[:, 0] += 0.5  # of a number that all hidden states share
    tensors |= {
        "selector_predecessor.weight": embeddings,
        "selector_successor.weight": output,
        "selector_hidden.weight": gate,
    }
    for i in range(2):
        for part in ("attn", "ffn"):
            base = 0.1 * random(2 * kernel, N_EMBD).reshape(2, kernel, N_EMBD)
            base[:, 0] += 1.0
            tensors[f"blk.{i}.{part}_conv_base"] = base
            tensors[f"blk.{i}.{part}_conv_proj.weight"] = random(2 * kernel * N_EMBD // group, N_EMBD, 0.05)
    return {
        "conv_kernel_size": kernel,
        "conv_group_size": group,
        "selector_rank": N_EMBD,
        "selector_top_k": top_k,
    }


def write_gemma(path: Path, target: Path, *, width: int = 16, quantized: bool = False, **changed) -> Path:
    """Write a Gemma 4 head for a tiny target of that architecture, which often says the last word again.

    `width`: of a key of the target's layers with a sliding window.
    """
    rng = np.random.default_rng(7)
    random = partial(_random, rng)
    embeddings, _ = _matrices(target)
    n_embd = 32
    narrow = np.linalg.qr(rng.standard_normal((N_EMBD, n_embd)))[0].T.astype(np.float32)
    tensors = {
        "token_embd.weight": 8 * embeddings @ narrow.T,
        "output_norm.weight": np.ones(n_embd, np.float32),
        "nextn.pre_projection.weight": np.concatenate([narrow, random(n_embd, N_EMBD, 0.01)], axis=1),
        "nextn.post_projection.weight": random(N_EMBD, n_embd),
        "rope_freqs.weight": np.repeat(np.array([1.0, 1e30], np.float32), 8),
    }
    for i, of_layer in enumerate((width, 32)):  # one with a sliding window and one without
        tensors |= {
            f"blk.{i}.attn_norm.weight": np.ones(n_embd, np.float32),
            f"blk.{i}.attn_q.weight": random(_HEADS * of_layer, n_embd),
            f"blk.{i}.attn_q_norm.weight": np.full(of_layer, 0.5, np.float32),
            f"blk.{i}.attn_output.weight": random(n_embd, _HEADS * of_layer),
            f"blk.{i}.post_attention_norm.weight": np.full(n_embd, 0.05, np.float32),
            f"blk.{i}.ffn_norm.weight": np.ones(n_embd, np.float32),
            f"blk.{i}.ffn_gate.weight": random(_N_FF, n_embd),
            f"blk.{i}.ffn_up.weight": random(_N_FF, n_embd),
            f"blk.{i}.ffn_down.weight": random(n_embd, _N_FF),
            f"blk.{i}.post_ffw_norm.weight": np.full(n_embd, 0.05, np.float32),
            f"blk.{i}.layer_output_scale.weight": np.array([0.9], np.float32),
        }
    fields = _fields(n_embd, n_blocks=2) | {
        "embedding_length_out": N_EMBD,
        "nextn_predict_layers": 2,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": width,
        "attention.value_length_swa": width,
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": [True, False],
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": width,
    }
    _change(fields, tensors, changed)
    _write(path, "gemma4-assistant", fields, tensors, quantized=quantized)
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
        is_tensor = "." in name and name not in fields and "attention." not in name
        (tensors if is_tensor else fields)[name] = value
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
        if isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    for name, values in tensors.items():
        if values is None:
            continue
        is_matrix = values.ndim == 2 and values.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and is_matrix else None
        data = np.ascontiguousarray(values)
        writer.add_tensor(name, gguf.quants.quantize(data, kind) if kind else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
