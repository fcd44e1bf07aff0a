"""The C core against its Python twins, and both against llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from array import array

import gguf
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reference
from edgespec import _core
from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import UsageError
from edgespec.llama.weights import Model
from reference import filtered_probs

pytestmark = pytest.mark.proof

NO_TOKENS = np.zeros(0, np.int32)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


class Breakers:
    """A vocabulary whose sequence breakers are given as tokens."""

    def __init__(self, *sequences):
        self.sequences = sequences

    def sequence_breakers(self, _texts):
        return array("i", [token for sequence in sorted(self.sequences) for token in (*sequence, -1)])


class Flat:
    """A vocabulary of breakers as they are given to the core."""

    def __init__(self, tokens):
        self.tokens = tokens

    def sequence_breakers(self, _texts):
        return array("i", self.tokens)


def c_probs(row, params, prefix=(), *, seed=0, breakers=()):
    sampler = params.sampler(len(row), 1, seed=seed, vocabulary=Breakers(*breakers))
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
    top_n_sigma=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.6]).map(as_float32),
    dynatemp_range=st.sampled_from([0.0, 0.0, 0.5, 1.5]),
    dynatemp_exponent=st.sampled_from([0.0, 1.0, 2.5]),
    dry_multiplier=st.sampled_from([0.0, 0.0, 0.75]),
    dry_base=st.sampled_from([0.5, 1.0, 1.75]),
    dry_allowed_length=st.sampled_from([0, 1, 2]),
    dry_penalty_last_n=st.sampled_from([-1, 0, 1, 20]),
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


def cut_is_near(row, params, prefix, **twin):
    """Whether a filter's boundary is so near that float rounding may move it by a token.

    A cut that holds for every slightly different parameter is not near.
    """
    seen = set()
    for nudge in (-3e-6, 0.0, 3e-6):
        moved = dataclasses.replace(
            params,
            top_p=min(1.0, params.top_p * (1 + nudge)) if params.top_p < 1 else 1.0,
            min_p=min(1.0, params.min_p * (1 + nudge)),
            typical_p=min(1.0, params.typical_p * (1 + nudge)) if params.typical_p < 1 else 1.0,
            top_n_sigma=params.top_n_sigma * (1 + nudge * (params.top_n_sigma > 0)),
            xtc_threshold=min(1.0, params.xtc_threshold * (1 + nudge)),
        )
        for jitter in (0, 1, 2):
            x = row
            if jitter:
                noise = np.random.default_rng(jitter).normal(0, 1e-6, len(row))
                x = (row.astype(np.float64) + noise * np.maximum(1, np.abs(row))).astype(np.float32)
            seen.add(tuple(np.flatnonzero(filtered_probs(x, moved, prefix, **twin))))
    return len(seen) > 1


@settings(max_examples=600, deadline=None)
@given(
    rows(),
    params_strategy,
    st.integers(1, 30).flatmap(lambda most: st.lists(st.integers(0, most), max_size=100)),
    st.sets(st.sampled_from([(3,), (5, 1), (5, 1, 2), (5, 2), (2, 2)])),
    st.integers(0, 2**64 - 1),
)
def test_filters_agree_with_the_twin(row, params, prefix, breakers, seed):
    prefix = [t for t in prefix if t < len(row)]
    twin = {"seed": seed, "breakers": [one for one in breakers if max(one) < len(row)]}
    want, got = filtered_probs(row, params, prefix, **twin), c_probs(row, params, prefix, **twin)
    if not np.allclose(got, want, atol=1e-6):
        assume(not cut_is_near(row, params, prefix, **twin))
    np.testing.assert_allclose(got, want, atol=1e-6)


@settings(max_examples=300, deadline=None)
@given(rows(), params_strategy, st.lists(st.integers(0, 30), max_size=100), st.integers(0, 2**32 - 1))
def test_a_row_of_some_tokens_is_one_in_which_the_others_are_impossible(row, params, prefix, seed):
    """What a draft with a cut vocabulary gives: its logits, and beside them the tokens that they are of."""
    rng = np.random.default_rng(seed)
    ids = np.flatnonzero(rng.random(len(row)) < 0.4).astype(np.int32)
    if not len(ids) or not np.isfinite(row[ids]).any():
        ids = np.append(ids[ids < row.argmax()], row.argmax()).astype(np.int32)
    whole = np.full(len(row), -np.inf, np.float32)
    whole[ids] = row[ids]
    params = dataclasses.replace(params, logit_bias={int(rng.integers(len(row))): 1.5})
    prefix = [t for t in prefix if t < len(row)]
    sampler = params.sampler(len(row), 1)
    coin = float(rng.random())
    token = sampler.sample(row[ids], np.asarray(prefix, np.int32), coin, 0, ids)
    got = np.empty(len(row), np.float32)
    sampler.probs(0, got)
    want = filtered_probs(whole, params, prefix)
    if not np.allclose(got, want, atol=1e-6):
        assume(not cut_is_near(whole, params, prefix))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert got[token] > 0
    same = sampler.likeliest(whole, 4)
    found = sampler.likeliest(row[ids], 4, ids)
    assert [token for token, _ in found] == [token for token, _ in same]
    np.testing.assert_allclose([p for _, p in found], [p for _, p in same], rtol=1e-5)


@settings(max_examples=200, deadline=None)
@given(rows(), params_strategy, st.integers(0, 2**32 - 1), st.sampled_from([0.25, 0.6, 1.5]))
def test_the_temperature_of_a_draft_is_a_multiple_of_the_targets(row, params, seed, ratio):
    """The filters before it are the target's."""
    sharper = dataclasses.replace(
        params, temperature=params.temperature * ratio, dynatemp_range=params.dynatemp_range * ratio
    )
    sampler = params.sampler(len(row), 1, seed=seed)
    sampler.sample(row, NO_TOKENS, 0.5, 0, None, ratio)
    got = np.empty(len(row), np.float32)
    sampler.probs(0, got)
    want = filtered_probs(row, sharper, seed=seed)
    if not np.allclose(got, want, atol=1e-6):
        assume(not cut_is_near(row, sharper, (), seed=seed))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan])
