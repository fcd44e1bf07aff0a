"""Measures targets with drafts on prompts, plain decoding and speculation in turns, and returns raw runs.

`bench` measures the engine that it holds until a limit is reached. `compare`, `draft make` and `draft eval`
measure `KeptCells`: each is a process of its own, so that its peak memory is not another's and a crash ends
only it. Its raw runs are kept as a file when it ends: what was stopped resumes.

    round 0   prompt 1: plain, auto    prompt 2: auto, plain    ...
    round 1   prompt 1: auto, plain    prompt 2: plain, auto    ...
    ...       until the interval of the speed-up is tight, or the time is up

Neighbouring runs are compared, and each prompt begins with a different variant, so that a machine that
becomes slower slows all variants alike. Before each generation the engine forgets earlier texts and what it
learnt from them: no answer is drafted from an earlier answer, and each run begins with the same profile.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edgespec.apps.bench.runs import Run, WorkProgressFn, keep, read_kept, rotated, text_hash
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.bench.summary import noise
from edgespec.apps.bench.variants import PLAIN_VARIANT, Variant
from edgespec.decoding.choices import DrafterName, Rule
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.lossy.teacher import TeacherForcing, TeacherScores
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.models.hashes import sha256_of
from edgespec.platform.child import REFUSED, ReportingChild, say
from edgespec.platform.child import answer as answer_request
from edgespec.platform.machine import MachineWatch
from edgespec.platform.memory import peak_rss_bytes
from edgespec.platform.metering import choose_meter
from edgespec.platform.signals import Cancellation

BUDGET_S = 600.0
"""Seconds that a benchmark may take by default, without loading."""

PRECISION = 0.03
"""Default for `BenchLimits.precision`."""

FEWEST_ROUNDS = 3
"""With fewer rounds, the width of the interval means nothing."""

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings that all runs of a benchmark share."""

    variants: tuple[Variant, ...]
    """The variants measured in addition to plain decoding."""
    n_predict: int = 128
    temperature: float = 0.0
    seed: int = 0
    """Seed of round 0; each further round's is one higher."""
    rule: Rule | None = None
    """None: "match", which writes the same texts as plain decoding."""
    learns: bool = False
    """Whether the pair's profile learns from the runs; otherwise each begins with the same one."""

    def __post_init__(self) -> None:
        """Raise UsageError for values that no generation accepts, before anything is loaded."""
        Options(params=self.params, n_predict=self.n_predict, seed=self.seed, rule=self.rule)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters: llama.cpp's defaults at this temperature."""
        return SamplingParams(temperature=self.temperature)

    def facts(self) -> dict[str, str | int | float]:
        """Return the settings as an outcome stores them."""
        return {
            "variants": ", ".join(variant.name for variant in self.variants),
            "n_predict": self.n_predict,
            "temperature": self.temperature,
            "seed": self.seed,
            "rule": self.rule or "match",
        }


