r"""Measures what people do with long texts: an agent's session, a question on a document, a long chat.

    .venv/bin/python bench/long_texts.py --rounds 3 --save \
        --peer "llama.cpp=build/bin/llama-server" --peer "ik_llama.cpp=build-ik/bin/llama-server -rtr -fa"
    .venv/bin/python bench/long_texts.py --tokens 1500 --turns 2 --rounds 1      # two minutes

- agent: ten turns on a repository of 12,000 tokens, which become 16,000. Each asks for one of its functions
  with another name: 128 tokens at most.
- document: one question on a document of 12,000 tokens; 128 tokens at most.
- chat: 60 turns, which become 5,000 tokens; 64 at most in each.

`--tokens` and `--turns` scale them; a chat has six turns for each of the agent's. The texts are made of the
standard library that is installed (bench/conversations.py), by `--seed` and the round. The answers that later
turns read are fixed, so that all servers read the same.

The contenders are edgespec with its default drafter, edgespec that decodes plainly, and the peers, on one
target. All are up at once, so there has to be memory for all. A turn is asked of one after the other, in an
order that shifts from turn to turn, while the others sleep. Each round and kind of text has new servers.
Ratios are taken within a round. Joules are the machine's during a contender's answers, where something
counts them. edgespec's two must write the same texts: else the script ends with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from contenders import OWN, Contender, add_peers, distinct, edgespec_command, peers
from conversations import MAKERS, Conversation, Messages
from edgespec.apps.bench.runs import rotated
from edgespec.engine.model_choice import choose_models
from edgespec.errors import UsageError
from edgespec.llama.packed_file import SWITCH
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from edgespec.platform.metering import Meter, choose_meter
from script import Measuring, numbers, parser, shown_spread, start
from servers import Request, Server, ask_alone

AUTO, PLAIN = "edgespec auto", "edgespec plain"
_WARM_UP = Request([{"role": "user", "content": "Count from 1 to 20."}], 16)
_ROOM = 64  # tokens: servers round, and templates differ


@dataclass(frozen=True)
class TurnRun:
    """One answer of one contender. Times in seconds from the request."""

    kind: str
    contender: str
    round: int
    turn: int
    prompt_tokens: int
    """As the server says."""
    tokens: int
    first_s: float
    total_s: float
    joules: float | None
    text_sha256: str


class Runs:
    """All answers, and figures of one kind of text and contender: a value for each round."""

    def __init__(self, runs: Sequence[TurnRun]) -> None:
        self.runs = runs
        self.kinds = list(dict.fromkeys(run.kind for run in runs))
        self.contenders = sorted(
            {run.contender for run in runs}, key=lambda name: (name != AUTO, name != PLAIN)
        )

    def rounds(self, kind: str, contender: str) -> list[list[TurnRun]]:
        """Return the turns of each round, in order."""
        found: dict[int, list[TurnRun]] = {}
        for run in self.runs:
            if (run.kind, run.contender) == (kind, contender):
                found.setdefault(run.round, []).append(run)
        return [sorted(turns, key=lambda run: run.turn) for _, turns in sorted(found.items())]

    def of(self, kind: str, contender: str, figure: Callable[[list[TurnRun]], float]) -> list[float]:
        """Return a figure of each round."""
        return [figure(turns) for turns in self.rounds(kind, contender)]

    def joules(self, kind: str, contender: str) -> list[float]:
        """Return the joules of each round; none unless those of all its turns are known."""
        known = [[run.joules for run in turns] for turns in self.rounds(kind, contender)]
        return [sum(filter(None, joules)) for joules in known if None not in joules]

    def ratios(self, kind: str, contender: str) -> list[float]:
        """Return how many times as long as edgespec's `auto` it took, within each round."""
        own = self.of(kind, AUTO, whole_s)
        return [theirs / ours for theirs, ours in zip(self.of(kind, contender, whole_s), own, strict=True)]

    def differing(self) -> list[str]:
        """Return the turns in which edgespec's texts differ, `auto` from plain."""
        texts = {(run.contender, run.kind, run.round, run.turn): run.text_sha256 for run in self.runs}
        return [
            f"{run.kind}, round {run.round + 1}, turn {run.turn + 1}"
            for run in self.runs
            if run.contender == AUTO and run.text_sha256 != texts[PLAIN, run.kind, run.round, run.turn]
        ]


def whole_s(turns: Sequence[TurnRun]) -> float:
    """Return the seconds of a round's turns."""
    return sum(run.total_s for run in turns)


def later_s(turns: Sequence[TurnRun]) -> float:
    """Return the median of the seconds to the first token after the first turn."""
    return statistics.median(run.first_s for run in turns[1:] or turns)


FIGURES: dict[str, Callable[[Runs, str, str], list[float]]] = {
    "whole s": lambda runs, kind, name: runs.of(kind, name, whole_s),
    "over auto": lambda runs, kind, name: runs.ratios(kind, name),
    "first token s: turn 1": lambda runs, kind, name: runs.of(kind, name, lambda turns: turns[0].first_s),
    "later turns": lambda runs, kind, name: runs.of(kind, name, later_s),
    "last turn": lambda runs, kind, name: runs.of(kind, name, lambda turns: turns[-1].first_s),
    "joules": lambda runs, kind, name: runs.joules(kind, name),
}


# ---- measuring ----


