"""A draft of another vocabulary: what it reads, what it proposes, and that all of it is exact."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import Engine, SamplingParams
from edgespec._core import SuffixStore
from edgespec.decoding.generate import Generation
from edgespec.drafting.foreign import translated_model
from edgespec.drafting.foreign.translated_model import TranslatedModel, Translation
from edgespec.drafting.foreign.vocabulary_map import NONE, map_vocabularies
from edgespec.drafting.pace import Policy
from edgespec.drafting.tree_drafter import TreeDrafter
from reference import filtered_probs
from tiny_gguf import write_tiny_gguf
from toy_models import chi_square_p_value
from toy_paces import FixedPolicy, WithoutGuesses, curves, pace_of
from toy_sessions import ToySession, run
from toy_tasks import task_of
from toy_vocabularies import ToyVocabulary, random_logits, session_of

pytestmark = pytest.mark.proof

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
LOOKS = {"as shipped": 3, "never": 0, "always": 10**6}
"""Looks ahead at a token that change nothing, after which it is taken as it is."""

TARGET = ToyVocabulary([b"a", b"b", b"bc", b"c"])
DRAFT = ToyVocabulary([b"c", b"ab", b"a", b"b"], [b"<begin>", b"<end>"], bos=4, eos=5)
END = TARGET.eos
PROMPT = (0, 1, 2, 0, 3, 1)
LENGTH = 4
MODEL = FixedPolicy(suffix=False, staged=False, gamma=3)
POLICIES = {
    "model": MODEL,
    "all": FixedPolicy(staged=False, gamma=3),
    "random": Policy(staged=False),  # whatever a scheduler may decide, branches among it
}


def speaks(vocabulary, model, seed=0):
    """A draft that says what the target `model` would, half of it: in its own tokens, with noise."""

    def logits(prefix):
        row = np.random.default_rng([seed, len(prefix), *prefix]).normal(0, 0.5, vocabulary.n_vocab)
        said = TARGET.tokenize(vocabulary.said(prefix[1:]).decode(), add_special=False, parse_special=False)
        after = model(tuple(said))
        for token in range(vocabulary.n_vocab):
            text = vocabulary.piece(token)
            if text and (first := TARGET.tokenize(text.decode(), add_special=False, parse_special=False)):
                row[token] += 1.5 * after[first[0]]
        row[vocabulary.eos] += after[END]
        return row.astype(np.float32)

    return logits


@pytest.fixture(params=LOOKS)
def looks(request, monkeypatch):
    """What is exact is so however often the draft looks ahead."""
    monkeypatch.setattr(translated_model, "_QUIET", LOOKS[request.param])


def draft_of(logits, *, target=TARGET, vocabulary=DRAFT, **session):
    return TranslatedModel(
        session_of(vocabulary, logits, **session), target, map_vocabularies(target, vocabulary)
    )


def target_of(clock, logits):
    return ToySession(cache(logits), TARGET.n_vocab, is_eog=TARGET.is_eog, clock=clock, cost=lambda n: 0.05)


def drafter_of(model, policy):
    clocks = curves()
    make = pace_of if isinstance(policy, FixedPolicy) else WithoutGuesses
    scheduler = make(policy, clocks)
    suffix = SuffixStore(1024)
    return TreeDrafter(scheduler, suffix=suffix, model=model, is_eog=TARGET.is_eog, clocks=clocks)


# --- exactness


def expected(logits):
    """The target's distribution over texts of LENGTH tokens; after the end token stands only the end."""
    total = np.zeros((TARGET.n_vocab,) * LENGTH)

    def spread(prefix, chance):
        if len(prefix) == LENGTH or END in prefix:
            total[prefix + (END,) * (LENGTH - len(prefix))] += chance
            return
        for token, p in enumerate(filtered_probs(logits(PROMPT + prefix), WARM)):
            spread((*prefix, token), chance * p)

    spread((), 1.0)
    return total


def counts_of(clock, logits, model, rule, policy, n_runs):
    target = target_of(clock, logits)
    drafter = drafter_of(model, policy)
    counts = np.zeros((TARGET.n_vocab,) * LENGTH)
    drafted = accepted = 0
    for seed in range(n_runs):
        run = Generation(target, drafter, PROMPT, task_of(WARM, seed, rule=rule, n_predict=LENGTH))
        list(run.events())
        said = run.tokens[len(PROMPT) :]
        counts[(*said, *[END] * (LENGTH - len(said)))] += 1
    for n_drafted, n_accepted in drafter.sources().values():
        drafted, accepted = drafted + n_drafted, accepted + n_accepted
    return counts, drafted, accepted