def test_no_ratio_of_temperatures(ratio):
    sampler = SamplingParams().sampler(8, 1)
    with pytest.raises(ValueError, match="ratio must be above 0"):
        sampler.sample(np.zeros(8, np.float32), NO_TOKENS, 0.5, 0, None, ratio)


def test_ids_that_do_not_fit_a_row():
    sampler = SamplingParams().sampler(8, 1)
    row = np.zeros(3, np.float32)
    for ids in ([1, 2], [0, 1, 2, 3], [1, 1, 2], [2, 1, 3], [-1, 1, 2], [1, 2, 8]):
        with pytest.raises(ValueError, match="length or index"):
            sampler.sample(row, NO_TOKENS, 0.5, 0, np.asarray(ids, np.int32))
    for ids in ([1, 2], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="length or index"):
            sampler.likeliest(row, 1, np.asarray(ids, np.int32))
    with pytest.raises(TypeError, match="ids"):
        sampler.sample(row, NO_TOKENS, 0.5, 0, np.zeros(3, np.int64))


def test_a_matrix_of_8_bits_times_vectors():
    rng = np.random.default_rng(2)
    for n_rows, n_columns, n in ((1, 32, 1), (7, 96, 3), (64, 256, 2), (3, 64, 0)):
        matrix = rng.normal(0, 1, (n_rows, n_columns)).astype(np.float32)
        raw = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
        vectors = rng.normal(0, 1, (n, n_columns)).astype(np.float32)
        out = np.empty((n, n_rows), np.float32)
        _core.multiply(raw, vectors, out)
        whole = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_allclose(out, vectors @ whole.T, atol=1e-4)
        for a, b, c in (
            (raw[:-1], vectors, out),
            (raw, vectors[:, :-1].copy(), out),
            (raw, vectors, out.T.copy()),
        ):
            if a.size != raw.size or b.shape != vectors.shape or (c.shape != out.shape and n):
                with pytest.raises(ValueError, match="do not fit together"):
                    _core.multiply(a, b, c)


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


def random_parents(rng, n):
    """A tree in depth-first order: each node hangs from the one before it or from one above that."""
    parents = []
    for i in range(n):
        parent = i - 1
        while parent >= 0 and rng.random() < 0.35:
            parent = parents[parent]
        parents.append(parent)
    return parents


def path_to(node, parents):
    return [] if node < 0 else [*path_to(parents[node], parents), node]


verify_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([0.8, 1.0]).map(as_float32),
    min_p=st.just(0.0),
    repeat_penalty=st.sampled_from([1.0, 1.5]),
    penalty_last_n=st.sampled_from([-1, 0, 3]),
)


