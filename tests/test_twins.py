"""The C core against its Python twins, and both against llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgespec import _core, sampling, verify
from edgespec.errors import UsageError
from edgespec.sampling import SamplingParams, filtered_probs

NO_TOKENS = np.zeros(0, np.int32)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def c_probs(row, params, prefix=()):
    sampler = params.sampler(len(row), 1)
    sampler.sample(np.asarray(row, np.float32), np.asarray(prefix, np.int32), 0.5, 0)
    out = np.empty(len(row), np.float32)
    sampler.probs(0, out)
    return out


def as_float32(x):
    return float(np.float32(x))


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]).map(as_float32),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0]).map(as_float32),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]).map(as_float32),
    typical_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]).map(as_float32),
    repeat_penalty=st.sampled_from([1.0, 1.1, 0.7]).map(as_float32),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    presence_penalty=st.sampled_from([0.0, 0.75]),
    penalty_last_n=st.sampled_from([-1, 0, 1, 3, 64]),
)


@st.composite
def rows(draw, max_size=400):
    """Logits: smooth ones, and ones full of ties, extremes and forbidden tokens."""
    n = draw(st.integers(1, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "flat", "steep", "ties", "forbidden", "huge"]))
    row = rng.normal(0, {"flat": 0.01, "steep": 30.0, "huge": 1e4}.get(kind, 2.5), n)
    if kind == "ties":
        row = rng.integers(-2, 3, n).astype(float)
    if kind == "forbidden":
        row[rng.random(n) < 0.5] = -np.inf
        row[rng.integers(n)] = 1.0
    return row.astype(np.float32)


def cut_is_near(row, params, prefix):
    """Whether a filter's boundary is so near that float rounding may move it by a token.

    A cut that holds for every slightly different parameter is not near.
    """
    seen = set()
    for nudge in (-3e-6, 0.0, 3e-6):
        moved = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(1.0, params.top_p * (1 + nudge)) if params.top_p < 1 else 1.0,
            min_p=min(1.0, params.min_p * (1 + nudge)),
            typical_p=min(1.0, params.typical_p * (1 + nudge)) if params.typical_p < 1 else 1.0,
            repeat_penalty=params.repeat_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            penalty_last_n=params.penalty_last_n,
        )
        for jitter in (0, 1, 2):
            x = row
            if jitter:
                noise = np.random.default_rng(jitter).normal(0, 1e-6, len(row))
                x = (row.astype(np.float64) + noise * np.maximum(1, np.abs(row))).astype(np.float32)
            seen.add(tuple(np.flatnonzero(filtered_probs(x, moved, prefix))))
    return len(seen) > 1


@settings(max_examples=600, deadline=None)
@given(rows(), params_strategy, st.lists(st.integers(0, 30), max_size=100))
def test_filters_agree_with_the_twin(row, params, prefix):
    prefix = [t for t in prefix if t < len(row)]
    want, got = filtered_probs(row, params, prefix), c_probs(row, params, prefix)
    if not np.allclose(got, want, atol=1e-6):
        assume(not cut_is_near(row, params, prefix))
    np.testing.assert_allclose(got, want, atol=1e-6)


@settings(max_examples=200, deadline=None)
@given(rows(), st.sampled_from([0.0, 0.4, 1.0, 2.0]), st.sampled_from([0, 1, 3, 40]))
def test_ties_are_ordered_by_token_id(row, temperature, top_k):
    """Without a cumulative cut no boundary is blurred by rounding: the kept sets are the same."""
    params = SamplingParams(temperature=temperature, **{**OFF, "top_k": top_k})
    want, got = filtered_probs(row, params), c_probs(row, params)
    np.testing.assert_array_equal(np.flatnonzero(want > 1e-30), np.flatnonzero(got > 1e-30))


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 255, 256, 257, 5000, 151_936])
@pytest.mark.parametrize(
    "filters", [OFF, {}, {**OFF, "top_p": 0.9}, {**OFF, "min_p": 0.1}, {**OFF, "typical_p": 0.9}]
)
def test_every_length_of_row(n, filters):
    row = np.random.default_rng(n).normal(0, 3, n).astype(np.float32)
    params = SamplingParams(**filters)
    np.testing.assert_allclose(c_probs(row, params), filtered_probs(row, params), atol=1e-6)


def test_flat_vocabulary_needs_the_whole_nucleus():
    """Top-p over equal logits: the search must widen to every token."""
    row = np.zeros(10_000, np.float32)
    got = c_probs(row, SamplingParams(**{**OFF, "top_p": 0.75}))
    assert np.count_nonzero(got) == pytest.approx(7500, abs=1)
    wide = np.linspace(0, -40, 10_000).astype(np.float32)
    params = SamplingParams(**{**OFF, "top_p": 0.999999})
    assert np.count_nonzero(c_probs(wide, params)) == pytest.approx(
        np.count_nonzero(filtered_probs(wide, params)), abs=10
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=600), st.floats(0, 1, exclude_max=True))
def test_sampling_walks_the_running_sum(probs, coin):
    probs = np.asarray(probs, np.float32)
    assume(probs.sum() > 0)
    sampler = SamplingParams(temperature=1.0, **OFF).sampler(len(probs), 0)
    # softmax of log-probabilities gives them back: sampling through the public path
    with np.errstate(divide="ignore"):
        token = sampler.sample(np.log(probs), NO_TOKENS, coin, -1)
    running = np.cumsum(probs.astype(np.float64)) / probs.astype(np.float64).sum()
    assert probs[token] > 0
    below = running[token - 1] if token else 0.0
    assert below - 1e-5 <= coin <= running[token] + 1e-5


def normalised(rng, n, sharpness, holes):
    p = rng.random(n) ** sharpness + 1e-9
    p[rng.random(n) < holes] = 0
    if p.sum() == 0:
        p[rng.integers(n)] = 1
    return p / p.sum()


@settings(max_examples=500, deadline=None)
@given(
    st.integers(2, 300),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["block", "chain"]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0, 5]),
    st.booleans(),
)
def test_verification_agrees_with_the_twin(n, gamma, seed, rule, holes, top_k, point):
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0, **{**OFF, "top_k": top_k})
    logits = rng.normal(0, 2, (gamma + 1, n)).astype(np.float32)
    p = np.stack([filtered_probs(row, params) for row in logits])
    q = np.stack([normalised(rng, n, rng.integers(1, 6), holes) for _ in range(gamma)]).astype(np.float32)
    draft = np.asarray(
        [rng.choice(n, p=row.astype(np.float64) / row.astype(np.float64).sum()) for row in q], np.int32
    )
    sampler = params.sampler(n, gamma)
    for i in range(gamma):
        if point:
            sampler.set_point(i, int(draft[i]))
            q[i] = np.eye(n)[draft[i]]
        else:
            sampler.set_probs(i, q[i])
    q64 = q.astype(np.float64)
    want = verify.acceptance(p, q64, draft, rule)
    accept, weight = sampler.acceptance(logits, draft, draft, rule == "block")
    np.testing.assert_allclose(weight, want.weight, atol=1e-5)
    np.testing.assert_allclose(accept, want.accept, atol=1e-4)  # h divides two small numbers
    out = np.empty(n, np.float32)
    for tau in range(gamma + 1):
        exact = verify.next_probs(p, q64, tau, weight[tau])
        residual_mass = 1.0 if tau == gamma else np.maximum(0, weight[tau] * p[tau] - q64[tau]).sum()
        if residual_mass < 1e-3:
            continue  # what is left is rounding
        sampler.next_probs(logits, draft, draft, tau, weight[tau], out)
        np.testing.assert_allclose(out, exact, atol=2e-5 / min(1, residual_mass))
    coins = list(rng.random(gamma + 1))
    got = sampler.verify(logits, draft, draft, coins, rule == "block")
    margins = [abs(c - h) for c, h in zip(coins, want.accept, strict=False)]
    if min(margins) > 1e-4:
        assert got[0] == verify.verify(p, q64, draft, coins, rule)[0]
    assert p[got[0], got[1]] > 0


def test_q_over_a_shorter_vocabulary():
    """A draft model without the target's padding tokens: their q is 0."""
    params = SamplingParams(temperature=1.0, **OFF)
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (2, 300)).astype(np.float32)
    sampler = params.sampler(300, 1)
    token = sampler.sample(rng.normal(0, 1, 200).astype(np.float32), NO_TOKENS, 0.3, 0)
    q = np.empty(300, np.float32)
    sampler.probs(0, q)
    assert not q[200:].any()
    draft = np.asarray([token], np.int32)
    p = np.stack([filtered_probs(row, params) for row in logits])
    accept, weight = sampler.acceptance(logits, draft, draft, False)
    want = verify.acceptance(p, q[None].astype(np.float64), draft, "chain")
    np.testing.assert_allclose(accept, want.accept, rtol=1e-5)
    out = np.empty(300, np.float32)
    sampler.next_probs(logits, draft, draft, 0, weight[0], out)
    np.testing.assert_allclose(out, verify.next_probs(p, q[None].astype(np.float64), 0, 1.0), atol=1e-6)


