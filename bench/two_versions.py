"""Measures two versions of edgespec beside each other: whole texts alone, drafted, and of clients at once.

    git worktree add /tmp/before main; cd /tmp/before; make .venv/.installed; cd -
    .venv/bin/python bench/two_versions.py /tmp/before/.venv/bin/python .venv/bin/python --rounds 5

Each version has a process of its own, which uses the public Python API alone and sleeps while the other one
works. A round does each task once with each, in an order that turns. Ratios are taken within a round: tokens
a second of the second version over those of the first; medians, with quartiles. Texts are compared: with a
temperature each has a seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any, Literal

PROMPTS = (
    "Write a quicksort in Python.",
    "Explain how a hash table works, and give an example in C.",
    "Write a class for a bank account in Python, with tests.",
    "Summarize the rules of chess.",
)
TASKS = ("plain", "auto", "clients")


def work(n_predict: int, temperature: float, n_clients: int) -> None:
    """Answer tasks, a line of stdin each, with tokens, seconds and texts."""
    from edgespec import Engine, SamplingParams

    params = SamplingParams(temperature=temperature)
    with (
        Engine(profile=False, on_message=lambda _: None) as alone,
        Engine(profile=False, parallel=n_clients, on_message=lambda _: None) as many,
    ):
        print("ready", flush=True)
        for line in sys.stdin:
            for engine in (alone, many):
                engine.forget()  # or every round repeats the texts of the one before
            started = time.perf_counter()
            if line.strip() == "clients":
                prompts = [f"{i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(n_clients)]
                streams = [
                    many.stream(one, params=params, seed=1, n_predict=n_predict // 2) for one in prompts
                ]
                while not all(stream.finished for stream in streams):
                    many.step()
                    for stream in streams:
                        list(stream.made())
                results = [stream.result for stream in streams]
            else:
                drafter: Literal["none", "auto"] = "none" if line.strip() == "plain" else "auto"
                results = [
                    alone.generate(one, params=params, seed=1, n_predict=n_predict, drafter=drafter)
                    for one in PROMPTS
                ]
            seconds = time.perf_counter() - started
            n = sum(len(result.token_ids) for result in results)
            texts = [result.text for result in results]
            print(json.dumps({"tokens": n, "seconds": seconds, "texts": texts}), flush=True)


def main() -> None:
    """Measure and print."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("pythons", nargs="*", metavar="PYTHON", help="two interpreters, with a version each")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--tokens", type=int, default=96, help="tokens of a text")
    made.add_argument("--temp", type=float, default=0.0, help="temperature")
    made.add_argument("--clients", type=int, default=16, help="at once")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.worker:
        work(args.tokens, args.temp, args.clients)
        return
    if len(args.pythons) != 2:
        made.error("name two interpreters")
    workers = [start(python, args) for python in args.pythons]
    for worker in workers:
        read(worker)
    rates: dict[str, list[list[float]]] = {task: [] for task in TASKS}
    alike = True
    for turn in range(args.rounds + 1):  # the first one warms up
        for task in TASKS:
            found: dict[int, dict[str, Any]] = {}
            for i in (0, 1) if turn % 2 else (1, 0):
                found[i] = ask(workers[i], task)
            alike &= found[0]["texts"] == found[1]["texts"]
            if turn:
                rates[task].append([found[i]["tokens"] / found[i]["seconds"] for i in (0, 1)])
    for worker in workers:
        worker.communicate()
    for task, rows in rates.items():
        print_row(task, rows)
    print("texts of both: " + ("the same" if alike else "NOT the same"))


def print_row(task: str, rows: list[list[float]]) -> None:
    """Print the median rates of both and the ratio within a round."""
    first, second = (statistics.median(row[i] for row in rows) for i in (0, 1))
    ratios = [row[1] / row[0] for row in rows]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    print(f"{task:8} {first:7.2f} {second:7.2f} tokens/s   ratio {middle:.3f} ({low:.3f} to {high:.3f})")


def start(python: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Return a worker of this interpreter's edgespec."""
    options = [f"--{name}={getattr(args, name)}" for name in ("tokens", "temp", "clients")]
    command = [python, __file__, "--worker", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read(worker: subprocess.Popen[str]) -> str:
    """Return the next line of a worker."""
    assert worker.stdout
    if not (line := worker.stdout.readline()):
        raise SystemExit("a worker ended; what it said is above")
    return line


def ask(worker: subprocess.Popen[str], task: str) -> dict[str, Any]:
    """Return what a worker measured of a task."""
    assert worker.stdin
    worker.stdin.write(f"{task}\n")
    worker.stdin.flush()
    return dict(json.loads(read(worker)))


if __name__ == "__main__":
    main()
