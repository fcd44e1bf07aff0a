"""Effect of quantization on a model's answers: perplexity, KL divergence and top-1 agreement on a text.

    with Reference(folder) as reference:
        best = score(model, tokens, reference=reference, ...)      fills the reference
        other = score(another, tokens, reference=reference, ...)   is compared with the reference

One model is in memory at a time. The text is read in windows, each from an empty context. A window's first
token is not scored: there is no text before it to predict it from.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import Rows
from edgespec.errors import EdgespecError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import fits_in_memory
from edgespec.models.sources import check_disk
from edgespec.platform.closing import Closing
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
        """Return exp(nll)."""
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
        """Return how many tokens are scored."""
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
        """Append rows."""
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
        """Return the next `n` rows."""
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
        p = _log_softmax(theirs)
        ratio = np.subtract(p, log_probs, out=log_probs)
        np.exp(p, out=p)
        self.kl += np.einsum("ij,ij->i", p, ratio).tolist()

    def score(self) -> Score:
        """Return the means."""
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
            log_probs = _log_softmax(rows)
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


def _log_softmax(rows: Rows) -> _LogProbs:
    shifted = rows.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
