"""Seconds to the first token of a server of several models: of a switch, and of a model that must be loaded.

    bench/model_switch.py --model qwen2.5-coder-1.5b-q4_k_m --model smollm2-360m-q8_0 --rounds 5

Each round asks both models in turn while both are loaded ("same": the model that was asked before, "switch":
the other one), then has the first unloaded and asks it again ("load"). `--both` then lets both write at once,
and prints their tokens a second together, beside each alone. Prompts are new each time. A router of
llama-server's that runs already is measured beside it: `--peer http://127.0.0.1:9000`; it is asked for the
same names, and its model is unloaded by POST /models/unload.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from edgespec.cli.console import out
from script import parser, start
from servers import Server

_SETTLE_S = 60.0
_numbers = itertools.count(1)


def first_token_s(client: httpx.Client, model: str) -> float:
    """Return the seconds to the first token of a short prompt."""
    prompt = f"{next(_numbers)} reasons to take a walk:"
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "stream": True, "temperature": 0}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        next(line for line in answer.iter_lines() if line.startswith("data: "))
        return time.perf_counter() - began


def tokens_per_s(client: httpx.Client, models: list[str], n: int) -> float:
    """Return the tokens a second of `models`, which write at once, together."""

    def write(model: str) -> int:
        body = {"model": model, "prompt": f"{next(_numbers)} facts:", "max_tokens": n, "temperature": 0}
        body |= {"ignore_eos": True}
        return int(client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"])

    began = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        written = sum(threads.map(write, models))
    return written / (time.perf_counter() - began)


def unload(client: httpx.Client, model: str) -> None:
    """Have `model` unloaded, and wait until it is."""
    asked = client.post("/api/generate", json={"model": model, "keep_alive": 0})
    if asked.status_code == 404:  # llama-server's router
        client.post("/models/unload", json={"model": model}).raise_for_status()
        time.sleep(1)
        return
    deadline = time.monotonic() + _SETTLE_S
    while client.get("/health").json()["models"][model]["status"] != "unloaded":
        if time.monotonic() > deadline:
            raise SystemExit(f"{model} is not unloaded after {_SETTLE_S:g} s")
        time.sleep(0.05)


def measure(address: str, models: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of request."""
    found: dict[str, list[float]] = {"same": [], "switch": [], "load": []}
    first, second = models
    with httpx.Client(base_url=address, timeout=600) as client:
        for model in models:
            first_token_s(client, model)
        for _ in range(rounds):
            for model in (first, second):
                found["switch"].append(first_token_s(client, model))
                found["same"].append(first_token_s(client, model))
            unload(client, first)
            found["load"].append(first_token_s(client, first))
    return found


def main() -> None:
    """Measure and print a table."""
    options = parser(__doc__, pair=False)
    options.add_argument("--model", action="append", required=True, help="twice")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--peer", help="address of a router of llama-server's")
    options.add_argument("--both", type=int, metavar="TOKENS", help="let both write as many at once")
    args: argparse.Namespace = options.parse_args()
    if len(args.model) != 2:
        options.error("--model: give two")
    command = [sys.executable, "-m", "edgespec", "serve", "--threads", str(args.threads), "--quiet"]
    with Server("edgespec", [*command, *(f"--model={one}" for one in args.model)]) as server:
        found = {"edgespec": measure(server.address, args.model, args.rounds)}
        if args.peer:
            found["llama-server"] = measure(args.peer, args.model, args.rounds)
        if args.both:
            with httpx.Client(base_url=server.address, timeout=600) as client:
                for models in ([args.model[0]], [args.model[1]], args.model):
                    rate = tokens_per_s(client, models, args.both)
                    out.print(f"{' and '.join(models)}: {rate:.1f} tokens/s")
    for name, kinds in found.items():
        for kind, seconds in kinds.items():
            middle = statistics.median(seconds)
            out.print(f"{name} {kind}: {middle:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
    if args.json:
        out.print(json.dumps(found))


if __name__ == "__main__":
    start(main)
