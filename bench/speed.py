"""Plain decoding against speculation on the same prompts, interleaved: tokens a second and their ratio.

Every round runs each setting once on each prompt, in an order that shifts from round to round, so
that a machine that drifts does so for all. Time is the whole generation, the prompt's reading by both
models included. The ratio is taken within a round and prompt; medians, and quartiles as spread.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edgespec import Engine, SamplingParams
from machine import facts, other_load, save, spread

PROMPTS = {
    "code": "Write a quicksort in Python.",
    "explain": "Explain to a child why the sky is blue.",
    "math": "What is 17 * 23? Show every step of the calculation.",
    "translate": "Translate into French: The train leaves at seven, but the station is far from here.",
}


def spec_bench(path: Path, per_category: int) -> dict[str, str]:
    """Return the first prompts of each category of a file in Spec-Bench's format."""
    chosen: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        n = sum(name.startswith(f"{question['category']}/") for name in chosen)
        if n < per_category:
            chosen[f"{question['category']}/{n}"] = question["turns"][0]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument(
        "--prompts", type=Path, help="a file in Spec-Bench's format; default: four of our own"
    )
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--gammas", default="2,3,4,8", help="draft lengths to compare with plain decoding")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("-n", "--n-predict", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the raw runs too, as JSON")
    parser.add_argument("--save", action="store_true", help="write bench/results/speed-MACHINE.json")
    args = parser.parse_args()

    prompts = spec_bench(args.prompts, args.per_category) if args.prompts else PROMPTS
    gammas = [0, *map(int, args.gammas.split(","))]
    params = SamplingParams(temperature=args.temp)
    runs: list[dict[str, object]] = []
    rates: dict[tuple[int, str, int], float] = {}  # (round, prompt, gamma) -> tokens a second
    alphas: dict[int, list[float]] = {gamma: [] for gamma in gammas}
    loads = [other_load()]
    with Engine(args.target, args.draft) as engine:
        engine.generate("Warm up.", n_predict=16)
        engine.generate("Warm up.", n_predict=16, gamma=0)
        for turn in range(args.rounds):
            for name, prompt in prompts.items():
                for i in range(len(gammas)):
                    gamma = gammas[(i + turn) % len(gammas)]
                    result = engine.generate(
                        prompt, params=params, n_predict=args.n_predict, gamma=gamma, seed=turn
                    )
                    rates[turn, name, gamma] = len(result.token_ids) / result.stats.total_s
                    if result.stats.alpha is not None:
                        alphas[gamma].append(result.stats.alpha)
                    runs.append(
                        {
                            "round": turn,
                            "prompt": name,
                            "gamma": gamma,
                            "tokens": len(result.token_ids),
                            "total_s": result.stats.total_s,
                            "tau": result.stats.tau,
                            "alpha": result.stats.alpha,
                            "time_shares": result.stats.time_shares,
                        }
                    )
                    print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        models = {"target": engine.target_name, "draft": engine.draft_name}
        n_threads = engine.n_threads

    loads.append(other_load())
    machine = facts(loads)

    print(f"{models['target']} drafted by {models['draft']}, {n_threads} threads, temperature {args.temp}")
    print(f"{machine['processor']}; {machine['libraries']}; other load {machine['other load']}")
    print(f"{len(prompts)} prompts, {args.n_predict} tokens, {args.rounds} rounds, interleaved\n")
    print("gamma   tokens/s (quartiles)      ratio to plain (quartiles)   alpha")
    for gamma in gammas:
        keys = [(turn, name) for turn in range(args.rounds) for name in prompts]
        rate, low, high = spread([rates[turn, name, gamma] for turn, name in keys])
        ratio = spread([rates[turn, name, gamma] / rates[turn, name, 0] for turn, name in keys])
        alpha = f"{spread(alphas[gamma])[0]:.2f}" if alphas[gamma] else "-"
        label = "plain" if gamma == 0 else str(gamma)
        print(
            f"{label:>5}   {rate:6.1f} ({low:.1f} - {high:.1f})".ljust(34)
            + f"{ratio[0]:.2f} ({ratio[1]:.2f} - {ratio[2]:.2f})".ljust(29)
            + alpha
        )
    for name in prompts:
        best = max(gammas[1:], key=lambda g: spread([rates[t, name, g] for t in range(args.rounds)])[0])
        ratio = spread([rates[t, name, best] / rates[t, name, 0] for t in range(args.rounds)])
        print(f"{name}: best gamma {best}, {ratio[0]:.2f} of plain")
    outcome = {"machine": machine, **models, "temperature": args.temp, "runs": runs}
    if args.json:
        print(json.dumps(outcome, indent=1))
    if args.save:
        save(f"speed-temp{args.temp:g}", outcome, loads)


if __name__ == "__main__":
    main()
