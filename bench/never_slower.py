"""Is `auto` ever slower than plain decoding? And how close does it come to the best fixed choice?

One engine, its kernels the same for all ways (`--kernels off`: llama.cpp's). Every round runs each way
once on each prompt, one right after the other, in an order that shifts from prompt to prompt and from
round to round. Times are whole generations, the prompt's reading by both models included, loading not.
Ratios are taken within a round and prompt; then the median over the rounds and the geometric mean over a
category's prompts. Before each generation the engine forgets the texts it has seen (`Engine.forget`), or
every way would copy the answer of the way before it. What auto learns of acceptance and of the length of
answers it keeps from prompt to prompt, as it does for a user, and so from one round to the next; what it
could learn from the other ways on the same prompt is undone. `--cold`: it begins each time with the stored
profile (`edgespec profile`). The benchmark works on a copy of the user's profiles and leaves them alone.

Answers of different lengths: at temperature 0 all ways write the same text. Above it no seed is given, as
by default, and two ways write two texts. Forbidding the end of the text would make the lengths equal, but
a model kept from ending repeats itself, which is what drafters like best. So each way's time is taken to
the length of plain's answer in that round, its distribution being the same: what is spent once (up to the
first token, and the draft's reading of the prompt) as it was, the rest in proportion to the tokens. For
equal lengths that changes nothing. A pair of unequal lengths of which one is below 8 tokens is left out.

The best fixed choice of a category is found after the fact, from these very runs, with `--sweep` among all
lengths and drafters: the largest of many noisy figures, so what auto lacks to it is somewhat overstated.

`--short`: answers below 40 tokens instead (bench/prompt_sets/short.jsonl), where what drafting costs before
it pays weighs most. `--remembered`: the suffix store holds the plain answers to all the other prompts, as
that of somebody who has asked before; nothing in it is an answer to this one.

Ways: plain, auto, tree (with sampled siblings), chain (without branches), and DRAFTER-GAMMA with DRAFTER
model, suffix or staged; without -GAMMA the scheduler decides. model-3 is llama.cpp's default. Prompts:
our own sets, beside them HumanEval and files in Spec-Bench's format (bench/prompts.py). A prompt with a
temperature of its own runs at that one only.

`--second-run` measures something else: what a request gains from a similar one before it. The second of
each pair of bench/prompt_sets/again.jsonl, by plain, by auto with an empty history ("unseen"), and by auto
whose history on disk holds the first request and its answer ("seen"). Each in an engine of its own, as with
`edgespec run`; its loading is not counted, nor is the history's, which goes on beside the prompt's reading.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import prompts as prompt_sets
from edgespec import Engine, SamplingParams
from edgespec.llama.kernels import STOCK
from edgespec.models.store import Store
from edgespec.platform.files import cache_root
from edgespec.records import Result
from machine import facts, other_load, save, spread
from prompts import Prompt

PLAIN, AUTO, TREE, CHAIN, DEFAULT = "plain", "auto", "tree", "chain", "model-3"
UNSEEN, SEEN = "unseen", "seen"
SWEEP = {"model": range(1, 9), "suffix": (1, 2, 4, 8, 16), "staged": (2, 4, 8)}
COPY = "copy"
SLOWEST, OF_BEST, COPY_GAIN = 0.97, 0.95, 3.0
"""The goals: of plain in every category; of the best fixed choice; of plain where an answer copies."""
FEWEST = 8
"""Of answers of unequal length, one with fewer tokens says nothing of speed."""

Place = tuple[str, str]
"""A prompt: its category and its id."""


@dataclass(frozen=True)
class Way:
    """What `Engine.generate` is told of drafting. `gamma` None: the scheduler decides."""

    drafter: str
    gamma: int | None = None

    @property
    def name(self) -> str:
        """As on the command line."""
        if self.drafter == "none":
            return PLAIN
        return self.drafter if self.gamma is None else f"{self.drafter}-{self.gamma}"


def way(name: str) -> Way:
    """Return the way of that name."""
    drafter, dash, gamma = name.partition("-")
    if name == PLAIN:
        return Way("none")
    fixed = drafter in SWEEP and (not dash or (gamma.isdecimal() and int(gamma) > 0))
    if fixed or name in {AUTO, TREE, CHAIN}:
        return Way(drafter, int(gamma) if dash else None)
    raise argparse.ArgumentTypeError(f"{name}: expected plain, auto, tree, chain, {'|'.join(SWEEP)}[-GAMMA]")


@dataclass(frozen=True)
class Run:
    """One generation."""

    round: int
    temperature: float
    category: str
    prompt: str
    way: str
    tokens: int
    total_s: float
    once_s: float
    """Of it, what does not grow with the answer: up to the first token, and the draft's prompt."""
    tau: float | None = None
    alpha: float | None = None
    n_drafted: int = 0
    n_accepted: int = 0
    text: str = ""
    """A hash of the tokens."""
    note: str = ""
    """What the engine says of why it drafted or did not."""

    def seconds(self, n: int) -> float:
        """Return what an answer of `n` tokens would have taken."""
        if n == self.tokens:
            return self.total_s
        return self.once_s + (self.total_s - self.once_s) * (n - 1) / (self.tokens - 1)