class Peer(Protocol):
    """Another program that continues the same prompts with the same files."""

    @property
    def name(self) -> str:
        """The name of the other program in tables and messages."""

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a run of each of its variants."""


def unfit(engine: Engine, prompts: Sequence[Prompt], n_predict: int) -> dict[str, str]:
    """Return the ids of prompts that the target cannot answer in full, each with the reason."""
    found = {}
    for prompt in prompts:
        needed = len(prompt.tokens or engine.prompt_tokens(prompt.text)) + n_predict + 1
        if needed > engine.target.n_ctx_train:
            found[prompt.id] = (
                f"with {n_predict} tokens of answer it needs a context of {needed}, and "
                f"{engine.target_name} was trained for {engine.target.n_ctx_train}"
            )
    return found


@contextmanager
def leaving_no_trace(engine: Engine) -> Iterator[None]:
    """Forget on leaving what the engine learnt inside, so that the next benchmark does not profit from it."""
    try:
        yield
    finally:
        engine.forget(tables=True)


def warm_up(engine: Engine, prompts: Sequence[Prompt], settings: BenchSettings) -> None:
    """Begin to answer the longest prompt in every variant, to enlarge the contexts and read the weights."""
    longest = max(prompts, key=lambda prompt: len(prompt.tokens or engine.prompt_tokens(prompt.text)))
    for variant in (PLAIN_VARIANT, *settings.variants):
        stream = _stream(engine, longest, variant, settings)
        for _ in itertools.islice(stream, _WARM_UP_TOKENS):
            pass
        stream.close()


def _stream(
    engine: Engine, prompt: Prompt, variant: Variant, settings: BenchSettings, round_: int = 0
) -> Stream:
    """Begin to answer as a new process would, with the profile that the engine was made with."""
    engine.forget(tables=not settings.learns)
    return engine.stream(
        prompt.tokens or prompt.text,
        params=settings.params,
        seed=settings.seed + round_,
        n_predict=settings.n_predict,
        drafter=variant.chosen,
        gamma=variant.gamma,
        rule=settings.rule if variant.exact else None,
        cascade=variant.cascade,
        lenience=variant.lenience,
    )


def generate(
    engine: Engine, prompt: Prompt, variant: Variant, settings: BenchSettings, *, round_: int = 0
) -> Run:
    """Answer one prompt in one variant; compare an inexact variant's text with the target's distribution."""
    stream = _stream(engine, prompt, variant, settings, round_)
    alone = [token.origin == "alone" for token in stream]
    run = run_of(stream.result, prompt, variant.name, round_)
    if variant.exact:
        return run
    agreement, kl = _compared_with_target(engine, stream, alone, greedy=settings.params.greedy)
    return replace(run, exact=False, agreement=agreement, kl=kl)


def run_of(result: Result, prompt: Prompt, variant: str, round_: int) -> Run:
    """Return the record of a generation."""
    stats = result.stats
    return Run(
        prompt=prompt.id,
        category=prompt.category,
        variant=variant,
        round=round_,
        prompt_tokens=result.prompt_tokens,
        tokens=len(result.token_ids),
        total_s=stats.total_s,
        ttft_s=stats.ttft_s,
        prefill_s=stats.prefill_s,
        draft_prefill_s=stats.draft_prefill_s,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        rest_s=stats.rest_s,
        n_emitted=stats.n_emitted,
        histogram=stats.histogram,
        stop_reason=result.stop_reason,
        text_sha256=text_hash(result.token_ids),
        energy=result.energy,
        target_share=result.target_share,
    )


def _compared_with_target(
    engine: Engine, stream: Stream, alone: Sequence[bool], *, greedy: bool
) -> tuple[float | None, float | None]:
    """Return the share of tokens that are the target's likeliest, and the mean KL divergence of their writer.

    Both models read the text again; this is not timed. The divergence of a token that the target wrote is 0.
    The share is None at a temperature above 0, the divergence is None if acceptance was lenient.
    """
    n_prompt, answer = stream.result.prompt_tokens, stream.result.token_ids
    small = engine.draft if any(alone) else None
    wants_kl = stream.result.mode == "cascade"
    if not answer or not (greedy or wants_kl):
        return None, None
    n_ctx = n_prompt + len(answer)
    with TeacherForcing(engine.target, small, n_ctx=n_ctx, n_threads=engine.n_threads) as teacher:
        marks = teacher.marks(stream.tokens[:n_prompt], answer)
    agreement = sum(marks.best) / len(answer) if greedy else None
    if not wants_kl:
        return agreement, None
    divergences = [each for each, own in zip(marks.kl, alone, strict=True) if own] if small else []
    return agreement, sum(divergences) / len(answer)


def read_answers(
    engine: Engine,
    prompts: Sequence[str],
    *,
    n_predict: int,
    signals: Cancellation | None = None,
    on_progress: WorkProgressFn = lambda _what, _done, _total: None,
) -> list[TeacherScores]:
    """Let the target answer `prompts` greedily and both models read the answers. `engine` has a draft."""
    assert engine.draft is not None  # noqa: S101 - for the type checker
    texts = []
    for i, prompt in enumerate(prompts):
        on_progress("the target answers", i, len(prompts))
        stream = engine.stream(prompt, params=SamplingParams(temperature=0.0), n_predict=n_predict)
        for _ in stream:
            pass
        n_prompt = stream.result.prompt_tokens
        texts.append((stream.tokens[:n_prompt], stream.tokens[n_prompt:]))
    found = []
    with TeacherForcing(
        engine.target,
        engine.draft,
        n_ctx=max(len(prompt) + len(answer) for prompt, answer in texts),
        n_threads=engine.n_threads,
        signals=signals,
    ) as teacher:
        for i, (tokens, answer) in enumerate(texts):
            on_progress("both models read the answers", i, len(texts))
            found.append(teacher.marks(tokens, answer))
    on_progress("both models read the answers", len(texts), len(texts))
    return found


def turns(engine: Engine, settings: BenchSettings, prompt: Prompt, round_: int, place: int) -> Iterator[Run]:
    """Yield a run of every variant over one prompt; which variant comes first depends on round and place."""
    for variant in rotated((PLAIN_VARIANT, *settings.variants), round_ + place):
        yield generate(engine, prompt, variant, settings, round_=round_)


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """How far a benchmark is: prompts of the round, and seconds spent."""

    round: int
    done: int
    """Prompts that were done in this round."""
    total: int
    """All of a round."""
    spent_s: float
    noise: float | None = None
    """Width of the interval so far, as in `BenchLimits.precision`; None before it is known."""


@dataclass(frozen=True, slots=True)
class BenchLimits:
    """A benchmark ends at the first of these limits."""

    budget_s: float = BUDGET_S
    precision: float = PRECISION
    """Stop once the speed-up's interval over the rounds is this narrow, as a share of the speed-up."""
    rounds: int | None = None
    """None: as many rounds as the budget allows."""


