"""Measures what drafts of the shapes of `draft_shapes.py` cost, and calculates what they gain.

Each round times T(1) .. T(8) of the target, and for each shape the products of a draft with the kernels,
over weights that come from memory (Q4_0, the fusion's and the Markov head's Q8_0). A draft of `head` of g
tokens is a pass over --unread tokens and g - 1 over one; a block is one pass over 7 places, in which
--unread tokens give keys and values, and 7 products of the Markov head. --call is added for each pass and
--sample for each token: what `head_cost.py` finds beside the products.

With --curves, the file of `draft_shapes.py train --out`: gain = tau / (T(g + 1) / T(1) + cost(g) / T(1))
for the best g, tau = 1 + p1 + p1 p2 + ..; p from each shape's evaluations, code and prose apart. Verified
are g tokens of a block; the whole block is drafted. And the factor of the head's p2, p3, .. with which a
block gains as much as the head. All times are the least of the rounds: other programs only add to them.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from draft_shapes_model import N_PLACES, RANK, SHAPES, DraftShape
from edgespec.engine.model_choice import choose_models
from edgespec.llama import kernels
from edgespec.llama.ggml_types import type_number
from edgespec.llama.kernel_timing import MatrixShape, WeightStream, beyond_caches
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, parser, require_kernels, start

_KEPT = 16384


def parts_of(shape: DraftShape, n: int, unread: int) -> dict[str, list[tuple[list[MatrixShape], int]]]:
    """Return the products of a draft's passes, as (matrices, tokens): its first pass, and each further one.

    `n`: elements of a hidden state; the feed-forward layer has twice as many.
    """
    q4, q8 = type_number("q4_0"), type_number("q8_0")
    keys = [MatrixShape(q4, n // 6, n)] * 2
    others = [MatrixShape(q4, n, n)] * 2 + [MatrixShape(q4, 2 * n, n)] * 2 + [MatrixShape(q4, n, 2 * n)]
    output = [MatrixShape(q4, _KEPT, n)]
    states, own = [MatrixShape(q8, n, n)] * shape.n_states, [MatrixShape(q8, n, n)]
    if not shape.block:
        return {
            "first": [(states, unread), (keys + others, unread), (output, 1)],
            "further": [(own + keys + others + output, 1)],
        }
    layers = [(keys * shape.n_layers, unread + N_PLACES), (others * shape.n_layers, N_PLACES)]
    markov = [([MatrixShape(q8, RANK, n)], N_PLACES), *[([MatrixShape(q8, _KEPT, RANK)], 1)] * N_PLACES]
    return {"first": [(states, unread), *layers, (output, N_PLACES), *markov], "further": []}


def measure(stream: WeightStream, session: Session, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, round by round: T(n), and of each shape the first and each further pass."""
    loaded = kernels.load()
    assert loaded.self_test
    prefetch, n_vocab = loaded.self_test.choice.prefetch, session.model.n_vocab
    session.eval([(101 + 7 * i) % n_vocab for i in range(args.context)], n_logits=0)
    target: dict[int, list[float]] = {}
    drafts: dict[str, dict[str, list[float]]] = {name: {} for name in SHAPES}
    for turn in range(-1, args.rounds):  # the first warms up
        for n in range(1, N_PLACES + 2):
            tokens = [(11 + 13 * (turn + j)) % n_vocab for j in range(n)]
            began = time.perf_counter()
            session.eval(tokens, n_logits=n)
            spent = time.perf_counter() - began
            session.rewind(args.context)
            if turn >= 0:
                target.setdefault(n, []).append(spent)
        for name, shape in SHAPES.items():
            for part, products in parts_of(shape, session.model.n_embd, args.unread).items():
                spent = sum(stream.products(m, n, prefetch, args.threads) for m, n in products)
                if turn >= 0:
                    drafts[name].setdefault(part, []).append(spent)
    return {"target": target, "drafts": drafts}


def draft_seconds(shape: DraftShape, measured: dict[str, Any], n: int, args: argparse.Namespace) -> float:
    """Return the seconds of a draft of `n` tokens."""
    first: float = min(measured["drafts"][shape.name]["first"])
    further: float = min(measured["drafts"][shape.name]["further"])
    sampling: float = 1e-3 * args.sample * n
    if shape.block:
        return sampling + first + 1e-3 * float(args.call)
    return sampling + first + (n - 1) * further + 1e-3 * float(args.call) * n


