"""Measures whether `auto` is ever slower than plain decoding, and how near it comes to the best fixed choice.

One engine with the same kernels for all variants (`--kernels off`: llama.cpp's). Every round runs each
variant once on each prompt, one right after the other, in an order that shifts from prompt to prompt and from
round to round. Times are of whole generations, including both models' reading of the prompt, without loading.
Ratios are taken within a round and prompt: bench/ratios.py.

Before each generation the engine forgets the texts it has seen (`Engine.forget`); else every variant would
copy the answer of the variant before it. What auto learns about acceptance and the length of answers stays
from prompt to prompt and round to round, as for a user; what it could learn from the other variants on the
same prompt is undone. `--cold`: auto begins each time with the stored profile (`edgespec profile`). The
benchmark works on a copy of the user's profiles.

    .venv/bin/python bench/never_slower.py --depth 0,8192,16384 --temp 0 --variants auto -n 96 --rounds 2

`--depth`: the prompts have so many tokens of sources in front, and each depth is reported by itself. They are
read once for a depth and stay in the prefix cache, so that times are of the prompt's own end and the answer.
Unless others are asked for, it asks one prompt each of copying, code, prose and chat.

Answers of different lengths: at temperature 0 all variants write the same text. Above 0 there is no seed, as
by default, so two variants write two texts. Forbidding the end of the text would make the lengths equal, but
a model that must not end repeats itself, and repetition is easy to draft. So each variant's time is scaled to
the length of plain's answer in that round: time spent once (up to the first token, and the draft's reading of
the prompt) stays, the rest is scaled by the tokens. For equal lengths this changes nothing. A pair of unequal
lengths is left out if one is below 8 tokens.

The best fixed choice of a category is chosen afterwards from these same runs, with `--sweep` among all
lengths and drafters. It is the largest of many noisy figures, so auto's distance from it is somewhat
overstated.

`--short`: answers below 40 tokens instead (bench/prompt_sets/short.jsonl), where the initial costs of
drafting matter most; `--words`: answers of 1 to 3 tokens, greedy. `--remembered`: the suffix store holds
the plain answers to all other prompts, as after earlier use; it never holds the answer to the current one.

Plain decoding is always measured; other ways are those of `edgespec bench --variants`. model-3 is llama.cpp's
default. Prompts: our own sets, and other suites beside them (bench/prompts.py). A prompt with a temperature
of its own runs at that one only.

`--second-run` measures something else: what a request gains from a similar one before it. The second of
each pair of bench/prompt_sets/again.jsonl, by plain, by auto with an empty history ("unseen"), and by auto
whose history on disk holds the first request and its answer ("seen"). Each in an engine of its own, as with
`edgespec run`; its loading is not counted, nor is the history's, which goes on beside the prompt's reading.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import prompts as prompt_sets
from asking import AUTO, FEWEST, Bench, at_plains_length, compared, in_order, own_cache
from edgespec import Engine
from edgespec.apps.bench.measure import run_of
from edgespec.apps.bench.runs import PLAIN, PLAIN_VARIANT, Run, Variant, parse_variants, rotated
from edgespec.apps.bench.suites import OVERALL, Prompt
from edgespec.llama.kernels import STOCK
from prompts import Limits
from ratios import Ratios, interval, plain_speed, shown, worst
from script import Measuring, numbers, parser, start

DEFAULT = "model-3"
UNSEEN, SEEN = "unseen", "seen"
SWEEP = {"model": range(1, 9), "suffix": (1, 2, 4, 8, 16), "staged": (2, 4, 8)}
COPY = "copy"
DEEP = (COPY, "code", "other style", "chat")
"""Categories asked at a depth: copying, code, prose and chat."""
SLOWEST, OF_BEST, COPY_GAIN = 0.97, 0.95, 3.0
"""The goals: of plain in every category; of the best fixed choice; of plain where an answer copies."""


def fixed(ratios: Ratios) -> list[str]:
    """Return the variants that neither decide nor learn, plain included."""
    return [name for name in ratios.variants if name == PLAIN or "-" in name]


def best_fixed(ratios: Ratios, category: str) -> str:
    """Return the fastest fixed variant in a category."""
    return max(fixed(ratios), key=lambda name: ratios.ratio(name, PLAIN, category) or 0.0)


def verdicts(ratios: Ratios, *, own_kernels: bool, depth: int = 0) -> list[str]:
    """Return a line for each goal of auto that the runs can test, after `depth` tokens of sources."""
    if AUTO not in ratios.variants:
        return []

    def judged(goal: str, base: str | None, least: float, *, more: bool = False) -> str:
        """`base` None: the best fixed choice. `more`: just reaching `least` is not enough."""
        found = {c: ratios.ratio(AUTO, base or best_fixed(ratios, c), c) for c in ratios.categories}
        known = {c: ratio for c, ratio in found.items() if ratio is not None}
        missed = {c: ratio for c, ratio in known.items() if ratio < least or (more and ratio == least)}
        silent = [c for c in found if c not in known]
        if missed:
            line = f"MISSED: {goal}: " + ", ".join(f"{c} {ratio:.3f}" for c, ratio in missed.items())
        elif known:
            lowest = min(known, key=lambda c: known[c])
            line = f"met: {goal}; lowest {known[lowest]:.3f}, {lowest}"
        else:
            line = f"not judged: {goal}"
        return line + (f" (nothing comparable: {', '.join(silent)})" if silent else "")

    lines = [judged(f"no category below {SLOWEST} of plain", PLAIN, SLOWEST)]
    if any(name not in (PLAIN, DEFAULT) for name in fixed(ratios)):
        lines.append(judged(f"at least {OF_BEST} of the best fixed choice", None, OF_BEST))
    if DEFAULT in ratios.variants:
        lines.append(judged(f"ahead of {DEFAULT}, llama.cpp's default", DEFAULT, 1.0, more=True))
    copying = ratios.ratio(AUTO, PLAIN, COPY) if COPY in ratios.categories else None
    if copying is not None and depth:
        lines.append(f"stated: copying at {copying:.3f} times plain at a depth of {depth}")
    elif copying is not None and own_kernels:
        verdict = "met" if copying >= COPY_GAIN else "MISSED"
        lines.append(
            f"{verdict}: copying at {COPY_GAIN:g} times plain with edgespec's kernels: {copying:.3f}"
        )
    elif copying is not None:
        lines.append(f"stated: copying at {copying:.3f} times plain with llama.cpp's kernels")
    return lines


def report(
    ratios: Ratios,
    texts: Mapping[str, str],
    notes: Mapping[str, str],
    *,
    own_kernels: bool,
    one_text: bool,
    depth: int = 0,
) -> None:
    """Print the figures of one temperature at one depth; `texts` and `notes` by prompt.

    `one_text`: all variants should have written the same.
    """
    variants = [name for name in ratios.variants if name != PLAIN]
    has_auto = AUTO in variants
    print("times plain, whole generation:" + "".join(f"  [{i}] {name}" for i, name in enumerate(variants, 1)))
    line = f"{'':<26}{'prompts':>8}{'plain tokens/s':>16}"
    line += "".join(f"{f'[{i}]':>8}" for i, _ in enumerate(variants, 1))
    print(line + (f"{'auto: 95 %':>18}{'best fixed':>12}{'auto/best':>11}" if has_auto else ""))
    for category in ratios.categories:
        line = f"{category:<26}{len(ratios.prompts(category)):>8}{shown(plain_speed(ratios, category), 16)}"
        line += "".join(shown(ratios.ratio(name, PLAIN, category)) for name in variants)
        if has_auto:
            best = best_fixed(ratios, category)
            line += f"{interval(ratios, AUTO, PLAIN, category):>18}{best:>12}"
            line += shown(ratios.ratio(AUTO, best, category), 11)
        print(line)
    print(f"{'geometric mean':<50}" + "".join(shown(ratios.ratio(name)) for name in variants))
    for verdict in verdicts(ratios, own_kernels=own_kernels, depth=depth):
        print(verdict)
    for ratio, category, prompt in worst(ratios, AUTO, 5) if has_auto else []:
        start = " ".join(texts[prompt].split())[:50]
        print(f"auto at its worst: {ratio:.2f}  {category}  {prompt}  {start!r}  {notes.get(prompt, '')}")
    if one_text:
        same = ratios.summaries[OVERALL].comparisons
        print(
            "same text as plain: " + ", ".join(f"{c.variant} {c.n_identical} of {c.n_compared}" for c in same)
        )
        if different := [found.variant for found in same if found.n_identical < found.n_compared]:
            print(f"NOT THE SAME TEXT as plain: {', '.join(different)}")


def report_second(ratios: Ratios) -> None:
    """Print what a request gains from a similar one before it."""
    columns = ((UNSEEN, PLAIN), (SEEN, PLAIN), (SEEN, UNSEEN))
    line = f"{'':<26}{'plain tokens/s':>16}" + "".join(
        f"{f'{variant}/{base}':>14}" for variant, base in columns
    )
    print(line + f"{'95 %':>14}")
    for family in ratios.categories:
        line = f"{family:<26}{shown(plain_speed(ratios, family), 16)}"
        line += "".join(shown(ratios.ratio(variant, base, family), 14) for variant, base in columns)
        print(line + f"{interval(ratios, SEEN, UNSEEN, family):>14}")
    print(
        f"{'geometric mean':<42}"
        + "".join(shown(ratios.ratio(variant, base), 14) for variant, base in columns)
    )


def second_run(
    open_bench: Callable[[Engine], Bench],
    open_engine: Callable[[], Engine],
    families: Mapping[str, tuple[str, str]],
    rounds: int,
    temperature: float,
) -> list[Run]:
    """Run the second request of each family: plainly, by itself, and after the first."""
    auto = parse_variants(AUTO)[0]
    variants = {PLAIN: PLAIN_VARIANT, UNSEEN: auto, SEEN: auto}
    runs = []
    for turn in range(rounds):
        for place, (family, requests) in enumerate(families.items()):
            first, second = (Prompt(f"{family} {i}", family, text) for i, text in enumerate(requests, 1))
            for name in rotated(list(variants), turn + place):
                with own_cache():
                    if name == SEEN:
                        with open_engine() as engine:
                            open_bench(engine).ask(first, auto, turn, temperature)
                    with open_engine() as engine:
                        result = open_bench(engine).ask(second, variants[name], turn, temperature)
                runs.append(run_of(result, second, name, turn))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return in_order(runs, list(variants))


def chosen_variants(args: argparse.Namespace, *, has_draft: bool) -> list[Variant]:
    """Return the variants to compare: plain, those asked for, and the sweep's."""
    swept = [f"{drafter}-{gamma}" for drafter, gammas in SWEEP.items() for gamma in gammas]
    variants = [PLAIN_VARIANT, *args.variants, *(parse_variants(",".join(swept)) if args.sweep else ())]
    return [variant for variant in dict.fromkeys(variants) if has_draft or not variant.needs_model]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parse = parser(__doc__)
    prompt_sets.add_options(parse, per_category=4)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--temp", type=numbers(float), default=[0.0, 0.8], metavar="T,T")
    parse.add_argument(
        "--depth", type=numbers(int), default=[0], metavar="N,N", help="tokens of sources before each prompt"
    )
    parse.add_argument("-n", "--n-predict", type=int, default=192)
    parse.add_argument(
        "--variants", type=parse_variants, default=parse_variants(f"{AUTO},{DEFAULT}"), metavar="A,B"
    )
    parse.add_argument("--sweep", action="store_true", help="all fixed choices too")
    parse.add_argument("--kernels", choices=["auto", "off"], default="auto")
    parse.add_argument("--second-run", action="store_true", help="measure second requests instead")
    parse.add_argument("--cold", action="store_true", help="forget what was learnt of acceptance, too")
    parse.add_argument("--short", action="store_true", help="short answers instead of our other sets")
    parse.add_argument("--words", action="store_true", help="answers of a word instead")
    parse.add_argument(
        "--remembered", action="store_true", help="the suffix store holds the answers to the other prompts"
    )
    parse.add_argument(
        "--seeded", action="store_true", help="one seed for all variants above temperature 0, too"
    )
    parse.add_argument("--label", help="of the file that --save writes")
    args = parse.parse_args(argv)
    if min(args.rounds, args.per_category or 1) < 1 or args.n_predict < FEWEST:
        parse.error(f"numbers must be at least 1, --n-predict at least {FEWEST}")
    if any(args.depth):
        if min(args.depth) < 0 or args.second_run or args.remembered:
            parse.error("--depth: 0 or more, and not with --second-run or --remembered")
        args.suite, args.category = args.suite or ["default"], args.category or list(DEEP)
        args.per_category = args.per_category or 1
    if not all(variant.exact for variant in args.variants):
        parse.error("--variants: only exact ones; bench/cascade.py measures the others")
    return args


