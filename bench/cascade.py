"""The cascade's curve: the small model alone, the target woken by several thresholds, the target alone.

    speed     interleaved: every round runs each way once on each prompt, in an order that shifts; tokens a
              second of whole generations, median and quartiles, and the median ratio to plain decoding
    share     tokens that the target wrote or judged
    loss      tokens that the target does not like best after those before, and mean KL, over the text itself
    pass@1    --problems N of HumanEval, greedy, in the sandbox (tests are not timed)

Thresholds are --thresholds, or quantiles of the small model's margin over the target's own answers, so that
the shares lie between the two models alone. The target alone is the exact engine (`auto`), which drafts too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec import Engine
from edgespec.benchmark.bench import Settings, generate, leaving_no_trace, warm_up
from edgespec.benchmark.humaneval import load_problems, pass_at_1
from edgespec.benchmark.runs import Run
from edgespec.benchmark.tradeoff import ALWAYS, NEVER, SHARES, curve, read_answers
from edgespec.benchmark.ways import Way, parse_ways
from edgespec.choices import Signal
from edgespec.cli.options import parse_span
from edgespec.options import SPAN, Span, Waking
from edgespec.suites import DEFAULT, Prompt, evenly, load_suite
from machine import facts, other_load, save, spread

TARGET = Way("target alone (auto)", "auto")
PLAIN = Way("target alone (plain)", "none")


def cascade_way(signal: Signal, threshold: float, window: int, span: Span) -> Way:
    """Return a way with its threshold in its name."""
    waking = Waking(signal, threshold, window, span)
    ends = {NEVER[signal]: "small alone"}
    return Way(ends.get(threshold, f"cascade {waking}"), "auto", cascade=waking)


def chosen_thresholds(engine: Engine, prompts: list[Prompt], args: argparse.Namespace) -> list[float]:
    """Return thresholds at which the target's shares are spread, by its own answers."""
    texts = read_answers(engine, [prompt.text for prompt in prompts], n_predict=args.n_predict)
    points = curve(texts, args.signal, args.span, args.window)

    def nearest(share: float) -> float:
        return min(points, key=lambda point: abs(point.target_share - share)).threshold

    return list(dict.fromkeys(map(nearest, sorted({*SHARES, 0.05, 0.35}))))


def measured(
    engine: Engine, prompts: list[Prompt], ways: list[Way], settings: Settings, rounds: int
) -> list[Run]:
    """Run every way on every prompt in every round, each first as often."""
    runs = []
    with leaving_no_trace(engine):
        warm_up(engine, prompts, settings)
        for turn in range(rounds):
            for shift, prompt in enumerate(prompts):
                for i in range(len(ways)):
                    way = ways[(i + turn + shift) % len(ways)]
                    runs.append(generate(engine, prompt, way, settings, round_=turn))
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


def rows_of(runs: list[Run], ways: list[Way], solved: dict[str, tuple[int, float]]) -> list[dict[str, Any]]:
    """Return a row a way: speeds, ratios within prompt and round, share, loss, KL, problems."""
    by_way: dict[str, dict[tuple[str, int], Run]] = defaultdict(dict)
    for run in runs:
        by_way[run.way][run.prompt, run.round] = run
    rows = []
    for way in ways:
        own = by_way[way.name]
        speeds = [run.whole_tokens_per_s for run in own.values() if run.whole_tokens_per_s]
        ratios = [
            run.whole_tokens_per_s / base.whole_tokens_per_s
            for place, run in own.items()
            if (base := by_way[PLAIN.name].get(place)) and run.whole_tokens_per_s and base.whole_tokens_per_s
        ]
        tokens = sum(run.tokens for run in own.values())

        def mean(name: str, exact: float) -> float:
            parts = [(getattr(run, name), run.tokens) for run in own.values()]  # noqa: B023
            return sum((exact if value is None else value) * n for value, n in parts) / tokens  # noqa: B023

        rows.append(
            {
                "way": way.name,
                "exact": way.exact,
                "tokens/s, median and quartiles": spread(speeds),
                "x plain": statistics.median(ratios),
                "target share": mean("target_share", 1.0),
                "loss of tokens": 1.0 - mean("agreement", 1.0) if settings_greedy(runs) else None,
                "KL": mean("kl", 0.0) if way.lenience == 1.0 else None,
                "pass@1": solved.get(way.name),
            }
        )
    return rows


