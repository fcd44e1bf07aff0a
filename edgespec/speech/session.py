"""One sequence of a Whisper decoder as a session of the exact loop, so that drafts run through it unchanged.

The loop (decoding/generate.py), the draft model and the batcher ask a session for passes, and to take tokens
back; llama.cpp's is edgespec/llama/session.py. A Whisper decoder attends to nothing but its tokens and one
window of sound, so taking tokens back is a shorter cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from edgespec.llama.batch import SequenceTokens
from edgespec.llama.outputs import ForwardResult, Rows
from edgespec.llama.session import Session
from edgespec.speech.whisper_model import SequenceBatch


class DecoderPasses(Protocol):
    """The cache of a Whisper decoder over one window of sound: several sequences, one pass for all."""

    def forward(self, batch: Sequence[SequenceBatch]) -> Sequence[Rows]:
        """Append tokens to sequences; return the logits of each, (n_logits, n_vocab), until the next pass."""

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""

    def rewind(self, sequence: int, n_keep: int) -> None:
        """Cut a sequence back to its first `n_keep` tokens."""


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """The facts that the loop asks a model for."""

    n_vocab: int
    is_eog: Callable[[int], bool]
    path: str
    name: str
    keeps_state: bool = False
    can_rewind: bool = True


class SpeechSession:
    """One sequence in a cache of a Whisper decoder; `session()` is what the loop takes."""

    all_logits = False
    n_features_max = 0

    def __init__(
        self,
        cache: DecoderPasses,
        traits: DecoderTraits,
        *,
        n_ctx: int,
        sequence: int = 0,
        most_drafted: int = 32,
        noted: int | None = None,
    ) -> None:
        """Continue `sequence` of `cache`, up to `n_ctx` tokens.

        `most_drafted`: most tokens of a tree in one pass. `noted`: the position whose logits are kept when
        they are computed, in `noted_row`: that of <|startoftranscript|>, where the model says whether anyone
        speaks.
        """
        self.cache = self
        self.model = traits
        self.sequence = sequence
        self.n_ctx = n_ctx
        self.most_drafted = most_drafted
        self.noted_row: Rows | None = None
        """The logits at the noted position, (n_vocab,), a copy; None: not computed yet."""
        self.seconds = 0.0
        """Time of all passes."""
        self._cache = cache
        self._noted = noted

    def session(self) -> Session:
        """Return it as the type that the loop names."""
        return cast("Session", self)

    @property
    def n_past(self) -> int:
        """Tokens in the sequence."""
        return self._cache.n_past(self.sequence)

    def forward(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        """Run a pass over one part, which is this sequence's."""
        (part,) = parts
        started = time.perf_counter()
        n_tokens, parents = len(part.tokens), part.parents
        if parents is not None and list(parents) == list(range(-1, len(parents) - 1)):
            parents = None
        n_rows = part.n_logits
        noted = None
        if self._noted is not None and self.noted_row is None:
            noted = self._noted - self.n_past
            if 0 <= noted < n_tokens and parents is None:
                n_rows = max(n_rows, n_tokens - noted)
            else:
                noted = None
        (rows,) = self._cache.forward([SequenceBatch(self.sequence, part.tokens, n_rows, parents)])
        if noted is not None:
            self.noted_row = np.array(rows[noted - n_tokens])
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return [ForwardResult(rows[n_rows - part.n_logits :], seconds, n_tokens)]

    def eval(self, tokens: Sequence[int], *, n_logits: int = 1, parents: Sequence[int] | None = None) -> Rows:
        """Append `tokens`; return the logits after each of the last `n_logits`, as Session.eval does."""
        if not tokens:
            return np.empty((0, self.model.n_vocab), np.float32)
        return self.forward([SequenceTokens(self.sequence, tokens, n_logits, parents)])[0].rows

    def rewind(self, n_keep: int) -> int:
        """Cut the sequence back to its first `n_keep` tokens; return `n_keep`."""
        n_past = self.n_past
        if not 0 <= n_keep <= n_past:
            raise ValueError(f"cannot keep {n_keep} of {n_past} tokens")
        if n_keep < n_past:
            self._cache.rewind(self.sequence, n_keep)
        return n_keep

    def clear(self) -> None:
        """Empty the sequence."""
        self.rewind(0)

    def close(self) -> None:
        """Do nothing: the cache belongs to the window."""
