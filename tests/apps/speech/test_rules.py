"""OpenAI's rules: against a slow statement of them, and in the loop, with drafts and without."""

import math

import numpy as np
import pytest

from edgespec._core import SuffixStore
from edgespec.apps.speech.rules import SpeechRules, log_total
from edgespec.decoding.generate import Generation, Task
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import Coins, SamplingParams
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import Policy
from edgespec.drafting.tree_drafter import TreeDrafter
from toy_paces import curves, pace_of, with_gamma
from toy_speech import (
    END,
    FIRST_TIME,
    N_VOCAB,
    NO_SPEECH,
    NO_TIMES,
    RULES,
    START,
    TRAITS,
    random_decoder,
    toy_session,
)


def by_the_book(row, written):
    """Apply the rules one after the other, as a reader of the paper's code would."""
    row = row.astype(np.float64)
    times = [token for token in written if token >= FIRST_TIME]
    if not written:
        row[[*RULES.blank, END]] = -np.inf
    row[list(RULES.suppressed)] = -np.inf
    row[NO_TIMES] = -np.inf
    last_is_time = len(written) >= 1 and written[-1] >= FIRST_TIME
    one_before_too = len(written) < 2 or written[-2] >= FIRST_TIME
    if last_is_time:
        row[slice(FIRST_TIME, None) if one_before_too else slice(0, END)] = -np.inf
    if times:
        lowest = times[-1] if last_is_time and not one_before_too else times[-1] + 1
        row[FIRST_TIME:lowest] = -np.inf
    if not written:
        row[:FIRST_TIME] = -np.inf
        row[FIRST_TIME + RULES.last_initial + 1 :] = -np.inf
    total = np.exp(row[FIRST_TIME:]).sum()
    if total > 0 and math.log(total) > row[:FIRST_TIME].max():
        row[:FIRST_TIME] = -np.inf
    return row


@pytest.mark.parametrize("seed", range(20))
def test_masks_are_those_of_a_slow_statement_of_the_rules(seed):
    rng = np.random.default_rng(seed)
    rules = SpeechRules(RULES)
    written = []
    while len(written) < 40:
        path = []
        for place in range(rng.integers(1, 5)):  # drafted tokens, which are taken back
            row = (rng.uniform(0.1, 4.0) * rng.standard_normal(N_VOCAB)).astype(np.float32)
            expected = by_the_book(row, [*written, *path])
            masked = rules.mask(row, path, place=place)
            assert np.array_equal(masked, expected.astype(np.float32))
            path.append(int(rng.choice(np.flatnonzero(np.isfinite(expected)))))
            if path[-1] == END:
                break
        n = int(rng.integers(1, len(path) + 1))
        emitted = [token for token in path[:n] if token != END]
        rules.advance(emitted)
        written += emitted
        assert len(rules.logprobs) == len(written)


def test_without_timestamps_none_follow_and_no_text_is_forced_to_begin_with_one():
    from dataclasses import replace

    rules = SpeechRules(replace(RULES, timed=False))
    row = np.zeros(N_VOCAB, np.float32)
    masked = rules.mask(row, ())
    assert np.isfinite(masked[0])
    assert masked[5] == masked[END] == -np.inf  # a blank, and nothing at all
    rules.advance([0])
    assert np.isfinite(rules.mask(row, ())[END])


def decoded(*, temperature=0.0, rule="match", drafter=None, seed=1, n_predict=60):
    rules = SpeechRules(RULES)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    options = Options(params=params, n_predict=n_predict)
    session = toy_session(random_decoder(), noted=0)
    task = Task(options=options, rule=rule, coins=Coins(seed), constraint=rules)
    generation = Generation(session, drafter(rules) if drafter else None, [START], task)
    steps = list(generation.events())
    return generation.tokens[1:], rules, session, len(steps)


def drafting(kind):
    def made(rules):
        clocks = curves()
        model = None
        if kind == "model":
            model = DraftModel(toy_session(random_decoder(salt=7)), n_vocab=N_VOCAB)
        suffix = SuffixStore(1 << 12) if kind == "suffix" else None
        policy = Policy(suffix=kind == "suffix", model=kind == "model", staged=False, branches=False)
        return TreeDrafter(
            pace_of(with_gamma(policy, 4), clocks),
            suffix=suffix,
            model=model,
            is_eog=TRAITS.is_eog,
            clocks=clocks,
            constraint=rules,
        )

    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["model", "suffix"])
def test_a_draft_changes_neither_text_nor_probabilities(kind, temperature):
    plain, rules, session, n_plain = decoded(temperature=temperature)
    drafted, others, other, n_drafted = decoded(temperature=temperature, drafter=drafting(kind))
    assert drafted == plain
    assert others.logprobs == rules.logprobs
    assert np.array_equal(session.noted_row, other.noted_row)
    if kind == "model":
        assert n_drafted < n_plain


def test_emitted_logprobs_are_of_the_masked_logits():
    tokens, rules, _, _ = decoded()
    model = random_decoder()
    expected = []
    for n, token in enumerate(tokens):
        row = by_the_book(model((START, *tokens[:n])), tokens[:n])
        expected.append(row[token] - log_total(row.astype(np.float32)))
    assert rules.logprobs == pytest.approx(expected, abs=1e-5)


def test_block_verification_counts_the_probabilities_of_what_it_emits():
    tokens, rules, _, _ = decoded(temperature=0.7, rule="block", drafter=drafting("model"))
    model = random_decoder()
    for n, token in enumerate(tokens):
        row = by_the_book(model((START, *tokens[:n])), tokens[:n])
        assert np.isfinite(row[token])
        assert rules.logprobs[n] == pytest.approx(row[token] - log_total(row.astype(np.float32)), abs=1e-5)


def test_where_nobody_speaks_is_read_in_the_pass_of_the_prompt():
    prompt = [4, 9, START, 11, 12]
    session = toy_session(random_decoder(), noted=2)
    session.eval(prompt)
    assert np.array_equal(session.noted_row, random_decoder()((4, 9, START)))
    assert session._cache.passes == [5]
    assert NO_SPEECH < N_VOCAB
