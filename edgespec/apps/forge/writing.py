"""Generates a dataset's texts with the target, 16 at once in one KV cache; other texts are only read.

A forward pass takes the next token of every text that is being written, and as many tokens of prompts and of
texts to read as it has room for. It returns the hidden states of its tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec._core import Interrupt, Sampler
from edgespec.apps.forge.dataset import Dataset, TrainingText, is_held_out
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt
from edgespec.decoding.sampling import Coins, SamplingParams
from edgespec.decoding.session import Features, Forward, Rows
from edgespec.errors import EdgespecError, LogitsOf, MessageFn, silent
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.rollback import RollbackSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import loaded_bytes, shape_of
from edgespec.models.hub import format_size
from edgespec.platform.closing import Closing
from edgespec.platform.machine import available_bytes

GREEDY_SHARE = 0.4
"""Share of texts that are written greedily; held-out texts all are."""

TEMPERATURES = (0.6, 0.8, 1.0)
"""Temperatures of the other texts, equally often."""

LONGEST_PROMPT = 624
"""Most tokens of a prompt by default; with the longest answer 1024."""

_TOP_P, _TOP_K = 0.95, 100  # finding the top 100 of 152,000 logits is ten times as fast as sorting all
_NO_PREFIX = np.empty(0, np.int32)  # the samplers have no penalties


@dataclass(frozen=True, slots=True)
class WritingSettings:
    """Sizes of the generation of texts."""

    n_texts: int = 16
    """Texts at once; fewer if memory has no room for their KV cache."""
    n_predict: int = 400
    longest_prompt: int = LONGEST_PROMPT
    """Most tokens of a prompt; longer prompts are skipped."""
    window: int = 192
    """Last tokens of a prompt whose hidden states are stored."""
    n_pass: int = 112
    """Most tokens of a pass: all have logits, and the kernels take that many at once."""


@dataclass(eq=False, slots=True)
class RunningText:
    """A prompt and the target's answer so far, or a text that the target reads."""

    prompt: TextPrompt | TokenPrompt
    tokens: list[int]
    end: TrainingText
    """The text at its end, without its tokens; hidden states are filled in as they are evaluated."""
    n_end: int
    session: Session
    coins: Coins
    n_evaluated: int = 0

    @property
    def reads_only(self) -> bool:
        """Whether the text is complete from the start."""
        return math.isnan(self.end.temperature)

    @property
    def n_pending(self) -> int:
        """Number of tokens to evaluate; the last one of a text that is only read is not needed."""
        return len(self.tokens) - self.n_evaluated - self.reads_only

    @property
    def n_done(self) -> int:
        """Tokens after the prompt that were written, or read."""
        return max(0, (self.n_evaluated if self.reads_only else len(self.tokens)) - self.end.n_prompt)

    def add_features(self, features: Features) -> None:
        """Store the hidden states of the tokens that were just evaluated."""
        at = self.n_evaluated - self.end.first
        self.n_evaluated += len(features)
        n = max(0, self.n_evaluated - self.end.first)
        self.end.features[max(0, at) : n] = features[max(0, -at) :]


@dataclass(slots=True)
class WritingRun:
    """Progress and outcome of one call of `TargetWriter.fill`."""

    writer: Dataset
    prompts: Iterator[TextPrompt | TokenPrompt]
    known: set[int]
    """Keys of prompts that have a text."""
    n_before: int
    """Tokens in the dataset before the run."""
    until: int
    running: list[RunningText] = field(default_factory=list)
    follow_ups: list[TextPrompt] = field(default_factory=list)
    """Prompts that follow from answers."""
    n_finished: int = 0
    """Tokens of the texts that ended."""
    full: bool = False
    """Whether the budget is used up."""
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def n_tokens(self) -> int:
        """Tokens of answers and of texts that were read, in this run."""
        return self.n_finished + sum(one.n_done for one in self.running)

    @property
    def tokens_per_s(self) -> float:
        """Mean speed of the run."""
        return self.n_tokens / max(time.monotonic() - self.begun_s, 1e-9)

    @property
    def share(self) -> float:
        """Share of the tokens that were asked for, 0 to 1."""
        return min(1.0, (self.n_before + self.n_tokens) / self.until) if self.until else 1.0


