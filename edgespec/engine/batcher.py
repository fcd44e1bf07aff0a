"""Runs several generations together: each pass of a model serves all of them (continuous batching).

A step is one pass of the target, preceded by the requests' drafts, which are decided for all at once
(pace.py) and share the draft model's passes as well. Requests come and go between steps (Yu et
al., Orca, OSDI 2022). Prompts are prefilled in chunks together with the requests that are decoding (Agrawal
et al., Sarathi, arXiv 2308.16369).

Nobody is starved:
- a decoding request gets its token in every pass; if the drafts of all do not fit in one, the requests left
  out are first in the next;
- a quarter of the tokens prefilled in a pass belongs to the prompt that has waited longest; the rest goes to
  the prompts with the fewest tokens left, so that a short question need not wait for a long document;
- requests with different LoRA adapters cannot share a pass: each set of adapters has its turn, for a while;
- if the cache becomes full, the request that came last is preempted: its slots are freed, and it is prefilled
  again and resumes when there is room. The request that came first is never preempted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from edgespec.decoding.generate import Generation
from edgespec.decoding.session import Forward, ForwardResult, forward_together, is_one_pass
from edgespec.drafting.pace import BatchPace, Pace, Writer
from edgespec.drafting.profile import N_MAX, Clocks
from edgespec.drafting.tree_drafter import TreeDrafter, draft_together
from edgespec.engine.stream import Stream
from edgespec.llama.choices import AdapterSet
from edgespec.llama.sequence_pool import SequencePool

Made = TypeVar("Made")

_OLDEST_SHARE = 4  # a quarter of what is prefilled in a pass
_LEAST_READ = 16  # tokens: one after the other costs more than together
_FIRST_READ = 128  # tokens of the first pass that only reads
_TURN_S = 0.25  # seconds: the library prepares anew for each change of adapters
_READ_S = 0.5  # seconds of a pass that only reads: it can be told how far a prompt is, and others begin


PREFILL_CHUNK = 64
"""Most prompt tokens prefilled in a pass in which others decode."""


class BatchedRequest(msgspec.Struct, eq=False):
    """A generation under way, and the stream that gets its tokens."""

    generation: Generation
    stream: Stream
    adapters: AdapterSet = ()
    pace: Pace | None = None
    """What decides how much is drafted; None for a request that is decoded plainly."""
    is_preempted: bool = False
    is_running: bool = True
    is_reading: bool = True
    """Whether it has more to read than a step can draft; set as each step begins."""

    @property
    def drafter(self) -> TreeDrafter | None:
        """Its drafter; None for a request that is decoded plainly, or whose drafter decides by itself."""
        drafter = self.generation.drafter
        return drafter if isinstance(drafter, TreeDrafter) else None

    def begin_step(self) -> None:
        """Note what it is about to do."""
        self.generation.begin()
        self.is_reading = self.generation.is_reading

    @property
    def n_past(self) -> int:
        """Number of its tokens in the cache."""
        return self.generation.session.n_past

    @property
    def n_pending(self) -> int:
        """Number of its tokens that the target's next pass always has; at most a chunk of a prompt."""
        return min(self.generation.n_pending, PREFILL_CHUNK)


