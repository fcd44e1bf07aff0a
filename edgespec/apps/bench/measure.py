"""Measures targets with drafts on prompts, plain decoding and speculation in turns, and returns raw runs.

`bench` measures the engine that it holds until a limit is reached. `compare`, `draft make` and `draft eval`
measure `KeptCells`: each is a separate process, so that its peak memory is its own and a crash ends
only it. Its raw runs are kept as a file when it ends: what was stopped resumes.

    round 0   prompt 1: plain, auto    prompt 2: auto, plain    ...
    round 1   prompt 1: auto, plain    prompt 2: plain, auto    ...
    ...       until the interval of the speed-up is tight, or the time is up

Neighbouring runs are compared, and each prompt begins with a different variant, so that a machine that
becomes slower slows all variants alike. Before each generation the engine forgets earlier texts and what it
learnt from them: no answer is drafted from an earlier answer, and each run begins with the same profile.

Other servers are asked from outside (`LlamaServer`): they run with their own defaults, and their times are
those of whoever asks. `started_server` starts llama.cpp's on the same files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from edgespec import Engine
from edgespec.apps.bench.machine import MachineWatch
from edgespec.apps.bench.runs import (
    PEER,
    PLAIN,
    PLAIN_VARIANT,
    Run,
    Variant,
    WorkProgressFn,
    read_kept,
    rotated,
    store,
    text_hash,
)
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.bench.summary import noise
from edgespec.apps.bench.teacher import TeacherForcing, TeacherScores
from edgespec.decoding.choices import DrafterName, Rule
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import PromptTokens
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.llama.weights import Model
from edgespec.models.store import sha256_of
from edgespec.platform.machine import peak_rss_bytes
from edgespec.platform.metering import choose_meter
from edgespec.platform.processes import REFUSED, Cancellation, ReportingChild, child_command, last_line, send
from edgespec.platform.processes import answer as answer_request

if TYPE_CHECKING:
    import httpx

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


def tokens_of(engine: Engine, prompt: Prompt) -> Sequence[int]:
    """Return the tokens of a prompt."""
    return prompt.tokens or engine.prompt_tokens(prompt.text, images=prompt.images)


def encode_images(engine: Engine, prompts: Sequence[Prompt]) -> str:
    """Encode the images of all prompts, so that no variant waits for them; return how long it took."""
    started, n = time.perf_counter(), sum(len(prompt.images) for prompt in prompts)
    for prompt in prompts:
        tokens = tokens_of(engine, prompt) if prompt.images else ()
        for span in tokens.spans if isinstance(tokens, PromptTokens) else ():
            span.start().result()
    return f"{n} images, encoded in {time.perf_counter() - started:.2f} s" if n else ""


def fitting(engine: Engine, prompts: Sequence[Prompt], n_predict: int) -> tuple[list[Prompt], list[str]]:
    """Return the prompts that the target can answer in full, and a line for each that is left out.

    Raises EdgespecError if none is left.
    """
    fit, lines = [], []
    for prompt in prompts:
        needed = len(tokens_of(engine, prompt)) + n_predict + 1
        if needed <= engine.target.n_ctx_train:
            fit.append(prompt)
            continue
        lines.append(
            f"{prompt.id} is left out: with {n_predict} tokens of answer it needs a context of {needed}, "
            f"and {engine.target_name} was trained for {engine.target.n_ctx_train}"
        )
    if not fit:
        raise EdgespecError(f"{lines[0]}; no prompt is left")
    return fit, lines


@contextmanager
def leaving_no_trace(engine: Engine) -> Iterator[None]:
    """Forget on leaving what the engine learnt inside, so that the next benchmark does not profit from it."""
    try:
        yield
    finally:
        engine.forget(tables=True)


def warm_up(engine: Engine, prompts: Sequence[Prompt], settings: BenchSettings) -> None:
    """Begin to answer the longest prompt in every variant, to enlarge the contexts and read the weights."""
    longest = max(prompts, key=lambda prompt: len(tokens_of(engine, prompt)))
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
        images=prompt.images,
        chat=False if prompt.answer else None,
        stop=("\n",) if prompt.answer else (),
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
    if variant.exact or prompt.answer:
        return replace(run, exact=variant.exact)
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
        right=result.text.strip() == prompt.answer if prompt.answer else None,
    )


def _compared_with_target(
    engine: Engine, stream: Stream, alone: Sequence[bool], *, greedy: bool
) -> tuple[float | None, float | None]:
    """Return the share of tokens that are the target's likeliest, and the mean KL divergence of their writer.

    The divergence of a token that the target wrote is 0. The share is None at a temperature above 0, the
    divergence is None if acceptance was lenient.
    """
    n_tokens, wants_kl = len(stream.result.token_ids), stream.result.mode == "cascade"
    if not n_tokens or not (greedy or wants_kl):
        return None, None
    marks = _read_again(engine, stream, engine.draft if any(alone) else None)
    agreement = sum(marks.best) / n_tokens if greedy else None
    kl = itertools.compress(marks.kl, alone)  # no small model: it wrote nothing
    return agreement, sum(kl) / n_tokens if wants_kl else None


def _read_again(
    engine: Engine, stream: Stream, small: Model | None, signals: Cancellation | None = None
) -> TeacherScores:
    """Let the target, and `small`, read an answer that is finished; this is not timed."""
    n_prompt, answer = stream.result.prompt_tokens, stream.result.token_ids
    n_ctx = n_prompt + len(answer)
    with TeacherForcing(
        engine.target, small, n_ctx=n_ctx, n_threads=engine.n_threads, signals=signals
    ) as teacher:
        return teacher.scores(stream.tokens[:n_prompt], answer)


def read_answers(
    engine: Engine,
    prompts: Sequence[str],
    *,
    n_predict: int,
    signals: Cancellation | None = None,
    on_progress: WorkProgressFn = lambda _what, _done, _total: None,
) -> list[TeacherScores]:
    """Let the target answer `prompts` greedily and both models read the answers. `engine` has a draft."""
    found = []
    for i, prompt in enumerate(prompts):
        on_progress("the target answers, and both models read it", i, len(prompts))
        stream = engine.stream(prompt, params=SamplingParams(temperature=0.0), n_predict=n_predict)
        for _ in stream:
            pass
        found.append(_read_again(engine, stream, engine.draft, signals))
    on_progress("the target answers, and both models read it", len(prompts), len(prompts))
    return found


def turns(engine: Engine, settings: BenchSettings, prompt: Prompt, round_: int, place: int) -> Iterator[Run]:
    """Yield a run of every variant over one prompt; which variant comes first depends on round and place."""
    for variant in rotated((PLAIN_VARIANT, *settings.variants), round_ + place):
        yield generate(engine, prompt, variant, settings, round_=round_)


@dataclass(frozen=True, slots=True)
class BenchControl:
    """The limits of a benchmark, which ends at the first one, and the functions that it calls meanwhile."""

    on_run: Callable[[Run], None]
    """Called with each run at once, so that it can be kept if a later one fails."""
    budget_s: float
    """Seconds, without loading."""
    precision: float
    """Stop once the speed-up's interval over the rounds is this narrow, as a share of the speed-up."""
    rounds: int | None
    """None: as many rounds as the budget allows."""
    on_progress: Callable[[str, float, float, str], None] = lambda _what, _spent, _budget, _detail: None
    """Called before each prompt with the round, the seconds spent, those of the budget, and details."""
    on_message: Callable[[str], None] = lambda _line: None
    """Called with a line about a peer that failed and is left out from then on."""


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    control: BenchControl,
    peers: list[LlamaServer],
) -> str:
    """Measure rounds until a limit is reached, and return in words which limit it was.

    When the budget is spent, only the current prompt is finished, even if others had no turn yet: order
    `prompts` so that all categories come early. A peer that fails is removed from `peers`. Raises what the
    engine raises.
    """
    began = time.monotonic()
    runs: list[Run] = []
    tight: float | None = None
    longest = 0.0
    with leaving_no_trace(engine):
        warm_up(engine, prompts, settings)
        for round_ in itertools.count() if control.rounds is None else range(control.rounds):
            tight = noise(runs) if round_ >= FEWEST_ROUNDS else None
            if tight is not None and tight <= control.precision:
                return f"{_rounds(round_)}; the interval over them is tight ({tight:.1%})"
            width = f", interval {tight:.1%}" if tight is not None else ""
            for place, prompt in enumerate(prompts):
                prompt_began = time.monotonic()
                spent = prompt_began - began
                if spent + longest > control.budget_s and runs:
                    had = f"{_rounds(round_)} and {place} of {len(prompts)} prompts of the next"
                    return f"{had}; the budget of {control.budget_s:g} s was spent{width}"
                detail = f", {place + 1} of {len(prompts)} prompts{width}"
                control.on_progress(f"round {round_ + 1}", spent, control.budget_s, detail)
                for run in turns(engine, settings, prompt, round_, place):
                    runs.append(run)
                    control.on_run(run)
                _run_peers(peers, prompt, round_, control)
                longest = max(longest, time.monotonic() - prompt_began)
    return f"{_rounds(control.rounds or 0)}, as asked for"


