r"""Tokens a second of servers with 1, 2, 4, 8, 16 clients: edgespec, an older edgespec, peers.

    .venv/bin/python bench/clients.py --suite human-eval --suite spec_bench.jsonl --older ../edgespec-before \
        --peer "llama.cpp=build/bin/llama-server" --peer "ik_llama.cpp=build-ik/bin/llama-server -rtr" --save

For each number of clients and each temperature the contenders take turns, in an order that shifts from round
to round (A B A B): a contender's server is started alone, warmed up, measured and stopped. So no answer is
drafted, and no prompt is known, from an earlier measurement: every server sees a prompt once.

A client is a loop: it takes the next prompt, reads the answer to its end as a stream of OpenAI's chat
completions, and takes another, until all prompts were asked. The prompts are distinct and alike for all
contenders: the categories of all suites in turn, those up to `--longest` characters. Tokens are counted as
the servers' `usage` says. With a seed for each prompt, an answer of edgespec must be the same with any number
of clients; those of peers are compared too.

A peer is `NAME=COMMAND`, the program and its own options; it gets -m, -t, -np with the number of clients, -c
and --port. Options of this checkout's `edgespec serve` may follow after `--`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import httpx

import prompts as prompt_sets
from contenders import OWN, Contender, add_peers, distinct, edgespec_command, peers
from edgespec.apps.bench.runs import rotated
from edgespec.apps.bench.suites import DEFAULT, Prompt, Suite
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError, UsageError
from loads import OLDER, Load, Record, quantile, show, show_goals
from script import Measuring, numbers, parser, start
from servers import Request, Server, ask

PLAIN = "plain"
DRAFTERS = {"auto": "auto", PLAIN: "none", "suffix": "suffix", "model": "model", "staged": "staged"}
"""The drafter of a variant of edgespec."""
_WARM_UP_TOKENS = 16


# ---- measuring ----


async def measure(
    server: Server, contender: str, asked: Sequence[Prompt], n_clients: int, settings: tuple[int, float, int]
) -> Load:
    """Warm the server up, then let `n_clients` ask all prompts; settings: tokens, temperature, round."""
    n_predict, temperature, round_ = settings
    records: list[Record] = []
    between: list[float] = []
    failed: list[str] = []
    waiting = deque(enumerate(asked))

    async def one_client(client: httpx.AsyncClient, number: int) -> None:
        while waiting:
            seed, prompt = waiting.popleft()
            message = {"role": "user", "content": prompt.text}
            request = Request([message], n_predict, temperature, seed + 1, f"client {number}")
            try:
                answer = await ask(client, request)
            except httpx.HTTPError as error:
                failed.append(f"{prompt.id}: {type(error).__name__}: {error}")
                continue
            between.extend(b - a for a, b in itertools.pairwise(answer.arrivals_s))
            text = hashlib.sha256(answer.text.encode()).hexdigest()
            n_prompt, n_tokens = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
            records.append(Record(prompt.id, n_prompt, n_tokens, answer.first_s, answer.total_s, text))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=None, limits=limits) as client:
        warm_up = [
            Request([{"role": "user", "content": f"Count from {i} to {i + 20}."}], _WARM_UP_TOKENS)
            for i in range(n_clients)
        ]
        try:
            await asyncio.gather(*(ask(client, request) for request in warm_up))
        except httpx.HTTPError as error:
            raise EdgespecError(f"{contender} does not answer: {error}\n{server.log()}") from None
        began = time.perf_counter()
        await asyncio.gather(*(one_client(client, number) for number in range(n_clients)))
        seconds = time.perf_counter() - began
    times = quantile(between, 0.5), quantile(between, 0.9)
    return Load(contender, n_clients, temperature, round_, seconds, times, tuple(records), tuple(failed))


def n_asked(n_clients: int, args: argparse.Namespace) -> int:
    """Return how many prompts so many clients ask."""
    return int(max(args.least, args.per_client * n_clients))


def run(contenders: Sequence[Contender], prompts: Sequence[Prompt], args: argparse.Namespace) -> list[Load]:
    """Return all loads; what cannot be started ends the script."""
    loads: list[Load] = []
    began = time.monotonic()
    for round_ in range(args.rounds):
        for temperature, n_clients in itertools.product(args.temps, args.clients):
            asked = prompts[: n_asked(n_clients, args)]
            for contender in rotated(contenders, round_):
                where = f"round {round_ + 1}: {n_clients} clients, temperature {temperature:g}"
                print(f"{time.monotonic() - began:5.0f} s  {where}, {contender.name}", file=sys.stderr)
                command = contender.command_for(n_clients)
                with Server(contender.name, command, directory=contender.directory) as server:
                    settings = args.n_predict, temperature, round_
                    loads.append(asyncio.run(measure(server, contender.name, asked, n_clients, settings)))
    return loads


# ---- contenders ----


def contenders_of(args: argparse.Namespace) -> list[Contender]:
    """Return the contenders that were asked for. Raises UsageError."""

    def serving(name: str, variant: str, directory: Path, python: Path | str, options: Sequence[str]) -> None:
        command = edgespec_command(args, drafter_of(variant), python)
        queue = "--max-queue", str(4 * max(args.clients))
        found.append(Contender(f"{name} {variant}", (*command, *queue, *options), directory))

    found: list[Contender] = []
    for variant in args.variants:
        serving("edgespec", variant, OWN, sys.executable, args.server)
    if args.older:
        older = args.older.absolute()
        python = older / ".venv/bin/python"
        if not python.exists():
            raise UsageError("no .venv/bin/python is there; build it there first", field="older", value=older)
        for variant in args.older_variants:
            serving(OLDER, variant, older, python, ())
    return distinct(found + peers(args, args.ctx))


def drafter_of(variant: str) -> str:
    """Return the drafter of a variant. Raises UsageError."""
    if variant not in DRAFTERS:
        raise UsageError(f"must be of {', '.join(DRAFTERS)}", field="variants", value=variant)
    return DRAFTERS[variant]


def prompts_of(suites: Sequence[Suite], args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts that are short enough, the categories of all suites in turn. Raises UsageError."""
    short = [prompt for prompt in prompt_sets.of_all(suites) if len(prompt.text) <= args.longest]
    found = Suite("", "", tuple(short)).interleaved()
    needed = max(n_asked(n, args) for n in args.clients)
    if len(found) < needed:
        raise UsageError(
            f"only {len(found)} prompts have up to {args.longest} characters, and {needed} are needed: "
            "add a suite (--suite), or ask fewer (--per-client, --least)"
        )
    return list(found)


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    prompt_sets.add_options(parse, per_category=None)
    parse.add_argument("--clients", type=numbers(int), default=[1, 2, 4, 8, 16], help="at once, with commas")
    parse.add_argument("--temps", type=numbers(float), default=[0.0, 0.8], help="temperatures, with commas")
    parse.add_argument("-n", "--n-predict", type=int, default=64, help="most tokens of an answer")
    parse.add_argument("--per-client", type=int, default=2, help="prompts a client asks")
    parse.add_argument("--least", type=int, default=8, help="prompts that few clients ask at least, together")
    parse.add_argument("--longest", type=int, default=1500, help="characters of a prompt, at most")
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--variants", type=numbers(str), default=["auto", PLAIN, "suffix"], help="of edgespec")
    parse.add_argument("--older", type=Path, metavar="DIR", help="another checkout, built in DIR/.venv")
    parse.add_argument("--older-variants", type=numbers(str), default=["auto"])
    add_peers(parse)
    parse.add_argument("--ctx", type=int, default=1024, help="tokens of a peer's context for each client")
    parse.add_argument("--name", default="clients", help="of the saved file")
    parse.add_argument("server", nargs="*", metavar="-- OPTION", help="options of `edgespec serve`")
    return parse.parse_args()


def main() -> None:
    args = arguments()
    if min([*args.clients, args.rounds, args.per_client, args.least, args.n_predict]) < 1:
        raise UsageError("--clients, --rounds, --per-client, --least and -n must be at least 1")
    args.suite = args.suite or [DEFAULT]
    suites = prompt_sets.chosen(args)
    prompts = prompts_of(suites, args)
    contenders = contenders_of(args)
    measuring = Measuring(args)
    loads = run(contenders, prompts, args)
    measuring.end()
    target, draft = choose_models(args.target, args.draft)
    print(f"{Path(target).name}, drafted by {draft and Path(draft).name}; {measuring}")
    print(f"{args.n_predict} tokens an answer, {args.rounds} rounds, interleaved")
    show(loads, contenders, args)
    show_goals(loads, contenders, args.temps)
    result = {"target": target, "draft": draft, "suites": prompt_sets.sources(suites), "loads": loads}
    measuring.store(args.name, result)


if __name__ == "__main__":
    start(main)