def test_penalties_follow_each_positions_own_prefix():
    params = SamplingParams(
        temperature=1.0, repeat_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, **OFF
    )
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (4, 20)).astype(np.float32)
    prefix, draft = [1, 2, 2], [7, 7, 3]
    sampler = params.sampler(20, 3)
    history = np.asarray(prefix + draft, np.int32)
    for i, token in enumerate(draft):
        sampler.set_point(i, token)
    out = np.empty(20, np.float32)
    for tau in range(4):
        p = filtered_probs(logits[tau], params, prefix + draft[:tau])
        if tau < 3:
            accept, _ = sampler.acceptance(logits, np.asarray(draft, np.int32), history, False)
            assert accept[tau] == pytest.approx(p[draft[tau]], abs=1e-6)
        else:
            sampler.next_probs(logits, np.asarray(draft, np.int32), history, tau, 1.0, out)
            np.testing.assert_allclose(out, p, atol=1e-6)


def test_coins_are_philox():
    """numpy's Philox is the independent reference; it steps its counter before the first block."""
    for seed in (0, 1, 2**64 - 1):
        reference = np.random.Generator(np.random.Philox(key=seed, counter=2**256 - 1)).random(1000)
        np.testing.assert_array_equal(_core.coins(seed, 0, 1000), reference)
        np.testing.assert_array_equal(_core.coins(seed, 37, 5), reference[37:42])


