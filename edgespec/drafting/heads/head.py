"""Draft heads: blocks that continue from the target's hidden states, instead of a draft model.

A head has a file of its own, made here (made.py) or published (published.py), or is in the target's own file
(mtp.py). It attends to a window of the sequence. Most draft one token per pass (`HeadModel`):

Token i is read together with the hidden state of token i - 1. That is the target's own if the target has
read it, and otherwise, along a draft, the head's last one:

    sequence     t0  t1  t2  t3 | d4  d5          t3 is emitted, d4 and d5 are drafted
    read with        f0  f1  f2 | g3  g4          f: the target's, known after its pass; g: the head's

Once the target has verified the draft, f3, f4 .. are known: tokens read with g3, g4 .. are removed and
read again, in the same pass as the token that begins the next draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.decoding.choices import DrafterName
from edgespec.decoding.session import Features, Forward, ForwardResult, Inputs, TargetFeatures, n_common
from edgespec.drafting.draft import Draft
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import Policy
from edgespec.errors import UsageError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.draft_records import paired_draft

WINDOW = 1024
"""Tokens to which a head attends at least, where there are as many. More cost time and room, and no more of
its tokens are accepted (docs/measurements/drafts.md)."""
_STEP = WINDOW // 4  # more that it attends to until the oldest are dropped
_TEMPERATURE_RATIO = 0.5  # a head hardly knows how sure the target is; docs/measurements/drafts.md


class HeadDraft(Draft):
    """A draft that reads the target's hidden states."""

    reads_states = True
    model: Model

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without guesses of the suffix store, which a head does not check."""
        return replace(policy, staged=False)

    def writer(self) -> Model:
        """Raise UsageError: a head writes nothing without its target."""
        small = paired_draft(self.target_name, writes=True)
        such_as = f", such as {small}" if small and small != self.name else ""
        raise UsageError(
            f"{self.name} is a draft head, which cannot write in a cascade by itself: choose a draft model"
            f"{such_as}"
        )

    def features(self) -> TargetFeatures:
        """Return a buffer for the target's hidden states along one sequence."""
        return TargetFeatures(self.target.n_state)

    def timed_rows(self, tokens: Sequence[int]) -> Inputs | None:
        """Return rows of zeros instead of hidden states."""
        return np.zeros((len(tokens), self.model.n_input), np.float32)