def exact(clock, rule, policy, n_runs):
    logits = random_logits(1, TARGET.n_vocab)
    model = draft_of(cache(speaks(DRAFT, logits)))
    counts, drafted, accepted = counts_of(clock, logits, model, rule, policy, n_runs)
    assert accepted > drafted / 10 > n_runs / 20, "little was accepted: it proves little"
    assert chi_square_p_value(counts, n_runs * expected(logits)) > 1e-4
    other = expected(random_logits(2, TARGET.n_vocab))
    assert chi_square_p_value(counts, n_runs * other) < 1e-9  # what is counted tells models apart


@pytest.mark.parametrize(
    ("policy", "rule"), [("model", "block"), ("all", "block"), ("random", "block"), ("random", "chain")]
)
def test_what_is_emitted_is_distributed_as_the_target_alone(clock, looks, rule, policy):
    exact(clock, rule, POLICIES[policy], 1_500)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_with_the_match_rule_the_text_is_plain_decodings(clock, looks, policy, params):
    for seed in range(20):
        logits = random_logits(seed, TARGET.n_vocab)
        target = target_of(clock, logits)
        texts = []
        for drafter in (None, drafter_of(draft_of(cache(speaks(DRAFT, logits))), POLICIES[policy])):
            run = Generation(target, drafter, PROMPT, task_of(params, seed, rule="match", n_predict=30))
            list(run.events())
            texts.append((run.tokens, run.stop_reason))
        assert texts[0] == texts[1]


# --- what is proposed


def always(vocabulary, *texts):
    """A model that says these tokens in turn, counted from BOS."""
    ids = [vocabulary.texts.index(text) for text in texts]

    def logits(prefix):
        row = np.linspace(0, 1, vocabulary.n_vocab).astype(np.float32)
        row[ids[(len(prefix) - 1) % len(ids)]] = 9.0
        return row

    return logits


def test_without_looks_it_is_the_drafts_distribution_over_what_both_can_say(monkeypatch):
    monkeypatch.setattr(translated_model, "_QUIET", 0)
    logits = random_logits(5, DRAFT.n_vocab)
    row = run(draft_of(logits), PROMPT)[0]
    own = logits((DRAFT.bos, *DRAFT.tokenize(TARGET.said(PROMPT).decode(), add_special=0, parse_special=0)))
    assert map_vocabularies(TARGET, DRAFT).target_of[own.argmax()] != NONE
    want = {0: own[2], 1: own[3], 2: -math.inf, 3: own[0], END: own[DRAFT.eos]}
    assert row.tolist() == pytest.approx([want[token] for token in range(TARGET.n_vocab)])


def test_what_the_target_writes_as_one_token_is_proposed_as_one():
    """The draft says b, c: for the target that is one token, bc, which the draft does not have."""
    assert map_vocabularies(TARGET, DRAFT).draft_of[2] == NONE
    logits = always(DRAFT, b"b", b"c", b"a")
    prompt = (1, 3, 0)  # b c a
    row = run(draft_of(logits), prompt)[0]
    assert row.argmax() == 2
    assert row[2] == 9.0
    assert row[1] == -math.inf


def test_the_drafts_likeliest_token_need_not_be_one_of_the_targets():
    """ab is a and b for the target; what follows b might belong to it, a is certain."""
    logits = always(DRAFT, b"ab")
    assert run(draft_of(logits), (1, 1))[0].argmax() == 0


def test_nothing_is_said_ahead_past_the_end():
    """b, the end, c: not bc."""

    def logits(prefix):
        row = np.zeros(DRAFT.n_vocab, np.float32)
        row[(3, DRAFT.eos, 0)[len(prefix) % 3]] = 9.0
        return row

    row = run(draft_of(logits), (0, 0))[0]
    assert row.argmax() == 1
    assert row[2] == -math.inf


