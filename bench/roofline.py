"""Measures how near the kernels come to the machine's limit, and which share of a pass is not products.

A product of n tokens with a matrix in memory cannot be faster than the limit

    max(bytes / bandwidth, products / peak)

bandwidth: bytes a second of reading alone, all threads, with the best way of fetching ahead;
peak: multiply-adds a second of the instruction set's dot product, from registers, all threads.

For each type of weights and n, the time of the kernel alone over a matrix much larger than the caches, and
which share of the limit it reaches. Then T(n), a pass of a real target over n tokens, beside the bare
products with all its matrices. The rest of T(n) is not products: quantization of activations, attention,
norms, threads that wait for each other, llama.cpp.

Everything is timed once a round, one after another, so that drift affects all alike. Shares are taken
within a round; medians, with quartiles as spread.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgespec.engine.model_choice import choose_models
from edgespec.llama import kernels
from edgespec.llama.kernel_timing import MatrixShape, Prefetch, WeightStream, beyond_caches
from edgespec.llama.packed_file import PackedTensor
from edgespec.llama.selftest_child import PREFETCHES
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, numbers, parser, require_kernels, spread, start

TYPES = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
    "q2_K": 10, "q3_K": 11, "q4_K": 12, "q5_K": 13, "q6_K": 14, "iq4_xs": 23,
    "tq1_0": 34, "tq2_0": 35, "nvfp4": 40, "q1_0": 41, "q2_0": 42,
    "iq1_s": 19, "iq1_m": 29, "iq2_xxs": 16, "iq2_xs": 17, "iq2_s": 22, "iq3_xxs": 18, "iq3_s": 21,
}  # fmt: skip
"""ggml's numbers of the types that can be packed."""

READS = (*PREFETCHES, Prefetch(1, 0))
"""Variants to read memory: the candidates for products, and with nothing fetched ahead."""

COLUMNS = 1536
MATRIX_BYTES = 96 << 20
_PEAK_ROUNDS = 200_000  # some milliseconds


class Times:
    """The raw times of all rounds."""

    def __init__(self) -> None:
        self.reads: dict[Prefetch, list[float]] = {}
        """Bytes a second."""
        self.peak: list[float] = []
        """Multiply-adds a second."""
        self.products: dict[tuple[str, int], list[float]] = {}
        """(type, n) -> seconds of the products with a matrix."""
        self.passes: dict[int, list[float]] = {}
        self.bare: dict[int, list[float]] = {}
        """n -> seconds of T(n), and of the bare products with the target's matrices."""

    def bandwidth(self) -> float:
        """Return the best variant's median."""
        return max(spread(values)[0] for values in self.reads.values())


def limit(size: int, n_products: int, bandwidth: float, peak: float) -> tuple[float, str]:
    """Return the least seconds that a product can take, and what limits it."""
    reading, multiplying = size / bandwidth, n_products / peak
    return max(reading, multiplying), "memory" if reading >= multiplying else "arithmetic"


def shapes_of(packed: tuple[PackedTensor, ...]) -> list[MatrixShape]:
    """Return the matrices that a pass multiplies with."""
    return [MatrixShape(TYPES[tensor.type], tensor.rows, tensor.columns) for tensor in packed]


