"""bench/never_slower.py: its arithmetic on made-up runs, and how it asks an engine."""

import re

import pytest

import never_slower
from asking import Bench, at_plains_length, compared
from edgespec import Engine, SamplingParams
from edgespec.apps.bench.runs import PLAIN_VARIANT, Run, parse_variants
from edgespec.apps.bench.suites import OVERALL, Prompt
from edgespec.platform.files import cache_root
from never_slower import deep_run, fixed, report_second, second_run
from prompts import Limits
from ratios import Ratios, plain_speed


def run(name, total_s, *, turn=0, category="copy", prompt="1", tokens=101, once_s=1.0, text="same"):
    return Run(
        *(prompt, category, name, turn),
        prompt_tokens=10,
        tokens=tokens,
        total_s=total_s,
        ttft_s=once_s / 2,
        prefill_s=None,
        draft_prefill_s=once_s / 2,
        text_sha256=text,
    )


def test_times_are_taken_to_plains_length():
    plain = run("plain", 11.0)
    longer, shorter = run("auto", 6.0, tokens=201), run("model-3", 3.5, tokens=51)
    same, *converted = at_plains_length([plain, longer, shorter])
    assert same == plain
    assert [one.tokens for one in converted] == [101, 101]
    # What is spent once, and half or twice of the rest.
    assert [one.total_s for one in converted] == pytest.approx([1.0 + 2.5, 1.0 + 5.0])
    # Each at plain's length, also where plain is not compared.
    assert Ratios([plain, *converted]).ratio("auto", "model-3") == pytest.approx(6.0 / 3.5)


def test_short_answers():
    plain = run("plain", 2.0, tokens=1)
    alike = at_plains_length([plain, run("auto", 1.0, tokens=1)])
    assert Ratios(alike).ratio("auto") == 2.0  # equal: nothing to convert
    for lengths in ((1, 2), (101, 7), (7, 101)):
        found = at_plains_length([run("plain", 2.0, tokens=lengths[0]), run("auto", 1.0, tokens=lengths[1])])
        assert [one.tokens for one in found] == [lengths[0], 0]
        assert Ratios(found).ratio("auto") is None


@pytest.fixture
def ratios():
    """Two categories; "copy" has two prompts, one slow round, and the plain variant is not constant."""
    runs = []
    for turn, drift in enumerate((1.0, 2.0, 1.0)):
        for prompt, auto_s in (("1", 2.0), ("2", 8.0)):
            runs += [
                run("plain", 8.0 * drift, turn=turn, prompt=prompt),
                run("auto", auto_s * drift, turn=turn, prompt=prompt),
                run("model-3", 4.0 * drift, turn=turn, prompt=prompt),
                run("suffix-8", 8.0 if turn == 1 else 2.0, turn=turn, prompt=prompt),
            ]
        for name, seconds in (("plain", 4.0), ("auto", 4.2), ("model-3", 5.0), ("suffix-8", 4.4)):
            text = "other" if name == "model-3" and turn == 0 else "same"
            runs.append(run(name, seconds, turn=turn, category="poem", prompt="3", text=text))
    return Ratios(runs)


def test_ratios(ratios):
    assert ratios.categories == ["copy", "poem"]
    assert fixed(ratios) == ["plain", "model-3", "suffix-8"]
    assert ratios.ratio("auto", "plain", "copy") == pytest.approx(2.0)  # of 4 and 1
    assert ratios.ratio("auto", "plain", "poem") == pytest.approx(4.0 / 4.2)
    assert ratios.ratio("auto") == pytest.approx((2.0 * 4.0 / 4.2) ** 0.5)
    assert ratios.ratio("auto", "model-3", "copy") == pytest.approx(1.0)
    assert ratios.ratio("suffix-8", "plain", "copy") == pytest.approx(4.0)  # the median round
    assert plain_speed(ratios, "poem") == 101 / 4.0
    found = ratios.beside("model-3")
    assert (found.n_identical, found.n_compared) == (8, 9)


@pytest.fixture
def engine(tiny_path, tiny_draft_path):
    with Engine(tiny_path, tiny_draft_path, n_threads=1) as opened:
        yield opened


def bench_of(engine, limits=None, *, seeded=False):
    return Bench(engine, limits or {}, n_predict=24, cold=False, seeded=seeded)


@pytest.fixture
def asked(engine, monkeypatch):
    """What the engine was told, in order: "forget", or a prompt and its options."""
    calls = []
    generate, forget = engine.generate, engine.forget

    def noted(text, **options):
        calls.append((text, options))
        return generate(text, **options)

    monkeypatch.setattr(engine, "generate", noted)
    monkeypatch.setattr(engine, "forget", lambda **options: (calls.append("forget"), forget(**options)))
    return calls


