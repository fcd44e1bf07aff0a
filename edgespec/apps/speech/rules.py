"""Rules for which token of a Whisper decoder may come next, as in openai-whisper's decoding.py.

Some follow from the tokens before: suppressed tokens, no blank at the start, timestamps in pairs that never
decrease, the first one within a second. One depends on the logits too: where all timestamps together are
likelier than the likeliest other token, a timestamp follows. All are a Constraint of the loop, so target and
draft are masked alike and a draft changes nothing but the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.options import LANGUAGES, SpeechOptions
from edgespec.apps.speech.tokenizer import SECONDS_PER_TIMESTAMP, WhisperTokenizer
from edgespec.decoding.constraint import Allowed, Constraint, Path, Words
from edgespec.decoding.session import Rows
from edgespec.errors import UsageError

State = tuple[str, int]
"""The place in the rules: what may follow, and the lowest timestamp that may; equal states allow alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTokens:
    """The tokens that the rules are about. Timestamps are the ids from `first_timestamp` to the last."""

    n_vocab: int
    end: int
    """The token that ends a window's text; ids below it are text."""
    first_timestamp: int
    no_timestamps: int
    suppressed: tuple[int, ...] = ()
    """Tokens that never follow."""
    blank: tuple[int, ...] = ()
    """Tokens that may not come first, with `end`: those of a space."""
    last_initial: int | None = 50
    """Highest first timestamp, as an index: 50 is a second. None: any."""
    timed: bool = True
    """Whether the text has timestamps; else none may follow."""


class TimestampState:
    """A position in the rules that depend only on tokens; a `Matcher` of the loop's `Constraint`."""

    def __init__(self, tokens: RuleTokens) -> None:
        """Begin before the first token of a window."""
        self._tokens = tokens
        self._written: list[int] = []
        self._lasts = [-1]  # the last timestamp after that many tokens; -1: none yet

    @property
    def state(self) -> State:
        """The state after the tokens so far, on which the next one depends."""
        written, first = self._written, self._tokens.first_timestamp
        if not written:
            return "first", 0
        if not self._tokens.timed:
            return "text", 0
        last, is_time = self._lasts[-1], written[-1] >= first
        if is_time and (len(written) < 2 or written[-2] >= first):
            return "no timestamp", 0
        if is_time:
            return "no text", last
        return "any", last + 1 if last >= 0 else 0

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token whether it may follow, shape (n_vocab,)."""
        tokens = self._tokens
        kind, lowest = self.state
        allowed = np.ones(tokens.n_vocab, np.bool_)
        allowed[list(tokens.suppressed)] = False
        if kind == "first":
            allowed[[*tokens.blank, tokens.end]] = False
        if not tokens.timed:
            return allowed
        allowed[tokens.no_timestamps] = False
        times = slice(tokens.first_timestamp, None)
        if kind == "first":
            allowed[: tokens.first_timestamp] = False
            if tokens.last_initial is not None:
                allowed[tokens.first_timestamp + tokens.last_initial + 1 :] = False
        elif kind == "no timestamp":
            allowed[times] = False
        elif kind == "no text":
            allowed[: tokens.end] = False
        if lowest > tokens.first_timestamp:
            allowed[tokens.first_timestamp : lowest] = False
        return allowed

    def mask(self, out: Words) -> None:
        """Set the bits of the tokens that may follow, clear the others."""
        bits = np.zeros(32 * len(out), np.bool_)
        bits[: self._tokens.n_vocab] = self.allowed()
        out[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    def consume(self, token: int) -> None:
        """Advance by `token`, of the window's text or one of its times."""
        self._written.append(token)
        is_time = token >= self._tokens.first_timestamp
        self._lasts.append(token if is_time else self._lasts[-1])

    def rollback(self, n: int) -> None:
        """Undo the last `n` tokens."""
        if n:
            del self._written[-n:], self._lasts[-n:]

    def forced(self) -> list[int]:
        """Return no token: the rules always leave a choice."""
        return []

    def after(self, token: int) -> TimestampState:
        """Return a new position after `token`; this one is unchanged."""
        position = TimestampState(self._tokens)
        position._written, position._lasts = [*self._written], [*self._lasts]
        position.consume(token)
        return position


