"""The exact loop: propose, verify, accept or resample.

`ask` returns a text's part of the target's next pass, and `process` makes a step of its result. So the
loop is written once, and its driver makes one pass for many texts (engine/batcher.py).

The target's cache lags its sequence by the last emitted token, which is evaluated with the next draft, and
by the accepted tokens before it that it does not hold. Those are the ones of a side branch, for a cache in
one piece and in the order of the text is that of plain decoding, bit for bit; and those that went with the
rejected ones if these could not be removed alone (Session.rewind). Whatever ends the loop, the cache
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
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from edgespec.decoding.choices import Rule
from edgespec.decoding.constraint import Constraint
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.options import Options
from edgespec.decoding.records import Logprobs, Step, StopReason, Tally
from edgespec.decoding.sampling import Coins
from edgespec.decoding.session import (
    EmbeddedSpan,
    Features,
    Forward,
    ForwardResult,
    ModelSession,
    PromptTokens,
    Rows,
    TargetFeatures,
    text_of,
)
from edgespec.decoding.tree import Drafter, Position, Tree, drafted_depth, lower, paths
from edgespec.errors import EdgespecError, LogitsOf
from edgespec.platform.metering import Phase

# ---- verification: which drafted tokens are kept, and the token that follows them ----


Judged: TypeAlias = list[tuple[int, float, float]]
"""(node, p, q) of the nodes that were tested; none by the match rule, which computes no probability."""


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

    def verify(self, tree: Tree, rows: Rows) -> tuple[list[int], int, Judged]:
        """Return the kept nodes, root to leaf, the token that follows them, and the tested nodes.

        `rows` are the target's logits, shape (n_nodes + 1, n_vocab). Without nodes a token is sampled.
        """
        if self._rule == "match":
            path, following = self._match(tree, rows)
            return path, following, []
        sampler, recent = self._position.sampler, self._position.recent
        if self._constraint:
            rows = self._constraint.masked(rows, paths(tree))
        coins = self._position.coins(len(tree) + 1)  # one for each node, the last for the token after
        is_block = self._rule == "block"
        return sampler.verify(rows, *lower(tree), recent(()), coins, is_block, lenience=self._lenience)

    def _match(self, tree: Tree, rows: Rows) -> tuple[list[int], int]:
        position = self._position
        path: list[int] = []
        kept: list[int] = []  # their tokens
        node = -1
        while True:
            (coin,) = position.coins(1)  # one for each emitted token and no other, as in plain decoding
            recent = position.recent(kept)
            row = self._allowed(rows[node + 1], kept)
            token = position.sampler.sample(row, recent, coin, -1)
            children = [i for i in range(node + 1, len(tree)) if tree[i].parent == node]
            if not children:
                return path, token
            drafted = [tree[i].token for i in children]
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
    """Return the index of the one of `drafted`, tokens of one position, that is kept; None: none is.

    `token` is what the target sampled there: it is preferred to all others. With a `lenience` below 1, at
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
_SCORED = 32  # tokens of a prompt whose logits one pass gives: as many as a draft has


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a loop: the options, and the decisions that they leave open."""

    options: Options
    rule: Rule
    coins: Coins
    constraint: Constraint | None = None
    """The options' grammar as a constraint of only this text; the loop closes it at the end."""


def unmarked(_phase: Phase) -> None:
    """Do nothing at the end of a phase: energy is not measured."""


