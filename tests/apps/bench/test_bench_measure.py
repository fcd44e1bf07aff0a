"""A pair on a suite, in turns: on tiny models, with the engine that users have."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec import Engine
from edgespec.apps.bench import measure as bench
from edgespec.apps.bench.measure import BenchControl, BenchSettings, fitting, generate, measure, turns
from edgespec.apps.bench.runs import PLAIN, PLAIN_VARIANT, Run, Variant, parse_variants
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.energy.meter import EnergyMeter
from edgespec.decoding.options import WakePolicy
from edgespec.errors import EdgespecError, UsageError
from tiny_gguf import write_tiny_gguf

VARIANTS = parse_variants("auto,model-3,suffix-4,staged-2")
PROMPTS = [
    Prompt("a", "letters", "abc abc abc"),
    Prompt("b", "letters", "the thing and the"),
    Prompt("c", "figures", "1 2 3 4"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A pair that is not so certain of what follows: the prompt and the seed have a say."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = (
        write_tiny_gguf(folder / f"{name}.gguf", seed=seed, peak=0.7, chat_template=None)
        for seed, name in enumerate(("target", "draft"))
    )
    with Engine(target, draft, n_threads=1, kernels="off", profile=False) as engine:
        yield engine


def measured(
    engine: Engine, settings: BenchSettings, *, prompts: Any = PROMPTS, peers: Any = None, **options: Any
) -> tuple[list[Run], str]:
    """The runs of a benchmark, and why it ended; `options`: of BenchControl."""
    runs: list[Run] = []
    limits = {"budget_s": 600.0, "precision": 0.03, "rounds": None}
    control = BenchControl(**{"on_run": runs.append} | limits | options)
    return runs, measure(engine, prompts, settings, control, peers if peers is not None else [])


# ---- what is asked for ----


def test_variants_as_users_name_them() -> None:
    assert parse_variants(" auto, model-16 ,suffix,,staged-1") == (
        Variant("auto", "auto"),
        Variant("model-16", "model", 16),
        Variant("suffix", "suffix"),
        Variant("staged-1", "staged", 1),
    )
    assert [variant.needs_model for variant in VARIANTS] == [False, True, False, True]


def test_a_variant_of_a_users_own_drafter(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    methods = ("begin(self, tokens)", "draft(self, tokens, room, sample)", "accept(self, tokens, n_accepted)")
    file.write_text("class Mine:\n" + "".join(f"    def {method}: return []\n" for method in methods))
    (_, own) = parse_variants(f"auto,{file}:Mine")
    assert own.name == f"{file}:Mine"
    assert str(own.chosen) == "Mine"
    assert not own.needs_model and own.exact
    with pytest.raises(UsageError, match="has no class 'Yours'; it has Mine"):
        parse_variants(f"{file}:Yours")


def test_variants_that_are_not_exact() -> None:
    variants = parse_variants(
        "cascade,cascade@0.4,cascade-entropy@1.25,cascade-rest@0,cascade-entropy-8@2,lenience-0.5"
    )
    assert [variant.cascade for variant in variants[:-1]] == [
        WakePolicy(),
        WakePolicy("margin", 0.4),
        WakePolicy("entropy", 1.25),
        WakePolicy("margin", 0.0, span="rest"),
        WakePolicy("entropy", 2.0, span=8),
    ]
    assert variants[-1].lenience == 0.5
    assert not any(variant.exact for variant in variants)
    assert [variant.needs_model for variant in variants] == [True] * 5 + [False]
    assert all(variant.exact for variant in VARIANTS)


# ---- one run ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_variant_gives_plain_decodings_text(engine: Engine, temperature: float) -> None:
    settings = BenchSettings(VARIANTS, 48, temperature, seed=3)
    for prompt in PROMPTS:
        runs = list(turns(engine, settings, prompt, 0, 0))
        assert [run.variant for run in runs] == [PLAIN, *(variant.name for variant in VARIANTS)]
        assert len({run.text_sha256 for run in runs}) == 1
        assert len({(run.tokens, run.prompt_tokens, run.stop_reason) for run in runs}) == 1
    others = {generate(engine, prompt, PLAIN_VARIANT, settings).text_sha256 for prompt in PROMPTS}
    assert len(others) == len(PROMPTS), "one hash for all texts would prove nothing"


def test_what_a_run_tells(engine: Engine) -> None:
    settings = BenchSettings(VARIANTS, 30)
    run = generate(engine, PROMPTS[0], Variant("model-3", "model", 3), settings, round_=4)
    assert (run.prompt, run.category, run.variant, run.round) == ("a", "letters", "model-3", 4)
    assert run.prompt_tokens == len(engine.prompt_tokens(PROMPTS[0].text))
    assert (run.tokens, run.stop_reason) == (30, "length")
    assert run.n_emitted == 29, "the first token is the prompt's pass's"
    assert run.histogram
    assert sum((accepted + 1) * steps for _, accepted, steps in run.histogram) == 29
    assert max(drafted for drafted, _, _ in run.histogram) == 3
    parts = (run.prefill_s, run.draft_prefill_s, run.draft_s, run.verify_s, run.rest_s)
    assert 0 < sum(part or 0.0 for part in parts) <= run.total_s
    assert run.ttft_s and run.prefill_s and run.prefill_s <= run.ttft_s < run.total_s
    assert run.energy is None, "nothing was to count it"

    plain = generate(engine, PROMPTS[0], PLAIN_VARIANT, settings)
    assert plain.histogram == ((0, 0, 29),)


def test_what_a_run_that_is_not_exact_tells(engine: Engine) -> None:
    settings = BenchSettings(parse_variants("cascade@0,cascade@1,cascade@0.1,lenience-0.5,auto"), 30)
    plain, never, always, some, lenient, auto = turns(engine, settings, PROMPTS[0], 0, 0)
    assert [run.exact for run in (plain, never, always, some, lenient, auto)] == [True, *[False] * 4, True]
    assert [run.target_share for run in (plain, never, always, lenient)] == [1.0, 0.0, 1.0, 1.0]
    assert 0.0 < some.target_share < 1.0
    assert (plain.agreement, plain.kl, auto.agreement, auto.kl) == (None,) * 4
    assert always.text_sha256 == plain.text_sha256
    assert (always.agreement, always.kl) == (1.0, 0.0), "what the target writes is what it likes best"
    assert never.agreement is not None and never.kl and some.kl
    assert 0.0 < some.kl < never.kl
    assert (lenient.agreement is not None, lenient.kl) == (True, None)

    warm = BenchSettings(parse_variants("cascade@0"), 30, temperature=1.0)
    run = generate(engine, PROMPTS[0], warm.variants[0], warm)
    assert run.agreement is None, "a random token need not be the likeliest"
    assert run.kl


def test_each_round_has_a_seed_of_its_own(engine: Engine) -> None:
    settings = BenchSettings((), 30, temperature=1.0, seed=5)

    def text(settings: BenchSettings, round_: int) -> str | None:
        return generate(engine, PROMPTS[0], PLAIN_VARIANT, settings, round_=round_).text_sha256

    assert text(settings, 0) == text(settings, 0)
    assert text(settings, 0) != text(settings, 1)
    assert text(settings, 1) == text(BenchSettings((), 30, temperature=1.0, seed=6), 0)


def test_no_answer_is_drafted_from_itself(engine: Engine) -> None:
    """The suffix store forgets between runs; without that the second answer is copied from the first."""
    settings = BenchSettings(parse_variants("suffix-4"), 60)
    runs, _ = measured(engine, settings, rounds=3)
    by_prompt: dict[str, set[Any]] = {}
    for run in runs:
        if run.variant == "suffix-4":
            by_prompt.setdefault(run.prompt, set()).add(run.histogram)
    assert [len(histograms) for histograms in by_prompt.values()] == [1, 1, 1]

    once = generate(engine, PROMPTS[0], settings.variants[0], settings)
    options: dict[str, Any] = {"params": settings.params, "n_predict": 60, "drafter": "suffix", "gamma": 4}
    again = engine.generate(PROMPTS[0].text, **options).stats
    assert once.histogram
    assert again.steps < sum(steps for _, _, steps in once.histogram)


def test_joules_are_of_the_run(engine: Engine) -> None:
    settings = BenchSettings(parse_variants("model-3"), 20)
    began = time.monotonic()
    with EnergyMeter.choose(assume_watts=15.0) as meter:
        engine.meter = meter
        try:
            runs, _ = measured(engine, settings, rounds=1)
        finally:
            engine.meter = None
    assert len(runs) == 6
    for run in runs:
        assert run.energy
        assert run.energy.estimated
        assert run.energy.joules == pytest.approx(15.0 * run.energy.seconds)
        assert sum(run.energy.phases.values()) == pytest.approx(run.energy.joules)
    assert sum(run.energy.seconds for run in runs if run.energy) <= time.monotonic() - began


# ---- turns and rounds ----


def batched(runs: list[Run]) -> list[list[Run]]:
    """The runs of each prompt and round."""
    return [list(group) for _, group in itertools.groupby(runs, key=lambda run: (run.round, run.prompt))]


def test_each_variant_goes_first_as_often(engine: Engine) -> None:
    settings = BenchSettings(parse_variants("model-1,suffix-1"), 3)
    runs, _ = measured(engine, settings, rounds=3)
    first = Counter(group[0].variant for group in batched(runs))
    assert first == {"plain": 3, "model-1": 3, "suffix-1": 3}
    assert all({run.variant for run in group} == set(first) for group in batched(runs))


def test_a_benchmark_leaves_no_trace_in_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would foretell the next one's answers: their lengths, and what is accepted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, draft = (write_tiny_gguf(tmp_path / f"{i}.gguf", seed=i, chat_template=None) for i in (0, 1))
    with Engine(target, draft, n_threads=1, kernels="off") as engine:
        measured(engine, BenchSettings(VARIANTS, 8), rounds=1)
    assert not list((tmp_path / "cache").rglob("profiles/*.json"))
    with Engine(target, draft, n_threads=1, kernels="off") as engine:
        engine.generate("abc", n_predict=8)
    assert list((tmp_path / "cache").rglob("profiles/*.json")), "a run does leave one"


# ---- when it ends ----


def test_as_many_rounds_as_asked_for(engine: Engine) -> None:
    settings = BenchSettings(parse_variants("suffix-1"), 3)
    runs, ended = measured(engine, settings, rounds=2, precision=1e9)
    assert (len(runs), ended) == (12, "2 rounds, as asked for")
    assert measured(engine, settings, rounds=1)[1] == "1 round, as asked for"


def test_a_tight_interval_ends_it_after_three_rounds(engine: Engine) -> None:
    runs, ended = measured(engine, BenchSettings(parse_variants("suffix-1"), 3), precision=1e9, rounds=9)
    assert len(runs) == 18
    assert ended.startswith("3 rounds; the interval over them is tight (")


def test_the_budget_ends_it_between_prompts(engine: Engine) -> None:
    settings = BenchSettings(parse_variants("suffix-1,model-1"), 3)
    runs, ended = measured(engine, settings, budget_s=1e-6)
    assert [(run.round, run.prompt) for run in runs] == [(0, "a")] * 3, (
        "one prompt is always answered in full"
    )
    assert ended == "0 rounds and 1 of 3 prompts of the next; the budget of 1e-06 s was spent"
    runs, ended = measured(engine, settings, budget_s=1e-6, prompts=PROMPTS[:1])
    assert len(runs) == 3
    assert ended.startswith("1 round and 0 of 1 prompts of the next; the budget of 1e-06 s was spent")


def test_a_budget_is_not_overrun(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a prompt takes one second, and so does what lies between two of them."""
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=itertools.count(0.0).__next__))
    runs, ended = measured(engine, BenchSettings(parse_variants("suffix-1"), 3), budget_s=20.0, precision=0)
    assert len(batched(runs)) == 10, "the tenth ends at 20 s"
    assert re.fullmatch(
        r"3 rounds and 1 of 3 prompts of the next; the budget of 20 s was spent, interval [\d.]+%", ended
    )


# ---- prompts that do not fit ----


def test_prompts_that_are_too_long(engine: Engine) -> None:
    n_ctx = engine.target.n_ctx_train
    room = n_ctx - len(engine.prompt_tokens("")) - 20 - 1
    prompts = [Prompt("fits", "x", "b" * room), Prompt("does not", "x", "b" * (room + 1))]
    fit, (line,) = fitting(engine, prompts, 20)
    assert fit == prompts[:1]
    assert line == (
        f"does not is left out: with 20 tokens of answer it needs a context of {n_ctx + 1}, "
        f"and {engine.target_name} was trained for {n_ctx}"
    )
    with pytest.raises(EdgespecError, match="no prompt is left"):
        fitting(engine, prompts[1:], 20)
    run = generate(engine, prompts[0], PLAIN_VARIANT, BenchSettings((), 20))
    assert (run.tokens, run.stop_reason) == (20, "length")
