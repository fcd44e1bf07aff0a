"""Measures what `--cache-reuse` saves, and what it changes, where a prompt differs from the last one early.

Two engines get the same prompts in turns: one reads again whatever follows the first difference, the other
moves it. Prompts are sources of the standard library with a question. `timestamp`: the time stands in front,
another one in each round. `edit`: a line of the middle is another one.
Told are the seconds to the first token, the tokens that were moved, and how many tokens of the greedy answers
are the same before they part. What is moved is near what a reading would give, and not equal to it.

    bench/cache_reuse.py --lengths 2000,8000 --rounds 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from conversations import Sources
from edgespec import Engine
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.model_choice import choose_models
from edgespec.llama.weights import Model
from script import Measuring, numbers, parser, shown_spread, spread, start

_OPTIONS = Options(n_predict=48, params=SamplingParams(temperature=0))
_ROOM = 512  # tokens of the question, the template and the answer, at most
_QUESTION = "\n\nWhat is the first function above for? Answer in three sentences."


def timestamp(text: str, round_: int) -> str:
    """Return the prompt of a round: the time, then all of `text`."""
    return f"It is 10:{round_ + 10}:{(37 * round_) % 60:02}.\n{text}{_QUESTION}"


def edit(text: str, round_: int) -> str:
    """Return the prompt of a round: `text` with a line of the round in its middle."""
    lines = text.splitlines()
    lines.insert(len(lines) // 2, f"CHANGED_VALUE = {1000 + 37 * round_}")
    return "\n".join(lines) + _QUESTION


KINDS: dict[str, Callable[[str, int], str]] = {"timestamp": timestamp, "edit": edit}


@dataclass(frozen=True)
class Pair:
    """The same prompt, read again and moved."""

    kind: str
    length: int
    """Tokens of the text that was asked for."""
    n_tokens: int
    """Of the prompt."""
    read_s: float
    """To the first token."""
    moved_s: float
    n_moved: int
    n_alike: int
    """Tokens at the beginning of both answers that are the same."""
    n_written: int
    """Tokens of the shorter answer."""


def compared(read: Result, moved: Result, kind: str, length: int) -> Pair:
    """Return both answers to a prompt beside each other."""
    both = list(zip(read.token_ids, moved.token_ids, strict=False))
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    times = read.stats.ttft_s or 0.0, moved.stats.ttft_s or 0.0
    return Pair(kind, length, read.prompt_tokens, *times, moved.n_shifted, alike, len(both))


def measure(args: argparse.Namespace) -> list[Pair]:
    """Return the pairs of all rounds."""
    found = []
    target = choose_models(args.target, args.draft, "none")[0]
    room = max(args.lengths) + _ROOM

    def opened(least: int) -> Engine:
        return Engine(
            target,
            drafter="none",
            n_ctx=room,
            n_threads=args.threads,
            profile=False,
            prefix_cache=0,
            cache_reuse=least,
        )

    with opened(0) as reading, opened(args.least) as moving:
        for n_tokens in args.lengths:
            text = made_text(reading.target, n_tokens)
            for kind, prompt in KINDS.items():
                for round_ in range(args.rounds + 1):
                    engines = [reading, moving] if round_ % 2 else [moving, reading]
                    asked = prompt(text, round_)
                    answers = {one: one.generate(asked, _OPTIONS) for one in engines}
                    if round_:  # before it, there was nothing to move
                        found.append(compared(answers[reading], answers[moving], kind, n_tokens))
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def made_text(model: Model, n_tokens: int) -> str:
    """Return sources of about `n_tokens` tokens. Raises UsageError if there are not as many."""
    return Sources(model, f"reuse {n_tokens}").modules(n_tokens)


def show(found: list[Pair]) -> None:
    """Print a line for each kind and length: medians with quartiles."""
    print(
        f"{'':12}{'tokens':>8}{'read again, s':>24}{'moved, s':>24}{'tokens moved':>14}{'answers alike':>16}"
    )
    for kind, length in dict.fromkeys((pair.kind, pair.length) for pair in found):
        pairs = [pair for pair in found if (pair.kind, pair.length) == (kind, length)]
        times = [[pair.read_s for pair in pairs], [pair.moved_s for pair in pairs]]
        cells = [shown_spread(some) for some in times]
        moved = spread([pair.n_moved for pair in pairs])[0]
        alike = f"{sum(pair.n_alike for pair in pairs)} of {sum(pair.n_written for pair in pairs)}"
        print(f"{kind:12}{pairs[0].n_tokens:>8}{cells[0]:>24}{cells[1]:>24}{moved:>14g}{alike:>16}")


def main() -> None:
    """Measure and print the table."""
    parse = parser(__doc__)
    parse.add_argument("--lengths", type=numbers(int), default=[2000, 8000], help="tokens of the prompts")
    parse.add_argument("--least", type=int, default=256, help="the value of --cache-reuse")
    parse.add_argument("--rounds", type=int, default=3)
    args = parse.parse_args()
    if min(args.rounds, args.least, *args.lengths) < 1:
        parse.error("numbers must be at least 1")
    measuring = Measuring(args)
    found = measure(args)
    measuring.end()
    print(f"{measuring}\n{args.rounds} rounds, medians and quartiles")
    show(found)
    result: dict[str, Any] = {"pairs": found}
    measuring.keep("cache-reuse", result)


if __name__ == "__main__":
    start(main)
