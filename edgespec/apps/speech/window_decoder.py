"""One window's text: decoded at temperature 0, and at higher ones where that text is not good enough."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from edgespec.apps.speech.beam import BeamPasses, BeamSearch
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.rules import SpeechRules, log_total
from edgespec.apps.speech.session import SpeechSession, SpeechVocabulary
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.transcript import SpeechStats
from edgespec.apps.speech.vocabulary import rule_tokens
from edgespec.apps.speech.whisper_model import SequenceBatch
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.generate import Generation
from edgespec.decoding.loop import Prefill, Task
from edgespec.decoding.options import Options
from edgespec.decoding.records import Step
from edgespec.decoding.sampling import Coins, SamplingParams

_SEED_STEP = 1 << 32  # between the seeds of windows
_FASTEST = 40.0  # letters a second: twice as fast as fast speech

REPEATS, GUESS = "the text repeats itself", "the text is a guess"
"""Faults of a window's text."""


class WindowDrafter(Protocol):
    """Drafts for the decodings of one window."""

    def drafter(self, rules: SpeechRules, prompt: Sequence[int], *, greedy: bool) -> Drafter | None:
        """Return the drafter of one decoding after `prompt`; None: decode plainly."""

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft with the text `tokens` in the next windows: it is expected again."""

    def decoded(self, tokens: Sequence[int], n_prompt: int, drafter: Drafter | None, seconds: float) -> None:
        """Learn that a decoding made `tokens`, of which `n_prompt` are the prompt, in so many seconds."""


@dataclass(frozen=True, slots=True)
class WindowText:
    """A window's text, and how sure the model is of it."""

    tokens: tuple[int, ...]
    """Text and timestamps, without the end."""
    text: str
    temperature: float
    avg_logprob: float
    no_speech_prob: float
    """NaN if it was not computed."""
    ended: bool = True
    """Whether the model ended it, not the limit of its tokens."""

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text over those that zlib makes of it: high for text that repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))

    def is_silence(self, options: SpeechOptions) -> bool:
        """Return whether the window is to be left out: probably nobody speaks, and the text is a guess."""
        if options.max_no_speech is None or not self.no_speech_prob > options.max_no_speech:
            return False
        return options.min_logprob is None or self.avg_logprob <= options.min_logprob

    def fault(self, options: SpeechOptions) -> str:
        """Return why another temperature should be tried: it repeats itself, or is a guess. "" if good."""
        is_guess = options.min_logprob is not None and self.avg_logprob < options.min_logprob
        likely_silent = options.max_no_speech is not None and self.no_speech_prob > options.max_no_speech
        if is_guess and likely_silent:
            return ""
        if options.max_compression is not None and self.compression_ratio > options.max_compression:
            return REPEATS
        return GUESS if is_guess else ""


def best_of(attempts: Sequence[WindowText], options: SpeechOptions, seconds: float) -> WindowText:
    """Return the text of the highest mean logprob: speech that repeats itself is written so, too.

    A loop of the model's is no speech: a text that repeats itself, and has more to say than the `seconds` of
    sound allow; or that ran to the limit of its tokens, if a later one is good.
    """
    most = _FASTEST * (seconds + 1.0)
    fitting = [one for one in attempts if len(one.text) <= most or one.fault(options) != REPEATS] or attempts
    if not attempts[-1].fault(options):
        fitting = [one for one in fitting if one.ended] or fitting
    return max(fitting, key=lambda one: one.avg_logprob)


class _Decoded(NamedTuple):
    """One decoding: tokens without the end, their mean logprob, and whether the model ended it."""

    tokens: list[int]
    avg_logprob: float
    ended: bool


