"""Whole generations on models that keep a state: hybrid and recurrent targets, and draft models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec._core import SuffixStore
from edgespec.apps.energy.meter import EnergyMeter
from edgespec.decoding.generate import Generation
from edgespec.drafting.draft import PlainDraft
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.measure import measure
from edgespec.drafting.pace import Policy
from edgespec.drafting.profile import N_MAX, PassCosts, guessed_curve
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models import footprint
from edgespec.models.footprint import draft_rollback, target_rollback
from reference import filtered_probs
from tiny_states import SOME, STATEFUL, tiny
from toy_paces import pace_of, with_gamma
from toy_tasks import task_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(7 * i * i + 3) % 200 + 5 for i in range(12)] * 2
N_PREDICT = 40


def opened(target: Path, draft: Path | None = None, **options: Any) -> Engine:
    return Engine(target, draft, n_threads=1, profile=False, n_ctx=512, **options)


def plain(path: Path, prompt: Sequence[int], n_predict: int = N_PREDICT) -> tuple[int, ...]:
    with opened(path, drafter="none") as engine:
        return engine.generate(prompt, params=GREEDY, n_predict=n_predict).token_ids


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The passes that are made: the model's name, and tokens."""
    made: list[tuple[str, int]] = []
    real = KVCache.forward

    def noted(self: KVCache, parts: Any) -> Any:
        made.extend((self.model.name, len(part.tokens)) for part in parts)
        return real(self, parts)

    monkeypatch.setattr(KVCache, "forward", noted)
    return made


@pytest.fixture(autouse=True)
def small_states(monkeypatch) -> None:
    """Those of tiny models are large beside their weights; here they count as small, as in most models."""
    monkeypatch.setattr(footprint, "_SNAPSHOTS_SHARE", 100)


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("name", STATEFUL)
def test_greedy_speculation_is_greedy_decoding(name: str, parallel: int, passes: list[Any]) -> None:
    """With snapshots (for one text, where there are any) and by reading again."""
    expected = plain(tiny(name), PROMPT)
    with opened(tiny(name), tiny("mamba2", 2), drafter="auto", parallel=parallel) as engine:
        target = engine.target.name
        for drafter, gamma in (("suffix", 6), ("model", 4), ("chain", 3), ("auto", None)):
            engine.forget(tables=True)
            passes.clear()
            result = engine.generate(PROMPT, params=GREEDY, n_predict=N_PREDICT, drafter=drafter, gamma=gamma)
            assert result.token_ids == expected
            assert gamma is None or result.stats.n_drafted > 10
            verified = [n for model, n in passes[1:] if model == target]
            assert sum(n for model, n in passes if model == target and n >= len(PROMPT)) == len(PROMPT)
            if parallel == 1 and engine.target.header.has_snapshots:
                assert sum(verified) == result.stats.steps + result.stats.n_drafted, "nothing is read again"
            assert max(verified, default=0) <= N_MAX


@pytest.mark.parametrize("name", SOME)
def test_sampled_tokens_follow_the_targets_distribution(name: str) -> None:
    """The third token after the prompt: speculative, against the target's exact probabilities."""
    params = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)
    n, prompt = 300, PROMPT[:8]
    curves = (
        PassCosts(guessed_curve(4_000_000, own_kernels=True)),
        PassCosts(guessed_curve(1_000_000, own_kernels=True)),
    )
    with Model(tiny(name)) as model, Model(tiny("mamba2", 2)) as small:
        size = target_rollback(model.header)
        target = Session(model, n_ctx=64, n_threads=1, rollback=size)
        session = Session(small, n_ctx=64, n_threads=1, rollback=draft_rollback())
        expected = np.zeros(model.n_vocab)
        for chance, text in _likely(target, prompt, params, 2):
            target.clear()
            expected += chance * filtered_probs(target.eval(text)[0].copy(), params)
        policy = Policy(suffix=False, staged=False, rereads=not size.n_snapshots)
        drafter = TreeDrafter(
            pace_of(with_gamma(policy, 2), curves),
            suffix=SuffixStore(1024),
            model=DraftModel(session, n_vocab=small.n_vocab),
            is_eog=lambda token: False,
            clocks=curves,  # type: ignore[arg-type]
        )
        counts, n_accepted = np.zeros_like(expected), 0
        # Of seeds 0 to 299, mamba2's statistic is a chance of 1 in 10,000; of 5,000 others it is none.
        for seed in range(n, 2 * n):
            run = Generation(target, drafter, prompt, task_of(params, seed, rule="block", n_predict=5))
            n_accepted += sum(getattr(event, "n_accepted", 0) for event in run.events())
            counts[run.tokens[len(prompt) + 2]] += 1
    assert n_accepted > 10, "little was accepted: it would prove little"
    seen = expected * n > 5
    assert counts[~seen].sum() <= 5 * np.sqrt(max(1.0, expected[~seen].sum() * n)) + 10
    statistic = ((counts[seen] - expected[seen] * n) ** 2 / (expected[seen] * n)).sum()
    k = seen.sum()
    assert statistic < k + 5 * np.sqrt(2 * k)


def _likely(
    session: Session, text: list[int], params: SamplingParams, n: int
) -> list[tuple[float, list[int]]]:
    """Return the texts that `n` sampled tokens can make of `text`, each with its probability."""
    if n == 0:
        return [(1.0, text)]
    session.clear()
    probs = filtered_probs(session.eval(text)[0].copy(), params)
    return [
        (float(probs[token]) * chance, longer)
        for token in np.flatnonzero(probs)
        for chance, longer in _likely(session, [*text, int(token)], params, n - 1)
    ]