@settings(max_examples=500, deadline=None)
@given(
    st.integers(2, 300),
    st.integers(0, 6),
    st.integers(0, 2**32 - 1),
    verify_params,
    st.sampled_from([("block", 1.0), ("chain", 1.0), ("chain", as_float32(0.3))]),
    st.sampled_from([0.0, 0.5]),
)
def test_verification_agrees_with_the_twin(n, n_nodes, seed, params, rule_and_lenience, holes):
    rule, lenience = rule_and_lenience
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, n_nodes)
    prefix = rng.integers(0, n, rng.integers(0, 9)).astype(np.int32)
    logits = rng.normal(0, 2, (n_nodes + 1, n)).astype(np.float32)
    sampler = params.sampler(n, max(n_nodes, 1))
    tokens, slots, q = [], [], []
    for i in range(n_nodes):
        siblings = [j for j in range(i) if parents[j] == parents[i] and slots[j] >= 0]
        own = np.empty(n, np.float32)
        if siblings and 0 < q[siblings[-1]][tokens[siblings[-1]]] < 0.9:
            sampler.without(slots[siblings[-1]], tokens[siblings[-1]], i)
            want = q[siblings[-1]].copy()
            want[tokens[siblings[-1]]] = 0
            sampler.probs(i, own)
            np.testing.assert_allclose(own, want / want.sum(), atol=1e-6)
        else:
            sampler.set_probs(i, normalised(rng, n, rng.integers(1, 6), holes).astype(np.float32))
            sampler.probs(i, own)
        q.append(own.astype(np.float64))
        tokens.append(int(rng.choice(n, p=q[i] / q[i].sum())))
        slots.append(i)
        if rng.random() < 0.3:
            slots[i], q[i] = -1, np.eye(n)[tokens[i]]
    p = []  # the core's own, with the penalties of the path: of filters, other tests tell
    for node in range(-1, n_nodes):
        path = [tokens[i] for i in path_to(node, parents)]
        sampler.sample(logits[node + 1], np.asarray([*prefix, *path], np.int32), 0.5, -1)
        row = np.empty(n, np.float32)
        sampler.probs(-1, row)
        p.append(row.astype(np.float64))
    drafted = reference.Drafted(tokens, parents, np.array(q).reshape(-1, n), np.array(p))
    arrays = [np.asarray(x, np.int32) for x in (tokens, parents, slots)]

    want = {
        node: (chance, rest) for node, chance, rest in reference.outcomes(drafted, rule, lenience=lenience)
    }
    nothing = (0.0, np.zeros(n))
    near = False
    for node in range(-1, n_nodes):
        chance, rest = want.get(node, nothing)
        out = np.empty(n, np.float32)
        got = sampler.outcome(logits, *arrays, prefix, rule == "block", node, out, lenience=lenience)
        # What is left may be little, and rounded much; then it is unlikely, too.
        np.testing.assert_allclose(got * out, chance * rest, atol=2e-5)
        near |= abs(got - chance) > 1e-6

    coins = list(rng.random(n_nodes + 1))
    path, token, judged = sampler.verify(logits, *arrays, prefix, coins, rule == "block", lenience=lenience)
    end = path[-1] if path else -1
    assert path == path_to(end, parents)
    assert want.get(end, nothing)[0] > 0 or near
    assert p[end + 1][token] > 0
    assert [node for node, _, _ in judged] == [
        i
        for i in range(n_nodes)
        if (parents[i] in path or parents[i] < 0)
        and not any(j in path for j in range(i) if parents[j] == parents[i])
    ]
    for node, p_node, q_node in judged:
        assert p_node == pytest.approx(p[parents[node] + 1][tokens[node]], rel=1e-6)
        assert q_node == pytest.approx(q[node][tokens[node]], rel=1e-6)
    moved = [
        reference.verify(drafted, np.clip(np.array(coins) + by, 0, 1), rule, lenience=lenience)[0]
        for by in (-1e-4, 0, 1e-4)
    ]
    if not near and moved[0] == moved[1] == moved[2]:  # no coin is so near that rounding decides
        assert path == moved[1]


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
    p = np.stack([filtered_probs(row, params) for row in logits])
    want = reference.outcomes(reference.Drafted([token], [-1], q[None].astype(np.float64), p), "chain")
    for node, chance, rest in want:
        out = np.empty(300, np.float32)
        assert sampler.outcome(logits, *chain([token]), NO_TOKENS, False, node, out) == pytest.approx(chance)
        np.testing.assert_allclose(out, rest, atol=1e-6)


def chain(tokens):
    slots = np.arange(len(tokens), dtype=np.int32)
    return np.asarray(tokens, np.int32), slots - 1, slots


