"""The benchmarks' own prompts, and the arithmetic of bench/never_slower.py on made-up runs."""

import re
from argparse import ArgumentTypeError
from collections import Counter
from dataclasses import replace

import pytest

import never_slower
import prompts as prompt_sets
from edgespec import Engine, SamplingParams
from edgespec.platform.files import cache_root
from never_slower import Bench, Run, Table, Way, report, report_second, second_run, speedup, verdicts, way
from prompts import Prompt

HURT = {"random words": 4, "poem": 4, "hot": 4, "other style": 4, "long prompt, short answer": 3}


def own_prompts():
    return [prompt for file in prompt_sets.OWN for prompt in prompt_sets.load(file)]


def test_own_sets_have_their_categories():
    counts = Counter(prompt.category for prompt in own_prompts())
    assert counts.pop("copy") >= 12
    assert counts == HURT


def test_no_prompt_twice():
    prompts = own_prompts()
    texts = [prompt.text for prompt in prompts]
    texts += [text for pair in prompt_sets.pairs(prompt_sets.AGAIN).values() for text in pair]
    assert len(set(texts)) == len(texts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_copy_prompts_hold_what_is_copied():
    for prompt in own_prompts():
        if prompt.category == "copy":
            assert 500 <= len(prompt.text) <= 1500, prompt.id
            assert prompt.n_predict == 256
            assert re.search(r"\b(Print|nothing else)\b", prompt.text), prompt.id


def test_long_prompts_are_long_and_varied():
    for prompt in own_prompts():
        if prompt.category == "long prompt, short answer":
            assert prompt.n_predict == 20
            assert len(prompt.text) >= 5000, prompt.id  # 1,950 to 2,050 tokens of Qwen2.5
            lines = [line for line in prompt.text.splitlines() if line]
            assert len(set(lines)) == len(lines)


def test_hot_prompts_have_their_temperature():
    temperatures = {prompt.category: prompt.temperature for prompt in own_prompts()}
    assert temperatures == {name: 1.5 if name == "hot" else None for name in (*HURT, "copy")}


def test_pairs():
    families = prompt_sets.pairs(prompt_sets.AGAIN)
    assert len(families) >= 4
    assert all(first[:20] == second[:20] for first, second in families.values())


def test_load_spreads_over_a_category(tmp_path):
    file = tmp_path / "some.jsonl"
    rows = [f'{{"question_id": {i}, "category": "{"ab"[i % 2]}", "turns": ["t{i}", "x"]}}' for i in range(12)]
    file.write_text("\n".join(rows) + "\n")
    assert [prompt.text for prompt in prompt_sets.load(file, 2)] == ["t0", "t6", "t1", "t7"]
    assert len(prompt_sets.load(file)) == 12


def test_ways():
    assert way("plain") == Way("none")
    assert way("auto") == Way("auto")
    assert way("suffix-16") == Way("suffix", 16)
    assert way("staged") == Way("staged")
    assert [way(name).name for name in ("plain", "auto", "model-3", "suffix")] == [
        *("plain", "auto", "model-3", "suffix")
    ]
    for wrong in ("", "model-", "model-0", "model-x", "auto-3", "none", "plain-2"):
        with pytest.raises(ArgumentTypeError):
            way(wrong)


def run(name, total_s, *, turn=0, category="copy", prompt="1", tokens=101, once_s=1.0, text="same", note=""):
    return Run(turn, 0.0, category, prompt, name, tokens, total_s, once_s, text=text, note=note)


def test_times_are_taken_to_plains_length():
    assert run("auto", 6.0).seconds(101) == 6.0
    assert run("auto", 6.0).seconds(51) == 1.0 + 2.5  # once, and half of the rest
    plain = run("plain", 11.0)
    assert speedup(run("auto", 6.0), plain, plain) == 11.0 / 6.0
    assert speedup(run("auto", 6.0, tokens=51), plain, plain) == pytest.approx(11.0 / 11.0)
    # Each at plain's length, also where plain is not compared.
    longer, shorter = run("auto", 6.0, tokens=201), run("model-3", 3.5, tokens=51)
    assert speedup(longer, shorter, plain) == pytest.approx((1.0 + 5.0) / (1.0 + 2.5))


def test_short_answers():
    plain = run("plain", 2.0, tokens=1)
    assert speedup(run("auto", 1.0, tokens=1), plain, plain) == 2.0  # equal: nothing to convert
    assert speedup(run("auto", 1.0, tokens=0), plain, plain) is None
    assert speedup(run("auto", 1.0, tokens=7), run("plain", 2.0), run("plain", 2.0)) is None


@pytest.fixture
def table():
    """Two categories; "copy" has two prompts, one slow round, and the plain way is not constant."""
    runs = []
    for turn, drift in enumerate((1.0, 2.0, 1.0)):
        for prompt, auto_s in (("1", 2.0), ("2", 8.0)):
            runs += [
                run("plain", 8.0 * drift, turn=turn, prompt=prompt),
                run("auto", auto_s * drift, turn=turn, prompt=prompt, note="because"),
                run("model-3", 4.0 * drift, turn=turn, prompt=prompt),
                run("suffix-8", 8.0 if turn == 1 else 2.0, turn=turn, prompt=prompt),
            ]
        for name, seconds in (("plain", 4.0), ("auto", 4.2), ("model-3", 5.0), ("suffix-8", 4.4)):
            text = "other" if name == "model-3" and turn == 0 else "same"
            runs.append(run(name, seconds, turn=turn, category="poem", text=text))
    return Table(runs)


def test_ratios(table):
    assert table.categories == ["copy", "poem"]
    assert table.fixed == ["plain", "model-3", "suffix-8"]
    assert table.ratio("auto", "plain", "copy") == pytest.approx(2.0)  # of 4 and 1
    assert table.ratio("auto", "plain", "poem") == pytest.approx(4.0 / 4.2)
    assert table.ratio("auto") == pytest.approx((2.0 * 4.0 / 4.2) ** 0.5)
    assert table.ratio("auto", "model-3", "copy") == pytest.approx(1.0)
    assert table.ratio("suffix-8", "plain", "copy") == pytest.approx(4.0)  # the median round
    assert table.every("suffix-8", "plain", "copy") == [4.0, 2.0, 4.0, 4.0, 2.0, 4.0]
    assert table.plain_speed("poem") == 101 / 4.0
    assert table.same_text("model-3") == (8, 9)
    assert table.same_text("auto") == (9, 9)
    assert table.left_out() == []


def test_best_fixed_choice_and_worst_prompts(table):
    assert table.best_fixed("copy") == "suffix-8"
    assert table.best_fixed("poem") == "plain"
    worst = table.worst("auto", 2)
    assert [place for _, place in worst] == [("poem", "1"), ("copy", "2")]
    assert [ratio for ratio, _ in worst] == pytest.approx([4.0 / 4.2, 1.0])


def test_verdicts(table):
    lines = verdicts(table, own_kernels=True)
    assert lines == [
        "MISSED: no category below 0.97 of plain: poem 0.952",
        "MISSED: at least 0.95 of the best fixed choice: copy 0.500",
        "MISSED: ahead of model-3, llama.cpp's default: copy 1.000",
        "MISSED: copying at 3 times plain with edgespec's kernels: 2.000",
    ]
    assert (
        verdicts(table, own_kernels=False)[-1]
        == "stated: copying at 2.000 times plain with llama.cpp's kernels"
    )


def test_verdicts_met_and_not_judged():
    runs = [run("plain", 8.0), run("auto", 2.0), run("model-3", 3.0)]
    runs += [run("plain", 8.0, category="qa", tokens=2), run("auto", 2.0, category="qa", tokens=3)]
    runs += [run("model-3", 3.0, category="qa", tokens=2)]
    table = Table(runs)
    assert table.left_out() == [("qa", "1")]
    assert table.ratio("auto", "plain", "qa") is None
    assert verdicts(table, own_kernels=True) == [
        "met: no category below 0.97 of plain; lowest 4.000, copy (nothing comparable: qa)",
        "met: ahead of model-3, llama.cpp's default; lowest 1.500, copy (nothing comparable: qa)",
        "met: copying at 3 times plain with edgespec's kernels: 4.000",
    ]
    silent = Table([replace(one, category="qa", tokens=i) for i, one in enumerate(runs[:2])])
    assert verdicts(silent, own_kernels=True) == [
        "not judged: no category below 0.97 of plain (nothing comparable: qa)"
    ]


def test_report(table, capsys):
    texts = dict.fromkeys(table.places, "Write a poem\nof " + 60 * "x")
    report(table, texts, own_kernels=True, one_text=True)
    printed = capsys.readouterr().out
    assert re.search(r"^copy +2 +12\.\d +2\.00 +2\.00 +4\.00 +1\.00-4\.00 +suffix-8 +0\.50$", printed, re.M)
    assert "auto at its worst: 0.95  poem  1  'Write a poem of xxx" in printed
    assert "1.00  copy  2  'Write a poem of " in printed
    assert "because" in printed
    assert "NOT THE SAME TEXT as plain: model-3\n" in printed


def test_chosen_prompts_and_ways(tmp_path):
    file = tmp_path / "qa.jsonl"
    rows = [f'{{"question_id": {i}, "category": "qa", "turns": ["t{i}"]}}\n' for i in range(9)]
    file.write_text("".join(rows))
    options = ["--category", "qa", "--category", "hot", "--sweep", "--temp", "0,0.8"]
    args = never_slower.arguments([str(file), *options])
    assert [prompt.category for prompt in never_slower.chosen_prompts(args)] == ["hot"] * 4 + ["qa"] * 4
    names = [one.name for one in never_slower.chosen_ways(args, has_draft=True)]
    assert names[:4] == ["plain", "auto", "model-3", "model-1"]
    assert len(names) == len(set(names)) == 1 + 1 + 8 + 5 + 3
    without = never_slower.chosen_ways(args, has_draft=False)
    assert {one.drafter for one in without} == {"none", "auto", "suffix"}
    with pytest.raises(SystemExit, match="prose"):
        never_slower.chosen_prompts(never_slower.arguments(["--category", "prose"]))


@pytest.fixture
def engine(tiny_path, tiny_draft_path):
    with Engine(tiny_path, tiny_draft_path, n_threads=1) as opened:
        yield opened


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
    prompts = [Prompt("a", "1", "the cat and the hat"), Prompt("b", "2", "another thing", n_predict=10)]
    ways = [way(name) for name in ("plain", "auto", "model-3", "suffix-4", "staged-2")]
    bench = Bench(engine, n_predict=24)
    bench.warm_up(prompts, ways)
    runs = bench.compare(prompts, ways, 2, 0.0)
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
    table = Table(runs)
    assert table.ways == ["plain", "auto", "model-3", "suffix-4", "staged-2"]
    assert all(table.same_text(name) == (4, 4) for name in table.ways)
    assert all(0 < one.once_s <= one.total_s and one.note for one in runs)


def test_no_seed_above_temperature_zero(engine, asked):
    prompts = [Prompt("a", "1", "the cat")]
    for seeded, expected in ((False, None), (True, 0)):
        asked.clear()
        Bench(engine, n_predict=8, seeded=seeded).compare(prompts, [way("plain"), way("auto")], 1, 0.8)
        assert [call[1]["seed"] for call in asked if call != "forget"] == [expected] * 2


def test_only_auto_teaches_auto(engine):
    """What the other ways on the same prompt would tell of it is undone."""
    bench = Bench(engine, n_predict=24)
    before = engine._knowledge.scheduler(greedy=True).predictor.as_dict()
    for name in ("model-3", "suffix-4", "staged-2", "plain"):
        bench.ask("the cat and the hat", way(name), 0, 0.0)
    assert engine._knowledge.scheduler(greedy=True).predictor.as_dict() == before
    bench.ask("the cat and the hat", way("auto"), 0, 0.0)
    assert engine._knowledge.scheduler(greedy=True).predictor.as_dict() != before


def test_second_run(tiny_path, tiny_draft_path, capsys, monkeypatch, tmp_path):
    """The history is that of the first request, and nothing of it is left afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []

    def open_engine():
        seen.append(sum(file.stat().st_size for file in cache_root().glob("history/*.tokens")))
        return Engine(tiny_path, tiny_draft_path, n_threads=1, history=True)

    families = {"family": ("the first", "the second")}
    runs = second_run(open_engine, families, 1, 0.0, n_predict=16)
    plain, unseen, first, second = seen
    assert plain == unseen == first == 0
    assert second > 0
    assert not list(cache_root().glob("history/*.tokens"))
    assert [one.way for one in runs] == ["plain", "unseen", "seen"]
    report_second(Table(runs))
    assert re.search(r"^family .*-\d", capsys.readouterr().out, re.M)
