"""The whole engine over tiny random models: the loop, its caches, its stops, its determinism."""

from __future__ import annotations

import itertools
import math
import threading
import time
from array import array
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec._core import SuffixStore
from edgespec.apps.energy.meter import EnergyMeter, EnergySource
from edgespec.decoding.constraint import Constraint
from edgespec.decoding.generate import Generation, logprobs_of
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import Policy
from edgespec.drafting.profile import N_MAX, CostCurve, PassCosts, guessed_curve
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.cache_types import with_cache_type
from edgespec.llama.gguf_header import read_header
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from reference import filtered_probs
from tiny_gguf import write_tiny_gguf
from toy_paces import pace_of, with_gamma
from toy_sessions import ToySession
from toy_tasks import task_of

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PROMPT = list(range(40, 60))


@pytest.fixture
def sessions(tiny_target, tiny_draft):
    with (
        Session(tiny_target, n_ctx=256, n_threads=1) as target,
        Session(tiny_draft, n_ctx=256, n_threads=1) as draft,
    ):
        yield target, draft


@pytest.fixture
def engine(tiny_path, tiny_draft_path):
    with Engine(tiny_path, tiny_draft_path, n_threads=1) as engine:
        yield engine


MODEL = Policy(suffix=False, model=True, staged=False)
AUTO = Policy()


def chain_of(session, *, gamma=4, policy=MODEL, is_eog=lambda token: False, on_step=None):
    """A drafter over `session`'s model with `gamma` tokens a step."""
    target, draft = (PassCosts(guessed_curve(size, own_kernels=True)) for size in (4_000_000, 1_000_000))
    chosen = pace_of(with_gamma(policy, gamma), (target, draft))
    model = DraftModel(session, n_vocab=session.model.n_vocab) if session else None
    suffix = SuffixStore(4096)
    return TreeDrafter(
        chosen, suffix=suffix, model=model, is_eog=is_eog, clocks=(target, draft), on_step=on_step
    )


def tokens_of(target, draft, params, *, seed=1, n_predict=40, rule="block", prompt=PROMPT, **drafting):
    drafter = chain_of(draft, **drafting) if draft else None
    run = Generation(target, drafter, prompt, task_of(params, seed, rule=rule, n_predict=n_predict))
    events = list(run.events())
    return run.tokens[len(prompt) :], events[1:]


def test_a_generation_asks_for_passes_of_the_target_alone(sessions):
    """Also where a model drafts. After the prompt a pass has its tokens packed as the library takes them."""
    target, draft = sessions
    run = Generation(target, chain_of(draft), PROMPT, task_of(WARM, 1, n_predict=12))
    asked = []
    while part := run.ask():
        asked.append(part)
        run.process(part.run())
    assert {part.session for part in asked} == {target}
    assert all(isinstance(part.tokens, array) and part.tokens.typecode == "i" for part in asked)
    assert any(one.parents for one in asked)


def greedy_by_hand(session, n_predict):
    """Plain decoding without the loop: one token, one evaluation."""
    session.clear()
    row = session.eval(PROMPT)[0]
    tokens = []
    while len(tokens) < n_predict:
        tokens.append(int(row.argmax()))
        if session.model.is_eog(tokens[-1]):
            break
        row = session.eval(tokens[-1:])[0]
    return tokens


@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("gamma", [1, 2, 5, 16])
def test_greedy_speculation_is_greedy_decoding(sessions, gamma, rule):
    target, draft = sessions
    want = greedy_by_hand(target, 60)
    assert tokens_of(target, None, GREEDY, n_predict=60)[0] == want
    got, steps = tokens_of(target, draft, GREEDY, gamma=gamma, n_predict=60, rule=rule)
    assert got == want
    assert sum(len(step.tokens) for step in steps) == len(got) - 1


@pytest.mark.parametrize("params", [GREEDY, WARM, SamplingParams()], ids=["greedy", "warm", "default"])
def test_the_target_as_its_own_draft_accepts_everything(tiny_target, params):
    with Session(tiny_target, n_ctx=256, n_threads=1) as a, Session(tiny_target, n_ctx=256, n_threads=1) as b:
        _, steps = tokens_of(a, b, params, gamma=4, n_predict=101)
        drafted = sum(step.n_drafted for step in steps)
        accepted = sum(step.n_accepted for step in steps)
    assert drafted > 50
    assert accepted == drafted


