"""Measures the cascade's curve: the small model alone, the target woken at some thresholds, the target alone.

    speed     interleaved: every round runs each variant once on each prompt, in an order that shifts;
              tokens a second of whole generations, median, and the median ratio to plain decoding
    share     tokens that the target wrote or judged
    loss      tokens that are not the target's likeliest after those before, and mean KL, over the text itself
    exact     --problems N of arithmetic, greedy: answers that are exactly right (not timed)

Thresholds are --thresholds, or quantiles of the small model's margin over the target's own answers, so that
the shares lie between the two models alone. The target alone is the exact engine (`auto`), which drafts too.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from edgespec import Engine
from edgespec.apps.bench.accuracy import arithmetic, solve
from edgespec.apps.bench.bench import BenchSettings, leaving_no_trace, read_answers, turns, warm_up
from edgespec.apps.bench.commands.calibrate import parse_span
from edgespec.apps.bench.runs import Cell, Run
from edgespec.apps.bench.summary import summarise_cell
from edgespec.apps.bench.variants import PLAIN_VARIANT, Variant, parse_variants
from edgespec.decoding.choices import Signal
from edgespec.decoding.options import SPAN, Span, Waking
from edgespec.engine.lossy.teacher import ALWAYS, NEVER, curve
from edgespec.engine.model_choice import choose_models
from edgespec.models.suites import DEFAULT, Prompt, load_suite
from ratios import shown_interval
from script import Measuring, parser, start

TARGET = Variant("target alone (auto)", "auto")
SHARES = (0.05, 0.1, 0.25, 0.35, 0.5, 0.75)
"""The target's shares of the tokens, between small model alone and target alone."""


def cascade_variant(signal: Signal, threshold: float, window: int, span: Span) -> Variant:
    """Return a variant with its threshold in its name."""
    waking = Waking(signal, threshold, window, span)
    ends = {NEVER[signal]: "small alone"}
    return Variant(ends.get(threshold, f"cascade {waking}"), "auto", cascade=waking)


def chosen_thresholds(engine: Engine, prompts: list[Prompt], args: argparse.Namespace) -> list[float]:
    """Return thresholds that spread the target's share evenly, judged by its own answers."""
    texts = read_answers(engine, [prompt.text for prompt in prompts], n_predict=args.n_predict)
    points = curve(texts, args.signal, args.span, args.window)

    def nearest(share: float) -> float:
        return min(points, key=lambda point: abs(point.target_share - share)).threshold

    return list(dict.fromkeys(map(nearest, SHARES)))


def measured(engine: Engine, prompts: list[Prompt], settings: BenchSettings, rounds: int) -> list[Run]:
    """Run every variant on every prompt in every round; each comes first equally often."""
    runs: list[Run] = []
    with leaving_no_trace(engine):
        warm_up(engine, prompts, settings)
        for turn in range(rounds):
            for shift, prompt in enumerate(prompts):
                runs += turns(engine, settings, prompt, turn, shift)
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


def rows_of(
    runs: list[Run], variants: list[Variant], solved: dict[str, tuple[int, float]]
) -> list[dict[str, Any]]:
    """Return a row per variant: speed, ratio within prompt and round, share, loss, KL, problems."""
    overall = summarise_cell(Cell("", None, "", tuple(runs)))[0]
    summaries = {found.variant: found for found in overall.variants}
    beside = {found.variant: found.speedup for found in overall.comparisons}
    greedy = any(run.agreement is not None for run in runs)
    rows = []
    for variant in variants:
        found = summaries[variant.name]
        agreement = 1.0 if variant.exact else found.agreement
        rows.append(
            {
                "variant": variant.name,
                "exact": variant.exact,
                "tokens/s": found.whole_tokens_per_s,
                "x plain": beside.get(variant.name),
                "target share": found.target_share,
                "loss of tokens": 1.0 - agreement if greedy and agreement is not None else None,
                "KL": 0.0 if variant.exact else found.kl,
                "exact match": solved.get(variant.name),
            }
        )
    return rows


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("--suite", default=DEFAULT)
    parse.add_argument("--per-category", type=int, default=2)
    parse.add_argument("--signal", choices=list(NEVER), default="margin")
    parse.add_argument("--window", type=int, default=4)
    parse.add_argument("--span", type=parse_span, default=SPAN, help="tokens, or rest")
    parse.add_argument("--thresholds", type=float, nargs="+", help="by default spread over the shares")
    parse.add_argument("--lenience", type=float, nargs="*", default=[], help="lenient acceptance too")
    parse.add_argument("--temp", type=float, default=0.0)
    parse.add_argument("-n", "--n-predict", type=int, default=128)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--problems", type=int, default=0, help="of arithmetic; 0: none")
    args = parse.parse_args()
    if min(args.per_category, args.window, args.n_predict, args.rounds) < 1:
        parse.error("numbers must be at least 1")
    return args


def main() -> None:
    args = arguments()
    prompts = list(load_suite(args.suite).select(None, args.per_category).interleaved())
    problems = arithmetic(args.problems)
    measuring = Measuring(args)
    solved: dict[str, tuple[int, float]] = {}
    names = choose_models(args.target, args.draft, writes=True)
    with Engine(*names, n_threads=args.threads) as engine:
        engine.check_cascade()
        signal: Signal = args.signal
        thresholds = args.thresholds or chosen_thresholds(engine, prompts, args)
        between = [t for t in thresholds if t not in (NEVER[signal], ALWAYS[signal])]
        variants = [
            cascade_variant(signal, NEVER[signal], args.window, args.span),
            *(cascade_variant(signal, threshold, args.window, args.span) for threshold in between),
            *(parse_variants(f"lenience-{lenience:g}")[0] for lenience in args.lenience),
            TARGET,
        ]
        settings = BenchSettings(tuple(variants), args.n_predict, args.temp)
        variants.append(PLAIN_VARIANT)
        runs = measured(engine, prompts, settings, args.rounds)
        for variant in variants if problems else []:
            answers = list(solve(engine, problems, variant))
            n_tokens = max(1, sum(one.tokens for one in answers))
            share = sum(one.target_share * one.tokens for one in answers) / n_tokens
            solved[variant.name] = (sum(one.right for one in answers), share)
            print(f"{variant.name}: {solved[variant.name][0]} of {len(problems)}", file=sys.stderr)
        models = {"target": engine.target_name, "draft": engine.draft_name}
    measuring.end()
    rows = rows_of(runs, variants, solved)

    print(f"{models['target']} woken by {models['draft']}, span {args.span}, temperature {args.temp:g}")
    print(f"{len(prompts)} prompts, {args.n_predict} tokens, {args.rounds} rounds, interleaved")
    print(f"{'':<44}{'tokens/s':>10}{'x plain (95 %)':>24}{'share':>7}{'loss':>7}{'KL':>8}  exact match")
    for row in rows:
        loss = "-" if row["loss of tokens"] is None else f"{row['loss of tokens']:.1%}"
        kl = "-" if row["KL"] is None else f"{row['KL']:.4f}"
        line = f"{row['variant']:<44}{row['tokens/s'] or 0:>10.1f}{shown_interval(row['x plain']):>24}"
        line += f"{row['target share']:>7.0%}{loss:>7}{kl:>8}"
        print(line + (f"  {row['exact match'][0]}/{len(problems)}" if row["exact match"] else "  -"))
    result = {
        **models,
        "problems": len(problems),
        "rows": rows,
        "runs": runs,
    }
    measuring.keep(f"cascade-{args.signal}-span-{args.span}-temp{args.temp:g}", result)


if __name__ == "__main__":
    start(main)