def speedup(run: Run, base: Run, plain: Run) -> float | None:
    """Return how many times as fast as `base` it was, both at `plain`'s length; None: not comparable."""
    lengths = {one.tokens for one in (run, base, plain)}
    if len(lengths) > 1 and min(lengths) < FEWEST:
        return None
    return base.seconds(plain.tokens) / run.seconds(plain.tokens)


class Table:
    """The runs of one temperature by round, prompt and way, and the ratios between them."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = {(run.round, (run.category, run.prompt), run.way): run for run in runs}
        self.rounds = sorted({turn for turn, _, _ in self._runs})
        self.places: list[Place] = list(dict.fromkeys(place for _, place, _ in self._runs))
        self.categories = list(dict.fromkeys(category for category, _ in self.places))
        self.ways = list(dict.fromkeys(name for _, _, name in self._runs))
        self.fixed = [name for name in self.ways if name == PLAIN or "-" in name]

    def of(self, name: str, place: Place) -> list[Run]:
        """Return the runs of a way on a prompt, one a round."""
        return [self._runs[turn, place, name] for turn in self.rounds]

    def speedups(self, name: str, base: str, place: Place) -> list[float]:
        """Return the ratios of a prompt, one for each round in which it has one."""
        runs = zip(self.of(name, place), self.of(base, place), self.of(PLAIN, place), strict=True)
        return [ratio for three in runs if (ratio := speedup(*three)) is not None]

    def every(self, name: str, base: str, category: str) -> list[float]:
        """Return the ratios of a category, of each prompt and round."""
        places = [place for place in self.places if place[0] == category]
        return [ratio for place in places for ratio in self.speedups(name, base, place)]

    def ratio(self, name: str, base: str = PLAIN, category: str | None = None) -> float | None:
        """Return the ratio of a category, or over all, each counted alike; None where there is none."""
        if category is None:
            found = [self.ratio(name, base, one) for one in self.categories]
        else:
            ratios = [self.speedups(name, base, place) for place in self.places if place[0] == category]
            found = [statistics.median(some) for some in ratios if some]
        values = [value for value in found if value is not None]
        return statistics.geometric_mean(values) if values else None

    def left_out(self) -> list[Place]:
        """Return the prompts of which some round cannot be compared."""
        pairs = [(place, name) for place in self.places for name in self.ways]
        short = {place for place, name in pairs if len(self.speedups(name, PLAIN, place)) < len(self.rounds)}
        return [place for place in self.places if place in short]

    def plain_speed(self, category: str) -> float:
        """Return plain decoding's tokens a second of whole generations."""
        places = [place for place in self.places if place[0] == category]
        return statistics.median(run.tokens / run.total_s for p in places for run in self.of(PLAIN, p))

    def best_fixed(self, category: str) -> str:
        """Return the fastest way that neither decides nor learns; plain is one."""
        return max(self.fixed, key=lambda name: self.ratio(name, PLAIN, category) or 0.0)

    def same_text(self, name: str) -> tuple[int, int]:
        """Return how many of the generations have plain's text, and of how many."""
        pairs = [pair for p in self.places for pair in zip(self.of(name, p), self.of(PLAIN, p), strict=True)]
        return sum(one.text == plain.text for one, plain in pairs), len(pairs)

    def worst(self, name: str, n: int) -> list[tuple[float, Place]]:
        """Return the prompts on which a way was slowest beside plain, the slowest first."""
        found = [(self.speedups(name, PLAIN, place), place) for place in self.places]
        return sorted((statistics.median(ratios), place) for ratios, place in found if ratios)[:n]


