"""What checking n tokens costs: T(n), one pass of the target over n tokens with all their logits.

Every round times each n once, in an order that shifts from round to round, at one context length.
T(n) decides whether speculation can pay: the papers assume T(n) = T(1), a CPU does not.
"""

from __future__ import annotations

import argparse
import json
import time

from edgespec.engine import choose_models, default_threads
from edgespec.pull import resolve
from edgespec.session import Session
from edgespec.weights import Model
from machine import facts, other_load, save, spread


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="path or name; default: the default pair's target")
    parser.add_argument("--sizes", default="1,2,3,4,6,8,12,16")
    parser.add_argument("--context", type=int, default=128, help="tokens before the pass")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", action="store_true", help="print the raw times too, as JSON")
    parser.add_argument("--save", action="store_true", help="write bench/results/verify-cost-...json")
    args = parser.parse_args()

    sizes = sorted({1, *map(int, args.sizes.split(","))})
    loads = [other_load()]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    path = resolve(args.model or choose_models(None, None)[0])
    with (
        Model(path) as model,
        Session(model, n_ctx=args.context + max(sizes), n_threads=args.threads) as session,
    ):
        session.eval([(101 + 7 * i) % model.n_vocab for i in range(args.context)], n_logits=0)
        for turn in range(-1, args.rounds):  # the first round warms up
            for i in range(len(sizes)):
                size = sizes[(i + turn) % len(sizes)]
                tokens = [(11 + 13 * (turn + j)) % model.n_vocab for j in range(size)]
                began = time.perf_counter()
                session.eval(tokens, n_logits=size)
                if turn >= 0:
                    seconds[size].append(time.perf_counter() - began)
                session.rewind(args.context)
    loads.append(other_load())
    machine = facts(loads)

    print(f"{path.name}, context {args.context}, {args.threads} threads, {args.rounds} rounds")
    print(f"{machine['processor']}; {machine['libraries']}; other load {machine['other load']}\n")
    print("  n   T(n) ms (quartiles)       T(n)/T(1)")
    first = spread(seconds[1])[0]
    for size in sizes:
        middle, low, high = (1e3 * x for x in spread(seconds[size]))
        print(f"{size:>3}   {middle:.1f} ({low:.1f} - {high:.1f})".ljust(32) + f"{middle / 1e3 / first:.2f}")
    outcome = {
        "machine": machine,
        "model": path.name,
        "context": args.context,
        "threads": args.threads,
        "seconds": seconds,
    }
    if args.json:
        print(json.dumps(outcome, indent=1))
    if args.save:
        save(f"verify-cost-{path.stem}-{args.context}", outcome, loads)


if __name__ == "__main__":
    main()