class SpeechRules(Constraint):
    """The rules for one window's text; also adds up how likely the emitted tokens were.

    `logprobs` are of the masked logits at temperature 1, as OpenAI counts them.
    """

    def __init__(self, tokens: RuleTokens) -> None:
        """Begin before the first token of a window."""
        self._position = TimestampState(tokens)
        self.tokens = tokens
        self._masks: dict[State, Allowed] = {}
        self._places: dict[tuple[int, ...], int] = {}  # the row that was masked last for each path
        self.logprobs: list[float] = []
        """The natural logarithm of each emitted token's probability."""
        super().__init__(
            lambda: self._position, tokens.n_vocab, is_eog=lambda token: token == tokens.end, name="the rules"
        )

    def again(self) -> SpeechRules:
        """Return the rules before the first token, with the masks that are known."""
        rules = SpeechRules(self.tokens)
        rules._masks = self._masks
        return rules

    def forbid(self, row: Rows, position: TimestampState) -> None:
        """Set the logits of tokens that may not follow `position` to -inf, in place."""
        allowed = self._allowed_at(position)
        if allowed.is_most:
            row[allowed.ids] = -np.inf
        else:
            kept = row[allowed.ids]
            row.fill(-np.inf)
            row[allowed.ids] = kept
        if self.tokens.timed:
            prefer_timestamp(row, self.tokens.first_timestamp)

    def mask(self, row: Rows, path: Path, *, place: int = 0) -> Rows | None:
        """Return `row` with forbidden tokens at -inf; as in Constraint."""
        masked = super().mask(row, path, place=place)
        if masked is not None:
            self._places[tuple(path)] = place
            if self.tokens.timed:
                prefer_timestamp(masked, self.tokens.first_timestamp)
        return masked

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by `tokens`, which were emitted, and count their probabilities."""
        for n, token in enumerate(tokens):
            place = self._places.get(tuple(tokens[:n]))
            if place is not None:
                row = self._rows[place]
                self.logprobs.append(float(row[token]) - log_total(row))
        self._places.clear()
        super().advance(tokens)

    def _look(self) -> Allowed:
        return self._allowed_at(self._position)

    def _allowed_at(self, position: TimestampState) -> Allowed:
        state = position.state
        found = self._masks.get(state)
        if found is None:
            words = np.empty_like(self._usable)
            position.mask(words)
            found = self._masks[state] = Allowed(words, self._n_vocab)
        return found


def prefer_timestamp(row: Rows, first_timestamp: int) -> None:
    """Forbid all but timestamps where these together are likelier than any other token; `row` is masked."""
    times = row[first_timestamp:]
    highest = float(times.max(initial=-np.inf))
    if highest == -math.inf:
        return
    text = row[:first_timestamp]
    most = float(text.max())
    if highest > most or log_total(times, highest) > most:
        text.fill(-np.inf)


def log_total(row: Rows, highest: float | None = None) -> float:
    """Return the logarithm of the sum of exp(row); `highest` is its maximum, if known."""
    top = float(row.max()) if highest is None else highest
    return top + math.log(float(np.exp(row - np.float32(top)).sum()))


_ENGLISH = "the model knows only English; choose a multilingual one, such as whisper-base"


def check_language(tokenizer: WhisperTokenizer, options: SpeechOptions) -> None:
    """Raise UsageError if the model does not know the language or the task."""
    language = options.language
    if tokenizer.is_multilingual:
        if language is not None and language not in tokenizer.languages:
            problem = f"this model does not know {LANGUAGES[language]}; whisper-large-v3 does"
            raise UsageError(problem, field="language", value=language)
    else:
        check_english(options)


def check_english(options: SpeechOptions) -> None:
    """Raise UsageError for a language or task that an English-only model lacks."""
    if options.language not in (None, "en"):
        raise UsageError(_ENGLISH, field="language", value=options.language)
    if options.task == "translate":
        raise UsageError(f"nothing can be translated: {_ENGLISH}")


def rule_tokens(tokenizer: WhisperTokenizer, options: SpeechOptions) -> RuleTokens:
    """The rules' view of the tokenizer under these options."""
    latest = options.max_initial_timestamp
    return RuleTokens(
        n_vocab=tokenizer.n_vocab,
        end=tokenizer.eot,
        first_timestamp=tokenizer.timestamp_begin,
        no_timestamps=tokenizer.no_timestamps,
        suppressed=tokenizer.suppressed,
        blank=tuple(tokenizer.encode(" ")),
        last_initial=None if latest is None else round(latest / SECONDS_PER_TIMESTAMP),
        timed=options.timestamps,
    )
