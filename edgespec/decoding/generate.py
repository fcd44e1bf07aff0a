"""The loop: propose, verify, accept or resample. It yields a Step at a time.

The target's cache lags its timeline by the last emitted token, which is evaluated with the next draft, and
by the accepted tokens of a side branch before it: a cache in one piece and in the order of the text is that
of plain decoding, bit for bit. Whatever ends the loop, the cache holds emitted tokens and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.choices import Rule
from edgespec.decoding.drafter import Drafter, Outcome, Position, Tokens
from edgespec.decoding.logprobs import logprobs_of
from edgespec.decoding.tree import NO_NODES, Tree, lower
from edgespec.decoding.verify import Verifier
from edgespec.energy import Phase
from edgespec.errors import LogitsOf
from edgespec.grammar.grammar import Constraint
from edgespec.llama.session import Rows, Session
from edgespec.records import Logprobs, Step, StopReason
from edgespec.sampling import Coins, SamplingParams

_WORTH_A_MARK_S = 1e-3


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt was read and the first token sampled from the target's own logits."""

    token: int
    seconds: float
    logprobs: tuple[Logprobs, ...] = ()
    """Of the token, where asked for."""


@dataclass(frozen=True, slots=True)
class DraftPrefill:
    """The drafter took up the prompt."""

    seconds: float


def unmarked(_phase: Phase) -> None:
    """Do nothing at the end of a phase: nobody counts what it took."""


