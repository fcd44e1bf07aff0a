"""The target writes texts for a dataset, 16 at once in one cache, and reads others.

One pass takes the next token of every text that is being written, and beside them as many tokens of prompts,
and of texts that are only read, as it has room for. Every pass leaves the hidden states of its tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from edgespec._core import Interrupt, Sampler
from edgespec.decoding.sampling import Coins, SamplingParams
from edgespec.errors import EdgespecError, LogitsOf
from edgespec.forge.dataset import DatasetWriter, is_held_out
from edgespec.forge.prompts import TextPrompt, TokenPrompt
from edgespec.forge.running_text import RunningText
from edgespec.llama.batch import SequenceTokens
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.outputs import Rows
from edgespec.llama.rollback import RollbackSize
from edgespec.llama.weights import Model
from edgespec.models.footprint import loaded_bytes, shape_of
from edgespec.models.sources import format_size
from edgespec.platform.closing import Closing
from edgespec.platform.memory import available_bytes
from edgespec.platform.messages import MessageFn, silent

GREEDY_SHARE = 0.4
"""Of the texts, those that are written greedily; so are all that are held out."""

TEMPERATURES = (0.6, 0.8, 1.0)
"""Of the others, as many at each."""

LONGEST_PROMPT = 624
"""Most tokens of a prompt by default: with the longest answer, 1024."""

_TOP_P, _TOP_K = 0.95, 100  # of 152,000 logits, the top 100 are found ten times as fast as all are sorted
_NO_PREFIX = np.empty(0, np.int32)  # the samplers have no penalties, so they read none
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring seeds become numbers far apart


@dataclass(frozen=True, slots=True)
class WritingSettings:
    """How the target writes."""

    n_texts: int = 16
    """Texts at once; fewer where the memory has no room for the cache of so many."""
    n_predict: int = 400
    """Most tokens of an answer."""
    longest_prompt: int = LONGEST_PROMPT
    """Most tokens of a prompt; longer ones are left out."""
    window: int = 192
    """Of a prompt, the last tokens whose hidden states are kept."""
    n_pass: int = 112
    """Most tokens of a pass: all of them have logits, and the kernels take so many at once."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WritingProgress:
    """How far the writing is."""

    n_tokens: int
    """Of answers, and of texts that were read, in this run."""
    tokens_per_s: float
    share: float
    """Of what was asked, 0 to 1."""


@dataclass(frozen=True, slots=True)
class WritingResult:
    """What came of it."""

    n_texts: int
    n_tokens: int
    """Of answers, and of texts that were read."""
    n_skipped: int
    """Prompts that were too long."""
    seconds: float
    full: bool
    """Whether it ended because the budget was used up; `DatasetWriter.full` is the line that says so."""


@dataclass(slots=True)
class _FillState:
    """What one call of `fill` has done so far."""

    writer: DatasetWriter
    prompts: Iterator[TextPrompt | TokenPrompt]
    known: set[int]
    n_before: int
    """Tokens that were there when it began."""
    until: int
    running: list[RunningText] = field(default_factory=list)
    follow_ups: list[TextPrompt] = field(default_factory=list)
    """Prompts that go on from answers."""
    n_texts: int = 0
    n_finished: int = 0
    """Tokens of finished texts."""
    n_skipped: int = 0
    full: bool = False
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def n_tokens(self) -> int:
        """Tokens written or read, of texts under way too."""
        return self.n_finished + sum(one.n_done for one in self.running)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun_s


