"""The request of `edgespec draft make`, what its stages report to, and what may stop them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from edgespec.apps.bench.suites import load_suite
from edgespec.errors import MessageFn, UsageError, silent
from edgespec.llama.choices import KernelsChoice
from edgespec.models.hub import format_size
from edgespec.models.store import hash_file
from edgespec.platform.files import read_text_file, why_no_file
from edgespec.platform.machine import default_threads
from edgespec.platform.processes import Cancellation

TOKENS_PER_HOUR = 200_000
"""Tokens to write for an hour of training, which reads them about nine times.

A head still learns from the fourth time. Writing takes 40 minutes where a laptop writes 80 tokens/s.
"""

LEAST_TOKENS, MOST_TOKENS = 20_000, 1_000_000

_LEAST_BUDGET = 16_000_000  # bytes: room for a few texts of a small target
_SUITES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Length and conditions of an evaluation."""

    n_predict: int = 64
    rounds: int = 3
    n_prompts: int = 6
    n_threads: int = field(default_factory=default_threads)
    kernels: KernelsChoice = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """Which draft is made, from which texts, how it is trained and evaluated."""

    target: str
    name: str | None = None
    """None: named after the target, the kind and the quantization."""
    force: bool = False
    """Store the draft even if it is no better, and replace one of that name."""
    data_tokens: int | None = None
    """Tokens of texts in all, earlier runs included; with prompts of the user, tokens to add.

    None: `default_tokens`; for a head that learns from its mistakes, what it has not learnt from yet, and a
    built-in answer for each such text.
    """
    answer_tokens: int = 400
    budget: int = 2_000_000_000
    """Most bytes of texts and hidden states on disk."""
    prompts: tuple[Path, ...] = ()
    """Files of prompts and texts."""
    from_history: bool = False
    hours: float | None = None
    tokens: int | None = None
    """Length of the training: hours or tokens."""
    start: str | None = None
    """The head whose weights the training starts from; None: the last training's, or the best."""
    keep: int | None = None
    """Tokens of the draft's vocabulary; None: 16,384, or all if there are fewer."""
    types: tuple[str, ...] = ("q4_0", "q8_0")
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range and missing files."""
        if (self.hours is None) == (self.tokens is None):
            raise UsageError("say how long to train: either hours or tokens", field="hours")
        for name in ("hours", "tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError("must be above 0", field=name, value=value)
        if not self.types:
            raise UsageError("name at least one", field="types")
        if self.data_tokens is not None and self.data_tokens < 1:
            raise UsageError("must be 1 or more", field="data_tokens", value=self.data_tokens)
        if self.budget < _LEAST_BUDGET:
            problem = f"at least {format_size(_LEAST_BUDGET)}: a text takes about a megabyte"
            raise UsageError(problem, field="budget", value=self.budget)
        for path in self.prompts:
            check_prompts(path)

    @property
    def names_more(self) -> bool:
        """Whether a head that learns from its mistakes gets other texts too."""
        return self.data_tokens is not None or bool(self.prompts)

    @property
    def default_tokens(self) -> int:
        """Default number of tokens that the target writes for this training."""
        wanted = self.tokens // 3 if self.tokens else round((self.hours or 0.0) * TOKENS_PER_HOUR)
        return min(max(wanted, LEAST_TOKENS), MOST_TOKENS)

    def key(self, target_sha256: str) -> str:
        """Return the hash of all that decides a run, the present contents of the user's files included."""
        usual = EvaluationSettings(n_threads=1)
        facts = replace(self, target=target_sha256, name=None, force=False, prompts=(), evaluation=usual)
        return hashlib.sha256(msgspec.json.encode((facts, [*map(hash_file, self.prompts)]))).hexdigest()


def is_suite(path: Path) -> bool:
    """Whether a file of prompts is a suite (suites.py); else it is a text."""
    return path.name.endswith(_SUITES)


def check_prompts(path: Path) -> None:
    """Raise UsageError unless `path` is a suite, or a text that is not empty."""
    if why := why_no_file(path):
        raise UsageError(f"{why}; give a text, or a suite of prompts (.jsonl)", field="prompts", value=path)
    if is_suite(path):
        load_suite(str(path))
    else:
        text_of(path)


def text_of(path: Path) -> str:
    """Return the text of a file. Raises UsageError."""
    text = read_text_file(path, "prompts")
    if not text.strip():
        raise UsageError("an empty text; give one like those the target writes", field="prompts", value=path)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage reports to, and what may stop it."""

    on_progress: Callable[[str, float, str], None] = lambda _stage, _share, _detail: None
    """Takes a stage, such as "writing" or "training head", its share that is done, 0 to 1, and details."""
    on_message: MessageFn = silent
    signals: Cancellation | None = None
    """Lets Ctrl-C end a running pass."""
