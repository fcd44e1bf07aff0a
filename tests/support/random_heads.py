"""Writes draft heads for tiny targets: random weights, of which some agree with what the target says."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from edgespec.models.store import hash_file

ALIGNMENT = 32


def matrix_of(reader: gguf.GGUFReader, *names: str) -> np.ndarray:
    """Return the first of these matrices that the file has, as floats."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = next(tensors[name] for name in names if name in tensors)
    return gguf.quants.dequantize(found.data, found.tensor_type).astype(np.float32)


def write_random_head(
    path: Path,
    target: Path,
    *,
    token_ids: list[int] | None = None,
    seed: int = 0,
    n_ff: int = 96,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ctx: int = 512,
    fusion_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
    noise: float = 0.3,
    metadata: dict[str, object] | None = None,
) -> Path:
    """Write a head for the model `target` that predicts `token_ids` (ascending; None: every second token).

    Its fusion hands on the token's embedding, and of the hidden state a little: the tiny models of
    tiny_gguf.py then often have the same likeliest successor. `metadata` replaces single keys; None removes
    one.
    """
    rng = np.random.default_rng(seed)
    reader = gguf.GGUFReader(target)
    output = matrix_of(reader, "output.weight", "token_embd.weight")
    n_vocab, n_embd = output.shape
    ids = np.arange(0, n_vocab, 2) if token_ids is None else np.asarray(token_ids)
    head_dim = n_embd // n_head

    def random(n_out: int, n_in: int) -> np.ndarray:
        return rng.normal(0, 0.5 / np.sqrt(n_in), (n_out, n_in)).astype(np.float32)

    fusion = np.concatenate(
        [
            np.eye(n_embd) + noise * random(n_embd, n_embd),
            0.2 * np.eye(n_embd) + noise * random(n_embd, n_embd),
        ],
        axis=1,
    ).astype(np.float32)
    kv_dim = n_head_kv * head_dim
    tensors = {
        "token_embd": output[ids],
        "output_norm": np.ones(n_embd, np.float32),
        "blk.0.attn_norm": np.ones(n_embd, np.float32),
        "blk.0.attn_q": random(n_embd, n_embd),
        "blk.0.attn_k": random(kv_dim, n_embd),
        "blk.0.attn_v": random(kv_dim, n_embd),
        "blk.0.attn_output": random(n_embd, n_embd),
        "blk.0.ffn_norm": np.ones(n_embd, np.float32),
        "blk.0.ffn_gate": random(n_ff, n_embd),
        "blk.0.ffn_up": random(n_ff, n_embd),
        "blk.0.ffn_down": random(n_embd, n_ff),
    }

    def write(offset: int) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_type("model")
        writer.add_name("random head")
        writer.add_context_length(n_ctx)
        writer.add_embedding_length(n_embd)
        writer.add_block_count(1)
        writer.add_feed_forward_length(n_ff)
        writer.add_head_count(n_head)
        writer.add_head_count_kv(n_head_kv)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(len(ids))
        writer.add_tokenizer_model("none")
        own = {
            "edgespec.draft.n_vocab": n_vocab,
            "edgespec.draft.token_ids": ids.tolist(),
            "edgespec.head.target": hash_file(target),
            "edgespec.head.fusion_type": int(fusion_type),
            "edgespec.head.fusion_offset": offset,
            **(metadata or {}),
        }
        for key, value in own.items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif key.endswith("offset") and value is not None:
                writer.add_uint64(key, value)
            elif value is not None:
                writer.add_uint32(key, value)
        for name, tensor in tensors.items():
            writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write(0)
    offset = -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT
    write(offset)
    with path.open("ab") as file:
        file.write(bytes(offset - path.stat().st_size))
        file.write(gguf.quants.quantize(fusion, fusion_type).tobytes())
    return path