def matrix(stream: WeightStream, type_: str) -> MatrixShape:
    """Return a matrix of about MATRIX_BYTES."""
    row = stream.packed_bytes(MatrixShape(TYPES[type_], 16, COLUMNS)) / 16
    return MatrixShape(TYPES[type_], int(MATRIX_BYTES / row) // 16 * 16, COLUMNS)


def measure(stream: WeightStream, session: Session, prefetch: Prefetch, args: argparse.Namespace) -> Times:
    """Time everything, round by round; the first round warms up."""
    times = Times()
    n_vocab, threads = session.model.n_vocab, args.threads
    matrices = {type_: matrix(stream, type_) for type_ in args.types}
    shapes = shapes_of(session.model.packed)
    session.eval([(101 + 7 * i) % n_vocab for i in range(args.context)], n_logits=0)
    for turn in range(-1, args.rounds):
        if turn == 0:
            times = Times()
        for variant in READS:
            size = MATRIX_BYTES // (128 << 10) * (128 << 10)
            times.reads.setdefault(variant, []).append(size / stream.read(size, variant, threads))
        times.peak.append(stream.peak(_PEAK_ROUNDS, threads))
        for type_, shape in matrices.items():
            for n in args.sizes:
                seconds = stream.products([shape], n, prefetch, threads)
                times.products.setdefault((type_, n), []).append(seconds)
        for n in args.sizes:
            tokens = [(11 + 13 * (turn + j)) % n_vocab for j in range(n)]
            began = time.perf_counter()
            session.eval(tokens, n_logits=n)
            times.passes.setdefault(n, []).append(time.perf_counter() - began)
            session.rewind(args.context)
            times.bare.setdefault(n, []).append(stream.products(shapes, n, prefetch, threads))
    return times


def report(times: Times, stream: WeightStream, session: Session, args: argparse.Namespace) -> None:
    """Print the limits and the tables."""
    bandwidth, peak = times.bandwidth(), spread(times.peak)[0]
    for variant, values in times.reads.items():
        middle, low, high = (value / 1e9 for value in spread(values))
        rate = f"{middle:.1f} GB/s ({low:.1f} - {high:.1f})"
        print(f"reading, {variant.bytes:>5} bytes ahead into level {variant.level}: {rate}")
    middle, low, high = (value / 1e9 for value in spread(times.peak))
    print(f"register peak: {middle:.0f} G multiply-adds a second ({low:.0f} - {high:.0f})")
    print(f"\n{'type':<7}{'n':>3}{'ms (quartiles)':>26}{'GB/s':>7}{'G/s':>7}{'of limit':>10}")
    for (type_, n), seconds in times.products.items():
        shape = matrix(stream, type_)
        size, work = stream.packed_bytes(shape), shape.rows * shape.columns * n
        least, bound = limit(size, work, bandwidth, peak)
        middle, low, high = (1e3 * value for value in spread(seconds))
        shown = f"{middle:.2f} ({low:.2f} - {high:.2f})"
        rates = f"{size / middle / 1e6:>7.1f}{work / middle / 1e6:>7.0f}"
        print(f"{type_:<7}{n:>3}{shown:>26}{rates}{1e3 * least / middle:>10.0%} {bound}")
    shapes = shapes_of(session.model.packed)
    size, weights = sum(map(stream.packed_bytes, shapes)), sum(shape.rows * shape.columns for shape in shapes)
    print(f"\n{session.model.path.name}, context {args.context}")
    print(f"{'n':>3}{'T(n) ms (quartiles)':>26}{'products':>10}{'not products':>24}{'products of limit':>19}")
    for n, seconds in times.passes.items():
        least, bound = limit(size, weights * n, bandwidth, peak)
        middle, low, high = (1e3 * value for value in spread(seconds))
        bare = spread(times.bare[n])[0]
        rest = spread([1 - a / b for a, b in zip(times.bare[n], seconds, strict=True)])
        shown = f"{middle:.2f} ({low:.2f} - {high:.2f})"
        left = f"{rest[0]:.0%} ({rest[1]:.0%} - {rest[2]:.0%})"
        print(f"{n:>3}{shown:>26}{1e3 * bare:>10.2f}{left:>24}{least / bare:>19.0%} {bound}")


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("model", nargs="?", help="path or name; default: the default pair's target")
    parse.add_argument("--sizes", type=numbers(int), default=[1, 2, 4, 8, 16])
    parse.add_argument("--types", type=numbers(str), default=list(TYPES))
    parse.add_argument("--context", type=int, default=128, help="tokens before the pass")
    parse.add_argument("--rounds", type=int, default=15)
    args = parse.parse_args()
    if min(args.sizes) < 1 or args.context < 1 or args.rounds < 1 or args.threads < 1:
        parse.error("--sizes, --context, --rounds and --threads must be at least 1")
    if unknown := set(args.types) - set(TYPES):
        parse.error(f"--types: no {', '.join(sorted(unknown))}; there are {', '.join(TYPES)}")
    require_kernels()
    loaded = kernels.load()
    assert loaded.plugin and loaded.self_test
    path = resolve(args.model or choose_models(None, None)[0])
    prefetch = loaded.self_test.choice.prefetch
    measuring = Measuring(args)
    with ExitStack() as stack:
        model = stack.enter_context(Model(path))
        if not model.packed:
            raise SystemExit(f"{path.name}: edgespec's kernels take none of its weights")
        session = stack.enter_context(
            Session(
                model,
                n_ctx=args.context + max(args.sizes),
                n_threads=args.threads,
                n_logits_max=max(args.sizes),
            )
        )
        largest = max(tensor.bytes for tensor in model.packed)
        size = max(2 * MATRIX_BYTES, beyond_caches(), largest + MATRIX_BYTES)
        stream = stack.enter_context(WeightStream(loaded.plugin.path, loaded.plugin.isa, size))
        times = measure(stream, session, prefetch, args)
        measuring.end()
        report(times, stream, session, args)
    print(f"\n{measuring}")
    print(f"weights fetched {prefetch.bytes} bytes ahead into level {prefetch.level}")
    result: dict[str, Any] = {
        "model": Path(path).name,
        "threads": args.threads,
        "context": args.context,
        "prefetch": {"level": prefetch.level, "bytes": prefetch.bytes},
        "bytes a second": [
            {"level": variant.level, "bytes": variant.bytes, "read": values}
            for variant, values in times.reads.items()
        ],
        "multiply-adds a second": times.peak,
        "seconds": [
            {"type": type_, "n": n, "columns": COLUMNS, "products": values}
            for (type_, n), values in times.products.items()
        ],
        "passes": [{"n": n, "pass": values, "products": times.bare[n]} for n, values in times.passes.items()],
    }
    measuring.store(f"roofline-{path.stem}", result)


if __name__ == "__main__":
    start(main)
