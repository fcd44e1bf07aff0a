"""Tokens a second, end to end: llama.cpp's stock kernels, edgespec's, plain and speculative, and peers.

Two engines live in one process, one with stock kernels and one with edgespec's; stock is loaded, and
its contexts made, before edgespec's kernels enter the process. Every round runs each way once on each
prompt, one right after the other, in an order that shifts from prompt to prompt and from round to round,
so that a machine that drifts does so for all. Ratios are taken within a round and prompt; then the
median over the rounds, the geometric mean over a category's prompts, and the geometric mean over the
categories, each counted alike.

Time is the whole generation, the prompt's reading by both models included. Peers (bench/peers.py says
how to get them) report decoding alone, so there is a second ratio of that: tokens after the first over
the time of the steps. Each of their runs is set against stock plain decoding of the same prompt in the
same round. The best gamma is chosen after the fact, from these very runs.

Prompts: four of our own, or --humaneval and --spec-bench (bench/prompts.py says where from).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import prompts as prompt_sets
from edgespec import Engine, SamplingParams
from edgespec.benchmark.peers import context_for, rendered
from edgespec.errors import EdgespecError
from machine import facts, other_load, require_kernels, save, spread
from peers import IkSpecBench, LlamaSpeculativeSimple, Peer, llama_bench

PROMPTS = {
    "code": ["Write a quicksort in Python."],
    "explain": ["Explain to a child why the sky is blue."],
    "math": ["What is 17 * 23? Show every step of the calculation."],
    "translate": ["Translate into French: The train leaves at seven, but the station is far from here."],
}
STOCK, OURS = "stock plain", "edgespec plain"
GOAL = 2.0
"""Issue 3: the geometric mean over HumanEval and Spec-Bench with the default pair, ratio to stock plain."""
FEWEST = 8
"""A prompt that some way answers with fewer tokens says nothing of speed and is left out."""


@dataclass(frozen=True)
class Run:
    """One generation."""

    round: int
    category: str
    prompt: int
    way: str
    tokens: int
    decode_tokens: int
    decode_s: float
    total_s: float | None = None
    """The whole; None for peers, that do not say it."""
    tau: float | None = None
    alpha: float | None = None


Rate = Callable[[Run], float | None]


def whole(run: Run) -> float | None:
    """Tokens a second of the whole generation."""
    return run.tokens / run.total_s if run.total_s else None


def decoding(run: Run) -> float | None:
    """Tokens a second after the prompt was read."""
    return run.decode_tokens / run.decode_s


class Table:
    """The runs by round, prompt and way, and the ratios between them."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = {(run.round, run.category, run.prompt, run.way): run for run in runs}
        places = dict.fromkeys((run.category, run.prompt) for run in self._runs.values())
        short = {(run.category, run.prompt) for run in self._runs.values() if run.tokens < FEWEST}
        self.left_out = [place for place in places if place in short]
        self.places = [place for place in places if place not in short]
        self.categories = list(dict.fromkeys(category for category, _ in self.places))
        self.ways = list(dict.fromkeys(run.way for run in self._runs.values()))

    def rates(self, way: str, rate: Rate) -> list[float]:
        """Return the tokens a second of every run of `way`."""
        runs = [r for r in self._runs.values() if r.way == way and (r.category, r.prompt) in self.places]
        return [value for value in map(rate, runs) if value is not None]

    def alphas(self, way: str) -> list[float]:
        """Return alpha of every run of `way`."""
        return [r.alpha for r in self._runs.values() if r.way == way and r.alpha is not None]

    def ratio(self, way: str, base: str, rate: Rate, category: str | None = None) -> float | None:
        """Return the ratio of `way` to `base` in one category, or over all; None where there is none."""
        if category is None:
            found = [self.ratio(way, base, rate, name) for name in self.categories]
            return None if None in found or not found else statistics.geometric_mean(filter(None, found))
        medians = []
        for place in self.places:
            if place[0] != category:
                continue
            rounds = {key[0] for key in self._runs if key[1:] == (*place, way)}
            values = []
            for turn in rounds:
                over, under = rate(self._runs[turn, *place, way]), rate(self._runs[turn, *place, base])
                if over and under:
                    values.append(over / under)
            if values:
                medians.append(statistics.median(values))
        return statistics.geometric_mean(medians) if medians else None


