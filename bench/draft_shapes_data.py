"""Texts that `draft_shapes.py` trains on and judges by, with what all shapes need of the target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from draft_shapes_model import CLIP, ShapeBatch
from draft_shapes_states import INDEX, LAYERS, STATES
from edgespec.forge.dataset import TrainingText
from edgespec.forge.training.arithmetic import FACTOR, score
from edgespec.forge.training.batches import BatchSize, EpochPosition, TextPacking, batches
from edgespec.forge.training.family import TrainingBatch
from edgespec.forge.training.head_file import read_params
from edgespec.forge.training.weights import EMBEDDINGS, OUTPUT_NORM, BlockShape, ModelWeights
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import read_head

_N_LIKELIEST, _N_OTHERS = 1536, 512
_LEAST = 0.003  # probabilities below count as nothing where the likeliest tokens of a batch are chosen
_RIDGE = 1e-2
_N_FITTED = 40_000
_OUTLIER = 200.0  # elements beyond: not counted in the scale of states

Floats = npt.NDArray[np.float32]


class TargetTexts:
    """Texts with states, those held out by kind, and the target's sizes and output matrix."""

    def __init__(self, texts: Path, folder: Path, target: Path, head: Path) -> None:
        self.target = ModelWeights(check_model_file(target))
        own, made = self.target.shape(), read_head(check_model_file(head))
        if made is None:
            raise SystemExit(f"{head}: no draft head, whose tokens could be taken")
        self.head = read_params(head, self.target)
        self.shape = BlockShape(
            own.n_embd, 2 * own.n_embd, own.n_head, own.n_head_kv, own.head_dim, own.rope_base, own.epsilon
        )
        self.frozen = {
            "output": jnp.asarray(self.target.rows(self.target.output, made.token_ids)).astype(FACTOR),
            "row": jnp.asarray(self.target.output_rows(made.token_ids)),
        }
        self.norm = self.target.vector(OUTPUT_NORM)
        self._read(texts, folder)
        self.scales = self._find_scales()
        self._likely: dict[bytes, tuple[npt.NDArray[np.intp], Floats]] = {}
        output = self.frozen["output"]
        self._probs = jax.jit(
            lambda x: jax.nn.softmax(score(x.astype(jnp.float32), output), -1).astype(jnp.float16)
        )

    def _read(self, texts: Path, folder: Path) -> None:
        stored = np.load(texts)
        all_tokens = np.split(stored["tokens"], np.cumsum(stored["length"])[:-1])
        states = np.memmap(folder / STATES, np.float16, "r")
        width, at = (len(LAYERS) + 1) * self.shape.n_embd, 0
        self.train: list[TrainingText] = []
        self.held_out: dict[str, list[TrainingText]] = {"code": [], "prose": []}
        for one in json.loads((folder / INDEX).read_text()):
            i, n = one["text"], one["n"]
            features = states[at * width : (at + n) * width].reshape(n, width)
            at += n
            tokens, n_prompt = all_tokens[i].astype(np.int32), int(stored["n_prompt"][i])
            temperature = float(stored["temperature"][i])
            text = TrainingText(tokens, n_prompt, 0, features, temperature, "target", i)
            kept = self.held_out["code" if one["code"] else "prose"] if one["held"] else self.train
            kept.append(text)

    @property
    def summary(self) -> dict[str, int]:
        """Tokens, those of prompts included."""
        held_out = {kind: sum(len(text.tokens) for text in some) for kind, some in self.held_out.items()}
        return {"train": sum(len(text.tokens) for text in self.train), **held_out}

    def _find_scales(self) -> tuple[float, Floats]:
        """Return scales of embeddings and of the states, each element of a middle layer having its own."""
        some = np.concatenate([text.features[4:] for text in self.train[:40]]).astype(np.float32)
        scale = np.sqrt((np.clip(some, -_OUTLIER, _OUTLIER) ** 2).mean(0))
        scale[-self.shape.n_embd :] = np.sqrt((self.norm**2).mean())
        embeddings = self.target.rows(EMBEDDINGS, np.arange(16384))
        return float(np.sqrt((embeddings**2).mean())), np.maximum(scale, 1e-3)

    def fitted(self, n_states: int) -> tuple[Floats, Floats, Floats]:
        """Return We, Wf and Wo: least squares for f(c) / norm from e(c) and F(c - 1), or f(c - 1) alone."""
        n, width = self.shape.n_embd, self.shape.n_embd * n_states
        norm = np.where(np.abs(self.norm) < 0.1 * np.abs(self.norm).mean(), np.inf, self.norm)
        size, done = n + width, 0
        squares, products = np.zeros((size, size), np.float32), np.zeros((size, n), np.float32)
        for text in self.train:
            states = text.features.astype(np.float32)
            scaled = np.clip(states[:-1, -width:] / self.scales[1][-width:], -CLIP, CLIP)
            embeddings = self.target.embed(text.tokens[1:-1]).astype(np.float32) / self.scales[0]
            x = np.concatenate([embeddings, scaled], 1)
            squares += x.T @ x
            products += x.T @ (states[1:, -n:] / norm)
            done += len(x)
            if done >= _N_FITTED:
                break

        def solve(chosen: npt.NDArray[np.intp]) -> Floats:
            part = squares[np.ix_(chosen, chosen)]
            damped = part + np.diag(np.full(len(part), _RIDGE * np.diag(part).mean(), np.float32))
            return np.linalg.solve(damped, products[chosen]).astype(np.float32)

        everything = solve(np.arange(size))
        last = everything if n_states == 1 else solve(np.r_[:n, size - n : size])
        return everything[:n], everything[n:], last[n:]

    def feed(self, n_rows: int, n_anchors: int, seed: int) -> Iterator[ShapeBatch]:
        """Yield batches of the texts to train on, without end; the same for each shape."""
        packing, rng = TextPacking(self.train, BatchSize(n_rows)), np.random.default_rng(seed)
        for batch, _ in batches(packing, self.target.embed, n_rows, seed, EpochPosition()):
            anchors = np.zeros((n_rows, n_anchors), np.int32)
            for row, weights in zip(anchors, batch.weights, strict=True):
                n = max(1, int(weights.sum()))
                row[:] = np.sort(np.resize(rng.permutation(n), n_anchors))
            yield ShapeBatch(*batch, anchors, *self._compared(batch, rng))

    def _compared(
        self, batch: TrainingBatch, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.int32], Floats]:
        """Choose the target's likeliest tokens over all answers, and a random sample of the others.

        Also returned: logarithm of the number of tokens that each stands for.
        """
        mass = np.zeros(len(self.frozen["output"]), np.float32)
        for r in range(len(batch.tokens)):
            kept, amount = self._likely_of(batch, r)
            mass[kept] += amount
        order = np.argsort(-mass, kind="stable")
        others = rng.choice(order[_N_LIKELIEST:], _N_OTHERS, replace=False)
        each = np.log((len(mass) - _N_LIKELIEST) / _N_OTHERS)
        stands_for = np.concatenate([np.zeros(_N_LIKELIEST), np.full(_N_OTHERS, each)]).astype(np.float32)
        return np.concatenate([order[:_N_LIKELIEST], others]).astype(np.int32), stands_for

    def _likely_of(self, batch: TrainingBatch, r: int) -> tuple[npt.NDArray[np.intp], Floats]:
        """Return likely tokens of a row's answers, and the sums of their probabilities; remembered."""
        key = batch.tokens[r].tobytes()
        if key not in self._likely:
            answers = batch.answers[r][batch.weights[r] > 0]
            states = np.zeros((batch.answers.shape[1], self.shape.n_embd), np.float16)
            states[: len(answers)] = batch.features[r, answers, -self.shape.n_embd :]
            probs = np.asarray(self._probs(states))[: len(answers)]
            mass = np.where(probs > _LEAST, probs, 0).sum(0, dtype=np.float32)
            kept = np.flatnonzero(mass)
            self._likely[key] = kept, mass[kept]
        return self._likely[key]
