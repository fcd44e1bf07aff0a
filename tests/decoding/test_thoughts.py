"""A limit on thoughts is exact under every drafter and rule: the real loop, toy models, sequences counted.

A thought is between < and >. A token has a character or two, so that a marker may come with other text.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constrained_runs import ConstrainedTarget, Runs, check_that_the_seed_decides, forced_draft
from edgespec.decoding.constraint import ThoughtConstraint, ThoughtLimit, ThoughtMatcher
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.pace import Policy
from toy_paces import POLICIES, RandomPace, cases, soon_drafting

PIECES = (b"<", b">", b"a", b"b", b"<a", b"b>", b" ", b"")
END = len(PIECES) - 1
V, LENGTH = END + 1, 6
END_OF_THOUGHT = (2, 2, 1)  # "aa>"
BUDGET = 2
PROMPT = (2, 3, 2, 3)
N_RUNS = 600
PARAMS = SamplingParams(temperature=1.0, top_k=2, top_p=1.0, min_p=0.0)


class ToyModel:
    """The part of a model that a limit reads."""

    n_vocab = V

    def __init__(self, pieces=PIECES):
        self.pieces = pieces

    def is_eog(self, token):
        return token == END

    def piece(self, token, *, special=False):
        return self.pieces[token]


def limit_of(budget=BUDGET, *, begun=False, end=END_OF_THOUGHT):
    return ThoughtLimit(budget=budget, opener=b"<", closer=b">", end=end, begun=begun)


def may_follow(written, begun):
    """The tokens that may follow `written`, by the rule, from all of the text."""
    n_before = 0  # tokens up to the one that opens
    if not begun:
        while n_before < len(written) and PIECES[written[n_before]] == b" ":
            n_before += 1
        if n_before == len(written) or not PIECES[written[n_before]].startswith(b"<"):
            return range(V)
        n_before += 1
    n_more = len(written) - n_before - BUDGET
    is_closed = any(b">" in PIECES[token] for token in written[n_before:])
    return range(V) if is_closed or n_more < 0 else [END_OF_THOUGHT[n_more]]


@cache
def toy_logits(seed):
    @cache
    def logits(prefix):
        row = np.random.default_rng([seed, len(prefix), *prefix]).normal(0, 1.2, V).astype(np.float32)
        row[0] += 4.0 * (prefix == PROMPT)  # thoughts, and long ones
        row[[1, 5, END]] -= 1.0
        return row

    return logits


def target_of(begun):
    return ConstrainedTarget(
        toy_logits,
        V,
        PROMPT,
        LENGTH,
        PARAMS,
        lambda: ThoughtConstraint(limit_of(begun=begun), ToyModel()),
        lambda text: may_follow(text, begun),
    )


@pytest.mark.proof
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("name", "rule"), cases(["auto", "staged, gamma 2"]))
def test_every_policy_is_exact(clock, name, rule, begun):
    scheduler = RandomPace if name == "random" else soon_drafting
    runs = Runs(clock, target_of(begun), POLICIES.get(name, Policy()), rule, scheduler=scheduler)
    assert runs.p_value(N_RUNS) > 1e-4
    assert runs.totals["forced"] > N_RUNS / 20


@pytest.mark.parametrize("begun", [False, True])
def test_with_the_match_rule_the_text_is_a_function_of_the_seed(clock, begun):
    check_that_the_seed_decides(clock, target_of(begun), 20)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, V - 2), max_size=7), max_size=8),
    st.lists(st.integers(0, V - 2), max_size=3),
    st.booleans(),
)
def test_what_may_follow_is_the_rule_of_the_text(paths, emitted, begun):
    """In whatever order paths come, of drafts that are taken back."""

    def fits(written):
        return all(token in may_follow(written[:n], begun) for n, token in enumerate(written))

    if not fits(emitted):
        return
    constraint = ThoughtConstraint(limit_of(begun=begun), ToyModel())
    constraint.advance(emitted)
    row = np.zeros(V, np.float32)
    for path in paths:
        masked = constraint.mask(row, path)
        if not fits([*emitted, *path]):
            assert masked is None
        else:
            assert [*np.flatnonzero(np.isfinite(masked))] == [*may_follow([*emitted, *path], begun)]


def test_the_end_is_one_draft_that_costs_no_pass_of_the_draft_model():
    assert forced_draft(target_of(begun=False), [0, 3, 3], 3) == [*END_OF_THOUGHT], 'after "<bb"'


def written_to_the_end(matcher, tokens):
    for token in tokens:
        matcher.consume(token)
    return matcher.forced()


def test_a_character_is_not_cut():
    pieces = (b"<", b">", "é".encode()[:1], "é".encode()[1:], b"x", b"", b"", b"")
    matcher = ThoughtMatcher(limit_of(1, begun=True), ToyModel(pieces), None)
    assert written_to_the_end(matcher, [2]) == []
    assert written_to_the_end(matcher, [3]) == [*END_OF_THOUGHT]
    matcher = ThoughtMatcher(limit_of(1, begun=True), ToyModel(pieces), None)
    assert written_to_the_end(matcher, [2] * 4) == []
    assert written_to_the_end(matcher, [2]) == [*END_OF_THOUGHT], "what is no character may go on for ever"


def test_no_thought_at_all():
    assert ThoughtMatcher(limit_of(0, begun=True), ToyModel(), None).forced() == [*END_OF_THOUGHT]
    assert written_to_the_end(ThoughtMatcher(limit_of(0), ToyModel(), None), [6, 0]) == [*END_OF_THOUGHT]
    assert written_to_the_end(ThoughtMatcher(limit_of(0), ToyModel(), None), [3, 0, 0, 0]) == []


class Answer:
    """A grammar of a's and b's, and one > in the third place or later."""

    def __init__(self):
        self.written = []

    def mask(self, out):
        allowed = [2, 3] + ([1] if len(self.written) >= 4 and 1 not in self.written else [])
        out[0] = sum(1 << token for token in allowed)

    def consume(self, token):
        self.written.append(token)

    def rollback(self, n):
        del self.written[-n:]

    def forced(self):
        return []


def test_a_grammar_goes_before_the_end_that_it_forbids():
    constraint = ThoughtConstraint(limit_of(1, begun=True, end=(1,)), ToyModel(), Answer)
    found = []
    while len(found) < 6:
        allowed = [token for token in range(V) if constraint.allows((), token)]
        found.append(allowed)
        constraint.advance([allowed[-1] if len(allowed) > 1 else allowed[0]])
    assert found == [[2, 3], [2, 3], [2, 3], [2, 3], [1], [2, 3]]


def test_a_drafter_may_rest_in_a_long_thought_and_in_the_answer():
    constraint = ThoughtConstraint(limit_of(100, begun=True), ToyModel())
    said = []
    for n, token in ((1, 2), (70, 2), (1, 1)):
        constraint.advance([token] * n)
        said.append(constraint.may_force)
    assert said == [False, True, False]
    constraint.mask(np.zeros(V, np.float32), [2] * 3)
    assert not constraint.may_force
