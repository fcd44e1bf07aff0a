"""Text heard before as drafts: refrains, prayers, the hypothesis a second ago. Speech seldom repeats itself.

A step that looks for repetitions and finds none costs some percent of a small model's pass. So a recording is
decoded without, and afterwards each window's text is played through the suffix store (microseconds a token):
what that would have saved says whether the next windows look.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.decoding.session import n_common
from edgespec.drafting.suffix import SuffixDrafts

_REMEMBERED = 1 << 16  # tokens
_WORTH = 0.06  # of the time of decoding: what has to be saved, looking costs about half of it
_NEWEST = 0.5  # weight of the newest window
_OFFERED = 8  # tokens drafted at once
_LIKELY = 0.5  # chance of a draft that would have been tried


class HeardText:
    """The suffix store over what was heard, and whether it drafts."""

    def __init__(self) -> None:
        self.store = SuffixDrafts(_REMEMBERED)
        self.saves = 0.0
        """Share of the time of decoding that it saves, or would have saved."""

    @property
    def drafts(self) -> bool:
        """Whether it is worth looking for repetitions."""
        return self.saves > _WORTH

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft with the text `tokens`, which is expected again, in place of all that was heard before."""
        self.store.forget()
        self.store.load(np.array([*tokens, -1], np.int32))
        self.saves = 1.0

    def play(self, tokens: Sequence[int], n_prompt: int, costs: Sequence[float]) -> None:
        """Remember `tokens` after the first `n_prompt`, which were decoded without it, and learn.

        `costs`: T(n) of the target.
        """
        n = n_prompt + 1
        document = self.store.document(tokens[:n])
        saved_s, plain_s = 0.0, costs[1]
        while n < len(tokens):
            offered, chances = document.offer((), _OFFERED)
            n_drafted, chance = 0, 1.0
            for one in chances:
                chance *= one
                if chance < _LIKELY:
                    break
                n_drafted += 1
            n_right = n_common(offered[:n_drafted], tokens[n:])
            saved_s += n_right * plain_s - (costs[n_drafted + 1] - plain_s)
            document.extend(tokens[n : n + n_right + 1])
            n += n_right + 1
        self._learn(saved_s / (plain_s * (len(tokens) - n_prompt)))

    def learn(self, n_tokens: int, n_drafted: int, n_accepted: int, costs: Sequence[float]) -> None:
        """Learn from a window of `n_tokens` that it drafted in."""
        each_s = (costs[_OFFERED + 1] - costs[1]) / _OFFERED
        self._learn((n_accepted * costs[1] - n_drafted * each_s) / (costs[1] * n_tokens))

    def _learn(self, share: float) -> None:
        self.saves += _NEWEST * (share - self.saves)