def best_gain(
    by_position: list[float], shape: DraftShape, measured: dict[str, Any], args: argparse.Namespace
) -> tuple[float, int]:
    """Return the most that a draft gains over plain decoding, and the tokens drafted for it."""
    target = {n: min(values) for n, values in measured["target"].items()}
    tau = [1.0, *(1.0 + x for x in accumulate(accumulate(by_position, mul)))]
    gains = {
        g: tau[g] * target[1] / (target[g + 1] + draft_seconds(shape, measured, g, args))
        for g in range(1, N_PLACES + 1)
    }
    best = max(gains, key=lambda g: gains[g])
    return gains[best], best


def break_even(
    head: list[float], block: DraftShape, measured: dict[str, Any], args: argparse.Namespace
) -> float:
    """Return the factor of a head's p2, p3, .. with which a block of that p1 gains as much as the head."""
    wanted = best_gain(head, SHAPES["head"], measured, args)[0]
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        less = [head[0], *(p * middle for p in head[1:])]
        if best_gain(less, block, measured, args)[0] < wanted:
            low = middle
        else:
            high = middle
    return high


def report(stream: WeightStream, measured: dict[str, Any], n_embd: int, args: argparse.Namespace) -> None:
    """Print costs, and gains if there are curves."""
    one = min(measured["target"][1])
    print("T(n) / T(1): " + " ".join(f"{min(v) / one:.3f}" for v in measured["target"].values()))
    curves = json.loads(args.curves.read_text())["found"] if args.curves else {}
    for name, shape in SHAPES.items():
        passes = parts_of(shape, n_embd, args.unread).values()
        read = [sum(stream.packed_bytes(m) for ms, _ in part for m in ms) / 1e6 for part in passes]
        costs = " ".join(f"{draft_seconds(shape, measured, g, args) / one:.3f}" for g in (1, 3, 5, 7))
        print(
            f"{name:<12}first pass {read[0]:.1f} MB, further {read[1]:.1f}; "
            f"a draft of 1, 3, 5, 7 tokens over T(1): {costs}"
        )
        for look in curves.get(name, {}).get("curve", ()):
            for kind, accepted in look["held_out"].items():
                shown = " ".join(f"{p:.2f}" for p in accepted["by_position"])
                gain, gamma = best_gain(accepted["by_position"], shape, measured, args)
                print(f"{'':<12}{look['cpu_s']} s, {kind}: {shown}: {gain:.2f} times plain with {gamma}")
        for kind, accepted in _first_look(curves).items() if shape.block else ():
            p = accepted["by_position"]
            gain = best_gain(p, shape, measured, args)[0]
            factor = break_even(p, shape, measured, args)
            print(
                f"{'':<12}{kind}, accepted as the head: {gain:.2f}; as fast as the head: p2.. x {factor:.2f}"
            )


def _first_look(curves: dict[str, Any]) -> dict[str, Any]:
    """Return what was accepted of the head before its training."""
    found: dict[str, Any] = curves["head"]["curve"][0]["held_out"] if "head" in curves else {}
    return found


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--target", metavar="MODEL", help="path or name; default: the default pair's")
    parse.add_argument("--curves", type=Path, help="accepted by position, of draft_shapes.py")
    parse.add_argument("--unread", type=int, default=3, help="tokens accepted since the last draft")
    parse.add_argument("--call", type=float, default=0.48, help="ms of a pass beside its products")
    parse.add_argument("--sample", type=float, default=0.05, help="ms of a token's sampling")
    parse.add_argument("--context", type=int, default=128, help="tokens before the passes")
    parse.add_argument("--rounds", type=int, default=30)
    args = parse.parse_args()
    if min(args.unread, args.context, args.rounds) < 1:
        parse.error("--unread, --context and --rounds must be at least 1")
    require_kernels()
    loaded = kernels.load()
    assert loaded.plugin
    measuring = Measuring(args)
    with ExitStack() as stack:
        model = stack.enter_context(Model(resolve(args.target or choose_models(None, None)[0])))
        size = {"n_ctx": args.context + N_PLACES + 1, "n_threads": args.threads, "n_logits_max": N_PLACES + 1}
        session = stack.enter_context(Session(model, **size))
        stream = stack.enter_context(WeightStream(loaded.plugin.path, loaded.plugin.isa, beyond_caches()))
        measured = measure(stream, session, args)
        measuring.end()
        report(stream, measured, model.n_embd, args)
    print(f"\n{measuring}")
    measuring.keep("draft-shapes-cost", {"options": {"call": args.call, "sample": args.sample}, **measured})


if __name__ == "__main__":
    start(main)
