"""Decide whether judging only the likeliest tokens gives the same distribution as judging all.

A grammar takes as long to judge all 152,000 tokens as the target takes for a pass. But what the filters keep
depends only on the likeliest allowed tokens. So only the M likeliest are judged, in the order after bias and
penalties, and all others count as forbidden. `is_enough` tells whether the filters keep the same, whatever
the grammar says of those others. If not, M grows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgespec.sampling import SamplingParams

_ROUNDING = 1e-6  # of the mass of top-p: the C core sums in single precision


def is_enough(allowed: npt.NDArray[np.float32], bound: float, n_rest: int, params: SamplingParams) -> bool:
    """Return whether the filters of `params` keep the same of all tokens as of the judged ones.

    `allowed`: logits after bias and penalties, best first, of the judged tokens that the grammar allows.
    `n_rest` tokens were not judged; none has a logit above `bound`.
    """
    if not n_rest or bound == -np.inf:
        return True
    sure = allowed[allowed > bound].astype(np.float64)  # no unjudged token comes before these
    if not len(sure):
        return False
    typical = params.typical_p < 1.0
    if params.greedy and not typical:
        return True
    n_kept = params.top_k or len(allowed) + n_rest
    if len(sure) >= n_kept:
        return True
    if typical:
        return False
    least = sure[0] + np.log(params.min_p) if params.min_p > 0.0 else -np.inf
    n_likely = int((sure >= least).sum()) if least > bound else None  # what min-p leaves, if known
    if params.top_p == 1.0:
        return n_likely is not None
    mass = np.cumsum(np.exp(sure - sure[0]))
    most = mass[-1] + (n_kept - len(sure)) * np.exp(bound - sure[0])
    first = int(np.searchsorted(mass, params.top_p * mass[-1] * (1.0 - _ROUNDING))) + 1
    last = int(np.searchsorted(mass, params.top_p * most * (1.0 + _ROUNDING))) + 1
    if first == last <= len(sure):
        return True
    return n_likely is not None and first >= n_likely


def needs_all(params: SamplingParams) -> bool:
    """Return whether all tokens of each row must be judged, since no number of likely ones is enough."""
    if params.greedy and params.typical_p == 1.0:
        return False
    if params.typical_p < 1.0:
        return params.top_k == 0
    return params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0