def verdicts(table: Table, *, own_kernels: bool) -> list[str]:
    """Return a line for each goal of auto that the runs can speak of."""
    if AUTO not in table.ways:
        return []

    def judged(goal: str, base: str | None, least: float, *, more: bool = False) -> str:
        """`base` None: the best fixed choice. `more`: just reaching `least` is not enough."""
        found = {c: table.ratio(AUTO, base or table.best_fixed(c), c) for c in table.categories}
        known = {c: ratio for c, ratio in found.items() if ratio is not None}
        missed = {c: ratio for c, ratio in known.items() if ratio < least or (more and ratio == least)}
        silent = [c for c in found if c not in known]
        if missed:
            line = f"MISSED: {goal}: " + ", ".join(f"{c} {ratio:.3f}" for c, ratio in missed.items())
        elif known:
            lowest = min(known, key=lambda c: known[c])
            line = f"met: {goal}; lowest {known[lowest]:.3f}, {lowest}"
        else:
            line = f"not judged: {goal}"
        return line + (f" (nothing comparable: {', '.join(silent)})" if silent else "")

    lines = [judged(f"no category below {SLOWEST} of plain", PLAIN, SLOWEST)]
    if any(name not in (PLAIN, DEFAULT) for name in table.fixed):
        lines.append(judged(f"at least {OF_BEST} of the best fixed choice", None, OF_BEST))
    if DEFAULT in table.ways:
        lines.append(judged(f"ahead of {DEFAULT}, llama.cpp's default", DEFAULT, 1.0, more=True))
    copy = table.ratio(AUTO, PLAIN, COPY) if COPY in table.categories else None
    if copy is not None and own_kernels:
        verdict = "met" if copy >= COPY_GAIN else "MISSED"
        lines.append(f"{verdict}: copying at {COPY_GAIN:g} times plain with edgespec's kernels: {copy:.3f}")
    elif copy is not None:
        lines.append(f"stated: copying at {copy:.3f} times plain with llama.cpp's kernels")
    return lines


def shown(value: float | None, width: int = 8) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"


def quartiles(values: list[float]) -> str:
    _, low, high = spread(values) if values else (0.0, 0.0, 0.0)
    return f"{low:.2f}-{high:.2f}" if values else "-"


def report(table: Table, texts: Mapping[Place, str], *, own_kernels: bool, one_text: bool) -> None:
    """Print what the runs of one temperature say. `one_text`: all ways should have written the same."""
    ways = [name for name in table.ways if name != PLAIN]
    has_auto = AUTO in ways
    print("times plain, whole generation:" + "".join(f"  [{i}] {name}" for i, name in enumerate(ways, 1)))
    line = f"{'':<26}{'prompts':>8}{'plain tokens/s':>16}" + "".join(
        f"{f'[{i}]':>8}" for i, _ in enumerate(ways, 1)
    )
    print(line + (f"{'auto: quartiles':>18}{'best fixed':>12}{'auto/best':>11}" if has_auto else ""))
    for category in table.categories:
        n = sum(place[0] == category for place in table.places)
        line = f"{category:<26}{n:>8}{table.plain_speed(category):>16.1f}"
        line += "".join(shown(table.ratio(name, PLAIN, category)) for name in ways)
        if has_auto:
            best = table.best_fixed(category)
            line += f"{quartiles(table.every(AUTO, PLAIN, category)):>18}{best:>12}"
            line += shown(table.ratio(AUTO, best, category), 11)
        print(line)
    print(f"{'geometric mean':<50}" + "".join(shown(table.ratio(name)) for name in ways))
    for verdict in verdicts(table, own_kernels=own_kernels):
        print(verdict)
    for ratio, place in table.worst(AUTO, 5) if has_auto else []:
        category, prompt = place
        start = " ".join(texts[place].split())[:50]
        note = table.of(AUTO, place)[-1].note
        print(f"auto at its worst: {ratio:.2f}  {category}  {prompt}  {start!r}  {note}")
    if one_text:
        counts = {name: table.same_text(name) for name in ways}
        print("same text as plain: " + ", ".join(f"{name} {k} of {n}" for name, (k, n) in counts.items()))
        if different := [name for name, (equal, n) in counts.items() if equal < n]:
            print(f"NOT THE SAME TEXT as plain: {', '.join(different)}")
    if left_out := table.left_out():
        print(f"not comparable in some round, an answer of fewer than {FEWEST} tokens: {left_out}")


