"""Beam search over a window's text, as openai-whisper's: all beams in one pass of the decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.rules import SpeechRules, TimestampState
from edgespec.apps.speech.session import DecoderPasses
from edgespec.apps.speech.whisper_model import SequenceBatch
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import Rows


class BeamPasses(DecoderPasses, Protocol):
    """A cache whose sequences are beams."""

    def reorder(self, sources: Sequence[int]) -> None:
        """Let sequence i go on from what sequence sources[i] holds."""


@dataclass(slots=True)
class Beam:
    """A text under way."""

    tokens: list[int]
    logprob: float
    """Sum over its tokens."""
    position: TimestampState


@dataclass(frozen=True, slots=True)
class Found:
    """The best text of a search."""

    tokens: list[int]
    """The tokens without the end."""
    avg_logprob: float
    n_tokens: int
    """Tokens of the longest text that was looked at."""
    n_passes: int


class BeamSearch:
    """Searches the likeliest text of one window."""

    def __init__(self, cache: BeamPasses, rules: SpeechRules, options: SpeechOptions, *, n_ctx: int) -> None:
        """Search in `cache`, whose sequence 0 holds the prompt, what `rules` allow."""
        self._cache = cache
        self._rules = rules
        self._n_beams = options.beam or 1
        self._n_wanted = max(1, round(self._n_beams * options.patience))
        self._penalty = options.length_penalty
        self._n_ctx = n_ctx
        self._finished: dict[tuple[int, ...], float] = {}
        self._n_passes = 1
        self._sampler = SamplingParams(temperature=0.0).sampler(rules.n_vocab, 0)

    def run(self, row: Rows, n_prompt: int) -> Found:
        """Return the best text after a prompt of `n_prompt` tokens, which `row` of logits follows."""
        end = self._rules.end
        beams = [Beam([], 0.0, self._rules.begin())]
        rows: Sequence[Rows] = [row]
        for n_written in range(1, self._n_ctx // 2 + 1):
            beams, sources = self._next(beams, rows)
            is_complete = len(self._finished) >= self._n_wanted
            if is_complete or not beams or n_prompt + n_written > self._n_ctx:
                break
            if n_written == self._n_ctx // 2:
                break
            self._cache.reorder(sources)
            batch = [SequenceBatch(i, [beam.tokens[-1]]) for i, beam in enumerate(beams)]
            rows = [found[0] for found in self._cache.forward(batch)]
            self._n_passes += 1
        if len(self._finished) < self._n_beams:
            for beam in sorted(beams, key=lambda beam: beam.logprob, reverse=True):
                if len(self._finished) >= self._n_beams:
                    break
                self._finished[(*beam.tokens, end)] = beam.logprob
        best = max(self._finished, key=self._score)
        tokens = list(best[:-1])
        longest = max(map(len, self._finished))
        return Found(tokens, self._finished[best] / (len(tokens) + 1), longest, self._n_passes)

    def _score(self, text: tuple[int, ...]) -> float:
        """Return how good a finished text is: its logprob by its length, without the end."""
        n = len(text) - 1
        length = n if self._penalty is None else ((5 + n) / 6) ** self._penalty
        logprob = self._finished[text]
        return logprob / length if length else -math.inf

    def _next(self, beams: Sequence[Beam], rows: Sequence[Rows]) -> tuple[list[Beam], list[int]]:
        """Return the best continuations, and which beam each comes from; keep those that end."""
        candidates: list[tuple[float, int, int]] = []  # logprob, beam, token
        for i, (beam, row) in enumerate(zip(beams, rows, strict=True)):
            self._rules.forbid(row, beam.position)
            for token, probability in self._sampler.likeliest(row, self._n_beams + 1):
                if probability > 0.0:
                    candidates.append((beam.logprob + math.log(probability), i, token))
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        following: list[Beam] = []
        sources: list[int] = []
        ended: list[tuple[tuple[int, ...], float]] = []
        for logprob, i, token in candidates:
            tokens = [*beams[i].tokens, token]
            if token == self._rules.end:
                ended.append((tuple(tokens), logprob))
                continue
            following.append(Beam(tokens, logprob, beams[i].position.after(token)))
            sources.append(i)
            if len(following) == self._n_beams:
                break
        for text, logprob in ended:
            if len(self._finished) >= self._n_wanted:
                break
            self._finished[text] = logprob
        return following, sources
