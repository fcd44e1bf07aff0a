"""What a further token gains at one step: its chance to be accepted, less what its time is worth in tokens.

All here is arithmetic without a state. A gain is in tokens: P - rate * cost, summed over the tokens drafted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.drafting.costs import N_MAX
from edgespec.drafting.learnt import Learnt
from edgespec.options import MAX_GAMMA

ASLEEP = 24
"""A draft model with more unread tokens is asleep: it runs again when `worth_reading` lets it read them."""

_LOOK_AHEAD = 8  # tokens


@dataclass(frozen=True, slots=True)
class Gains:
    """The prices of one step."""

    learnt: Learnt
    verify: Sequence[float]
    """T(n) of the target's pass: n - 1 drafted tokens and what has to be in it. Seconds, or joules."""
    passes: Sequence[float]
    """T(n) of the draft model's pass; empty without one."""
    rate: float
    """Tokens a second (or a joule) that generation makes now."""

    @property
    def least_price(self) -> float:
        """The lowest price, in tokens, of one more token in the target's pass."""
        least = min(b - a for a, b in itertools.pairwise(self.verify[1:_LOOK_AHEAD]))
        return min(1.0, max(0.0, self.rate * least))

    def best_prefix(self, path: float, depth: int, chances: Sequence[float]) -> tuple[int, float, float]:
        """Return how many tokens to take that cost no pass, what that gains, and P after them.

        They follow `depth` drafted tokens, all accepted with probability `path`; each of `chances` is given
        that the token before is accepted.
        """
        verify, rate = self.verify, self.rate
        best, best_gain, best_path, gain = 0, 0.0, path, 0.0
        for i, chance in enumerate(chances, depth + 1):
            path *= chance
            gain += path - rate * (verify[i + 1] - verify[i])
            if gain > best_gain:
                best, best_gain, best_path = i - depth, gain, path
        return best, best_gain, best_path

    def of_token(self, path: float, depth: int) -> float:
        """Return what verifying one token gains that is there, and accepted with `path`, after `depth`."""
        return path - self.rate * (self.verify[depth + 2] - self.verify[depth + 1])

    def n_guesses(self, unread: int, chances: Sequence[float]) -> int:
        """Return how many guesses the draft model should check: a right one saves it a pass.

        `chances` are those of the guesses, each given the one before; `unread` tokens are read with them.
        """
        passes = self.passes
        path = 1.0
        for i, chance in enumerate(chances):
            path *= chance
            if unread + i + 1 > MAX_GAMMA or path * passes[1] < passes[unread + i + 1] - passes[unread + i]:
                return i
        return len(chances)

    def of_model(
        self, path: float, depth: int, unread: int, bucket: int, guesses: Sequence[float] = ()
    ) -> float:
        """Return what running the draft model gains, if it goes on while that pays.

        `bucket` is that of the table `next`, `guesses` are the chances of the guesses that it checks.
        """
        if unread > ASLEEP or depth + 1 > MAX_GAMMA:
            return 0.0
        verify, rate, passes = self.verify, self.rate, self.passes
        table = self.learnt.predictor.next
        gain = -rate * passes[min(unread + len(guesses), N_MAX)]
        chance = 1.0  # that the pass comes so far
        path *= table.chance(depth, bucket)
        for i in range(len(guesses) + 1):
            gain += chance * self.of_token(path, depth)
            depth += 1
            if depth >= MAX_GAMMA:
                return gain
            if i < len(guesses):
                path *= table.overall
                chance *= guesses[i]
        gain += chance * path * self.learnt.follow_up
        path *= table.overall
        best, least = gain, rate * passes[1]
        while depth < MAX_GAMMA and path >= least:  # else not even if verification were free
            gain += chance * (path - least - rate * (verify[depth + 2] - verify[depth + 1]))
            best = max(best, gain)
            path *= table.overall
            depth += 1
        return best

    def best_model_rate(self) -> float:
        """Return the tokens a second of the best fixed length with the draft model alone."""
        best, tokens, path = 0.0, 1.0, 1.0
        for depth in range(_LOOK_AHEAD):
            path *= self.learnt.predictor.next.overall
            tokens += path
            best = max(best, tokens / ((depth + 1) * self.passes[1] + self.verify[depth + 2]))
        return best
