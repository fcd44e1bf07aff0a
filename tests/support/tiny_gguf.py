"""Writes tiny random Llama models as GGUF, with a real byte-level BPE tokenizer.

Any text round-trips. Whatever the seed and the size, a model prefers one successor for each token
(the same in all of them), so that two tiny models agree about as often as a real pair does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tiny_vocabulary import (
    BOS,
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    EOS,
    IM_END,
    IM_START,
    MERGES,
    N_WORDS,
    successors,
    vocabulary,
)

__all__ = [
    "BOS",
    "CHAT_TEMPLATE",
    "CONTROL_TOKENS",
    "EOS",
    "IM_END",
    "IM_START",
    "MERGES",
    "N_WORDS",
    "TOOLS_TEMPLATE",
    "vocabulary",
    "write_tiny_gguf",
]

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}" + CHAT_TEMPLATE
)
"""The tiny models' chat template, which also shows the functions that may be called."""


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    name: str | None = None,
    n_layer: int = 2,
    n_embd: int = 64,
    n_ff: int = 96,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ctx: int = 512,
    n_padding: int = 0,
    peak: float = 1.8,
    dtype: type[np.float16] | type[np.float32] = np.float32,
    chat_template: str | None = CHAT_TEMPLATE,
    tokenizer: bool = True,
    add_bos: bool = False,
    eos: int = EOS,
    architecture: str = "llama",
    general_type: str = "model",
    texts: dict[int, str] | None = None,
    kinds: dict[int, int] | None = None,
    extra: dict[str, bool | int | float | str | tuple[int, ...]] | None = None,
    head_dim: int | None = None,
    vectors: dict[str, int] | None = None,
    tied: bool = False,
) -> Path:
    """Write a model of random weights; the same arguments write the same bytes.

    `peak` is the standard deviation of the logits: higher is more certain. `texts` and `kinds`
    replace single tokens; `extra` adds keys, "{arch}" in them standing for the architecture, and
    `vectors` adds to each layer random vectors of a length: biases, more norms. `tied`: the embeddings are
    the output matrix too.
    """
    rng = np.random.default_rng(seed)
    words, types = vocabulary(n_padding)
    for token, text in (texts or {}).items():
        words[token] = text
    for token, kind in (kinds or {}).items():
        types[token] = kind
    n_vocab, head_dim = len(words), head_dim or n_embd // n_head

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(general_type)
    writer.add_name(f"tiny {seed}" if name is None else name)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(n_vocab)
    writer.add_file_type(1 if dtype is np.float16 else 0)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(words)
        writer.add_token_types(types)
        writer.add_token_merges(MERGES)
        writer.add_eos_token_id(eos)
        writer.add_bos_token_id(BOS)
        writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in (extra or {}).items():
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            tuple: writer.add_array,
        }
        add[type(value)](key.format(arch=architecture), value)

    def matrix(n_out: int, n_in: int) -> np.ndarray:
        return rng.normal(0, 0.5 / np.sqrt(n_in), (n_out, n_in)).astype(dtype)

    embedding = rng.normal(0, 1, (n_vocab, n_embd))
    successor = successors()
    output = 0.1 * rng.normal(0, 1, (n_vocab, n_embd))
    output[successor] = 0.7 * embedding[:N_WORDS] + 0.7 * rng.normal(0, 1, (N_WORDS, n_embd))
    writer.add_tensor("token_embd.weight", embedding.astype(dtype))
    if not tied:
        writer.add_tensor("output.weight", (output * peak / np.sqrt(n_embd)).astype(dtype))
    writer.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    for layer in range(n_layer):
        shapes = {
            "attn_q": (n_head * head_dim, n_embd),
            "attn_k": (n_head_kv * head_dim, n_embd),
            "attn_v": (n_head_kv * head_dim, n_embd),
            "attn_output": (n_embd, n_head * head_dim),
            "ffn_gate": (n_ff, n_embd),
            "ffn_up": (n_ff, n_embd),
            "ffn_down": (n_embd, n_ff),
        }
        for tensor, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{tensor}.weight", matrix(*shape))
        for tensor in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{tensor}.weight", np.ones(n_embd, np.float32))
        for tensor, length in (vectors or {}).items():
            writer.add_tensor(f"blk.{layer}.{tensor}", rng.normal(0.7, 0.3, length).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
