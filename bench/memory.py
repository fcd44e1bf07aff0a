"""Measures memory with stock kernels and with edgespec's: one generation in a fresh process each.

The peak is the process's largest resident memory (VmHWM), mapped model files included. The other figures
are resident after the generation: anonymous memory (packed weights, caches, buffers) and file pages
(mapped weights, which the system can take back).
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from edgespec import Engine, SamplingParams
from edgespec.decoding.choices import DrafterName
from edgespec.llama.choices import KernelsChoice
from script import Measuring, in_child, parser, require_kernels, spread, start

PROMPT = "Write a quicksort in Python."
GIB = 1 << 30


def generate(args: argparse.Namespace, kernels: KernelsChoice) -> dict[str, float]:
    """Load the models, write, and return this process's memory."""
    began = time.perf_counter()
    drafter: DrafterName = "none" if args.plain else "model"
    with Engine(args.target, args.draft, drafter=drafter, n_threads=args.threads, kernels=kernels) as engine:
        loaded_s = time.perf_counter() - began
        params = SamplingParams(temperature=0)
        engine.generate(PROMPT, params=params, n_predict=args.n_predict)
        status = Path("/proc/self/status").read_text()
        model_bytes = engine.target.size_bytes + (engine.draft.size_bytes if engine.draft else 0)

    def of(name: str) -> float:
        found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else float("nan")

    return {
        "peak": of("VmHWM"),
        "anonymous": of("RssAnon"),
        "file": of("RssFile"),
        "load_s": loaded_s,
        "models": model_bytes,
    }


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--plain", action="store_true", help="load no draft")
    parse.add_argument("-n", "--n-predict", type=int, default=64)
    parse.add_argument("--rounds", type=int, default=3)
    args = parse.parse_args()
    require_kernels()

    measuring = Measuring(args)
    variants: dict[str, KernelsChoice] = {"stock": "off", "edgespec": "auto"}
    measured: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for _ in range(args.rounds):
        for variant, kernels in variants.items():
            measured[variant].append(in_child(generate, args, kernels))
    measuring.end()

    def middle(variant: str, figure: str) -> float:
        return spread([run[figure] for run in measured[variant]])[0]

    print(f"{args.target or 'the default pair'}{', no draft' if args.plain else ''}: ", end="")
    print(f"weights {middle('stock', 'models') / GIB:.2f} GiB in the files; medians of {args.rounds}")
    print(f"{measuring}\n")
    print(f"{'GiB':<12}{'peak':>8}{'x stock':>9}{'anonymous':>11}{'file pages':>12}{'load s':>9}")
    for variant in variants:
        print(
            f"{variant:<12}{middle(variant, 'peak') / GIB:>8.2f}"
            f"{middle(variant, 'peak') / middle('stock', 'peak'):>9.2f}"
            f"{middle(variant, 'anonymous') / GIB:>11.2f}{middle(variant, 'file') / GIB:>12.2f}"
            f"{middle(variant, 'load_s'):>9.2f}"
        )
    result = {"runs": measured}
    measuring.keep(f"memory{'-plain' if args.plain else ''}", result)


if __name__ == "__main__":
    start(main)