def _run_peers(peers: list[LlamaServer], prompt: Prompt, round_: int, control: BenchControl) -> None:
    for peer in [*peers]:
        try:
            for run in peer.runs(prompt, round_):
                control.on_run(run)
        except EdgespecError as error:
            control.on_message(f"{error}; {peer.name} is left out from here on")
            peers.remove(peer)


def _rounds(n: int) -> str:
    return f"{n} round{'' if n == 1 else 's'}"


# ---- cells, each in its own process ----


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """The result of the process of a cell."""

    kernels: str
    """The instruction set of edgespec's kernels, or "stock"."""
    runs: tuple[Run, ...]
    peak_rss_bytes: int
    """The largest resident memory of the process, mapped model files included."""
    warnings: tuple[str, ...]
    """The engine's, and disturbances of the machine."""


@dataclass(frozen=True, slots=True)
class CellTask:
    """The task of a cell's process in a round: to measure a target with a draft, or without one."""

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
    round: int = 0

    @property
    def n_runs(self) -> int:
        """The number of runs in a round, if all prompts fit."""
        return len(self.prompts) * sum(1 + len(settings.variants) for settings, _ in self.sittings)

    def key(self, conditions: object) -> str:
        """Return a hash of all that the runs depend on: settings, contents of the files, and `conditions`."""
        hashes = [sha256_of(Path(path)) for path in (self.target, self.draft) if path]
        facts = (hashes, replace(self, target="", draft=None), conditions)
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()

    def measure(self, on_count: Callable[[int], None]) -> MeasuredCell:
        """Measure in a new process, and call `on_count` with 0, 1, ... runs. Raises EdgespecError."""
        on_count(0)
        watch = MachineWatch(n_threads=self.n_threads)
        for kind, value in reports_of("edgespec.apps.bench.measure", "_in_child", self):
            if kind == "run":
                watch.sample()
                on_count(value)
            else:
                found = msgspec.convert(value, MeasuredCell)
        return replace(found, warnings=(*found.warnings, *watch.warnings()))


