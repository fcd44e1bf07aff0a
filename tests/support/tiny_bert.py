"""Tiny random BERTs as GGUF, and the same network in numpy, with which vectors are compared.

reference = TinyBert(seed=1)                 # weights
reference.write(path, pooling="mean")        # a file that llama.cpp loads
reference.vector(tokens, "mean")             # what a pass over it must give
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
WORDS = [
    *CONTROL,
    *(f"\u2581{letter}" for letter in LETTERS),
    *LETTERS,
    "\u2581the",
    "\u2581cat",
    "\u2581dog",
]
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
EPSILON = 1e-12


class TinyBert:
    """The weights of a BERT, by llama.cpp's names."""

    def __init__(
        self, *, seed: int = 1, n_layer: int = 2, n_embd: int = 64, n_ff: int = 128, n_ctx: int = 48
    ):
        self.n_layer, self.n_embd, self.n_ff, self.n_ctx, self.n_head = n_layer, n_embd, n_ff, n_ctx, 4
        rng = np.random.default_rng(seed)

        def matrix(n_out: int, n_in: int) -> np.ndarray:
            return rng.normal(0, 1 / np.sqrt(n_in), (n_out, n_in)).astype(np.float32)

        def vector(n: int, mean: float = 0.0) -> np.ndarray:
            return rng.normal(mean, 0.1, n).astype(np.float32)

        weights = {
            "token_embd.weight": rng.normal(0, 1, (len(WORDS), n_embd)).astype(np.float32),
            "position_embd.weight": rng.normal(0, 0.3, (n_ctx, n_embd)).astype(np.float32),
            "token_types.weight": rng.normal(0, 0.1, (2, n_embd)).astype(np.float32),
            "token_embd_norm.weight": vector(n_embd, 1.0),
            "token_embd_norm.bias": vector(n_embd),
        }
        for layer in range(n_layer):
            shapes = {
                **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (n_embd, n_embd)),
                "ffn_up": (n_ff, n_embd),
                "ffn_down": (n_embd, n_ff),
            }
            for name, shape in shapes.items():
                weights[f"blk.{layer}.{name}.weight"] = matrix(*shape)
                weights[f"blk.{layer}.{name}.bias"] = vector(shape[0])
            for name in ("attn_output_norm", "layer_output_norm"):
                weights[f"blk.{layer}.{name}.weight"] = vector(n_embd, 1.0)
                weights[f"blk.{layer}.{name}.bias"] = vector(n_embd)
        self.weights = weights
        self.head = {
            "cls.weight": matrix(n_embd, n_embd),
            "cls.bias": vector(n_embd),
            "cls.output.weight": 3 * matrix(1, n_embd),
            "cls.output.bias": vector(1),
        }

    def write(self, path: Path, *, pooling: str | None = "mean", classes: int = 1) -> Path:
        """Write the file. `pooling` None: it does not say."""
        writer = gguf.GGUFWriter(path, "bert")
        writer.add_type("model")
        writer.add_name("tiny bert")
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_layer_norm_eps(EPSILON)
        writer.add_causal_attention(False)
        if pooling is not None:
            writer.add_uint32("bert.pooling_type", POOLING[pooling])
        if classes > 1:
            writer.add_array("bert.classifier.output_labels", [f"class {i}" for i in range(classes)])
        writer.add_token_type_count(2)
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(WORDS)
        writer.add_token_types([3 if i < len(CONTROL) else 1 for i in range(len(WORDS))])
        for name, token in (
            ("unknown", UNK),
            ("seperator", SEP),
            ("padding", PAD),
            ("cls", CLS),
            ("mask", MASK),
        ):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        writer.add_uint32("tokenizer.ggml.bos_token_id", CLS)
        for name, tensor in {**self.weights, **(self.head if pooling == "rank" else {})}.items():
            repeats = classes if name.startswith("cls.output") else 1
            writer.add_tensor(name, np.concatenate([tensor] * repeats))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def states(self, tokens: list[int]) -> np.ndarray:
        """The states of a text's tokens after the last layer, computed with 64 bits."""
        weights = {name: tensor.astype(np.float64) for name, tensor in self.weights.items()}

        def linear(x: np.ndarray, name: str) -> np.ndarray:
            return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            x = x - x.mean(1, keepdims=True)
            x = x / np.sqrt((x**2).mean(1, keepdims=True) + EPSILON)
            return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

        n, width = len(tokens), self.n_embd // self.n_head
        x = weights["token_embd.weight"][tokens] + weights["position_embd.weight"][:n]
        x = norm(x + weights["token_types.weight"][0], "token_embd_norm")
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            q, k, v = (
                linear(x, f"{block}attn_{part}").reshape(n, self.n_head, width).swapaxes(0, 1)
                for part in "qkv"
            )
            scores = q @ k.swapaxes(1, 2) / np.sqrt(width)
            shares = np.exp(scores - scores.max(2, keepdims=True))
            mixed = (shares / shares.sum(2, keepdims=True)) @ v
            x = norm(
                x + linear(mixed.swapaxes(0, 1).reshape(n, -1), f"{block}attn_output"),
                f"{block}attn_output_norm",
            )
            up = linear(x, f"{block}ffn_up")
            gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            x = norm(x + linear(gelu, f"{block}ffn_down"), f"{block}layer_output_norm")
        return x

    def vector(self, tokens: list[int], pooling: str) -> np.ndarray:
        """The vector of a text, of length 1."""
        states = self.states(tokens)
        found = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        return found / np.linalg.norm(found)

    def score(self, tokens: list[int]) -> float:
        """The relevance of a pair, 0 to 1."""
        head = {name: tensor.astype(np.float64) for name, tensor in self.head.items()}
        inner = np.tanh(head["cls.weight"] @ self.states(tokens)[0] + head["cls.bias"])
        return float(1 / (1 + np.exp(-(head["cls.output.weight"] @ inner + head["cls.output.bias"])[0])))
