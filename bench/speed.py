"""Tokens a second, end to end: llama.cpp's stock kernels, edgespec's, plain and speculative, and peers.

Two engines live in one process, one with stock kernels and one with edgespec's; stock is loaded, and
its contexts made, before edgespec's kernels enter the process. Every round runs each variant once on each
prompt, one right after the other, in an order that shifts from prompt to prompt and from round to round,
so that drift affects all alike. Ratios to stock plain decoding are taken within a round and prompt:
bench/ratios.py.

Time is that of the whole generation, including both models' reading of the prompt. Decoding alone (tokens
after the first over the time after the first) is printed too: ik_llama.cpp tells no more. The best gamma is
chosen afterwards from these same runs. The prompts: --suite (bench/prompts.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import prompts as prompt_sets
from edgespec import Engine
from edgespec.apps.bench.measure import BenchSettings, LlamaServer, generate, started_server, warm_up
from edgespec.apps.bench.runs import PLAIN_VARIANT, Run, Variant, parse_variants, rotated
from edgespec.apps.bench.suites import DEFAULT, OVERALL, Prompt
from edgespec.apps.bench.summary import compare
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError
from peers import IK, IkSpecBench, llama_bench
from ratios import Ratios, shown
from script import Measuring, numbers, parser, require_kernels, start

STOCK, OURS = "stock plain", "edgespec plain"
GOAL = 2.0
"""Issue 3: the geometric mean over HumanEval and Spec-Bench, 1.5B and 0.5B, ratio to stock plain."""
FEWEST = 8
"""A prompt is left out if some variant answers with fewer tokens, which say nothing about speed."""


def plain_of(variant: str) -> str:
    """Return the plain variant that must write the same text as `variant`."""
    return STOCK if variant.startswith("stock") else OURS


def report(runs: Sequence[Run], gammas: Sequence[int]) -> None:
    """Print what the runs say."""
    short = sorted({one.prompt for one in runs if one.tokens < FEWEST})
    ratios = Ratios([one for one in runs if one.prompt not in short])
    if not ratios.variants:
        raise SystemExit(f"nothing to compare: every prompt was answered in fewer than {FEWEST} tokens")
    variants = ratios.variants
    decoding_only = {variant for variant in variants if variant.startswith(IK)}
    print(f"\n{'':<28}{'tokens/s':>10}{'x stock':>9}{'x edgespec':>12}", end="")
    print(f"{'decoding alone: tokens/s':>28}{'x stock':>9}{'alpha':>8}  same text as plain")
    for variant in ratios.summaries[OVERALL].variants:
        name, whole = variant.variant, variant.variant not in decoding_only
        line = f"{name:<28}{shown(variant.whole_tokens_per_s if whole else None, 10)}"
        line += shown(ratios.ratio(name, STOCK) if whole else None, 9)
        line += shown(ratios.ratio(name, OURS) if whole else None, 12)
        line += shown(variant.decode_tokens_per_s, 28) + shown(ratios.ratio(name, STOCK, decoding=True), 9)
        found = compare(runs, name, plain_of(name))
        same = f"  {found.n_identical} of {found.n_compared}" if found.n_compared else ""
        print(line + shown(variant.alpha, 8) + same)

    best_of = {gamma: f"edgespec model-{gamma}" for gamma in gammas}

    def best(category: str) -> tuple[int, float]:
        found = {g: ratios.ratio(variant, STOCK, category) or 0.0 for g, variant in best_of.items()}
        gamma = max(found, key=lambda name: found[name])
        return gamma, found[gamma]

    compared = [variant for variant in variants if variant != STOCK]
    for title, some, decoding in (
        ("whole generation", [variant for variant in compared if variant not in decoding_only], False),
        ("decoding alone", compared, True),
    ):
        print(
            f"\nx stock plain, {title}" + "".join(f"  [{i}] {variant}" for i, variant in enumerate(some, 1))
        )
        print(f"{'':<18}" + "".join(f"{f'[{i}]':>8}" for i in range(1, len(some) + 1)))
        for category in (*ratios.categories, OVERALL):
            line = f"{'geometric mean' if category == OVERALL else category:<18}"
            line += "".join(
                shown(ratios.ratio(variant, STOCK, category, decoding=decoding), 8) for variant in some
            )
            print(line + ("" if decoding else f"   best gamma {best(category)[0]}"))
    gamma, to_stock = best(OVERALL)
    verdict = "met" if round(to_stock, 2) >= GOAL else "MISSED"
    print(f"\ngoal {verdict}: best fixed gamma ({gamma}) {to_stock:.2f} of stock plain, wanted {GOAL:.2f}")
    if short:
        print(f"left out, answered in fewer than {FEWEST} tokens: {short}")


@contextmanager
def open_peers(
    args: argparse.Namespace, engine: Engine, settings: BenchSettings, prompts: Sequence[Prompt]
) -> Iterator[list[LlamaServer | IkSpecBench]]:
    """Open the peers whose programs were given. Raises EdgespecError if llama-server cannot be started."""
    with ExitStack() as stack:
        peers: list[LlamaServer | IkSpecBench] = []
        if engine.draft and args.llama:
            os.environ["LLAMA_ARG_FLASH_ATTN"] = "off"  # its faster choice here
            drafts = (None, engine.draft.path)
            servers = (started_server(args.llama, engine, one, settings, prompts) for one in drafts)
            peers += map(stack.enter_context, servers)
        if engine.draft and args.ik:
            n_ctx = max(len(engine.prompt_tokens(prompt.text)) for prompt in prompts) + args.n_predict + 64
            peers.append(
                IkSpecBench(args.ik.absolute(), engine, settings, n_ctx, args.peer_gamma or args.gamma)
            )
        yield peers


def run_peers(peers: list[LlamaServer | IkSpecBench], prompt: Prompt, turn: int) -> list[Run]:
    """Run each peer on a prompt; a peer that fails is left out from then on."""
    runs: list[Run] = []
    for peer in tuple(peers):
        try:
            runs += peer.runs(prompt, turn)
        except EdgespecError as error:
            print(f"\nno {peer.name}: {error}", file=sys.stderr)
            peers.remove(peer)
    return runs


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    prompt_sets.add_options(parse, per_category=4)
    parse.add_argument("--gamma", type=numbers(int), default=[2, 3, 4, 6], help="with edgespec's kernels")
    parse.add_argument("--stock-gamma", type=numbers(int), default=[], help="with stock kernels")
    parse.add_argument("--temp", type=float, default=0.0)
    parse.add_argument("-n", "--n-predict", type=int, default=128)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's llama-server and llama-bench")
    parse.add_argument("--ik", type=Path, metavar="PROGRAM", help="ik_llama.cpp's llama-spec-bench")
    parse.add_argument("--peer-gamma", type=numbers(int), help="with ik_llama.cpp; default: as --gamma")
    parse.add_argument("--peer-rounds", type=int, default=1, help="rounds in which peers run")
    args = parse.parse_args()
    if min(args.rounds, *args.gamma, *args.stock_gamma) < 1 or args.n_predict < FEWEST:
        parse.error(f"numbers must be at least 1, --n-predict at least {FEWEST}")
    if args.temp and (args.llama or args.ik):
        parse.error("peers run greedily only: leave out --temp")
    args.suite = args.suite or [DEFAULT]
    return args


def fixed(gammas: Sequence[int]) -> tuple[Variant, ...]:
    return parse_variants(",".join(f"model-{gamma}" for gamma in gammas)) if gammas else ()


def main() -> None:
    args = arguments()
    suites = prompt_sets.chosen(args)
    prompts = prompt_sets.of_all(suites)
    of_stock, of_ours = (
        BenchSettings(fixed(gammas), args.n_predict, args.temp) for gammas in (args.stock_gamma, args.gamma)
    )
    measuring = Measuring(args)
    runs: list[Run] = []
    benches: list[dict[str, float]] = []
    names = choose_models(args.target, args.draft, writes=True)  # what peers can run too
    with Engine(*names, n_threads=args.threads, kernels="off") as stock:
        warm_up(stock, prompts, replace(of_stock, variants=fixed([2])))
        require_kernels()
        with (
            Engine(*names, n_threads=args.threads) as ours,
            open_peers(args, stock, of_ours, prompts) as peers,
        ):
            warm_up(ours, prompts, of_ours)
            variants = {STOCK: (stock, PLAIN_VARIANT), OURS: (ours, PLAIN_VARIANT)}
            variants |= {f"stock {variant.name}": (stock, variant) for variant in of_stock.variants}
            variants |= {f"edgespec {variant.name}": (ours, variant) for variant in of_ours.variants}
            for turn in range(args.rounds):
                for place, prompt in enumerate(prompts):
                    for name in rotated(list(variants), turn + place):
                        engine, variant = variants[name]
                        done = generate(engine, prompt, variant, of_ours, round_=turn)
                        runs.append(replace(done, variant=name))
                    if turn < args.peer_rounds:
                        runs += run_peers(peers, prompt, turn)
                    print(".", end="", file=sys.stderr, flush=True)
                if args.llama and turn < args.peer_rounds:
                    try:
                        benches.append(llama_bench(args.llama / "llama-bench", stock))
                    except EdgespecError as error:
                        print(f"\nno llama-bench: {error}", file=sys.stderr)
            print(file=sys.stderr)
            models = {"target": ours.target_name, "draft": ours.draft_name}
    measuring.end()
    order = [*variants, *(one.variant for one in runs if one.variant not in variants)]
    runs.sort(key=lambda one: order.index(one.variant))

    print(f"{models['target']} drafted by {models['draft']}, temperature {args.temp:g}; {measuring}")
    print(f"{len(prompts)} prompts, {args.n_predict} tokens, {args.rounds} rounds, interleaved")
    report(runs, args.gamma)
    for bench in benches:
        listed = ", ".join(f"{name} {speed:.1f}" for name, speed in bench.items())
        print(f"llama-bench of the same llama.cpp, tokens/s: {listed}")
    result = {
        **models,
        "temperature": args.temp,
        "suites": prompt_sets.sources(suites),
        "llama-bench": benches,
        "runs": runs,
    }
    measuring.store(f"speed-temp{args.temp:g}", result)


if __name__ == "__main__":
    start(main)