def first_run(
    bench: Bench, variants: Sequence[Variant], prompts: Sequence[Prompt], args: argparse.Namespace
) -> dict[float, list[Run]]:
    """Run the variants on `prompts` at each temperature asked for, and each prompt at its own."""
    limits = prompt_sets.limits()
    own = {prompt.id: limits.get(prompt.id, Limits()).temperature for prompt in prompts}
    bench.warm_up(prompts, variants)
    asked = {variant.name: (bench, variant) for variant in variants}
    if args.remembered:
        bench.remember(prompts)
    runs = {}
    for temperature in dict.fromkeys([*args.temp, *sorted(t for t in own.values() if t is not None)]):
        general = temperature in args.temp
        some = [p for p in prompts if own[p.id] == temperature or (general and own[p.id] is None)]
        if some:
            runs[temperature] = compared(asked, some, args.rounds, temperature)
    return runs


def deep_run(
    bench: Bench,
    engine: Engine,
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
) -> dict[tuple[int, float], list[Run]]:
    """Return the runs at each depth, by it and the temperature."""
    runs = {}
    for depth in args.depth:
        deep = prompt_sets.at_depth(engine.target, prompts, depth)
        texts = [engine.prompt_tokens(prompt.text) for prompt in deep]
        bench.beginning = texts[0][: prompt_sets.n_alike(texts)] if depth else ()
        for temperature, found in first_run(bench, variants, deep, args).items():
            runs[depth, temperature] = found
    return runs


