"""The cascade: over toy models whose confidence is known, and over tiny real ones."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec import Engine, SamplingParams
from edgespec.decoding.options import WakePolicy
from edgespec.decoding.sampling import Coins
from edgespec.engine.cascade import Cascade, SmallModel, signal_of
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.session import Session
from tiny_gguf import write_tiny_gguf
from toy_sessions import ToySession
from toy_tasks import task_of

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PROMPT = [1, 2, 3]
N_VOCAB = 8
EOG = 7

# ---- signals ----


def probabilities(row):
    weights = np.exp(np.asarray(row, np.float64) - np.max(row))
    return weights / weights.sum()


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40))
def test_signals_are_those_of_the_softmax(logits):
    row = np.array(logits, np.float32)
    p = np.sort(probabilities(row))[::-1]
    assert signal_of(row, "margin") == pytest.approx(p[0] - p[1], abs=1e-5)
    assert signal_of(row, "entropy") == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), abs=1e-4)


def test_signals_of_tokens_that_are_none():
    row = np.array([0.0, -math.inf, 0.0, -math.inf], np.float32)
    assert signal_of(row, "margin") == 0.0
    assert signal_of(row, "entropy") == pytest.approx(math.log(2))
    alone = np.array([-math.inf, 3.0], np.float32)
    assert (signal_of(alone, "margin"), signal_of(alone, "entropy")) == (1.0, 0.0)


@pytest.mark.parametrize("signal", ["margin", "entropy"])
def test_the_ends_of_a_threshold(signal):
    never, always = {"margin": (0.0, 1.0), "entropy": (math.inf, 0.0)}[signal]
    rows = [np.zeros(5, np.float32), np.array([50, 0, 0], np.float32), np.array([1, 0, 0], np.float32)]
    for row in rows:
        assert not WakePolicy(signal, never).wakes(signal_of(row, signal))
        assert WakePolicy(signal, always).wakes(signal_of(row, signal))


# ---- toy models ----


def row_of(token, margin):
    """Logits whose likeliest token is so far ahead of the others, all alike; EOG only if asked for."""
    p = np.full(N_VOCAB, (1.0 - margin) / (N_VOCAB - 1))
    p[EOG] = 0.0
    p[token] += margin
    return np.log(np.maximum(p, 1e-30)).astype(np.float32)


def small_row(margins):
    """The small model counts up; its margin is that of the position, else 0.9."""
    return lambda prefix: row_of((prefix[-1] + 1) % 6, margins.get(len(prefix), 0.9))


def target_row(prefix):
    """The target counts down, from what it sees."""
    return row_of((prefix[-1] - 1) % 6, 0.9)


def cascade_of(
    margins=(),
    *,
    threshold=0.5,
    span=2,
    params=GREEDY,
    small=None,
    target=target_row,
    small_ctx=1 << 20,
    prompt=PROMPT,
    seed=0,
    **options,
):
    big = ToySession(target, N_VOCAB, is_eog=lambda token: token == EOG)
    little = ToySession(small or small_row(dict(margins)), N_VOCAB, n_ctx=small_ctx)
    run = Cascade(
        big,
        SmallModel(little, n_vocab=N_VOCAB),
        prompt,
        task_of(
            params,
            seed,
            rule="match",
            cascade=WakePolicy("margin", threshold, span),
            n_predict=options.pop("n_predict", 10),
        ),
        **options,
    )
    return run, big, little


def written(run):
    """The emitted tokens and who wrote them: s (small) or T."""
    tokens, who = [], ""
    for event in run.events():
        tokens += event.tokens
        who += "".join("s" if origin == "alone" else "T" for origin in event.origins)
    return tokens, who


def test_the_target_is_woken_exactly_where_the_small_model_is_unsure():
    run, target, small = cascade_of({5: 0.4, 6: 0.1, 9: 0.51, 11: 0.5})
    tokens, who = written(run)
    # Positions 3 .. 12; at 5 it is unsure, and the target's span covers 6; at 11 it is unsure again.
    assert who == "ssTTssssTT"
    assert tokens == [4, 5, 4, 3, 4, 5, 0, 1, 0, 5]
    assert run.tokens == [*PROMPT, *tokens]
    assert (run.n_woken, run.stop_reason) == (2, "length")
    assert run.n_read == 5 + 5, "the prompt and two tokens, then the four written meanwhile and its own last"
    assert target.passes == [5, 1, 5, 1], "each token is read once"
    assert target.tokens == run.tokens[:-1]
    assert small.tokens == run.tokens[: len(small.tokens)], "nothing but what was emitted"


def test_rest_goes_on_to_the_end():
    run, target, _ = cascade_of({5: 0.4}, span="rest")
    assert written(run)[1] == "ssTTTTTTTT"
    assert run.n_woken == 1
    assert target.passes == [5, *[1] * 7]


@pytest.mark.parametrize("span", [1, 3, "rest"])
@pytest.mark.parametrize(
    "params", [GREEDY, WARM, SamplingParams(repeat_penalty=1.3, temperature=0.7)], ids=str
)
def test_the_ends_are_the_two_models_alone(span, params):
    margins = dict(zip(range(3, 40), itertools.cycle((0.0, 0.3, 0.99)), strict=False))
    alone, target, _ = cascade_of(margins, threshold=0.0, span=span, params=params, n_predict=30)
    text, who = written(alone)
    assert who == "s" * 30
    assert target.passes == [], "the target did nothing"
    assert text == plainly(small_row(margins), params, 30)
    whole, _, _ = cascade_of(margins, threshold=1.0, span=span, params=params, n_predict=30)
    text, who = written(whole)
    assert who == "T" * 30
    assert text == plainly(target_row, params, 30)


def plainly(model, params, n, seed=0):
    """Plain decoding with one coin a token."""
    sampler, coins, tokens = params.sampler(N_VOCAB, 0), Coins(seed), [*PROMPT]
    for _ in range(n):
        recent = np.asarray(tokens if params.looks_back else [], np.int32)
        tokens.append(sampler.sample(model(tuple(tokens)), recent, coins.draw(1)[0], -1))
    return tokens[len(PROMPT) :]


def test_a_seed_gives_one_text():
    def text(seed):
        run, _, _ = cascade_of(
            dict(zip(range(3, 60), itertools.cycle((0.2, 0.6, 0.7)), strict=False)),
            params=WARM,
            seed=seed,
            n_predict=40,
        )
        return written(run)

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert {*text(3)[1]} == {"s", "T"}


def test_an_end_of_generation_token_ends_it_whoever_writes_it():
    def small(prefix):
        return row_of(EOG if len(prefix) == 6 else 1, 0.9)

    run, _, _ = cascade_of(small=small)
    assert written(run) == ([1, 1, 1, EOG], "ssss")
    assert run.stop_reason == "eog"

    def target(prefix):
        return row_of(EOG if len(prefix) == 6 else 1, 0.9)

    run, _, _ = cascade_of({5: 0.0}, target=target, span=5)
    assert written(run) == ([4, 5, 1, EOG], "ssTT")
    assert run.stop_reason == "eog"


def test_a_prompt_may_end_like_an_answer():
    run, _, _ = cascade_of(prompt=[1, EOG], n_predict=3)
    assert len(written(run)[0]) == 3


def test_the_context_is_full():
    for margins in ({}, {5: 0.0}):
        run, target, _ = cascade_of(margins, n_predict=None, n_ctx=12, span=4)
        assert len(written(run)[0]) == 9
        assert run.stop_reason == "context"
        assert target.n_past < 12


def test_a_span_ends_with_the_limit():
    run, _, _ = cascade_of({5: 0.0}, span=100, n_predict=4)
    assert written(run) == ([4, 5, 4, 3], "ssTT")
    assert run.stop_reason == "length"


def test_where_the_small_model_would_forget_the_prompt_the_target_goes_on():
    run, _, small = cascade_of(small_ctx=8, n_predict=12)
    assert written(run)[1] == "sssssTTTTTTT"
    assert small.n_past <= 8
    run, _, small = cascade_of(small_ctx=2, n_predict=4)
    assert written(run)[1] == "TTTT", "it cannot read the prompt"
    assert small.passes == []


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("who", ["small", "target"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interruption_leaves_emitted_tokens_in_the_caches(who, at):
    run, target, small = cascade_of({5: 0.0, 9: 0.0}, span=3)
    session = {"small": small, "target": target}[who]
    real, left = session.eval, iter(range(100))

    def failing(tokens, **options):
        if next(left) == at:
            raise InterruptionError
        return real(tokens, **options)

    session.eval = failing
    with pytest.raises(InterruptionError):
        written(run)
    assert run.stop_reason == "interrupted"
    for one in (target, small):
        assert one.tokens == run.tokens[: one.n_past]
        assert one.n_past < len(run.tokens)


def test_a_reader_that_goes_away_leaves_emitted_tokens_in_the_caches():
    for n in range(1, 14):
        run, target, small = cascade_of({5: 0.0, 9: 0.0}, span=3)
        events = run.events()
        for _ in itertools.islice(events, n):
            pass
        events.close()
        for one in (target, small):
            assert one.tokens == run.tokens[: one.n_past]
            assert one.n_past < len(run.tokens)


def test_logits_that_are_no_numbers():
    run, _, _ = cascade_of(small=lambda prefix: np.full(N_VOCAB, np.nan, np.float32))
    with pytest.raises(EdgespecError, match="may be damaged"):
        written(run)


# ---- the engine ----


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A pair that is not so certain of what follows."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = (
        write_tiny_gguf(folder / f"{name}.gguf", seed=seed, peak=0.7, chat_template=None)
        for seed, name in enumerate(("target", "draft"))
    )
    with Engine(target, draft, n_threads=1, kernels="off", profile=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_alone(engine):
    with Engine(engine.draft.path, n_threads=1, drafter="none", kernels="off", profile=False) as alone:
        yield alone


SAMPLED = SamplingParams(temperature=0.9, top_k=20, repeat_penalty=1.2, penalty_last_n=32)
OPTIONS = {"params": SAMPLED, "seed": 5, "n_predict": 60}
NEVER, ALWAYS = WakePolicy(threshold=0.0), WakePolicy(threshold=1.0)


@pytest.fixture(scope="module")
def between(engine):
    """A margin that the small model is now and then below."""
    prompt = engine.prompt_tokens("abc abc")
    with Session(engine.draft, n_ctx=256, n_threads=1) as session:
        rows = session.eval([*prompt, *range(40, 80)], n_logits=40)
        return float(np.quantile([signal_of(row, "margin") for row in rows], 0.2))


def test_never_woken_is_the_small_model_alone(engine, small_alone):
    result = engine.generate("abc abc", cascade=NEVER, **OPTIONS)
    assert result.token_ids == small_alone.generate("abc abc", **OPTIONS).token_ids
    assert (result.mode, result.exact, result.target_share) == ("cascade", False, 0.0)
    assert result.stats.prefill_s == 0.0
    assert result.stats.prompt_tokens_per_s is None, "the target read nothing"
    assert result.note.startswith("the small model wrote alone")
    assert result.draft == engine.draft_name


@pytest.mark.parametrize("drafter", ["auto", "model", "none"])
@pytest.mark.parametrize("span", [1, 7, "rest"])
def test_always_woken_is_the_target_alone(engine, drafter, span):
    exact = engine.generate("abc abc", drafter="none", **OPTIONS)
    assert (exact.mode, exact.exact, exact.target_share) == ("exact", True, 1.0)
    always = WakePolicy(threshold=1.0, span=span)
    result = engine.generate("abc abc", cascade=always, drafter=drafter, **OPTIONS)
    assert result.token_ids == exact.token_ids
    assert (result.exact, result.target_share) == (False, 1.0)


@pytest.mark.parametrize("span", [5, "rest"])
def test_drafting_in_a_span_changes_no_text(engine, between, span):
    wake_policy = WakePolicy(threshold=between, span=span)
    texts = [
        engine.generate("abc abc", cascade=wake_policy, **options, **OPTIONS)
        for options in (
            {"drafter": "none"},
            {"drafter": "model", "gamma": 3},
            {"drafter": "auto"},
            {"gamma": 0},
        )
    ]
    assert len({result.token_ids for result in texts}) == 1
    assert len({result.target_share for result in texts}) == 1
    assert 0.0 < texts[0].target_share < 1.0
    assert texts[1].stats.n_drafted > 0
    assert {result.seed for result in texts} == {5}


def test_what_a_cascade_tells(engine, between):
    stream = engine.stream("abc abc", cascade=WakePolicy(threshold=between, span=4), **OPTIONS)
    tokens = list(stream)
    result = stream.result
    n_alone = sum(token.origin == "alone" for token in tokens)
    assert result.target_share == pytest.approx(1 - n_alone / len(tokens))
    assert "".join(token.text for token in tokens) == result.text
    assert stream.tokens[result.prompt_tokens :] == list(result.token_ids)
    assert "the target was woken" in result.note
    assert "tokens then" in result.note
    stats = result.stats
    assert stats.prefill_s > 0 and stats.prompt_tokens_per_s > 0
    parts = stats.prefill_s + stats.draft_prefill_s + stats.draft_s + stats.verify_s + stats.rest_s
    assert 0 < parts <= stats.total_s
    assert sum(steps for _, _, steps in stats.histogram) == stats.steps


def test_a_stop_string_ends_a_cascade(engine):
    whole = engine.generate("abc abc", cascade=NEVER, **OPTIONS).text
    stop = whole[20:23]
    result = engine.generate("abc abc", cascade=NEVER, stop=[stop], **OPTIONS)
    assert result.stop_reason == "stop"
    assert result.text == whole[: whole.index(stop)]


def test_exact_generations_and_cascades_in_turns(engine, between):
    """Neither leaves anything in the other's caches."""
    wake_policy = WakePolicy(threshold=between, span=3)
    first = [
        engine.generate("abc", cascade=wake_policy, **OPTIONS).token_ids,
        engine.generate("abc", **OPTIONS).token_ids,
    ]
    stream = engine.stream("xyz", cascade=wake_policy, **OPTIONS)
    for _ in itertools.islice(stream, 9):
        pass
    stream.close()
    again = [
        engine.generate("abc", cascade=wake_policy, **OPTIONS).token_ids,
        engine.generate("abc", **OPTIONS).token_ids,
    ]
    assert first == again


