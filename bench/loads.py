"""Results of bench/clients.py: the loads, their tables, and the goals."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contenders import Contender
from script import spread

OLDER = "older"
"""How the names of another checkout's variants begin."""


@dataclass(frozen=True)
class Goal:
    """The goal of edgespec's `auto` against another contender, with that many clients."""

    n_clients: int
    other: str
    """How the other contender's name begins."""
    times: float
    figure: str = "tokens a second"
    """Or "longest first token"; of that, at most `times`."""


GOALS = (
    Goal(1, OLDER, 0.98),
    Goal(4, OLDER, 1.6),
    Goal(16, OLDER, 2.5),
    Goal(16, "llama.cpp", 4.0),
    Goal(16, "ik_llama.cpp", 2.5),
    Goal(16, OLDER, 1 / 3, "longest first token"),
)
"""Issue 19."""


@dataclass(frozen=True)
class Record:
    """One answer. Times in seconds from its request."""

    prompt: str
    prompt_tokens: int
    tokens: int
    first_s: float
    total_s: float
    text_sha256: str


@dataclass(frozen=True)
class Load:
    """One server under so many clients, in one round."""

    contender: str
    n_clients: int
    temperature: float
    round: int
    seconds: float
    """From the first request to the last answer's end."""
    between_s: tuple[float, float]
    """Time between two pieces of text of one answer: median and 90 %."""
    records: tuple[Record, ...]
    failed: tuple[str, ...]
    """Errors in place of an answer, one line each."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers a second."""
        return sum(record.tokens for record in self.records) / self.seconds

    def first_s(self, share: float) -> float:
        """Return the time to the first token that `share` of the answers did not exceed."""
        return quantile([record.first_s for record in self.records], share)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def of(loads: Iterable[Load], contender: str, n_clients: int, temperature: float) -> list[Load]:
    """Return the loads of a contender with so many clients."""
    wanted = contender, n_clients, temperature
    return [load for load in loads if (load.contender, load.n_clients, load.temperature) == wanted]


def differing(loads: Iterable[Load], others: Iterable[Load] | None = None) -> tuple[int, int]:
    """Return how many prompts have more than one text in `loads`, and how many were asked more than once.

    With `others`: how many prompts have a text here that is none of theirs, and how many both asked.
    """
    texts: dict[str, list[str]] = {}
    for load in loads:
        for record in load.records:
            texts.setdefault(record.prompt, []).append(record.text_sha256)
    if others is None:
        repeated = [found for found in texts.values() if len(found) > 1]
        return sum(len(set(found)) > 1 for found in repeated), len(repeated)
    theirs: dict[str, set[str]] = {}
    for load in others:
        for record in load.records:
            theirs.setdefault(record.prompt, set()).add(record.text_sha256)
    both = texts.keys() & theirs.keys()
    return sum(not set(texts[prompt]) <= theirs[prompt] for prompt in both), len(both)


def show(loads: Sequence[Load], contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """Print the tables of each temperature."""
    for temperature in args.temps:
        print(f"\ntemperature {temperature:g}; medians over rounds, [quartiles]")
        heads = ("clients", "tokens/s", "first token s:", "90 %", "longest", "between ms:", "90 %", "failed")
        widths = (8, 24, 16, 9, 9, 13, 8, 8)
        print(f"{'':<20}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
        for contender in contenders:
            for n_clients in args.clients:
                found = of(loads, contender.name, n_clients, temperature)
                median, low, high = spread([load.tokens_per_s for load in found])
                cells = [str(n_clients), f"{median:.1f} [{low:.1f} - {high:.1f}]"]
                for share in (0.5, 0.9, 1.0):
                    cells.append(f"{statistics.median(load.first_s(share) for load in found):.2f}")
                for i in (0, 1):
                    cells.append(f"{1e3 * statistics.median(load.between_s[i] for load in found):.0f}")
                cells.append(str(sum(len(load.failed) for load in found) or "-"))
                line = "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
                print(f"{contender.name:<20}{line}")
        show_texts(loads, contenders, temperature)
    for line in dict.fromkeys(line for load in loads for line in load.failed):
        print(f"failed: {line}")


def show_texts(loads: Sequence[Load], contenders: Sequence[Contender], temperature: float) -> None:
    """Print whose texts depend on the number of clients, and whether the contenders write the same."""
    here = [load for load in loads if load.temperature == temperature]
    of_each = {
        contender.name: [load for load in here if load.contender == contender.name]
        for contender in contenders
    }
    for contender in contenders:
        n, n_all = differing(of_each[contender.name])
        if n_all:
            wanted = f", {'met' if not n else 'MISSED'}" if contender.is_edgespec else ""
            print(f"{contender.name}: {n} of {n_all} texts depend on clients or round{wanted}")
    own = [contender.name for contender in contenders if contender.is_edgespec]
    base = next((name for name in own if name.startswith(OLDER)), next(iter(own), None))
    for name in own:
        if base is not None and name != base and temperature == 0:
            n, n_all = differing(of_each[name], of_each[base])
            print(f"{name}: {n} of {n_all} greedy texts are others than {base}'s, {'MISSED' if n else 'met'}")


def ratios(loads: Sequence[Load], goal: Goal, other: str, temperature: float) -> list[float]:
    """Return edgespec auto's figure over the other contender's, one ratio a round."""
    own = {load.round: load for load in of(loads, "edgespec auto", goal.n_clients, temperature)}
    theirs = {load.round: load for load in of(loads, other, goal.n_clients, temperature)}
    found = []
    for round_ in own.keys() & theirs.keys():
        mine, its = own[round_], theirs[round_]
        if goal.figure == "tokens a second" and its.tokens_per_s:
            found.append(mine.tokens_per_s / its.tokens_per_s)
        elif goal.figure != "tokens a second" and its.first_s(1.0):
            found.append(mine.first_s(1.0) / its.first_s(1.0))
    return found


def show_goals(loads: Sequence[Load], contenders: Sequence[Contender], temps: Sequence[float]) -> None:
    """Print each goal that was measured: met or MISSED."""
    print()
    for temperature, goal in itertools.product(temps, GOALS):
        for other in contenders:
            if not other.name.startswith(goal.other):
                continue
            if found := ratios(loads, goal, other.name, temperature):
                median, low, high = spread(found)
                at_least = goal.figure == "tokens a second"
                met = median >= goal.times if at_least else median <= goal.times
                print(
                    f"{'met' if met else 'MISSED':<7} {goal.n_clients} clients, temperature {temperature:g}: "
                    f"{goal.figure} {median:.2f} [{low:.2f} - {high:.2f}] of {other.name}'s, "
                    f"wanted {'at least' if at_least else 'at most'} {goal.times:.2f}"
                )
