"""Effect of quantization on a model: perplexity, KL divergence and top-1 agreement on a text; a task.

    with Reference(folder) as reference:
        best = score(model, tokens, reference=reference, ...)      fills the reference
        other = score(another, tokens, reference=reference, ...)   is compared with the reference

One model is in memory at a time. The text is read in windows, each from an empty context. A window's first
token is not scored: there is no text before it to predict it from.

The task is arithmetic, by exact match of greedy answers; lm-eval runs others (docs/measuring.md).

A comparison's targets are measured in other processes, each against its best quantization:

    FOLDER/accuracy-TARGET+KERNELS.json     the text
    FOLDER/problems-TARGET+KERNELS.json     the problems; problems-TARGET+DRAFT+VARIANT+KERNELS.json of a
                                            variant that is not exact

A result is measured again only if something it depends on has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.apps.bench.runs import AccuracyScore, Cell, ProblemsSolved, WorkProgressFn, keep, read_kept
from edgespec.apps.bench.variants import PLAIN_VARIANT, Variant
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import Rows
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import fits_in_memory
from edgespec.models.quantizations import FileFacts, ModelFile
from edgespec.models.sources import check_disk
from edgespec.platform.child import ReportingChild, answer, say
from edgespec.platform.closing import Closing
from edgespec.platform.cpu import default_threads
from edgespec.platform.signals import Cancellation

WINDOW = 512
"""Tokens of a window by default, as in llama.cpp's perplexity program."""

_AT_ONCE = 64  # tokens a pass: 39 MB of logits with a vocabulary of 152k; a whole window would be 311 MB
_BYTES_OF_ROWS = 16 << 20  # of one float64 array; four exist at a time
_FLOAT32 = 4  # bytes
_CURE = "free some space, score fewer tokens, or choose a folder on another disk"

ProgressFn = Callable[[int, int], None]
"""Called with the number of tokens read so far and the number in the text."""

_LogProbs = npt.NDArray[np.float64]

_EXAMPLES = "12 + 7 = 19\n60 - 85 = -25\n8 * 9 = 72\n6 * 5 + 4 = 34\n"
_LONGEST_ANSWER = 12  # tokens; the numbers have four digits and a sign at most


@dataclass(frozen=True, slots=True)
class Score:
    """A model's prediction of a text. Per token, in nats, over the scored tokens."""

    n_tokens: int
    """Scored tokens."""
    nll: float
    """Mean negative log-likelihood."""
    kl: float | None = None
    """Mean Kullback-Leibler divergence from the reference; None for the reference itself."""
    kl_error: float | None = None
    """Standard error of `kl`, as if the tokens were independent."""
    top1: float | None = None
    """Share of places where the reference's likeliest token is also this model's."""

    @property
    def perplexity(self) -> float:
        """exp(nll): 1 where the model was sure of every token."""
        return math.exp(self.nll)


@dataclass(frozen=True, slots=True)
class _ScoredText:
    """The windows that a model reads. Two models can be compared if they read the same."""

    windows: tuple[tuple[int, ...], ...]
    """Token ids, with BOS if the model adds one."""
    n_unscored: int
    """Tokens at the beginning of each window that are not scored."""
    n_vocab: int
    vocabulary: bytes
    """A hash of all tokens' texts. If it is equal, the same ids mean the same words."""

    @property
    def n_scored(self) -> int:
        return sum(len(window) - self.n_unscored for window in self.windows)