@dataclass(frozen=True, slots=True)
class BenchListener:
    """Functions that a running benchmark calls: with runs, progress and lines for the user."""

    on_run: Callable[[Run], None]
    """Called with each run at once, so that it can be kept if a later one fails."""
    on_progress: Callable[[BenchProgress], None] = lambda _progress: None
    """Called before each prompt."""
    on_message: Callable[[str], None] = lambda _line: None
    """Called with a line about a peer that failed and is left out from then on."""


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    *,
    limits: BenchLimits,
    listener: BenchListener,
    peers: list[Peer],
) -> str:
    """Measure rounds until a limit is reached, and return in words which limit it was.

    When the budget is spent, only the current prompt is finished, even if others had no turn yet: order
    `prompts` so that all categories come early. A peer that fails is removed from `peers`. Raises what the
    engine raises.
    """
    began = time.monotonic()
    with leaving_no_trace(engine):
        warm_up(engine, prompts, settings)
        runs: list[Run] = []
        longest = 0.0
        round_ = 0
        while limits.rounds is None or round_ < limits.rounds:
            tight = noise(runs) if round_ >= FEWEST_ROUNDS else None
            if tight is not None and tight <= limits.precision:
                return f"{_rounds(round_)}; the interval over them is tight ({tight:.1%})"
            for place, prompt in enumerate(prompts):
                prompt_began = time.monotonic()
                if prompt_began - began + longest > limits.budget_s and runs:
                    so_far = [_rounds(round_)] if round_ else []
                    if place:
                        so_far.append(f"{place} of {len(prompts)} prompts of round {round_ + 1}")
                    width = f"; the interval over them is {tight:.1%} wide" if tight is not None else ""
                    return f"{' and '.join(so_far)}; the budget of {limits.budget_s:g} s was spent{width}"
                spent_s = prompt_began - began
                listener.on_progress(BenchProgress(round_, place, len(prompts), spent_s, tight))
                for run in turns(engine, settings, prompt, round_, place):
                    runs.append(run)
                    listener.on_run(run)
                _run_peers(peers, prompt, round_, listener)
                longest = max(longest, time.monotonic() - prompt_began)
            round_ += 1
        return f"{_rounds(round_)}, as asked for"


def _run_peers(peers: list[Peer], prompt: Prompt, round_: int, listener: BenchListener) -> None:
    for peer in [*peers]:
        try:
            for run in peer.runs(prompt, round_):
                listener.on_run(run)
        except EdgespecError as error:
            listener.on_message(f"{error}; {peer.name} is left out from here on")
            peers.remove(peer)


def _rounds(n: int) -> str:
    return f"{n} round{'' if n == 1 else 's'}"


# ---- cells, each in its own process ----


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """What the process of a cell measured."""

    kernels: str
    """The instruction set of edgespec's kernels, or "stock"."""
    runs: tuple[Run, ...]
    peak_rss_bytes: int
    """The largest resident memory of the process, mapped model files included."""
    warnings: tuple[str, ...]
    """The engine's, and disturbances of the machine."""


@dataclass(frozen=True, slots=True)
class CellTask:
    """What the process of a cell measures in a round: a target with a draft, or without one."""

    target: str
    """The model's file, and the draft's."""
    draft: str | None
    drafter: DrafterName
    """The drafter that the engine loads models for."""
    kernels: KernelsChoice
    n_threads: int | None
    prompts: tuple[Prompt, ...]
    sittings: tuple[tuple[BenchSettings, int], ...]
    """Settings, one after the other over all prompts, and the number that their runs have in round 0."""
    assume_watts: float | None = None
    leaves_out: bool = False
    """Whether prompts that do not fit are left out; otherwise nothing is measured."""
    round: int = 0

    @property
    def n_runs(self) -> int:
        """The number of runs in a round, if all prompts fit."""
        return len(self.prompts) * sum(1 + len(settings.variants) for settings, _ in self.sittings)

    def key(self, conditions: object) -> str:
        """Return a hash of all that the runs depend on, of the files their contents, and `conditions`."""
        hashes = [sha256_of(Path(path)) for path in (self.target, self.draft) if path]
        facts = (hashes, replace(self, target="", draft=None), conditions)
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()

    def measure(self, on_count: Callable[[int], None]) -> MeasuredCell:
        """Measure in a new process, and call `on_count` with 0, 1, ... runs. Raises EdgespecError."""
        kernels, peak = "", 0
        on_count(0)
        runs: list[Run] = []
        warnings: list[str] = []
        watch = MachineWatch(n_threads=self.n_threads)
        for kind, value in reports_of("edgespec.apps.bench.measure", "_in_child", self):
            match kind:
                case "kernels":
                    kernels = value
                case "run":
                    runs.append(msgspec.convert(value, Run))
                    watch.sample()
                    on_count(len(runs))
                case "message":
                    warnings.append(value)
                case "peak":
                    peak = value
        return MeasuredCell(kernels, tuple(runs), peak, (*warnings, *watch.warnings()))