class WindowDecoder:
    """Decodes windows of one model under one set of options."""

    def __init__(
        self, tokenizer: WhisperTokenizer, options: SpeechOptions, *, n_ctx: int, stats: SpeechStats
    ) -> None:
        """Decode with at most `n_ctx` tokens of prompt and text, and count into `stats`."""
        self._tokenizer = tokenizer
        self._options = options
        self._n_ctx = n_ctx
        self._stats = stats
        self._traits = SpeechVocabulary(tokenizer)
        self._rules = SpeechRules(rule_tokens(tokenizer, options))

    def counting(self, stats: SpeechStats) -> WindowDecoder:
        """Return the same decoder, which counts into `stats`."""
        decoder = copy(self)
        decoder._stats = stats
        return decoder

    @property
    def n_sequences(self) -> int:
        """Sequences that a window's cache needs."""
        return (self._options.beam or 1) if 0.0 in self._options.temperatures else 1

    def first_batch(self) -> SequenceBatch:
        """Return the pass whose logits tell the language: over the start token alone."""
        return SequenceBatch(0, [self._tokenizer.sot])

    def prompt(self, start: Sequence[int], before: Sequence[int]) -> list[int]:
        """Return the tokens before a window's text: the end of the text `before`, then `start`."""
        if not before:
            return list(start)
        return [self._tokenizer.sot_prev, *before[-(self._n_ctx // 2 - 1) :], *start]

    def decode(
        self,
        cache: BeamPasses,
        prompt: Sequence[int],
        *,
        n_start: int,
        place: int,
        seconds: float,
        drafter: WindowDrafter | None = None,
    ) -> WindowText:
        """Return the text after `prompt`, whose last `n_start` tokens begin it, of the window in `cache`.

        `place`: the window's number, which its random numbers depend on. `seconds`: of sound in the window.
        """
        options = self._options
        session = self._session(cache, len(prompt) - n_start)
        attempts: list[WindowText] = []
        for i, temperature in enumerate(options.temperatures):
            started = time.perf_counter()
            if temperature == 0 and options.beam is not None:
                decoded = self._search(session, cache, prompt)
            else:
                coins = Coins((options.seed or 0) + _SEED_STEP * (place * len(options.temperatures) + i))
                decoded = self._sample(session, prompt, temperature, coins, drafter)
            attempts.append(self._text(session, decoded, temperature, started))
            if not attempts[-1].fault(options):
                break
        return best_of(attempts, options, seconds)

    def guess(
        self, cache: BeamPasses, prompt: Sequence[int], *, n_start: int, drafter: WindowDrafter | None
    ) -> WindowText:
        """Return the greedy text, however good it is; arguments as of `decode`."""
        started = time.perf_counter()
        session = self._session(cache, len(prompt) - n_start)
        decoded = self._sample(session, prompt, 0.0, Coins(0), drafter)
        return self._text(session, decoded, 0.0, started)

    def _session(self, cache: BeamPasses, noted: int) -> SpeechSession:
        return SpeechSession(cache, self._traits, n_ctx=self._n_ctx, noted=noted)

    def _text(
        self, session: SpeechSession, decoded: _Decoded, temperature: float, started: float
    ) -> WindowText:
        """Return what was decoded since `started`, and count it."""
        self._stats.n_decodings += 1
        self._stats.decode_s += time.perf_counter() - started
        tokens, mean, ended = decoded
        text = self._tokenizer.decode(tokens).strip()
        return WindowText(tuple(tokens), text, temperature, mean, self._no_speech(session), ended)

    def _search(self, session: SpeechSession, cache: BeamPasses, prompt: Sequence[int]) -> _Decoded:
        search = BeamSearch(cache, self._rules, self._options, n_ctx=self._n_ctx)
        session.rewind(0)
        row = session.eval(prompt)[0]
        found = search.run(row, len(prompt))
        self._stats.n_tokens += found.n_tokens
        self._stats.n_steps += found.n_passes
        return _Decoded(found.tokens, found.avg_logprob, len(found.tokens) < self._n_ctx // 2)

    def _sample(
        self,
        session: SpeechSession,
        prompt: Sequence[int],
        temperature: float,
        coins: Coins,
        window: WindowDrafter | None,
    ) -> _Decoded:
        """Decode once through the exact loop."""
        rules = self._rules.again()
        params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        options = Options(params=params, n_predict=self._n_ctx // 2, seed=coins.seed)
        task = Task(options=options, rule=self._options.rule(temperature), coins=coins, constraint=rules)
        drafter = window.drafter(rules, prompt, greedy=temperature == 0) if window else None
        generation = Generation(
            session,
            drafter,
            prompt,
            task,
            n_ctx=self._n_ctx + 1,  # the last token need not be read
            n_known=min(session.n_past, len(prompt) - 1),
        )
        started, stats = time.perf_counter(), self._stats
        for event in generation.events():
            if isinstance(event, Step):
                stats.n_steps += 1
                stats.steps[event.n_drafted, event.n_accepted] += 1
            elif isinstance(event, Prefill):
                stats.n_steps += 1
        seconds = time.perf_counter() - started
        if window:
            window.decoded(generation.tokens, len(prompt), drafter, seconds)
        tokens = generation.tokens[len(prompt) :]
        stats.n_tokens += len(tokens)
        ended = bool(tokens) and tokens[-1] == self._tokenizer.eot
        if ended:
            tokens.pop()
        return _Decoded(tokens, sum(rules.logprobs) / (len(tokens) + 1), ended)

    def _no_speech(self, session: SpeechSession) -> float:
        row = session.noted_row
        if row is None:
            return float("nan")
        return float(np.exp(float(row[self._tokenizer.no_speech]) - log_total(row)))


def language_of(row: np.ndarray, tokenizer: WhisperTokenizer) -> tuple[str, float]:
    """Return the likeliest language by the logits after the start token, and its probability."""
    tokens = list(tokenizer.language_tokens)
    logits = row[tokens]
    best = int(logits.argmax())
    return tokenizer.languages[best], float(np.exp(logits[best] - log_total(logits)))