class KeptCells:
    """Cells measured in turns, round by round, and the files of their runs: FOLDER/NAME.ROUND.KEY.json."""

    def __init__(self, tasks: Mapping[str, CellTask], folder: Path, conditions: object = None) -> None:
        """Read what `folder` holds of `tasks`, by name.

        `conditions`: what the runs depend on besides their task, such as the machine.
        """
        self.skipped: dict[str, str] = {}
        """The reason, by name, of each cell that failed since."""
        self._tasks, self._folder, self._conditions = tasks, folder, conditions

    def stored(self, name: str, round_: int) -> MeasuredCell | None:
        """Return a cell as measured in a round; None if its file is missing, outdated or damaged."""
        return read_kept(*self._place(name, round_), MeasuredCell)

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
                    store(*self._place(name, round_), found)
            done += self._tasks[name].n_runs

    def _place(self, name: str, round_: int) -> tuple[Path, str]:
        """Return the file and the key of a cell in a round."""
        key = replace(self._tasks[name], round=round_).key(self._conditions)
        return self._folder / f"{name.replace('/', '_')}.{round_}.{key[:8]}.json", key


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
    runs: list[Run] = []
    warnings: list[str] = []
    with (
        choose_meter(assume_watts=task.assume_watts) as meter,
        Engine(
            task.target,
            task.draft,
            drafter=task.drafter,
            n_threads=task.n_threads,
            kernels=task.kernels,
            meter=meter,
            on_message=warnings.append,
        ) as engine,
    ):
        if task.draft and engine.draft is None:
            raise EdgespecError("one of the models cannot take tokens back: nothing is drafted")
        for settings, first in task.sittings:
            prompts, too_long = fitting(engine, task.prompts, settings.n_predict)
            warnings += too_long
            with nullcontext() if settings.learns else leaving_no_trace(engine):
                warm_up(engine, prompts, settings)
                for place, prompt in enumerate(prompts):
                    for run in turns(engine, settings, prompt, first + task.round, place):
                        runs.append(run)
                        send("run", len(runs))
        kernels = engine.kernels
    send("cell", MeasuredCell(kernels, tuple(runs), peak_rss_bytes(), tuple(warnings)))


