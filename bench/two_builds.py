"""Measures what a wheel costs: T(n) and prefill of two installations, one compiled here and one from dist/.

    python3 -m venv /tmp/wheel && /tmp/wheel/bin/pip install edgespec --find-links dist
    .venv/bin/python bench/two_builds.py .venv/bin/python /tmp/wheel/bin/python

Each installation has a process of its own, which loads the model twice: for llama.cpp's kernels (stock) and
packed for edgespec's. Every round times each n once with each of the four, one right after the other in an
order that shifts, while the others sleep. Ratios are taken within a round: the second installation's time
over the first one's; medians, with quartiles. A prefill is 512 tokens into an empty context.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import msgspec

from edgespec.apps.bench.runs import rotated
from edgespec.engine.model_choice import choose_models
from edgespec.llama.backend import cpu_backend
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, numbers, parser, require_kernels, spread, start

PREFILL = 512
VARIANTS = ("stock", "edgespec")
PAUSE_S = 0.02
"""Seconds before each pass: threads of the process that worked before have gone to sleep."""


class Task(msgspec.Struct):
    """The pass that a worker is asked to time; `n` 0: fill the context instead."""

    variant: str
    context: int
    n: int
    turn: int


class Worker:
    """An installation of edgespec, at work in a process of its own."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        command = [python, __file__, "--worker", model, "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.built: dict[str, str] = msgspec.json.decode(self._read())
        """Facts of the installation."""

    def _read(self) -> bytes:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit("an installation's process ended; what it said is above")
        return line

    def time(self, task: Task) -> float:
        """Return the seconds of a pass."""
        assert self._process.stdin
        time.sleep(PAUSE_S)
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()
        return float(msgspec.json.decode(self._read()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def work(args: argparse.Namespace) -> None:
    """In a worker: answer tasks until there are no more."""
    from importlib.metadata import version

    sessions: dict[str, Session] = {}
    for variant in VARIANTS:
        model = Model(resolve(args.pythons[0]), kernels=variant == "edgespec")
        sessions[variant] = Session(model, n_ctx=PREFILL, n_threads=args.threads, n_logits_max=64)
    facts = {"llama_cpp_python": version("llama-cpp-python"), "cpu_backend": cpu_backend() or "native"}
    print(msgspec.json.encode(facts).decode(), flush=True)
    for line in sys.stdin:
        task = msgspec.json.decode(line, type=Task)
        session = sessions[task.variant]
        n_vocab = session.model.n_vocab
        tokens = [(11 + 13 * (task.turn + j)) % n_vocab for j in range(task.n or task.context)]
        if task.context == 0 or task.n == 0:
            session.clear()
        began = time.perf_counter()
        session.eval(tokens, n_logits=task.n if task.context else 1)
        spent = time.perf_counter() - began
        if task.context and task.n:
            session.rewind(task.context)
        print(spent, flush=True)


def measure(workers: dict[str, Worker], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of each cell: context, n, then a list for each installation and kernels."""
    ways = [(name, variant) for name in workers for variant in VARIANTS]
    cells: list[dict[str, Any]] = []

    def timed(cell: dict[str, Any], turn: int) -> None:
        for name, variant in rotated(ways, turn):
            spent = workers[name].time(Task(variant, cell["context"], cell["n"], turn))
            if turn >= 0:  # the first round warms up
                cell.setdefault(f"{name} {variant}", []).append(spent)

    if args.prefill_rounds:
        cells.append({"context": 0, "n": PREFILL})
        for turn in range(-1, args.prefill_rounds):
            timed(cells[0], turn)
    for name, variant in ways if args.rounds else ():
        workers[name].time(Task(variant, args.context, 0, 0))
    passes = [{"context": args.context, "n": n} for n in args.sizes] if args.rounds else []
    for turn in range(-1, args.rounds) if passes else ():
        for cell in rotated(passes, turn):
            timed(cell, turn)
    return [*cells, *passes]


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("pythons", nargs="+", metavar="PYTHON", help="two installations' Pythons")
    parse.add_argument("--model", help="path or name; default: the default pair's target")
    parse.add_argument("--sizes", type=numbers(int), default=[1, 2, 4, 8, 16])
    parse.add_argument("--context", type=int, default=128, help="tokens before the pass")
    parse.add_argument("--rounds", type=int, default=15, help="0: only the prefill")
    parse.add_argument("--prefill-rounds", type=int, default=3, help="0: none")
    parse.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parse.parse_args()
    if args.worker:
        return work(args)
    if len(args.pythons) != 2 or min(args.rounds, args.prefill_rounds) < 0:
        parse.error("two Pythons, and no negative number of rounds")
    require_kernels()
    model = str(resolve(args.model or choose_models(None, None)[0]))
    measuring = Measuring(args)
    with ExitStack() as stack:
        pythons = dict(zip("ab", args.pythons, strict=True))
        workers = {name: Worker(python, model, args.threads) for name, python in pythons.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        cells = measure(workers, args)
    measuring.end()
    built = {name: worker.built for name, worker in workers.items()}
    print(f"{measuring}\n{model}\na: {built['a']}\nb: {built['b']}\n")
    print("context    n   kernels          a, ms             b, ms             b / a (quartiles)")
    for cell in cells:
        for variant in VARIANTS:
            first, second = cell[f"a {variant}"], cell[f"b {variant}"]
            ratio = spread([b / a for a, b in zip(first, second, strict=True)])
            a, b = (1e3 * spread(seconds)[0] for seconds in (first, second))
            shown = "{:.3f} ({:.3f} - {:.3f})".format(*ratio)
            print(f"{cell['context']:>7} {cell['n']:>4}   {variant:10} {a:>10.1f} {b:>17.1f} {'':12}{shown}")
    measuring.keep(
        "two-builds" if args.rounds else "two-builds-prefill",
        {"model": model.rpartition("/")[2], "built": built, "seconds": cells},
    )
    return None


if __name__ == "__main__":
    start(main)