def report_second(table: Table) -> None:
    """Print what a request gains from a similar one before it."""
    line = f"{'':<26}{'plain tokens/s':>16}{'unseen/plain':>14}{'seen/plain':>12}"
    print(line + f"{'seen/unseen':>13}{'quartiles':>14}")
    for family in table.categories:
        line = (
            f"{family:<26}{table.plain_speed(family):>16.1f}{shown(table.ratio(UNSEEN, PLAIN, family), 14)}"
        )
        line += f"{shown(table.ratio(SEEN, PLAIN, family), 12)}{shown(table.ratio(SEEN, UNSEEN, family), 13)}"
        print(line + f"{quartiles(table.every(SEEN, UNSEEN, family)):>14}")
    line = f"{'geometric mean':<42}{shown(table.ratio(UNSEEN), 14)}{shown(table.ratio(SEEN), 12)}"
    print(line + shown(table.ratio(SEEN, UNSEEN), 13))


def finished(result: Result, turn: int, temperature: float, place: Place, name: str) -> Run:
    """Return what is kept of a generation."""
    stats = result.stats
    return Run(
        turn,
        temperature,
        *place,
        name,
        tokens=len(result.token_ids),
        total_s=stats.total_s,
        once_s=(stats.total_s if stats.ttft_s is None else stats.ttft_s) + stats.draft_prefill_s,
        tau=stats.tau,
        alpha=stats.alpha,
        n_drafted=stats.n_drafted,
        n_accepted=stats.n_accepted,
        text=hashlib.sha256(repr(result.token_ids).encode()).hexdigest()[:16],
        note=result.note,
    )


class Bench:
    """An engine, and how it is asked."""

    def __init__(self, engine: Engine, *, n_predict: int, cold: bool = False, seeded: bool = False) -> None:
        self._remembered: dict[Place, list[int]] = {}
        self._engine = engine
        self._n_predict = n_predict
        self._cold = cold
        self._seeded = seeded

    def one_text(self, temperature: float) -> bool:
        """Whether all ways are to write the same."""
        return self._seeded or temperature == 0

    def ask(self, text: str, how: Way, turn: int, temperature: float, n_predict: int | None = None) -> Result:
        """Generate once."""
        options: dict[str, Any] = {"drafter": how.drafter, "gamma": how.gamma}
        options["params"] = SamplingParams(temperature=temperature)
        options["seed"] = turn if self.one_text(temperature) else None
        knowledge = self._engine._knowledge
        learnt = knowledge._learnt.values()
        known = copy.deepcopy(([one.predictor for one in learnt], knowledge._lengths))
        result = self._engine.generate(text, n_predict=n_predict or self._n_predict, **options)
        if how.name != AUTO:
            self._engine.forget()  # which ends the generation: then the length of its answer is learnt
            predictors, knowledge._lengths = known
            for one, predictor in zip(learnt, predictors, strict=True):
                one.predictor = predictor
        return result

    def remember(self, prompts: Sequence[Prompt]) -> None:
        """Keep plain's answers, which `forget` then leaves in the store but for that to its own prompt."""
        for prompt in prompts:
            options: dict[str, Any] = {"drafter": "none", "params": SamplingParams(temperature=0.0)}
            n_predict = prompt.n_predict or self._n_predict
            stream = self._engine.stream(prompt.text, n_predict=n_predict, **options)
            for _ in stream:
                pass
            self._remembered[prompt.category, prompt.id] = [*stream.timeline, -1]

    def forget(self, place: Place) -> None:
        """Make the engine forget the texts it saw, and with `cold` what it learnt since it was opened."""
        self._engine.forget(tables=self._cold)
        others = [tokens for other, tokens in self._remembered.items() if other != place]
        if others:
            self._engine._earlier_texts.ready().load(np.concatenate(others).astype(np.int32))

    def warm_up(self, prompts: Sequence[Prompt], ways: Sequence[Way]) -> None:
        """Make the contexts large enough for every prompt, and run each drafter once."""

        def needed(prompt: Prompt) -> int:
            return len(self._engine.prompt_tokens(prompt.text)) + (prompt.n_predict or self._n_predict)

        longest = max(prompts, key=needed)
        for how in {how.drafter: how for how in ways}.values():
            options: dict[str, Any] = {"drafter": how.drafter, "gamma": how.gamma}
            n_predict = longest.n_predict or self._n_predict
            stream = self._engine.stream(longest.text, n_predict=n_predict, **options)
            for _, _ in zip(range(FEWEST), stream, strict=False):
                pass
            stream.close()

    def compare(
        self, prompts: Sequence[Prompt], ways: Sequence[Way], rounds: int, temperature: float
    ) -> list[Run]:
        """Run each way on each prompt, interleaved."""
        runs = []
        for turn in range(rounds):
            for shift, prompt in enumerate(prompts):
                for i in range(len(ways)):
                    how = ways[(i + turn + shift) % len(ways)]
                    place = prompt.category, prompt.id
                    self.forget(place)
                    result = self.ask(prompt.text, how, turn, temperature, prompt.n_predict)
                    runs.append(finished(result, turn, temperature, place, how.name))
                print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return in_order(runs, [how.name for how in ways])