class Loop(ABC):
    """Writes one text, a pass at a time. Generation is exact, Cascade (engine/cascade.py) is not.

    A text may be as long as the context, so no step copies it.
    """

    drafter: Drafter | None = None
    """What proposes tokens to the target; None: nothing does."""
    n_known = 0
    """Tokens at the start of the prompt that the target's cache held already."""

    def __init__(
        self, prompt: Sequence[int], task: Task, *, n_ctx: int, is_eog: Callable[[int], bool]
    ) -> None:
        """Begin with `prompt`. The context is full at `n_ctx` tokens."""
        self.tokens = list(prompt)
        """The prompt and what was emitted."""
        self._spans = _starts(self.tokens, prompt.spans if isinstance(prompt, PromptTokens) else ())
        self._without_ids = text_of(self.tokens) if self._spans else []
        self.n_prompt = len(prompt)
        self.n_ctx = n_ctx
        self.n_prompt_read = 0
        """Tokens of the prompt that were read so far, `n_known` ones included; any thread may ask."""
        self.stop_reason: StopReason = "interrupted"
        """"interrupted" until the end is known."""
        self.prompt_logprobs: list[Logprobs] = []
        """Logprobs of each token of the prompt but the first, where asked for."""
        self.tally = Tally()
        self.mark: Callable[[Phase], None] = unmarked
        """Told at the end of each phase which one it was; may be replaced before the first pass."""
        self._task = task
        self._is_eog = is_eog
        self._text = array("i")  # for `recent`: the tokens, and those that were drafted last
        self._n_text = 0

    @abstractmethod
    def ask(self) -> Forward | None:
        """Return the next pass that it needs, the same one until `process`; None: nothing more is written."""

    @abstractmethod
    def process(self, result: ForwardResult) -> Step | None:
        """Process the result of the pass; return the tokens written, None if it only read."""

    @abstractmethod
    def close(self) -> None:
        """End here: the caches then hold a beginning of `tokens`."""

    @property
    @abstractmethod
    def n_read(self) -> int:
        """Tokens that the target read in its prefills."""

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted of each source of drafts."""
        return self.drafter.sources() if self.drafter else {}

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now; None: not known."""
        return self.drafter.plain_rate() if self.drafter else None

    @abstractmethod
    def note(self) -> str:
        """Return a sentence about what was drafted or left to the small model, and why; "" for nothing."""

    def events(self) -> Iterator[Step]:
        """Run by itself, to the end or until it is closed."""
        with closing(self):
            while part := self.ask():
                if made := self.process(part.run()):
                    yield made

    @property
    def is_writing(self) -> bool:
        """Whether it has emitted a token."""
        return len(self.tokens) > self.n_prompt

    @property
    def n_predict_left(self) -> int | None:
        """Tokens that may still be emitted; None: no limit."""
        n_predict = self._task.options.n_predict
        return None if n_predict is None else n_predict - (len(self.tokens) - self.n_prompt)

    @property
    def _room(self) -> int:
        """Tokens that may be drafted: as many as can still be held and emitted, less the target's own."""
        room, n_predict_left = self.n_ctx - len(self.tokens), self.n_predict_left
        return (room if n_predict_left is None else min(room, n_predict_left)) - 1

    @property
    def text(self) -> list[int]:
        """The prompt and what was emitted without ids of spans: what filters and drafters see."""
        return self._without_ids if self._spans else self.tokens

    def n_text(self, n_tokens: int) -> int:
        """Return how many of the first `n_tokens` are tokens of the text."""
        inside = sum(max(0, min(n_tokens - start, len(span.ids))) for start, span in self._spans)
        return n_tokens - inside

    def _emit(self, tokens: Sequence[int]) -> None:
        """Append `tokens`, and note whether anything may follow."""
        self.tokens.extend(tokens)
        self._without_ids.extend(tokens if self._spans else ())
        n_predict_left = self.n_predict_left
        if self.is_writing and self._is_eog(self.tokens[-1]):
            self.stop_reason = "eog"
        elif n_predict_left is not None and n_predict_left <= 0:
            self.stop_reason = "length"
        elif len(self.tokens) >= self.n_ctx:
            self.stop_reason = "context"

    @property
    def is_complete(self) -> bool:
        """Whether the text has ended."""
        return self.stop_reason != "interrupted"

    def _recent(self, drafted: Sequence[int] = ()) -> array[int]:
        """Return the text that the filters see at the position after `drafted` tokens, as C ints.

        Valid until the next call.
        """
        text = self._text
        del text[self._n_text :]
        if self._task.options.params.looks_back:
            text.extend(self.text[self._n_text :])
            self._n_text = len(text)
        text.extend(drafted)
        return text


def _starts(tokens: Sequence[int], spans: Sequence[EmbeddedSpan]) -> list[tuple[int, EmbeddedSpan]]:
    """Return each span with the number of tokens before it."""
    found, at = [], 0
    for span in spans:
        at = tokens.index(span.ids[0], at)
        found.append((at, span))
        at += len(span.ids)
    return found