class Reference(Closing):
    """The logits of the best model, in a file without a name, which disappears when this process ends.

    They are float32, as computed, so that a model's divergence from itself is exactly 0. Log-probabilities
    in float16 would take half the space but were too coarse for fine quantizations: the 2.9e-5 nats of a
    tiny model's Q8_0 came out 5 % too low. 512 tokens of a vocabulary of 152k take 311 MB.
    """

    def __init__(self, folder: str | Path) -> None:
        """Begin empty: the first model scored with this object becomes the reference."""
        self._folder = Path(folder)
        self._file: FileIO | None = None
        self._text: _ScoredText | None = None
        self._closed = False

    @property
    def written(self) -> bool:
        """Whether there is a reference to compare with."""
        return self._text is not None

    @contextlib.contextmanager
    def writing(self, text: _ScoredText) -> Iterator[None]:
        """Accept rows from `put` inside the `with` block; after an exception there is no reference."""
        if self._closed:
            raise EdgespecError("the reference is closed")
        check_disk(self._folder, text.n_scored * text.n_vocab * _FLOAT32, "the reference's logits", _CURE)
        try:
            with self._disk_errors():
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - `close` does
            yield
        except BaseException:
            self._drop()
            raise
        self._text = text

    def put(self, rows: Rows) -> None:
        """Append rows to the file, within `writing`. Raises EdgespecError on a full disk."""
        assert self._file is not None  # noqa: S101 - for the type checker: within `writing`
        # Plain writes: on a full disk they raise an error, while a memory mapping would crash the process.
        data = rows.data.cast("B")
        with self._disk_errors():
            while data:
                data = data[self._file.write(data) :]

    @contextlib.contextmanager
    def reading(self, model: Model, text: _ScoredText) -> Iterator[None]:
        """Allow `take` inside the `with` block. Raises EdgespecError if `text` is not the reference's."""
        assert self._file is not None  # noqa: S101 - for the type checker: it is written
        assert self._text is not None  # noqa: S101
        if detail := _difference(self._text, text):
            raise EdgespecError(f"{model.path}: cannot be compared with the reference: {detail}")
        self._file.seek(0)
        yield

    def take(self, n: int) -> Rows:
        """Return the next `n` rows that were put, shape (n, n_vocab). Raises EdgespecError."""
        assert self._file is not None  # noqa: S101 - for the type checker: within `reading`
        assert self._text is not None  # noqa: S101
        rows = np.empty((n, self._text.n_vocab), np.float32)
        left = rows.data.cast("B")
        with self._disk_errors():
            while left:
                n_read = self._file.readinto(left)
                if not n_read:
                    raise OSError("the file was cut off")
                left = left[n_read:]
        return rows

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EdgespecError(
                f"cannot keep the reference's logits in {self._folder}: {error.strerror or error}; {_CURE}"
            ) from None

    def _drop(self) -> None:
        file, self._file, self._text = self._file, None, None
        if file is not None:
            file.close()

    def close(self) -> None:
        """Give the disk space back; a second call does nothing."""
        self._closed = True
        self._drop()


def _difference(reference: _ScoredText, text: _ScoredText) -> str:
    if text.n_vocab != reference.n_vocab:
        return f"its vocabulary has {text.n_vocab} tokens, the reference's {reference.n_vocab}"
    if text.vocabulary != reference.vocabulary:
        return "its vocabulary is another one"
    if text != reference:
        return "the tokens or the windows of the text are not those that the reference has read"
    return ""


@dataclass
class _Sums:
    """Figures of each scored token."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_top: int = 0

    def compare(self, theirs: Rows, rows: Rows, log_probs: _LogProbs) -> None:
        """Add `rows`, whose log-probabilities are `log_probs` (overwritten), and the reference's `theirs`."""
        self.same_top += int((theirs.argmax(axis=1) == rows.argmax(axis=1)).sum())
        # KL(P || Q) = sum over the vocabulary of p (log p - log q). In place, because the arrays are large.
        p = log_softmax(theirs)
        ratio = np.subtract(p, log_probs, out=log_probs)
        np.exp(p, out=p)
        self.kl += np.einsum("ij,ij->i", p, ratio).tolist()

    def score(self) -> Score:
        n, nll = len(self.nll), math.fsum(self.nll) / len(self.nll)
        if not self.kl:
            return Score(n, nll)
        kl = math.fsum(self.kl) / n
        variance = math.fsum((each - kl) ** 2 for each in self.kl) / (n - 1)
        return Score(n, nll, kl, math.sqrt(variance / n), self.same_top / n)


