"""A tiny target, texts that follow a rule it could learn, and a head to train for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from edgespec.apps.forge.dataset import BUILT_IN, TrainingText
from edgespec.apps.forge.training.batches import BatchSize
from edgespec.apps.forge.training.head import HeadFamily
from edgespec.apps.forge.training.weights import OUTPUT_NORM, ModelWeights
from edgespec.llama.gguf_header import read_header
from tiny_gguf import write_tiny_gguf

N_EMBD = 64
IDS = np.arange(0, 280, 2)
ROWS = BatchSize(n=2, columns=64, answers=48, overlap=8)


def write_target(directory: Path) -> Path:
    return write_tiny_gguf(directory / "target.gguf", n_embd=N_EMBD, n_head=4, n_head_kv=2, seed=3)


def tiny_head(target: Path, sample: Iterable[TrainingText] = ()) -> HeadFamily:
    return HeadFamily(ModelWeights(read_header(target)), "5a" * 32, IDS, 96, sample)


class TinyTexts:
    """A dataset in memory: each token is followed by the one that the target's rows like after it.

    The feature at a token is a noisy copy of the output row of the next: what a target that is sure would
    have there.
    """

    def __init__(self, target: Path, n: int, *, seed: int = 0, lengths: tuple[int, int] = (20, 50)) -> None:
        rng = np.random.default_rng(seed)
        weights = ModelWeights(read_header(target))
        rows = weights.rows(weights.output)[IDS]
        following = np.random.default_rng(7).permutation(len(IDS))
        norm = weights.vector(OUTPUT_NORM)
        self.all: list[TrainingText] = []
        for number in range(n):
            length = int(rng.integers(*lengths))
            at = [int(rng.integers(len(IDS)))]
            while len(at) < length:
                at.append(int(following[at[-1]]))
            first = int(rng.integers(0, 3))
            kept = rows[at[first + 1 :]]
            features = kept / np.sqrt((kept**2).mean(-1, keepdims=True)) * norm
            features += rng.normal(0, 0.05, features.shape)
            self.all.append(
                TrainingText(
                    tokens=IDS[at].astype(np.int32),
                    n_prompt=first + 5,
                    first=first,
                    features=features.astype(np.float16),
                    temperature=0.0,
                    source=BUILT_IN,
                    key=(0 if number % 5 == 0 else 1 << 63) + number,
                )
            )

    def texts(self, *, held_out: bool | None = None) -> list[TrainingText]:
        return [text for text in self.all if held_out is None or text.held_out == held_out]