def measured(engine: Engine, tokens: list[int], options: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Generate once: what a Run wants to know, and the tokens."""
    result = engine.generate(tokens, **options)
    stats = result.stats
    return {
        "tokens": len(result.token_ids),
        "decode_tokens": len(result.token_ids) - 1,
        "decode_s": stats.draft_s + stats.verify_s + stats.rest_s,
        "total_s": stats.total_s,
        "tau": stats.tau,
        "alpha": stats.alpha,
    }, list(result.token_ids)


def warm_up(engine: Engine, longest: list[int], n_predict: int) -> None:
    """Make the contexts large enough for every prompt, and run both models once."""
    for gamma in (2, 0):
        stream = engine.stream(longest, n_predict=n_predict, drafter="model", gamma=gamma)
        for _, _ in zip(range(4), stream, strict=False):
            pass
        stream.close()


def report(table: Table, same: dict[str, tuple[int, int]], gammas: list[int]) -> None:
    """Print what the runs say."""

    def shown(value: float | None, width: int) -> str:
        return f"{'-' if value is None else f'{value:.2f}':>{width}}"

    print(f"\n{'':<28}{'tokens/s (quartiles)':>24}{'x stock':>9}{'x edgespec':>12}", end="")
    print(f"{'decoding alone: tokens/s':>28}{'x stock':>9}{'alpha':>8}  same text as plain")
    for way in table.ways:
        speeds = table.rates(way, whole)
        middle, low, high = spread(speeds) if speeds else (0.0, 0.0, 0.0)
        speed = f"{middle:.1f} ({low:.1f} - {high:.1f})" if speeds else "-"
        alphas = table.alphas(way)
        line = f"{way:<28}{speed:>24}{shown(table.ratio(way, STOCK, whole), 9)}"
        line += shown(table.ratio(way, OURS, whole), 12)
        line += f"{spread(table.rates(way, decoding))[0]:>28.1f}"
        line += shown(table.ratio(way, STOCK, decoding), 9) + shown(spread(alphas)[0] if alphas else None, 8)
        equal, n = same.get(way, (0, 0))
        print(line + (f"  {equal} of {n}" if n else ""))

    best_of = {name: f"edgespec gamma {name}" for name in gammas}

    def best(category: str | None) -> tuple[int, float, float]:
        found = {gamma: table.ratio(way, STOCK, whole, category) or 0.0 for gamma, way in best_of.items()}
        gamma = max(found, key=lambda name: found[name])
        return gamma, found[gamma], table.ratio(best_of[gamma], OURS, whole, category) or 0.0

    peers = [way for way in table.ways if table.ratio(way, STOCK, whole) is None]
    compared = [way for way in table.ways if way != STOCK]
    kinds = [("x stock plain, whole generation", [way for way in compared if way not in peers], whole)]
    if peers:
        kinds.append(("x stock plain, decoding alone", compared, decoding))
    for title, ways, rate in kinds:
        print(f"\n{title}")
        print("".join(f"  [{i}] {way}" for i, way in enumerate(ways, 1)))
        print(f"{'':<18}" + "".join(f"{f'[{i}]':>8}" for i in range(1, len(ways) + 1)))
        for category in (*table.categories, None):
            line = f"{category or 'geometric mean':<18}"
            line += "".join(shown(table.ratio(way, STOCK, rate, category), 8) for way in ways)
            if rate is whole:
                gamma, to_stock, to_ours = best(category)
                line += f"   best gamma {gamma}: {to_stock:.2f} of stock plain, "
                line += f"{to_ours:.2f} of edgespec plain"
            print(line)
    gamma, to_stock, _ = best(None)
    verdict = "met" if round(to_stock, 2) >= GOAL else "MISSED"
    print(f"\ngoal {verdict}: best fixed gamma ({gamma}) {to_stock:.2f} of stock plain, wanted {GOAL:.2f}")
    if table.left_out:
        print(f"left out, answered in fewer than {FEWEST} tokens: {table.left_out}")


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz")
    parser.add_argument("--n-humaneval", type=int, default=20, help="of its prompts, spread over all")
    parser.add_argument("--spec-bench", type=Path, metavar="FILE", help="a file in Spec-Bench's format")
    parser.add_argument("--per-category", type=int, default=4, help="of Spec-Bench's prompts")
    parser.add_argument("--limit", type=int, default=1000, help="most prompts of any category")
    parser.add_argument("--gamma", type=integers, default=[2, 3, 4, 6], help="draft lengths with edgespec")
    parser.add_argument("--stock-gamma", type=integers, default=[], help="draft lengths with stock kernels")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("-n", "--n-predict", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--llama-speculative-simple", type=Path, metavar="PROGRAM")
    parser.add_argument("--llama-bench", type=Path, metavar="PROGRAM")
    parser.add_argument("--ik", type=Path, metavar="PROGRAM", help="ik_llama.cpp's llama-spec-bench")
    parser.add_argument("--peer-gamma", type=integers, help="draft lengths with peers; default: as --gamma")
    parser.add_argument("--peer-rounds", type=int, default=1, help="rounds in which peers run")
    parser.add_argument(
        "--peer-timeout", type=float, default=1800.0, help="seconds for one process of a peer"
    )
    parser.add_argument("--json", action="store_true", help="print the raw runs too, as JSON")
    parser.add_argument("--save", action="store_true", help="write bench/results/speed-...json")
    args = parser.parse_args()
    numbers = (args.n_humaneval, args.per_category, args.limit, args.rounds, *args.gamma, *args.stock_gamma)
    if min(numbers) < 1 or args.n_predict < FEWEST:
        parser.error(f"numbers must be at least 1, --n-predict at least {FEWEST}")
    if args.temp and (args.llama_speculative_simple or args.ik):
        parser.error("peers run greedily only: leave out --temp")
    return args


def main() -> None:
    args = arguments()
    prompts: dict[str, list[str]] = {}
    if args.humaneval:
        prompts |= prompt_sets.humaneval(args.humaneval, args.n_humaneval)
    if args.spec_bench:
        prompts |= prompt_sets.spec_bench(args.spec_bench, args.per_category)
    prompts = {category: texts[: args.limit] for category, texts in (prompts or PROMPTS).items()}
    params = SamplingParams(temperature=args.temp)
    loads = [other_load()]
    runs: list[Run] = []
    texts: dict[tuple[str, str, int], list[int]] = {}
    benches: list[dict[str, float]] = []
    with Engine(args.target, args.draft, n_threads=args.threads, kernels="off") as stock:
        tokens = {
            (category, number): stock.prompt_tokens(prompt)
            for category, some in prompts.items()
            for number, prompt in enumerate(some)
        }
        longest = max(tokens.values(), key=len)
        warm_up(stock, longest, args.n_predict)
        require_kernels()
        with Engine(args.target, args.draft, n_threads=args.threads) as ours:
            warm_up(ours, longest, args.n_predict)
            ways = {STOCK: (stock, 0), OURS: (ours, 0)}
            ways |= {f"stock gamma {gamma}": (stock, gamma) for gamma in args.stock_gamma}
            ways |= {f"edgespec gamma {gamma}": (ours, gamma) for gamma in args.gamma}
            names = list(ways)
            peers = open_peers(args, stock, len(longest))
            for turn in range(args.rounds):
                for shift, ((category, number), prompt) in enumerate(tokens.items()):
                    for i in range(len(names)):
                        way = names[(i + turn + shift) % len(names)]
                        engine, gamma = ways[way]
                        options = {
                            "params": params,
                            "n_predict": args.n_predict,
                            "drafter": "model" if gamma else "none",
                            "gamma": gamma,
                            "seed": turn,
                        }
                        figures, ids = measured(engine, prompt, options)
                        runs.append(Run(turn, category, number, way, **figures))
                        texts[way, category, number] = ids
                    print(".", end="", file=sys.stderr, flush=True)
                    if turn < args.peer_rounds and number == len(prompts[category]) - 1:
                        asked = [rendered(stock, text) for text in prompts[category]]
                        runs += run_peers(peers, turn, category, asked, args.peer_gamma or args.gamma)
                if args.llama_bench and turn < args.peer_rounds:
                    try:
                        timeout = args.peer_timeout
                        bench = llama_bench(args.llama_bench, stock.target.path, stock.n_threads, timeout)
                        benches.append(bench)
                    except EdgespecError as error:
                        print(f"\nno llama-bench: {error}", file=sys.stderr)
            print(file=sys.stderr)
            models = {"target": ours.target_name, "draft": ours.draft_name}
            n_threads = ours.n_threads

    loads.append(other_load())
    machine = facts(loads)
    order = [*names, *(run.way for run in runs if run.way not in names)]
    table = Table(sorted(runs, key=lambda run: order.index(run.way)))
    same: dict[str, tuple[int, int]] = {}
    for way, (engine, gamma) in ways.items():
        if gamma and args.temp == 0:
            plain = OURS if engine is ours else STOCK
            equal = [texts[way, *place] == texts[plain, *place] for place in tokens]
            same[way] = sum(equal), len(equal)

    print(f"{models['target']} drafted by {models['draft']}, {n_threads} threads, temperature {args.temp}")
    print(f"{machine['processor']}, {machine['kernels']}; {machine['libraries']}")
    print(f"other load {machine['other load']}")
    print(f"{len(tokens)} prompts, {args.n_predict} tokens, {args.rounds} rounds, interleaved")
    report(table, same, args.gamma)
    for bench in benches:
        listed = ", ".join(f"{name} {speed:.1f}" for name, speed in bench.items())
        print(f"llama-bench of the same llama.cpp, tokens/s: {listed}")
    broken = [way for way, (equal, n) in same.items() if way.startswith("edgespec") and equal < n]
    if broken:
        print(f"NOT THE SAME TEXT as edgespec plain: {', '.join(broken)}")
    outcome = {
        "machine": machine,
        "command": sys.argv,
        **models,
        "temperature": args.temp,
        "prompt files": [prompt_sets.source(file) for file in (args.humaneval, args.spec_bench) if file],
        "same text as plain": same,
        "llama-bench": benches,
        "runs": [asdict(run) for run in runs],
    }
    if args.json:
        print(json.dumps(outcome, indent=1))
    if args.save:
        save(f"speed-temp{args.temp:g}", outcome, loads)


def open_peers(args: argparse.Namespace, engine: Engine, n_prompt: int) -> list[Peer]:
    """Return the peers whose programs were given."""
    kinds: list[tuple[type[Peer], Path | None]] = [
        (LlamaSpeculativeSimple, args.llama_speculative_simple),
        (IkSpecBench, args.ik),
    ]
    if engine.draft is None:
        return []
    n_ctx = context_for(n_prompt, args.n_predict)
    target, draft, n_threads = engine.target.path, engine.draft.path, engine.n_threads
    return [
        kind(program.absolute(), target, draft, n_threads, n_ctx, args.n_predict, args.peer_timeout)
        for kind, program in kinds
        if program
    ]


def run_peers(
    peers: list[Peer], turn: int, category: str, prompts: list[str], gammas: list[int]
) -> list[Run]:
    """Run each peer on the prompts of a category; one that fails is out from then on."""
    runs: list[Run] = []
    for peer in tuple(peers):
        try:
            for gamma in gammas:
                for number, done in enumerate(peer.decode(prompts, gamma)):
                    way = f"{peer.name} {gamma}"
                    figures = (done.tokens, done.tokens, done.decode_s)
                    runs.append(Run(turn, category, number, way, *figures))
        except EdgespecError as error:
            print(f"\nno {peer.name}: {error}", file=sys.stderr)
            peers.remove(peer)
    return runs


if __name__ == "__main__":
    main()