def test_compare_is_interleaved_and_forgets(engine, asked):
    prompts = [Prompt("1", "a", "the cat and the hat"), Prompt("2", "b", "another thing")]
    variants = [PLAIN_VARIANT, *parse_variants("auto,model-3,suffix-4,staged-2")]
    bench = bench_of(engine, {"2": Limits(n_predict=10)})
    bench.warm_up(prompts, variants)
    runs = compared({variant.name: (bench, variant) for variant in variants}, prompts, 2, 0.0)
    assert asked[0] == "forget"
    requests = [call for call in asked if call != "forget"]
    drafters = [options["drafter"] for _, options in requests]
    assert drafters[:10] == [
        *("none", "auto", "model", "suffix", "staged"),
        *("auto", "model", "suffix", "staged", "none"),
    ]
    between = [asked[i - 1] == "forget" for i, call in enumerate(asked) if call != "forget"]
    assert all(between), "no way copies from another"
    assert [options["n_predict"] for _, options in requests][:10] == [24] * 5 + [10] * 5
    assert all(options["params"] == SamplingParams(temperature=0.0) for _, options in requests)
    assert [options["seed"] for _, options in requests] == [0] * 10 + [1] * 10
    ratios = Ratios(runs)
    assert ratios.variants == ["plain", "auto", "model-3", "suffix-4", "staged-2"]
    same = ratios.summaries[OVERALL].comparisons
    assert [(found.n_identical, found.n_compared) for found in same] == [(4, 4)] * 4
    assert all(0 < one.ttft_s + one.draft_prefill_s <= one.total_s for one in runs)
    assert all(bench.notes[prompt.id] for prompt in prompts)


def test_only_auto_teaches_auto(engine):
    """What the other variants on the same prompt would tell of it is undone."""
    bench = bench_of(engine)
    prompt = Prompt("1", "a", "the cat and the hat")
    before = engine._knowledge._acceptance["greedy"].as_json()
    for variant in (*parse_variants("model-3,suffix-4,staged-2"), PLAIN_VARIANT):
        bench.ask(prompt, variant, 0, 0.0)
    assert engine._knowledge._acceptance["greedy"].as_json() == before
    bench.ask(prompt, *parse_variants("auto"), 0, 0.0)
    assert engine._knowledge._acceptance["greedy"].as_json() != before


def test_second_run(tiny_path, tiny_draft_path, capsys, monkeypatch, tmp_path):
    """The history is that of the first request, and nothing of it is left afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []

    def open_engine():
        seen.append(sum(file.stat().st_size for file in cache_root().glob("history/texts.db")))
        return Engine(tiny_path, tiny_draft_path, n_threads=1, history=True)

    families = {"family": ("the first", "the second")}
    runs = second_run(bench_of, open_engine, families, 1, 0.0)
    plain, unseen, first, second = seen
    assert plain == unseen == first == 0
    assert second > 0
    assert not list(cache_root().glob("history/texts.db"))
    assert [one.variant for one in runs] == ["plain", "unseen", "seen"]
    report_second(Ratios(runs))
    assert re.search(r"^family( +\d+\.\d\d){4} +-$", capsys.readouterr().out, re.M)


def test_depths(tiny_path, tiny_draft_path, monkeypatch, capsys):
    """Sources are read once for a depth, by whichever variant comes first; then only a prompt's own end."""
    monkeypatch.setattr("prompts._FILES", "")
    monkeypatch.setattr("prompts._NOW", "")
    args = never_slower.arguments(["--depth", "0,300", "--temp", "0", "--rounds", "2", "--variants", "auto"])
    assert (args.suite, args.category, args.per_category) == (["default"], list(never_slower.DEEP), 1)
    prompts = [Prompt("1", "copy", "the cat and the hat"), Prompt("2", "chat", "another thing")]
    n_read = []
    with Engine(tiny_path, tiny_draft_path, n_threads=1, prefix_cache=0) as engine:
        generate = engine.generate

        def noted(*arguments, **options):
            result = generate(*arguments, **options)
            n_read.append(result.prompt_tokens - result.n_cached)
            return result

        monkeypatch.setattr(engine, "generate", noted)
        variants = [PLAIN_VARIANT, *parse_variants("auto")]
        runs = deep_run(bench_of(engine), engine, variants, prompts, args)
        n_prompts = [len(engine.prompt_tokens(prompt.text)) for prompt in prompts]
    assert list(runs) == [(0, 0.0), (300, 0.0)]
    assert all(one.prompt_tokens >= 300 for one in runs[300, 0.0])
    shallow, deep = n_read[:8], n_read[8:]
    assert len(deep) == 8
    assert max(deep) <= max(n_prompts), "the sources were not read again"
    assert min(shallow) > 0
    assert len(set(deep)) <= 2, "no variant found more in the cache than another"
    bench = bench_of(engine)
    never_slower.report_runs(args, bench, prompts, (300, 0.0), runs[300, 0.0], in_use="ours")
    printed = capsys.readouterr().out
    assert "after 300 tokens, temperature 0, 2 prompts" in printed
    assert "plain at a depth of 300" in printed
