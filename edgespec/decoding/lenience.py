"""Lenient acceptance at temperature 0: a drafted token that the target likes nearly as well as its best.

Leviathan et al., arXiv 2211.17192, section on lenience: with l in (0, 1] a token counts as accepted when its
probability is at least l times that of the target's likeliest one. At temperatures above 0 the C core's
chain rule does it (`_core.Sampler.verify`). With l = 1 both are exact; below, the text is not the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgespec.decoding.drafter import Tokens
from edgespec.llama.session import Rows
from edgespec.sampling import SamplingParams


def lenient_choice(  # noqa: PLR0917 - what is known of one position, in the order in which it becomes known
    row: Rows,
    drafted: Sequence[int],
    best: int,
    lenience: float,
    params: SamplingParams,
    recent: Tokens,
) -> int | None:
    """Return which of the `drafted` tokens of one position is accepted, as an index; None: none is.

    `row` are the target's raw logits there, shape (n_vocab,), `best` its own greedy choice, and `recent` what
    the penalties look back on. The target's own choice goes before all others, then the likeliest.
    Bias and penalties count, so that a forbidden token is never accepted.
    """
    if best in drafted:
        return drafted.index(best)
    if not drafted or lenience >= 1.0:
        return None
    logits = [_adjusted(row, token, params, recent) for token in drafted]
    likeliest = max(range(len(drafted)), key=logits.__getitem__)
    least = _adjusted(row, best, params, recent) + math.log(lenience)
    return likeliest if logits[likeliest] >= least else None


def _adjusted(row: Rows, token: int, params: SamplingParams, recent: Tokens) -> float:
    """Return one token's logit after bias and penalties, in the order and meaning of the filters."""
    logit = float(row[token]) + params.logit_bias.get(token, 0.0)
    if not params.uses_prefix:
        return logit
    within = recent if params.penalty_last_n < 0 else recent[-params.penalty_last_n :]
    n = int((within == token).sum())
    if not n:
        return logit
    logit = logit * params.repeat_penalty if logit <= 0 else logit / params.repeat_penalty
    return logit - n * params.frequency_penalty - params.presence_penalty
