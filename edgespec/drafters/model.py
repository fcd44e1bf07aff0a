"""A small model as the drafter: it samples each token from its own distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec import _core
from edgespec.drafters.base import Draft, Tokens
from edgespec.session import Rows, Session


class ModelDrafter:
    """Drafts with `session`'s model under the same filters as the target.

    Its cache is trimmed to what was accepted and nothing is evaluated twice: at most two pending
    tokens (the last drafted one, which it never had to read, and the one that followed) ride in the
    next batch. When its context is full it reads the most recent part again and goes on from there:
    that costs acceptance, never exactness.
    """

    name = "model"

    def __init__(self, session: Session, *, n_vocab: int, is_eog: Callable[[int], bool]) -> None:
        """Draft with `session`; only its first `n_vocab` logits name tokens the target knows."""
        self._session = session
        self._n_vocab = min(n_vocab, session.model.n_vocab)
        self._is_eog = is_eog
        self._offset = 0  # the timeline's index of the first token in the cache

    @property
    def n_ctx(self) -> int:
        """Tokens the draft's context holds."""
        return self._session.n_ctx

    def begin(self, tokens: Sequence[int]) -> None:
        """Read all of `tokens` but the last, which rides with the first draft."""
        self._session.clear()
        self._offset = 0
        self._make_room(len(tokens))
        self._read(tokens[self._offset : -1], n_logits=0)

    def draft(
        self,
        tokens: Sequence[int],
        gamma: int,
        sampler: _core.Sampler,
        recent: Callable[[Sequence[int]], Tokens],
        coins: Callable[[int], list[float]],
    ) -> Draft:
        """Propose up to `gamma` tokens, none after an end-of-generation token."""
        gamma = min(gamma, self._session.n_ctx // 2 - 1)
        if gamma < 1:
            return Draft()
        self._make_room(len(tokens) + gamma)
        pending = tokens[self._offset + self._session.n_past :]
        drafted: list[int] = []
        for slot, coin in enumerate(coins(gamma)):
            row = self._read(pending, n_logits=1)[0, : self._n_vocab]
            pending = [sampler.sample(row, recent(drafted), coin, slot)]
            drafted += pending
            if self._is_eog(pending[0]):
                break
        return Draft(drafted)

    def accept(self, tokens: Sequence[int], n_accepted: int) -> None:
        """Trim the cache to the tokens that were kept."""
        self._session.rewind(min(self._session.n_past, len(tokens) - 1 - self._offset))

    def close(self) -> None:
        """Free the session."""
        self._session.close()

    def _read(self, tokens: Sequence[int], *, n_logits: int) -> Rows:
        """Evaluate `tokens`; one the draft does not have stands as token 0, at the cost of acceptance."""
        n_vocab = self._session.model.n_vocab
        return self._session.eval([t if t < n_vocab else 0 for t in tokens], n_logits=n_logits)

    def _make_room(self, n_tokens: int) -> None:
        """Start again from the recent half of the context when `n_tokens` do not fit in it."""
        n_ctx = self._session.n_ctx
        if n_tokens - self._offset > n_ctx:
            self._session.clear()
            self._offset = n_tokens - n_ctx // 2