@pytest.mark.parametrize("last_n", [-1, 0, 1, 2, 4, 64])
def test_penalties_follow_each_nodes_own_path(last_n):
    """Every path of a tree on its own: the core appends its tokens to what precedes the tree."""
    params = SamplingParams(
        temperature=1.0,
        repeat_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        penalty_last_n=last_n,
        **OFF,
    )
    rng = np.random.default_rng(5)
    tokens, parents = [7, 7, 3, 1, 2, 2], [-1, 0, 1, 0, -1, 4]
    logits = rng.normal(0, 2, (7, 20)).astype(np.float32)
    sampler = params.sampler(20, 6)
    arrays = [np.asarray(x, np.int32) for x in (tokens, parents, [-1] * 6)]
    for prefix in ([1, 2, 2], [], list(rng.integers(0, 20, 500))):
        for node in (2, 3, 5):  # the leaves: nothing is taken from their p
            path = [tokens[i] for i in path_to(node, parents)]
            out = np.empty(20, np.float32)
            sampler.outcome(logits, *arrays, np.asarray(prefix, np.int32), False, node, out)
            np.testing.assert_allclose(
                out, filtered_probs(logits[node + 1], params, prefix + path), atol=1e-6
            )


def test_coins_are_philox():
    """numpy's Philox is the independent reference; it steps its counter before the first block."""
    for seed in (0, 1, 2**64 - 1):
        reference = np.random.Generator(np.random.Philox(key=seed, counter=2**256 - 1)).random(1000)
        np.testing.assert_array_equal(_core.coins(seed, 0, 1000), reference)
        np.testing.assert_array_equal(_core.coins(seed, 37, 5), reference[37:42])


# ---- llama.cpp's sampler chain on the same logits ----


def llama_dry(params, model):
    from edgespec.llama.backend import llama

    texts = [text.encode() for text in params.dry_sequence_breakers]
    return llama.llama_sampler_init_dry(
        model.vocabulary,
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        4096 if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n,  # -1 is its caller's
        (ctypes.c_char_p * len(texts))(*texts),
        len(texts),
    )


def llama_probs(row, params, prefix=(), model=None):
    """The candidates that llama.cpp's own chain leaves, in the order of its `common_sampler`.

    DRY is left out without a `model`. Of XTC, probabilities of 0 and 1 do not hang on its own coins.
    """
    from edgespec.llama.backend import llama

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
        *([llama_dry(params, model)] if model else []),
        llama.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        llama.llama_sampler_init_top_k(params.top_k),
        llama.llama_sampler_init_typical(params.typical_p, 0),
        llama.llama_sampler_init_top_p(params.top_p, 0),
        llama.llama_sampler_init_min_p(params.min_p, 0),
        llama.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 1),
        llama.llama_sampler_init_temp_ext(
            params.temperature, params.dynatemp_range, params.dynatemp_exponent
        ),
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
    {**OFF, "top_n_sigma": 1.0},
    {"top_n_sigma": 1.5, "top_k": 20},
    {**OFF, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "min_p": 0.01},
    {"xtc_probability": 1.0, "temperature": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {**OFF, "dynatemp_range": 0.7, "dynatemp_exponent": 1.3},
    {"dynatemp_range": 2.0, "temperature": 0.0},
    {"dynatemp_range": 0.5, "xtc_probability": 1.0, "top_n_sigma": 2.0},
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dry_allowed_length": 1, "dry_base": 1.2},
        {"dry_allowed_length": 0, "dry_multiplier": 0.3},
        {"dry_penalty_last_n": 30},
        {"dry_penalty_last_n": 0},
        {"dry_base": 0.9},
        {"dry_sequence_breakers": ()},
        {"dry_sequence_breakers": ("o", "the quick brown", "ick b", "\n")},
        {"repeat_penalty": 1.2, "top_n_sigma": 2.0},
    ],
    ids=str,
)
def test_dry_agrees_with_llama_cpp(tiny_path, options):
    params = SamplingParams(**{**OFF, "temperature": 1.0, "dry_multiplier": 0.8, **options})
    rng = np.random.default_rng(4)
    with Model(tiny_path, vocab_only=True) as model:
        words = [
            model.tokenize(w, add_special=False, parse_special=False)
            for w in ("the quick brown fox", ": o\n", "jumps over")
        ]
        changed = 0
        for _ in range(30):
            text = [token for i in rng.integers(0, 3, 12) for token in words[i][: rng.integers(1, 9)]]
            row = rng.normal(0, 2, model.n_vocab).astype(np.float32)
            sampler = params.sampler(model.n_vocab, 1, vocabulary=model)
            sampler.sample(row, np.asarray(text, np.int32), 0.5, 0)
            got = np.empty(model.n_vocab, np.float32)
            sampler.probs(0, got)
            np.testing.assert_allclose(got, llama_probs(row, params, text, model), atol=2e-6)
            changed += not np.allclose(
                got, c_probs(row, dataclasses.replace(params, dry_multiplier=0.0), text)
            )
    is_off = params.dry_penalty_last_n == 0 or params.dry_base < 1
    assert (changed == 0) if is_off else (changed > 5)