class Generation:
    """One run of the loop over `target`'s session; iterate over `events()`.

    Stops by itself after an end-of-generation token, after `n_predict` tokens (None: no limit) and
    when the context is full; `stop_reason` then says which. `tokens` is the timeline: the prompt and
    what was emitted.
    """

    def __init__(
        self,
        target: Session,
        drafter: Drafter | None,
        prompt: Sequence[int],
        *,
        params: SamplingParams,
        coins: Coins,
        rule: Rule = "block",
        lenience: float = 1.0,
        n_predict: int | None = None,
        n_ctx: int | None = None,
        n_known: int = 0,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """Prepare to continue `prompt` with what `drafter` proposes (None: plain decoding).

        `n_ctx` is where the context counts as full, by default the end of `target`'s. A `lenience` below 1 is
        not exact (verify.py); it takes the chain rule, or the match rule at temperature 0. The first
        `n_known` tokens of the prompt, not all, stand in `target`'s cache already. `n_logprobs`: each emitted
        token comes with its Logprobs, of so many likeliest tokens; None: without. `constraint`:
        what the text must match; it is closed at the end.
        """
        self.tokens = list(prompt)
        self.stop_reason: StopReason = "interrupted"
        self._n_prompt = len(prompt)
        self._target = target
        self._is_eog = target.model.is_eog
        self._drafter = drafter
        self._params = params
        self._coins = coins
        self._rule = rule
        self._lenience = lenience
        self._n_predict = n_predict
        self._n_ctx = n_ctx or target.n_ctx
        self.mark: Callable[[Phase], None] = unmarked
        """Told at the end of each phase which one it was; may be replaced before the first event."""
        self._sampler = params.sampler(target.model.n_vocab, drafter.n_max if drafter else 0)
        self._position = Position(self._sampler, self._recent, coins.take)
        self._verifier = Verifier(
            rule, self._position, params, is_eog=self._is_eog, lenience=lenience, constraint=constraint
        )
        self.n_known = n_known
        self._n_logprobs = n_logprobs
        self._constraint = constraint
        self._n_cached = 0
        self._no_tokens: Tokens = np.empty(0, np.int32)

    def events(self) -> Generator[Prefill | DraftPrefill | Step]:
        """Run: a Prefill, a DraftPrefill if there is a drafter, then Steps."""
        try:
            with LogitsOf(self._target.model.path):
                yield from self._run()
        finally:
            if self._constraint:
                self._constraint.close()
            self._target.rewind(min(self._target.n_past, len(self.tokens) - 1))

    def _run(self) -> Generator[Prefill | DraftPrefill | Step]:
        yield self._prefill()
        if self._drafter and not self._finished():
            self.mark("rest")
            started = time.perf_counter()
            self._drafter.begin(self.tokens, sampled=self._rule != "match", n_predict=self._n_predict)
            self.mark("draft")
            yield DraftPrefill(time.perf_counter() - started)
        while not self._finished():
            yield self._step()

    def _prefill(self) -> Prefill:
        self.mark("rest")
        started = time.perf_counter()
        self._target.rewind(self.n_known)
        rows = self._target.eval(self.tokens[self.n_known :], n_logits=1)
        _, token, _ = self._verifier.verify(NO_NODES, rows)
        logprobs = self._logprobs([rows[0]], [token])
        self._n_cached = len(self.tokens)
        self.tokens.append(token)
        if self._constraint:
            self._constraint.advance([token])
        self.mark("prefill")
        return Prefill(token, time.perf_counter() - started, logprobs)

    def _step(self) -> Step:
        self.mark("rest")
        started = time.perf_counter()
        tree = lower(self._propose())
        n = tree.n_nodes
        # A mark costs as much as deciding against a draft; but the draft model may have worked for nothing.
        drafts = n > 0 or time.perf_counter() - started > _WORTH_A_MARK_S
        if drafts:
            self.mark("draft")
        drafted = time.perf_counter()
        n_past = len(self.tokens)
        pending = self.tokens[self._n_cached :]
        rows = self._target.eval([*pending, *tree.tokens], n_logits=n + 1, parents=tree.parents)
        self.mark("verify")
        verified = time.perf_counter()
        path, following, judged = self._verifier.verify(tree, rows)
        emitted = [*(tree.tokens[i] for i in path), following]
        if path and self._is_eog(emitted[-2]):
            emitted.pop()  # nothing follows an end-of-generation token
        logprobs = self._logprobs([rows[i + 1] for i in (-1, *path)], emitted)
        self.tokens += emitted
        if self._constraint:
            self._constraint.advance(emitted)
        n_trunk = sum(i == depth for depth, i in enumerate(path))  # what is in the cache already
        self._n_cached = min(n_past + n_trunk, len(self.tokens) - 1)
        self._target.rewind(self._n_cached)
        if drafts:
            self.mark("rest")
        ready = time.perf_counter()
        if self._drafter:
            self._drafter.accept(
                self.tokens, Outcome(path, emitted, len(pending) + n, verified - drafted, judged)
            )
            if drafts:
                self.mark("draft")
        ended = time.perf_counter()
        return Step(
            tuple(emitted),
            n_drafted=n,
            n_accepted=len(path),
            depth=tree.depth(path),
            draft_s=drafted - started + ended - ready,
            verify_s=verified - drafted,
            rest_s=ready - verified,
            logprobs=logprobs,
        )

    def _logprobs(self, rows: Sequence[Rows], tokens: Sequence[int]) -> tuple[Logprobs, ...]:
        n = self._n_logprobs
        return (
            ()
            if n is None
            else tuple(logprobs_of(row, token, n) for row, token in zip(rows, tokens, strict=False))
        )

    def _propose(self) -> Tree:
        """Ask the drafter for no more than can still be emitted and held."""
        if not self._drafter:
            return ()
        room = self._n_ctx - len(self.tokens) - 1
        if self._n_predict is not None:
            room = min(room, self._n_predict - self._n_emitted - 1)
        return self._drafter.draft(self.tokens, room, self._position)

    @property
    def _n_emitted(self) -> int:
        return len(self.tokens) - self._n_prompt

    def _finished(self) -> bool:
        if self._is_eog(self.tokens[-1]):
            self.stop_reason = "eog"
        elif self._n_predict is not None and self._n_emitted >= self._n_predict:
            self.stop_reason = "length"
        elif len(self.tokens) >= self._n_ctx:
            self.stop_reason = "context"
        else:
            return False
        return True

    def _recent(self, drafted: Sequence[int]) -> Tokens:
        """Return what the penalties look back on before the position after `drafted`."""
        if not self._params.uses_prefix:
            return np.asarray(drafted, np.int32) if drafted else self._no_tokens
        last_n = self._params.penalty_last_n
        history = self.tokens if last_n < 0 else self.tokens[-last_n:]
        return np.asarray([*history, *drafted], np.int32)
