"""With a grammar every drafter and rule is exact: the real loop over toy models, sequences counted.

The grammar is an automaton over characters, and a token has one or two of them; so the target's distribution
over sequences is known exactly, and characters are forced that can be written in more than one way.
"""

from __future__ import annotations

from functools import cache, partial, reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constrained_runs import ConstrainedTarget, Runs, check_that_the_seed_decides, forced_draft
from edgespec.decoding.constraint import Constraint
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.pace import Policy
from toy_paces import POLICIES, FixedPolicy, RandomPace, cases, soon_drafting

pytestmark = pytest.mark.proof

PIECES = ("a", "b", "c", "ab", "bc")
END = len(PIECES)
V, LENGTH = END + 1, 5
N_RUNS = 800
PROMPT = (0, 1, 2, 3, 1, 2, 0, 4)
NEXT = {  # a state: what may follow, and the state after it; "" ends
    0: {"a": 1, "c": 0, "b": 4},
    1: {"b": 2},
    2: {"c": 6},
    6: {"a": 3},
    3: {"a": 1, "b": 0, "": 3},
    4: {"a": 5, "": 4},
    5: {"b": 2},
}
PARAMS = {
    "warm": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "filtered": SamplingParams(temperature=0.9, top_k=2, top_p=0.9, min_p=0.1),
    "penalties": SamplingParams(
        temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, repeat_penalty=1.4, logit_bias={1: -1.0, 3: 1.5}
    ),
    "banned": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias={3: -np.inf}),
}


def after(state, token):
    for char in PIECES[token] if token < END else ("",):
        state = NEXT[state].get(char) if state is not None else None
    return state


def forced_tokens(state):
    """The longest tokens of the text that must follow, but its last one, which may become another."""
    text = ""
    while len(NEXT[state]) == 1 and "" not in NEXT[state]:
        ((char, state),) = NEXT[state].items()
        text += char
    tokens = []
    while text:
        token = max((t for t in range(END) if text.startswith(PIECES[t])), key=lambda t: len(PIECES[t]))
        tokens.append(token)
        text = text[len(PIECES[token]) :]
    return tokens[:-1]


@cache
def may_follow(state):
    """Which tokens may come next: where the text is forced, that of the longest tokens alone."""
    tokens = forced_tokens(state)[:1] or [token for token in range(V) if after(state, token) is not None]
    return np.isin(np.arange(V), tokens)


class Automaton:
    """A Matcher over NEXT."""

    def __init__(self):
        self.states = [0]

    def mask(self, out):
        out[0] = np.packbits(may_follow(self.states[-1]), bitorder="little")[0]

    def consume(self, token):
        self.states.append(after(self.states[-1], token))
        assert self.states[-1] is not None, "a forbidden token was consumed"

    def rollback(self, n):
        assert 0 < n < len(self.states)
        del self.states[-n:]

    def forced(self):
        return forced_tokens(self.states[-1])


class Forgetful(Constraint):
    """The mistake: the row after the first node is not masked."""

    def masked(self, rows, paths):
        out = super().masked(rows, paths)
        if len(out) > 1:
            out[1] = rows[1]
        return out


@cache
def toy_logits(seed):
    @cache
    def logits(prefix):
        return np.random.default_rng([seed, len(prefix), *prefix]).normal(0, 1.2, V).astype(np.float32)

    return logits


def constrain(params, kind=Constraint):
    banned = [token for token, bias in params.logit_bias.items() if bias == -np.inf]
    return kind(Automaton, V, is_eog=lambda t: t == END, banned=banned)


def target_of(params, kind=Constraint):
    return ConstrainedTarget(
        toy_logits,
        V,
        PROMPT,
        LENGTH,
        params,
        partial(constrain, params, kind),
        lambda text: np.flatnonzero(may_follow(reduce(after, text, 0))),
    )


def test_the_expected_sequences_are_all_there_are():
    for params in PARAMS.values():
        assert sum(target_of(params).expected().values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "rule"), cases(POLICIES))
def test_every_policy_is_exact(clock, name, rule):
    scheduler = RandomPace if name == "random" else soon_drafting
    runs = Runs(clock, target_of(PARAMS["warm"]), POLICIES.get(name, Policy()), rule, scheduler=scheduler)
    assert runs.p_value(N_RUNS) > 1e-4
    assert sum(runs.totals.values()) > N_RUNS / 10, "little was accepted: it proves little"
    assert runs.totals["forced"] > N_RUNS / 20


@pytest.mark.parametrize(
    ("name", "rule"),
    [("filtered", "block"), ("penalties", "block"), ("banned", "block"), ("penalties", "chain")],
)
def test_a_grammar_and_filters_are_exact(clock, name, rule):
    runs = Runs(clock, target_of(PARAMS[name]), Policy(), rule, scheduler=RandomPace)
    assert runs.p_value(N_RUNS) > 1e-4


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_a_draft_that_knows_no_grammar_is_exact(clock, rule):
    policy = FixedPolicy(suffix=False, staged=False, gamma=3)
    runs = Runs(clock, target_of(PARAMS["warm"]), policy, rule, masks_draft=False)
    assert runs.p_value(N_RUNS) > 1e-4


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_a_row_that_is_not_masked_is_caught(clock, rule):
    policy = FixedPolicy(suffix=False, staged=False, gamma=3)
    runs = Runs(clock, target_of(PARAMS["warm"], Forgetful), policy, rule, masks_draft=False)
    try:
        assert runs.p_value(N_RUNS) < 1e-6
    except AssertionError as error:
        assert "impossible" in str(error)


def test_forced_text_is_written_with_the_longest_tokens_but_for_the_last():
    constraint = constrain(PARAMS["warm"])
    assert constraint.forced_run(()) == []
    assert constraint.forced_run((0,)) == [4], "bca must follow, and the a may become another token"
    assert constraint.forced((0,)) == 4
    assert constraint.forced((0, 4)) is None
    assert constraint.fitting((), (2, 0, 4, 4)) == 3
    assert constraint.fitting((), (2, 0, 1)) == 2
    assert constraint.fitting((0,), (4, 0, 0)) == 3
    constraint.advance([0, 4])
    assert constraint.forced(()) is None
    constraint.advance([0])
    assert constraint.fitting((), (END, 0)) == 1, "nothing follows the end"
    assert constraint.forced_run((END,)) == []


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, V - 1), max_size=6), max_size=12), st.integers(0, 3))
def test_a_constraint_finds_its_way_between_any_paths(paths, n_emitted):
    """What may follow a path is what a matcher that went there alone says, in whatever order paths come."""
    constraint = constrain(PARAMS["warm"])
    emitted = [2, 0, 4][:n_emitted]
    constraint.advance(emitted)
    row = np.zeros(V, np.float32)
    for path in paths:
        state = 0
        for token in (*emitted, *path):
            fits = state is not None and token in np.flatnonzero(may_follow(state))
            state = after(state, token) if fits else None
        masked = constraint.mask(row, path)
        if state is None or END in path:
            assert masked is None
        else:
            assert np.array_equal(np.isfinite(masked), may_follow(state))


@pytest.mark.parametrize("name", PARAMS)
def test_with_the_match_rule_the_text_is_a_function_of_the_seed(clock, name):
    check_that_the_seed_decides(clock, target_of(PARAMS[name]), 24)


def test_the_draft_model_does_not_run_where_the_text_is_forced():
    """All of a text but its end is forced."""
    assert forced_draft(target_of(PARAMS["warm"]), [2, 0], 1) == [4]
