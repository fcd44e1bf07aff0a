"""When the likeliest tokens are enough to know what a mask leaves of a distribution.

To let a grammar judge all of 152,000 tokens takes as long as a pass of the target. But what the filters keep
depends on the likeliest allowed tokens alone. So the likeliest M tokens are judged, best first after bias and
penalties; `is_enough` says whether the filters make the same of the row in which every other token is
forbidden, whatever the grammar allows among those. If not, M grows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgespec.sampling import SamplingParams

_ROUNDING = 1e-6  # of the mass of top-p: the C core sums in single precision


def is_enough(allowed: npt.NDArray[np.float32], bound: float, n_rest: int, params: SamplingParams) -> bool:
    """Say whether the filters of `params` keep the same of all tokens as of those that are known.

    `allowed` are the logits, best first, after bias and penalties, of the known tokens that the grammar
    allows. Of `n_rest` tokens it is unknown whether they are allowed; none has a logit above `bound`.
    """
    if not n_rest or bound == -np.inf:
        return True
    sure = allowed[allowed > bound].astype(np.float64)  # their order is that among all tokens
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
    n_likely = int((sure >= least).sum()) if least > bound else None  # what min-p leaves, if that is known
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
    """Say whether no number of likely tokens is ever enough, so that each row is judged as a whole."""
    if params.greedy and params.typical_p == 1.0:
        return False
    if params.typical_p < 1.0:
        return params.top_k == 0
    return params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0
