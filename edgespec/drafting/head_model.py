"""A draft head: one block that continues from the target's hidden states, in the place of a draft model.

It has a file of its own, made here or published (llama/head_file.py), or is in the
target's own file (llama/mtp.py).

Token i is read together with the hidden state of token i - 1. That is the target's own where the target has
been, and else, along a draft, the head's last one:

    sequence     t0  t1  t2  t3 | d4  d5          t3 is emitted, d4 and d5 are drafted
    read with        f0  f1  f2 | g3  g4          f: the target's, known after its pass; g: the head's

Once the target has verified the draft, f3, f4 .. are known: tokens read with g3, g4 .. are taken back and
read again, in the same pass as the token that begins the next draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from edgespec.decoding.session import KEPT, Features, Forward, ForwardResult, Inputs, TargetFeatures, n_common
from edgespec.drafting.draft_model import WindowedModel
from edgespec.drafting.pace import ANSWER_TOKENS, Pace
from edgespec.drafting.profile import Clocks
from edgespec.llama.head_file import Fusion, HeadFile
from edgespec.llama.session import Session
from edgespec.llama.weights import Model

_STATES = (32,)
"""Tokens of a prompt whose hidden states a head reads: with more, no more of its drafts are accepted."""
_STATES_OWN = (KEPT, 64)
"""The same of a head in the target's file, which was trained on whole texts: all that are kept, or few."""
# Of what drafting saves, the share that a head without these states loses: without any of the prompt's, or
# with that of its last token, which edgespec's kernels leave for nothing (docs/measurements/drafts.md).
_STATES_SHARE, _STATES_SHARE_AFTER_LAST = 0.12, 0.05
_PASS_SHARE = 0.5  # of T(1), what dividing the prompt into one more pass costs
_SMALL = 0.03  # share of reading the prompt, below which only the price and the gain are compared
_CAUTION = 3.0  # weight of their price over what they save: never slower comes before faster
_TEMPERATURE_RATIO = 0.5  # a head hardly knows how sure the target is (docs/measurements/drafts.md)


def states_worth(
    pace: Pace, target: Model, n_unread: int, n_predict: int | None, *, n_requests: int = 1
) -> int:
    """Return for how many of a prompt's last tokens the target's hidden states are worth their cost.

    `n_unread` tokens of the prompt are to be read after those that are known, at most `n_predict` follow. The
    price is paid before the answer begins, so the states are left out where a usual answer would not gain
    clearly more and the price is no small part of reading the prompt, or where `n_requests` share the passes
    and drafting for all of them would not pay. The head then begins with the answer.
    """
    sizes = _STATES if target.hidden_states.all_logits else _STATES_OWN
    if pace.needs_model:
        return min(sizes[0], n_unread)
    if pace.costs.draft is None:
        return 0
    plain, speedup = pace.speedup(pace.n_known + n_unread, n_requests)
    share = _STATES_SHARE_AFTER_LAST if target.leaves_last_states else _STATES_SHARE
    saved = share * plain * max(0.0, 1.0 - 1.0 / speedup)
    if not saved:
        return 0
    small = _SMALL * pace.costs.target.read(n_unread, pace.n_known)
    n_tokens = min(n_predict or ANSWER_TOKENS, 2 * ANSWER_TOKENS)
    for n in sizes:
        n_wanted = min(n, n_unread)
        price = _price_of_states(pace.costs, target, n_wanted, plain if n_wanted < n_unread else 0.0)
        if saved * n_tokens > (price if price < small else _CAUTION * price):
            return n_wanted
    return 0


def _price_of_states(costs: Clocks, target: Model, n: int, one: float) -> float:
    """Return the cost of the hidden states of `n` tokens of a prompt.

    Mostly they need their own pass (`one`: the cost of one over a single token, or 0), and the library
    computes the logits of each: a sixth of the default target's prefill, which edgespec's kernels leave out.
    A head in the target's file reads as many tokens.
    """
    if not target.hidden_states.all_logits:
        return costs.draft.read(n, 0) if costs.draft else 0.0
    price = _PASS_SHARE * one
    if not target.uses_kernels:
        n_output = target.n_vocab * target.n_embd
        price += n * costs.target.read(512, 0) / 512 * n_output / (target.n_params - n_output)
    return price


