"""The loop: propose, verify, accept or resample. It yields a Step at a time.

The target's cache always lags its timeline by one token, the last emitted one, which is evaluated
with the next draft. Whatever ends the loop, that cache holds emitted tokens and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.drafters.base import Draft, Drafter, Outcome, Tokens
from edgespec.energy import Phase
from edgespec.errors import EdgespecError
from edgespec.records import Step, StopReason
from edgespec.sampling import Coins, SamplingParams
from edgespec.session import Rows, Session
from edgespec.verify import Rule

_WORTH_A_MARK_S = 1e-3


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt was read and the first token sampled from the target's own logits."""

    token: int
    seconds: float


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
        n_predict: int | None = None,
        n_ctx: int | None = None,
    ) -> None:
        """Prepare to continue `prompt` with what `drafter` proposes (None: plain decoding).

        `n_ctx` is where the context counts as full, by default the end of `target`'s.
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
        self._n_predict = n_predict
        self._n_ctx = n_ctx or target.n_ctx
        self.mark: Callable[[Phase], None] = unmarked
        """Told at the end of each phase which one it was; may be replaced before the first event."""
        self._sampler = params.sampler(target.model.n_vocab, drafter.n_max if drafter else 0)
        self._no_tokens: Tokens = np.empty(0, np.int32)

    def events(self) -> Generator[Prefill | DraftPrefill | Step]:
        """Run: a Prefill, a DraftPrefill if there is a drafter, then Steps."""
        try:
            yield self._prefill()
            if self._drafter and not self._finished():
                self.mark("rest")
                started = time.perf_counter()
                self._drafter.begin(self.tokens, sampled=self._rule != "match", n_predict=self._n_predict)
                self.mark("draft")
                yield DraftPrefill(time.perf_counter() - started)
            while not self._finished():
                yield self._step()
        except ArithmeticError as error:  # from the C core: logits that are no numbers, or all -infinity
            raise EdgespecError(
                f"{self._target.model.path}: {error}; the model file may be damaged "
                "(`edgespec models verify`), or --logit-bias forbids every token"
            ) from error
        finally:
            self._target.rewind(min(self._target.n_past, len(self.tokens) - 1))

    def _prefill(self) -> Prefill:
        self.mark("rest")
        started = time.perf_counter()
        self._target.clear()
        row = self._target.eval(self.tokens, n_logits=1)[0]
        (coin,) = self._coins.take(1)
        token = self._sampler.sample(row, self._recent(()), coin, -1)
        self.tokens.append(token)
        self.mark("prefill")
        return Prefill(token, time.perf_counter() - started)

    def _step(self) -> Step:
        self.mark("rest")
        started = time.perf_counter()
        draft = self._propose()
        n = len(draft.tokens)
        # A mark costs as much as deciding against a draft; but the draft model may have worked for nothing.
        drafts = n > 0 or time.perf_counter() - started > _WORTH_A_MARK_S
        if drafts:
            self.mark("draft")
        drafted = time.perf_counter()
        rows = self._target.eval([self.tokens[-1], *draft.tokens], n_logits=n + 1)
        self.mark("verify")
        verified = time.perf_counter()
        n_accepted, following, probs = self._judge(rows, draft.tokens)
        emitted = [*draft.tokens[:n_accepted], following]
        if n_accepted and self._is_eog(draft.tokens[n_accepted - 1]):
            emitted.pop()  # nothing follows an end-of-generation token
        self.tokens += emitted
        self._target.rewind(len(self.tokens) - 1)
        if drafts:
            self.mark("rest")
        judged = time.perf_counter()
        if self._drafter:
            self._drafter.accept(self.tokens, Outcome(n_accepted, emitted, judged - drafted, probs))
            if drafts:
                self.mark("draft")
        ended = time.perf_counter()
        return Step(
            tuple(emitted),
            n_drafted=n,
            n_accepted=n_accepted,
            draft_s=drafted - started + ended - judged,
            verify_s=verified - drafted,
            rest_s=judged - verified,
        )

    def _judge(self, rows: Rows, draft: Sequence[int]) -> tuple[int, int, list[tuple[float, float]]]:
        """Return how many drafted tokens are kept, the token after them, and (p, q) of those judged."""
        if self._rule != "match":
            return self._sampler.verify(
                rows,
                np.asarray(draft, np.int32),
                self._recent(draft),
                self._coins.take(len(draft) + 1),
                self._rule == "block",
            )
        n_accepted = 0
        while True:  # a coin for each emitted token, and no other: so the text is that of plain decoding
            (coin,) = self._coins.take(1)
            token = self._sampler.sample(rows[n_accepted], self._recent(draft[:n_accepted]), coin, -1)
            if n_accepted == len(draft) or token != draft[n_accepted]:
                return n_accepted, token, []
            n_accepted += 1
            if self._is_eog(token):  # what the loop takes away again
                return n_accepted, token, []

    def _propose(self) -> Draft:
        """Ask the drafter for no more than can still be emitted and held."""
        if not self._drafter:
            return Draft()
        room = self._n_ctx - len(self.tokens) - 1
        if self._n_predict is not None:
            room = min(room, self._n_predict - self._n_emitted - 1)
        return self._drafter.draft(self.tokens, room, self._sampler, self._recent, self._coins.take)

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
