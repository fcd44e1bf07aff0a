"""How long will the answer be? From how long answers were: to all prompts, and to those that began alike.

Whether a draft model's reading of the prompt pays hangs on it. "Translate ..." is answered briefly
whatever follows, "Write ..." at length: so there is a mean for a prompt's first word, its first two and
its first four, each leaning on the one before, and the first on the mean over all prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ANSWER_TOKENS = 128.0
"""How long an answer is expected to be before the first was seen."""

MEAN_WEIGHT = 0.1
"""Of an answer in the mean over all prompts."""

_WORDS = (1, 2, 4)
_MOST = 8.0  # answers that a mean counts for at most: the last ones matter
_CAPACITY = 1024  # means kept


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

    def learn(self, prompt: str | Sequence[int], n_tokens: int, *, cut: bool = False) -> None:
        """Count an answer of `n_tokens`; `cut`: it would have gone on, who knows how long."""
        if cut and n_tokens < self.expected(prompt):
            return
        if not cut:
            self.mean += MEAN_WEIGHT * (n_tokens - self.mean)
        for key in _keys(prompt):
            mean, n = self._means.pop(key, (0.0, 0.0))  # put back as the latest
            n = min(n + 1.0, _MOST)
            self._means[key] = mean + (n_tokens - mean) / n, n
        while len(self._means) > _CAPACITY:
            del self._means[next(iter(self._means))]

    def as_dict(self) -> dict[str, list[float]]:
        """Return the means of the starts, for a file: hashes, not words."""
        return {key: [round(mean, 1), n] for key, (mean, n) in self._means.items()}

    def restore(self, stored: Any) -> None:  # noqa: ANN401 - whatever a file holds
        """Take up what `as_dict` gave; anything else is left alone."""
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
