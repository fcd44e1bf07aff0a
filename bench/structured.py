"""Measures how fast JSON schemas are filled: plain and speculative decoding, both with the grammar.

Interleaved: every round fills each schema once with each variant, in an order that shifts. Figures are of
whole generations, prefill included: median tokens a second, and the median ratio to plain decoding of the
same schema in the same round with its interval (docs/measuring.md). A seed is given, so that each variant
writes the same text.

    plain             --drafter none
    auto              forced tokens, text seen before, the draft model: what pays
    auto, none forced the same without what the grammar forces

Also printed: the share of emitted tokens that were forced, and the grammar's time per emitted token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edgespec import Engine, SamplingParams
from edgespec.apps.bench.bench import run_of
from edgespec.apps.bench.runs import PLAIN, Cell, Run, rotated
from edgespec.apps.bench.summary import summarise_cell
from edgespec.decoding.choices import DrafterName
from edgespec.decoding.grammar.constraint import Constraint
from edgespec.decoding.grammar.grammar import Grammar
from edgespec.models.suites import Prompt
from ratios import shown_interval
from script import Measuring, parser, start


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
VARIANTS: dict[str, DrafterName] = {PLAIN: "none", "auto": "auto", "auto, none forced": "auto"}


@dataclass(frozen=True)
class Filled:
    """One schema filled once, and what the grammar did."""

    run: Run
    forced: int
    """Forced tokens accepted."""
    grammar_s: float
    """Time in the grammar."""
    text: str


@contextmanager
def timed(*, forced: bool) -> Iterator[Callable[[], float]]:
    """Count the seconds in the grammar; without `forced`, it tells no forced tokens."""
    seconds = 0.0
    depth = 0
    names = ("mask", "fitting", "forced", "forced_run", "advance")
    originals = {name: getattr(Constraint, name) for name in names}

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
        Constraint.forced = lambda *_: None  # type: ignore[method-assign]
    try:
        yield lambda: seconds
    finally:
        for name, original in originals.items():
            setattr(Constraint, name, original)


def fill(
    engine: Engine, task: str, variant: str, grammar: Grammar, args: argparse.Namespace, turn: int
) -> Filled:
    """Fill a schema once."""
    request, schema = TASKS[task]
    prompt = Prompt(task, task, f"{request} Answer with JSON of {', '.join(schema['properties'])}.")
    with timed(forced="none forced" not in variant) as grammar_s:
        result = engine.generate(
            prompt.text,
            params=SamplingParams(temperature=args.temp),
            seed=turn,
            grammar=grammar,
            drafter=VARIANTS[variant],
            n_predict=args.n_predict,
        )
    return Filled(
        run=run_of(result, prompt, variant, turn),
        forced=result.sources.get("forced", (0, 0))[1],
        grammar_s=grammar_s(),
        text=result.text,
    )


def report(filled: Sequence[Filled]) -> None:
    """Print what the runs say."""
    titles = f"{'tokens/s':>10}{'x plain (95 %)':>24}{'accepted':>10}{'forced':>8}{'grammar':>13}"
    print(f"{'':<18}{titles}")
    overall = summarise_cell(Cell("", None, "", tuple(one.run for one in filled)))[0]
    beside = {found.variant: found for found in overall.comparisons}
    for variant in overall.variants:
        own = [one for one in filled if one.run.variant == variant.variant]
        tokens = sum(one.run.tokens for one in own)
        accepted = sum(n * k for one in own for _, n, k in one.run.histogram or ())
        found = beside.get(variant.variant)
        print(
            f"{variant.variant:<18}{variant.whole_tokens_per_s or 0:>10.1f}"
            f"{shown_interval(found.speedup if found else None):>24}{accepted / tokens:>10.0%}"
            f"{sum(one.forced for one in own) / tokens:>8.0%}"
            f"{1e3 * sum(one.grammar_s for one in own) / tokens:>10.2f} ms"
            f"{'  another text than plain' if found and found.n_identical < found.n_compared else ''}"
        )
    whole = [json.loads(one.text) for one in filled if one.run.stop_reason == "eog"]
    print(f"{len(whole)} of {len(filled)} texts were whole; the others were cut by -n")


def main() -> None:
    """Run."""
    parse = parser(__doc__)
    parse.add_argument("--rounds", type=int, default=5)
    parse.add_argument("--n-predict", "-n", type=int, default=256)
    parse.add_argument("--temp", type=float, default=0.0)
    parse.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    args = parse.parse_args()
    runs: list[Filled] = []
    measuring = Measuring(args)
    with Engine(args.target, args.draft, n_threads=args.threads, profile=False, prefix_cache=None) as engine:
        grammars = {task: Grammar.from_json_schema(engine.target, TASKS[task][1]) for task in args.tasks}
        for variant in VARIANTS:  # both models run once, and every context is made
            fill(engine, args.tasks[0], variant, grammars[args.tasks[0]], args, 0)
        for turn in range(args.rounds):
            for shift, task in enumerate(args.tasks):
                for variant in rotated(list(VARIANTS), turn + shift):
                    engine.forget()  # else the next variant copies the text
                    runs.append(fill(engine, task, variant, grammars[task], args, turn))
    measuring.end()
    print(measuring)
    report(runs)
    measuring.keep(f"structured-temp{args.temp:g}", {"temperature": args.temp, "runs": runs})


if __name__ == "__main__":
    start(main)
