"""Tests the server under load: many clients ask for some minutes, and some go away in the middle of answers.

Each client asks single prompts and holds conversations of several turns, at temperature 0. Every answer must
equal the one that the same prompt got alone before; an interrupted answer must be a beginning of it. A sample
is asked alone again afterwards. The server must have counted as many requests as the clients sent, and have
ended as many generations as answers were read. Its memory is watched, and at the end no request may wait or
run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from script import Measuring, parser, start
from servers import Answer, Request, Server, ask

SINGLE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is a hash table? Answer in two sentences.",
    "Write a SQL query that counts the orders of each customer.",
    "Explain the difference between a process and a thread.",
    "Write a regular expression that matches an IPv4 address.",
    "List five variants to make a Python program faster.",
)
CONVERSATIONS = (
    (
        "Write a Python class for a stack.",
        "Add a method that returns the largest element.",
        "Now write a test for it.",
    ),
    ("What is a binary search?", "Write it in C.", "What is wrong if the array is not sorted?"),
    ("Name three sorting algorithms.", "Which of them is stable?", "Write that one in Python."),
)
_CANCELLED = 'edgespec_generations_total{outcome="cancelled"}'
_FINISHED = 'edgespec_generations_total{outcome="finished"}'
_REQUESTS = 'edgespec_requests_total{method="POST",route="/v1/chat/completions",'
MAX_GROWTH = 0.05
"""Growth of the server's memory from the second quarter of the time to the last."""


@dataclass
class Seen:
    """The observations of the clients."""

    sent: int = 0
    """Requests."""
    whole: int = 0
    left: int = 0
    other: Counter[str] = field(default_factory=Counter)
    """Failed answers, counted by what came instead."""
    mixed: list[str] = field(default_factory=list)
    """Texts that differ from the prompt's answer alone."""
    by_client: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0


async def read(
    client: httpx.AsyncClient,
    messages: list[dict[str, str]],
    n_predict: int,
    user: str,
    leave_at: float = math.inf,
) -> Answer:
    """Read an answer at temperature 0, or go away when it has `leave_at` characters."""
    return await ask(client, Request(tuple(messages), n_predict, user=user), leave_at=leave_at)


async def alone(client: httpx.AsyncClient, script: tuple[str, ...], n: int) -> list[str]:
    """Return the answers of a conversation that nobody disturbs."""
    messages: list[dict[str, str]] = []
    for turn in script:
        messages.append({"role": "user", "content": turn})
        answer = await read(client, messages, n, "alone")
        messages.append({"role": "assistant", "content": answer.text})
    return [message["content"] for message in messages[1::2]]


async def one_client(
    client: httpx.AsyncClient,
    number: int,
    expected: dict[tuple[str, ...], list[str]],
    seen: Seen,
    deadline: float,
    args: argparse.Namespace,
) -> None:
    """Ask until the deadline."""
    chance = random.Random(args.seed + number)
    scripts = list(expected)
    while time.perf_counter() < deadline:
        script = chance.choice(scripts)
        messages: list[dict[str, str]] = []
        for turn, right in zip(script, expected[script], strict=True):
            messages.append({"role": "user", "content": turn})
            leave_at = chance.random() * len(right) if chance.random() < args.leave else math.inf
            seen.sent += 1
            try:
                answer = await read(client, messages, args.n_predict, f"client {number}", leave_at)
            except httpx.HTTPError as error:
                seen.other[f"{type(error).__name__}: {error}"] += 1
                break
            seen.by_client[number] += 1
            if not answer.whole:
                seen.left += 1
                if not right.startswith(answer.text):
                    seen.mixed.append(f"{right[:60]!r} became {answer.text[:60]!r}")
                break
            seen.whole += 1
            seen.first_s.append(answer.first_s)
            seen.total_s.append(answer.total_s)
            seen.tokens += answer.usage["completion_tokens"]
            seen.prompt += answer.usage["prompt_tokens"]
            seen.cached += answer.usage["edgespec"]["cached_tokens"]
            if answer.text != right:
                seen.mixed.append(f"{right[:60]!r} became {answer.text[:60]!r}")
            if time.perf_counter() > deadline:
                break
            messages.append({"role": "assistant", "content": answer.text})