class TargetWriter(Closing):
    """A target that writes texts. A context manager; closing frees its cache.

    with Writing(model, n_threads=2) as writing, dataset.writer(budget) as writer:
        writing.fill(writer, built_in(seed=0), until=1_000_000)
    """

    def __init__(
        self,
        model: Model,
        settings: WritingSettings | None = None,
        *,
        n_threads: int,
        interrupt: Interrupt | None = None,
        on_message: MessageFn = silent,
    ) -> None:
        """Make the cache. `on_message` takes lines that the user should know.

        Raises EdgespecError where the memory has no room for it.
        """
        self.model = model
        self.settings = settings or WritingSettings()
        self._longest = min(self.settings.longest_prompt + self.settings.n_predict, model.n_ctx_train)
        self._n_predict = min(self.settings.n_predict, self._longest // 2)
        self._n_texts = _texts_that_fit(model, self.settings, self._longest, on_message)
        size = KVCacheSize(
            n_ctx=self._n_texts * self._longest,
            n_batch=self.settings.n_pass,
            n_logits_max=self.settings.n_pass,
            n_sequences=self._n_texts,
            rollback=RollbackSize(n_marks=0),  # nothing drafts
        )
        self._cache = KVCache(model, size, n_threads=n_threads, interrupt=interrupt)
        self._samplers: dict[float, Sampler] = {}
        self._errors = LogitsOf(model.path)

    def fill(
        self,
        writer: DatasetWriter,
        prompts: Iterable[TextPrompt | TokenPrompt],
        *,
        until: int,
        on_progress: Callable[[WritingProgress], None] = lambda _: None,
    ) -> WritingResult:
        """Write, and read, until the dataset has `until` tokens of answers or its budget is used up.

        Prompts that the dataset has a text of are left out, so a run that was ended goes on where it was. On
        Ctrl-C the finished texts are kept. `on_progress` is called after each pass. Raises EdgespecError as
        `KVCache.forward` (a model may have no hidden states to give), and OSError where the disk fails.
        """
        texts = list(writer.dataset.texts())
        run = _FillState(
            writer,
            iter(prompts),
            known={text.key for text in texts},
            n_before=sum(len(text.tokens) - text.n_prompt for text in texts),
            until=until,
        )
        del texts  # they hold the files open
        try:
            while self._begin_texts(run):
                self._step(run)
                done = run.n_before + run.n_tokens
                share = min(1.0, done / until) if until else 1.0
                on_progress(WritingProgress(run.n_tokens, run.n_tokens / max(run.seconds, 1e-9), share))
        finally:
            for one in run.running:
                self._cache.release(one.sequence)
            writer.flush()
        return WritingResult(run.n_texts, run.n_finished, run.n_skipped, run.seconds, run.full)

    def close(self) -> None:
        """Free the cache; a second call does nothing."""
        self._cache.close()

    # ---- beginning ----

    def _begin_texts(self, run: _FillState) -> bool:
        """Begin as many texts as there is room for; return whether any is under way."""
        while len(run.running) < self._n_texts and not run.full and run.n_before + run.n_tokens < run.until:
            prompt = run.follow_ups.pop(0) if run.follow_ups else next(run.prompts, None)
            if prompt is None:
                break
            if prompt.key not in run.known:
                run.known.add(prompt.key)
                self._begin(run, prompt)
        return bool(run.running)

    def _begin(self, run: _FillState, prompt: TextPrompt | TokenPrompt) -> None:
        """Begin the text of a prompt, unless it is too long."""
        settings, given = self.settings, isinstance(prompt, TokenPrompt)
        tokens = list(prompt.tokens) if isinstance(prompt, TokenPrompt) else prompt_tokens(self.model, prompt)
        n_prompt = prompt.n_prompt if isinstance(prompt, TokenPrompt) else len(tokens)
        reads_only = given and len(tokens) > n_prompt
        n_end = len(tokens) if reads_only else n_prompt + self._n_predict
        if n_prompt == 0 or n_end > self._longest:
            run.n_skipped += 1
            return
        first = max(0, n_prompt - settings.window)
        features: npt.NDArray[np.float16] = np.empty((n_end - 1 - first, self.model.n_embd), np.float16)
        if not run.writer.has_room(features.nbytes):
            run.full = True
            return
        temperature = math.nan if reads_only else temperature_of(prompt.key, settings.seed)
        run.running.append(
            RunningText(
                prompt=prompt,
                key=prompt.key,
                tokens=tokens,
                n_prompt=n_prompt,
                n_end=n_end,
                sequence=self._cache.take(),
                first=first,
                features=features,
                temperature=temperature,
                coins=Coins(_mixed(prompt.key, settings.seed)),
            )
        )

    # ---- a pass ----

    def _step(self, run: _FillState) -> None:
        """Make one pass, and end the texts that are finished."""
        n_free = self.settings.n_pass
        taken: list[RunningText] = []
        parts: list[SequenceTokens] = []
        # Those that are written first, one token each: prompts take what is left of the pass.
        for one in sorted(run.running, key=lambda one: one.n_unread):
            n = min(one.n_unread, n_free)
            if n == 0:
                break
            n_free -= n
            taken.append(one)
            goes_on = n == one.n_unread and not one.reads_only
            tokens = one.tokens[one.n_read : one.n_read + n]
            parts.append(SequenceTokens(one.sequence, tokens, int(goes_on), with_features=True))
        for one, result in zip(taken, self._cache.forward(parts), strict=True):
            if result.features is not None:
                one.keep(result.features)
            if len(result.rows):
                one.tokens.append(self._sample(one, result.rows))
            if len(result.rows) or one.n_unread == 0:
                self._end_if_finished(run, one)

    def _sample(self, one: RunningText, rows: Rows) -> int:
        sampler = self._samplers.get(one.temperature)
        if sampler is None:
            params = SamplingParams(temperature=one.temperature, top_k=_TOP_K, top_p=_TOP_P, min_p=0.0)
            sampler = self._samplers[one.temperature] = params.sampler(self.model.n_vocab, 0)
        coin = 0.0 if one.temperature == 0.0 else one.coins.take(1)[0]
        with self._errors:
            return sampler.sample(rows[0], _NO_PREFIX, coin, -1)

    def _end_if_finished(self, run: _FillState, one: RunningText) -> None:
        if not one.reads_only and len(one.tokens) < one.n_end and not self.model.is_eog(one.tokens[-1]):
            return
        run.running.remove(one)
        self._cache.release(one.sequence)
        if not run.writer.append(one.finished()):
            run.full = True
            return
        run.n_texts += 1
        run.n_finished += len(one.tokens) - one.n_prompt
        if isinstance(one.prompt, TextPrompt) and self.model.is_eog(one.tokens[-1]):
            answer = b"".join(map(self.model.piece, one.tokens[one.n_prompt :]))
            run.follow_ups += one.prompt.followed(answer.decode(errors="replace"))


def prompt_tokens(model: Model, prompt: TextPrompt) -> list[int]:
    """Return the tokens of a prompt, through the model's chat template where it has one."""
    if model.chat_template is None:
        return model.tokenize(prompt.turns[-1], add_special=True, parse_special=False)
    roles = ("user", "assistant")
    return model.tokenize_chat(
        [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(prompt.turns)]
    )


def temperature_of(key: int, seed: int = 0) -> float:
    """Return the temperature at which the text of a prompt is written; the same for a seed."""
    if is_held_out(key):
        return 0.0
    share = _mixed(key, seed) / 2**64
    if share < GREEDY_SHARE:
        return 0.0
    return TEMPERATURES[int((share - GREEDY_SHARE) / (1.0 - GREEDY_SHARE) * len(TEMPERATURES))]


def _mixed(key: int, seed: int) -> int:
    """Return a number of 64 bits that is another one for each seed."""
    return (key * _MIX + seed * (_MIX >> 1)) % 2**64


def _texts_that_fit(model: Model, settings: WritingSettings, longest: int, on_message: MessageFn) -> int:
    """Return how many texts the memory has room for, at most those asked for. Raises EdgespecError."""
    available = available_bytes()
    n_texts = settings.n_texts if model.can_rewind else 1
    while available is not None:
        states = replace(shape_of(model.header), states=n_texts * model.header.state_bytes)
        needed = loaded_bytes(0, states, n_texts * longest, settings.n_pass, settings.n_pass)
        if needed <= available:
            break
        if n_texts == 1:
            raise EdgespecError(
                f"not enough memory for {model.name} to write: a cache of {longest:,} tokens takes "
                f"{format_size(needed)}, {format_size(available)} are available; close other programs"
            )
        n_texts //= 2
    if n_texts < settings.n_texts:
        on_message(f"{model.name} writes {n_texts} of {settings.n_texts} texts at once: {_why(model)}")
    return n_texts


def _why(model: Model) -> str:
    if not model.can_rewind:
        return f"its architecture ({model.header.architecture}) has one cache for each"
    return "the memory has no room for more"
