"""Measures what checking n tokens costs: T(n), one pass of the target over n tokens with all their logits.

T(n) decides whether speculation can pay: the papers assume T(n) = T(1), and llama.cpp's stock kernels are
far from that. For each model file (in a process of its own) the variants are loaded side by side:

- stock: llama.cpp's own kernels with its run-time repacking, and without flash attention, as edgespec
  uses them. It is loaded, and its context made, before edgespec's kernels enter the process;
- stock-flash (--stock-flash): the same with flash attention, which is the faster choice for a prefill
  and the slower one at long contexts. The goals are then judged against the faster of the two;
- edgespec: the same file packed for edgespec's kernels, the default;
- earlier (--earlier edgespec_kernels.so): another build of edgespec's kernels, for before and after. Both
  plugins are in the process; each packs its own copy of the model.

Every round times each n once with each variant, one right after the other, in an order that shifts from
round to round, so that drift affects all alike. Ratios are taken within a round; medians, with quartiles
as spread. A prefill is 512 tokens into an empty context with the logits of the last one.

--random NAME,... measures models of random weights in the shapes of real ones (random_models.py), written to
a temporary directory and cut to --gigabytes, since the file and its packed copy are in memory at once. Beside
experts the limit is printed: the bytes that a pass has to read, by the experts that its tokens choose in that
very model, over those of one token's pass. --cache-type q8_0: caches of all variants in Q8_0; stock reads
them by its flash attention.

Other quantizations are made with `edgespec quantize`, for example
    edgespec quantize qwen2.5-coder-1.5b-q4_k_m --type q4_0,q8_0 -o DIRECTORY
    edgespec quantize qwen2.5-coder-0.5b-q4_k_m --type q8_0,q5_k_m -o DIRECTORY
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

from edgespec.apps.bench.runs import rotated
from edgespec.engine.model_choice import choose_models
from edgespec.llama import kernels
from edgespec.llama.backend import foreign_function, llama
from edgespec.llama.cache_types import with_cache_type
from edgespec.llama.choices import CacheType
from edgespec.llama.gguf_header import read_header
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from random_models import experts_limit, random_shape, write_random
from script import Measuring, in_child, numbers, parser, require_kernels, spread, start

PREFILL = 512
EMPTY = 0
"""The context length of a prefill."""

Cells = dict[tuple[int, int], dict[str, list[float]]]
"""(tokens before the pass, tokens in it) -> variant -> seconds, round by round."""


class Earlier:
    """Another build of edgespec's kernels, beside the installed one."""

    def __init__(self, path: Path) -> None:
        """Make it one of ggml's backends, on the same instruction set."""
        self._library = ctypes.CDLL(str(path.absolute()))
        self._library.es_kernels_n_packed.restype = ctypes.c_int64
        self._library.es_kernels_set_isa(kernels.load().name.encode())
        load = foreign_function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)
        if not load(os.fsencode(path.absolute())):
            raise SystemExit(f"{path}: does not fit this llama.cpp")
        self._library.es_kernels_enable(0)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Models loaded inside are packed by this build; load them with kernels=False."""
        before = self._library.es_kernels_n_packed()
        self._library.es_kernels_enable(1)
        try:
            yield
        finally:
            self._library.es_kernels_enable(0)
        if self._library.es_kernels_n_packed() == before:
            print("the earlier kernels packed none of the weights: their times are stock's", file=sys.stderr)


@contextmanager
def flash_attention() -> Iterator[None]:
    """Sessions on stock models opened inside have flash attention on."""
    make = llama.llama_init_from_model

    def with_flash_attention(model: Any, params: Any) -> Any:  # noqa: ANN401 - ctypes of llama_cpp
        params.flash_attn_type = 1
        return make(model, params)

    llama.llama_init_from_model = with_flash_attention
    try:
        yield
    finally:
        llama.llama_init_from_model = make


def measure(path: Path, args: argparse.Namespace) -> Cells:
    """Time all variants on one model file."""
    sizes, contexts = args.sizes, args.contexts
    cells: Cells = {}
    with ExitStack() as stack:

        def loaded(*, kernels: bool) -> Model:
            header = with_cache_type(read_header(path), args.cache_type)
            model = stack.enter_context(Model(path, kernels=kernels, header=header))
            if kernels and not model.uses_kernels:
                print(f"{path.name}: edgespec's kernels take none of its weights", file=sys.stderr)
            return model

        def opened(model: Model) -> Session:
            n_ctx = max(PREFILL, max(contexts) + max(sizes))
            session = Session(model, n_ctx=n_ctx, n_threads=args.threads, n_logits_max=max(sizes))
            return stack.enter_context(session)

        stock = loaded(kernels=False)
        sessions = {"stock": opened(stock)}
        if args.stock_flash:
            with flash_attention():
                sessions["stock-flash"] = opened(stock)
        sessions["edgespec"] = opened(loaded(kernels=True))
        if args.earlier:
            with Earlier(args.earlier).loading(), flash_attention():
                sessions["earlier"] = opened(loaded(kernels=False))
        variants = list(sessions)
        n_vocab = sessions["stock"].model.n_vocab

        def timed(cell: tuple[int, int], turn: int, restore: Callable[[Session], None]) -> None:
            context, size = cell
            tokens = [(11 + 13 * (turn + j)) % n_vocab for j in range(size)]
            for variant in rotated(variants, turn):
                began = time.perf_counter()
                sessions[variant].eval(tokens, n_logits=1 if context == EMPTY else size)
                spent = time.perf_counter() - began
                if turn >= 0:
                    cells.setdefault(cell, {}).setdefault(variant, []).append(spent)
                restore(sessions[variant])

        for turn in range(-1, args.prefill_rounds) if args.prefill_rounds else ():  # the first round warms up
            timed((EMPTY, PREFILL), turn, Session.clear)
        for context in contexts:
            for session in sessions.values():
                session.clear()
                session.eval([(101 + 7 * i) % n_vocab for i in range(context)], n_logits=0)
            for turn in range(-1, args.rounds):
                for size in rotated(sizes, turn):
                    timed((context, size), turn, lambda session, n=context: session.rewind(n))  # type: ignore[misc]
    return cells


def paired(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios within the rounds."""
    return spread([a / b for a, b in zip(over, under, strict=True)])[0]