def test_a_cascade_needs_what_it_needs(engine, small_alone, tmp_path):
    with pytest.raises(UsageError, match="needs a draft model"):
        small_alone.generate("abc", cascade=NEVER)
    with pytest.raises(UsageError, match="run `edgespec calibrate`"):
        engine.generate("abc", cascade=WakePolicy())
    with pytest.raises(UsageError, match=r"span rest; run `edgespec calibrate`"):
        engine.generate("abc", cascade=WakePolicy(span="rest"))


# ---- lenient acceptance ----


def test_lenience_at_temperature_0(engine):
    """The prompt has the answer's tokens, but goes on otherwise after each: that is drafted, and is wrong."""
    options = {"params": GREEDY, "n_predict": 40, "drafter": "suffix", "gamma": 3}
    prompt = engine.prompt_tokens("abc abc")
    answer = engine.generate(prompt, **{**options, "drafter": "none"}).token_ids
    misleading = [token for one in answer for token in (one, 60, 61, 62)] + prompt
    exact, one, lenient = (
        (engine.forget(), engine.generate(misleading, lenience=lenience, **options))[1]
        for lenience in (1.0, 1.0, 1e-9)
    )
    assert exact.stats.n_drafted > 0
    assert exact.stats.n_accepted < exact.stats.steps
    assert (one.token_ids, one.mode, one.exact) == (exact.token_ids, "exact", True)
    assert (lenient.mode, lenient.exact, lenient.target_share) == ("lenient", False, 1.0)
    assert lenient.seed is None, "the text hangs on what was drafted"
    assert lenient.stats.alpha > 0.9 > exact.stats.alpha
    assert lenient.token_ids != exact.token_ids


# ---- the real pair ----


@pytest.mark.pair
def test_the_real_pair(pair):
    prompt, options = "Write a quicksort in Python.", {"params": GREEDY, "n_predict": 24, "seed": 1}
    with Engine(*pair) as engine, Engine(pair[1], drafter="none") as small:
        exact = engine.generate(prompt, drafter="none", **options)
        assert engine.generate(prompt, cascade=ALWAYS, **options).token_ids == exact.token_ids
        never = engine.generate(prompt, cascade=NEVER, **options)
        assert never.token_ids == small.generate(prompt, **options).token_ids
        shares = [
            engine.generate(prompt, cascade=WakePolicy(threshold=threshold), **options).target_share
            for threshold in (0.1, 0.9)
        ]
        assert 0.0 <= shares[0] < shares[1] <= 1.0
