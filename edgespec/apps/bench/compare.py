"""The matrix: targets x drafts x kernels on one suite of prompts, each a cell of `measure.KeptCells`.

    FOLDER/runs/CELL.0.KEY.json             the raw runs of a cell in round 0
    FOLDER/runs/problems-CELL.0.KEY.json    its answers to problems
    FOLDER/accuracy.KEY.json                scores of a target's quantizations on a text

Rounds are the outer loop: every cell is measured once, then every cell again. So a machine that becomes
slower affects all cells alike, and a comparison stopped after a round has a whole table. It resumes from its
folder: what another comparison measured there has other keys.

The effect of quantization on a model is perplexity, KL divergence and top-1 agreement on a text:

    with tempfile.TemporaryFile(dir=folder) as file:
        reference = Reference(file)
        best = score(model, "best", tokens, reference, ...)         becomes the reference
        other = score(another, "other", tokens, reference, ...)     is compared with it

One model is in memory at a time. The text is read in windows, each from an empty context. A window's first
token is not scored: there is no text before it to predict it from. Arithmetic problems are prompts of cells
(measure.py) that have one right answer; lm-eval runs other tasks (docs/measuring.md).
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.apps.bench.machine import Facts
from edgespec.apps.bench.measure import BenchSettings, CellTask, KeptCells, MeasuredCell, reports_of
from edgespec.apps.bench.quantizations import ModelFile
from edgespec.apps.bench.runs import (
    PLAIN,
    AccuracyScore,
    BenchmarkOutcome,
    Cell,
    ProblemsSolved,
    Variant,
    WorkProgressFn,
    is_kept,
    read_kept,
    store,
)
from edgespec.apps.bench.suites import Prompt, Suite
from edgespec.decoding.choices import DrafterName
from edgespec.decoding.session import Rows
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import fits_in_memory
from edgespec.models.hub import check_disk
from edgespec.models.store import sha256_of
from edgespec.platform.processes import answer, send

WINDOW = 512
"""Tokens of a window by default, as in llama.cpp's perplexity program."""

LONGEST_ANSWER = 12
"""Tokens of an answer to a problem: its numbers have four digits and a sign at most."""

_AT_ONCE = 64  # tokens a pass: 39 MB of logits with a vocabulary of 152k; a whole window would be 311 MB
_CURE = "free some space, score fewer tokens, or choose a folder on another disk"
_BYTES_OF_ROWS = 16 << 20  # of one float64 array; four exist at a time
_EXAMPLES = "12 + 7 = 19\n60 - 85 = -25\n8 * 9 = 72\n6 * 5 + 4 = 34\n"

_LogProbs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _ScoredText:
    """The windows that a model reads. Two models can be compared if they read the same."""

    windows: tuple[tuple[int, ...], ...]
    """Token ids, with BOS if the model adds one."""
    n_unscored: int
    """Tokens at the beginning of each window that are not scored."""
    n_vocab: int


@dataclass
class Reference:
    """The logits of the best model, in a temporary file; the first model that is scored becomes it.

    They are float32, as computed, so that a model's divergence from itself is exactly 0. Log-probabilities
    in float16 would take half the space but were too coarse for fine quantizations: the 2.9e-5 nats of a
    tiny model's Q8_0 came out 5 % too low. 512 tokens of a vocabulary of 152k take 311 MB.
    """

    file: IO[bytes]
    name: str = ""
    """The model's; "": no model was scored yet."""
    text: _ScoredText | None = None