@pytest.mark.parametrize("name", STATEFUL)
def test_several_texts_at_once_are_what_each_is_alone(name: str) -> None:
    prompts = [[*PROMPT[: 5 + 9 * i], *range(20 + i, 60)] * (1 + i % 2) for i in range(4)]
    expected = [plain(tiny(name), prompt) for prompt in prompts]
    options = {"params": GREEDY, "n_predict": N_PREDICT}
    with opened(tiny(name), tiny("mamba2", 2), parallel=3, prefix_cache=1 << 20) as engine:
        for drafter, gamma in (("chain", 3), ("auto", None)):
            streams = [
                engine.stream(prompt, drafter=drafter, gamma=gamma, **options) for prompt in prompts[:3]
            ]
            while not all(stream.finished for stream in streams):
                engine.step()
                for i, stream in enumerate(streams):
                    stream.made()
                    if stream.finished and len(streams) == 3 and i == 0:
                        streams.append(engine.stream(prompts[3], drafter=drafter, gamma=gamma, **options))
            assert [stream.result.token_ids for stream in streams] == expected[: len(streams)]
            assert len(streams) == 4


@pytest.mark.parametrize("name", STATEFUL)
def test_a_conversation_reads_only_what_is_new(name: str) -> None:
    """The cache grows meanwhile; later a prompt parts from the conversation in its middle."""
    path = tiny(name, 2)  # under seed 1 llama.cpp's own AVX2 kernels decide a near-tie by a pass's length
    with Engine(path, n_threads=1, profile=False, drafter="suffix", prefix_cache=0) as engine:
        prompt, known = list(PROMPT), 0
        for turn in range(4):
            result = engine.generate(prompt, params=GREEDY, n_predict=30, gamma=3)
            assert result.token_ids == plain(path, prompt, 30)
            assert result.n_cached >= known
            known = len(prompt) + len(result.token_ids) - 1
            prompt = [*prompt, *result.token_ids, *range(30 + turn, 120)]
        assert known > 300
        shortened = [*prompt[: len(prompt) - 90], *range(60, 100)]
        result = engine.generate(shortened, params=GREEDY, n_predict=30)
        assert result.token_ids == plain(path, shortened, 30)
        assert result.n_cached > len(PROMPT)


@pytest.mark.parametrize("name", SOME)
def test_a_draft_model_that_keeps_a_state_for_a_target_that_does_not(name: str) -> None:
    with opened(tiny("llama"), tiny(name, 2)) as engine:
        expected = engine.generate(PROMPT, params=GREEDY, n_predict=80, drafter="none").token_ids
        result = engine.generate(PROMPT, params=GREEDY, n_predict=80, drafter="model", gamma=4)
        assert result.token_ids == expected
        assert result.stats.n_accepted > 5
        auto = engine.generate(PROMPT, params=GREEDY, n_predict=80)
        assert auto.token_ids == expected


@pytest.mark.parametrize("name", SOME)
def test_a_draft_model_reads_few_tokens_twice(name: str, passes: list[Any]) -> None:
    with opened(tiny("llama"), tiny(name, 2)) as engine:
        assert engine.draft is not None
        draft = engine.draft.name
        result = engine.generate(PROMPT, params=GREEDY, n_predict=80, drafter="model", gamma=4)
        read = sum(n for model, n in passes if model == draft)
        assert result.stats.n_accepted < 0.9 * result.stats.n_drafted
        assert read < len(PROMPT) + 1.2 * (result.stats.n_drafted + result.stats.steps)


@pytest.mark.parametrize("when", [1, 9])
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("parallel", [1, 2])
def test_ctrl_c_leaves_an_engine_that_goes_on(
    name: str, parallel: int, when: int, monkeypatch: pytest.MonkeyPatch, passes: list[Any]
) -> None:
    """In the prefill, or in a step: after the pass, as it is not broken off."""
    expected = plain(tiny(name), PROMPT)
    decode, n_passes = KVCache._decode, 0

    def interrupted(self: KVCache, *arguments: Any) -> None:
        nonlocal n_passes
        decode(self, *arguments)
        n_passes += 1
        if n_passes == when:
            raise KeyboardInterrupt

    options = {"params": GREEDY, "n_predict": N_PREDICT, "gamma": 3}
    with opened(tiny(name), parallel=parallel, drafter="suffix", prefix_cache=0) as engine:
        other = engine.stream(PROMPT[::-1], **options) if parallel > 1 else None
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "_decode", interrupted)
            stream = engine.stream(PROMPT, **options)
            with pytest.raises(KeyboardInterrupt):
                list(stream)
        made = stream.result.token_ids
        assert made == expected[: len(made)]
        passes.clear()
        assert engine.generate(PROMPT, **options).token_ids == expected
        if parallel == 1 and when > 1:
            assert engine.generate([*PROMPT, *expected, 7], **options).n_cached > len(PROMPT)
        if other:
            assert [token.id for token in other] == list(plain(tiny(name), PROMPT[::-1]))


@pytest.mark.parametrize("name", SOME)
def test_the_curves_of_a_pair_that_keeps_states_can_be_measured(name: str) -> None:
    file = tiny("mamba2", 2)
    with Model(tiny(name)) as target, PlainDraft(name, "draft", check_model_file(file)) as draft:
        draft.load(target, kernels=True, n_threads=1)
        meter = EnergyMeter(None, reason="not wanted")
        costs = measure(target, draft, n_threads=1, budget_s=0.5, meter=meter)
    assert costs.draft is not None
    assert all(seconds > 0.0 for curve in (costs.target, costs.draft) for seconds in curve.at(128)[1:])