def test_what_was_said_ahead_is_not_said_again(monkeypatch):
    """The draft goes on as it said: then its next row has been computed already."""
    monkeypatch.setattr(translated_model, "_QUIET", 10**6)
    session = session_of(DRAFT, always(DRAFT, b"a", b"c"))
    model = TranslatedModel(session, TARGET, map_vocabularies(TARGET, DRAFT))
    tokens = [0, 3, 0, 3]
    model.begin()
    assert run(model, tokens)[0].argmax() == 0
    n_passes = len(session.passes)
    for token in (0, 3, 0, 3, 0, 3):
        tokens.append(token)
        model.trim(len(tokens) - 1)
        row = run(model, tokens)[0]
        assert row.argmax() == (3 if token == 0 else 0)
    assert len(session.passes) - n_passes == 6


def test_auto_stops_looking_where_that_changes_nothing_and_begins_again_when_it_would_have():
    target, own = (
        ToyVocabulary([b"a", b"b", b"aa"]),
        ToyVocabulary([b"b", b"a"], [b"<begin>", b"<end>"], bos=2, eos=3),
    )
    model = draft_of(always(own, b"a", b"b"), target=target, vocabulary=own)
    tokens = [1, 1]
    looked = []
    for token in (0, 1) * 6:
        before = len(model._session.passes)
        assert run(model, tokens)[0].argmax() == token
        looked.append(len(model._session.passes) - before > 1)
        tokens.append(token)
        model.trim(len(tokens) - 1)
    assert looked[0]
    assert not any(looked[-4:])
    run(model, tokens)
    tokens.append(2)  # where the draft said a, unlooked, the target wrote aa
    run(model, tokens)
    assert model._quiet[own.texts.index(b"a")] == 1  # forgotten, and looked at again


def test_the_drafts_end_proposes_the_targets():
    def logits(prefix):
        row = np.zeros(DRAFT.n_vocab, np.float32)
        row[DRAFT.eos] = 5.0
        return row

    row = run(draft_of(logits), (0, 1))[0]
    assert row.argmax() == END
    assert row[END] == 5.0


# --- what is read

# Characters of two bytes, cut in the middle by the target; control tokens; spaces; one the draft has not.
MANY = ToyVocabulary(
    [b"a", b" a", b" ", b"b", b"\xc3", b"\xa9", b"\xc3\xa9", b"ab", b" ab b", b"z"],
    [b"<x>", b"<end>", b"<y>"],
    eos=11,
)
OWN = ToyVocabulary(
    [b"\xa9", b"\xc3", b"\xc3\xa9", b" ", b"a", b"b", b"ba", b"  ", b"<", b"x", b"y", b">", b"z"],
    [b"<begin>", b"<end>", b"<x>"],
    bos=13,
    eos=14,
)
MAP = map_vocabularies(MANY, OWN)
ids_of_many = st.lists(st.integers(0, MANY.n_vocab - 1), max_size=40)


def fresh(ids):
    translation = Translation(MANY, OWN, MAP)
    translation.extend(ids)
    return translation.tokens


@given(ids=ids_of_many)
def test_a_translation_says_the_same(ids):
    assert OWN.said(fresh(ids)) == MANY.said(ids)


@given(steps=st.lists(st.one_of(ids_of_many, st.integers(0, 60)), max_size=12))
def test_a_translation_depends_on_nothing_but_what_was_read(steps):
    translation, ids = Translation(MANY, OWN, MAP), []
    for step in steps:
        if isinstance(step, int):
            translation.truncate(step)
            del ids[step:]
        else:
            translation.extend(step)
            ids += step
        assert translation.n_read == len(ids)
        assert translation.tokens == fresh(ids)


@given(ids=ids_of_many.filter(bool), n=st.integers(0, 50))
def test_a_translation_can_lose_its_beginning(ids, n):
    translation = Translation(MANY, OWN, MAP)
    translation.extend(ids)
    n = min(n, len(translation.tokens))
    dropped = translation.drop_first(n)
    assert translation.n_read == len(ids) - dropped
    assert OWN.said(translation.tokens) == MANY.said(ids[dropped:])
    translation.extend([3, 2])
    assert translation.tokens == fresh([*ids[dropped:], 3, 2])


def test_words_are_tokenized_as_the_draft_would():
    """b and a are two tokens of the target, and one word of the draft's."""
    assert fresh([3, 0]) == [6]
    assert fresh([3, 1]) == [5, 3, 4]  # a word begins with its space
    assert fresh([4]) == [1]
    assert fresh([4, 5]) == [2]  # half a character, and the whole
    assert fresh([0] * 15 + [4, 5])[-1] == 2  # a word is cut when it is long, but no character