@contextmanager
def own_cache() -> Iterator[None]:
    """Work on a copy of the user's cache, without history: what is learnt here ends here."""
    os.environ.setdefault("EDGESPEC_MODELS_DIR", str(Store.default().root))
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        if cache_root().is_dir():
            ignored = shutil.ignore_patterns("models", "history")
            shutil.copytree(cache_root(), Path(folder) / cache_root().name, ignore=ignored)
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def second_run(
    open_engine: Callable[[], Engine],
    families: Mapping[str, tuple[str, str]],
    rounds: int,
    temperature: float,
    *,
    n_predict: int,
    seeded: bool = False,
) -> list[Run]:
    """Run the second request of each family: plainly, by itself, and after the first."""
    names = [PLAIN, UNSEEN, SEEN]
    runs = []
    for turn in range(rounds):
        for shift, (family, (first, second)) in enumerate(families.items()):
            for i in range(len(names)):
                name = names[(i + turn + shift) % len(names)]
                with own_cache():
                    if name == SEEN:
                        with open_engine() as engine:
                            Bench(engine, n_predict=n_predict, seeded=seeded).ask(
                                first, way(AUTO), turn, temperature
                            )
                    with open_engine() as engine:
                        how = way(PLAIN if name == PLAIN else AUTO)
                        result = Bench(engine, n_predict=n_predict, seeded=seeded).ask(
                            second, how, turn, temperature
                        )
                runs.append(finished(result, turn, temperature, (family, "second"), name))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return in_order(runs, names)


def in_order(runs: list[Run], names: list[str]) -> list[Run]:
    """Return the runs with the ways in the order of `names`."""
    return sorted(runs, key=lambda run: names.index(run.way))


def chosen_ways(args: argparse.Namespace, *, has_draft: bool) -> list[Way]:
    """Return the ways to compare: plain, those asked for, and the sweep's."""
    names: list[Way] = [way(PLAIN), *args.ways]
    if args.sweep:
        names += [Way(drafter, gamma) for drafter, gammas in SWEEP.items() for gamma in gammas]
    return [one for one in dict.fromkeys(names) if has_draft or one.drafter not in ("model", "staged")]


def own_sets(args: argparse.Namespace) -> tuple[Path, ...]:
    """Return the files of our own prompts."""
    return (prompt_sets.SHORT,) if args.short else prompt_sets.OWN


