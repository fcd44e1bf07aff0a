"""Measures what it costs that edgespec's kernels leave the hidden states of several layers.

T(n) with all logits at a context of 128 tokens, and a prompt of 512, of the same context: without, with the
states of `--layers` (the residual after a layer, from 0; -1: after the last norm) of all tokens. Every round
times each length both ways, one right after the other, in an order that shifts. Printed: the median of the
ratios within a round, with its quartiles, and the median times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from edgespec.decoding.session import SequenceTokens
from edgespec.engine.model_choice import choose_models
from edgespec.llama.hidden_states import of_kernels
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, numbers, parser, start

CONTEXT, PROMPT = 128, 512


@dataclass(frozen=True)
class TimedPass:
    """One pass."""

    n_tokens: int
    with_states: bool
    round: int
    seconds: float


def measure(model: Model, lengths: list[int], rounds: int, n_threads: int) -> list[TimedPass]:
    """Time passes over each length, without and with hidden states."""
    tokens = np.random.default_rng(1).integers(0, 1000, CONTEXT + PROMPT).tolist()
    size = KVCacheSize(n_ctx=CONTEXT + PROMPT, n_logits_max=max(64, *lengths))
    runs = []
    with KVCache(model, size, n_threads=n_threads) as cache:
        sequence = cache.take()
        for turn in range(-1, rounds):  # the first one warms up
            for place, n in enumerate([*lengths, PROMPT]):
                for with_states in (False, True) if (turn + place) % 2 else (True, False):
                    n_past = 0 if n == PROMPT else CONTEXT
                    if cache.n_past(sequence) < n_past:
                        cache.cut(sequence, 0)
                        cache.forward([SequenceTokens(sequence, tokens[:n_past])])
                    cache.cut(sequence, n_past)
                    n_logits = 1 if n == PROMPT else n
                    part = SequenceTokens(
                        sequence, tokens[n_past : n_past + n], n_logits, with_features=with_states
                    )
                    started = time.perf_counter()
                    cache.forward([part])
                    if turn >= 0:
                        runs.append(TimedPass(n, with_states, turn, time.perf_counter() - started))
    return runs


def report(runs: list[TimedPass]) -> None:
    """Print a line for each length."""
    found: dict[int, dict[tuple[int, bool], float]] = defaultdict(dict)
    for one in runs:
        found[one.n_tokens][one.round, one.with_states] = one.seconds
    print(f"{'tokens':>8}{'without, ms':>14}{'with, ms':>12}{'more, %':>10}{'quartiles':>20}")
    for n, times in found.items():
        rounds = sorted({turn for turn, _ in times})
        more = [100.0 * (times[turn, True] / times[turn, False] - 1.0) for turn in rounds]
        low, middle, high = statistics.quantiles(more, n=4)
        plain, kept = (1e3 * statistics.median(times[turn, way] for turn in rounds) for way in (False, True))
        print(f"{n:>8}{plain:>14.2f}{kept:>12.2f}{middle:>10.2f}{f'{low:.2f} to {high:.2f}':>20}")


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--layers", type=numbers(int), default=[14, 20, 25], metavar="N,N")
    parse.add_argument("--lengths", type=numbers(int), default=[1, 4, 8, 16], metavar="N,N")
    parse.add_argument("--rounds", type=int, default=15)
    args: argparse.Namespace = parse.parse_args()
    measuring = Measuring(args)
    with Model(resolve(args.target or choose_models(None, None, "none")[0])) as model:
        model.hidden_states = of_kernels(args.layers, model.header.n_layer - model.header.n_mtp)
        runs = measure(model, args.lengths, args.rounds, args.threads)
    measuring.end()
    print(f"{measuring}; states of layers {args.layers}")
    report(runs)
    measuring.keep("hidden-states", {"layers": args.layers, "runs": runs})


if __name__ == "__main__":
    start(main)
