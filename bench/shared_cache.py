"""Measures a pass over 16 tokens in a cache that many sequences share: what scattered cells cost.

The variants, each in a context of its own, all before the pass with --context tokens in each sequence:

- one: 16 tokens of one sequence;
- beside: one token of each of 16 sequences, whose cells lie one sequence after the other;
- scattered: the same, but the cells of the sequences alternate, so that none has two neighbours;
- shared: the same, but the sequences begin with the same --context tokens, which share their cells.

Each round times every variant once, in an order that shifts from round to round. Medians, with quartiles as
spread, and the median of the ratios to `one`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from edgespec.apps.bench.runs import rotated
from edgespec.engine.model_choice import choose_models
from edgespec.llama.backend import llama
from edgespec.llama.kv_cache import create_context
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, in_child, parser, require_kernels, spread, start

N_TOKENS = 16
N_BATCH = 512

Place = tuple[int, int]
"""(sequence, position) of a token."""


class Cache:
    """A context whose one cache 16 sequences share."""

    def __init__(self, model: Model, n_cells: int, n_threads: int) -> None:
        self._n_vocab = model.n_vocab
        self.context = create_context(
            model,
            n_ctx=n_cells,
            n_threads=n_threads,
            n_batch=N_BATCH,
            n_logits_max=N_TOKENS,
            n_sequences=N_TOKENS,
        )
        self.memory = llama.llama_get_memory(self.context)
        self._batch = llama.llama_batch_init(N_BATCH, 0, 1)

    def read(self, places: Iterable[Place], *, logits: bool = False) -> None:
        """Compute tokens, in parts of N_BATCH."""
        places = list(places)
        for begin in range(0, len(places), N_BATCH):
            part = places[begin : begin + N_BATCH]
            self._batch.n_tokens = len(part)
            for i, (sequence, position) in enumerate(part):
                self._batch.token[i] = (101 + 7 * position + 13 * sequence) % self._n_vocab
                self._batch.pos[i], self._batch.n_seq_id[i], self._batch.logits[i] = position, 1, logits
                self._batch.seq_id[i][0] = sequence
            if code := llama.llama_decode(self.context, self._batch):
                raise SystemExit(f"llama.cpp failed with code {code}; is there memory for so many cells?")

    def close(self) -> None:
        """Free it."""
        llama.llama_batch_free(self._batch)
        llama.llama_free(self.context)


def fill(variant: str, cache: Cache, context: int) -> list[Place]:
    """Read what comes before the pass; return the places of its 16 tokens."""
    every = range(N_TOKENS)
    match variant:
        case "one":
            cache.read((0, position) for position in range(context))
            return [(0, context + i) for i in every]
        case "beside":
            cache.read((sequence, position) for sequence in every for position in range(context))
        case "scattered":
            cache.read((sequence, position) for position in range(context) for sequence in every)
        case "shared":
            cache.read((0, position) for position in range(context))
            for sequence in every[1:]:
                llama.llama_memory_seq_cp(cache.memory, 0, sequence, 0, context)
    return [(sequence, context) for sequence in every]


def measure(path: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each variant, round by round."""
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        model = stack.enter_context(Model(path))
        caches, passes = {}, {}
        for variant in ("one", "beside", "scattered", "shared"):
            n_sequences = N_TOKENS if variant in ("beside", "scattered") else 1
            cache = Cache(model, n_sequences * args.context + N_BATCH, args.threads)
            stack.callback(cache.close)
            caches[variant], passes[variant] = cache, fill(variant, cache, args.context)
        for turn in range(-1, args.rounds):  # the first round warms up
            for variant in rotated(list(caches), turn):
                began = time.perf_counter()
                caches[variant].read(passes[variant], logits=True)
                spent = time.perf_counter() - began
                if turn >= 0:
                    seconds.setdefault(variant, []).append(spent)
                for sequence in range(N_TOKENS):
                    llama.llama_memory_seq_rm(caches[variant].memory, sequence, args.context, -1)
    return seconds


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("model", nargs="?", help="path or name; default: the default pair's target")
    parse.add_argument("--context", type=int, default=1000, help="tokens of each sequence before the pass")
    parse.add_argument("--rounds", type=int, default=15)
    args = parse.parse_args()
    if args.context < 1 or args.rounds < 1:
        parse.error("--context and --rounds must be at least 1")
    require_kernels()
    path = resolve(args.model or choose_models(None, None)[0])
    measuring = Measuring(args)
    seconds = in_child(measure, path, args)
    measuring.end()
    print(f"{path.name}, {N_TOKENS} tokens after {args.context} of each sequence\n{measuring}")
    for variant, times in seconds.items():
        middle, low, high = (1e3 * x for x in spread(times))
        ratio = spread([a / b for a, b in zip(times, seconds["one"], strict=True)])[0]
        print(f"{variant:>10} {middle:8.1f} ms ({low:.1f} - {high:.1f})   {ratio:.2f} x one")
    result = {"model": path.name, "threads": args.threads, "context": args.context, "seconds": seconds}
    measuring.keep(f"shared-cache-{path.stem}", result)


if __name__ == "__main__":
    start(main)
