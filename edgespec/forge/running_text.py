"""One of the texts that a target is writing, or reading, for a dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import Coins
from edgespec.forge.dataset import READ, TrainingText
from edgespec.forge.prompts import TextPrompt, TokenPrompt
from edgespec.llama.outputs import Features


@dataclass(eq=False, slots=True)
class RunningText:
    """A prompt and what the target has said to it so far, or a text that it reads."""

    prompt: TextPrompt | TokenPrompt
    key: int
    tokens: list[int]
    n_prompt: int
    n_end: int
    """Tokens at which it ends, at the latest."""
    sequence: int
    """Its timeline in the cache."""
    first: int
    """The first token whose hidden state is kept."""
    features: npt.NDArray[np.float16]
    """Hidden states of tokens `first` .. n_end - 2, filled as they are read."""
    temperature: float
    """NaN: the text is only read."""
    coins: Coins
    n_read: int = 0
    """Tokens in the cache."""

    @property
    def reads_only(self) -> bool:
        """Whether all of it is there already."""
        return math.isnan(self.temperature)

    @property
    def n_unread(self) -> int:
        """Tokens that are there to be read: of a text that is only read, its last is not needed."""
        return len(self.tokens) - self.n_read - self.reads_only

    @property
    def n_done(self) -> int:
        """Tokens after the prompt that were written, or read."""
        return max(0, self.n_read - self.n_prompt) if self.reads_only else len(self.tokens) - self.n_prompt

    def keep(self, features: Features) -> None:
        """Keep the hidden states of the tokens that were just read."""
        skipped = max(0, self.first - self.n_read)
        start, end = self.n_read + skipped - self.first, self.n_read + len(features) - self.first
        if end > start:
            self.features[start:end] = features[skipped:]
        self.n_read += len(features)

    def finished(self) -> TrainingText:
        """Return it as it is now."""
        n = len(self.tokens)
        return TrainingText(
            tokens=np.array(self.tokens, np.int32),
            n_prompt=self.n_prompt,
            first=self.first,
            features=self.features[: n - 1 - self.first],
            temperature=self.temperature,
            source=READ if self.reads_only else self.prompt.source,
            key=self.key,
        )
