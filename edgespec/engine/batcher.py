"""Runs several generations together: each pass of a model serves all of them (continuous batching).

A step is one pass of the target, and before it what the requests draft for it: decided for all at once
(shared_decision.py), with the draft model's passes shared as well. Requests come and go between steps (Yu et
al., Orca, OSDI 2022). Prompts are prefilled in chunks together with the requests that are decoding (Agrawal
et al., Sarathi, arXiv 2308.16369).

Nobody is starved:
- a decoding request gets its token in every pass; if the drafts of all do not fit in one, the requests left
  out are first in the next;
- a quarter of the tokens prefilled in a pass belongs to the prompt that has waited longest; the rest goes to
  the prompts with the fewest tokens left, so that a short question need not wait for a long document;
- if the cache becomes full, the request that came last is preempted: its slots are freed, and it is prefilled
  again and resumes when there is room. The request that came first is never preempted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

from edgespec.decoding.forward import DraftForward, Forward, TargetForward
from edgespec.decoding.generate import Generation, GenerationEvent
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.session import ForwardResult
from edgespec.decoding.token_sequence import TokenView
from edgespec.drafting.online_curve import PassCurves
from edgespec.drafting.policy import DraftAction, OtherRequests
from edgespec.drafting.profile import N_MAX
from edgespec.drafting.scheduler import Scheduler
from edgespec.drafting.shared_decision import Bid, PassLoad, SharedPace, decide, is_worth_timing
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.errors import EdgespecError
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import Session

_OLDEST_SHARE = 4  # a quarter of what is prefilled in a pass
_LEAST_READ = 16  # tokens: one after the other costs more than together
_FIRST_READ = 128  # tokens of the first pass that only reads
_READ_S = 0.5  # seconds of a pass that only reads: it can be told how far a prompt is, and others begin
_LEAST_BETWEEN = 4  # passes between two that go without drafts only to be timed


PREFILL_CHUNK = 64
"""Most prompt tokens prefilled in a pass in which others decode."""


@dataclass(eq=False, slots=True)
class BatchedRequest:
    """A generation under way, and who is told of its events."""

    generation: Generation
    session: Session
    drafter: TreeDrafter | None
    """None for a request that is decoded plainly, or whose drafter decides by itself."""
    on_made: Callable[[GenerationEvent], None]
    on_end: Callable[[BaseException | None], None]
    """Called when it ends by itself, or with what ended it."""
    scheduler: Scheduler | None = None
    """What decides how much is drafted; None for a request that is decoded plainly."""
    work: Generator[TargetForward | GenerationEvent, Any] = field(init=False)
    ask: TargetForward | None = None
    """The pass it waits for; None: it can go on, or drafts."""
    n_held: int = 0
    """Tokens of the sequence before the target's pass that it asks for."""
    is_preempted: bool = False
    is_running: bool = True

    def __post_init__(self) -> None:
        self.work = self.generation.work()

    @property
    def n_pending(self) -> int:
        """Tokens that the target's next pass always has for it; at most a chunk of a prompt."""
        return min(self.generation.n_pending, PREFILL_CHUNK)

    @property
    def n_rest(self) -> int:
        """Tokens that must be evaluated before it goes on, where it waits for the target."""
        assert self.ask  # noqa: S101 - for the type checker
        return self.n_held + len(self.ask.tokens) - self.session.n_past

    @property
    def is_prefilling(self) -> bool:
        """Whether it has more to read than a step can draft."""
        return self.ask is not None and self.n_rest > MAX_GAMMA + 2

    def rewind_lost_rows(self) -> None:
        """Take back tokens that an interrupted pass left in the cache, if their logits are wanted."""
        if self.ask and self.n_rest < self.ask.n_logits:
            self.session.rewind(self.n_held)

    def part(self, n: int) -> TargetForward:
        """Return the pass over the next `n` tokens of what it waits for."""
        ask = self.ask
        assert ask  # noqa: S101 - for the type checker
        n_past = self.session.n_past
        if n_past == self.n_held and n >= len(ask.tokens):
            return ask
        n = min(n, self.n_rest)
        if ask.with_features and n_past < self.n_held:  # read before it was preempted: without
            n = min(n, self.n_held - n_past)
            return TargetForward(self.session, self.generation.tokens[n_past : n_past + n], 0)
        tokens = TokenView(self.generation.tokens, ask.tokens, self.n_held)
        if n < self.n_rest:
            part = tokens[n_past : n_past + min(n, self.n_rest - ask.n_logits)]
            return TargetForward(self.session, part, 0, with_features=ask.with_features)
        return TargetForward(
            self.session,
            tokens[n_past:],
            ask.n_logits,
            ask.parents,
            with_features=ask.with_features,
            with_last_states=ask.with_last_states,
        )


