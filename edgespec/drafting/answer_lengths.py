"""Lengths of answers, learned from earlier ones: to all prompts, and to those that began alike.

This decides whether it pays that a draft model reads the prompt. "Translate ..." is answered briefly
whatever follows, "Write ..." at length. So there is a mean for a prompt's first word, its first two and its
first four: each is completed by the one before, and the first by the mean over all prompts.

But a mean does not say how sure it is. Where nothing like this prompt was answered before, any length is
possible, and the longer an answer has become, the likelier it goes on. `LengthDistribution` says so.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ANSWER_TOKENS = 128.0
"""How long an answer is expected to be before the first was seen."""

CAUTION = 3.0
"""Weight of a loss over that of a gain: never slower comes before faster."""

MEAN_WEIGHT = 0.1
"""Weight of an answer in the mean over all prompts."""

_WORDS = (1, 2, 4)
_MOST = 8.0  # answers that a mean counts for at most: the last ones matter
_CAPACITY = 1024  # means kept

_EDGES = tuple(2.0 ** (i / 2) for i in range(35))  # tokens: half octaves, 1 to 131,072
_USUAL_MOST = 1024.0  # tokens: below, where nothing is known, each octave is as likely as another
_RARER = 0.5  # above, the probability of a half octave over that of the one before
_SPREAD = 1.0  # octaves by which answers differ from their mean, one standard deviation
_ANY_COUNTS = 2.0  # answers that "any length" counts for beside the mean over all prompts
_LOOK_EVERY = 4.0  # tokens after which the question is asked again


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """The distribution of one answer's length, in tokens, as far as it is known."""

    shares: tuple[float, ...]
    """The probability of each half octave from 1 token on."""

    def longer(self, n_tokens: float) -> float:
        """Return the probability that the answer has more than `n_tokens`, 1 or more."""
        at = 2.0 * math.log2(n_tokens)
        whole = min(int(at), len(self.shares))
        part = (whole + 1 - at) * self.shares[whole] if whole < len(self.shares) else 0.0
        return part + sum(self.shares[whole + 1 :])

    def after(self, n_tokens: float) -> list[tuple[float, float]]:
        """Return lengths above `n_tokens` and the probability of each, given that the answer has more."""
        total = self.longer(n_tokens)
        if total <= 0.0:  # longer than was thought possible: as long again
            return [(2.0 * n_tokens, 1.0)]
        found = []
        for share, low, high in zip(self.shares, _EDGES, _EDGES[1:], strict=False):
            if high > n_tokens and share > 0.0:
                start = max(low, n_tokens)
                found.append((math.sqrt(start * high), 2.0 * math.log2(high / start) * share / total))
        return found

    def to_come(self, n_tokens: int) -> float:
        """Return how many tokens are expected after the first `n_tokens`."""
        return sum(length * chance for length, chance in self.after(n_tokens)) - n_tokens

    def pays(self, price: float, saved: float, *, n: int, n_max: float, spent: float, pace: float) -> bool:
        """Whether to pay `price` now, after `n` tokens, for `saved` on each token from now on.

        The answer has no more than `n_max` tokens; `spent` is what it has cost so far, `pace` what a token
        costs, in the unit of `price`. The other choice is to wait: if the answer ends meanwhile the price is
        saved, else what drafting would have saved meanwhile is lost. Both count as shares of what the whole
        answer costs, as its reader feels them, and a loss weighs more: never slower comes before faster.
        """
        gained = expected = 0.0
        for length, chance in self.after(n):
            ahead = min(length, n_max) - n
            expected += chance * saved * ahead
            gained += chance * saved * min(ahead, _LOOK_EVERY) / (spent + pace * ahead)
        left = self.longer(n)
        ends = 1.0 - self.longer(n + _LOOK_EVERY) / left if left > 0.0 else 0.0
        return expected > price and gained > CAUTION * ends * price / (spent + pace * _LOOK_EVERY)


