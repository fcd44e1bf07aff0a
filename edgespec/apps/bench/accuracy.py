"""Effect of quantization on a model: perplexity, KL divergence and top-1 agreement on a text; arithmetic.

    with tempfile.TemporaryFile(dir=folder) as file:
        reference = Reference(file)
        best = score(model, "best", tokens, reference, ...)         becomes the reference
        other = score(another, "other", tokens, reference, ...)     is compared with it

One model is in memory at a time. The text is read in windows, each from an empty context. A window's first
token is not scored: there is no text before it to predict it from.

Arithmetic problems are prompts of cells (measure.py) that have one right answer; lm-eval runs other tasks
(docs/measuring.md).
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.apps.bench.measure import reports_of
from edgespec.apps.bench.runs import AccuracyScore, WorkProgressFn, keep, read_kept
from edgespec.apps.bench.suites import Prompt
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
from edgespec.models.quantizations import ModelFile
from edgespec.models.store import sha256_of
from edgespec.platform.processes import answer, say

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
    """What the process of a group scores; the first file that can be read is the reference."""

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
            for kind, value in reports_of("edgespec.apps.bench.accuracy", "_in_child", self):
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
            keep(kept, key, found)
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
                    say("failed", _failure(name, Path(path), error))
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
            on_progress=lambda done, total: say("progress", (f"accuracy of {name}", done, total)),
        )
    say("score", scored)
