"""Logarithms of probabilities: as numpy counts them, and the same whatever drafts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgespec import Engine, SamplingParams
from edgespec.decoding.generate import logprobs_of
from edgespec.decoding.option_table import MAX_LOGPROBS
from edgespec.errors import UsageError

LOGITS = arrays(
    np.float32, st.integers(1, 60), elements=st.sampled_from([-np.inf, -3.0, 0.0, 0.5, 7.25, 90.0])
)


@given(LOGITS.filter(lambda row: np.isfinite(row.max())), st.integers(0, MAX_LOGPROBS), st.data())
def test_they_are_the_logarithms_of_a_softmax_and_the_likeliest_come_first(row, n, data):
    token = data.draw(st.integers(0, row.size - 1))
    weights = np.exp(row.astype(np.float64) - row.max())
    probs = weights / weights.sum()
    found = logprobs_of(row, token, n)
    assert math.exp(found.logprob) == pytest.approx(probs[token], abs=1e-6)
    best = sorted(range(row.size), key=lambda i: (-row[i], i))[:n]
    assert [i for i, _ in found.top] == best
    assert [math.exp(value) for _, value in found.top] == pytest.approx([probs[i] for i in best], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_gives_the_same_ones(tiny_path, tiny_draft_path, temperature):
    params = SamplingParams(temperature=temperature)
    found = {}
    for drafter in ("none", "auto", "model", "suffix"):
        with Engine(tiny_path, tiny_draft_path, profile=False) as engine:
            stream = engine.stream(
                "a b a b a b", params=params, seed=5, n_predict=24, drafter=drafter, n_logprobs=2, chat=False
            )
            found[drafter] = [(token.id, token.logprob, token.top) for token in stream]
    plain = found.pop("none")
    assert all(len(top) == 2 and logprob <= 0.0 for _, logprob, top in plain)
    if temperature == 0.0:
        assert all(token == top[0][0] and logprob == top[0][1] for token, logprob, top in plain)
    for other in found.values():
        assert [token for token, _, _ in other] == [token for token, _, _ in plain]
        assert [logprob for _, logprob, _ in other] == pytest.approx(
            [logprob for _, logprob, _ in plain], abs=1e-4
        )


def test_without_asking_there_are_none(tiny_path, tiny_draft_path):
    with Engine(tiny_path, tiny_draft_path, profile=False) as engine:
        assert all(
            token.logprob is None and token.top == ()
            for token in engine.stream("a b", n_predict=4, chat=False)
        )
        with pytest.raises(UsageError, match="n_logprobs 21: must be 0 to 20"):
            engine.stream("a b", n_logprobs=21)
