"""Compares a draft that has a cut vocabulary with its source: passes, acceptance, tokens a second.

Two engines live in one process, each with the target and one of the drafts. Passes: T(n) of both drafts as
the engine runs them (embeddings and full rows included), after 128 tokens, one right after the other, round
by round. Generations: every round runs both drafts once on each prompt, in an order that shifts, with the
same seed; with the match rule both texts are the target's, so the same tokens are written. Ratios are taken
within a round and a prompt; medians, with quartiles or the interval of docs/measuring.md. Without --gamma the
scheduler chooses each draft's own length.

The cut draft is made before, for example with
    edgespec draft make --hours 0 --types q4_0 --force --name cut
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import prompts as prompt_sets
from edgespec import Engine
from edgespec.benchmark.bench import Settings, warm_up
from edgespec.benchmark.bench import generate as benchmark
from edgespec.benchmark.runs import Cell, Run, rotated
from edgespec.benchmark.summary import compare, summarise_cell
from edgespec.benchmark.ways import parse_ways
from edgespec.drafting.model import DraftModel
from edgespec.llama.embeddings import Embeddings, read_cut
from edgespec.llama.session import Session
from edgespec.models.choosing import choose_models
from edgespec.suites import DEFAULT, OVERALL, Prompt
from ratios import shown_interval
from script import Measuring, numbers, parser, spread, start

CONTEXT = 128
SIZES = (1, 2, 4)
FULL, CUT = "full", "cut"

Seconds = dict[int, dict[str, list[float]]]
"""n -> way -> seconds of a pass, round by round."""
Runs = dict[float, list[Run]]
"""By temperature."""


def opened(engine: Engine, stack: ExitStack) -> DraftModel:
    """Return the engine's draft in a session of its own, as the engine opens it, with a context read."""
    assert engine.draft is not None
    cut = read_cut(engine.draft.header)
    session = Session(
        engine.draft,
        n_ctx=CONTEXT + max(SIZES),
        n_threads=engine.n_threads,
        embeddings=Embeddings(cut) if cut else None,
    )
    stack.enter_context(session)
    draft = DraftModel(session, n_vocab=engine.target.n_vocab, cut=cut)
    draft.begin()
    draft.read(timeline(draft.n_vocab, CONTEXT + 1))
    return draft


def timeline(n_vocab: int, n: int) -> list[int]:
    return [(101 + 7 * i) % n_vocab for i in range(n)]


def time_passes(engines: dict[str, Engine], rounds: int) -> Seconds:
    """Time passes over n tokens that return only the last row, as a drafter's do."""
    found: Seconds = {n: {way: [] for way in engines} for n in SIZES}
    with ExitStack() as stack:
        drafts = {way: opened(engine, stack) for way, engine in engines.items()}
        ways = list(drafts)
        for turn in range(-2, rounds):  # the first two warm up
            for n in SIZES:
                for way in rotated(ways, turn):
                    tokens = timeline(drafts[way].n_vocab, CONTEXT + n)
                    began = time.perf_counter()
                    drafts[way].run(tokens)
                    spent = time.perf_counter() - began
                    drafts[way].trim(CONTEXT)
                    if turn >= 0:
                        found[n][way].append(spent)
    return found


def generate(engines: dict[str, Engine], prompts: Sequence[Prompt], args: argparse.Namespace) -> Runs:
    """Run both drafts on all prompts in turn; return the runs by temperature."""
    found: Runs = {temperature: [] for temperature in args.temps}
    gamma = "" if args.gamma is None else f"-{args.gamma}"
    ways = parse_ways(f"{args.drafter}{gamma}")
    for temperature, runs in found.items():
        settings = Settings(ways, args.n_predict, temperature, args.seed)
        for engine in engines.values():
            warm_up(engine, prompts, settings)
        for turn in range(args.rounds):
            for place, prompt in enumerate(prompts):
                for name in rotated(list(engines), turn + place):
                    run = benchmark(engines[name], prompt, ways[0], settings, round_=turn)
                    runs.append(replace(run, way=name))
    return found


def report(passes: Seconds, found: Runs) -> None:
    """Print the tables."""
    print(f"draft passes after {CONTEXT} tokens, ms (quartiles)")
    print(f"{'n':>3}{FULL:>26}{CUT:>26}{'cut / full':>22}")
    for n, ways in passes.items():
        cells = [[1e3 * x for x in spread(ways[way])] for way in (FULL, CUT)]
        ratios = spread([cut / full for full, cut in zip(ways[FULL], ways[CUT], strict=True)])
        columns = [f"{a:.2f} ({b:.2f} - {c:.2f})" for a, b, c in cells]
        print(f"{n:>3}{columns[0]:>26}{columns[1]:>26}{'{:.3f} ({:.3f} - {:.3f})'.format(*ratios):>22}")
    for temperature, runs in found.items():
        print(f"\ntemperature {temperature:g}: tokens a second, cut over full (95 % interval)")
        medians = []
        *categories, of_all = rotated(summarise_cell(Cell("", None, "", tuple(runs))), 1)
        for summary in (*categories, of_all):
            own = [run for run in runs if summary.category in (run.category, OVERALL)]
            compared = compare(own, CUT, FULL)
            alphas = {way.way: way.alpha or 0.0 for way in summary.ways}
            if compared.speedup and summary is not of_all:
                medians.append(compared.speedup.median)
            print(f"{summary.category:<14}{shown_interval(compared.speedup)}   ", end="")
            print(f"alpha {alphas[FULL]:.3f} full, {alphas[CUT]:.3f} cut ({alphas[CUT] - alphas[FULL]:+.3f})")
        if medians:
            print(f"geometric mean over the categories: {statistics.geometric_mean(medians):.3f}")
        if odd := compared.n_compared - compared.n_identical:
            print(f"{odd} of {compared.n_compared} texts differ (near-ties of stock kernels)")


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("cut", help="the cut draft, by its name or path")
    parse.add_argument("--target")
    parse.add_argument("--full", help="the draft it was cut from; default: the default pair's")
    prompt_sets.add_options(parse, per_category=None)
    parse.add_argument("--drafter", choices=("model", "auto", "staged"), default="model")
    parse.add_argument("--gamma", type=int, help="default: the scheduler's choice")
    parse.add_argument("--temps", type=numbers(float), default=[0.0, 0.8])
    parse.add_argument("-n", "--n-predict", type=int, default=128)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--pass-rounds", type=int, default=31)
    parse.add_argument("--seed", type=int, default=0)
    args = parse.parse_args()

    args.suite = args.suite or [DEFAULT]
    prompts = prompt_sets.of_all(prompt_sets.chosen(args))
    target, full = choose_models(args.target, args.full)
    measuring = Measuring(args)
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(Engine(target, draft, n_threads=args.threads, profile=True))
            for way, draft in ((FULL, full), (CUT, args.cut))
        }
        cut = engines[CUT].draft
        if cut is None or read_cut(cut.header) is None:
            parse.error(f"{args.cut}: not a cut draft; make one with `edgespec draft make`")
        passes = time_passes(engines, args.pass_rounds)
        runs = generate(engines, prompts, args)
    measuring.end()
    print(f"{target}, drafted by {full} and by {args.cut}; {measuring}\n")
    report(passes, runs)
    by_temperature = [{"temperature": temperature, "runs": some} for temperature, some in runs.items()]
    measuring.keep("drafts", {"passes": passes, "runs": by_temperature})


if __name__ == "__main__":
    start(main)
