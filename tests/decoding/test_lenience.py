"""Lenient acceptance at temperature 0, against probabilities computed in full."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.generate import matching
from edgespec.decoding.sampling import SamplingParams
from reference import filtered_probs

pytestmark = pytest.mark.proof

GREEDY = SamplingParams(temperature=0.0)


def choice(row, drafted, lenience, *, params=GREEDY, recent=()):
    row = np.asarray(row, np.float32)
    best = int(filtered_probs(row, params, list(recent)).argmax())
    adjusted = partial(params.sampler(len(row), 0).adjusted, row, array("i", recent))
    return matching(drafted, best, adjusted, lenience=lenience)


def test_a_token_nearly_as_likely_as_the_best_is_accepted():
    row = np.log([0.5, 0.3, 0.15, 0.05])
    assert choice(row, [1], 0.59) == 0, "0.3 is 0.6 of 0.5"
    assert choice(row, [1], 0.61) is None
    assert choice(row, [3], 0.09) == 0
    assert choice(row, [0], 1.0) == 0
    assert choice(row, [1], 1.0) is None, "1 is exact"
    assert choice(row, [], 0.1) is None


def test_the_targets_own_choice_goes_before_others_then_the_likeliest():
    row = np.log([0.5, 0.3, 0.15, 0.05])
    assert choice(row, [1, 0], 0.1) == 1
    assert choice(row, [3, 1, 2], 0.05) == 1
    assert choice(row, [3, 2], 0.2) == 1
    assert choice(row, [3, 2], 0.5) is None


def test_a_forbidden_token_is_never_accepted():
    params = replace(GREEDY, logit_bias={1: -math.inf, 2: 5.0})
    row = [1.0, 9.0, 0.0, 0.9]
    assert choice(row, [1], 1e-9, params=params) is None
    assert choice(row, [2], 1.0, params=params) == 0, "the bias makes it the best"


rows = st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6)


@given(
    rows,
    st.integers(0, 5),
    st.floats(0.01, 1.0),
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from([(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (0.8, 0.4, 0.3)]),
    st.sampled_from([-1, 0, 3]),
)
def test_the_rule_is_that_of_probabilities_after_bias_and_penalties(
    row, token, lenience, recent, penalties, last_n
):
    repeat, frequency, presence = penalties
    params = replace(
        GREEDY,
        repeat_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
        penalty_last_n=last_n,
        logit_bias={2: 0.5},
    )
    open_ = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    p = filtered_probs(np.asarray(row, np.float32), open_, recent)
    ratio = p[token] / p.max()
    if abs(ratio - lenience) > 1e-3:
        accepted = choice(row, [token], lenience, params=params, recent=recent) == 0
        assert accepted == (ratio >= lenience)