class Batcher:
    """Runs requests whose sessions are sequences of one cache."""

    def __init__(self, sequences: SequencePool, clocks: Clocks) -> None:
        """Run requests in `sequences`; `clocks` predict the cost of passes, and record their times."""
        self.sequences = sequences
        self._cache = sequences.cache
        self._clocks = clocks
        self._requests: list[BatchedRequest] = []  # in the order they came
        self._late: list[BatchedRequest] = []  # left out of the last pass
        self._read_rows = False  # in the last pass, which others wait for
        self._turn: AdapterSet = ()  # of requests with these adapters
        self._turn_ends = 0.0
        self._pace = BatchPace(clocks)
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
        """End `request`; its text so far is kept."""
        if request.is_running:
            request.is_running = False
            self._requests.remove(request)
            request.generation.close()

    def step(self) -> None:
        """Run one pass of the target. Raises KeyboardInterrupt if interrupted; a later call resumes."""
        started = time.perf_counter()
        self.last = StepSummary()
        self._resume()
        self._choose_turn(started)
        writing = [(request, len(request.generation.tokens)) for request in self._active]
        for request in self._active:
            self._guard(request, request.begin_step)
        self._share()
        self._draft()
        running = [r for r in self._active if not r.is_preempted]
        ready = [r for r in running if not r.generation.is_waiting] or running[:1]
        if parts := self._make_room(self._in_one_pass(self._parts(ready))):
            self._end_pass(parts, forward_together([part for _, part in parts]))
        if self.last.n_requests > 1 and not self.last.n_prefilled:
            n_made = sum(len(request.generation.tokens) - n for request, n in writing)
            n_past = sum(n for _, n in writing) // len(writing)
            self._pace.learn(self.last.n_requests, n_made, time.perf_counter() - started, n_past)

    @property
    def _active(self) -> list[BatchedRequest]:
        """The requests whose turn it is, in the order they came."""
        return [request for request in self._requests if request.adapters == self._turn]

    def _choose_turn(self, now: float) -> None:
        """Go on to the next set of adapters, in the order of the oldest requests, if the turn is over."""
        running = [request for request in self._requests if not request.is_preempted]
        ready = [request for request in running if not request.generation.is_waiting] or running
        sets = [*dict.fromkeys(request.adapters for request in ready)]
        is_there = self._turn in sets
        if sets and (now >= self._turn_ends or not is_there):
            self._turn = sets[(sets.index(self._turn) + 1) % len(sets) if is_there else 0]
            self._turn_ends = now + _TURN_S

    def _resume(self) -> None:
        """Resume preempted requests while there is room, the oldest first."""
        for request in self._requests:
            if not request.is_preempted:
                continue
            n_needed = len(request.generation.tokens) + PREFILL_CHUNK
            if not self.sequences.make_room(n_needed) and any(not t.is_preempted for t in self._requests):
                return
            request.is_preempted = False

    def _guard(self, request: BatchedRequest, act: Callable[[], Made]) -> Made | None:
        """Return the result of `act`; if it fails, end only `request`."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - raised again for whoever reads the request
            self._end(request, error)
            return None

    def _end(self, request: BatchedRequest, error: BaseException | None) -> None:
        self.close(request)
        request.stream.end(error)

    # ---- drafting ----

    def _draft(self) -> None:
        """Draft for all requests whose next step begins."""
        drafters: list[TreeDrafter] = []
        for request in self._active:
            drafter, generation = request.drafter, request.generation
            if drafter and generation.wants_draft and not request.is_preempted:
                self._guard(request, partial(_start_draft, drafter, generation))
                if request.is_running:
                    drafters.append(drafter)
        draft_together(drafters, n_batch=self._cache.n_batch)

    def _share(self) -> None:
        """Give the pace of each request the others' parts of the next pass."""
        writers = [request for request in self._active if not request.is_reading]
        reading = [request.n_pending for request in self._active if request.is_reading]
        shares = [Writer(request.pace, request.n_pending, request.n_past) for request in writers]
        self._pace.share(shares, len(reading), min(PREFILL_CHUNK, sum(reading)))

    # ---- the target's pass ----

    def _make_room(
        self, parts: Sequence[tuple[BatchedRequest, Forward]]
    ) -> Sequence[tuple[BatchedRequest, Forward]]:
        """Return those of `parts` that fit in the cache; preempt the newest requests to make room."""
        while not self.sequences.make_room(_n_tokens(parts)) and len(self._requests) > 1:
            last = next(request for request in reversed(self._requests) if not request.is_preempted)
            last.is_preempted = True
            last.generation.session.rewind(0)
            parts = [(request, part) for request, part in parts if request is not last]
            if not parts:
                break
        return parts

    def _in_one_pass(
        self, parts: Sequence[tuple[BatchedRequest, Forward]]
    ) -> Sequence[tuple[BatchedRequest, Forward]]:
        """Return those of `parts` that the next pass can have: in turn the tokens of all, and rows of one."""
        rows = [one for one in parts if one[1].is_embedded]
        tokens = [one for one in parts if not one[1].is_embedded]
        self._read_rows = bool(rows) and not (tokens and self._read_rows)
        return rows[:1] if self._read_rows else tokens

    def _end_pass(
        self,
        parts: Sequence[tuple[BatchedRequest, Forward]],
        results: Sequence[ForwardResult | Exception],
    ) -> None:
        """Continue the requests that had a part in the pass, and learn its time."""
        n_tokens = _n_tokens(parts)
        n_prefilled = _n_tokens([(request, part) for request, part in parts if request.is_reading])
        n_past = sum(part.n_past for _, part in parts) // len(parts)
        seconds = next((result.seconds for result in results if isinstance(result, ForwardResult)), 0.0)
        self.last = StepSummary(seconds, n_requests=len(parts), n_tokens=n_tokens, n_prefilled=n_prefilled)
        costs = self._clocks.target
        if len(parts) > 1 and n_tokens <= N_MAX and seconds and is_one_pass([part for _, part in parts]):
            costs.observe(n_tokens, n_past, seconds)
        share = 1.0  # of the pass's time that is not the prompts'
        if n_prefilled:
            share = costs.seconds(max(1, n_tokens - n_prefilled), n_past) / costs.seconds(n_tokens, n_past)
        if n_prefilled == n_tokens >= PREFILL_CHUNK:
            self._choose_n_read(n_tokens / seconds if seconds else math.inf)
        for (request, _), result in zip(parts, results, strict=True):
            if isinstance(result, Exception):
                self._end(request, result)
            elif request.is_reading or share == 1.0:
                self._process(request, result)
            else:
                self._process(request, replace(result, seconds=share * result.seconds))

    def _process(self, request: BatchedRequest, result: ForwardResult) -> None:
        """Process the result of the pass for a request."""
        try:
            if made := request.generation.process(result):
                request.stream.append(made)
        except BaseException as error:
            self._end(request, error)
            if not isinstance(error, Exception):
                raise  # it was interrupted in the middle of a step
        else:
            if request.is_running and request.generation.is_complete:
                self._end(request, None)

    def _choose_n_read(self, rate: float) -> None:
        if self._times_reads:
            n_chunks = round(min(rate * _READ_S, self._cache.n_batch) / PREFILL_CHUNK)
            self._n_read = max(1, n_chunks) * PREFILL_CHUNK

    def _parts(self, requests: Sequence[BatchedRequest]) -> list[tuple[BatchedRequest, Forward]]:
        """Choose the parts of the pass."""
        reading = [request for request in requests if request.is_reading]
        writing = [request for request in requests if not request.is_reading]
        writing.sort(key=lambda request: request not in self._late)
        asked = [
            (request, part) for request in writing if (part := self._guard(request, request.generation.ask))
        ]
        cache = self._cache
        parts: list[tuple[BatchedRequest, Forward]] = []
        n_tokens_left, n_rows, n_leaves = cache.n_batch, cache.n_logits_max, cache.max_leaves
        n_rows -= bool(reading)  # lest drafts leave no row to a prompt that ends
        n_spared = 0
        wants_states = any(part.with_features for _, part in asked)
        if cache.all_logits and (wants_states or any(r.generation.wants_states for r in reading)):
            # Then all tokens of the pass have rows; some are spared for those who read.
            n_tokens_left = min(n_tokens_left, n_rows)
            n_spared = min(_LEAST_READ, n_tokens_left // 2) if reading else 0
            n_tokens_left -= n_spared
        self._late = []
        for request, part in asked:
            leaves = _n_leaves(part)
            fits = len(part.tokens) <= n_tokens_left and part.n_logits <= n_rows and leaves <= n_leaves - 1
            if fits or not parts:
                parts.append((request, part))
                n_tokens_left -= len(part.tokens)
                n_rows -= part.n_logits
                n_leaves -= leaves
            else:
                self._late.append(request)
        n_tokens_left, n_rows = max(0, n_tokens_left + n_spared), n_rows + bool(reading)
        budget = min(n_tokens_left, PREFILL_CHUNK if asked else self._n_read)
        wanted = [(request, request.generation.n_rest) for request in reading]
        for request, n in split_prefill_budget(budget, wanted):
            part = self._guard(request, partial(request.generation.ask, n))
            if part and part.n_logits <= n_rows:
                parts.append((request, part))
                n_rows -= part.n_logits
        return parts


class StepSummary(msgspec.Struct, frozen=True):
    """The target's pass in a step."""

    seconds: float = 0.0
    n_requests: int = 0
    n_tokens: int = 0
    n_prefilled: int = 0
    """Tokens of prompts among them."""


def split_prefill_budget(budget: int, wanted: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Split `budget` tokens among prompts, each (request, tokens left), the one that waited longest first.

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


def _n_tokens(parts: Sequence[tuple[BatchedRequest, Forward]]) -> int:
    return sum(len(part.tokens) for _, part in parts)


def _start_draft(drafter: TreeDrafter, generation: Generation) -> None:
    if not drafter.is_drafting:  # else a pass of it was interrupted
        drafter.start(*generation.begin_step())


def _n_leaves(part: Forward) -> int:
    parents = part.parents or ()
    return sum(1 for i in range(1, len(parents)) if parents[i] != i - 1)