def play(
    asked: tuple[str, Conversation], contenders: Sequence[Contender], round_: int, meter: Meter
) -> Iterator[TurnRun]:
    """Play a conversation with all contenders, turn by turn."""
    kind, conversation = asked
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for one in contenders:
            server = Server(one.name, one.command_for(1), directory=one.directory)
            servers[one.name] = stack.enter_context(server)
        for server in servers.values():
            ask_alone(server, _WARM_UP)
        for turn, messages in enumerate(conversation.prompts()):
            for one in rotated(contenders, round_ + turn):
                window = meter.begin()
                answer = ask_alone(servers[one.name], Request(messages, conversation.n_predict))
                usage, text = answer.usage, hashlib.sha256(answer.text.encode()).hexdigest()
                yield TurnRun(
                    *(kind, one.name, round_, turn, usage["prompt_tokens"], usage["completion_tokens"]),
                    *(answer.first_s, answer.total_s, window.end().joules, text),
                )


def contenders_of(args: argparse.Namespace, n_ctx: int) -> list[Contender]:
    """Return edgespec's two and the peers. Raises UsageError."""
    room = "--ctx", str(n_ctx), "--parallel", "1"
    drafters = ((AUTO, "auto"), (PLAIN, "none"))
    own = [Contender(name, (*edgespec_command(args, drafter), *room), OWN) for name, drafter in drafters]
    return distinct(own + peers(args, n_ctx))


def needed(model: Model, conversation: Conversation) -> int:
    """Return the tokens of the context that a conversation needs."""
    *_, last = conversation.prompts()
    return len(model.tokenize_chat(last)) + conversation.n_predict + _ROOM


# ---- the command ----


def show(runs: Runs, unmetered: str) -> None:
    """Print a table for each kind of text."""
    for kind in runs.kinds:
        turns = [turn for round_ in runs.rounds(kind, AUTO) for turn in round_]
        lengths = [turn.prompt_tokens for turn in turns]
        n_turns = 1 + max(turn.turn for turn in turns)
        print(f"\n{kind}: {n_turns} turns, prompts of {min(lengths):,} to {max(lengths):,} tokens")
        print(f"{'':18}{'tokens written':>15}" + "".join(f"{figure:>25}" for figure in FIGURES))
        for name in runs.contenders:
            written = statistics.median(runs.of(kind, name, lambda turns: sum(run.tokens for run in turns)))
            cells = [figure(runs, kind, name) for figure in FIGURES.values()]
            print(f"{name:18}{written:>15g}" + "".join(f"{shown_spread(cell):>25}" for cell in cells))
    print()
    if unmetered:
        print(f"no joules: {unmetered}")


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument(
        "--tokens", type=int, default=12_000, help="of the agent's first prompt, and others by it"
    )
    parse.add_argument("--turns", type=int, default=10, help="of the agent; the chat has six times as many")
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--only", type=numbers(str), default=[*MAKERS], help=f"of {','.join(MAKERS)}")
    add_peers(parse)
    args = parse.parse_args()
    for name in ("tokens", "turns", "rounds"):
        if (value := getattr(args, name)) < 1:
            raise UsageError("must be 1 or more", field=name, value=value)
    for kind in args.only:
        if kind not in MAKERS:
            raise UsageError(f"must be of {', '.join(MAKERS)}", field="only", value=kind)
    return args


def main() -> None:
    """Run the rounds and print the tables."""
    args = arguments()
    os.environ.setdefault(SWITCH, "off")  # else each server writes its packed weights, for nobody
    target = resolve(choose_models(args.target, args.draft, "none")[0])
    with Model(target, vocab_only=True) as model:
        rounds: list[dict[str, Conversation]] = [
            {kind: MAKERS[kind](model, args.tokens, args.turns, args.seed + n) for kind in args.only}
            for n in range(args.rounds)
        ]
        n_ctx = {kind: max(needed(model, asked[kind]) for asked in rounds) for kind in args.only}
    contenders = {kind: contenders_of(args, n_ctx[kind]) for kind in args.only}
    measuring = Measuring(args)
    found: list[TurnRun] = []
    with choose_meter(on_message=lambda line: print(line, file=sys.stderr)) as meter:
        unmetered = "" if meter.available else meter.begin().end().reason
        began = time.monotonic()
        for n, asked in enumerate(rounds):
            for kind, conversation in asked.items():
                for run in play((kind, conversation), contenders[kind], n, meter):
                    found.append(run)
                    where = f"{time.monotonic() - began:5.0f} s  round {n + 1}, {kind}, turn {run.turn + 1}"
                    times = f"{run.first_s:.2f} s to the first token of {run.total_s:.2f}"
                    print(f"{where}, {run.contender}: {times}", file=sys.stderr)
    measuring.end()
    runs = Runs(found)
    print(f"{target.stem}; {measuring}\n{args.rounds} rounds, medians and quartiles")
    show(runs, unmetered)
    differing = runs.differing()
    same = f"DIFFERENT in {'; '.join(differing)}" if differing else "the same"
    print(f"edgespec's texts, auto and plain: {same}")
    result: dict[str, Any] = {"target": target.stem, "prompts": digests(rounds), "runs": found}
    measuring.keep(f"long-texts-{target.stem}", result)
    if differing:
        raise SystemExit(1)


def digests(rounds: Sequence[dict[str, Conversation]]) -> list[dict[str, str]]:
    """Return what identifies the prompts of each round."""

    def digest(messages: Messages) -> str:
        return hashlib.sha256(repr(messages).encode()).hexdigest()

    return [{kind: digest([*one.prompts()][-1]) for kind, one in asked.items()} for asked in rounds]


if __name__ == "__main__":
    start(main)
