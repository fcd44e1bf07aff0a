"""A draft with a cut vocabulary against the one it was cut from: passes, acceptance, tokens a second.

Two engines live in one process, each with the target and one of the drafts. Passes: T(n) of both drafts as
the engine runs them (embeddings and full rows included), after 128 tokens, one right after the other, round
by round. Generations: every round runs both drafts once on each prompt, in an order that shifts, with the
same seed; with the match rule both texts are the target's, so the same tokens are written. Ratios are taken
within a round and a prompt; medians, and quartiles as spread. Without --gamma the scheduler chooses each
draft's own length.

The cut draft is made before, for example with
    edgespec draft make qwen2.5-coder-0.5b-q4_0 --corpus TEXT --force --name cut
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

from edgespec import Engine, SamplingParams
from edgespec.drafting.model import DraftModel
from edgespec.llama.embeddings import Embeddings, read_cut
from edgespec.llama.session import Session
from edgespec.pair import choose_models
from edgespec.suites import DEFAULT, load_suite
from machine import facts, other_load, save, spread

CONTEXT = 128
SIZES = (1, 2, 4)
FULL, CUT = "full", "cut"

Seconds = dict[int, dict[str, list[float]]]
"""n -> way -> seconds of a pass, round by round."""


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
    """Time passes over n tokens whose last row is wanted, as a drafter does."""
    found: Seconds = {n: {way: [] for way in engines} for n in SIZES}
    with ExitStack() as stack:
        drafts = {way: opened(engine, stack) for way, engine in engines.items()}
        ways = list(drafts)
        for turn in range(-2, rounds):  # the first two warm up
            for n in SIZES:
                for i in range(len(ways)):
                    way = ways[(i + turn) % len(ways)]
                    tokens = timeline(drafts[way].n_vocab, CONTEXT + n)
                    began = time.perf_counter()
                    drafts[way].run(tokens)
                    spent = time.perf_counter() - began
                    drafts[way].trim(CONTEXT)
                    if turn >= 0:
                        found[n][way].append(spent)
    return found


def generate(engines: dict[str, Engine], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both drafts on all prompts in turn; return a record of each generation."""
    runs = []
    ways = list(engines)
    suite = load_suite(args.suite).select(args.category, args.per_category)
    for temperature in args.temps:
        params = SamplingParams(temperature=temperature)
        for turn in range(-1, args.rounds):
            prompts = suite.prompts if turn >= 0 else suite.prompts[:1]  # the first round warms up
            for number, prompt in enumerate(prompts):
                for i in range(len(ways)):
                    way = ways[(i + turn + number) % len(ways)]
                    engine = engines[way]
                    engine.forget()
                    result = engine.generate(
                        prompt.text,
                        params=params,
                        seed=args.seed + max(0, turn),
                        n_predict=args.n_predict,
                        drafter=args.drafter,
                        gamma=args.gamma,
                        rule="match",
                    )
                    stats = result.stats
                    if turn >= 0:
                        runs.append(
                            {
                                "temperature": temperature,
                                "round": turn,
                                "category": prompt.category,
                                "prompt": prompt.id,
                                "way": way,
                                "tokens": len(result.token_ids),
                                "text": hash(result.token_ids),
                                "total_s": stats.total_s,
                                "tau": stats.tau,
                                "alpha": stats.alpha,
                                "drafted": stats.n_drafted,
                                "accepted": stats.n_accepted,
                            }
                        )
    return runs