# ---- llama.cpp's sampler chain on the same logits ----


def llama_probs(row, params, prefix=()):
    """The candidates that llama.cpp's own chain leaves, in the order of its `common_sampler`."""
    from edgespec.backend import llama

    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    n = len(row)
    if params.logit_bias:
        entries = (llama.llama_logit_bias * len(params.logit_bias))(*params.logit_bias.items())
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_logit_bias(n, len(entries), entries))
    penalties = (
        params.penalty_last_n,
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    stages = [
        llama.llama_sampler_init_penalties(n, *penalties),
        llama.llama_sampler_init_top_k(params.top_k),
        llama.llama_sampler_init_typical(params.typical_p, 0),
        llama.llama_sampler_init_top_p(params.top_p, 0),
        llama.llama_sampler_init_min_p(params.min_p, 0),
        llama.llama_sampler_init_temp(params.temperature),
        llama.llama_sampler_init_dist(0),
    ]
    for stage in stages:
        llama.llama_sampler_chain_add(chain, stage)
    for token in prefix:
        llama.llama_sampler_accept(chain, int(token))
    data = (llama.llama_token_data * n)(*[(i, float(x), 0.0) for i, x in enumerate(row)])
    array = llama.llama_token_data_array(data=data, size=n, selected=-1, sorted=False)
    llama.llama_sampler_apply(chain, ctypes.byref(array))
    probs = np.zeros(n)
    for i in range(array.size):
        probs[array.data[i].id] = array.data[i].p
    llama.llama_sampler_free(chain)
    return probs


CHAINS = [
    {},
    {**OFF},
    {**OFF, "top_k": 7},
    {**OFF, "top_p": 0.8},
    {**OFF, "min_p": 0.1},
    {**OFF, "typical_p": 0.6},
    {**OFF, "top_k": 20, "typical_p": 0.7, "top_p": 0.9, "min_p": 0.05},
    {**OFF, "repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {**OFF, "repeat_penalty": 1.3, "penalty_last_n": 3},
    {**OFF, "logit_bias": {3: 2.5, 10: -math.inf}},
    {"temperature": 0.0},
    {"temperature": 1.7, "repeat_penalty": 1.1},
]


@pytest.mark.parametrize("options", CHAINS, ids=str)
@pytest.mark.parametrize("n", [50, 3000])
def test_filters_agree_with_llama_cpp(options, n):
    params = SamplingParams(**options)
    rng = np.random.default_rng(11)
    for scale in (0.5, 2.0, 8.0):
        row = rng.normal(0, scale, n).astype(np.float32)
        prefix = rng.integers(0, 50, 100)
        want = llama_probs(row, params, prefix)
        np.testing.assert_allclose(c_probs(row, params, prefix), want, atol=2e-6)
        np.testing.assert_allclose(filtered_probs(row, params, prefix), want, atol=2e-6)


# ---- misuse ----


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.sample(np.zeros(9, np.float32), NO_TOKENS, 0.0, 0), ValueError),
        (lambda s: s.sample(np.zeros(0, np.float32), NO_TOKENS, 0.0, 0), ValueError),
        (lambda s: s.sample(np.zeros(8, np.float64), NO_TOKENS, 0.0, 0), TypeError),
        (
            lambda s: s.sample(np.zeros((8, 2), np.float32)[:, 0], NO_TOKENS, 0.0, 0),
            (BufferError, ValueError),
        ),
        (lambda s: s.sample(np.zeros(8, np.float32), np.zeros(0, np.int64), 0.0, 0), TypeError),
        (lambda s: s.sample(np.zeros(8, np.float32), NO_TOKENS, 0.0, 2), ValueError),
        (lambda s: s.sample(np.full(8, np.nan, np.float32), NO_TOKENS, 0.0, 0), ArithmeticError),
        (lambda s: s.sample(np.full(8, np.inf, np.float32), NO_TOKENS, 0.0, 0), ArithmeticError),
        (lambda s: s.sample(np.full(8, -np.inf, np.float32), NO_TOKENS, 0.0, 0), ArithmeticError),
        (lambda s: s.set_point(0, 8), ValueError),
        (lambda s: s.set_probs(0, np.full(8, 2.0, np.float32)), ArithmeticError),
        (lambda s: s.set_probs(0, np.zeros(8, np.float32)), ArithmeticError),
        (
            lambda s: s.verify(
                np.zeros((2, 8), np.float32), np.zeros(2, np.int32), np.zeros(2, np.int32), [0.0] * 3, True
            ),
            ValueError,
        ),
        (
            lambda s: s.verify(
                np.zeros((3, 7), np.float32), np.zeros(2, np.int32), np.zeros(2, np.int32), [0.0] * 3, True
            ),
            ValueError,
        ),
        (
            lambda s: s.verify(
                np.zeros((4, 8), np.float32), np.zeros(3, np.int32), np.zeros(3, np.int32), [0.0] * 4, True
            ),
            ValueError,
        ),
        (
            lambda s: s.verify(
                np.zeros((2, 8), np.float32), np.zeros(1, np.int32), NO_TOKENS, [0.0] * 2, True
            ),
            ValueError,
        ),
        (
            lambda s: s.verify(
                np.zeros((2, 8), np.float32), np.zeros(1, np.int32), np.zeros(1, np.int32), [0.0], True
            ),
            ValueError,
        ),
    ],
)
def test_misuse_is_refused(call, error):
    with pytest.raises(error):
        call(SamplingParams().sampler(8, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"typical_p": 0},
        {"repeat_penalty": 0},
        {"frequency_penalty": math.inf},
        {"penalty_last_n": -2},
        {"logit_bias": {1: math.nan}},
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(UsageError, match="--"):
        SamplingParams(**wrong)


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"token ids are 0\.\.7"):
        SamplingParams(logit_bias={8: 1.0}).sampler(8, 1)


def test_twin_sampling_takes_the_first_token_above_the_coin():
    assert [sampling.sample([0.25, 0.0, 0.75], coin) for coin in (0.0, 0.2499, 0.25, 0.999)] == [0, 0, 2, 2]
