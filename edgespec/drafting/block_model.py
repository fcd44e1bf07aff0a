"""A draft head that drafts a block of tokens in one pass (DFlash), in the place of a draft model.

It reads the target's hidden states, each at its token's place, without tokens. A draft is one pass over the
last token and masks; what it says of each mask depends on no other drafted token:

    sequence     t0  t1  t2  t3 |  m   m   m      t3 is emitted, its state not known yet
    read with    f0  f1  f2     |                 f: the target's, known after its pass
    the pass                 t3 |  m   m   m      gives the distributions of the three tokens after t3

That pass is taken back at once. So a token is sampled from a distribution that does not depend on the tokens
drafted before it, and acceptance is as exact as with any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from edgespec.decoding.features import TargetFeatures
from edgespec.decoding.forward import DraftForward
from edgespec.decoding.session import ForwardResult, Rows, n_common
from edgespec.drafting.costs import N_MAX
from edgespec.drafting.draft_model import DraftModel
from edgespec.llama.published_heads import BlockHead
from edgespec.llama.session import Session

_FIRST, _FURTHER = 2, 1  # what `costs.of_blocks` has as n for the pass of a draft, and for what it gave


class BlockModel(DraftModel):
    """`session`'s head behind the interface of DraftModel."""

    starts_idle = False
    features: TargetFeatures

    def __init__(self, session: Session, features: TargetFeatures, head: BlockHead, *, n_vocab: int) -> None:
        """Draft with `session`, of a cache that takes inputs, from what `features` will hold.

        Only the first `n_vocab` tokens are drafted.
        """
        super().__init__(session, n_vocab=n_vocab)
        self.features = features
        self._masks = [head.mask] * (head.n_block - 1)
        self._began_at = 0  # tokens of the sequence that the last pass was made after
        self._rows: Rows = np.empty((0, self._n_row), np.float32)

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`; what was read of one that begins like it stays."""
        self._rows = self._rows[:0]
        n_same = n_common(self._session.tokens, tokens[self._offset :])
        if n_same:
            self._session.rewind(n_same)
        else:
            self._start_at(self.features.first)

    def rest(self) -> None:
        """Do nothing: what was read stays for the next text, which may begin like this one."""

    def follows(self, n_tokens: int) -> bool:
        """Say whether it can draft after `n_tokens` tokens.

        It needs all states but the last token's, and at least one; or the last are drafted, and a part of
        its block is left.
        """
        if self._is_new(n_tokens):
            return max(self.features.first, self._offset) < n_tokens - 1 == self.features.end
        is_last = self._began_at == self.features.end + 1
        return is_last and 0 < n_tokens - self._began_at < len(self._rows)

    def n_unread(self, n_tokens: int) -> int:
        """Return 2 where a draft begins, which takes a pass, and 1 within one."""
        return _FIRST if self._is_new(n_tokens) else _FURTHER

    def make_room(self, n_tokens: int) -> None:
        """Start again from the recent half where the sequence and the masks do not fit."""
        super().make_room(n_tokens + len(self._masks))

    def read(self, tokens: Sequence[int]) -> None:
        """Read the states of `tokens` that are known and it has not read."""
        start = self._offset + self.n_past
        if start < self.features.first:
            start = self.features.first
            self._start_at(start)
        if start < self.features.end:
            inputs = self.features.rows(start, self.features.end)
            DraftForward(self._session, tokens[start : self.features.end], 0, inputs=inputs).run()

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> DraftForward | ForwardResult:
        """Return the pass of a block, in which others may share, or what is left of the last one.

        `follows` must say that it can; there are no `guesses`.
        """
        if guesses:
            raise ValueError("a block is drafted without guesses")
        if not self._is_new(len(tokens)):
            at = len(tokens) - self._began_at
            return ForwardResult(self._rows[at : at + 1], 0.0, N_MAX + 1)  # not a pass to learn costs from
        started = time.perf_counter()
        self.read(tokens)
        handled_s = time.perf_counter() - started
        block = [tokens[-1], *self._masks]
        asked = DraftForward(self._session, block, len(block))
        asked.finish = partial(self._finish_block, len(tokens), self.n_past, handled_s)
        return asked

    def _finish_block(
        self, began_at: int, n_read: int, handled_s: float, evaluated: ForwardResult
    ) -> ForwardResult:
        self._session.rewind(n_read)
        self._rows = evaluated.rows[1:, : self._n_row].copy()
        self._began_at = began_at
        is_own = evaluated.n_tokens == 1 + len(self._masks)
        return replace(
            evaluated,
            rows=self._rows[:1],
            n_tokens=_FIRST if is_own else evaluated.n_tokens,
            seconds=handled_s + evaluated.seconds,
        )

    def _is_new(self, n_tokens: int) -> bool:
        """Whether `n_tokens` is the sequence that the target wrote, without drafted tokens."""
        return self.features.end >= n_tokens - 1
