"""Filling JSON schemas: plain decoding with the grammar, and speculative decoding with it.

Interleaved: every round fills each schema once each way, in an order that shifts. Figures are of whole
generations, the prompt's reading included: median tokens a second with quartiles, and the median ratio to
plain decoding of the same schema in the same round. The text is the same each way (a seed is given).

    plain             --drafter none
    auto              forced tokens, text seen before, the draft model: what pays
    auto, none forced the same without what the grammar forces

Beside it the share of emitted tokens that were forced ones, and what the grammar takes: the time in it for
each token emitted, and the rows for which all of the vocabulary had to be judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from edgespec import Engine, SamplingParams
from edgespec.grammar.grammar import Constraint, Grammar
from machine import facts, other_load, save, spread


def record(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all of `properties`."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def many(items: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Invent a software developer.",
        record(
            first_name=TEXT,
            last_name=TEXT,
            age=NUMBER,
            email=TEXT,
            programming_languages=many(TEXT, 4),
            employment_status={"enum": ["employed", "freelance", "unemployed"]},
        ),
    ),
    "extraction": (
        "Extract the order: Anna Schmidt of Lindenweg 4, 50667 Cologne, ordered two espresso machines at 249 "
        "euros each and a bag of beans for 18 euros on 3 May 2024, to be delivered to her home.",
        record(
            customer_name=TEXT,
            delivery_address=record(street=TEXT, postal_code=TEXT, city=TEXT),
            order_date={"type": "string", "format": "date"},
            line_items=many(record(product_name=TEXT, quantity=NUMBER, unit_price_euros=NUMBER), 4),
        ),
    ),
    "sensors": (
        "Invent three readings of a weather station on one morning.",
        record(
            station_identifier=TEXT,
            readings=many(
                record(
                    time_of_day={"type": "string", "pattern": r"^\d\d:\d\d$"},
                    temperature_celsius={"type": "number"},
                    relative_humidity_percent=NUMBER,
                    wind_direction={"enum": ["north", "east", "south", "west"]},
                ),
                3,
            ),
        ),
    ),
    "call": (
        "Which tool call finds the cheapest flights from Vienna to Lisbon in the first week of June for two?",
        record(
            name={"const": "search_flights"},
            arguments=record(
                departure_airport=TEXT,
                destination_airport=TEXT,
                earliest_departure={"type": "string", "format": "date"},
                latest_departure={"type": "string", "format": "date"},
                number_of_passengers=NUMBER,
                sort_results_by={"enum": ["price", "duration", "departure"]},
            ),
        ),
    ),
}
WAYS = {"plain": "none", "auto": "auto", "auto, none forced": "auto"}


@dataclass
class Filled:
    """One schema filled once."""

    task: str
    way: str
    round: int
    tokens: int
    total_s: float
    drafted: int
    accepted: int
    forced: int
    """Forced tokens accepted."""
    grammar_s: float
    """Time in the grammar."""
    n_masked: int
    n_full: int
    stop_reason: str
    text: str


@contextmanager
def timed(*, forced: bool) -> Iterator[Callable[[], float]]:
    """Count the seconds in the grammar; without `forced`, nothing is known to be."""
    seconds = 0.0
    depth = 0
    originals = {name: getattr(Constraint, name) for name in ("mask", "fitting", "forced_run", "advance")}

    def count(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: object, **options: object) -> object:
            nonlocal seconds, depth
            depth += 1
            started = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                depth -= 1
                if not depth:
                    seconds += time.perf_counter() - started

        return called

    for name, original in originals.items():
        setattr(Constraint, name, count(original))
    if not forced:
        Constraint.forced_run = lambda *_: []  # type: ignore[method-assign]
    try:
        yield lambda: seconds
    finally:
        for name, original in originals.items():
            setattr(Constraint, name, original)


def fill(
    engine: Engine, task: str, way: str, grammar: Grammar, args: argparse.Namespace, turn: int
) -> Filled:
    """Fill a schema once."""
    prompt, schema = TASKS[task]
    asked = f"{prompt} Answer with JSON of {', '.join(schema['properties'])}."
    made: list[Constraint] = []
    begin = Grammar.begin

    def noted(self: Grammar, params: SamplingParams | None = None) -> Constraint:
        made.append(begin(self, params))
        return made[-1]

    Grammar.begin = noted  # type: ignore[method-assign]
    try:
        with timed(forced="none forced" not in way) as grammar_s:
            result = engine.generate(
                asked,
                params=SamplingParams(temperature=args.temp),
                seed=turn,
                grammar=grammar,
                drafter=WAYS[way],  # type: ignore[arg-type]
                n_predict=args.n_predict,
            )
    finally:
        Grammar.begin = begin  # type: ignore[method-assign]
    sources = result.sources
    return Filled(
        task=task,
        way=way,
        round=turn,
        tokens=len(result.token_ids),
        total_s=result.stats.total_s,
        drafted=sum(drafted for drafted, _ in sources.values()),
        accepted=sum(accepted for _, accepted in sources.values()),
        forced=sources.get("forced", (0, 0))[1],
        grammar_s=grammar_s(),
        n_masked=made[0].n_masked,
        n_full=made[0].n_full,
        stop_reason=result.stop_reason,
        text=result.text,
    )


def report(runs: Sequence[Filled]) -> dict[str, Any]:
    """Print what the runs say, and return it."""
    by_way: dict[str, dict[tuple[str, int], Filled]] = defaultdict(dict)
    for run in runs:
        by_way[run.way][run.task, run.round] = run
    rows: dict[str, Any] = {}
    titles = f"{'tokens/s':>20}{'x plain':>9}{'accepted':>10}{'forced':>8}{'grammar':>13}{'all judged':>12}"
    print(f"{'':<18}{titles}")
    for way, own in by_way.items():
        tokens = sum(run.tokens for run in own.values())
        ratios = [by_way["plain"][place].total_s / run.total_s for place, run in own.items()]
        row = rows[way] = {
            "tokens_per_s": [run.tokens / run.total_s for run in own.values()],
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "accepted_share": sum(run.accepted for run in own.values()) / tokens,
            "forced_share": sum(run.forced for run in own.values()) / tokens,
            "grammar_ms_per_token": 1e3 * sum(run.grammar_s for run in own.values()) / tokens,
            "full_rows": sum(run.n_full for run in own.values()) / sum(run.n_masked for run in own.values()),
            "same_text": all(run.text == by_way["plain"][place].text for place, run in own.items()),
        }
        median, low, high = spread(row["tokens_per_s"])
        speed = f"{median:.1f} ({low:.1f}-{high:.1f})"
        print(
            f"{way:<18}{speed:>20}{row['ratio']:>9.2f}{row['accepted_share']:>10.0%}"
            f"{row['forced_share']:>8.0%}{row['grammar_ms_per_token']:>10.2f} ms{row['full_rows']:>12.1%}"
            f"{'' if row['same_text'] else '  another text than plain'}"
        )
    whole = [json.loads(run.text) for run in runs if run.stop_reason == "eog"]
    print(f"{len(whole)} of {len(runs)} texts were whole; the others were cut by -n")
    return rows


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n-predict", "-n", type=int, default=256)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--save", action="store_true", help="write bench/results/structured-*.json")
    args = parser.parse_args()
    runs: list[Filled] = []
    loads = [other_load()]
    with Engine(args.target, args.draft, profile=False, prefix_cache=None) as engine:
        grammars = {task: Grammar.from_json_schema(engine.target, TASKS[task][1]) for task in args.tasks}
        for way in WAYS:  # both models run once, and every context is made
            fill(engine, args.tasks[0], way, grammars[args.tasks[0]], args, 0)
        for turn in range(args.rounds):
            for shift, task in enumerate(args.tasks):
                for i in range(len(WAYS)):
                    way = list(WAYS)[(i + turn + shift) % len(WAYS)]
                    engine.forget()  # else the next way copies the text
                    runs.append(fill(engine, task, way, grammars[task], args, turn))
        rows = report(runs)
    loads.append(other_load())
    found = {"machine": facts(loads), "temperature": args.temp, "rows": rows, "runs": list(map(asdict, runs))}
    if args.save:
        save(f"structured-temp{args.temp:g}", found, loads)


if __name__ == "__main__":
    main()