class HeadModel(WindowedModel):
    """`session`'s head behind the interface of DraftModel.

    It begins where the target's hidden states are known, which is late in a long prompt, and begins anew
    after a gap in them: that costs acceptance, never exactness.
    """

    features: TargetFeatures

    def __init__(
        self,
        session: Session,
        features: TargetFeatures,
        *,
        n_vocab: int,
        head: HeadFile | None = None,
        fusion: Fusion | None = None,
        encode: Callable[[Features], Features] | None = None,
    ) -> None:
        """Draft with `session`, of a cache that takes inputs, from what `features` will hold.

        Only the first `n_vocab` tokens are drafted. `head`: its file, and `fusion` the matrix in it; without
        them it takes hidden states as they are beside tokens, its own too: the target's as `encode` returns
        them, if it is given.
        """
        super().__init__(session, n_vocab=n_vocab)
        if head:
            self.n_vocab = min(n_vocab, head.n_vocab)
            self._set_tokens(head.token_ids)
            self.temperature_ratio = _TEMPERATURE_RATIO
        self._fusion, self._encode = fusion, encode
        self.features = features
        self._n_true = 0  # of the sequence's tokens, those before it were read with the target's states
        self._own_at = -1
        self._own: Features = features.rows(0, 0)  # its own hidden state of token `_own_at`

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`; what was read of one that begins like it stays."""
        n_same = n_common(self._session.tokens, tokens[self._offset : -1])
        n_kept = min(n_same, self._n_true - self._offset)
        self._own_at = -1
        if not self._go_back(n_kept):
            self._start_at(self.features.first + 1)

    def rest(self) -> None:
        """Do nothing: what was read stays for the next text, which may begin like this one."""

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
        """Return the pass of `run`, which others may share: its `finish` gives the rows of `run`.

        Of the tokens to be read, the target's hidden states must be known, but for the last one's
        predecessor (`follows`). So `guesses` are tokens that the target has read.
        """
        started = time.perf_counter()
        start = self._find_start()
        pending = [*tokens[start:], *guesses]
        if (n_first := len(pending) - self._session.cache.n_features_max) > 0:
            inputs = self._inputs(start, pending[:n_first])
            Forward(self._session, pending[:n_first], 0, inputs=inputs).run()
            start, pending = start + n_first, pending[n_first:]
        inputs = self._inputs(start, pending)
        handled_s = time.perf_counter() - started
        asked = Forward(self._session, pending, 1 + len(guesses), inputs=inputs, with_features=True)
        asked.finish = partial(self._finish_read, start + len(pending), handled_s)
        return asked

    def _finish_read(self, n_read: int, handled_s: float, evaluated: ForwardResult) -> ForwardResult:
        if evaluated.features is not None:
            self._own_at, self._own = n_read - 1, evaluated.features[-1:].copy()
        self._n_true = min(n_read, self.features.end + 1)
        seconds = handled_s + evaluated.seconds
        return replace(evaluated, rows=evaluated.rows[:, : self._n_row], seconds=seconds)

    def trim(self, n_tokens: int) -> None:
        """Remove from the cache all but the sequence's first `n_tokens` tokens.

        Tokens read with its own hidden states go too, where the target's have become known.
        """
        if self.features.end >= self._n_true:
            n_tokens = min(n_tokens, self._n_true)
        super().trim(n_tokens)

    def _find_start(self) -> int:
        """Return the index of the next token to read; begin anew where the states for it are not kept."""
        start = self._offset + self.n_past
        if start <= self.features.first:
            start = self.features.first + 1
            self._start_at(start)
        return start

    def _start_at(self, offset: int) -> None:
        super()._start_at(offset)
        self._n_true = offset

    def _inputs(self, start: int, tokens: Sequence[int]) -> Inputs:
        """The tokens read in place of `tokens`, which stand from index `start` on."""
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
