"""Measures decoding beside other programs: 0, 1, 2 and 4 processes that keep a processor busy each.

Three variants in turns: stock llama.cpp decoding plainly, edgespec decoding plainly, and `auto` with the
draft. The numbers of busy processes take turns too, one round each. Speeds are of whole answers, the prompt's
reading included: medians over rounds and prompts, with quartiles.

    bench/busy.py --rounds 3 --save [--peer "ik_llama.cpp=bin/llama-server -rtr"]

A peer is a server of llama.cpp's kind, which decodes plainly and is asked over HTTP: whole answers again.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx

import prompts as prompt_sets
from asking import AUTO, Bench, compared, own_cache
from edgespec import Engine
from edgespec.apps.bench.runs import PLAIN, Run
from edgespec.apps.bench.variants import PLAIN_VARIANT, Variant, parse_variants
from edgespec.models.suites import HUMAN_EVAL, Prompt
from script import Measuring, numbers, parser, require_kernels, spread, start
from servers import Server

STOCK = "stock plain"
_BUSY = (sys.executable, "-c", "while True: pass")


@contextmanager
def busy_processes(n: int) -> Iterator[list[int]]:
    """Keep `n` processors busy; yields the processes' ids."""
    with ExitStack() as stack:
        processes = []
        for _ in range(n):
            process = subprocess.Popen(_BUSY)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process.pid)
        yield processes


def speeds(runs: Sequence[Run]) -> dict[str, tuple[float, float, float]]:
    """Return the median tokens a second of each variant, and the quartiles."""
    found: dict[str, list[float]] = {}
    for one in runs:
        if one.tokens:
            found.setdefault(one.variant, []).append(one.tokens / one.total_s)
    return {name: spread(values) for name, values in found.items()}


def report(runs: dict[int, list[Run]]) -> list[str]:
    """Return the table, and whether all texts are equal."""
    names = list(speeds(next(iter(runs.values()))))
    lines = ["busy processes" + "".join(f"{name:>32}" for name in names)]
    for n, some in runs.items():
        row = speeds(some)
        cells = (f"{row[name][0]:.1f} [{row[name][1]:.1f} - {row[name][2]:.1f}]" for name in names)
        lines.append(f"{n:<14}" + "".join(f"{cell:>32}" for cell in cells))
    texts: dict[tuple[str, bool], set[str | None]] = {}
    for one in (one for some in runs.values() for one in some):
        if one.text_sha256 is not None:
            texts.setdefault((one.prompt, one.variant == STOCK), set()).add(one.text_sha256)
    same = all(len(found) == 1 for found in texts.values())
    lines.append("each prompt's text is the same beside any load" if same else "TEXTS DIFFER")
    return lines


def measured(
    asked: dict[str, tuple[Bench, Variant]],
    prompts: Sequence[Prompt],
    peers: Sequence[Peer],
    busy: Sequence[int],
    rounds: int,
) -> dict[int, list[Run]]:
    """Return the runs beside each number of busy processes."""
    runs: dict[int, list[Run]] = {n: [] for n in busy}
    for turn in range(rounds):
        for n in busy:
            with busy_processes(n):
                runs[n] += [replace(one, round=turn) for one in compared(asked, prompts, 1, 0.0)]
                runs[n] += [peer.run(prompt, turn) for prompt in prompts for peer in peers]
    return runs


class Peer:
    """A server of llama.cpp's kind on the same target; a context manager that ends it."""

    def __init__(self, spec: str, engine: Engine, n_predict: int) -> None:
        self.name, _, command = spec.partition("=")
        options = [
            "-m",
            str(engine.target.path.absolute()),
            "-t",
            str(engine.n_threads),
            "-c",
            "2048",
            "-np",
            "1",
        ]
        self._server = Server(self.name, [*shlex.split(command), *options])
        self._engine, self._n_predict = engine, n_predict

    def run(self, prompt: Prompt, round_: int) -> Run:
        """Return the run of a whole answer. Raises httpx.HTTPError."""
        tokens = self._engine.prompt_tokens(prompt.text)
        body = {"prompt": tokens, "n_predict": self._n_predict, "temperature": 0, "cache_prompt": False}
        began = time.perf_counter()
        answer = httpx.post(f"{self._server.address}/completion", json=body, timeout=600)
        n_tokens = int(answer.raise_for_status().json()["tokens_predicted"])
        return Run(
            prompt=prompt.id,
            category=prompt.category,
            variant=self.name,
            round=round_,
            prompt_tokens=len(tokens),
            tokens=n_tokens,
            total_s=time.perf_counter() - began,
            ttft_s=None,
            prefill_s=None,
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    prompt_sets.add_options(parse, per_category=2)
    parse.add_argument("--busy", type=numbers(int), default=[0, 1, 2, 4], metavar="N,N")
    parse.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="a server beside")
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("-n", "--n-predict", type=int, default=64)
    args = parse.parse_args()
    if min(args.rounds, args.n_predict) < 1 or min(args.busy) < 0:
        parse.error("--rounds and --n-predict must be at least 1, numbers of processes at least 0")
    args.suite = args.suite or [HUMAN_EVAL]
    return args


def main() -> None:
    args = arguments()
    suites = prompt_sets.chosen(args)
    prompts = prompt_sets.of_all(suites)
    bench_of = partial(Bench, limits=prompt_sets.limits(), n_predict=args.n_predict, cold=False, seeded=False)
    measuring = Measuring(args)
    with own_cache(), ExitStack() as stack:
        options: dict[str, Any] = {"n_threads": args.threads}
        stock = Engine(args.target, kernels="off", drafter="none", **options)
        asked = {STOCK: (bench_of(stack.enter_context(stock)), PLAIN_VARIANT)}
        asked[STOCK][0].warm_up(prompts, [PLAIN_VARIANT])
        require_kernels()
        bench = bench_of(stack.enter_context(Engine(args.target, args.draft, **options)))
        variants = {PLAIN: PLAIN_VARIANT, AUTO: parse_variants(AUTO)[0]}
        bench.warm_up(prompts, list(variants.values()))
        asked |= {name: (bench, variant) for name, variant in variants.items()}
        peers = [stack.enter_context(Peer(spec, stock, args.n_predict)) for spec in args.peer]
        for peer in peers:
            peer.run(prompts[0], 0)
        runs = measured(asked, prompts, peers, args.busy, args.rounds)
        models = {"target": stock.target_name}
    measuring.end()
    print(f"{models['target']}; {measuring}; {args.rounds} rounds, {args.n_predict} tokens, tokens a second")
    print("\n".join(report(runs)))
    loads = [{"busy": n, "runs": some} for n, some in runs.items()]
    measuring.keep("busy", {**models, "suites": prompt_sets.sources(suites), "loads": loads})


if __name__ == "__main__":
    start(main)