def chosen_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of our own sets and of the files given."""
    per_category = args.per_category
    prompts = [prompt for file in own_sets(args) for prompt in prompt_sets.load(file, per_category)]
    if args.humaneval:
        problems = prompt_sets.humaneval(args.humaneval, per_category or 4)
        prompts += [
            Prompt(name, str(i), text) for name, some in problems.items() for i, text in enumerate(some)
        ]
    for file in args.prompts:
        prompts += prompt_sets.load(file, per_category or 4)
    known = {prompt.category for prompt in prompts}
    if unknown := set(args.category or ()) - known:
        raise SystemExit(f"--category {next(iter(unknown))}: must be of {', '.join(sorted(known))}")
    prompts = [prompt for prompt in prompts if not args.category or prompt.category in args.category]
    return list({(prompt.category, prompt.id): prompt for prompt in prompts}.values())


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="*", type=Path, metavar="PROMPTS.jsonl", help="Spec-Bench's format")
    parser.add_argument("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz")
    parser.add_argument(
        "--per-category", type=int, metavar="N", help="prompts of each; default: 4 of a file's, all of ours"
    )
    parser.add_argument("--category", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temp", type=numbers, default=[0.0, 0.8], metavar="T,T")
    parser.add_argument("-n", "--n-predict", type=int, default=192)
    parser.add_argument("--ways", type=ways_of, default=ways_of(f"{PLAIN},{AUTO},{DEFAULT}"), metavar="A,B")
    parser.add_argument("--sweep", action="store_true", help="all fixed choices too")
    parser.add_argument("--kernels", choices=["auto", "off"], default="auto")
    parser.add_argument("--second-run", action="store_true", help="measure second requests instead")
    parser.add_argument("--cold", action="store_true", help="forget what was learnt of acceptance, too")
    parser.add_argument("--short", action="store_true", help="short answers instead of our other sets")
    parser.add_argument(
        "--remembered", action="store_true", help="the suffix store holds the answers to the other prompts"
    )
    parser.add_argument(
        "--seeded", action="store_true", help="one seed for all ways above temperature 0, too"
    )
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print the raw runs too, as JSON")
    parser.add_argument("--save", metavar="LABEL", help="write bench/results/never-slower-LABEL-MACHINE.json")
    args = parser.parse_args(argv)
    if min(args.rounds, args.per_category or 1) < 1 or args.n_predict < FEWEST:
        parser.error(f"numbers must be at least 1, --n-predict at least {FEWEST}")
    return args


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def ways_of(text: str) -> list[Way]:
    return [way(name) for name in text.split(",")]


def main() -> None:
    args = arguments()
    prompts = [] if args.second_run else chosen_prompts(args)
    families = prompt_sets.pairs(prompt_sets.AGAIN) if args.second_run else {}
    own = sorted({p.temperature for p in prompts if p.temperature is not None})
    loads = [other_load()]
    runs: dict[float, list[Run]] = {}
    open_engine = partial(Engine, args.target, args.draft, n_threads=args.threads, kernels=args.kernels)
    with own_cache(), open_engine() as engine:
        bench = Bench(engine, n_predict=args.n_predict, cold=args.cold, seeded=args.seeded)
        models = {"target": engine.target_name, "draft": engine.draft_name}
        n_threads, kernels = engine.n_threads, engine.kernels
        if not args.second_run:
            ways = chosen_ways(args, has_draft=engine.draft is not None)
            bench.warm_up(prompts, ways)
            if args.remembered:
                bench.remember(prompts)
            for temperature in dict.fromkeys([*args.temp, *own]):
                general = temperature in args.temp
                some = [
                    p for p in prompts if p.temperature == temperature or (general and p.temperature is None)
                ]
                if some:
                    runs[temperature] = bench.compare(some, ways, args.rounds, temperature)
    if args.second_run:
        with_history = partial(open_engine, history=True)
        for temperature in dict.fromkeys(args.temp):
            runs[temperature] = second_run(
                with_history, families, args.rounds, temperature, n_predict=args.n_predict, seeded=args.seeded
            )
    loads.append(other_load())
    machine = facts(loads)

    print(f"{models['target']} drafted by {models['draft']}, {n_threads} threads")
    print(f"{machine['processor']}, kernels in use: {kernels}; {machine['libraries']}")
    print(f"other load {machine['other load']}")
    print(
        f"{args.rounds} rounds, interleaved; {args.n_predict} tokens where a prompt has no limit of its own"
    )
    texts = {(prompt.category, prompt.id): prompt.text for prompt in prompts}
    for temperature, some_runs in runs.items():
        table = Table(some_runs)
        print(f"\ntemperature {temperature:g}, {len(table.places)} prompts")
        if args.second_run:
            report_second(table)
        else:
            one_text = bench.one_text(temperature)
            report(table, texts, own_kernels=kernels != STOCK, one_text=one_text)
    files = [prompt_sets.AGAIN] if args.second_run else [*own_sets(args), *args.prompts]
    outcome = {
        "machine": machine,
        "command": sys.argv,
        **models,
        "kernels in use": kernels,
        "prompt files": [prompt_sets.source(file) for file in (*files, args.humaneval) if file],
        "runs": [asdict(run) for some_runs in runs.values() for run in some_runs],
    }
    if args.json:
        print(json.dumps(outcome, indent=1))
    if args.save:
        save(f"never-slower-{args.save}", outcome, loads)


if __name__ == "__main__":
    main()