def goals(
    cell: tuple[int, int], growth: float, gain: float, *, is_random: bool, has_experts: bool
) -> list[tuple[str, bool]]:
    """Return the goals of issues 3 and 21 for one cell and whether they are met, to two decimals."""
    context, size = cell
    growth, gain = round(growth, 2), round(gain, 2)
    found = []
    limit = {(128, 4): 1.10, (128, 8): 1.40, (2048, 8): 1.50}.get(cell)
    if is_random:
        limit = 1.15 if size == 4 else None
    if limit and not has_experts:
        found.append((f"T({size})/T(1) <= {limit:.2f}", growth <= limit))
    if size == 1:
        found.append(("T(1) no slower than stock", gain >= 1))
    if context == EMPTY and not is_random:
        found.append(("1.80x stock", gain >= 1.8))
    return found


def report(cells: Cells, limits: Mapping[int, tuple[float, float]], *, is_random: bool) -> None:
    """Print a table for each context; `limits`: of `experts_limit`, {} without experts."""
    for context in sorted({context for context, _ in cells}):
        rows = {size: variants for (at, size), variants in cells.items() if at == context}
        variants = list(rows[min(rows)])
        print(f"\n{'prefill, empty context' if context == EMPTY else f'context {context}'}")
        print(
            "  n " + "".join(f"{f'{variant} ms (quartiles)':>30}{'/T(1)':>7}" for variant in variants), end=""
        )
        print("".join(f"{f'x {variant}':>15}" for variant in variants if variant != "edgespec"), end="")
        print("   experts, limit of /T(1)" * bool(limits) + "   goal")
        for size, seconds in sorted(rows.items()):
            line = f"{size:>3} "
            first = rows[min(rows)]
            for variant in variants:
                middle, low, high = (1e3 * x for x in spread(seconds[variant]))
                growth = "" if context == EMPTY else f"{paired(seconds[variant], first[variant]):.2f}"
                line += f"{f'{middle:.1f} ({low:.1f} - {high:.1f})':>30}{growth:>7}"
            gains = {
                variant: paired(seconds[variant], seconds["edgespec"])
                for variant in variants
                if variant != "edgespec"
            }
            line += "".join(f"{gain:>15.2f}" for gain in gains.values())
            if size in limits:
                line += "   {:>7.1f} {:>15.2f}".format(*limits[size])
            verdicts = goals(
                (context, size),
                paired(seconds["edgespec"], first["edgespec"]),
                min(gain for variant, gain in gains.items() if variant.startswith("stock")),
                is_random=is_random,
                has_experts=bool(limits),
            )
            print(line + "   " + "; ".join(f"{'met' if met else 'MISSED'}: {goal}" for goal, met in verdicts))


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("models", nargs="*", help="paths or names; default: the default pair's target")
    parse.add_argument("--sizes", type=numbers(int), default=[1, 2, 3, 4, 6, 8, 12, 16])
    parse.add_argument("--contexts", type=numbers(int), default=[128, 2048], help="tokens before the pass")
    parse.add_argument("--stock-flash", action="store_true", help="measure stock with flash attention too")
    parse.add_argument("--earlier", type=Path, help="edgespec_kernels.so of another build")
    parse.add_argument("--random", type=numbers(str), default=[], help="names of random_models.py")
    parse.add_argument("--gigabytes", type=float, default=4.0, help="most of a random model's file")
    parse.add_argument("--cache-type", choices=get_args(CacheType), default="f16")
    parse.add_argument("--rounds", type=int, default=15)
    parse.add_argument("--prefill-rounds", type=int, default=5, help="0: none")
    args = parse.parse_args()

    args.sizes = sorted({1, *args.sizes})
    if min(args.sizes) < 1 or min(args.contexts) < 1 or args.rounds < 1 or args.prefill_rounds < 0:
        parse.error("--sizes, --contexts and --rounds must be at least 1, --prefill-rounds at least 0")
    if args.earlier and not args.earlier.exists():
        parse.error(f"no file {args.earlier}")
    require_kernels()
    for name in args.random:
        random_shape(name)  # an unknown one is refused before anything is measured
    named = args.models or ([] if args.random else [choose_models(None, None)[0]])
    measuring = Measuring(args)
    measured: dict[Path, Cells] = {}
    limits: dict[Path, dict[int, tuple[float, float]]] = {}

    def take(path: Path, *, is_random: bool) -> None:
        limits[path] = in_child(experts_limit, path, args.sizes, args.contexts[0])
        measured[path] = in_child(measure, path, args)
        name = read_header(path).name or path.name
        print(f"\n{name}, {args.threads} threads, {args.cache_type} cache, {args.rounds} rounds", end="")
        report(measured[path], limits[path], is_random=is_random)

    for model in named:
        take(resolve(model), is_random=False)
    for name in args.random:
        with tempfile.TemporaryDirectory(prefix="edgespec-random-") as directory:
            path = Path(directory) / f"random-{name}.gguf"
            take(write_random(name, path, most_bytes=int(args.gigabytes * 1e9)), is_random=True)
    measuring.end()
    print(f"\n{measuring}")
    for path, cells in measured.items():
        result = {
            "model": path.name,
            "threads": args.threads,
            "cache type": args.cache_type,
            "experts touched": {size: touched for size, (touched, _) in limits[path].items()},
            "limits": {size: limit for size, (_, limit) in limits[path].items()},
            "seconds": [
                {"context": context, "n": size, **variants}
                for (context, size), variants in sorted(cells.items())
            ],
        }
        cache = "" if args.cache_type == "f16" else f"{args.cache_type}-cache-"
        measuring.store(f"verify-cost-{'earlier-' if args.earlier else ''}{cache}{path.stem}", result)


if __name__ == "__main__":
    start(main)