class Generation(Loop):
    """The exact loop over `target`'s session.

    Stops by itself after an end-of-generation token, after `n_predict` tokens and when the context is full;
    `stop_reason` then says which.
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
        tokens of the prompt, not all, are in `target`'s cache already. `features` takes the target's hidden
        states, for a drafter that reads them. Only the task's options for single tokens
        are read: params, n_predict, stop_tokens, lenience, n_logprobs and prompt_logprobs.
        """
        options = task.options
        super().__init__(prompt, task, n_ctx=n_ctx or target.n_ctx, is_eog=options.ends(target.model.is_eog))
        self.n_known = self.n_prompt_read = n_known
        self.session, self.drafter = target, drafter
        self._features = features
        self._leaves_states = features is not None and target.model.leaves_last_states
        self._states_from = self.n_prompt  # of the prompt: the first token whose hidden states are wanted
        sampler = options.params.sampler(
            target.model.n_vocab,
            drafter.n_max if drafter else 0,
            seed=task.coins.seed,
            vocabulary=target.model,
        )
        self._position = Position(sampler, self._recent, task.coins.draw)
        self._verifier = Verifier(
            task.rule,
            self._position,
            is_eog=self._is_eog,
            lenience=options.lenience,
            constraint=task.constraint,
        )
        self._blamed = LogitsOf(target.model.path)
        self._began: float | None = None  # when it began to read the prompt
        self._part: Forward | None = None  # that it asked for
        self._has_drafter_begun = False
        self._drafting: tuple[Sequence[int], int, Position] | None = None  # where the step has begun
        self._tree: Tree | None = None  # of the step, once it is drafted: kept until it is verified
        self._step_began = self._drafted = 0.0  # times of the step
        self._is_marked = False  # whether its drafting is worth marks

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that the target reads in its prefill."""
        return self.n_prompt - self.n_known

    def note(self) -> str:
        """Return a sentence about what was drafted, or why nothing was; "" if nothing was to be drafted."""
        if self.drafter is None:
            options = self._task.options
            is_asked = options.drafter != "none" and options.gamma != 0 and not options.prompt_logprobs
            return "nothing was drafted: nothing can draft for this model" if is_asked else ""
        return self.drafter.note()

    def close(self) -> None:
        """End here: the target's cache then holds a beginning of `tokens`."""
        if self._task.constraint:
            self._task.constraint.close()
        with suppress(EdgespecError):  # it is closed: the process ends, or is a forked child
            self.session.rewind(self._before_span(min(self.session.n_past, len(self.tokens))))

    # ---- what it asks of the target ----

    @property
    def _goal(self) -> tuple[int, int]:
        """The tokens to read before the text continues, and how many of them need logits."""
        if self.is_writing or not self._task.options.prompt_logprobs:
            return len(self.tokens), 1
        n_scored = self.n_known + len(self.prompt_logprobs)
        stop = min(n_scored + min(_SCORED, self.session.cache.most_drafted + 1), self.n_prompt)
        return stop, stop - n_scored

    @property
    def n_pending(self) -> int:
        """Tokens of the text that must be evaluated before it continues."""
        return self._goal[0] - self.session.n_past

    @property
    def n_rest(self) -> int:
        """Tokens that must be evaluated, drafted ones included."""
        return self.n_pending + len(self._tree or ())

    @property
    def is_reading(self) -> bool:
        """Whether it has more to read than a step can draft."""
        return self.n_rest > MAX_GAMMA + 2

    @property
    def wants_states(self) -> bool:
        """Whether its next pass must return the hidden states of all its tokens."""
        return self._features is not None and not self.is_writing and self.session.n_past >= self._states_from

    def begin(self) -> None:
        """Begin to read the prompt, unless that has begun; all texts that share its passes exist by now."""
        if self._began is not None:
            return
        self.mark("rest")
        self._began = time.perf_counter()
        self.n_known = self.n_prompt_read = self.session.rewind(self._before_span(self.n_known))
        for start, span in self._spans:
            if start >= self.n_known:
                span.start()
        if self._features:
            self._features.begin(self.text)
            self._states_from -= min(self._features.n_prompt(), self.n_read)
            if self._states_from == self.n_prompt:  # only those that cost nothing
                self._states_from += 1

    def ask(self, most: int | None = None) -> Forward | None:
        """Return its part of the target's next pass, the same one until `process`; None at the end.

        `most`: limit of the part's tokens while it reads; None: none.
        """
        if self.is_complete:
            return None
        with self._blamed:
            self.begin()
            if self.is_writing and self._tree is None:
                self._draft()
        tree, session = self._tree or (), self.session
        stop, n_logits = self._goal
        n_past = session.n_past
        if n_past > stop - n_logits:  # an interrupted pass left tokens whose logits are wanted
            n_past = session.rewind(stop - n_logits)
        end = min(stop, self._next_span(n_past)) if self._spans else stop
        if end <= n_past:
            self._part = self._rows(n_past, stop, most)
            return self._part
        n, has_states = end - n_past, self._features is not None
        wants_states = has_states and self.wants_states
        if most is not None and most < n + len(tree):
            n = min(most, n - n_logits)
        if wants_states:  # the library may then compute the logits of all tokens, and has room for few
            n = min(n, session.cache.n_features_max)
        elif has_states and not self.is_writing:
            n = min(n, self._states_from - n_past)
        tokens = array("i", self.tokens[n_past : n_past + n])
        if n_past + n < stop:
            self._part = Forward(session, tokens, 0, with_features=wants_states)
            return self._part
        tokens.extend([node.token for node in tree])
        # Asked for otherwise, states may cost a row of logits for each token of all that share the pass.
        are_left = has_states and (self._leaves_states and n == 1 if self.is_writing else not wants_states)
        self._part = Forward(
            session,
            tokens,
            n_logits + len(tree),
            [node.parent for node in tree] if tree else None,
            with_features=has_states and not are_left,
            with_last_states=are_left,
        )
        return self._part

    def _next_span(self, n_past: int) -> int:
        """Return where the span at `n_past`, or the next after it, begins; the text's end if none does."""
        ends = ((start, start + len(span.ids)) for start, span in self._spans)
        return next((start for start, end in ends if end > n_past), len(self.tokens))

    def _before_span(self, n_tokens: int) -> int:
        """Return `n_tokens`, or the start of the span that would be cut there."""
        return min(n_tokens, self._next_span(n_tokens))

    @property
    def is_waiting(self) -> bool:
        """Whether its next pass waits for rows that are being computed."""
        n_past = self.session.n_past if self._spans and not self.is_writing else 0
        spans = (span for start, span in self._spans if start <= n_past < start + len(span.ids))
        return any(not span.start().done() for span in spans)

    def _rows(self, n_past: int, stop: int, most: int | None) -> Forward:
        """Return the pass that reads the next rows of a span, if need be after they are computed."""
        start, span = next(pair for pair in self._spans if pair[0] + len(pair[1].ids) > n_past)
        if span.at_once:
            n_past, most = self.session.rewind(start), None
        part = slice(n_past - start, None if most is None else n_past - start + most)
        ids = span.ids[part]
        started = time.perf_counter()
        inputs = span.start().result()[part]
        self.tally.embed_s += time.perf_counter() - started
        rows = Forward(self.session, ids, int(n_past + len(ids) == stop), inputs=inputs)
        rows.places = None if span.places is None else span.places[:, part]
        rows.at_once = span.at_once
        return rows

    def begin_step(self) -> tuple[Sequence[int], int, Position]:
        """Begin a step that drafts; return the arguments of `Drafter.draft`.

        A driver that drafts for several texts together calls it before `ask`.
        """
        if self.drafter and not self._has_drafter_begun:
            self._begin_drafter(self.drafter)
        self.mark("rest")
        self._step_began = time.perf_counter()
        room = min(self._room, self.session.cache.most_drafted)  # to be emitted, held, and taken back
        self._drafting = self.text, room, self._position
        return self._drafting

    def _begin_drafter(self, drafter: Drafter) -> None:
        self.mark("rest")
        started = time.perf_counter()
        is_weighed = self._task.rule != "match"
        drafter.begin(self.text, sampled=is_weighed, n_predict=self._task.options.n_predict)
        self.mark("draft")
        self.tally.draft_prefill_s += time.perf_counter() - started
        self._has_drafter_begun = True

    @property
    def wants_draft(self) -> bool:
        """Whether its next step is still to be drafted."""
        return self.is_writing and self._tree is None and not self.is_complete

    def _draft(self) -> None:
        arguments = self._drafting or self.begin_step()
        tree = self.drafter.draft(*arguments) if self.drafter else ()
        self._drafted = time.perf_counter()
        # A mark costs as much as deciding against a draft; but the draft model may have worked for nothing.
        self._is_marked = bool(tree) or self._drafted - self._step_began > _WORTH_A_MARK_S
        if self._is_marked:
            self.mark("draft")
        self._tree, self._drafting = tree, None

    # ---- what the pass gave ----

    def process(self, result: ForwardResult) -> Step | None:
        """Process the result of the pass; return the tokens written, None if it only read."""
        part, self._part = self._part, None
        assert part, "ask comes first"  # noqa: S101
        with self._blamed:
            if self.is_writing:
                return self._end_step(self._tree or (), part, result) if part.n_logits else None
            n_past = self.n_prompt_read = self.session.n_past
            if result.features is not None and (part.with_features or part.n_logits):
                self._store_states(n_past - len(result.features), result.features)
            if part.n_logits and self._task.options.prompt_logprobs:
                self._score_prompt(n_past - part.n_logits, result.rows)
            return self._end_prompt(result.rows[-1:]) if n_past == self.n_prompt else None

    def _score_prompt(self, start: int, rows: Rows) -> None:
        """Record the target's logprobs of the prompt's tokens after index `start`."""
        following = self.tokens[start + 1 : start + 1 + len(rows)]
        self.prompt_logprobs += self._logprobs(rows[: len(following)], following, n=0)

    def _end_prompt(self, rows: Rows) -> Step | None:
        """Sample the first token, by verifying a tree without nodes."""
        first = None
        self._emit(())
        if not self.is_complete:  # else no token is asked for
            _, token, _ = self._verifier.verify((), rows)
            first = Step((token,), logprobs=self._logprobs(rows, [token]))
            self._emit([token])
        self.mark("prefill")
        self.tally.prefill_s += time.perf_counter() - (self._began or 0.0) - self.tally.embed_s
        return first

    def _end_step(self, tree: Tree, part: Forward, result: ForwardResult) -> Step:
        """Verify, emit, learn: docs/how-it-works.md walks through a step."""
        rows, n, n_past = result.rows, len(tree), len(self.tokens)
        self.mark("verify")
        verified = time.perf_counter()
        path, following, judged = self._verifier.verify(tree, rows)
        emitted = [*(tree[i].token for i in path), following]
        if path and self._is_eog(emitted[-2]):
            emitted.pop()  # nothing follows an end-of-generation token
        logprobs = self._logprobs([rows[i + 1] for i in (-1, *path)], emitted)
        self._emit(emitted)
        states = None if result.features is None else result.features[-len(part.tokens) :]
        self._store_step_states(states, len(part.tokens) - n, n_past, path)
        n_trunk = sum(i == depth for depth, i in enumerate(path))  # what is in the cache already
        n_pending = len(self.tokens) - self.session.rewind(min(n_past + n_trunk, len(self.tokens) - 1))
        if self._is_marked:
            self.mark("rest")
        ready = time.perf_counter()
        self._tree = None
        step = Step(
            tuple(emitted),
            n,
            path,
            drafted_depth(tree, path),
            judged,
            n_pending,
            draft_s=self._drafted - self._step_began,
            verify_s=verified - self._drafted,
            rest_s=ready - verified,
            logprobs=logprobs,
        )
        if self.drafter:
            self.drafter.accept(self.text, step, result)
            if self._is_marked:
                self.mark("draft")
            step.draft_s += time.perf_counter() - ready
        self.tally.add(step)
        return step

    def _store_states(self, at: int, states: Features) -> None:
        """Store the target's hidden states of the text's tokens from index `at` on."""
        if self._features:
            self._features.set(self.n_text(at), self.tokens[at : at + len(states)], states)

    def _store_step_states(
        self, states: Features | None, n_pending: int, n_past: int, path: Sequence[int]
    ) -> None:
        """Store the hidden states of a step's pass: of pending tokens, and of drafted ones on `path`."""
        if self._features is None:
            return
        if states is None:  # the kernels do not run all of this model: they are asked for otherwise
            self._leaves_states = False
            return
        self._store_states(n_past - n_pending, states[[*range(n_pending), *(n_pending + i for i in path)]])

    def _emit(self, tokens: Sequence[int]) -> None:
        super()._emit(tokens)
        if tokens and self._task.constraint:
            self._task.constraint.advance(tokens)

    def _logprobs(
        self, rows: Sequence[Rows] | Rows, tokens: Sequence[int], n: int | None = None
    ) -> tuple[Logprobs, ...]:
        """Return the logprobs asked for; `n`: number of likeliest tokens, if the options set none."""
        asked = self._task.options.n_logprobs
        n = n if asked is None else asked
        if n is None:
            return ()
        return tuple(logprobs_of(row, token, n) for row, token in zip(rows, tokens, strict=False))


def logprobs_of(row: Rows, token: int, n: int) -> Logprobs:
    """Return the natural logprobs of `token` and the `n` likeliest tokens, from raw logits, shape (n_vocab,).

    Ties go to the smallest ids, as in sampling.
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
