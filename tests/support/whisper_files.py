"""Writes tiny random Whisper models as other programs store them: CTranslate2, whisper.cpp, the hub."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from edgespec.apps.speech.weights.convert import _OTHERS, _PARTS
from edgespec.apps.speech.weights.reading import WhisperSizes, expected_tensors, written_token
from tiny_whisper import N_SPECIAL

TOKENS = [bytes([i]) for i in range(256)] + [b" t", b"he", b" the", "ä".encode()]
HEADS = [[0, 1], [1, 0]]


def sizes(n_mels: int = 80, n_state: int = 64) -> WhisperSizes:
    return WhisperSizes(n_mels, len(TOKENS) + N_SPECIAL, 20, n_state, 2, 1, 16, n_state, 2, 2)


def weights(of: WhisperSizes, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors that F16 holds exactly, with OpenAI's names."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.1, shape).astype(np.float16).astype(np.float32)
        for name, shape in expected_tensors(of).items()
    }


# --- CTranslate2 ----------------------------------------------------------------------------------


def _ct2_variables(of: WhisperSizes, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def fused(prefix: str, parts: tuple[str, ...], kind: str) -> np.ndarray:
        rows = [tensors.get(f"{prefix}.{part}.{kind}") for part in parts]
        return np.concatenate([np.zeros(of.n_text_state, np.float32) if row is None else row for row in rows])

    found: dict[str, np.ndarray] = {
        "encoder/num_heads": np.array(of.n_audio_head, np.int16),
        "decoder/num_heads": np.array(of.n_text_head, np.int16),
        "decoder/embeddings/weight": tensors["decoder.token_embedding.weight"],
    }
    for part, layers, last in (("encoder", of.n_audio_layer, "ln_post"), ("decoder", of.n_text_layer, "ln")):
        found[f"{part}/position_encodings/encodings"] = tensors[f"{part}.positional_embedding"]
        norms = {f"{part}.{last}": f"{part}/layer_norm"}
        for i in range(layers):
            ours, theirs = f"{part}.blocks.{i}", f"{part}/layer_{i}"
            norms |= {f"{ours}.attn_ln": f"{theirs}/self_attention/layer_norm"}
            norms |= {f"{ours}.mlp_ln": f"{theirs}/ffn/layer_norm"}
            linears = {
                f"{theirs}/self_attention/linear_0": (f"{ours}.attn", ("query", "key", "value")),
                f"{theirs}/self_attention/linear_1": (f"{ours}.attn", ("out",)),
                f"{theirs}/ffn/linear_0": (f"{ours}.mlp", ("0",)),
                f"{theirs}/ffn/linear_1": (f"{ours}.mlp", ("2",)),
            }
            if part == "decoder":
                norms |= {f"{ours}.cross_attn_ln": f"{theirs}/attention/layer_norm"}
                cross = f"{theirs}/attention"
                linears |= {
                    f"{cross}/linear_0": (f"{ours}.cross_attn", ("query",)),
                    f"{cross}/linear_1": (f"{ours}.cross_attn", ("key", "value")),
                    f"{cross}/linear_2": (f"{ours}.cross_attn", ("out",)),
                }
            for name, (prefix, parts) in linears.items():
                found |= {f"{name}/{kind}": fused(prefix, parts, kind) for kind in ("weight", "bias")}
        for ours, theirs in norms.items():
            found |= {f"{theirs}/gamma": tensors[f"{ours}.weight"], f"{theirs}/beta": tensors[f"{ours}.bias"]}
    for conv in ("conv1", "conv2"):
        found |= {f"encoder/{conv}/{kind}": tensors[f"encoder.{conv}.{kind}"] for kind in ("weight", "bias")}
    return found


def write_ctranslate2(
    folder: Path, of: WhisperSizes, tensors: dict[str, np.ndarray], *, int8: bool = False, spec="WhisperSpec"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    items: dict[str, np.ndarray] = {}
    for name, array in sorted(_ct2_variables(of, tensors).items()):
        if int8 and array.ndim == 2 and "position" not in name:
            scale = 127 / np.abs(array).max(1)
            items[name] = np.round(array * scale[:, None]).astype(np.int8)
            items[f"{name}_scale"] = scale.astype(np.float32)
        else:
            items[name] = array.astype(np.float16) if array.dtype == np.float32 else array
    codes = {"f4": 0, "i1": 1, "i2": 2, "i4": 3, "f2": 4}

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    out = struct.pack("<I", 6) + text(spec) + struct.pack("<II", 3, len(items))
    for name, array in items.items():
        head = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        out += (
            text(name) + head + struct.pack("<BI", codes[array.dtype.str[1:]], array.nbytes) + array.tobytes()
        )
    out += struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")
    (folder / "model.bin").write_bytes(out)
    (folder / "config.json").write_text(json.dumps({"alignment_heads": HEADS, "suppress_ids": []}))
    written = [written_token(token).decode() for token in TOKENS]
    specials = ["<|endoftext|>"] + [f"<|{i}|>" for i in range(N_SPECIAL - 1)]
    (folder / "vocabulary.txt").write_text("\n".join(written + specials))
    return folder


# --- whisper.cpp ----------------------------------------------------------------------------------


def write_whisper_cpp(
    path: Path, of: WhisperSizes, tensors: dict[str, np.ndarray], *, tokens: list[bytes] = TOKENS
) -> Path:
    numbers = (of.n_vocab, of.n_audio_ctx, of.n_audio_state, of.n_audio_head, of.n_audio_layer)
    numbers += (of.n_text_ctx, of.n_text_state, of.n_text_head, of.n_text_layer, of.n_mels, 1)
    out = struct.pack("<4s11i", b"lmgg", *numbers)
    out += struct.pack("<2i", of.n_mels, 201) + bytes(4 * of.n_mels * 201)
    out += struct.pack("<i", len(tokens)) + b"".join(struct.pack("<i", len(t)) + t for t in tokens)
    for name, array in tensors.items():
        is_matrix = array.ndim > 1 and "positional" not in name
        data = array.astype(np.float16 if is_matrix else np.float32)
        if "conv" in name and name.endswith("bias"):
            data = data.reshape(-1, 1)
        out += struct.pack("<3i", data.ndim, len(name), int(is_matrix))
        out += struct.pack(f"<{data.ndim}i", *data.shape[::-1]) + name.encode() + data.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out)
    return path


# --- The hub --------------------------------------------------------------------------------------


def hub_name(name: str) -> str:
    """The hub's name of one of OpenAI's tensors."""
    for theirs, ours in _OTHERS.items():
        if name == ours:
            return f"model.{theirs}"
    for theirs, ours in _PARTS.items():
        part, marker, rest = name.partition(f".{ours}.")
        if marker and ".blocks." in part:
            return f"model.{part.replace('.blocks.', '.layers.')}.{theirs}.{rest}"
    return f"model.{name}"


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = array.astype("<f4").tobytes()
        facts = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        header[name] = facts
        data += raw
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + data


def write_hub(folder: Path, of: WhisperSizes, tensors: dict[str, np.ndarray], *, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    named = {hub_name(name): array for name, array in tensors.items()}
    names = list(named)
    if shards == 1:
        named["proj_out.weight"] = named["model.decoder.embed_tokens.weight"]
        (folder / "model.safetensors").write_bytes(safetensors_bytes(named))
    else:
        places = {name: f"model-{i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(places.values()):
            part = {name: named[name] for name in names if places[name] == file}
            (folder / file).write_bytes(safetensors_bytes(part))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "model_type": "whisper",
        "num_mel_bins": of.n_mels,
        "vocab_size": of.n_vocab,
        "max_source_positions": of.n_audio_ctx,
        "max_target_positions": of.n_text_ctx,
        "d_model": of.n_text_state,
        "encoder_attention_heads": of.n_audio_head,
        "decoder_attention_heads": of.n_text_head,
        "encoder_layers": of.n_audio_layer,
        "decoder_layers": of.n_text_layer,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": HEADS}))
    written = [written_token(token).decode() for token in TOKENS]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(written)}))
    return folder