async def watch(server: Server, sizes: list[int]) -> None:
    """Note the server's memory every second."""
    while True:
        sizes.append(server.own_bytes())
        await asyncio.sleep(1)


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the server's own counters."""
    text = (await client.get("/metrics")).text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def idle(client: httpx.AsyncClient) -> bool:
    """Return whether the server has nothing to do any more, within a moment."""
    for _ in range(100):
        health = (await client.get("/health")).json()
        if not health["busy"] and not health["waiting"]:
            return True
        await asyncio.sleep(0.1)
    return False


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    seen, sizes = Seen(), [server.own_bytes()]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=None, limits=limits) as client:
        scripts: list[tuple[str, ...]] = [(prompt,) for prompt in SINGLE] + list(CONVERSATIONS)
        expected = {script: await alone(client, script, args.n_predict) for script in scripts}
        before = await counted(client)
        began = time.perf_counter()
        watching = asyncio.create_task(watch(server, sizes))
        deadline = began + 60 * args.minutes
        await asyncio.gather(
            *(one_client(client, i, expected, seen, deadline, args) for i in range(args.clients))
        )
        seconds = time.perf_counter() - began
        watching.cancel()
        is_idle = await idle(client)
        after = await counted(client)
        again = scripts[:: max(1, len(scripts) // 4)]
        for script in again:
            if await alone(client, script, args.n_predict) != expected[script]:
                seen.mixed.append(f"{script[0]!r} gave another answer alone after the load than before")
    quarter = len(sizes) // 4
    early = statistics.median(sizes[quarter : 2 * quarter] or sizes)
    late = statistics.median(sizes[-quarter:] or sizes)
    return {
        "seconds": seconds,
        "sent": seen.sent,
        "whole": seen.whole,
        "left": seen.left,
        "other": dict(seen.other),
        "mixed": seen.mixed,
        "requests by client": [seen.by_client[i] for i in range(args.clients)],
        "tokens read by clients": seen.tokens,
        "prompt tokens": seen.prompt,
        "of them cached": seen.cached,
        "counters": {name: after[name] - before.get(name, 0.0) for name in after if "_total" in name},
        "first token s": seen.first_s,
        "total s": seen.total_s,
        "idle afterwards": is_idle,
        "own bytes": sizes,
        "growth": late / early - 1,
    }


def show(result: dict[str, Any]) -> bool:
    """Print the table; return whether everything held."""
    seconds, counters = result["seconds"], result["counters"]
    written = counters["edgespec_generated_tokens_total"]
    of_clients = result["requests by client"]
    n_requests = result["whole"] + result["left"]
    print(f"requests   {n_requests} in {seconds:.0f} s: {result['whole']} read to the end, ", end="")
    print(f"{result['left']} left in the middle ({result['left'] / max(1, n_requests):.0%})")
    print(f"by client  {min(of_clients)} to {max(of_clients)}")
    print(f"written    {written:.0f} tokens, {written / seconds:.2f} tokens/s; ", end="")
    print(f"{counters[_CANCELLED]:.0f} generations ended early")
    print(f"prompts    {result['of them cached']} of {result['prompt tokens']} tokens from the cache")
    for name in ("first token s", "total s"):
        values = sorted(result[name])
        if values:
            shares = [values[min(len(values) - 1, int(p * len(values)))] for p in (0.5, 0.9, 0.99)]
            print(f"{name:<13} median {shares[0]:.2f}, 90 % {shares[1]:.2f}, 99 % {shares[2]:.2f}")
    counted = sum(n for name, n in counters.items() if name.startswith(_REQUESTS))
    sizes = result["own bytes"]
    print(f"memory     {sizes[0] / 2**20:.0f} MiB at first, {max(sizes) / 2**20:.0f} at most, ", end="")
    print(f"{sizes[-1] / 2**20:.0f} at the end")
    held = {
        "no answer mixed or changed": not result["mixed"],
        "no request failed": not result["other"],
        f"nothing lost: {result['sent']} requests sent, {counted:.0f} counted by the server, "
        f"{counters[_FINISHED]:.0f} generations finished": counted == result["sent"]
        and counters[_FINISHED] >= result["whole"],
        f"memory grew by {result['growth']:+.1%}, below {MAX_GROWTH:.0%}": result["growth"] < MAX_GROWTH,
        "idle afterwards": result["idle afterwards"],
        f"ended with exit code {result['exit code']}": result["exit code"] == 0,
    }
    for what, true in held.items():
        print(f"{'met' if true else 'MISSED':<7} {what}")
    for line in [*result["mixed"][:5], *(f"{n} x {what}" for what, n in result["other"].items())]:
        print(f"        {line}")
    return all(held.values())


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--clients", type=int, default=16)
    parse.add_argument("--minutes", type=float, default=10.0)
    parse.add_argument("--leave", type=float, default=1 / 3, help="share of requests broken off")
    parse.add_argument("-n", "--n-predict", type=int, default=64, help="most tokens of an answer")
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("server", nargs="*", metavar="-- OPTION", help="options of `edgespec serve`")
    args = parse.parse_args()

    measuring = Measuring(args)
    command = [sys.executable, "-m", "edgespec", "serve", "--json", "--threads", str(args.threads)]
    command += ["--max-queue", str(4 * args.clients), *args.server]
    server = Server("edgespec serve", command)
    try:
        facts = server.first_object()
        result = asyncio.run(measure(server, args))
    finally:
        code = server.end()
    measuring.end()
    result["exit code"] = code
    print(f"{measuring}; {facts['target']}, draft {facts['draft']}; ", end="")
    print(f"{args.clients} clients")
    good = show(result)
    measuring.keep("serve-load", {"server": facts, **result})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    start(main)