@lru_cache(maxsize=256)
def _around(mean: float) -> tuple[float, ...]:
    """Return the probabilities of the half octaves for an answer of about `mean` tokens: log-normal."""
    below = [0.5 * math.erfc(math.log2(mean / edge) / (_SPREAD * math.sqrt(2.0))) for edge in _EDGES]
    below[0], below[-1] = 0.0, 1.0
    return tuple(high - low for low, high in itertools.pairwise(below))


def lengths_around(mean: float) -> LengthDistribution:
    """Return the distribution of an answer's length where all like it have about `mean` tokens."""
    return LengthDistribution(_around(mean))


def _any_length() -> tuple[float, ...]:
    weights = [_RARER ** max(0.0, 2.0 * math.log2(high / _USUAL_MOST)) for high in _EDGES[1:]]
    return tuple(weight / sum(weights) for weight in weights)


_ANY = _any_length()


def _mixed(
    shares: tuple[float, ...], others: tuple[float, ...], n_shares: float, n_others: float
) -> tuple[float, ...]:
    total = n_shares + n_others
    return tuple((n_shares * a + n_others * b) / total for a, b in zip(shares, others, strict=True))


class AnswerLengths:
    """Expected lengths of answers, in tokens."""

    def __init__(self, mean: float) -> None:
        """Begin with a `mean` over all prompts."""
        self.mean = mean
        self._means: dict[str, tuple[float, float]] = {}  # the mean, and the answers it counts for

    def expected(self, prompt: str | Sequence[int]) -> float:
        """Return how many tokens the answer to `prompt` (text, or token ids) is expected to have."""
        expected = self.mean
        for key in _keys(prompt):
            mean, n = self._means.get(key, (0.0, 0.0))
            expected = (n * mean + expected) / (n + 1.0)
        return expected

    def of(self, prompt: str | Sequence[int]) -> LengthDistribution:
        """Return the distribution of the length of the answer to `prompt` (text, or token ids)."""
        shares = _mixed(_ANY, _around(self.mean), _ANY_COUNTS, 1.0)
        for key in _keys(prompt):
            if key in self._means:
                mean, n = self._means[key]
                shares = _mixed(shares, _around(mean), 1.0, n)
        return LengthDistribution(shares)

    def learn(self, prompt: str | Sequence[int], n_tokens: int, *, unfinished: bool = False) -> None:
        """Count an answer of `n_tokens`; `unfinished`: it would have gone on."""
        if unfinished and n_tokens < self.expected(prompt):
            return
        n_tokens = max(1, n_tokens)  # an empty answer has the token that ends it
        if not unfinished:
            self.mean += MEAN_WEIGHT * (n_tokens - self.mean)
        for key in _keys(prompt):
            mean, n = self._means.pop(key, (0.0, 0.0))  # put back as the latest
            n = min(n + 1.0, _MOST)
            self._means[key] = mean + (n_tokens - mean) / n, n
        while len(self._means) > _CAPACITY:
            del self._means[next(iter(self._means))]

    def as_dict(self) -> dict[str, list[float]]:
        """Return the means of the starts, for a file: the starts are hashes."""
        return {key: [round(mean, 1), n] for key, (mean, n) in self._means.items()}

    def restore(self, stored: Any) -> None:  # noqa: ANN401 - whatever a file holds
        """Take up the means that `as_dict` gave; anything else is left alone."""
        if not isinstance(stored, Mapping):
            return
        for key, value in list(stored.items())[-_CAPACITY:]:
            if (
                isinstance(value, Sequence)
                and len(value) == 2
                and all(isinstance(x, int | float) and 1.0 <= x <= 1e9 for x in value)
            ):
                self._means[str(key)] = float(value[0]), min(float(value[1]), _MOST)


def _keys(prompt: str | Sequence[int]) -> Iterator[str]:
    """Yield a hash of the first word, of the first two, and of the first four."""
    most = max(_WORDS)
    words = (
        prompt[:1000].split(maxsplit=most)[:most]
        if isinstance(prompt, str)
        else list(map(str, prompt[:most]))
    )
    for n in _WORDS:
        if len(words) >= n:
            yield hashlib.sha256(" ".join(words[:n]).lower().encode()).hexdigest()[:12]