def compared(runs: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the runs of full and cut that belong together."""
    pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for run in runs:
        pairs.setdefault((run["temperature"], run["round"], run["prompt"]), {})[run["way"]] = run
    return [(ways[FULL], ways[CUT]) for ways in pairs.values()]


def ratio(pair: tuple[dict[str, Any], dict[str, Any]]) -> float:
    """Return how much faster the cut draft made a generation, in tokens a second."""
    full, cut = pair
    return float(cut["tokens"] / cut["total_s"] / (full["tokens"] / full["total_s"]))


def alpha(runs: list[dict[str, Any]]) -> float:
    """Return the share of tested tokens that were accepted, over all runs."""
    tested = sum(run["accepted"] / run["alpha"] for run in runs if run["alpha"])
    return float(sum(run["accepted"] for run in runs) / max(1.0, tested))


def report(passes: Seconds, runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the tables."""
    print(f"draft passes after {CONTEXT} tokens, ms (quartiles)")
    print(f"{'n':>3}{FULL:>26}{CUT:>26}{'cut / full':>22}")
    for n, ways in passes.items():
        cells = [[1e3 * x for x in spread(ways[way])] for way in (FULL, CUT)]
        ratios = spread([cut / full for full, cut in zip(ways[FULL], ways[CUT], strict=True)])
        columns = [f"{a:.2f} ({b:.2f} - {c:.2f})" for a, b, c in cells]
        print(f"{n:>3}{columns[0]:>26}{columns[1]:>26}{'{:.3f} ({:.3f} - {:.3f})'.format(*ratios):>22}")
    for temperature in args.temps:
        pairs = [pair for pair in compared(runs) if pair[0]["temperature"] == temperature]
        print(f"\ntemperature {temperature:g}: tokens a second, cut over full (quartiles)")
        categories: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for pair in pairs:
            categories.setdefault(pair[0]["category"], []).append(pair)
        medians = []
        for name, members in [*categories.items(), ("all", pairs)]:
            middle, low, high = spread([ratio(pair) for pair in members])
            if name != "all":
                medians.append(middle)
            sides = [alpha([pair[i] for pair in members]) for i in (0, 1)]
            print(
                f"{name:<14}{middle:.3f} ({low:.3f} - {high:.3f})   alpha {sides[0]:.3f} full, "
                f"{sides[1]:.3f} cut ({sides[1] - sides[0]:+.3f})"
            )
        mean = math.exp(statistics.fmean(math.log(x) for x in medians))
        print(f"geometric mean over the categories: {mean:.3f}")
        odd = sum(pair[0]["text"] != pair[1]["text"] for pair in pairs)
        if odd:
            print(f"{odd} of {len(pairs)} texts differ (near-ties of stock kernels)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cut", help="the cut draft, by its name or path")
    parser.add_argument("--target")
    parser.add_argument("--full", help="the draft it was cut from; default: the default pair's")
    parser.add_argument("--suite", default=DEFAULT)
    parser.add_argument("--category", action="append")
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--drafter", choices=("model", "auto", "staged"), default="model")
    parser.add_argument("--gamma", type=int, help="default: the scheduler's choice")
    parser.add_argument(
        "--temps", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.8]
    )
    parser.add_argument("-n", "--n-predict", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pass-rounds", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the raw figures too, as JSON")
    parser.add_argument("--save", action="store_true", help="write bench/results/drafts-...json")
    args = parser.parse_args()

    target, full = choose_models(args.target, args.full)
    loads = [other_load()]
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(Engine(target, draft, profile=True))
            for way, draft in ((FULL, full), (CUT, args.cut))
        }
        cut = engines[CUT].draft
        if cut is None or read_cut(cut.header) is None:
            parser.error(f"{args.cut}: not a cut draft; make one with `edgespec draft make`")
        passes = time_passes(engines, args.pass_rounds)
        runs = generate(engines, args)
    loads.append(other_load())
    machine = facts(loads)
    print(f"{target}, drafted by {full} and by {args.cut}; {machine['processor']}, {machine['kernels']}\n")
    report(passes, runs, args)
    outcome = {"machine": machine, "command": sys.argv, "passes": passes, "runs": runs}
    if args.json:
        print(json.dumps(outcome, indent=1))
    if args.save:
        save("drafts", outcome, loads)


if __name__ == "__main__":
    main()