TIMEOUT_S = 1800.0
"""Seconds that a peer may take to load, or to answer a prompt."""

LLAMA_SERVER = "llama-server"

_GAMMA = 3  # llama.cpp's default
_MARGIN = 64  # tokens of context: for drafts beyond the end
_LONGEST_LINE = 200  # characters of an answer that are shown


@contextmanager
def started_server(
    directory: Path, engine: Engine, draft: Path | None, settings: BenchSettings, prompts: Sequence[Prompt]
) -> Iterator[LlamaServer]:
    """Run the llama-server in `directory` on the engine's target, with room for `prompts`, while entered.

    `draft`: drafts 3 tokens at a time; None: plain decoding. Raises EdgespecError with the last line of its
    log if it ends early.
    """
    longest = max(len(tokens_of(engine, prompt)) for prompt in prompts)
    n_ctx = min(longest + settings.n_predict + _MARGIN, engine.target.n_ctx_train)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    threads, program = engine.n_threads, str(directory.absolute() / LLAMA_SERVER)
    options = f"--host 127.0.0.1 --port {port} -c {n_ctx} -np 1 -t {threads} -ngl 0 -cram 0 --no-webui"
    command = [program, "-m", str(engine.target.path.absolute()), *options.split(), "--no-log-prefix"]
    if draft:
        options = f"-td {threads} -ngld 0 --spec-type draft-simple --spec-draft-n-max {_GAMMA}"
        command += ["-md", str(draft.absolute()), *options.split()]
    if engine.adapters:
        adapters = [f"{path.absolute()}:{scale}" for path, scale in engine.adapters]
        command += ["--lora-scaled", ",".join(adapters)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            child_command("os", "execl", program, *command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which ends it
        )
        with process:
            try:
                address = f"http://127.0.0.1:{port}"
                _await(process, address, log)
                yield LlamaServer(address, engine, settings, draft, f"model-{_GAMMA}" if draft else PLAIN)
            finally:
                process.kill()


def _await(process: subprocess.Popen[bytes], address: str, log: IO[bytes]) -> None:
    """Wait until a server is healthy. Raises EdgespecError if it ends, or takes too long."""
    import httpx

    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health").is_success:
                return
        time.sleep(0.1)
    how = "is not ready" if process.returncode is None else f"ended with code {process.returncode}"
    log.seek(0)
    raise EdgespecError(f"{LLAMA_SERVER} {how}: {last_line(log.read()) or 'no output'}")


@dataclass
class LlamaServer:
    """A server that speaks OpenAI's completions, such as llama-server, as a peer of `bench.measure`.

    It drafts as it was started. Raises EdgespecError when it does not answer.
    """

    address: str
    """Such as http://127.0.0.1:8080."""
    engine: Engine
    """Whose chat template makes the prompts."""
    settings: BenchSettings
    draft: Path | None = None
    """What it was started to draft with."""
    variant: str = "served"
    """The name of its runs."""

    def __post_init__(self) -> None:
        """Ask for its build, which only llama.cpp's own tells, or which model it serves."""
        self._build = ""
        with self._asking("GET", "/v1/models") as answer:
            served = json.loads(answer.read())["data"][0]["id"]
        with suppress(EdgespecError), self._asking("GET", "/props") as answer:
            self._build = json.loads(answer.read())["build_info"]
        drafted = f", drafted by {self.draft.stem}" if self.draft else ""
        self.name = f"{PEER}{self._build or f'at {self.address} with {served}'}{drafted}"
        """Its build, or address and model; and what drafts."""

    @contextmanager
    def _asking(self, method: str, path: str, body: object = None) -> Iterator[httpx.Response]:
        import httpx

        whole = f"{self.address.rstrip('/')}{path}"
        try:
            with httpx.stream(method, whole, json=body, timeout=TIMEOUT_S) as answer:
                if answer.is_error:
                    said = " ".join(answer.read().decode(errors="replace").split())[:_LONGEST_LINE]
                    raise EdgespecError(f"{whole} answers {answer.status_code}: {said}")
                yield answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EdgespecError(f"{self.address}: {error or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError):
            raise EdgespecError(f"{whole} does not answer as OpenAI's API does") from None

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield the run. Raises EdgespecError, also when it had the prompt in its cache."""
        params, n = self.settings.params, self.settings.n_predict
        body: dict[str, Any] = {"prompt": rendered(self.engine, prompt.text), "max_tokens": n, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "cache_prompt": False}
        body |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        body |= {"min_p": params.min_p, "seed": (self.settings.seed + round_) % 0xFFFFFFFF}
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        ended, first_s, started = None, None, time.perf_counter()
        with self._asking("POST", "/v1/completions", body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    usage, timings = event.get("usage") or usage, event.get("timings") or timings
                    for choice in event["choices"]:
                        ended = choice.get("finish_reason") or ended
                        if first_s is None and choice["text"]:
                            first_s = time.perf_counter() - started
            whole_s = time.perf_counter() - started
            n_prompt, n_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if n_cached > n_prompt // 2:
            raise EdgespecError(f"{self.address} keeps prompts: start it without a cache of them")
        if self._build:
            n_tokens -= ended == "stop"  # it counts the end-of-generation token
            if self.draft and n_tokens > _GAMMA and not timings.get("draft_n"):
                raise EdgespecError(f"{LLAMA_SERVER} drafts nothing with {self.draft.stem}")
        counts = n_prompt, n_tokens, whole_s
        yield Run(prompt.id, prompt.category, f"{PEER}{self.variant}", round_, *counts, first_s, None)


def rendered(engine: Engine, prompt: str) -> str:
    """Return the text that llama.cpp's programs tokenize to exactly `Engine.prompt_tokens`.

    If the model wants a BOS, they add one even when the chat template has already written it.
    """
    target = engine.target
    if target.chat_template is None:
        return prompt
    text = target.render_chat([{"role": "user", "content": prompt}])
    bos = "" if target.bos is None else target.piece(target.bos, special=True).decode(errors="replace")
    bare = text.removeprefix(bos)
    again = target.tokenize(bare, add_special=True, parse_special=True)
    return bare if again == engine.prompt_tokens(prompt) else text
