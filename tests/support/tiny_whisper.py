"""Writes tiny random Whisper models as GGUF, with the keys, tensors and layouts of the converter's files.

The vocabulary has the 256 bytes and a few merges, then the special tokens that follow from its size as in
OpenAI's tokenizer: n_ordinary + 1608 tokens. Weights are seeded: the same arguments write the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

N_SPECIAL = 1608
"""Tokens after the ordinary ones: end, start, 99 languages, six of the task, 1501 timestamps."""

MERGES = ("Ġt", "he", "Ġthe", "in", "er", "an", "Ġa", "on")
"""Tokens after the bytes, each made of two tokens before it: "Ġthe" of "Ġt" and "he"."""


def byte_tokens() -> list[str]:
    """The 256 bytes in GPT-2's order: those that can be printed, then the others as letters from U+0100."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte) for byte in printed] + [chr(256 + i) for i in range(len(others))]


def ordinary_tokens() -> list[str]:
    """The tokens of text, in rank order."""
    return [*byte_tokens(), *MERGES]


def write_tiny_whisper(
    path: Path,
    *,
    seed: int = 0,
    n_mels: int = 80,
    n_audio_ctx: int = 1500,
    n_audio_layer: int = 1,
    n_text_ctx: int = 448,
    n_text_layer: int = 2,
    n_state: int = 64,
    n_head: int = 2,
    n_text_state: int | None = None,
    multilingual: bool = True,
    alignment_heads: tuple[tuple[int, int], ...] = ((0, 0), (1, 1)),
    matrix_type: str = "q8_0",
    peak: float = 2.0,
    tokens: list[str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    extra: dict[str, int | str] | None = None,
) -> Path:
    """Write a model of random weights.

    `peak`: standard deviation of the logits. `matrix_type`: q8_0, q4_0, f16, f32 ... of all matrices but
    conv1's, which is F16. `n_audio_layer` 0: no encoder. `tensors` replaces or adds whole
    tensors; `extra` adds keys.
    """
    rng = np.random.default_rng(seed)
    tokens = ordinary_tokens() if tokens is None else tokens
    n_vocab = len(tokens) + N_SPECIAL
    n_text = n_text_state or n_state
    writer = gguf.GGUFWriter(path, "whisper")
    writer.add_name(f"tiny whisper {seed}")
    writer.add_uint32("whisper.n_mels", n_mels)
    writer.add_uint32("whisper.vocab_size", n_vocab)
    writer.add_bool("whisper.multilingual", multilingual)
    writer.add_array("whisper.alignment_heads", [i for pair in alignment_heads for i in pair])
    for part, n_ctx, n_layer, width in (
        ("encoder", n_audio_ctx, n_audio_layer, n_state),
        ("decoder", n_text_ctx, n_text_layer, n_text),
    ):
        writer.add_uint32(f"whisper.{part}.context_length", n_ctx)
        writer.add_uint32(f"whisper.{part}.block_count", n_layer)
        writer.add_uint32(f"whisper.{part}.embedding_length", width)
        writer.add_uint32(f"whisper.{part}.attention.head_count", n_head)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)

    weights = _weights(
        rng, n_mels, n_state, n_text, n_vocab, (n_audio_ctx, n_text_ctx), (n_audio_layer, n_text_layer)
    )
    weights["decoder.token_embedding.weight"] *= np.float32(peak / np.sqrt(n_text))
    for name, data in (weights | (tensors or {})).items():
        kind = _type_of(name, data, matrix_type)
        raw = gguf.quants.quantize(data, kind) if data.dtype == np.float32 else data
        writer.add_tensor(name, raw, raw_dtype=kind if raw.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type_of(name: str, data: np.ndarray, matrix_type: str) -> gguf.GGMLQuantizationType:
    if data.ndim == 1 or "positional" in name:
        return gguf.GGMLQuantizationType.F32
    if name == "encoder.conv1.weight" and matrix_type != "f32":
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[matrix_type.upper()]


def _weights(
    rng: np.random.Generator,
    n_mels: int,
    n_audio: int,
    n_text: int,
    n_vocab: int,
    contexts: tuple[int, int],
    layers: tuple[int, int],
) -> dict[str, np.ndarray]:
    """All tensors as float32, numpy's order of dimensions: (rows, columns)."""
    made: dict[str, np.ndarray] = {}

    def normal(name: str, *shape: int, deviation: float = 1.0, mean: float = 0.0) -> None:
        made[name] = rng.normal(mean, deviation, shape).astype(np.float32)

    def linear(name: str, n_out: int, n_in: int, *, bias: bool = True) -> None:
        normal(f"{name}.weight", n_out, n_in, deviation=1.5 / np.sqrt(n_in))
        if bias:
            normal(f"{name}.bias", n_out, deviation=0.1)

    def norm(name: str, width: int) -> None:
        normal(f"{name}.weight", width, deviation=0.1, mean=1.0)
        normal(f"{name}.bias", width, deviation=0.1)

    def attention(name: str, width: int, n_in: int) -> None:
        linear(f"{name}.query", width, width)
        linear(f"{name}.key", width, n_in, bias=False)
        linear(f"{name}.value", width, n_in)
        linear(f"{name}.out", width, width)

    def block(name: str, width: int, n_cross: int) -> None:
        attention(f"{name}.attn", width, width)
        norm(f"{name}.attn_ln", width)
        if n_cross:
            attention(f"{name}.cross_attn", width, n_cross)
            norm(f"{name}.cross_attn_ln", width)
        linear(f"{name}.mlp.0", 4 * width, width)
        linear(f"{name}.mlp.2", width, 4 * width)
        norm(f"{name}.mlp_ln", width)

    if layers[0]:
        linear("encoder.conv1", n_audio, 3 * n_mels)
        linear("encoder.conv2", n_audio, 3 * n_audio)
        normal("encoder.positional_embedding", contexts[0], n_audio, deviation=0.5)
        for i in range(layers[0]):
            block(f"encoder.blocks.{i}", n_audio, 0)
        norm("encoder.ln_post", n_audio)
    normal("decoder.token_embedding.weight", n_vocab, n_text)
    normal("decoder.positional_embedding", contexts[1], n_text, deviation=0.05)
    for i in range(layers[1]):
        block(f"decoder.blocks.{i}", n_text, n_audio)
    norm("decoder.ln", n_text)
    return made
