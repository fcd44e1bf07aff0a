"""Whisper in numpy, float32, straight from the paper and OpenAI's definition of the model: slow, and right.

Weights are those of the GGUF, dequantized, so that what differs from
edgespec/apps/speech/csrc is how activations are rounded.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np

Array = np.ndarray

_AT = np.linspace(-6, 6, 20_001)
_ERF = np.array([math.erf(x) for x in _AT])


def gelu(x: Array) -> Array:
    """The exact form, with the error function, between values of which it is off by 5e-8 at the most."""
    return (0.5 * x * (1 + np.interp(x / math.sqrt(2), _AT, _ERF))).astype(np.float32)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class ReferenceWhisper:
    """The whole model: `encode`, `decode`, `cross_attention`."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.w = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors
        }
        number = {key: reader.fields[f"whisper.{key}"].contents() for key in _KEYS}
        self.n_audio_layer, self.n_audio_head = number[_KEYS[0]], number[_KEYS[1]]
        self.n_text_layer, self.n_text_head = number[_KEYS[2]], number[_KEYS[3]]

    def linear(self, x: Array, name: str) -> Array:
        bias = self.w.get(f"{name}.bias")
        y = x @ self.w[f"{name}.weight"].T
        return y if bias is None else y + bias

    def norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def attention(
        self, x: Array, of: Array, name: str, n_head: int, *, causal: bool = False
    ) -> tuple[Array, Array]:
        """The output, and the weights [head][token][seen]."""
        q, k, v = (self.linear(y, f"{name}.{part}") for y, part in ((x, "query"), (of, "key"), (of, "value")))
        q, k, v = (y.reshape(len(y), n_head, -1).transpose(1, 0, 2) for y in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        if causal:
            scores += np.triu(np.full(scores.shape[1:], -np.inf, np.float32), 1)
        weights = softmax(scores)
        return self.linear((weights @ v).transpose(1, 0, 2).reshape(len(x), -1), f"{name}.out"), weights

    def mlp(self, x: Array, name: str) -> Array:
        return self.linear(
            gelu(self.linear(self.norm(x, f"{name}.mlp_ln"), f"{name}.mlp.0")), f"{name}.mlp.2"
        )

    def convolve(self, x: Array, name: str, stride: int) -> Array:
        """`x`: (time, channels); the kernel has three taps, stored [out][in * 3 + tap]."""
        padded = np.pad(x, ((1, 1), (0, 0)))
        n = (len(x) - 1) // stride + 1
        columns = np.stack([padded[tap : tap + n * stride : stride][:n] for tap in range(3)], -1)
        return gelu(self.linear(columns.reshape(n, -1), name))

    def encode(self, mel: Array) -> Array:
        """`mel`: (n_mels, frames)."""
        x = self.convolve(self.convolve(mel.T, "encoder.conv1", 1), "encoder.conv2", 2)
        x = x + self.w["encoder.positional_embedding"]
        for i in range(self.n_audio_layer):
            name = f"encoder.blocks.{i}"
            y = self.norm(x, f"{name}.attn_ln")
            x = x + self.attention(y, y, f"{name}.attn", self.n_audio_head)[0]
            x = x + self.mlp(x, name)
        return self.norm(x, "encoder.ln_post")

    def decode(self, tokens: list[int], states: Array) -> tuple[Array, list[Array]]:
        """Logits of all tokens, and the cross attention's weights of each layer."""
        x = (
            self.w["decoder.token_embedding.weight"][tokens]
            + self.w["decoder.positional_embedding"][: len(tokens)]
        )
        heard = []
        for i in range(self.n_text_layer):
            name = f"decoder.blocks.{i}"
            y = self.norm(x, f"{name}.attn_ln")
            x = x + self.attention(y, y, f"{name}.attn", self.n_text_head, causal=True)[0]
            out, weights = self.attention(
                self.norm(x, f"{name}.cross_attn_ln"), states, f"{name}.cross_attn", self.n_text_head
            )
            heard.append(weights)
            x = self.mlp(x + out, name) + x + out
        return self.norm(x, "decoder.ln") @ self.w["decoder.token_embedding.weight"].T, heard


_KEYS = (
    "encoder.block_count",
    "encoder.attention.head_count",
    "decoder.block_count",
    "decoder.attention.head_count",
)