def report_runs(
    args: argparse.Namespace,
    bench: Bench,
    prompts: Sequence[Prompt],
    place: tuple[int, float],
    runs: list[Run],
    *,
    in_use: str,
) -> None:
    """Print what was measured at one depth and temperature, the `place`."""
    comparable = at_plains_length(runs)
    ratios = Ratios(comparable)
    depth, temperature = place
    after = f"after {depth} tokens, " if depth else ""
    print(f"\n{after}temperature {temperature:g}, {ratios.summaries[OVERALL].n_prompts} prompts")
    if args.second_run:
        report_second(ratios)
        return
    texts = {prompt.id: prompt.text for prompt in prompts}
    one_text = bench.one_text(temperature)
    report(ratios, texts, bench.notes, own_kernels=in_use != STOCK, one_text=one_text, depth=depth)
    if short := sorted({one.prompt for one in comparable if not one.tokens}):
        print(f"not comparable in some round, an answer of fewer than {FEWEST} tokens: {short}")


def main() -> None:
    args = arguments()
    short = (prompt_sets.WORDS,) if args.words else (prompt_sets.SHORT,) if args.short else ()
    own = () if args.second_run else short or prompt_sets.OWN
    suites = prompt_sets.chosen(args, own)
    prompts = prompt_sets.of_all(suites)
    measuring = Measuring(args)
    runs: dict[tuple[int, float], list[Run]] = {}
    open_engine = partial(Engine, args.target, args.draft, n_threads=args.threads, kernels=args.kernels)
    open_first = partial(open_engine, prefix_cache=0) if any(args.depth) else open_engine

    def open_bench(engine: Engine) -> Bench:
        return Bench(
            engine, prompt_sets.limits(), n_predict=args.n_predict, cold=args.cold, seeded=args.seeded
        )

    with own_cache(), open_first() as engine:
        bench = open_bench(engine)
        models = {"target": engine.target_name, "draft": engine.draft_name}
        in_use = engine.kernels
        if not args.second_run:
            variants = chosen_variants(args, has_draft=engine.draft is not None)
            runs = deep_run(bench, engine, variants, prompts, args)
    if args.second_run:
        with_history = partial(open_engine, history=True)
        families = prompt_sets.pairs(prompt_sets.AGAIN)
        for temperature in dict.fromkeys(args.temp):
            found = second_run(open_bench, with_history, families, args.rounds, temperature)
            runs[0, temperature] = found
    measuring.end()

    print(f"{models['target']} drafted by {models['draft']}; {measuring}, in use: {in_use}")
    print(
        f"{args.rounds} rounds, interleaved; {args.n_predict} tokens where a prompt has no limit of its own"
    )
    for place, some_runs in runs.items():
        report_runs(args, bench, prompts, place, some_runs, in_use=in_use)
    result = {
        **models,
        "kernels in use": in_use,
        "suites": prompt_sets.sources(suites),
        "runs": [
            {"depth": depth, "temperature": temperature, "runs": some_runs}
            for (depth, temperature), some_runs in runs.items()
        ],
    }
    measuring.store("-".join(["never-slower", *filter(None, [args.label])]), result)


if __name__ == "__main__":
    start(main)