class WindowedModel(DraftModel):
    """A head that attends only to the last tokens: its pass costs the same in a text of any length.

    The oldest leave its cache, some at a time, and the others stay in place, so that nothing is read again.
    That costs acceptance, never exactness.
    """

    _session: Session

    @property
    def n_held(self) -> int:
        """Tokens in its cache, to which its next pass attends."""
        return self._session.n_held

    def make_room(self, n_tokens: int) -> None:
        """Drop the oldest tokens if a sequence of `n_tokens` exceeds the window by a step.

        If the model cannot drop them, or too much of the sequence is unread, it starts again from the recent
        half when its context is full.
        """
        session = self._session
        n_all, n_past = n_tokens - self._offset, session.n_past
        n_dropped = n_past - session.n_held
        most = min(self.n_ctx, WINDOW + _STEP)
        n_drop = n_all - most * WINDOW // (WINDOW + _STEP)
        if n_all - n_dropped > most and n_drop < n_past and session.drop_first(n_drop):
            return
        if n_all - n_dropped > self.n_ctx:
            self._start_at(n_tokens - self.n_ctx // 2)

    def _go_back(self, n_keep: int) -> bool:
        """Cut its sequence back to `n_keep` tokens; return False if none of them would be left."""
        if n_keep <= self._session.n_past - self._session.n_held:
            return False
        self._session.rewind(n_keep)
        return True


class HeadModel(WindowedModel):
    """The head of `session` behind the interface of DraftModel.

    It begins where the target's hidden states are known, which is late in a long prompt, and starts over
    after a gap in them: that costs acceptance, never exactness.
    """

    features: TargetFeatures

    def __init__(
        self,
        session: Session,
        features: TargetFeatures,
        *,
        n_vocab: int,
        token_ids: npt.NDArray[np.int64] | None = None,
        fusion: Callable[[Sequence[int], Features], Inputs] | None = None,
        encode: Callable[[Features], Features] | None = None,
    ) -> None:
        """Draft with `session`, whose cache takes inputs, from the states in `features`.

        Only the first `n_vocab` tokens are drafted. `token_ids`: the tokens of its rows of logits, ascending;
        None: all. `fusion` returns the inputs for tokens and the states before them; without it, the inputs
        are tokens together with these states. `encode` converts the target's states, not the head's own.
        """
        super().__init__(session, n_vocab=n_vocab)
        if token_ids is not None:
            self.n_vocab = n_vocab
            self._set_tokens(token_ids)
            self.temperature_ratio = _TEMPERATURE_RATIO
        self._fusion, self._encode = fusion, encode
        self.features = features
        self._n_true = 0  # of the sequence's tokens, those before it were read with the target's states
        self._own_at = -1
        self._own: Features = features.rows(0, 0)  # its own hidden state of token `_own_at`

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`; keep the part that it shares with the last one."""
        n_same = n_common(self._session.tokens, tokens[self._offset : -1])
        n_kept = min(n_same, self._n_true - self._offset)
        self._own_at = -1
        if not self._go_back(n_kept):
            self._start_at(self.features.first + 1)

    def rest(self) -> None:
        """Do nothing: the sequence is kept for the next text, which may begin with it."""

    def follows(self, n_tokens: int) -> bool:
        """Whether it can draft after `n_tokens` tokens: it needs the hidden state of the last but one."""
        start = self._find_start()
        is_next = start == n_tokens - 1 == self._own_at + 1
        return start < n_tokens and (n_tokens - 2 < self.features.end or is_next)

    def n_unread(self, n_tokens: int) -> int:
        """Return how many of a sequence of `n_tokens` it has not read, of those that it can read."""
        return n_tokens - self._find_start()

    def read(self, tokens: Sequence[int]) -> None:
        """Prefill the unread part of `tokens` except the last, which is read with the next pass."""
        start = self._find_start()
        if unread := tokens[start:-1]:
            Forward(self._session, unread, 0, inputs=self._inputs(start, unread)).run()
            self._n_true, self._own_at = len(tokens) - 1, -1

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Forward | ForwardResult:
        """Return the pass over what it has not read; there are no `guesses`.

        The target's hidden states must be known, except for the last token's predecessor (`follows`).
        """
        started = time.perf_counter()
        start = self._find_start()
        pending = tokens[start:]
        if (n_first := len(pending) - self._session.cache.n_features_max) > 0:
            inputs = self._inputs(start, pending[:n_first])
            Forward(self._session, pending[:n_first], 0, inputs=inputs).run()
            start, pending = start + n_first, pending[n_first:]
        inputs = self._inputs(start, pending)
        handled_s = time.perf_counter() - started
        asked = Forward(self._session, pending, inputs=inputs, with_features=True)
        asked.finish = partial(self._finish_read, start + len(pending), handled_s)
        return asked

    def _finish_read(self, n_read: int, handled_s: float, evaluated: ForwardResult) -> ForwardResult:
        if evaluated.features is not None:
            self._own_at, self._own = n_read - 1, evaluated.features[-1:].copy()
        self._n_true = min(n_read, self.features.end + 1)
        return msgspec.structs.replace(self._finish(evaluated), seconds=handled_s + evaluated.seconds)

    def trim(self, n_tokens: int) -> None:
        """Remove from the cache all but the sequence's first `n_tokens` tokens.

        Tokens read with its own hidden states are removed too, once the target's are known.
        """
        if self.features.end >= self._n_true:
            n_tokens = min(n_tokens, self._n_true)
        super().trim(n_tokens)

    def _find_start(self) -> int:
        """Return the index of the next token to read; start over if its states are no longer kept."""
        start = self._offset + self.n_past
        if start <= self.features.first:
            start = self.features.first + 1
            self._start_at(start)
        return start

    def _start_at(self, offset: int) -> None:
        super()._start_at(offset)
        self._n_true = offset

    def _inputs(self, start: int, tokens: Sequence[int]) -> Inputs:
        """Return the inputs for `tokens`, which begin at index `start`."""
        n_known = min(len(tokens), self.features.end - start + 1)
        if n_known <= 0:
            states = self._own
        else:
            states = self.features.rows(start - 1, start - 1 + n_known)
            if self._encode:
                states = self._encode(states)
            if n_known < len(tokens):
                states = np.concatenate([states, self._own])
        return self._fusion(tokens, states) if self._fusion else states
