"""A draft head that works in the target's own cache (Gemma 4's), in the place of a draft model.

It reads the last token together with the target's hidden state before it, and along a draft each token with
its own last state. It has read nothing and takes nothing back: what it attends to are the target's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edgespec.decoding.features import TargetFeatures
from edgespec.decoding.forward import DraftForward
from edgespec.decoding.session import Features, ForwardResult, ModelSession
from edgespec.drafting.draft_model import DraftModel
from edgespec.llama.lent_cache import LentSession
from edgespec.llama.sequence_pool import SequencePool


class LentModel(DraftModel):
    """`session`'s head behind the interface of DraftModel."""

    starts_idle = False
    features: TargetFeatures
    _session: LentSession

    def __init__(
        self, session: LentSession, features: TargetFeatures, pool: SequencePool, *, n_vocab: int
    ) -> None:
        """Draft with `session`, from what `features` will hold, in the cache of `pool`, the target's.

        Only the first `n_vocab` tokens are drafted.
        """
        super().__init__(session, n_vocab=n_vocab)
        self.features, self._pool = features, pool
        self._own_at = -1
        self._own: Features = features.rows(0, 0)  # its own hidden state of token `_own_at`

    def join(self, target: ModelSession) -> None:
        """Draft for this session of the target from now on."""
        self._session.target = target

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`."""
        self._own_at = -1

    def rest(self) -> None:
        """Leave the target's session, which ends."""
        self._session.target = None

    def follows(self, n_tokens: int) -> bool:
        """Whether it can draft after `n_tokens`: it needs the state of the last but one, and free cells."""
        known = self.features.first <= n_tokens - 2 < self.features.end or self._own_at == n_tokens - 2 >= 0
        return known and self.n_past > 0 and self._pool.make_room(self._pool.n_running)

    def n_unread(self, n_tokens: int) -> int:
        """Return 1: the last token."""
        return 1

    def skip(self, n_tokens: int, n_recent: int) -> None:
        """Do nothing."""

    def read(self, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def make_room(self, n_tokens: int) -> None:
        """Do nothing: the target's sequence has what room it needs."""

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> DraftForward | ForwardResult:
        """Return the pass over the last token; `follows` must say that it can, and there are no `guesses`."""
        if guesses:
            raise ValueError("it drafts without guesses")
        before = len(tokens) - 2
        is_known = self.features.first <= before < self.features.end
        state = self.features.rows(before, before + 1) if is_known else self._own
        asked = DraftForward(self._session, self._known(tokens[-1:]), inputs=state, with_features=True)
        asked.finish = partial(self._finish_read, len(tokens) - 1)
        return asked

    def _finish_read(self, at: int, evaluated: ForwardResult) -> ForwardResult:
        if evaluated.features is not None:
            self._own_at, self._own = at, evaluated.features[-1:].copy()
        return self._finish(evaluated)

    def trim(self, n_tokens: int) -> None:
        """Forget its own state of what comes after the sequence's first `n_tokens` tokens."""
        if self._own_at >= n_tokens:
            self._own_at = -1