def test_same_seed_same_text(sessions):
    target, draft = sessions
    first = tokens_of(target, draft, WARM, seed=7)[0]
    assert tokens_of(target, draft, WARM, seed=7)[0] == first
    assert tokens_of(target, draft, WARM, seed=8)[0] != first


def test_the_text_of_a_seed_is_plain_decodings_with_every_filter(sessions):
    """By the match rule, though DRY reads what was drafted and XTC tosses coins."""
    target, draft = sessions
    dry = {"dry_multiplier": 0.8, "dry_allowed_length": 0, "presence_penalty": -4.0}  # which repeats much
    params = replace(WARM, top_k=4, xtc_probability=0.5, dynatemp_range=0.9, dynatemp_exponent=6.0, **dry)
    plain = partial(tokens_of, target, None, rule="match", seed=3)
    text, _ = plain(params)
    for policy in (MODEL, AUTO):
        got, steps = tokens_of(target, draft, params, rule="match", seed=3, policy=policy)
        assert got == text
        assert sum(step.n_drafted for step in steps) > 10
    for off in ({"xtc_probability": 0.0}, {"dry_multiplier": 0.0}, {"dynatemp_range": 0.0}):
        assert plain(replace(params, **off))[0] != text, off


@pytest.mark.parametrize(
    ("cache_type", "params", "gamma", "policy"), [("f16", GREEDY, 15, AUTO), ("q8_0", WARM, 3, MODEL)]
)
def test_drafts_change_nothing_after_a_long_text(kernels, tmp_path, cache_type, params, gamma, policy):
    """Passes of one token and of many are cut in other pieces there, and have the same bits."""
    n_prompt, sizes = 8192, {"n_ctx": 8448, "n_threads": 2}
    source = write_tiny_gguf(tmp_path / "f32.gguf", n_embd=256, n_ff=512, n_head_kv=1, n_ctx=8448)
    quantize(source, tmp_path / "q4_0.gguf", "q4_0")
    header = with_cache_type(read_header(tmp_path / "q4_0.gguf"), cache_type)
    draft_path = write_tiny_gguf(tmp_path / "draft.gguf", seed=2, n_layer=1, n_ctx=8448)
    prompt = np.random.default_rng(6).integers(0, 256, n_prompt).tolist()
    with (
        Model(header.path, header=header) as model,
        Model(draft_path) as draft_model,
        Session(model, **sizes) as target,
        Session(draft_model, **sizes) as draft,
    ):
        assert model.uses_kernels
        same = partial(tokens_of, target, params=params, rule="match", prompt=prompt, n_predict=60)
        text, _ = same(draft=None)
        got, steps = same(draft=draft, gamma=gamma, policy=policy)
        assert got == text
        assert sum(step.n_accepted for step in steps) > 10
        rows = []
        for size in (60, 1, 2, 7, 16):
            target.rewind(n_prompt)
            parts = [text[i : i + size] for i in range(0, len(text), size)]
            rows.append(np.concatenate([target.eval(part, n_logits=len(part)).copy() for part in parts]))
            np.testing.assert_array_equal(rows[-1], rows[0], f"{size=}")


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_emitted_tokens_follow_the_targets_distribution(sessions, rule):
    """Second emitted token, marginal: chi-square of speculative against the target's exact probabilities."""
    target, draft = sessions
    params = SamplingParams(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    target.clear()
    first = filtered_probs(target.eval(PROMPT)[0].copy(), params)
    want = np.zeros(target.model.n_vocab)
    for token in np.flatnonzero(first):
        target.rewind(len(PROMPT))
        want += first[token] * filtered_probs(target.eval([int(token)])[0].copy(), params)
    n = 1500
    drafter = chain_of(draft, gamma=2)
    counts = np.zeros_like(want)
    n_accepted = 0
    for seed in range(n):
        run = Generation(target, drafter, PROMPT, task_of(params, seed, rule=rule, n_predict=4))
        for event in run.events():
            n_accepted += getattr(event, "n_accepted", 0)
        counts[run.tokens[len(PROMPT) + 1]] += 1
    assert n_accepted > 50, "nothing was accepted: the test would prove little"
    seen = want * n > 5
    assert counts[~seen].sum() <= 5 * np.sqrt(max(1.0, want[~seen].sum() * n)) + 10
    statistic = ((counts[seen] - want[seen] * n) ** 2 / (want[seen] * n)).sum()
    k = seen.sum()
    assert statistic < k + 5 * np.sqrt(2 * k)


def test_caches_after_a_run_are_as_if_rejected_tokens_had_never_been(sessions):
    target, draft = sessions
    got, steps = tokens_of(target, draft, WARM, gamma=5, n_predict=50)
    assert any(step.n_accepted < step.n_drafted for step in steps)
    assert target.n_past == len(PROMPT) + len(got) - 1
    for session in (target, draft):
        kept = session.n_past
        after = session.eval([got[-1]])[0].copy()
        with Session(session.model, n_ctx=256, n_threads=1) as fresh:
            timeline = [*PROMPT, *got]
            for token in timeline[:kept]:
                fresh.eval([token], n_logits=0)
            np.testing.assert_allclose(after, fresh.eval([got[-1]])[0], atol=1e-4)


def test_the_draft_reads_no_token_twice(sessions, monkeypatch):
    target, draft = sessions
    widths = []
    real = KVCache.forward

    def spy(self, parts):
        if self is draft.cache:
            widths.extend(len(part.tokens) for part in parts)
        return real(self, parts)

    monkeypatch.setattr(KVCache, "forward", spy)
    _, steps = tokens_of(target, draft, WARM, gamma=3, n_predict=60, prompt=PROMPT * 2)
    assert widths[0] == 2 * len(PROMPT)  # the prompt and the first token but for the pending one
    assert set(widths[1:]) <= {1, 2}
    # Each step reads its pending tokens and all drafted ones but the last.
    full = sum(step.n_accepted == step.n_drafted for step in steps[:-1])
    assert sum(widths[1:]) == sum(step.n_drafted for step in steps if step.n_drafted) + full


def test_a_draft_context_that_fills_up_slides(tiny_target, tiny_draft):
    with (
        Session(tiny_target, n_ctx=512, n_threads=1) as target,
        Session(tiny_draft, n_ctx=64, n_threads=1) as draft,
    ):
        prompt = [(7 * i) % 250 for i in range(150)]
        want, _ = tokens_of(target, None, GREEDY, n_predict=120, prompt=prompt)
        got, steps = tokens_of(target, draft, GREEDY, gamma=4, n_predict=120, prompt=prompt)
    assert got == want
    assert sum(step.n_drafted for step in steps) > 100


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
@pytest.mark.parametrize("n_predict", [1, 2, 3, 17])
def test_exactly_n_predict_tokens(sessions, gamma, n_predict):
    target, draft = sessions
    got, _ = tokens_of(
        target,
        draft if gamma else None,
        WARM,
        n_predict=n_predict,
        seed=3,
        **({"gamma": gamma} if gamma else {}),
    )
    assert len(got) == n_predict


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_the_contexts_end(tiny_target, tiny_draft, gamma):
    """Where a generation ends must not depend on what was accepted."""
    with (
        Session(tiny_target, n_ctx=32, n_threads=1) as target,
        Session(tiny_draft, n_ctx=32, n_threads=1) as draft,
    ):
        for seed in range(25):
            drafter = chain_of(draft, gamma=gamma) if gamma else None
            run = Generation(target, drafter, PROMPT, task_of(WARM, seed))
            list(run.events())
            assert len(run.tokens) == 32
            assert run.stop_reason == "context"


@pytest.mark.parametrize(("n_ctx", "gamma"), [(64, 32), (64, 31), (8, 4), (8, 3), (2, 1)])
def test_a_gamma_as_large_as_the_drafts_context(tiny_target, tiny_draft, n_ctx, gamma):
    with (
        Session(tiny_target, n_ctx=256, n_threads=1) as target,
        Session(tiny_draft, n_ctx=n_ctx, n_threads=1) as draft,
    ):
        want, _ = tokens_of(target, None, GREEDY, n_predict=60)
        assert tokens_of(target, draft, GREEDY, gamma=gamma, n_predict=60)[0] == want


def test_tokens_the_draft_does_not_have(tiny_path, tmp_path):
    """A fine-tuned target with added tokens, in the prompt and in what it writes."""
    long = write_tiny_gguf(tmp_path / "target.gguf", seed=1, n_padding=8)
    with Engine(long, tiny_path) as engine, Engine(long, drafter="none") as plain:
        beyond = engine.target.n_vocab - 1
        assert beyond >= engine.draft.n_vocab
        prompt = [*PROMPT, beyond, *PROMPT]
        pushed = SamplingParams(temperature=0.0, logit_bias={beyond: 14.0}, repeat_penalty=3.0)
        want = plain.generate(prompt, params=pushed, n_predict=40)
        got = engine.generate(prompt, params=pushed, n_predict=40, drafter="model", gamma=3)
        assert got.token_ids == want.token_ids
        assert beyond in got.token_ids
        assert got.stats.n_drafted > 0


def test_nothing_follows_an_end_of_generation_token_inside_a_draft(sessions, monkeypatch):
    target, _ = sessions
    plain, _ = tokens_of(target, None, GREEDY, n_predict=30)
    end = plain[9]
    cut = plain.index(end)
    monkeypatch.setattr(type(target.model), "is_eog", lambda self, token: token == end)
    with Session(target.model, n_ctx=256, n_threads=1) as same:
        drafter = chain_of(same, gamma=6, is_eog=lambda token: token == end)
        run = Generation(target, drafter, PROMPT, task_of(GREEDY, 1, n_predict=30))
        steps = [*run.events()][1:]
    assert run.tokens[len(PROMPT) :] == plain[: cut + 1]
    assert run.stop_reason == "eog"
    assert steps[-1].tokens[-1] == end
    assert steps[-1].origins[-1] in ("accepted", "resampled", "bonus")


def test_leaving_the_loop_early_leaves_clean_caches(sessions):
    target, draft = sessions
    run = Generation(target, chain_of(draft), PROMPT, task_of(WARM, 1, n_predict=50))
    events = run.events()
    for _ in range(5):
        next(events)
    events.close()
    assert target.n_past == len(run.tokens) - 1
    assert run.stop_reason == "interrupted"


def test_an_interrupted_pass_leaves_the_tokens_so_far(sessions, monkeypatch):
    target, draft = sessions
    run = Generation(target, chain_of(draft), PROMPT, task_of(WARM, 1, n_predict=50))
    events = run.events()
    for _ in range(4):
        next(events)
    so_far = list(run.tokens)

    def interrupted(self, parts):
        raise KeyboardInterrupt

    monkeypatch.setattr(KVCache, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert run.tokens == so_far
    assert target.n_past == len(so_far) - 1


# ---- Engine ----


def test_tokens_know_whether_they_were_drafted(engine):
    stream = engine.stream("abc def", params=WARM, seed=3, n_predict=40, gamma=3)
    tokens = list(stream)
    result = stream.result
    assert [t.id for t in tokens] == list(result.token_ids)
    assert "".join(t.text for t in tokens) == result.text
    assert tokens[0].origin == "target"
    assert sum(t.from_draft for t in tokens) <= result.stats.n_accepted
    assert {t.origin for t in tokens} <= {"target", "accepted", "resampled", "bonus"}
    assert result.draft is not None
    assert result.stats.tau > 1


def test_a_stop_string_ends_the_text_before_it(engine):
    whole = engine.generate("abc", params=GREEDY, n_predict=40, chat=False)
    text = whole.text
    assert len(text) > 10
    stop = text[6:9]
    result = engine.generate("abc", params=GREEDY, n_predict=40, stop=[stop], chat=False)
    assert result.text == text[: text.index(stop)]
    assert result.stop_reason == "stop"
    assert len(result.token_ids) < len(whole.token_ids)


def test_generations_follow_one_another(engine):
    first = engine.generate("abc", params=GREEDY, n_predict=20)
    stream = engine.stream("something else entirely", n_predict=200)
    next(stream)
    again = engine.generate("abc", params=GREEDY, n_predict=20)  # ends the stream before it
    with pytest.raises(EdgespecError, match="ended before it was complete"):
        list(stream)
    assert again.text == first.text


def test_plain_decoding_loads_no_draft(tiny_path):
    with Engine(tiny_path, "/no/such/draft.gguf", drafter="none") as engine:
        result = engine.generate("ab", n_predict=5)
        assert result.draft is None
        assert result.stats.alpha is None


def test_a_model_that_cannot_rewind_decodes_plainly(tiny_path, tiny_draft_path, monkeypatch):
    from edgespec.llama.weights import Model

    real = Model.__init__

    def cannot_rewind(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.can_rewind = False

    monkeypatch.setattr(Model, "__init__", cannot_rewind)
    lines = []
    with Engine(tiny_path, tiny_draft_path, on_message=lines.append) as engine:
        result = engine.generate("ab", n_predict=10)
    assert len(lines) == 1
    assert "decoding plainly" in lines[0]
    assert result.stats.n_drafted == 0
    assert len(result.token_ids) <= 10


def test_the_drafts_context_is_no_larger_than_needed(tiny_path, tiny_draft_path):
    with Engine(tiny_path, tiny_draft_path, n_ctx=512) as engine:
        engine.generate("abc", n_predict=20)
        assert engine._pair.sequences(1).n_ctx == 512
        assert engine._pair.begin_draft(1, 1, 1).n_ctx == 256


def test_no_limit_depends_only_on_the_request(engine):
    """An engine that has served a longer prompt before gives the same text."""
    first = engine.generate(PROMPT, params=WARM, seed=1, n_predict=None)
    engine.generate(PROMPT * 8, params=WARM, n_predict=300)
    assert engine.generate(PROMPT, params=WARM, seed=1, n_predict=None).token_ids == first.token_ids


def test_interrupting_a_stream_keeps_its_result(engine):
    stream = engine.stream("abc", params=WARM, n_predict=100, seed=1)
    for _ in range(10):
        next(stream)
    stream.close()
    assert stream.result.stop_reason == "interrupted"
    assert len(stream.result.token_ids) == 10
    assert stream.result.stats.steps > 0


def test_forbidding_every_token_is_one_line(engine):
    nothing = SamplingParams(logit_bias=dict.fromkeys(range(engine.target.n_vocab), -np.inf))
    with pytest.raises(EdgespecError, match="logit bias forbids every token"):
        engine.generate("abc", params=nothing)
    assert engine.generate("abc", params=GREEDY, n_predict=3).text  # the engine is still good


def test_logits_of_the_draft_that_are_no_numbers_are_the_drafts(tiny_path, tmp_path):
    draft = write_tiny_gguf(tmp_path / "no-numbers.gguf", peak=5e38)
    lines: list[str] = []
    with Engine(tiny_path, draft, n_threads=1, on_message=lines.append) as engine:
        drafted = engine.generate("abc", n_predict=8, params=GREEDY, gamma=2)
        assert drafted.text == engine.generate("abc", n_predict=8, params=GREEDY, drafter="none").text
    (line,) = [line for line in lines if "no-numbers.gguf" in line]
    assert "the model file may be damaged" in line


class Spending:
    """A Matcher that allows everything, and takes its time."""

    def __init__(self, clock):
        self.clock = clock

    def mask(self, out):
        self.clock.now += 0.5
        out[0] = 0xFF

    def consume(self, token):
        self.clock.now += 0.5

    def rollback(self, n):
        self.clock.now += 0.5


def test_the_curves_learn_what_passes_take_and_nothing_else(clock, monkeypatch):
    """Not what the grammar and the logprobs of the emitted tokens take: the profile would keep that."""
    spent = []

    def slow_logprobs(*arguments):
        spent.append(arguments)
        clock.now += 0.5
        return logprobs_of(*arguments)

    monkeypatch.setattr("edgespec.decoding.generate.logprobs_of", slow_logprobs)

    def logits(prefix):
        row = np.zeros(8, np.float32)
        row[len(prefix) % 7] = 5.0
        return row

    curves = tuple(PassCosts(CostCurve(((one,) * N_MAX, (one,) * N_MAX), read=one)) for one in (0.02, 0.005))
    target = ToySession(logits, 8, clock=clock, cost=lambda n: 0.02)
    draft = ToySession(logits, 8, clock=clock, cost=lambda n: 0.005)
    scheduler = pace_of(MODEL, curves)
    constraint = Constraint(lambda: Spending(clock), 8, is_eog=lambda _: False)
    model = DraftModel(draft, n_vocab=8)
    drafter = TreeDrafter(
        scheduler, suffix=None, model=model, is_eog=lambda _: False, clocks=curves, constraint=constraint
    )
    task = task_of(GREEDY, rule="match", n_predict=60, n_logprobs=2, constraint=constraint)
    run = Generation(target, drafter, PROMPT, task)
    steps = [*run.events()][1:]
    assert len(spent) == 60  # a token each
    assert sum(step.n_accepted for step in steps) > 30
    for curve, one in zip(curves, (0.02, 0.005), strict=True):
        assert curve.n_observed > 2
        assert curve.at(0)[1:] == pytest.approx([one] * N_MAX)


def test_forbidden_tokens_never_come(engine):
    plain = engine.generate("abc", params=GREEDY, n_predict=30)
    banned = set(plain.token_ids[:5])
    params = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(banned, -np.inf))
    assert not banned & set(engine.generate("abc", params=params, n_predict=60).token_ids)


def test_a_prompt_longer_than_the_context_is_refused(tiny_path, tiny_draft_path):
    with (
        Engine(tiny_path, tiny_draft_path, n_ctx=16) as engine,
        pytest.raises(EdgespecError, match="does not fit"),
    ):
        engine.generate("a" * 50)


def test_a_closed_engine_says_so(tiny_path):
    engine = Engine(tiny_path, drafter="none")
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.generate("abc")


# ---- what may draft ----


def total(result):
    """Tokens drafted and accepted, over all sources."""
    return tuple(map(sum, zip(*result.sources.values(), strict=True))) if result.sources else (0, 0)


@pytest.mark.parametrize(
    ("drafter", "sources"),
    [("auto", {"suffix", "model"}), ("model", {"model"}), ("suffix", {"suffix"}), ("staged", {"model"})],
)
def test_a_drafter_for_one_generation(engine, drafter, sources):
    plain = engine.generate("abc abc", params=GREEDY, n_predict=60, drafter="none")
    assert (plain.sources, plain.draft, plain.stats.n_drafted) == ({}, None, 0)
    result = engine.generate("abc abc", params=GREEDY, n_predict=60, drafter=drafter, gamma=3)
    assert result.token_ids == plain.token_ids
    assert set(result.sources) <= sources
    assert total(result) == (result.stats.n_drafted, result.stats.n_accepted)
    assert result.stats.n_drafted > 0
    assert (result.draft is None) == (drafter == "suffix")


def test_on_step_is_told_of_every_step(engine):
    steps = []
    result = engine.generate("abc", params=WARM, n_predict=40, gamma=3, on_step=steps.append)
    assert len(steps) == result.stats.steps
    assert sum(len(step.proposed) for step in steps) == result.stats.n_drafted
    assert sum(step.n_accepted for step in steps) == result.stats.n_accepted
    assert sum(step.n_emitted for step in steps) == len(result.token_ids) - 1 + (result.stop_reason == "eog")
    assert all(step.rate > 0 and step.verify_s > 0 for step in steps)
    engine.generate("abc", n_predict=5, drafter="none", on_step=steps.append)
    assert len(steps) == result.stats.steps


def test_with_a_seed_the_text_is_plain_decodings_own(engine):
    for seed in range(5):
        plain = engine.generate("abc", params=WARM, seed=seed, n_predict=40, drafter="none")
        for options in ({}, {"gamma": 5}, {"drafter": "suffix"}, {"drafter": "staged", "gamma": 4}):
            result = engine.generate("abc", params=WARM, seed=seed, n_predict=40, **options)
            assert (result.token_ids, result.seed) == (plain.token_ids, seed)


def test_a_seed_of_its_own_is_none_where_the_clock_has_a_say(engine):
    assert engine.generate("abc", params=WARM, n_predict=10).seed is None
    assert engine.generate("abc", params=WARM, n_predict=10, rule="chain", seed=1).seed is None
    assert engine.generate("abc", params=WARM, n_predict=10, gamma=3).seed is None  # tables choose the source
    found = engine.generate("abc", params=WARM, n_predict=30, rule="match")
    again = engine.generate("abc", params=WARM, n_predict=30, seed=found.seed)
    assert again.token_ids == found.token_ids


def test_what_was_said_before_is_copied_from_the_store(engine):
    """The same request twice in one engine: the second answer is offered whole by the suffix store."""
    options = {"params": GREEDY, "n_predict": 40, "drafter": "suffix", "gamma": 4}
    first, second = (engine.generate("abc", **options) for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.stats.tau > 4


def test_the_note_is_one_sentence(engine):
    for options in ({}, {"gamma": 2}, {"drafter": "suffix"}, {"drafter": "model"}):
        note = engine.generate("abc", n_predict=20, **options).note
        assert "draft" in note or "lately" in note
        assert "\n" not in note
    for options in ({"drafter": "none"}, {"gamma": 0}):
        assert engine.generate("abc", n_predict=20, **options).note == "", "none was asked for"


@pytest.mark.parametrize("drafter", ["auto", "staged"])
@pytest.mark.parametrize("gamma", [16, 32])
def test_long_drafts_beside_much_unread(engine, drafter, gamma):
    """A pass over all that is unread and all guesses may be longer than any that is timed."""
    prompt = [1, 2, 3, 4, 5, 6] * 4
    options = {"params": GREEDY, "n_predict": 80}
    plain = engine.generate(prompt, drafter="none", **options)
    result = engine.generate(prompt, drafter=drafter, gamma=gamma, **options)
    assert result.token_ids == plain.token_ids
    assert result.stats.n_drafted > 0


def test_a_context_that_cannot_be_made_leaves_the_engine_usable(tiny_path, tiny_draft_path, monkeypatch):
    with Engine(tiny_path, tiny_draft_path) as engine:
        want = engine.generate("abc", params=GREEDY, n_predict=20).token_ids
        opened = engine._pair._cache

        def full(*_):
            raise EdgespecError("not enough memory")

        monkeypatch.setattr(engine._pair, "_cache", full)
        with pytest.raises(EdgespecError, match="not enough memory"):
            engine.generate("abc", n_predict=1500)
        monkeypatch.setattr(engine._pair, "_cache", opened)
        assert engine.generate("abc", params=GREEDY, n_predict=20).token_ids == want


def test_a_draft_model_alone_that_cannot_rewind(tiny_path, tiny_draft_path, monkeypatch):
    from edgespec.llama.weights import Model

    real = Model.__init__

    def cannot_rewind(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.can_rewind = self.path != tiny_draft_path

    monkeypatch.setattr(Model, "__init__", cannot_rewind)
    lines = []
    with Engine(tiny_path, tiny_draft_path, on_message=lines.append) as engine:
        assert len(lines) == 1
        assert "it does not draft" in lines[0]
        result = engine.generate("abc abc abc", params=GREEDY, n_predict=40, drafter="suffix", gamma=3)
        assert result.stats.n_drafted > 0
        assert engine.generate("abc", n_predict=5, drafter="model").stats.n_drafted == 0


def test_a_result_keeps_its_own_note(engine):
    stream = engine.stream("abc", n_predict=20)
    list(stream)
    before = stream.result.note
    engine.generate("abc", n_predict=20, gamma=3)
    assert stream.result.note == before
    assert "()" not in engine.generate("abc", n_predict=1).note


# ---- energy ----


class Counter:
    """A source that counts one joule at each reading: so a window's joules are its readings."""

    name = "a counter"
    domains = ("package-0",)
    counted = (True,)
    counts = True
    estimated = False
    interval_s = math.inf

    def __init__(self):
        self.n_read = 0

    def read(self):
        self.n_read += 1
        return (1e6 * self.n_read,)

    def joules(self, seconds, before, after):
        return tuple((b - a) / 1e6 for a, b in zip(before, after, strict=True))


class FiveWatts(EnergySource):
    """A source of power, which a thread reads while a window is open."""

    name = "a power"
    domains = ("all",)
    counted = (True,)
    interval_s = 0.05  # a busy machine leaves no gap then

    def read(self):
        return (5.0,)


@pytest.fixture
def counting(engine, monkeypatch):
    """An engine whose meter counts readings; a slow moment of the machine adds none."""
    monkeypatch.setattr("edgespec.decoding.generate._WORTH_A_MARK_S", math.inf)
    with EnergyMeter(Counter(), clock=itertools.count().__next__, threaded=False) as meter:
        engine.meter = meter
        yield engine


def marks_of(target, draft, **options):
    marks = []
    drafter = chain_of(draft, gamma=2) if draft else None
    run = Generation(target, drafter, PROMPT, task_of(GREEDY, n_predict=12, **options))
    run.mark = marks.append
    steps = [*run.events()][1:]
    return marks, steps


@pytest.mark.parametrize("worth_a_mark_s", [math.inf, 0.0])
def test_marks_of_drafting(sessions, monkeypatch, worth_a_mark_s):
    """A step that drafts nothing, as the last one, is worth two marks, or four where deciding took long."""
    monkeypatch.setattr("edgespec.decoding.generate._WORTH_A_MARK_S", worth_a_mark_s)
    marks, steps = marks_of(*sessions)
    drafted_marks = ["rest", "draft", "verify", "rest", "draft"]
    of_step = {True: drafted_marks, False: drafted_marks if worth_a_mark_s == 0 else ["rest", "verify"]}
    drafted = [step.n_drafted > 0 for step in steps]
    assert True in drafted and False in drafted
    assert marks == [
        "rest",
        "prefill",
        "rest",
        "draft",
        *(mark for step in drafted for mark in of_step[step]),
    ]


def test_marks_of_plain_decoding(sessions):
    marks, steps = marks_of(sessions[0], None)
    assert len(steps) == 11
    assert marks == ["rest", "prefill", *["rest", "verify"] * 11]


def test_every_joule_is_of_one_phase(counting):
    """The last reading is that of the end, after the last mark."""
    result = counting.generate("abc", params=GREEDY, n_predict=30, drafter="model", gamma=3)
    n_steps = result.stats.steps
    assert result.stats.n_drafted > 0
    assert result.energy.source == "a counter"
    assert result.energy.phases == {
        "prefill": 1.0,
        "draft": 1.0 + 2 * n_steps,
        "verify": n_steps,
        "rest": 3 + 2 * n_steps,
    }
    assert result.energy.joules == sum(result.energy.phases.values()) == 5 + 5 * n_steps
    assert result.energy.domains == {"package-0": result.energy.joules}


def test_each_generation_has_a_window_of_its_own(counting):
    options = {"params": GREEDY, "n_predict": 10, "drafter": "none"}
    first = counting.generate("abc", **options)
    second = counting.generate("abc", **options)
    assert first.energy.joules == second.energy.joules == 3 + 2 * 9
    counting.meter = None
    assert counting.generate("abc", **options).energy is None


def test_energy_is_known_when_the_stream_has_ended(counting):
    stream = counting.stream("abc", n_predict=10)
    next(stream)
    assert stream.result.energy is None
    stream.close()
    energy = stream.result.energy
    assert energy.joules == 3, "the rest before, the prompt, and what came until the end"
    stream.close()
    assert stream.result.energy is energy


def reading_threads():
    """Those of a meter with an open window; one that was just told to stop has a moment for it."""
    for _ in range(6000):
        found = [thread for thread in threading.enumerate() if thread.name == "edgespec-energy"]
        if not found:
            return 0
        time.sleep(0.005)
    return len(found)


@pytest.mark.parametrize("n_asked", [0, 1, 5])
def test_a_stream_that_is_given_up_ends_its_window(engine, n_asked):
    with EnergyMeter(FiveWatts()) as meter:
        engine.meter = meter
        stream = engine.stream("abc", n_predict=50)
        for _ in range(n_asked):
            next(stream)
        assert [thread.name for thread in threading.enumerate()].count("edgespec-energy") == 1
        stream.close()
        assert reading_threads() == 0
        assert stream.result.energy.joules == pytest.approx(5.0 * stream.result.energy.seconds)
        assert list(stream) == []


def test_the_next_stream_and_closing_end_a_window_too(engine):
    with EnergyMeter(FiveWatts()) as meter:
        engine.meter = meter
        first = engine.stream("abc", n_predict=50)
        second = engine.stream("abc", n_predict=50)
        assert first.result.energy.joules is not None
        assert second.result.energy is None
        engine.forget()
        assert second.result.energy.joules is not None
        third = engine.stream("abc", n_predict=50)
        next(third)
        engine.close()
        assert third.result.energy.joules is not None
        assert reading_threads() == 0


def test_an_error_in_mid_stream_ends_its_window(engine):
    with EnergyMeter(FiveWatts()) as meter:
        engine.meter = meter
        everything = dict.fromkeys(range(engine.target.n_vocab), float("-inf"))
        stream = engine.stream("abc", params=SamplingParams(logit_bias=everything))
        with pytest.raises(EdgespecError):
            next(stream)
        assert stream.result.energy is not None
        assert reading_threads() == 0


def test_values_that_are_refused_leave_no_window_open(engine):
    with EnergyMeter(FiveWatts()) as meter:
        engine.meter = meter
        with pytest.raises(UsageError):
            engine.stream("abc", params=SamplingParams(logit_bias={123456789: 1.0}))
        assert reading_threads() == 0
