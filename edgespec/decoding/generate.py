"""The exact loop: propose, verify, accept or resample. It yields a Step at a time.

The target's cache lags its sequence by the last emitted token, which is evaluated with the next draft, and
by the accepted tokens before it that it does not hold. Those are the ones of a side branch, for a cache in
one piece and in the order of the text is that of plain decoding, bit for bit; and those that went with the
rejected ones where these could not be taken back alone (Session.rewind). Whatever ends the loop, the cache
holds emitted tokens and nothing else.

Verification: which drafted tokens are kept, and the token that follows them.

One pass of the target has given its logits after the sequence (row 0) and after each node of the tree (row
i + 1). Let p be the target's distribution at a place, after the filters; x a drafted token there; and q the
distribution that x was sampled from (for a point mass: 1 at x).

chain   From the root down, siblings in order: keep x with probability min(1, p(x) / q(x)); after a rejection
        p becomes the residual, the normalised max(0, p - q). The next token is sampled from the p at the end.
        Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2. On a
        tree: Miao et al. (SpecInfer), arXiv 2305.09781, section 4; siblings sampled without replacement:
        Chen et al. (Sequoia), arXiv 2402.12374, section 3.
block   From the leaves up: keep the whole path to a leaf with probability weight(x) =
        min(1, weight(parent) p(x) / q(x)); after a rejection the leaf is taken away, and p becomes the
        normalised max(0, weight(parent) p - q). It never keeps less than the chain rule.
        Sun et al., arXiv 2403.10444, algorithm 2. On a tree: Weng et al., arXiv 2505.12398, section 3.
match   The target samples each position with a coin of that position, and x is kept if it is that token. No
        coin depends on what was drafted, so for a seed the text is plain decoding's own.
        Daliri et al., arXiv 2408.07978.

All three are exact: what is emitted is distributed as the target alone would emit it. Chain and block run in
the C core (`csrc/verify.c`); `tests/support/reference.py` has them in Python, and the tests compare the two.

A lenience l below 1 is not exact (Leviathan et al., appendix): the chain rule keeps x with probability
min(1, p(x) / (l q(x))). At temperature 0, the match rule also keeps an x that is at least l times as likely
as the target's likeliest token.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from edgespec.decoding.choices import Rule
from edgespec.decoding.drafter import Drafter, DraftOutcome, Position
from edgespec.decoding.features import TargetFeatures
from edgespec.decoding.forward import TargetForward, run_alone
from edgespec.decoding.grammar.constraint import Constraint
from edgespec.decoding.loop import DraftPrefill, Prefill, Task, unmarked
from edgespec.decoding.records import Logprobs, Step, StopReason
from edgespec.decoding.session import Features, ForwardResult, ModelSession, Rows
from edgespec.decoding.token_sequence import TokenSequence
from edgespec.decoding.tree import NO_NODES, Lowered, lower
from edgespec.errors import EdgespecError, LogitsOf
from edgespec.platform.metering import Phase

# ---- verification: which drafted tokens are kept, and the token that follows them ----


Judged: TypeAlias = list[tuple[int, float, float]]
"""(node, p, q) of the nodes that were judged; none by the match rule, which computes no probability."""


class Verifier:
    """Verifies the trees of one generation, by one rule."""

    def __init__(
        self,
        rule: Rule,
        position: Position,
        *,
        is_eog: Callable[[int], bool],
        lenience: float = 1.0,
        constraint: Constraint | None = None,
    ) -> None:
        """Sample with `position` what `constraint` allows."""
        self._rule = rule
        self._position = position
        self._is_eog = is_eog
        self._lenience = lenience
        self._constraint = constraint

    def verify(self, tree: Lowered, rows: Rows) -> tuple[list[int], int, Judged]:
        """Return the kept nodes, root to leaf, the token that follows them, and what was judged.

        `rows` are the target's logits, shape (n_nodes + 1, n_vocab). Without nodes a token is sampled.
        """
        if self._rule == "match":
            path, following = self._match(tree, rows)
            return path, following, []
        sampler, recent = self._position.sampler, self._position.recent
        if self._constraint:
            rows = self._constraint.masked(rows, tree.paths())
        coins = self._position.coins(tree.n_nodes + 1)  # one for each node, the last for the token after
        is_block = self._rule == "block"
        return sampler.verify(rows, *tree, recent(()), coins, is_block, lenience=self._lenience)

    def _match(self, tree: Lowered, rows: Rows) -> tuple[list[int], int]:
        position = self._position
        tokens, parents, _ = tree
        path: list[int] = []
        kept: list[int] = []  # their tokens
        node = -1
        while True:
            (coin,) = position.coins(1)  # one for each emitted token and no other, as in plain decoding
            recent = position.recent(kept)
            row = self._allowed(rows[node + 1], kept)
            token = position.sampler.sample(row, recent, coin, -1)
            children = [i for i in range(node + 1, len(parents)) if parents[i] == node]
            if not children:
                return path, token
            drafted = [tokens[i] for i in children]
            found = matching(
                drafted, token, partial(position.sampler.adjusted, row, recent), lenience=self._lenience
            )
            if found is None:
                return path, token
            node = children[found]
            path.append(node)
            kept.append(drafted[found])
            if self._is_eog(drafted[found]):
                return path, token  # the loop drops it: nothing follows an end-of-generation token

    def _allowed(self, row: Rows, path: Sequence[int]) -> Rows:
        if not self._constraint:
            return row
        masked = self._constraint.mask(row, path, place=len(path))  # each stays until the text moves on
        return row if masked is None else masked


def matching(
    drafted: Sequence[int],
    token: int,
    adjusted: Callable[[list[int]], list[float]],
    *,
    lenience: float = 1.0,
) -> int | None:
    """Return which of the `drafted` tokens of one position is kept, as an index; None: none is.

    `token` is what the target sampled there: it goes before all others. With a `lenience` below 1, at
    temperature 0, the likeliest of the others may be kept. `adjusted` returns the target's logits of tokens
    after bias and penalties, so that a forbidden token never is.
    """
    if token in drafted:
        return drafted.index(token)
    if not drafted or lenience >= 1.0:
        return None
    *logits, own = adjusted([*drafted, token])
    likeliest = max(range(len(drafted)), key=logits.__getitem__)
    return likeliest if logits[likeliest] >= own + math.log(lenience) else None


# ---- the loop ----


_WORTH_A_MARK_S = 1e-3
_SCORED = 32  # tokens of a prompt whose logits one pass gives; the batcher takes them as a draft

GenerationEvent: TypeAlias = Prefill | DraftPrefill | Step
"""The events of a generation."""


class Generation:
    """One run of the loop over `target`'s session: iterate over `events()`, or answer `work()`. A Loop.

    Stops by itself after an end-of-generation token, after `n_predict` tokens and when the context is full;
    `stop_reason` then says which. `tokens` are the prompt and what was emitted.
    """

    def __init__(
        self,
        target: ModelSession,
        drafter: Drafter | None,
        prompt: Sequence[int],
        task: Task,
        *,
        n_ctx: int | None = None,
        n_known: int = 0,
        features: TargetFeatures | None = None,
    ) -> None:
        """Prepare to continue `prompt` with what `drafter` proposes (None: plain decoding).

        `n_ctx` is where the context counts as full, by default the end of `target`'s. The first `n_known`
        tokens of the prompt, not all, stand in `target`'s cache already. `features` takes the target's hidden
        states, for a drafter that reads them. Of the task's options those are read that concern single
        tokens: params, n_predict, stop_tokens, lenience, n_logprobs and prompt_logprobs.
        """
        self.stop_reason: StopReason = "interrupted"
        self.prompt_logprobs: list[Logprobs] = []
        self.mark: Callable[[Phase], None] = unmarked
        self.n_known = self.n_prompt_read = n_known
        self._target = target
        self._is_eog = task.options.ends(target.model.is_eog)
        self._drafter = drafter
        self._features = features
        self._leaves_states = features is not None and target.model.leaves_last_states
        self._task = task
        self._constraint = task.constraint
        self._sequence = TokenSequence(prompt, task.options, n_ctx=n_ctx or target.n_ctx, is_eog=self._is_eog)
        self.tokens = self._sequence.tokens
        sampler = task.options.params.sampler(
            target.model.n_vocab,
            drafter.n_max if drafter else 0,
            seed=task.coins.seed,
            vocabulary=target.model,
        )
        self._position = Position(sampler, self._sequence.recent, task.coins.take)
        self._verifier = Verifier(
            task.rule,
            self._position,
            is_eog=self._is_eog,
            lenience=task.options.lenience,
            constraint=task.constraint,
        )
        self._n_cached = 0
        self._draft_prefill: DraftPrefill | None = None  # once the drafter has begun
        self._drafting: tuple[Sequence[int], int, Position] | None = None  # where the step has begun
        self._step_began = 0.0

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that the target reads in its prefill."""
        return self._sequence.n_prompt - self.n_known

    def have_read(self, n_past: int) -> None:
        """Take note that the target's cache holds `n_past` tokens of the sequence."""
        if len(self.tokens) == self._sequence.n_prompt:  # not again by one that is resumed
            self.n_prompt_read = n_past

    @property
    def n_pending(self) -> int:
        """Tokens of the sequence that the target's next pass reads in any case."""
        return len(self.tokens) - self._n_cached

    @property
    def n_left(self) -> int | None:
        """Tokens that may still be emitted; None: no limit."""
        return self._sequence.n_left

    @property
    def is_complete(self) -> bool:
        """Whether no token follows those that there are."""
        return self._sequence.end() is not None

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted of each source of drafts."""
        return self._drafter.sources() if self._drafter else {}

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now; None: not known."""
        return self._drafter.plain_rate() if self._drafter else None

    def note(self) -> str:
        """Say in one sentence what was drafted, or why nothing was; "" if nothing was to be drafted."""
        if self._drafter is None:
            options = self._task.options
            is_asked = options.drafter != "none" and options.gamma != 0 and not options.prompt_logprobs
            return "nothing was drafted: nothing can draft for this model" if is_asked else ""
        return self._drafter.note()

    def events(self) -> Generator[GenerationEvent]:
        """Run by itself: a Prefill, a DraftPrefill if there is a drafter, then Steps."""
        return run_alone(self.work())

    def work(self) -> Generator[TargetForward | GenerationEvent, Any]:
        """Run as `events` does, and yield also the target's passes, to be sent their results."""
        try:
            with LogitsOf(self._target.model.path):
                yield (yield from self._prefill())
                if self._drafter and not self._finished():
                    yield self._draft_prefill or self._begin_drafter(self._drafter)
                while not self._finished():
                    yield (yield from self._step())
        finally:
            if self._constraint:
                self._constraint.close()
            with suppress(EdgespecError):  # it is closed: the process ends, or is a forked child
                self._target.rewind(min(self._target.n_past, len(self.tokens)))

    def _begin_drafter(self, drafter: Drafter) -> DraftPrefill:
        self.mark("rest")
        started = time.perf_counter()
        is_weighed = self._task.rule != "match"
        drafter.begin(self.tokens, sampled=is_weighed, n_predict=self._task.options.n_predict)
        self.mark("draft")
        self._draft_prefill = DraftPrefill(time.perf_counter() - started)
        return self._draft_prefill

    def _finished(self) -> bool:
        end = self._sequence.end()
        self.stop_reason = end or self.stop_reason
        return end is not None

    def _prefill(self) -> Generator[TargetForward, Any, Prefill]:
        """Read the prompt and sample a token: what verification of no nodes gives."""
        self.mark("rest")
        started = time.perf_counter()
        self.n_known = self.n_prompt_read = self._target.rewind(self.n_known)
        if self._task.options.prompt_logprobs:
            rows = yield from self._score_prompt()
        else:
            rows = yield from self._read_prompt()
        self.have_read(len(self.tokens))
        if self._finished():  # no token is asked for
            self.mark("prefill")
            return Prefill(None, time.perf_counter() - started)
        _, token, _ = self._verifier.verify(NO_NODES, rows)
        logprobs = self._logprobs([rows[0]], [token])
        self._n_cached = len(self.tokens)
        self._emit([token])
        self.mark("prefill")
        return Prefill(token, time.perf_counter() - started, logprobs)

    def _read_prompt(self) -> Generator[TargetForward, Any, Rows]:
        """Read what of the prompt is not known; return the logits after it.

        Where hidden states are wanted the end of it takes passes of its own: the library may then compute the
        logits of all of their tokens, and has room for few.
        """
        session, start, n_prompt = self._target, self.n_known, len(self.tokens)
        n_wanted = 0
        if self._features:
            self._features.begin(self.tokens)
            n_wanted = min(self._features.n_prompt(), n_prompt - start)
        if not n_wanted:
            evaluated: ForwardResult = yield TargetForward(
                session, self.tokens[start:], with_last_states=self._features is not None
            )
            if evaluated.features is not None:
                self.keep_features(n_prompt - len(evaluated.features), evaluated.features)
            return evaluated.rows
        if start < n_prompt - n_wanted:
            yield TargetForward(session, self.tokens[start : n_prompt - n_wanted], 0)
        while True:
            start, n_wanted = n_prompt - n_wanted, max(0, n_wanted - session.n_features_max)
            part = self.tokens[start : n_prompt - n_wanted]
            evaluated = yield TargetForward(session, part, 0 if n_wanted else 1, with_features=True)
            if evaluated.features is not None:  # those of the part, or of its end
                self.keep_features(n_prompt - n_wanted - len(evaluated.features), evaluated.features)
            if not n_wanted:
                return evaluated.rows

    def _score_prompt(self) -> Generator[TargetForward, Any, Rows]:
        """Read the prompt, keep what the target says of each of its tokens, and return the logits after it.

        A pass takes as many tokens as it can give rows for: like a long draft, all of which is accepted.
        """
        most = min(_SCORED, self._target.most_drafted + 1)
        n = self._task.options.n_logprobs or 0
        start, prompt = self.n_known, self.tokens
        while True:
            part = prompt[start : start + most]
            evaluated: ForwardResult = yield TargetForward(self._target, part, len(part))
            following = prompt[start + 1 : start + 1 + len(part)]
            self.prompt_logprobs += [
                logprobs_of(row, token, n) for row, token in zip(evaluated.rows, following, strict=False)
            ]
            start += len(part)
            if start == len(prompt):
                return evaluated.rows[len(part) - 1 :]

    def keep_features(self, at: int, features: Features) -> None:
        """Keep the target's hidden states of the sequence's tokens from index `at` on."""
        if self._features:
            self._features.put(at, self.tokens[at : at + len(features)], features)

    @property
    def is_writing(self) -> bool:
        """Whether it has emitted a token."""
        return len(self.tokens) > self._sequence.n_prompt

    def begin_step(self) -> tuple[Sequence[int], int, Position]:
        """Begin a step that drafts; return the arguments of `Drafter.draft`.

        Whoever drafts for several texts together calls it before the step's pass is asked for.
        """
        if self._drafter and not self._draft_prefill:
            self._begin_drafter(self._drafter)
        self.mark("rest")
        self._step_began = time.perf_counter()
        room = min(self._sequence.room, self._target.most_drafted)  # to be emitted, held, and taken back
        self._drafting = self.tokens, room, self._position
        return self._drafting

    def _step(self) -> Generator[TargetForward, Any, Step]:
        """Propose, lower, evaluate, verify, emit, learn: docs/how-it-works.md walks through one."""
        arguments = self._drafting or self.begin_step()
        started, self._drafting = self._step_began, None
        tree = lower(self._drafter.draft(*arguments)) if self._drafter else NO_NODES
        n = tree.n_nodes
        # A mark costs as much as deciding against a draft; but the draft model may have worked for nothing.
        drafts = n > 0 or time.perf_counter() - started > _WORTH_A_MARK_S
        if drafts:
            self.mark("draft")
        drafted = time.perf_counter()
        n_past = len(self.tokens)
        pending = array("i", self.tokens[self._n_cached :])
        # Asked for otherwise, states may cost a row of logits for each token of all that share the pass.
        are_left = self._leaves_states and len(pending) == 1
        evaluated: ForwardResult = yield TargetForward(
            self._target,
            pending + tree.tokens,
            n + 1,
            tree.parents,
            with_features=self._features is not None and not are_left,
            with_last_states=are_left,
        )
        rows = evaluated.rows
        self.mark("verify")
        verified = time.perf_counter()
        path, following, judged = self._verifier.verify(tree, rows)
        emitted = [*(tree.tokens[i] for i in path), following]
        if path and self._is_eog(emitted[-2]):
            emitted.pop()  # nothing follows an end-of-generation token
        logprobs = self._logprobs([rows[i + 1] for i in (-1, *path)], emitted)
        self._emit(emitted)
        self._keep_states(evaluated.features, len(pending), n, path)
        n_trunk = sum(i == depth for depth, i in enumerate(path))  # what is in the cache already
        self._n_cached = self._target.rewind(min(n_past + n_trunk, len(self.tokens) - 1))
        if drafts:
            self.mark("rest")
        ready = time.perf_counter()
        if self._drafter:
            n_evaluated, seconds = evaluated.n_tokens, evaluated.seconds
            outcome = DraftOutcome(path, emitted, self.n_pending, n_evaluated, seconds, judged, rows)
            self._drafter.accept(self.tokens, outcome)
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

    def _keep_states(
        self, states: Features | None, n_pending: int, n_drafted: int, path: Sequence[int]
    ) -> None:
        """Keep those of a step's pass: of the tokens read in any case, and of the drafted ones on `path`.

        They end with those of the drafted tokens. Before them may be those of a text that was read again.
        """
        if self._features is None:
            return
        if states is None:  # the kernels do not run all of this model: they are asked for otherwise
            self._leaves_states = False
            return
        first = len(states) - n_drafted
        self.keep_features(
            self._n_cached, states[[*range(first - n_pending, first), *(first + i for i in path)]]
        )

    def _emit(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        if self._constraint:
            self._constraint.advance(tokens)

    def _logprobs(self, rows: Sequence[Rows], tokens: Sequence[int]) -> tuple[Logprobs, ...]:
        n = self._task.options.n_logprobs
        if n is None:
            return ()
        return tuple(logprobs_of(row, token, n) for row, token in zip(rows, tokens, strict=False))


def logprobs_of(row: Rows, token: int, n: int) -> Logprobs:
    """Return the natural logarithms for `token` and for the `n` likeliest, by raw logits, shape (n_vocab,).

    Of equal ones those of the smallest ids, as in sampling.
    """
    highest = float(row.max())
    log_total = highest + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))
    n = min(n, row.size)
    if n == 0:
        return Logprobs(float(row[token]) - log_total, ())
    least = np.partition(row, row.size - n)[row.size - n]
    candidates = np.flatnonzero(row >= least)
    order = np.lexsort((candidates, -row[candidates]))[:n]
    top = tuple((int(i), float(row[i]) - log_total) for i in candidates[order])
    return Logprobs(float(row[token]) - log_total, top)