def text_tokens(model: Model, text: str, n_tokens: int) -> list[int]:
    """Return the first `n_tokens` tokens of `text`. Names of control tokens in it are plain text."""
    return model.tokenize(text, add_special=False, parse_special=False)[:n_tokens]


def score(
    model: Model,
    tokens: Sequence[int],
    *,
    n_threads: int,
    reference: Reference | None = None,
    n_window: int = WINDOW,
    signals: Cancellation | None = None,
    on_progress: ProgressFn = lambda _done, _total: None,
) -> Score:
    """Return how well `model` predicts `tokens`, compared with `reference` if one is given.

    This model fills an empty reference; if that fails, the reference stays empty. Windows have `n_window`
    tokens, BOS included if the model adds one, and are the same for all models compared. `signals` lets
    Ctrl-C end a running pass. Raises EdgespecError if the text is shorter than a window, the model was
    trained for shorter windows, a logit is not finite, the tokens or the vocabulary differ from the
    reference's, or the disk is full.
    """
    text = _text(model, tokens, n_window)
    fits_in_memory([(model.header, n_window)], weights_loaded=True)
    compares = reference is not None and reference.written
    within: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if reference is not None:
        within = reference.reading(model, text) if compares else reference.writing(text)
    sums = _Sums()
    if signals:
        signals.drain()
    with (
        within,
        Session(
            model,
            n_ctx=n_window,
            n_threads=n_threads,
            n_batch=_AT_ONCE,
            n_logits_max=_AT_ONCE,
            interrupt=signals.interrupt if signals else None,
        ) as session,
    ):
        for rows, following in _rows(session, text, on_progress):
            if not np.isfinite(rows).all():
                raise EdgespecError(f"{model.path}: its logits are not finite: is the file damaged?")
            log_probs = log_softmax(rows)
            sums.nll += (-log_probs[range(len(rows)), following]).tolist()
            if reference is not None and compares:
                sums.compare(reference.take(len(rows)), rows, log_probs)
            elif reference is not None:
                reference.put(rows)
    return sums.score()


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
    digest = hashlib.sha256()
    for token in range(model.n_vocab):
        piece = model.piece(token, special=True)
        digest.update(b"%d:%b" % (len(piece), piece))
    return _ScoredText(windows, 1 + len(bos), model.n_vocab, digest.digest())