class Batcher:
    """Runs requests whose sessions are sequences of one cache."""

    def __init__(self, sequences: SequencePool, clocks: PassCurves) -> None:
        """Run requests in `sequences`; `clocks` say what passes cost, and are told what they took."""
        self.sequences = sequences
        self._cache = sequences.cache
        self._clocks = clocks
        self._requests: list[BatchedRequest] = []  # in the order they came
        self._late: list[BatchedRequest] = []  # left out of the last pass
        self._pace = SharedPace()
        self._n_since_timed = _LEAST_BETWEEN  # passes since one went without drafts to be timed
        model = sequences.cache.model
        # Only with edgespec's kernels are the logits the same in passes of any length.
        self._times_reads = model.uses_kernels and not model.keeps_state and model.remote is None
        self._n_read = _FIRST_READ if self._times_reads else self._cache.n_batch
        self.last = StepSummary()

    @property
    def requests(self) -> Sequence[BatchedRequest]:
        """The requests under way, preempted ones among them, in the order they came."""
        return self._requests

    def add(self, request: BatchedRequest) -> None:
        """Let `request` take part from the next step on."""
        self._requests.append(request)

    def close(self, request: BatchedRequest) -> None:
        """End `request` here; what it wrote stays."""
        if request.is_running:
            request.is_running = False
            self._requests.remove(request)
            request.work.close()

    def step(self) -> None:
        """Make one pass of the target. Raises KeyboardInterrupt if a pass is interrupted: it can go on."""
        started, writing = time.perf_counter(), [(r, len(r.generation.tokens)) for r in self._requests]
        self.last = StepSummary()
        self._resume()
        self._share()
        for request in list(self._requests):
            if request.ask is None and not request.is_preempted:
                self._begin_step(request)
        while self._draft():
            pass
        waiting = [request for request in self._requests if request.ask and not request.is_preempted]
        if waiting:
            self._pass(waiting)
        if self.last.n_requests > 1 and not self.last.n_prefilled:
            n_made = sum(len(request.generation.tokens) - n for request, n in writing)
            n_past = sum(n for _, n in writing) // len(writing)
            plain = self._clocks.target.of(self.last.n_requests, n_past)
            self._pace.count(self.last.n_requests, n_made, time.perf_counter() - started, plain)

    # ---- one request ----

    def _advance(self, request: BatchedRequest, result: ForwardResult | None = None) -> None:
        self._let(request, partial(self._send, request, result))

    def _send(self, request: BatchedRequest, result: ForwardResult | None) -> None:
        request.ask = None
        made = request.work.send(result)
        while not isinstance(made, TargetForward):
            request.on_made(made)
            if not request.is_running or (made.tokens and not request.generation.is_complete):
                return
            made = request.work.send(None)
        request.ask = made
        request.n_held = request.session.n_past

    def _let(self, request: BatchedRequest, act: Callable[[], None]) -> None:
        try:
            act()
        except StopIteration:
            self._end(request, None)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and getgeneratorstate(request.work) != GEN_CLOSED:
                raise  # a draft model's pass was interrupted: the request itself can go on
            self._end(request, error)
            if not isinstance(error, Exception):
                raise

    def _end(self, request: BatchedRequest, error: BaseException | None) -> None:
        self.close(request)
        request.on_end(error)

    # ---- drafting ----

    def _begin_step(self, request: BatchedRequest) -> None:
        """Let a request draft, or go on where it does not."""
        drafter, generation = request.drafter, request.generation
        if not drafter or not generation.is_writing:
            self._advance(request)
            return

        def start() -> None:
            if not drafter.is_drafting:  # else a pass of it was interrupted
                drafter.start(*generation.begin_step())

        self._grow(request, drafter, start)

    def _grow(self, request: BatchedRequest, drafter: TreeDrafter, act: Callable[[], None]) -> None:
        self._let(request, act)
        if request.is_running and not (drafter.bid or drafter.forward):
            self._advance(request)

    def _share(self) -> None:
        """Tell each scheduler what the others have in the next pass."""
        n_prefilled = PREFILL_CHUNK if any(request.is_prefilling for request in self._requests) else 0
        n_all = (
            sum(request.n_pending for request in self._requests if not request.is_prefilling) + n_prefilled
        )
        rates = {
            id(request): self._rate(request, n_all) for request in self._requests if not request.is_prefilling
        }
        rate = sum(rates.values())
        for request in self._requests:
            scheduler = request.scheduler
            if scheduler and not request.is_prefilling:
                shares = len(rates) > 1 and scheduler.chooses_length and not scheduler.learned.in_joules
                scheduler.rests = shares and self._pace.rests
                others = OtherRequests()
                if len(self._requests) > 1:
                    n_target = n_all - request.n_pending
                    others = OtherRequests(len(rates) - 1, n_target, rate=rate - rates[id(request)])
                scheduler.share(others)

    def _rate(self, request: BatchedRequest, n_all: int) -> float:
        plain = 1.0 / self._clocks.target.of(max(1, n_all), request.session.n_past)
        return max(plain, request.scheduler.own_rate) if request.scheduler else plain

    def _draft(self) -> bool:
        """Decide what is drafted next, or make the draft model's next pass; return False at the end."""
        drafters = [(request, request.drafter) for request in self._requests if request.drafter]
        bids = [(request, drafter, drafter.bid) for request, drafter in drafters if drafter.bid]
        if bids:
            choices = self._choices([bid for _, _, bid in bids])
            for (request, drafter, _), choice in zip(bids, choices, strict=True):
                self._grow(request, drafter, partial(drafter.act, choice))
            return True
        passes = [(request, drafter.forward) for request, drafter in drafters if drafter.forward]
        for group in _groups(passes, self._cache.n_batch):
            asked = [forward for _, forward in group]
            n_past = sum(request.drafter.n_draft_held for request, _ in group if request.drafter) // len(
                group
            )
            try:
                results = asked[0].session.cache.forward(asked)
                found = [(request, result) for (request, _), result in zip(group, results, strict=True)]
            except (EdgespecError, MemoryError, OSError) as error:
                found = self._forward_each(group, error, self._lose_draft)
            n = found[0][1].n_tokens if len(found) == len(group) > 1 and _is_one_pass(asked) else 0
            if self._clocks.draft and 0 < n <= N_MAX:
                self._clocks.draft.observe(n, n_past, found[0][1].seconds)
            for request, result in found:
                if request.drafter:
                    self._grow(request, request.drafter, partial(request.drafter.read, result))
        return bool(passes)

    def _lose_draft(self, request: BatchedRequest, error: Exception) -> None:
        """Let a request go on without its draft model, whose pass failed."""
        if drafter := request.drafter:
            self._grow(request, drafter, partial(drafter.lose_model, error))

    def _choices(self, bids: Sequence[Bid]) -> Sequence[DraftAction]:
        if len(self._requests) == 1:
            return [bids[0].choice()]
        load = self._load()
        if self._n_since_timed >= _LEAST_BETWEEN and is_worth_timing(bids, load):
            self._n_since_timed = 0
            return [None] * len(bids)
        return decide(bids, load)

    def _load(self) -> PassLoad:
        """Return what is in the target's next pass so far."""
        n_tokens = 0
        for request in self._requests:
            bid = request.drafter.bid if request.drafter else None
            if bid:
                n_tokens += bid.scheduler.n_pending + bid.depth
            elif request.ask:
                n_tokens += min(request.n_rest, PREFILL_CHUNK)
        writing = [
            request for request in self._requests if not request.is_prefilling and not request.is_preempted
        ]
        n_past = sum(request.session.n_past for request in writing) // max(1, len(writing))
        rate = sum(self._rate(request, n_tokens) for request in writing)
        return PassLoad(len(writing), n_tokens, n_past, rate)

    # ---- the target's pass ----

    def _pass(self, waiting: Sequence[BatchedRequest]) -> None:
        """Make one pass for those who wait for the target, and let those go on whose rows it gave."""
        for request in waiting:
            request.rewind_lost_rows()
        parts = self._parts(waiting)
        n_tokens = sum(len(part.tokens) for _, part in parts)
        while not self.sequences.make_room(n_tokens) and len(self._requests) > 1:
            last = next(request for request in reversed(self._requests) if not request.is_preempted)
            self._preempt(last)
            parts = [(request, part) for request, part in parts if request is not last]
            n_tokens = sum(len(part.tokens) for _, part in parts)
            if not parts:
                return
        self._n_since_timed += 1
        n_prefilled = sum(len(part.tokens) for request, part in parts if request.is_prefilling)
        n_past = sum(request.session.n_past for request, _ in parts) // len(parts)
        readers = {id(request) for request, _ in parts if request.is_prefilling}
        try:
            results = self._cache.forward([part for _, part in parts])
            found = [(request, result) for (request, _), result in zip(parts, results, strict=True)]
        except EdgespecError as error:
            found = self._forward_each(parts, error, self._end)
        seconds = found[0][1].seconds if found else 0.0
        self.last = StepSummary(seconds, n_requests=len(parts), n_tokens=n_tokens, n_prefilled=n_prefilled)
        if len(parts) > 1 and n_tokens <= N_MAX and found and _is_one_pass([part for _, part in parts]):
            self._clocks.target.observe(n_tokens, n_past, seconds)
        costs = self._clocks.target
        share = (
            costs.of(max(1, n_tokens - n_prefilled), n_past) / costs.of(n_tokens, n_past)
            if n_prefilled
            else 1.0
        )
        if n_prefilled == n_tokens >= PREFILL_CHUNK:
            self._choose_n_read(n_tokens / seconds if seconds else math.inf)
        parted = {id(request): part for request, part in parts}
        for request, evaluated in found:
            part = parted[id(request)]
            is_reader = id(request) in readers
            if is_reader:
                request.generation.have_read(request.session.n_past)
            if part.n_logits or not request.n_rest:
                scaled = evaluated if is_reader else replace(evaluated, seconds=share * evaluated.seconds)
                self._advance(request, scaled)
            elif part.with_features and evaluated.features is not None:
                request.generation.keep_features(
                    request.session.n_past - len(part.tokens), evaluated.features
                )

    def _choose_n_read(self, rate: float) -> None:
        if self._times_reads:
            n_chunks = round(min(rate * _READ_S, self._cache.n_batch) / PREFILL_CHUNK)
            self._n_read = max(1, n_chunks) * PREFILL_CHUNK

    def _parts(self, waiting: Sequence[BatchedRequest]) -> list[tuple[BatchedRequest, TargetForward]]:
        """Choose what goes into the pass."""
        writing = [request for request in waiting if not request.is_prefilling]
        writing.sort(key=lambda request: request not in self._late)
        cache = self._cache
        parts: list[tuple[BatchedRequest, TargetForward]] = []
        n_left, n_rows, n_leaves = cache.n_batch, cache.n_logits_max, cache.max_leaves
        reading = [request for request in waiting if request.is_prefilling]
        n_rows -= bool(reading)  # lest drafts leave no row to a prompt that ends
        n_spared = 0
        if cache.all_logits and any(request.ask and request.ask.with_features for request in waiting):
            # Then all tokens of the pass have rows; some are spared for those who read.
            n_left = min(n_left, n_rows)
            n_spared = min(_LEAST_READ, n_left // 2) if reading else 0
            n_left -= n_spared
        self._late = []
        for request in writing:
            part = request.part(request.n_rest)
            leaves = _n_leaves(part)
            fits = len(part.tokens) <= n_left and part.n_logits <= n_rows and leaves <= n_leaves - 1
            if fits or not parts:
                parts.append((request, part))
                n_left -= len(part.tokens)
                n_rows -= part.n_logits
                n_leaves -= leaves
            else:
                self._late.append(request)
        n_left, n_rows = max(0, n_left + n_spared), n_rows + bool(reading)
        budget = min(n_left, PREFILL_CHUNK if writing else self._n_read)
        for request, n in split_prefill_budget(budget, [(request, request.n_rest) for request in reading]):
            part = request.part(n)
            if part.n_logits <= n_rows:
                parts.append((request, part))
                n_rows -= part.n_logits
        return parts

    def _forward_each(
        self,
        parts: Sequence[tuple[BatchedRequest, Forward]],
        error: Exception,
        failed: Callable[[BatchedRequest, Exception], None],
    ) -> list[tuple[BatchedRequest, ForwardResult]]:
        """After a pass that failed make one for each request; `failed` is told of those whose own fails."""
        if len(parts) == 1:
            failed(parts[0][0], error)
            return []
        found: list[tuple[BatchedRequest, ForwardResult]] = []
        for request, part in parts:
            if found:  # its rows are the cache's own memory, which the next pass overwrites
                last, result = found[-1]
                found[-1] = last, result.copy()
            try:
                found.append((request, part.run()))
            except (EdgespecError, MemoryError, OSError) as own:
                failed(request, own)
        return found

    # ---- preemption ----

    def _preempt(self, request: BatchedRequest) -> None:
        request.is_preempted = True
        request.session.clear()

    def _resume(self) -> None:
        for request in self._requests:
            if not request.is_preempted:
                continue
            n_needed = len(request.generation.tokens) + PREFILL_CHUNK
            if not self.sequences.make_room(n_needed) and any(not t.is_preempted for t in self._requests):
                return
            request.is_preempted = False


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The target's pass in a step."""

    seconds: float = 0.0
    n_requests: int = 0
    n_tokens: int = 0
    n_prefilled: int = 0
    """Tokens of prompts among them."""


def split_prefill_budget(budget: int, wanted: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Split `budget` tokens among prompts, each (who, tokens left), the one that waited longest first.

    The first gets at least a quarter; the rest goes to the prompts with the fewest tokens left.
    """
    given: dict[int, int] = {}
    if wanted:
        given[0] = min(wanted[0][1], budget, max(_LEAST_READ, budget // _OLDEST_SHARE))
        budget -= given[0]
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i][1]):
        n = min(budget, wanted[i][1] - given.get(i, 0))
        if n > 0:
            given[i] = given.get(i, 0) + n
            budget -= n
    return [(wanted[i][0], n) for i, n in sorted(given.items()) if n > 0]


def _is_one_pass(passes: Sequence[Forward]) -> bool:
    """Whether the library makes one pass of these; with states each must have as many tokens."""
    return not passes[0].session.model.keeps_state or len({len(one.tokens) for one in passes}) == 1


def _n_leaves(part: TargetForward) -> int:
    parents = part.parents or ()
    return sum(1 for i in range(1, len(parents)) if parents[i] != i - 1)


def _groups(
    passes: Sequence[tuple[BatchedRequest, DraftForward]], n_batch: int
) -> list[list[tuple[BatchedRequest, DraftForward]]]:
    """Group the draft model's passes so that each group fits in one."""
    groups: list[list[tuple[BatchedRequest, DraftForward]]] = []
    n_tokens = n_rows = 0
    for request, forward in passes:
        n_tokens += len(forward.tokens)
        n_rows += forward.n_outputs
        if not groups or n_tokens > n_batch or n_rows > forward.session.n_logits_max:
            groups.append([])
            n_tokens, n_rows = len(forward.tokens), forward.n_outputs
        groups[-1].append((request, forward))
    return groups