def score(
    model: Model,
    name: str,
    tokens: Sequence[int],
    reference: Reference,
    *,
    n_threads: int,
    n_window: int = WINDOW,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> AccuracyScore:
    """Return how well `model`, called `name`, predicts `tokens`, compared with `reference`.

    This model fills an empty reference; if that fails, the reference stays empty. Windows have `n_window`
    tokens, BOS included if the model adds one, and are the same for all models compared. `on_progress` takes
    the number of tokens read so far and the number in the text. Raises EdgespecError if the text is shorter
    than a window, the model was trained for shorter windows, a logit is not finite, or the tokens or the size
    of the vocabulary differ from the reference's; OSError on a full disk.
    """
    text = _text(model, tokens, n_window)
    compares = bool(reference.name)
    if compares and text != reference.text:
        problem = "the size of its vocabulary, or the tokens of the text, are not the same"
        raise EdgespecError(f"{model.path}: cannot be compared with the reference: {problem}")
    reference.file.seek(0)
    nll: list[float] = []
    kl: list[float] = []
    n_same = 0
    with Session(
        model, n_ctx=n_window, n_threads=n_threads, n_batch=_AT_ONCE, n_logits_max=_AT_ONCE
    ) as session:
        for rows, following in _rows(session, text, on_progress):
            if not np.isfinite(rows).all():
                raise EdgespecError(f"{model.path}: its logits are not finite: is the file damaged?")
            log_probs = log_softmax(rows)
            nll += (-log_probs[range(len(rows)), following]).tolist()
            if compares:
                theirs = np.fromfile(reference.file, np.float32, rows.size).reshape(rows.shape)
                n_same += int((theirs.argmax(axis=1) == rows.argmax(axis=1)).sum())
                kl += _divergences(theirs, log_probs)
            else:
                rows.tofile(reference.file)
    if not compares:
        reference.name, reference.text = name, text
    return AccuracyScore(
        target=name,
        reference=reference.name,
        kernels=load_kernels().name if model.uses_kernels else STOCK,
        n_tokens=len(nll),
        perplexity=math.exp(statistics.fmean(nll)),
        kl=statistics.fmean(kl) if kl else None,
        kl_error=statistics.stdev(kl) / math.sqrt(len(kl)) if kl else None,
        top1=n_same / len(kl) if kl else None,
    )


def _divergences(theirs: Rows, log_probs: _LogProbs) -> list[float]:
    """Return KL(P || Q) of each row: P the reference's logits, Q's log-probabilities (overwritten)."""
    # The sum over the vocabulary of p (log p - log q). In place, because the arrays are large.
    p = log_softmax(theirs)
    ratio = np.subtract(p, log_probs, out=log_probs)
    np.exp(p, out=p)
    found: list[float] = np.einsum("ij,ij->i", p, ratio).tolist()
    return found


def _text(model: Model, tokens: Sequence[int], n_window: int) -> _ScoredText:
    bos = (model.bos,) if model.add_bos and model.bos is not None else ()
    step = n_window - len(bos)
    if step < 3:
        raise ValueError(f"n_window {n_window}: must hold three tokens, and BOS")
    if n_window > model.n_ctx_train:
        raise EdgespecError(
            f"{model.path}: was trained for {model.n_ctx_train} tokens; choose windows of no more than that"
        )
    if len(tokens) < step:
        raise EdgespecError(f"the text has {len(tokens)} tokens: it must have at least {step} for one window")
    texts = [tuple(map(int, tokens[at : at + step])) for at in range(0, len(tokens), step)]
    windows = tuple((*bos, *text) for text in texts if len(text) > 1)
    return _ScoredText(windows, 1 + len(bos), model.n_vocab)


def _rows(
    session: Session, text: _ScoredText, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[Rows, Sequence[int]]]:
    """Read the text and yield, some at a time and in order, the scored tokens with their logits."""
    n_rows = max(1, _BYTES_OF_ROWS // (8 * text.n_vocab))
    done, total = 0, sum(map(len, text.windows))
    for window in text.windows:
        session.clear()
        for start in range(0, len(window), _AT_ONCE):
            batch = window[start : start + _AT_ONCE]
            logits = session.eval(batch, n_logits=len(batch))
            # The row after window[i] is for window[i + 1]; nothing follows the last.
            first = max(start, text.n_unscored - 1)
            last = min(start + len(batch), len(window) - 1)
            for at in range(first, last, n_rows):
                end = min(at + n_rows, last)
                yield logits[at - start : end - start], window[at + 1 : end + 1]
            done += len(batch)
            on_progress(done, total)


def log_softmax(rows: Rows) -> _LogProbs:
    """Return rows of logits as logarithms of probabilities, float64 [n, n_vocab]."""
    shifted = rows.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def arithmetic(n: int) -> tuple[Prompt, ...]:
    """Return `n` sums, differences and products of whole numbers, after four examples.

    They are drawn with a fixed seed: the same everywhere, and a smaller `n` has the first of them.
    """
    draw = random.Random(0)  # noqa: S311 - no secret
    problems = []
    for i in range(n):
        a, b = draw.randint(100, 999), draw.randint(100, 999)
        c, d = draw.randint(10, 99), draw.randint(2, 9)
        forms = (
            (f"{a} + {b}", a + b),
            (f"{a} - {b}", a - b),
            (f"{c} * {d}", c * d),
            (f"{c} * {d} + {a}", c * d + a),
        )
        question, result = forms[i % len(forms)]
        text = f"{_EXAMPLES}{question} ="
        problems.append(Prompt(f"arithmetic/{i + 1}", "arithmetic", text, answer=str(result)))
    return tuple(problems)


# ---- the targets of a comparison: the quantizations of a model in one process, its best one first ----


@dataclass(frozen=True, slots=True)
class TextTask:
    """The task of a group's process: to score files; the first that can be read is the reference."""

    files: dict[str, str]
    """Name -> path."""
    text: str
    n_tokens: int
    kernels: KernelsChoice
    n_threads: int
    folder: str
    """Where the reference's logits go for a while, and the scores are kept."""

    def scores(self, on_progress: WorkProgressFn, on_message: Callable[[str], None]) -> list[AccuracyScore]:
        """Return what is kept or measured now; `on_message` takes the reason for a file that is left out.

        Raises OSError if the scores cannot be kept.
        """
        hashes = [(name, sha256_of(Path(path))) for name, path in self.files.items()]
        facts = (hashes, replace(self, files={}, folder=""))
        key = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
        kept = Path(self.folder) / f"accuracy.{key[:8]}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        if stored := read_kept(kept, key, list[AccuracyScore]):
            return stored
        found: list[AccuracyScore] = []
        try:
            for kind, value in reports_of("edgespec.apps.bench.compare", "_in_child", self):
                match kind:
                    case "progress":
                        on_progress(*value)
                    case "failed":
                        on_message(value)
                    case "score":
                        found.append(msgspec.convert(value, AccuracyScore))
        except EdgespecError as error:
            on_message(f"accuracy of {' and '.join(self.files)}: {error}")
        if len(found) == len(self.files):
            store(kept, key, found)
        return found


def groups(files: Sequence[ModelFile], on_message: Callable[[str], None]) -> list[list[ModelFile]]:
    """Return the files grouped by the model that they are quantizations of, the best of each group first.

    Files belong together if the name in their headers, which quantizing keeps, and their shapes are equal;
    the shape alone would not tell a fine-tuned model apart. The best is the largest file that was not made
    from another. Files that are no models are left out, and `on_message` is called with the reason.
    """
    found: dict[tuple[str, str, int, int, int], list[ModelFile]] = {}
    for file in files:
        try:
            header = check_model_file(file.path)
        except EdgespecError as error:
            on_message(_failure(file.name, file.path, error))
            continue
        model = (header.name, header.architecture, header.n_layer, header.n_embd, header.n_vocab)
        found.setdefault(model, []).append(file)
    for group in found.values():
        group.sort(key=lambda file: (bool(file.made_from), -file.path.stat().st_size))
    return list(found.values())


def _failure(name: str, path: Path, error: EdgespecError) -> str:
    return f"accuracy of {name}: {str(error).replace(str(path), name)}"


def _in_child() -> int:
    return answer(TextTask, _score_all)


def _score_all(task: TextTask) -> None:
    try:
        with tempfile.TemporaryFile(dir=task.folder) as file:
            reference = Reference(file)
            for name, path in task.files.items():
                try:
                    _score_file(task, name, Path(path), reference)
                except EdgespecError as error:  # the other files may work
                    send("failed", _failure(name, Path(path), error))
    except OSError as error:
        raise EdgespecError(
            f"cannot keep the reference's logits in {task.folder}: {error}; {_CURE}"
        ) from None


def _score_file(task: TextTask, name: str, path: Path, reference: Reference) -> None:
    header = check_model_file(path)
    fits_in_memory([(header, WINDOW)])
    with Model(path, kernels=task.kernels == "auto", header=header) as model:
        # Names of control tokens in the text are plain text.
        tokens = model.tokenize(task.text, add_special=False, parse_special=False)[: task.n_tokens]
        if not reference.name:  # float32
            check_disk(Path(task.folder), 4 * len(tokens) * model.n_vocab, "the reference's logits", _CURE)
        scored = score(
            model,
            name,
            tokens,
            reference,
            n_threads=task.n_threads,
            on_progress=lambda done, total: send("progress", (f"accuracy of {name}", done, total)),
        )
    send("score", scored)


NO_DRAFT, SUFFIX, MTP = "none", "suffix", "mtp"
"""Used instead of a draft model's name: no drafts, those from text seen before, or those of the head in the
target's own file."""

WORDS = (NO_DRAFT, SUFFIX, MTP)
"""Words that name no draft model."""

IDENTITY = ("processor", "usable processors", "energy", "edgespec", "llama-cpp-python", "llama.cpp")
"""Facts of the machine that must be equal for all runs of one table."""


@dataclass(frozen=True, slots=True)
class Combination:
    """The models and kernels of a cell, by name; a draft may also be one of WORDS."""

    target: str
    draft: str
    kernels: KernelsChoice

    @property
    def name(self) -> str:
        """The name in messages, and of the file of raw runs: TARGET+DRAFT+kernels-KERNELS."""
        return f"{self.target}+{self.draft}+kernels-{self.kernels}"

    @property
    def draft_model(self) -> str | None:
        """The draft model, if there is one."""
        return None if self.draft in WORDS else self.draft

    def restrict(self, settings: BenchSettings) -> BenchSettings:
        """Return `settings` with only those variants that this cell's draft allows."""
        variants = [variant for variant in settings.variants if self._allows(variant)]
        return replace(settings, variants=() if self.draft == NO_DRAFT else tuple(variants))

    def _allows(self, variant: Variant) -> bool:
        if variant.drafter == MTP:
            return self.draft == MTP
        if variant.cascade:  # a head cannot write by itself
            return self.draft_model is not None
        return self.draft != SUFFIX or not variant.needs_model

    def drafter(self, settings: BenchSettings) -> DrafterName:
        """Return the drafter that the engine loads models for, to run what `restrict` returned."""
        if not settings.variants:
            return "none"
        return "auto" if self.draft_model else "mtp" if self.draft == MTP else "suffix"


@dataclass
class Comparison:
    """A comparison carried out in a folder, where its cells are kept, and the accuracies of its targets."""

    targets: Mapping[str, ModelFile]
    """The models that decide, by name."""
    drafts: Mapping[str, ModelFile | None]
    """The models that draft, and WORDS."""
    references: Mapping[str, ModelFile]
    """Models that targets were made from, without being targets: what the targets are compared with."""
    kernels: Sequence[KernelsChoice]
    suite: Suite
    settings: BenchSettings
    rounds: int
    n_threads: int
    assume_watts: float | None
    machine: Facts
    folder: Path
    accuracy: list[AccuracyScore] = field(default_factory=list)
    solved: list[ProblemsSolved] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the kept runs of the cells."""
        every = product(self.kernels, self.targets, self.drafts)
        self._combinations = [Combination(target, draft, choice) for choice, target, draft in every]
        drafting = {name: file for name, file in self.drafts.items() if file}
        self._files = {**self.targets, **drafting, **self.references}
        prompts = self.suite.interleaved()
        tasks = {one.name: self._task(one, self.settings, prompts) for one in self._combinations}
        self._cells = self._kept(tasks)

    def _kept(self, tasks: dict[str, CellTask]) -> KeptCells:
        machine = {name: self.machine[name] for name in IDENTITY if name in self.machine}
        return KeptCells(tasks, self.folder / "runs", machine)

    def _task(self, cell: Combination, settings: BenchSettings, prompts: tuple[Prompt, ...]) -> CellTask:
        allowed = cell.restrict(settings)
        return CellTask(
            target=str(self._files[cell.target].path),
            draft=str(self._files[cell.draft_model].path) if cell.draft_model else None,
            drafter=cell.drafter(allowed),
            kernels=cell.kernels,
            n_threads=self.n_threads,
            prompts=prompts,
            sittings=((allowed, 0),),
            assume_watts=self.assume_watts,
        )

    def discard(self) -> None:
        """Delete what comparisons have measured in the folder, and nothing else. Raises OSError."""
        for file in (*self.folder.glob("runs/*.json"), *self.folder.glob("accuracy.*.json")):
            if is_kept(file):
                file.unlink()

    def measure(self, on_progress: WorkProgressFn) -> None:
        """Measure the cells that are missing. Raises OSError if one cannot be kept; earlier ones stay."""
        self._cells.measure(range(self.rounds), on_progress)

    def score(self, text: str, n_tokens: int, on_progress: WorkProgressFn) -> None:
        """Score targets and references on a text, each against the best quantization of its model among them.

        Raises OSError if the scores cannot be kept.
        """
        found = groups([*self.targets.values(), *self.references.values()], self.warnings.append)
        for kernels in self.kernels:
            for group in found:
                paths = {file.name: str(file.path) for file in group}
                task = TextTask(paths, text, n_tokens, kernels, self.n_threads, str(self.folder))
                self.accuracy += task.scores(on_progress, self.warnings.append)

    def solve(self, n: int, on_progress: WorkProgressFn) -> None:
        """Let the scored targets, and their drafts in variants that are not exact, answer `n` problems.

        With the first kernels only. Raises OSError as `measure`.
        """
        inexact = tuple(variant for variant in self.settings.variants if not variant.exact)
        settings, prompts = BenchSettings(inexact, LONGEST_ANSWER), arithmetic(n)
        scored = {one.target for one in self.accuracy}
        why = "left out, as its score on the text is missing"
        self.warnings += [f"problems by {one}: {why}" for one in self.targets if one not in scored]
        asked = [Combination(one, NO_DRAFT, self.kernels[0]) for one in self.targets if one in scored]
        for one in self._combinations:
            ran = one.kernels == self.kernels[0] and one.name not in self._cells.skipped
            asked += [one] if ran and one.draft_model and one.restrict(settings).variants else []
        cells = self._kept({f"problems-{one.name}": self._task(one, settings, prompts) for one in asked})
        cells.measure([0], on_progress)
        self.warnings += [f"{name}: {self._named(why)}" for name, why in cells.skipped.items()]
        for one in asked:
            if found := cells.stored(f"problems-{one.name}", 0):
                self._count(one, found)

    def _count(self, cell: Combination, found: MeasuredCell) -> None:
        """Add the number of problems that a target, or a variant that is not exact, answered exactly."""
        for variant in dict.fromkeys(run.variant for run in found.runs):
            runs = [run for run in found.runs if run.variant == variant]
            passed = sum(run.right is True for run in runs)
            if cell.draft == NO_DRAFT:
                for i, one in enumerate(self.accuracy):
                    if (one.target, one.kernels) == (cell.target, found.kernels):
                        self.accuracy[i] = replace(one, passed=passed, n_problems=len(runs))
            elif variant != PLAIN:
                n_tokens = sum(run.tokens for run in runs) or 1
                share = sum(run.target_share * run.tokens for run in runs) / n_tokens
                self.solved.append(
                    ProblemsSolved(cell.target, cell.draft, found.kernels, variant, passed, len(runs), share)
                )

    def _named(self, why: str) -> str:
        """Return a reason with the models' names: a process knows them by their files."""
        for file in self._files.values():
            why = why.replace(str(file.path), file.name)
        return why

    def _result(self, combination: Combination) -> tuple[Cell, list[str]]:
        """Return a cell as measured so far, and the warnings about it."""
        name, why = combination.name, self._named(self._cells.skipped.get(combination.name, ""))
        rounds = {n: found for n in range(self.rounds) if (found := self._cells.stored(name, n))}
        cell = Cell(
            combination.target,
            None if combination.draft == NO_DRAFT else combination.draft,
            kernels=", ".join(sorted({one.kernels for one in rounds.values()})) or combination.kernels,
            runs=tuple(run for one in rounds.values() for run in one.runs),
            peak_rss_bytes=max((one.peak_rss_bytes for one in rounds.values()), default=None),
            skipped="" if rounds else why or "not measured yet",
        )
        warnings = [f"{name} was not measured in every round: {why}"] if rounds and why else []
        for n, one in rounds.items():
            warnings += [f"{name}, round {n + 1}: {line}" for line in one.warnings]
        return cell, warnings

    def outcome(self, about: Mapping[str, Any]) -> BenchmarkOutcome:
        """Return all that was measured so far, in the plan's order; `about`: further settings."""
        found = [self._result(combination) for combination in self._combinations]
        return BenchmarkOutcome(
            kind="compare",
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=self.machine,
            settings={**self.settings.facts(), "rounds": self.rounds, "threads": self.n_threads, **about},
            suite=self.suite.facts(),
            models={name: file.facts() for name, file in self._files.items()},
            cells=tuple(cell for cell, _ in found),
            accuracy=tuple(self.accuracy),
            solved=tuple(self.solved),
            warnings=(*(line for _, lines in found for line in lines), *self.warnings),
        )
