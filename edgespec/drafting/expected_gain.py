"""The expected gain of a further token at one step: P(accepted), less the tokens that its time is worth.

A gain is in tokens: P - rate * cost, summed over the tokens drafted. All here is arithmetic without state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.drafting.costs import per_request
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.profile import N_MAX

MAX_UNREAD = 24
"""A draft model with more unread tokens is idle, until `Scheduler.n_to_prefill` lets it read them."""

_LOOK_AHEAD = 8  # tokens
_OWN_SHARE = 0.25  # of reading what the draft model missed: later steps would have to read it too


class Chain(NamedTuple):
    """Tokens that may follow one after the other, at no cost but their verification."""

    path: float
    """Probability that all tokens before it are accepted."""
    chances: Sequence[float]
    """Probability of each, given that the one before is accepted."""
    again: Sequence[float] = ()
    """Cost of a rejection of each (`ExpectedGain.again`); empty: none."""


class Prefix(NamedTuple):
    """How much of a chain to take: the number of tokens, what they gain, and P after them."""

    n: int
    gain: float
    path: float


def best_prefixes(verify: Sequence[float], rate: float, chains: Sequence[Chain]) -> list[Prefix]:
    """Return how much to take of each of the `chains` that go into one pass.

    `verify` begins with the T of that pass without them, and has one more element for each token added. The
    tokens of all chains are taken in the order of their P, as long as the sum of P - rate * added time grows.
    A later token may pay for one before it, since T has steps.
    """
    candidates: list[tuple[float, int, float]] = []  # (P, chain, price); along a chain P never grows
    for i, (path, chances, again) in enumerate(chains):
        for depth, chance in enumerate(chances):
            lost = again[min(depth, len(again) - 1)] * path * (1.0 - chance) if again else 0.0
            path *= chance  # noqa: PLW2901 - the P of the next one
            candidates.append((path, i, lost))
    if len(chains) > 1:
        candidates.sort(key=lambda candidate: -candidate[0])
    best, best_gain, gain = 0, 0.0, 0.0
    own = []
    for n, (path, _, lost) in enumerate(candidates[: len(verify) - 1], 1):
        own.append(path - rate * (verify[n] - verify[n - 1]) - lost)
        gain += own[-1]
        if gain > best_gain:
            best, best_gain = n, gain
    found = [Prefix(0, 0.0, chain.path) for chain in chains]
    for (path, i, _), more in zip(candidates[:best], own, strict=False):
        found[i] = Prefix(found[i].n + 1, found[i].gain + more, path)
    return found


@dataclass(frozen=True, slots=True)
class ExpectedGain:
    """What one step's decisions are priced by: learned costs, passes, and the rate to beat."""

    learned: LearnedCosts
    verify: Sequence[float]
    """T(n) of the target's pass: n - 1 drafted tokens and what is always in it. Seconds, or joules."""
    passes: Sequence[float]
    """T(n) of the draft model's pass; empty without one."""
    rate: float
    """Tokens a second (or a joule) that generation makes now."""
    again: Sequence[float] = ()
    """Cost, in tokens, of rejecting the token after n drafted ones: all before it in the pass are then read
    again with the next one. Empty where rejected tokens are taken back alone."""

    def chain(self, path: float, depth: int, chances: Sequence[float]) -> Chain:
        """Return tokens that may follow after `depth` drafted ones, as a Chain."""
        return Chain(path, chances, self.again[depth:])

    def _lost(self, before: float, path: float, depth: int) -> float:
        return self.again[depth] * (before - path) if self.again else 0.0

    @property
    def least_price(self) -> float:
        """The lowest price, in tokens, of one more token in the target's pass."""
        least = min(b - a for a, b in itertools.pairwise(self.verify[1:_LOOK_AHEAD]))
        return min(1.0, max(0.0, self.rate * least))

    def best_prefix(self, path: float, depth: int, chances: Sequence[float]) -> Prefix:
        """Return how many tokens to take that cost no pass; the arguments are those of `chain`."""
        return best_prefixes(self.verify[depth + 1 :], self.rate, [self.chain(path, depth, chances)])[0]

    def of_token(self, path: float, depth: int, before: float) -> float:
        """Return the gain of verifying one token after `depth`, which is accepted with `path`.

        Those before it are accepted with `before`.
        """
        added = self.verify[depth + 2] - self.verify[depth + 1]
        return path - self.rate * added - self._lost(before, path, depth)

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
        """Return the gain of running the draft model, for as long as that pays.

        `bucket` is that of the table `next`; `guesses` are the chances of the guesses that it checks.
        """
        if unread > MAX_UNREAD or depth + 1 > MAX_GAMMA:
            return 0.0
        rate, passes, table = self.rate, self.passes, self.learned.predictor.next
        n = min(unread + len(guesses), N_MAX)
        usual = passes[min(n, 2 + len(guesses))]  # the last drafted token and the one after it
        gain = -rate * (usual + _OWN_SHARE * (passes[n] - usual))
        chance = 1.0  # that the pass comes so far
        before, path = path, path * table.chance(depth, bucket)
        for i in range(len(guesses) + 1):
            gain += chance * self.of_token(path, depth, before)
            depth += 1
            if depth >= MAX_GAMMA:
                return gain
            if i < len(guesses):
                before, path = path, path * table.overall
                chance *= guesses[i]
        gain += chance * path * self.learned.follow_up
        before, path = path, path * table.overall
        best, least = gain, rate * passes[1]
        while depth < MAX_GAMMA and path >= least:  # else not even if verification were free
            gain += chance * (self.of_token(path, depth, before) - least)
            best = max(best, gain)
            before, path = path, path * table.overall
            depth += 1
        return best

    def best_model_rate(self) -> float:
        """Return the tokens a second of the best fixed length with the draft model alone."""
        best, tokens, path, lost = 0.0, 1.0, 1.0, 0.0
        for depth in range(_LOOK_AHEAD):
            before, path = path, path * self.learned.predictor.next.overall
            lost += self._lost(before, path, depth) / self.rate
            tokens += path
            best = max(best, tokens / ((depth + 1) * self.passes[1] + self.verify[depth + 2] + lost))
        return best


def gain_if_all_draft(
    learned: LearnedCosts, n_past: int, n_requests: int, *, n_draft: int = 0
) -> ExpectedGain:
    """Return the prices for one of `n_requests` whose passes are shared and which draft alike.

    Its rates are those of all together. `n_past`, `n_draft`: tokens before the target's and the draft's pass.
    """
    verify = per_request(learned.target.at(n_past), n_requests)
    passes = per_request(learned.draft.at(n_draft), n_requests) if learned.draft else []
    return ExpectedGain(learned, verify, passes, 1.0 / verify[1])
