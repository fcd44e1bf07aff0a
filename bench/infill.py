"""Measures code completion: functions of Python's standard library whose middle is written anew, greedily.

Each task is a file with the middle of one function's body taken out; the model sees up to 60 lines before the
gap and 40 after it, as an editor sends them. Every round fills each gap once each variant, in an order that
shifts. The store of texts seen before is emptied before each, so that it knows the file alone.

    plain    --drafter none
    suffix   drafts from the file alone
    auto     the draft model too: what pays

Printed: tokens a second after the first token, the ratio to plain decoding of the same gap in the same round
with its interval (docs/measuring.md), and the share of the emitted tokens that each source drafted.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from edgespec import Engine, SamplingParams
from edgespec.apps.bench.bench import run_of
from edgespec.apps.bench.runs import PLAIN, Cell, Run, rotated
from edgespec.apps.bench.summary import summarise_cell
from edgespec.apps.server.request_reader import FimGap, fim_of, make_fim_prompt
from edgespec.decoding.choices import DrafterName
from edgespec.models.suites import Prompt
from ratios import shown_interval
from script import Measuring, parser, start

MODULES = (
    "argparse", "ast", "calendar", "configparser", "csv", "difflib", "fractions", "gettext", "gzip", "heapq",
    "imaplib", "ipaddress", "mailbox", "optparse", "plistlib", "shlex", "statistics", "tarfile", "textwrap",
    "zipfile",
)  # fmt: skip
VARIANTS: dict[str, DrafterName] = {PLAIN: "none", "suffix": "suffix", "auto": "auto"}
BEFORE, AFTER = 60, 40  # lines
LEAST_LINES, MOST_LINES = 9, 40  # of a function


@dataclass(frozen=True)
class Task:
    """A gap in a file."""

    name: str
    gap: FimGap


@dataclass(frozen=True)
class Filled:
    """A gap that was filled."""

    run: Run
    sources: dict[str, tuple[int, int]]


def tasks(modules: Sequence[str], each: int) -> Iterator[Task]:
    """Yield the first functions of each module that are long enough, without the middle third of each."""
    for name in modules:
        source = inspect.getsource(import_module(name))
        lines = source.splitlines(keepends=True)
        functions = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
            and LEAST_LINES <= (node.end_lineno or 0) - node.body[0].lineno <= MOST_LINES
        ]
        functions.sort(key=lambda node: node.lineno)
        later = functions[len(functions) // 2 :]  # there is text before them
        for function in later[:each]:
            first, last = function.body[0].lineno - 1, function.end_lineno or 0
            third = (last - first) // 3
            begin, end = first + third, last - third
            before = "".join(lines[max(0, begin - BEFORE) : begin])
            after = "".join(lines[end : end + AFTER])
            yield Task(f"{name}.{function.name}", FimGap(before, after))


def fill(engine: Engine, task: Task, variant: str, n_predict: int, turn: int) -> Filled:
    """Fill a gap once."""
    engine.forget()
    target = engine.target
    prompt = make_fim_prompt(target, fim_of(target, "target"), task.gap, 1 << 15).tokens
    result = engine.generate(
        prompt,
        params=SamplingParams(temperature=0),
        drafter=VARIANTS[variant],
        n_predict=n_predict,
    )
    run = run_of(result, Prompt(task.name, "infill", task.name), variant, turn)
    return Filled(run, result.sources)


def report(filled: Sequence[Filled]) -> None:
    """Print what the runs say."""
    print(f"{'':<10}{'tokens/s':>10}{'x plain, after the first (95 %)':>34}{'accepted':>10}  sources")
    overall = summarise_cell(Cell("", None, "", tuple(one.run for one in filled)))[0]
    beside = {found.variant: found for found in overall.comparisons}
    for variant in overall.variants:
        own = [one for one in filled if one.run.variant == variant.variant]
        tokens = sum(one.run.tokens for one in own)
        decoding = sum(one.run.total_s - (one.run.ttft_s or 0.0) for one in own)
        drafted: Counter[str] = Counter()
        for one in own:
            drafted.update({name: accepted for name, (_, accepted) in one.sources.items()})
        found = beside.get(variant.variant)
        print(
            f"{variant.variant:<10}{(tokens - len(own)) / decoding:>10.1f}"
            f"{shown_interval(found.decode_speedup if found else None):>34}"
            f"{drafted.total() / tokens:>10.0%}"
            f"  {', '.join(f'{name} {n / tokens:.0%}' for name, n in drafted.most_common())}"
            f"{'  another text than plain' if found and found.n_identical < found.n_compared else ''}"
        )


def main() -> None:
    """Run."""
    parse = parser(__doc__)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--each", type=int, default=2, help="functions of each module")
    parse.add_argument("--modules", nargs="+", default=list(MODULES))
    parse.add_argument("--n-predict", "-n", type=int, default=128)
    args = parse.parse_args()
    chosen = list(tasks(args.modules, args.each))
    measuring = Measuring(args)
    runs: list[Filled] = []
    with Engine(args.target, args.draft, n_threads=args.threads, profile=False, prefix_cache=None) as engine:
        for variant in VARIANTS:  # both models run once, and every context is made
            fill(engine, chosen[0], variant, args.n_predict, 0)
        for turn in range(args.rounds):
            for shift, task in enumerate(chosen):
                runs += [
                    fill(engine, task, variant, args.n_predict, turn)
                    for variant in rotated(list(VARIANTS), turn + shift)
                ]
    measuring.end()
    print(measuring)
    print(f"{len(chosen)} gaps, {args.rounds} rounds, {args.n_predict} tokens at the most")
    report(runs)
    measuring.keep("infill", {"runs": runs})


if __name__ == "__main__":
    start(main)
