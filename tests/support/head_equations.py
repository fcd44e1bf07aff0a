"""The equations of published heads, as their papers and authors have them: plain numpy, in 64-bit floats.

Of one sequence at a time, without a cache: each function takes all that came before. Weights are a
dictionary by the names that they have in GGUF files.
"""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np

N_HEADS = 4
_EPS, _ROPE_BASE = 1e-5, 1e4

Weights = dict[str, np.ndarray]
Cells = tuple[np.ndarray, np.ndarray, np.ndarray]


def read_weights(*paths) -> Weights:
    """The tensors of GGUF files of 32-bit floats; those of an earlier file win."""
    found: Weights = {}
    for path in paths:
        for tensor in gguf.GGUFReader(path).tensors:
            wide = tensor.data.dtype == np.float32
            found.setdefault(tensor.name, tensor.data.astype(np.float64) if wide else np.array(tensor.data))
    return found


def rms_norm(x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rope(
    x: np.ndarray, positions: np.ndarray, *, halves: bool, slower: np.ndarray | float = 1.0
) -> np.ndarray:
    """Rotate heads, shape (n, heads, width); `halves`: pairs are i and i + width / 2, not 2 i and 2 i + 1."""
    width = x.shape[-1]
    angles = positions[:, None, None] * _ROPE_BASE ** (-2 * np.arange(width // 2) / width) / slower
    cos, sin = np.cos(angles), np.sin(angles)
    if halves:
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float | None = None
) -> np.ndarray:
    """Softmax attention of heads, shape (n, heads, width); `seen`: which keys each query sees."""
    scores = np.einsum("qhd,khd->hqk", q, k) * (scale or 1 / np.sqrt(q.shape[-1]))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _heads(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), N_HEADS, -1)


def _ffn(w: Weights, block: str, x: np.ndarray) -> np.ndarray:
    gate, up, down = (w[f"{block}ffn_{name}.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


# ---- EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1 (2605.09992) ----


def eagle_inputs(w: Weights, states: np.ndarray) -> np.ndarray:
    """What the head reads of the target's states at three layers, side by side.

    EAGLE-3.1 as its published files have it: the states go through a norm first.
    """
    if (norm := w.get("enc.output_norm.weight")) is not None:
        states = rms_norm(states, norm)
    return states @ w["fc.weight"].T


def eagle_block(w: Weights, tokens: Sequence[int], inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logits after each token, read beside the input before it, and the head's own states."""
    embedded = rms_norm(w["token_embd.weight"][list(tokens)], w["blk.0.attn_norm.weight"])
    x = np.concatenate([embedded, rms_norm(inputs, w["blk.0.attn_norm_2.weight"])], axis=1)
    places = np.arange(len(x))
    q, k, v = (_heads(x @ w[f"blk.0.attn_{name}.weight"].T) for name in "qkv")
    q, k = (rope(one, places, halves=False) for one in (q, k))
    h = inputs + attention(q, k, v, np.tri(len(x), dtype=bool)) @ w["blk.0.attn_output.weight"].T
    h = h + _ffn(w, "blk.0.", rms_norm(h, w["blk.0.ffn_norm.weight"]))
    return rms_norm(h, w["output_norm.weight"]) @ w["output.weight"].T, h


# ---- DFlash (arXiv 2602.06036), DSpark and DFlash 2 ----


def block_logits(w: Weights, states: np.ndarray, block: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The logits at each place of a block after a text with these states, and the hidden states there.

    All places see the text and each other. With DFlash 2's tensors the layers are between convolutions.
    """
    n_past, n = len(states), len(block)
    context = rms_norm(states @ w["fc.weight"].T, w["enc.output_norm.weight"])
    h = w["token_embd.weight"][list(block)]
    i = 0
    while f"blk.{i}.attn_q.weight" in w:
        name = f"blk.{i}."
        h = h + _between(
            w, f"{name}attn", rms_norm(h, w[f"{name}attn_norm.weight"]), _Attention(w, name, context, n_past)
        )
        x = rms_norm(h, w[f"{name}ffn_norm.weight"])
        h = h + _between(w, f"{name}ffn", x, lambda x, name=name: _ffn(w, name, x))
        i += 1
    h = rms_norm(h, w["output_norm.weight"])
    logits = np.full((n, len(w["token_embd.weight"])), -np.inf)
    logits[:, w.get("d2t", slice(None))] = h @ w["output.weight"].T
    return logits, h


class _Attention:
    """Attention of a block of tokens to a text and to itself."""

    def __init__(self, w: Weights, name: str, context: np.ndarray, n_past: int) -> None:
        self._w, self._name, self._context, self._n_past = w, name, context, n_past

    def __call__(self, x: np.ndarray) -> np.ndarray:
        w, name = self._w, self._name
        everything = np.concatenate([self._context, x])
        q, k, v = (
            _heads(rows @ w[f"{name}attn_{letter}.weight"].T)
            for rows, letter in ((x, "q"), (everything, "k"), (everything, "v"))
        )
        q = rope(rms_norm(q, w[f"{name}attn_q_norm.weight"]), self._n_past + np.arange(len(x)), halves=True)
        k = rope(rms_norm(k, w[f"{name}attn_k_norm.weight"]), np.arange(len(everything)), halves=True)
        seen = np.ones((len(q), len(k)), bool)
        return attention(q, k, v, seen) @ w[f"{name}attn_output.weight"].T


def _between(w: Weights, name: str, x: np.ndarray, layer) -> np.ndarray:
    """A layer, between DFlash 2's two convolutions where it has them."""
    base = w.get(f"{name}_conv_base")
    if base is None:
        return layer(x)
    kernels = (x @ w[f"{name}_conv_proj.weight"].T).reshape(len(x), *base.shape[:2], -1)
    return convolved(layer(convolved(x, base[0], kernels[:, 0])), base[1], kernels[:, 1])


def convolved(x: np.ndarray, base: np.ndarray, dynamic: np.ndarray) -> np.ndarray:
    """out[i, c] = sum over taps t of (base[t, c] + dynamic[i, t, group of c]) x[i - t, c], for i >= t."""
    n_taps, width = base.shape
    found = np.zeros_like(x)
    for i in range(len(x)):
        for t in range(min(n_taps, i + 1)):
            found[i] += (base[t] + np.repeat(dynamic[i, t], width // dynamic.shape[2])) * x[i - t]
    return found


def markov_logits(w: Weights, logits: np.ndarray, before: Sequence[int]) -> np.ndarray:
    """DSpark: the logits of places after these tokens: base + W2 W1[token before]."""
    found = logits.copy()
    found[:, w.get("d2t", slice(None))] += w["markov_w1.weight"][list(before)] @ w["markov_w2.weight"].T
    return found


def confidences(w: Weights, hidden: np.ndarray, before: Sequence[int]) -> np.ndarray:
    """DSpark: how likely the tokens of places are accepted after these: sigmoid(c . [h; W1[t]] + b)."""
    x = np.concatenate([hidden, w["markov_w1.weight"][list(before)]], axis=1)
    return 1 / (1 + np.exp(-(x @ w["conf_proj.weight"].reshape(-1) + w["conf_proj.bias"])))


def pair_scores(w: Weights, logits: np.ndarray, hidden: np.ndarray, before: int, top_k: int) -> np.ndarray:
    """DFlash 2: the scores of a place's candidates after a token: logit(b) + <A[a] * H h, B[b]>."""
    candidates = np.argsort(-logits)[:top_k]
    gated = w["selector_predecessor.weight"][before] * (w["selector_hidden.weight"] @ hidden)
    found = np.full_like(logits, -np.inf)
    found[candidates] = logits[candidates] + w["selector_successor.weight"][candidates] @ gated
    return found


# ---- Gemma 4 ----


def gemma_pass(
    w: Weights, cache: Sequence[Cells], embedded: np.ndarray, state: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """The logits after a token, and the head's own state, in the cache of a target.

    `embedded`: the target's embedding of the token; `state`: that before it, the target's or the head's own.
    `cache`: of the target's last layer but one, which has a sliding window, and of its last.
    """
    scaled = embedded * np.sqrt(len(embedded))
    h = w["nextn.pre_projection.weight"] @ np.concatenate([scaled, state])
    for i, (positions, keys, values) in enumerate(cache):
        place = positions.max() + 1  # of all tokens of a draft
        x = rms_norm(h, w[f"blk.{i}.attn_norm.weight"])
        q = rms_norm(_heads((w[f"blk.{i}.attn_q.weight"] @ x)[None]), w[f"blk.{i}.attn_q_norm.weight"])
        q = rope(q, np.array([place]), halves=True, slower=w["rope_freqs.weight"] if i else 1.0)
        k, v = (rows.reshape(len(rows), -1, q.shape[-1]) for rows in (keys, values))
        k, v = (np.repeat(heads, N_HEADS // heads.shape[1], axis=1) for heads in (k, v))
        seen = place - positions < window if i == 0 else np.ones(len(positions), bool)
        a = w[f"blk.{i}.attn_output.weight"] @ attention(q, k, v, seen[None], scale=1.0)[0]
        h = h + rms_norm(a, w[f"blk.{i}.post_attention_norm.weight"])
        x = rms_norm(h, w[f"blk.{i}.ffn_norm.weight"])
        gate, up, down = (w[f"blk.{i}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        f = down @ (gelu(gate @ x) * (up @ x))
        h = (h + rms_norm(f, w[f"blk.{i}.post_ffw_norm.weight"])) * w[f"blk.{i}.layer_output_scale.weight"]
    h = rms_norm(h, w["output_norm.weight"])
    return w["token_embd.weight"] @ h, w["nextn.post_projection.weight"] @ h


def cells_of(state: np.ndarray) -> list[Cells]:
    """Positions, keys and values in the copied state of a sequence, of each kind of layers' first.

    As llama.cpp writes F16 caches of models with sliding windows, with transposed values: those of layers
    without windows come first.
    """
    data, at = state.tobytes(), 8  # after a magic number and the sequence's

    def take(kind: str, n: int = 1) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(data, kind, n, at)
        at += found.nbytes
        return found

    found = []
    while at < len(data):
        _n_streams, n_cells = take("u4", 2)
        positions = []
        for _ in range(n_cells):
            position, n_sequences = take("u4", 2)
            take("u4", n_sequences)
            positions.append(int(position))
        transposed, n_layers = take("u4", 2)
        assert (transposed, n_layers) == (1, 1)
        take("u4")
        width = int(take("u8")[0]) // 2
        keys = take("f2", n_cells * width).reshape(n_cells, width)
        _kind, _size, width = take("u4", 3)
        values = take("f2", n_cells * width).reshape(width, n_cells).T
        found.append((np.array(positions), keys.astype(np.float64), values.astype(np.float64)))
    return found