def settings_greedy(runs: list[Run]) -> bool:
    """Whether agreement was counted: at temperature 0."""
    return any(run.agreement is not None for run in runs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--suite", default=DEFAULT)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--signal", choices=list(NEVER), default="margin")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--span", type=parse_span, default=SPAN, help="tokens, or rest")
    parser.add_argument("--thresholds", type=float, nargs="+", help="by default spread over the shares")
    parser.add_argument("--lenience", type=float, nargs="*", default=[], help="lenient acceptance too")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("-n", "--n-predict", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--problems", type=int, default=0, help="of HumanEval; 0: none")
    parser.add_argument("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz")
    parser.add_argument("--json", action="store_true", help="print all as JSON too")
    parser.add_argument("--save", action="store_true", help="write bench/results/cascade-...json")
    args = parser.parse_args()
    if min(args.per_category, args.window, args.n_predict, args.rounds) < 1:
        parser.error("numbers must be at least 1")
    return args


def main() -> None:
    args = arguments()
    prompts = list(load_suite(args.suite).select(None, args.per_category).interleaved())
    problems = evenly(load_problems(args.humaneval), args.problems) if args.problems else []
    loads = [other_load()]
    solved: dict[str, tuple[int, float]] = {}
    with Engine(args.target, args.draft, n_threads=args.threads) as engine:
        engine.check_cascade()
        signal: Signal = args.signal
        thresholds = args.thresholds or chosen_thresholds(engine, prompts, args)
        between = [t for t in thresholds if t not in (NEVER[signal], ALWAYS[signal])]
        ways = [
            cascade_way(signal, NEVER[signal], args.window, args.span),
            *(cascade_way(signal, threshold, args.window, args.span) for threshold in between),
            *(parse_ways(f"lenience-{lenience:g}")[0] for lenience in args.lenience),
            TARGET,
            PLAIN,
        ]
        settings = Settings(tuple(ways), args.n_predict, args.temp)
        runs = measured(engine, prompts, ways, settings, args.rounds)
        for way in ways if problems else []:
            judged = list(
                pass_at_1(engine, problems, drafter=way.drafter, cascade=way.cascade, lenience=way.lenience)
            )
            n_tokens = max(1, sum(one.tokens for one in judged))
            share = sum(one.target_share * one.tokens for one in judged) / n_tokens
            solved[way.name] = (sum(one.passed for one in judged), share)
            print(f"{way.name}: {solved[way.name][0]} of {len(problems)}", file=sys.stderr)
        models = {"target": engine.target_name, "draft": engine.draft_name}
    loads.append(other_load())
    rows = rows_of(runs, ways, solved)

    print(f"{models['target']} woken by {models['draft']}, span {args.span}, temperature {args.temp:g}")
    print(f"{len(prompts)} prompts, {args.n_predict} tokens, {args.rounds} rounds, interleaved")
    print(f"{'':<44}{'tokens/s (quartiles)':>24}{'x plain':>9}{'share':>7}{'loss':>7}{'KL':>8}  pass@1")
    for row in rows:
        middle, low, high = row["tokens/s, median and quartiles"]
        loss = "-" if row["loss of tokens"] is None else f"{row['loss of tokens']:.1%}"
        line = f"{row['way']:<44}{f'{middle:.1f} ({low:.1f} - {high:.1f})':>24}{row['x plain']:>9.2f}"
        kl = "-" if row["KL"] is None else f"{row['KL']:.4f}"
        line += f"{row['target share']:>7.0%}{loss:>7}{kl:>8}"
        print(line + (f"  {row['pass@1'][0]}/{len(problems)}" if row["pass@1"] else "  -"))
    outcome = {
        "machine": facts(loads),
        "command": sys.argv,
        **models,
        "problems": len(problems),
        "rows": rows,
        "runs": [asdict(run) for run in runs],
    }
    if args.json:
        print(json.dumps(outcome, indent=1))
    if args.save:
        save(f"cascade-{args.signal}-span-{args.span}-temp{args.temp:g}", outcome, loads)


if __name__ == "__main__":
    main()
