"""Measures how soon a streamed answer to a cached prompt begins, of two versions of edgespec in turns.

    .venv/bin/python bench/first_part.py ../before/.venv/bin/python .venv/bin/python --rounds 10

Both serve at once, and one sleeps while the other answers. A round asks each for a few tokens after the
same prompt, which is in the cache from the second time on. Printed are the milliseconds from the
request to the answer's headers and to its first text: medians, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import httpx

from script import spread, start
from servers import Request, Server

REQUEST = Request([{"role": "user", "content": "Write a quicksort in Python."}], 8)


def begin(client: httpx.Client) -> tuple[float, float]:
    """Return the milliseconds to the headers of a stream and to its first text."""
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=REQUEST.body()) as answer:
        headers_s = time.perf_counter() - began
        answer.raise_for_status()
        first_s, *_ = [time.perf_counter() - began for line in answer.iter_lines() if _has_text(line)]
        return 1e3 * headers_s, 1e3 * first_s


def _has_text(line: str) -> bool:
    event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
    return any(choice["delta"].get("content") for choice in event["choices"])


def main() -> None:
    """Measure and print."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("pythons", nargs=2, metavar="PYTHON", help="an interpreter with a version of edgespec")
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--target", default="default", help="the model that both serve")
    args = made.parse_args()
    models = ["--pair", "default"] if args.target == "default" else ["--target", args.target]
    commands = [
        [str(Path(python).absolute()), "-m", "edgespec", "serve", "--quiet", *models]
        for python in args.pythons
    ]
    found: list[list[tuple[float, float]]] = [[], []]
    with Server("the first", commands[0]) as first, Server("the second", commands[1]) as second:
        clients = [httpx.Client(base_url=server.address, timeout=None) for server in (first, second)]
        for turn in range(args.rounds + 2):  # the first ones read the prompt, and warm up
            for i in (0, 1) if turn % 2 else (1, 0):
                measured = begin(clients[i])
                if turn > 1:
                    found[i].append(measured)
    print(f"{'':8} {'ms to headers':>24} {'ms to first text':>24}")
    for name, runs in zip(("first", "second"), found, strict=True):
        columns = [
            f"{middle:7.1f} ({low:.1f} to {high:.1f})"
            for middle, low, high in (spread(values) for values in zip(*runs, strict=True))
        ]
        print(f"{name:8}", *[f"{column:>24}" for column in columns])


if __name__ == "__main__":
    start(main)