def _rows(
    session: Session, text: _ScoredText, on_progress: ProgressFn
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


# ---- a task by exact match ----


@dataclass(frozen=True, slots=True)
class Problem:
    """A task with one right answer."""

    prompt: str
    answer: str
    """The line that has to follow the prompt."""


@dataclass(frozen=True, slots=True)
class ProblemAnswer:
    """A model's greedy answer to a problem."""

    text: str
    right: bool
    """Whether it is the problem's answer, character by character."""
    tokens: int
    target_share: float
    """Share of the answer's tokens that the target wrote or judged."""


def arithmetic(n: int) -> list[Problem]:
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
        problems.append(Problem(f"{_EXAMPLES}{question} =", str(result)))
    return problems


def solve(
    engine: Engine, problems: Sequence[Problem], variant: Variant = PLAIN_VARIANT
) -> Iterator[ProblemAnswer]:
    """Yield the greedy answer to each problem in `variant`. Raises what the engine raises."""
    for problem in problems:
        result = engine.generate(
            problem.prompt,
            params=SamplingParams(temperature=0.0),
            n_predict=_LONGEST_ANSWER,
            drafter=variant.chosen,
            stop=("\n",),
            chat=False,
            cascade=variant.cascade,
            lenience=variant.lenience,
        )
        text = result.text.strip()
        yield ProblemAnswer(text, text == problem.answer, len(result.token_ids), result.target_share)


# ---- a comparison's targets ----


@dataclass(frozen=True, slots=True)
class TargetAccuracy:
    """Measures the targets of a comparison."""

    folder: Path
    files: Sequence[ModelFile]
    """The targets."""
    facts: Mapping[str, FileFacts]
    kernels: KernelsChoice
    n_threads: int | None
    on_progress: WorkProgressFn
    on_message: Callable[[str], None]
    """Called with the reason if a target cannot be measured."""
    references: Sequence[ModelFile] = ()
    """Other files that the targets are compared with: what they were made from."""

    def texts(self, text: str, n_tokens: int) -> dict[str, AccuracyScore]:
        """Return each target's accuracy on `text` by name, without those that cannot be measured."""
        found: dict[str, AccuracyScore] = {}
        for group in groups((*self.files, *self.references), self.facts, self.on_message):
            found |= self._group(group, text, n_tokens)
        return found

    def _group(self, group: Sequence[ModelFile], text: str, n_tokens: int) -> dict[str, AccuracyScore]:
        """Return the accuracy of the quantizations of one model; the first readable one is the reference."""
        hashes = [(file.name, self.facts[file.name].sha256) for file in group]
        key = _key(text, n_tokens, self.kernels, *hashes)
        kept = self.folder / f"accuracy-{group[0].name}+kernels-{self.kernels}.json"
        if stored := read_kept(kept, key, dict[str, AccuracyScore]):
            return stored
        request = _TextRequest(
            [str(file.path) for file in group],
            text,
            n_tokens,
            self.kernels,
            self.n_threads or default_threads(),
            str(self.folder),
        )
        found: dict[str, AccuracyScore] = {}
        for kind, value in self._ask("_score_in_child", request, f"accuracy of {group[0].name} ..."):
            if kind == "progress":
                at, done, total = value
                self.on_progress(f"accuracy of {group[at].name}", done, total)
            elif kind == "failed":
                at, why = value
                self.on_message(_failure(group[at], why))
            else:
                at, kernels, scored = value[0], value[1], msgspec.convert(value[2], Score)
                found[group[at].name] = AccuracyScore(
                    target=group[at].name,
                    reference=next(iter(found), group[at].name),
                    kernels=kernels,
                    n_tokens=scored.n_tokens,
                    perplexity=scored.perplexity,
                    kl=scored.kl,
                    kl_error=scored.kl_error,
                    top1=scored.top1,
                )
        if len(found) == len(group):
            keep(kept, key, found)
        return found

    def on_problems(
        self, accuracy: Mapping[str, AccuracyScore], problems: Sequence[Problem]
    ) -> dict[str, AccuracyScore]:
        """Return `accuracy` with the number of problems that each target answers exactly."""
        found = dict(accuracy)
        for file in self.files:
            if file.name not in found:
                self.on_message(f"problems by {file.name}: left out, as its score on the text is missing")
            elif answers := self._answers(file, problems):
                n_right = sum(one.right for one in answers)
                found[file.name] = replace(found[file.name], passed=n_right, n_problems=len(answers))
        return found

    def variants(
        self,
        problems: Sequence[Problem],
        cells: Sequence[Cell],
        variants: Sequence[Variant],
        drafts: Sequence[ModelFile],
    ) -> list[ProblemsSolved]:
        """Return how many problems each cell with one of `drafts` answers in the inexact `variants`."""
        found = []
        by_name = {file.name: file for file in (*self.files, *drafts)}
        for cell in cells:
            draft = by_name.get(cell.draft or "")
            for variant in variants if cell.runs and draft else ():
                answers = self._answers(by_name[cell.target], problems, draft, variant)
                if answers and draft:
                    n_tokens = sum(one.tokens for one in answers)
                    by_target = sum(one.target_share * one.tokens for one in answers)
                    found.append(
                        ProblemsSolved(
                            target=cell.target,
                            draft=draft.name,
                            kernels=cell.kernels,
                            variant=variant.name,
                            passed=sum(one.right for one in answers),
                            n_problems=len(answers),
                            target_share=by_target / n_tokens if n_tokens else 1.0,
                        )
                    )
        return found

    def _answers(
        self,
        file: ModelFile,
        problems: Sequence[Problem],
        draft: ModelFile | None = None,
        variant: Variant = PLAIN_VARIANT,
    ) -> list[ProblemAnswer] | None:
        """Return the answer to each problem; None if not all could be asked."""
        models = [file, draft] if draft else [file]
        key = _key(*problems, self.kernels, *(self.facts[model.name].sha256 for model in models), variant)
        name = f"{file.name}+{draft.name}+{variant.name}" if draft else file.name
        kept = self.folder / f"problems-{name}+kernels-{self.kernels}.json"
        if stored := read_kept(kept, key, list[ProblemAnswer]):
            return stored
        request = _ProblemsRequest(
            str(file.path),
            str(draft.path) if draft else None,
            list(problems),
            self.kernels,
            self.n_threads,
            variant,
        )
        what = f"problems by {file.name}{f', {variant.name}' if draft else ''}"
        self.on_progress(what, 0, len(problems))
        found: list[ProblemAnswer] = []
        for _, value in self._ask("_solve_in_child", request, what):
            found.append(msgspec.convert(value, ProblemAnswer))
            self.on_progress(what, len(found), len(problems))
        if len(found) < len(problems):
            return None
        keep(kept, key, found)
        return found

    def _ask(self, function: str, request: object, what: str) -> Iterator[tuple[str, Any]]:
        conversation = ReportingChild("edgespec.apps.bench.accuracy", function, request)
        yield from conversation
        ended = conversation.ended
        if ended.code != 0:
            why = ended.complaint or f"its process ended with code {ended.code}"
            self.on_message(f"{what}: {why}")


def groups(
    files: Sequence[ModelFile],
    facts: Mapping[str, FileFacts],
    on_message: Callable[[str], None] = lambda _line: None,
) -> list[list[ModelFile]]:
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
            on_message(_failure(file, str(error)))
            continue
        model = (header.name, header.architecture, header.n_layer, header.n_embd, header.n_vocab)
        found.setdefault(model, []).append(file)
    for group in found.values():
        group.sort(key=lambda file: (bool(file.made_from), -facts[file.name].size))
    return list(found.values())


def _failure(file: ModelFile, why: str) -> str:
    return f"accuracy of {file.name}: {why.replace(str(file.path), file.name)}"


def _key(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


# ---- their processes ----


@dataclass(frozen=True, slots=True)
class _TextRequest:
    paths: list[str]
    text: str
    n_tokens: int
    kernels: KernelsChoice
    n_threads: int
    folder: str


@dataclass(frozen=True, slots=True)
class _ProblemsRequest:
    target: str
    draft: str | None
    problems: list[Problem]
    kernels: KernelsChoice
    n_threads: int | None
    variant: Variant


def _score_in_child() -> int:
    return answer(_TextRequest, _score_all)


def _score_all(request: _TextRequest) -> None:
    with Reference(request.folder) as reference:
        for at, path in enumerate(request.paths):
            try:
                _score(request, at, Path(path), reference)
            except EdgespecError as error:  # the other files may work
                say("failed", (at, str(error)))


def _score(request: _TextRequest, at: int, path: Path, reference: Reference) -> None:
    header = check_model_file(path)
    fits_in_memory([(header, WINDOW)])
    with Model(path, kernels=request.kernels == "auto", header=header) as model:
        scored = score(
            model,
            text_tokens(model, request.text, request.n_tokens),
            n_threads=request.n_threads,
            reference=reference,
            on_progress=lambda done, total: say("progress", (at, done, total)),
        )
        kernels = load_kernels().name if model.uses_kernels else STOCK
    say("score", (at, kernels, scored))


def _solve_in_child() -> int:
    return answer(_ProblemsRequest, _solve)


def _solve(request: _ProblemsRequest) -> None:
    with Engine(
        request.target,
        request.draft,
        drafter="auto" if request.draft else "none",
        n_threads=request.n_threads,
        kernels=request.kernels,
    ) as engine:
        for answered in solve(engine, request.problems, request.variant):
            say("answer", answered)