@settings(max_examples=150, deadline=None)
@given(data=st.data(), n_quiet=st.sampled_from([0, 10**6]))
def test_bookkeeping(data, n_quiet):
    """Whatever is read, cut back or left out: each row is that of a model that only reads this."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(translated_model, "_QUIET", n_quiet)
        _bookkeeping(data)


def _bookkeeping(data):
    n_ctx = data.draw(st.sampled_from([24, 40, 400]), label="n_ctx")
    logits = cache(random_logits(5, OWN.n_vocab))
    session = session_of(OWN, logits, n_ctx=n_ctx, n_logits_max=4)
    model = TranslatedModel(session, MANY, MAP)
    tokens = [0, 1]
    model.begin()
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        more = data.draw(st.lists(st.integers(0, MANY.n_vocab - 1), min_size=1, max_size=5), label="more")
        tokens += more
        action = data.draw(st.sampled_from(["run", "run", "read", "skip", "make_room"]), label="action")
        if action == "skip":
            model.skip(len(tokens), data.draw(st.integers(1, 6), label="recent"))
        elif action == "make_room":
            model.make_room(len(tokens) + 2)
        elif action == "read":
            model.read(tokens)
            assert model.n_unread(len(tokens)) == 1
        n_past = model.n_past
        assert model.n_unread(len(tokens)) == len(tokens) - model._offset - n_past
        if action == "run":
            rows = run(model, tokens)
            assert rows.shape == (1, MANY.n_vocab)
            assert np.isfinite(rows.max())
            assert not np.isnan(rows).any()
            read = tokens[model._offset :]
            if n_ctx == 400:
                assert OWN.said(session.tokens[1:]).startswith(MANY.said(read))
            again = TranslatedModel(session_of(OWN, logits), MANY, MAP)
            np.testing.assert_array_equal(rows, run(again, read))
            assert model.n_unread(len(tokens)) == 0
        assert session.tokens[: len(model._cache)] == model._cache
        assert len(session.tokens) <= n_ctx
        keep = data.draw(st.integers(max(2, len(tokens) - 4), len(tokens)), label="keep")
        del tokens[keep:]
        model.trim(len(tokens) - 1)
        assert model.n_unread(len(tokens)) >= 1


def test_a_pass_that_was_broken_off_leaves_no_trace():
    logits = random_logits(7, OWN.n_vocab)
    session = session_of(OWN, logits)
    model = TranslatedModel(session, MANY, MAP)
    run(model, [0, 1, 3])
    evaluate, session.eval = session.eval, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, [0, 1, 3, 0, 9])
    session.eval = evaluate
    model.trim(4)
    row = run(model, [0, 1, 3, 0, 9])
    again = TranslatedModel(session_of(OWN, logits), MANY, MAP)
    np.testing.assert_array_equal(row, run(again, [0, 1, 3, 0, 9]))


# --- models in files


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    """A draft for the tiny target with other words, in another order, that begins with its BOS."""
    texts = {65: "Ġb", 66: "@@", 258: "B", 259: "Ġif", 270: "A"}
    path = tmp_path_factory.mktemp("other") / "draft.gguf"
    return write_tiny_gguf(path, seed=2, n_layer=1, n_embd=32, n_ff=64, n_head=2, texts=texts, add_bos=True)


@pytest.mark.parametrize("drafter", ["model", "staged", "auto"])
def test_an_engine_drafts_in_another_vocabulary(tiny_path, other_path, drafter):
    messages = []
    with Engine(tiny_path, other_path, n_threads=1, on_message=messages.append) as engine:
        (line,) = [line for line in messages if "vocabulary" in line]
        assert "tokens are the same" in line
        plain = engine.generate("abc", params=GREEDY, n_predict=120, gamma=0)
        drafted = engine.generate("abc", params=GREEDY, n_predict=120, gamma=3, drafter=drafter)
        assert drafted.token_ids == plain.token_ids
        if drafter == "model":
            assert drafted.stats.n_accepted > 0
        # The draft's context is smaller than this text: it reads the end of it.
        long = [engine.generate("x" * 450, params=GREEDY, n_predict=40, gamma=n, chat=False) for n in (0, 3)]
        assert long[0].token_ids == long[1].token_ids