class TargetWriter(Closing):
    """A target that writes texts. A context manager; closing frees its cache.

    with TargetWriter(model, n_threads=2) as target, dataset.writer(budget) as writer:
        target.fill(writer, built_in(), until=1_000_000)
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
        """Make the KV cache. Raises EdgespecError if memory has no room for it."""
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
        writer: Dataset,
        prompts: Iterable[TextPrompt | TokenPrompt],
        *,
        until: int,
        on_progress: Callable[[WritingRun], None] = lambda _run: None,
    ) -> WritingRun:
        """Write, and read, until the dataset has `until` tokens of answers or its budget is used up.

        Prompts that have a text already are skipped, so a stopped run resumes. On Ctrl-C the finished texts
        are stored. `on_progress` is called after each pass. Raises EdgespecError as `KVCache.forward`,
        such as for a model without hidden states, and OSError if the disk fails.
        """
        known, n_before = {text.key for text in writer.texts()}, writer.n_answer_tokens()
        run = WritingRun(writer, iter(prompts), known, n_before, until)
        try:
            while self._begin_texts(run):
                self._step(run)
                on_progress(run)
        finally:
            for one in run.running:
                one.session.close()
            writer.flush()
        return run

    def close(self) -> None:
        """Free the KV cache; a second call does nothing."""
        self._cache.close()

    def _begin_texts(self, run: WritingRun) -> bool:
        """Begin texts while there is room; return whether any is under way."""
        while len(run.running) < self._n_texts and not run.full and run.n_before + run.n_tokens < run.until:
            prompt = run.follow_ups.pop(0) if run.follow_ups else next(run.prompts, None)
            if prompt is None:
                break
            if prompt.key not in run.known:
                run.known.add(prompt.key)
                self._begin(run, prompt)
        return bool(run.running)

    def _begin(self, run: WritingRun, prompt: TextPrompt | TokenPrompt) -> None:
        """Begin the text of a prompt, unless it is too long."""
        if isinstance(prompt, TextPrompt):
            tokens = prompt_tokens(self.model, prompt)
            n_prompt = len(tokens)
        else:
            tokens, n_prompt = list(prompt.tokens), prompt.n_prompt
        reads_only = len(tokens) > n_prompt
        n_end = len(tokens) if reads_only else n_prompt + self._n_predict
        if n_prompt == 0 or n_end > self._longest:
            return
        first = max(0, n_prompt - self.settings.window)
        features: npt.NDArray[np.float16] = np.empty((n_end - 1 - first, self.model.n_embd), np.float16)
        if not run.writer.has_room(features.nbytes):
            run.full = True
            return
        weights = prompt.weights if isinstance(prompt, TokenPrompt) else ()
        end = TrainingText(
            tokens=_NO_PREFIX,
            n_prompt=n_prompt,
            first=first,
            features=features,
            temperature=math.nan if reads_only else temperature_of(prompt.key),
            source=prompt.source,
            key=prompt.key,
            weights=np.array(weights, np.float16) if weights else None,
        )
        coins = Coins(_mixed(prompt.key))
        run.running.append(RunningText(prompt, tokens, end, n_end, Session.within(self._cache), coins))

    # ---- a pass ----

    def _step(self, run: WritingRun) -> None:
        """Run one pass, and end the texts that are finished."""
        n_free = self.settings.n_pass
        taken: list[RunningText] = []
        parts: list[Forward] = []
        # Texts that are being written come first, a token each; prompts take the rest of the pass.
        for one in sorted(run.running, key=lambda one: one.n_pending):
            n = min(one.n_pending, n_free)
            if n == 0:
                break
            n_free -= n
            taken.append(one)
            goes_on = n == one.n_pending and not one.reads_only
            tokens = one.tokens[one.n_evaluated : one.n_evaluated + n]
            parts.append(Forward(one.session, tokens, int(goes_on), with_features=True))
        for one, result in zip(taken, self._cache.forward(parts), strict=True):
            if result.features is not None:
                one.add_features(result.features)
            if len(result.rows):
                one.tokens.append(self._sample(one, result.rows))
            if len(result.rows) or one.n_pending == 0:
                self._end_if_finished(run, one)

    def _sample(self, one: RunningText, rows: Rows) -> int:
        temperature = one.end.temperature
        sampler = self._samplers.get(temperature)
        if sampler is None:
            params = SamplingParams(temperature=temperature, top_k=_TOP_K, top_p=_TOP_P, min_p=0.0)
            sampler = self._samplers[temperature] = params.sampler(self.model.n_vocab, 0)
        coin = 0.0 if temperature == 0.0 else one.coins.draw(1)[0]
        with self._errors:
            return sampler.sample(rows[0], _NO_PREFIX, coin, -1)

    def _end_if_finished(self, run: WritingRun, one: RunningText) -> None:
        if not one.reads_only and len(one.tokens) < one.n_end and not self.model.is_eog(one.tokens[-1]):
            return
        run.running.remove(one)
        one.session.close()
        features = one.end.features[: len(one.tokens) - 1 - one.end.first]
        text = replace(one.end, tokens=np.array(one.tokens, np.int32), features=features)
        if not run.writer.append(text):
            run.full = True
            return
        run.n_finished += len(one.tokens) - one.end.n_prompt
        if isinstance(one.prompt, TextPrompt) and self.model.is_eog(one.tokens[-1]):
            answer = b"".join(map(self.model.piece, one.tokens[one.end.n_prompt :]))
            run.follow_ups += one.prompt.followed(answer.decode(errors="replace"))


def prompt_tokens(model: Model, prompt: TextPrompt) -> list[int]:
    """Tokenize a prompt, through the model's chat template if it has one."""
    if model.chat_template is None:
        return model.tokenize(prompt.turns[-1], add_special=True, parse_special=False)
    roles = ("user", "assistant")
    return model.tokenize_chat(
        [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(prompt.turns)]
    )


def temperature_of(key: int) -> float:
    """Return the temperature of a prompt's text, a function of its key."""
    if is_held_out(key):
        return 0.0
    share = _mixed(key) / 2**64
    if share < GREEDY_SHARE:
        return 0.0
    return TEMPERATURES[int((share - GREEDY_SHARE) / (1.0 - GREEDY_SHARE) * len(TEMPERATURES))]


def _mixed(key: int) -> int:
    """Hash a key to 64 bits, so that neighbouring keys give distant numbers."""
    return key * 0x9E3779B97F4A7C15 % 2**64  # 2^64 / golden ratio


def _texts_that_fit(model: Model, settings: WritingSettings, longest: int, on_message: MessageFn) -> int:
    """Return how many texts fit in memory, at most those asked for. Raises EdgespecError."""
    available = available_bytes()
    n_texts = settings.n_texts if model.can_rewind else 1
    while available is not None:
        states = msgspec.structs.replace(shape_of(model.header), states=n_texts * model.header.state_bytes)
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
        one_each = f"its architecture ({model.header.architecture}) has one cache for each"
        why = "the memory has no room for more" if model.can_rewind else one_each
        on_message(f"{model.name} writes {n_texts} of {settings.n_texts} texts at once: {why}")
    return n_texts
