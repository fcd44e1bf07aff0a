"""The cache of a target, lent to a head that has none of its own (Gemma 4's).

The head's layers attend to the keys and values of the target's last layers, one with a sliding window and one
without. Its passes leave nothing: all of a draft's tokens stand at the place after the last that the target
has read, and only the head's own hidden state goes from one to the next.

    LentCache     a context of the head on the cells of the target's context; it needs a free cell a token
    LentSession   passes after a sequence of the target, which they leave as it is
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec._core import Interrupt
from edgespec.decoding.session import ModelSession, Rows, SequenceTokens
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.weights import Model


class LentCache(KVCache):
    """A context on the cells of another context, which must stay open longer.

    The library empties the cells when it makes such a context.
    """

    def __init__(
        self, model: Model, lender: KVCache, *, n_threads: int, interrupt: Interrupt | None = None
    ) -> None:
        """Let `model` work on the cells of `lender`, a cache of its target with nothing in it yet.

        Raises EdgespecError if the context cannot be created.
        """
        if any(session.n_past for session in lender.sessions.values()):
            raise ValueError("the cells to be lent are in use")
        model.context_beside = lender.context
        size = KVCacheSize(
            n_ctx=lender.n_ctx,
            n_batch=min(lender.n_batch, model.most_batch),
            n_logits_max=lender.n_logits_max,
            n_sequences=lender.n_sequences,
        )
        super().__init__(model, size, n_threads=n_threads, takes_inputs=True, interrupt=interrupt)
        self.sessions = lender.sessions


class LentSession:
    """Passes of a head after a session of its target."""

    def __init__(self, cache: LentCache, target: ModelSession | None = None) -> None:
        """Work in `cache`, after the sequence of `target`; it can be set later."""
        self.cache, self.model, self.target = cache, cache.model, target
        self.n_ctx = cache.n_ctx
        """Most tokens of the target's sequence."""

    @property
    def sequence(self) -> int:
        """The target's sequence in the cache."""
        assert self.target  # noqa: S101 - for the type checker
        return self.target.sequence

    @property
    def n_past(self) -> int:
        """Tokens that the target has read; 0 before there is one."""
        return self.target.n_past if self.target else 0

    @property
    def tokens(self) -> list[int]:
        """The tokens that the target has read."""
        return self.cache.sessions[self.sequence].tokens if self.target else []

    def eval(self, tokens: Sequence[int], *, n_logits: int = 1) -> Rows:
        """Return the logits after each of the last `n_logits` of `tokens`, beside states of zeros."""
        inputs = np.zeros((len(tokens), self.model.n_input), np.float32)
        return self.cache.forward([SequenceTokens(self.sequence, tokens, n_logits, inputs=inputs)])[0].rows

    def rewind(self, n_keep: int) -> int:
        """Do nothing, as no pass left anything; return `n_keep`."""
        return n_keep

    def keep(self) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the cache is closed with its model, or its lender."""
