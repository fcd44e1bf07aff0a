"""Tiny EAGLE-3 files beside tiny random targets, as llama.cpp's converter writes published ones."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from edgespec.llama.tiny_vocabulary import BOS, EOS, MERGES, vocabulary

N_EMBD = 64  # of the targets
_HEADS = 4


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
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(target).tensors}
    embeddings = weights["token_embd.weight"]
    output = weights.get("output.weight", embeddings)

    def random(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
        return (size * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    narrow = np.eye(n_embd, N_EMBD, dtype=np.float32)
    if n_embd != N_EMBD:
        narrow = random(n_embd, N_EMBD)
    tokens = np.arange(len(output))
    if kept is not None:
        tokens = np.sort(rng.permutation(len(output))[:kept])
    # Each token attends to its own kind, and says its embedding: what follows it stands in the output matrix.
    kind = 6 * random(n_embd, n_embd)
    first_half = np.eye(n_embd, 2 * n_embd, dtype=np.float32)
    n_ff = 96
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
        "blk.0.ffn_gate.weight": random(n_ff, n_embd),
        "blk.0.ffn_up.weight": random(n_ff, n_embd),
        "blk.0.ffn_down.weight": random(n_embd, n_ff, 0.3),
    }
    if own:
        tensors["token_embd.weight"] = embeddings @ narrow.T
        tensors["output.weight"] = output[tokens] @ narrow.T
    if kept is not None:
        tensors["d2t"] = tokens.astype(np.int64)
    fields = {
        "context_length": 1024,
        "embedding_length": n_embd,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "target_layers": [0, 1, 1],
        "target_hidden_size": N_EMBD,
        "texts": vocabulary(),
    }
    for name, value in changed.items():
        (tensors if name in tensors else fields)[name] = value
    _write(path, fields, tensors, quantized=quantized)
    return path


def _write(path: Path, fields: dict, tensors: dict, *, quantized: bool) -> None:
    writer = gguf.GGUFWriter(path, "eagle3")
    texts, types = fields.pop("texts")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"eagle3.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"eagle3.{key}", value)
        elif value is not None:
            writer.add_uint32(f"eagle3.{key}", value)
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
