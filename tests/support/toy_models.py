"""A language model over three tokens, and whether counts are distributed as they should be."""

from __future__ import annotations

from functools import cache

import numpy as np

from edgespec import testing
from reference import filtered_probs

V = 3


@cache
def _logits(seed, sharpness, n_vocab, text):
    row = testing.ToyModel(seed, sharpness, n_vocab).logits(text)
    row.flags.writeable = False
    return row


class ToyModel(testing.ToyModel):
    """With the distribution that the filters leave. Enumerations ask for the same again and again."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._probs = {}

    def logits(self, text):
        return _logits(self.seed, self.sharpness, self.n_vocab, tuple(map(int, text)))

    def probs(self, prefix, params):
        _, known = self._probs.setdefault(id(params), (params, {}))
        if (text := tuple(prefix)) not in known:
            known[text] = filtered_probs(self.logits(text), params, text)
            known[text].flags.writeable = False
        return known[text]


def chi_square_p_value(observed, expected):
    """Survival function of the chi-square distribution (Wilson-Hilferty normal approximation)."""
    seen = expected > 0
    assert not observed[~seen].any(), "an impossible sequence was emitted"
    # The statistic follows the distribution only where something is expected: rare cells are one cell.
    rare = seen & (expected < 5)
    observed = np.append(observed[seen & ~rare], observed[rare].sum())
    expected = np.append(expected[seen & ~rare], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    k = len(expected) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / np.sqrt(2 / (9 * k))
    from math import erfc

    return 0.5 * erfc(z / np.sqrt(2))
