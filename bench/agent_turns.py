"""Seconds to the first token in an agent's session: its first turn, the second, and one after a restart.

    .venv/bin/python bench/agent_turns.py --tokens 12000 --peer build/bin/llama-server --rounds 3

An agent sends its whole conversation with each turn: a prompt of sources (the standard library's), the answer
so far, and about 300 tokens that are new. The contenders take turns (A B A B). Each is started, asked twice,
ended, started again and asked a third time. edgespec has `--state-dir`; llama-server has `--slot-save-path`,
and is told to save the slot before it ends and to restore it after, which counts as time of the third turn.
The answers of edgespec before and after its restart are compared with those of one that kept no state.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from edgespec.engine.model_choice import choose_models
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from prompts import library_text
from script import Measuring, parser, spread, start
from servers import Answer, Request, Server, ask

TURNS = ("first turn", "second turn", "after a restart")
_NEW_TOKENS = 300
_N_PREDICT = 32
_SLOT = "session.bin"

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Contender:
    """A server, and whether it keeps states by itself or has to be told."""

    name: str
    command: Sequence[str]
    told: bool = False


@dataclass
class Found:
    """What was measured of a contender."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {turn: [] for turn in TURNS})
    texts: list[list[str]] = field(default_factory=list)


class Session:
    """An agent's conversation with a server."""

    def __init__(self, system: str, questions: Sequence[str]) -> None:
        self._messages: Messages = [{"role": "system", "content": system}]
        self._questions = iter(questions)

    async def turn(self, address: str) -> Answer:
        """Ask the next question, and keep the answer."""
        self._messages.append({"role": "user", "content": next(self._questions)})
        async with httpx.AsyncClient(base_url=address, timeout=None) as client:
            answer = await ask(client, Request([*self._messages], _N_PREDICT))
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer


def slot(server: Server, action: str) -> None:
    """Have llama-server save or restore what it has read."""
    url = f"{server.address}/slots/0?action={action}"
    httpx.post(url, json={"filename": _SLOT}, timeout=None).raise_for_status()


def play(contender: Contender, session: Session, found: Found) -> None:
    """Play the three turns once."""
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory(prefix="edgespec-states-") as states:
        command = [part.replace("{states}", states) for part in contender.command]
        with Server(contender.name, command) as server:
            answers += [asyncio.run(session.turn(server.address)) for _ in TURNS[:2]]
            if contender.told:
                slot(server, "save")
        with Server(contender.name, command) as server:
            began = time.perf_counter()
            if contender.told:
                slot(server, "restore")
            restored_s = time.perf_counter() - began
            answers.append(asyncio.run(session.turn(server.address)))
    found.texts.append([answer.text for answer in answers])
    for turn, answer in zip(TURNS, answers, strict=True):
        found.seconds[turn].append(answer.first_s + (restored_s if turn == TURNS[-1] else 0.0))


def contenders(target: Path, peer: str | None, n_ctx: int, threads: int) -> list[Contender]:
    """Return edgespec with and without states on disk, and the peer if there is one."""
    own = [sys.executable, "-m", "edgespec", "serve", "--target", str(target), "--threads", str(threads)]
    own += ["--ctx", str(n_ctx)]
    found = [
        Contender("edgespec", [*own, "--state-dir", "{states}"]),
        Contender("edgespec, no states", own),
    ]
    if peer:
        options = ["-m", str(target), "-t", str(threads), "-c", str(n_ctx), "--parallel", "1"]
        command = [*shlex.split(peer), *options, "--slot-save-path", "{states}", "--host", "127.0.0.1"]
        found.append(Contender("llama-server", command, told=True))
    return found


def show(found: Mapping[str, Found]) -> None:
    """Print the table, and whether edgespec's texts are the same with and without states."""
    print(f"{'s to the first token':24}" + "".join(f"{turn:>28}" for turn in TURNS))
    for name, one in found.items():
        cells = [spread(one.seconds[turn]) for turn in TURNS]
        print(
            f"{name:24}" + "".join(f"{f'{mid:.2f} ({low:.2f} - {high:.2f})':>28}" for mid, low, high in cells)
        )
    same = found["edgespec"].texts == found["edgespec, no states"].texts
    print(f"edgespec's texts with and without states: {'the same' if same else 'DIFFERENT'}")


def main() -> None:
    """Run the rounds and print a table."""
    parse = parser(__doc__)
    parse.add_argument("--tokens", type=int, default=12_000, help="of the first prompt")
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--peer", metavar="COMMAND", help="llama-server and options of its own")
    args = parse.parse_args()
    target = resolve(choose_models(args.target, args.draft, "none")[0])
    with Model(target, kernels=False) as model:
        prompts = [library_text(model, args.tokens, seed) for seed in range(args.rounds)]
        asked = [
            f"What does this code do?\n{library_text(model, _NEW_TOKENS, -1 - i)}" for i in range(len(TURNS))
        ]
    n_ctx = args.tokens + len(TURNS) * (_NEW_TOKENS + _N_PREDICT + 64) + 64
    measuring = Measuring(args)
    found: dict[str, Found] = {}
    for system in prompts:
        for contender in contenders(target, args.peer, n_ctx, args.threads):
            play(contender, Session(system, asked), found.setdefault(contender.name, Found()))
    measuring.end()
    print(measuring)
    show(found)
    seconds = {name: one.seconds for name, one in found.items()}
    measuring.keep(f"agent-turns-{target.stem}", {"tokens": args.tokens, "seconds": seconds})


if __name__ == "__main__":
    start(main)
