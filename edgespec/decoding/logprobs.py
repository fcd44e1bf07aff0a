"""The target's own logprobs of a token: the logarithms of its probabilities, before any filter."""

from __future__ import annotations

import math

import numpy as np

from edgespec.decoding.records import Logprobs
from edgespec.decoding.session import Rows


def logprobs_of(row: Rows, token: int, n: int) -> Logprobs:
    """Return the natural logarithms for `token` and for the `n` likeliest, by raw logits, shape (n_vocab,).

    Of equal ones those of the smallest ids, as in sampling.
    """
    highest = float(row.max())
    log_total = highest + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))
    n = min(n, row.size)
    if n == 0:
        return Logprobs(float(row[token]) - log_total, ())
    least = np.partition(row, row.size - n)[row.size - n]
    candidates = np.flatnonzero(row >= least)
    order = np.lexsort((candidates, -row[candidates]))[:n]
    top = tuple((int(i), float(row[i]) - log_total) for i in candidates[order])
    return Logprobs(float(row[token]) - log_total, top)
