"""A language model over three tokens, and whether counts are distributed as they should be."""

from __future__ import annotations

import numpy as np

from edgespec import testing
from reference import filtered_probs

V = 3


class ToyModel(testing.ToyModel):
    """With the distribution that the filters leave."""

    def probs(self, prefix, params):
        return filtered_probs(self.logits(prefix), params, prefix)


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