def test_a_long_repeat_is_found_in_time_that_grows_with_the_text():
    """Z algorithm: what it keeps is bounded, and the longest repeats count as `ES_LONGEST_REPEAT` tokens."""
    params = SamplingParams(**OFF, temperature=1.0, dry_multiplier=1.0, dry_base=1.0001)
    row = np.zeros(4, np.float32)
    for text, longest in (([1] * 200_000, 4096), ([1, 2, 3] * 2000, 4096), ([1, 2, 3] * 1000, 2997)):
        got = c_probs(row, params, text)
        penalty = math.log(got[0]) - math.log(got[1])
        assert penalty == pytest.approx(1.0001 ** (longest - 2), rel=1e-4)


# ---- misuse ----


def zeros(*shape):
    return np.zeros(shape, np.float32)


def ints(*lists):
    return [np.asarray(one, np.int32) for one in lists]


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
        (lambda s: s.adjusted(zeros(9), NO_TOKENS, [0]), ValueError),
        (lambda s: s.adjusted(zeros(8), NO_TOKENS, [8]), ValueError),
        (lambda s: s.adjusted(zeros(8), NO_TOKENS, ["0"]), TypeError),
        *[
            (
                lambda _, one=one: SamplingParams(dry_multiplier=1.0).sampler(8, 2, vocabulary=Flat(one)),
                ValueError,
            )
            for one in ([1], [-1], [8, -1], [1, -1, -1], [-2, -1], [1, -2, -1])
        ],
        (lambda s: s.set_probs(0, zeros(9)), ValueError),
        (lambda s: s.set_probs(0, np.full(8, 2.0, np.float32)), ArithmeticError),
        (lambda s: s.set_probs(0, np.zeros(8, np.float32)), ArithmeticError),
        (lambda s: s.without(2, 0, 0), ValueError),
        (lambda s: s.without(0, 8, 1), ValueError),
        (lambda s: s.without(0, 0, 2), ValueError),
        (lambda s: (s.set_probs(0, np.eye(8, dtype=np.float32)[3]), s.without(0, 3, 1)), ArithmeticError),
        (lambda s: s.verify(zeros(9), *ints([0], [-1], [-1], []), [0.0] * 2, True), ValueError),
        (
            lambda s: s.verify(zeros(4, 8), *ints([0] * 3, [-1, 0, 1], [-1] * 3, []), [0.0] * 4, True),
            ValueError,
        ),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [-1], []), [0.0], True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [], []), [0.0] * 2, True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [], [-1], []), [0.0] * 2, True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([8], [-1], [-1], []), [0.0] * 2, True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [0], [-1], []), [0.0] * 2, True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [-2], [-1], []), [0.0] * 2, True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [2], []), [0.0] * 2, True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [-2], []), [0.0] * 2, True), ValueError),
        (lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [0], []), [0.0] * 2, True), ValueError),
        (
            lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [-1], []), [0.0] * 2, True, lenience=0.5),
            ValueError,
        ),
        (
            lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [-1], []), [0.0] * 2, False, lenience=0.0),
            ValueError,
        ),
        (
            lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [-1], []), [0.0] * 2, False, lenience=1.5),
            ValueError,
        ),
        (
            lambda s: s.verify(zeros(2, 8), *ints([0], [-1], [-1], []), [0.0] * 2, False, lenience=math.nan),
            ValueError,
        ),
        (lambda s: s.verify(zeros(2, 8), [0], *ints([-1], [-1], []), [0.0] * 2, True), TypeError),
        (lambda s: s.outcome(zeros(2, 8), *ints([0], [-1], [-1], []), True, 1, zeros(8)), ValueError),
        (lambda s: s.outcome(zeros(2, 8), *ints([0], [-1], [-1], []), True, 0, zeros(7)), ValueError),
    ],
)
def test_misuse_is_refused(call, error):
    with pytest.raises(error):
        call(SamplingParams().sampler(8, 2))


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"token ids are 0\.\.7"):
        SamplingParams(logit_bias={8: 1.0}).sampler(8, 1)


def test_twin_sampling_takes_the_first_token_above_the_coin():
    assert [reference.sample([0.25, 0.0, 0.75], coin) for coin in (0.0, 0.2499, 0.25, 0.999)] == [0, 0, 2, 2]