class KeptCells:
    """Cells measured in turns, round by round, and the files of their runs: FOLDER/NAME.ROUND.json."""

    def __init__(self, tasks: Mapping[str, CellTask], folder: Path, conditions: object = None) -> None:
        """Take what `folder` has of `tasks`, by name.

        `conditions`: what the runs depend on beside their task, such as the machine.
        """
        self.skipped: dict[str, str] = {}
        """The reason, by name, of each cell that failed since."""
        self._tasks, self._folder, self._conditions = tasks, folder, conditions

    def stored(self, name: str, round_: int) -> MeasuredCell | None:
        """Return a cell as measured in a round; None if its file is missing, outdated or damaged."""
        return read_kept(self._file(name, round_), self._key(name, round_), MeasuredCell)

    def measure(self, rounds: Iterable[int], on_progress: WorkProgressFn) -> None:
        """Measure what is missing and keep each whole cell; one that fails is skipped from then on.

        `on_progress` counts runs, those of kept and skipped cells too. Raises OSError if a cell cannot be
        kept; earlier ones stay.
        """
        names = [*self._tasks]
        order = [(round_, name) for round_ in rounds if names for name in rotated(names, round_)]
        total = sum(self._tasks[name].n_runs for _, name in order)

        def show(what: str, before: int, n: int) -> None:
            on_progress(what, before + n, total)

        done = 0
        for round_, name in order:
            if name not in self.skipped and self.stored(name, round_) is None:
                on_count = partial(show, f"round {round_ + 1}: {name}", done)
                try:
                    found = replace(self._tasks[name], round=round_).measure(on_count)
                except EdgespecError as error:
                    self.skipped[name] = str(error)
                else:
                    keep(self._file(name, round_), self._key(name, round_), found)
            done += self._tasks[name].n_runs

    def _file(self, name: str, round_: int) -> Path:
        return self._folder / f"{name.replace('/', '_')}.{round_}.json"

    def _key(self, name: str, round_: int) -> str:
        return replace(self._tasks[name], round=round_).key(self._conditions)


def reports_of(module: str, function: str, request: object) -> Iterator[tuple[str, Any]]:
    """Yield what a `ReportingChild` reports. Raises EdgespecError with the reason if it fails."""
    child = ReportingChild(module, function, request)
    yield from child
    code, complaint = child.ended.code, child.ended.complaint
    if code == REFUSED:
        raise EdgespecError(complaint)
    if code != 0:
        how = f"by signal {-code}" if code and code < 0 else f"with code {code}"
        raise EdgespecError(f"its process ended {how}: {complaint or 'it may have run out of memory'}")


def _in_child() -> int:
    return answer_request(CellTask, _measure_cell)


def _measure_cell(task: CellTask) -> None:
    with (
        choose_meter(assume_watts=task.assume_watts) as meter,
        Engine(
            task.target,
            task.draft,
            drafter=task.drafter,
            n_threads=task.n_threads,
            kernels=task.kernels,
            meter=meter,
            on_message=lambda line: say("message", line),
        ) as engine,
    ):
        if task.draft and engine.draft is None:
            raise EdgespecError("one of the models cannot take tokens back: nothing is drafted")
        say("kernels", engine.kernels)
        for settings, first in task.sittings:
            too_long = unfit(engine, task.prompts, settings.n_predict)
            prompts = [prompt for prompt in task.prompts if prompt.id not in too_long]
            if too_long and not (task.leaves_out and prompts):
                raise EdgespecError(": ".join(next(iter(too_long.items()))))
            with nullcontext() if settings.learns else leaving_no_trace(engine):
                warm_up(engine, prompts, settings)
                for place, prompt in enumerate(prompts):
                    for run in turns(engine, settings, prompt, first + task.round, place):
                        say("run", run)
        say("peak", peak_rss_bytes())
