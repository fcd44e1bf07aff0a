"""Runs several generations together: each pass of a model serves all of them (continuous batching).

A step is one pass of the target, and before it what the texts draft for it: decided for all at once
(shared_decision.py), with the draft model's passes shared as well. Texts come and go between steps (Orca,
OSDI 2022). Prompts are read in pieces beside the texts that are being written (Sarathi, arXiv 2308.16369).

Nobody is starved:
- a text that is being written gets its token in every pass; if the drafts of all do not fit in one, the
  texts left out are first in the next;
- of the tokens read in a pass, a quarter belongs to the prompt that has waited longest; the rest goes to
  those with the fewest tokens left, so that a short question need not wait for a long document;
- if the cache becomes full, the text that came last pauses: its cells are freed, it is read again when there
  is room, and goes on where it was. The text that came first never pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.decoding.forward import Ask, DraftForward, Forward, TargetForward
from edgespec.decoding.generate import Generation, Made
from edgespec.decoding.options import MAX_GAMMA
from edgespec.drafting.costs import N_MAX, PassCurves
from edgespec.drafting.policy import OtherRequests
from edgespec.drafting.scheduler import Scheduler
from edgespec.drafting.shared_decision import DraftDecision, PassLoad, decide
from edgespec.errors import EdgespecError
from edgespec.llama.outputs import ForwardResult
from edgespec.llama.session import Session
from edgespec.llama.timelines import Timelines

READ_BESIDE = 64
"""Most prompt tokens read in a pass in which others are writing."""

_OLDEST_SHARE = 4  # a quarter of what is read in a pass
_LEAST_READ = 16  # tokens: one after the other costs more than together


@dataclass(eq=False, slots=True)
class Text:
    """A generation under way, and who is told of it."""

    generation: Generation
    session: Session
    scheduler: Scheduler | None
    """None for a text that is decoded plainly."""
    on_made: Callable[[Made], None]
    on_end: Callable[[BaseException | None], None]
    """Called when it ends by itself, or with what ended it."""
    work: Generator[Ask | Made, Any] = field(init=False)
    ask: Ask | None = None
    """What it waits for; None: it can go on."""
    n_held: int = 0
    """Tokens of the timeline that the target's pass it asks for follows."""
    is_paused: bool = False
    is_running: bool = True

    def __post_init__(self) -> None:
        self.work = self.generation.work()

    @property
    def n_pending(self) -> int:
        """Tokens of it that the target's next pass has in any case; of a prompt not more than a piece."""
        return min(self.generation.n_pending, READ_BESIDE)

    @property
    def n_rest(self) -> int:
        """Tokens that must be evaluated before it goes on, where it waits for the target."""
        assert isinstance(self.ask, TargetForward)  # noqa: S101 - for the type checker
        return self.n_held + len(self.ask.tokens) - self.session.n_past

    @property
    def reads(self) -> bool:
        """Whether it has more to read than what a step drafts."""
        return isinstance(self.ask, TargetForward) and self.n_rest > MAX_GAMMA + 2

    def read_again_what_lost_its_rows(self) -> None:
        """Take back what an interrupted pass left in the cache, where its logits are wanted (Cache.eval)."""
        if isinstance(self.ask, TargetForward) and self.n_rest < self.ask.n_logits:
            self.session.rewind(self.n_held)

    def part(self, n: int) -> TargetForward:
        """Return the pass over the next `n` tokens of what it waits for."""
        ask = self.ask
        assert isinstance(ask, TargetForward)  # noqa: S101 - for the type checker
        n_past = self.session.n_past
        if n_past == self.n_held and n >= len(ask.tokens):
            return ask
        n = min(n, self.n_rest)
        if ask.with_features and n_past < self.n_held:  # what was read before it paused: without
            return TargetForward(self.session, self.generation.tokens[n_past : self.n_held][:n], 0)
        tokens = [*self.generation.tokens[n_past : self.n_held], *ask.tokens[max(0, n_past - self.n_held) :]]
        if n == len(tokens):
            return TargetForward(
                self.session, tokens, ask.n_logits, ask.parents, with_features=ask.with_features
            )
        n = min(n, len(tokens) - ask.n_logits)
        return TargetForward(self.session, tokens[:n], 0, with_features=ask.with_features)


class Batcher:
    """Runs texts whose sessions are timelines of one cache."""

    def __init__(self, timelines: Timelines, clocks: PassCurves) -> None:
        """Run texts in `timelines`; `clocks` say what passes cost, and are told what they took."""
        self.timelines = timelines
        self._cache = timelines.cache
        self._clocks = clocks
        self._texts: list[Text] = []  # in the order they came
        self._late: list[Text] = []  # left out of the last pass
        self.last = Passed()

    @property
    def texts(self) -> Sequence[Text]:
        """The texts under way, paused ones among them, in the order they came."""
        return self._texts

    def add(self, text: Text) -> None:
        """Let `text` take part from the next step on."""
        self._texts.append(text)

    def close(self, text: Text) -> None:
        """End `text` here; what it wrote stays."""
        if text.is_running:
            text.is_running = False
            self._texts.remove(text)
            text.work.close()

    def step(self) -> None:
        """Make one pass of the target. Raises KeyboardInterrupt if a pass is interrupted: it can go on."""
        self.last = Passed()
        self._wake()
        self._share()
        for text in list(self._texts):
            if text.ask is None and not text.is_paused:
                self._advance(text, None)
        while self._draft():
            pass
        waiting = [text for text in self._texts if isinstance(text.ask, TargetForward) and not text.is_paused]
        if waiting:
            self._pass(waiting)

    # ---- one text ----

    def _advance(self, text: Text, answer: ForwardResult | Any) -> None:  # noqa: ANN401 - or a Choice
        """Let a text go on with the answer to what it asked, until it has tokens or asks for more."""
        text.ask = None
        try:
            made = text.work.send(answer)
            while not isinstance(made, Ask):
                text.on_made(made)
                if not text.is_running or (made.tokens and not text.generation.is_complete):
                    return
                made = text.work.send(None)
            text.ask = made
            text.n_held = text.session.n_past
        except StopIteration:
            self._end(text, None)
        except BaseException as error:
            self._end(text, error)
            if not isinstance(error, Exception):
                raise

    def _end(self, text: Text, error: BaseException | None) -> None:
        self.close(text)
        text.on_end(error)

    # ---- drafting ----

    def _share(self) -> None:
        """Tell each scheduler what the others have in the next pass."""
        n_read = READ_BESIDE if any(text.reads for text in self._texts) else 0
        n_all = sum(text.n_pending for text in self._texts if not text.reads) + n_read
        rates = {id(text): self._rate(text, n_all) for text in self._texts if not text.reads}
        rate = sum(rates.values())
        for text in self._texts:
            if text.scheduler and not text.reads:
                others = OtherRequests()
                if len(self._texts) > 1:
                    n_target = n_all - text.n_pending
                    others = OtherRequests(len(rates) - 1, n_target, rate=rate - rates[id(text)])
                text.scheduler.share(others)

    def _rate(self, text: Text, n_all: int) -> float:
        """Return the tokens a second that `text` makes in passes over `n_all` tokens."""
        plain = 1.0 / self._clocks.target.of(max(1, n_all), text.session.n_past)
        return max(plain, text.scheduler.own_rate) if text.scheduler else plain

    def _draft(self) -> bool:
        """Decide what is drafted next, or make the draft model's next pass; return False at the end."""
        bidding = [text for text in self._texts if isinstance(text.ask, DraftDecision)]
        if bidding:
            bids = [text.ask for text in bidding if isinstance(text.ask, DraftDecision)]
            choices = [bids[0].answer()] if len(self._texts) == 1 else decide(bids, self._load())
            for text, choice in zip(bidding, choices, strict=True):
                self._advance(text, choice)
            return True
        drafting = [text for text in self._texts if isinstance(text.ask, DraftForward)]
        for group in _groups(drafting, self._cache.n_batch):
            asks = [text.ask for text in group if isinstance(text.ask, DraftForward)]
            n_past = sum(ask.session.n_past for ask in asks) // len(asks)
            try:
                results = asks[0].session.cache.forward(asks)
                found = list(zip(group, results, strict=True))
            except EdgespecError as error:
                found = self._forward_each(list(zip(group, asks, strict=True)), error)
            n = found[0][1].n_tokens if len(found) > 1 and _is_one_pass(asks) else 0
            if self._clocks.draft and 0 < n <= N_MAX:
                self._clocks.draft.observe(n, n_past, found[0][1].seconds)
            for text, evaluated in found:
                self._advance(text, evaluated)
        return bool(drafting)

    def _load(self) -> PassLoad:
        """Return what is in the target's next pass so far."""
        n_tokens = 0
        for text in self._texts:
            if isinstance(text.ask, DraftDecision):
                n_tokens += text.ask.scheduler.n_pending + text.ask.depth
            elif isinstance(text.ask, TargetForward):
                n_tokens += min(text.n_rest, READ_BESIDE)
        writing = [text for text in self._texts if not text.reads and not text.is_paused]
        n_past = sum(text.session.n_past for text in writing) // max(1, len(writing))
        rate = sum(self._rate(text, n_tokens) for text in writing)
        return PassLoad(len(writing), n_tokens, n_past, rate)

    # ---- the target's pass ----

    def _pass(self, waiting: Sequence[Text]) -> None:
        """Make one pass for those who wait for the target, and let those go on whose rows it gave."""
        for text in waiting:
            text.read_again_what_lost_its_rows()
        parts = self._parts(waiting)
        n_tokens = sum(len(part.tokens) for _, part in parts)
        while not self.timelines.make_room(n_tokens) and len(self._texts) > 1:
            last = next(text for text in reversed(self._texts) if not text.is_paused)
            self._pause(last)
            parts = [(text, part) for text, part in parts if text is not last]
            n_tokens = sum(len(part.tokens) for _, part in parts)
            if not parts:
                return
        n_read = sum(len(part.tokens) for text, part in parts if text.reads)
        n_past = sum(text.session.n_past for text, _ in parts) // len(parts)
        readers = {id(text) for text, _ in parts if text.reads}
        try:
            results = self._cache.forward([part for _, part in parts])
            found = [(text, result) for (text, _), result in zip(parts, results, strict=True)]
        except EdgespecError as error:
            found = self._forward_each(parts, error)
        seconds = found[0][1].seconds if found else 0.0
        self.last = Passed(seconds, n_texts=len(parts), n_tokens=n_tokens, n_read=n_read)
        if len(parts) > 1 and n_tokens <= N_MAX and found and _is_one_pass([part for _, part in parts]):
            self._clocks.target.observe(n_tokens, n_past, seconds)
        costs = self._clocks.target
        share = costs.of(max(1, n_tokens - n_read), n_past) / costs.of(n_tokens, n_past) if n_read else 1.0
        parted = {id(text): part for text, part in parts}
        for text, evaluated in found:
            part = parted[id(text)]
            if part.n_logits or not text.n_rest:
                is_reader = id(text) in readers
                scaled = evaluated if is_reader else replace(evaluated, seconds=share * evaluated.seconds)
                self._advance(text, scaled)
            elif part.with_features and evaluated.features is not None:
                text.generation.keep_features(text.session.n_past - len(part.tokens), evaluated.features)

    def _parts(self, waiting: Sequence[Text]) -> list[tuple[Text, TargetForward]]:
        """Choose what goes into the pass."""
        writing = [text for text in waiting if not text.reads]
        writing.sort(key=lambda text: text not in self._late)
        cache = self._cache
        parts: list[tuple[Text, TargetForward]] = []
        n_left, n_rows, n_leaves = cache.n_batch, cache.n_logits_max, cache.max_leaves
        reading = [text for text in waiting if text.reads]
        n_spared = 0
        if cache.all_logits and any(
            isinstance(text.ask, TargetForward) and text.ask.with_features for text in waiting
        ):
            # Then all tokens of the pass have rows; some are spared for those who read.
            n_left = min(n_left, n_rows)
            n_spared = min(_LEAST_READ, n_left // 2) if reading else 0
            n_left -= n_spared
        self._late = []
        for text in writing:
            part = text.part(text.n_rest)
            leaves = _n_leaves(part)
            fits = len(part.tokens) <= n_left and part.n_logits <= n_rows and leaves <= n_leaves - 1
            if fits or not parts:
                parts.append((text, part))
                n_left -= len(part.tokens)
                n_rows -= part.n_logits
                n_leaves -= leaves
            else:
                self._late.append(text)
        n_left = max(0, n_left + n_spared)
        budget = min(n_left, READ_BESIDE) if writing else n_left
        for text, n in deal(budget, [(text, text.n_rest) for text in reading]):
            part = text.part(n)
            if part.n_logits <= n_rows:
                parts.append((text, part))
                n_rows -= part.n_logits
        return parts

    def _forward_each(
        self, parts: Sequence[tuple[Text, Forward]], error: EdgespecError
    ) -> list[tuple[Text, ForwardResult]]:
        """After a pass that failed make one for each text: only one whose own fails ends."""
        if len(parts) == 1:
            self._end(parts[0][0], error)
            return []
        found: list[tuple[Text, ForwardResult]] = []
        for text, part in parts:
            if found:  # its rows are the cache's own memory, which the next pass overwrites
                last, result = found[-1]
                found[-1] = last, result.copy()
            try:
                found.append((text, part.answer()))
            except EdgespecError as own:
                self._end(text, own)
        return found

    # ---- pausing ----

    def _pause(self, text: Text) -> None:
        """Free the cells of `text`, which is read again later."""
        text.is_paused = True
        text.session.clear()

    def _wake(self) -> None:
        """Let paused texts go on, as long as there is room: those that came first, first."""
        for text in self._texts:
            if not text.is_paused:
                continue
            n_needed = len(text.generation.tokens) + READ_BESIDE
            if not self.timelines.make_room(n_needed) and any(not t.is_paused for t in self._texts):
                return
            text.is_paused = False


@dataclass(frozen=True, slots=True)
class Passed:
    """The target's pass of a step."""

    seconds: float = 0.0
    n_texts: int = 0
    n_tokens: int = 0
    n_read: int = 0
    """Of prompts."""


def deal(budget: int, wanted: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Deal `budget` tokens to those who want to read, (who, tokens left), who waited longest first.

    The first gets at least a quarter; the rest goes to those with the fewest tokens left.
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
    """Say whether the library makes one pass of these: of states only for as many tokens of each text."""
    return not passes[0].session.model.keeps_state or len({len(one.tokens) for one in passes}) == 1


def _n_leaves(part: TargetForward) -> int:
    """Return how many leaves a tree has beside its trunk."""
    parents = part.parents or ()
    return sum(1 for i in range(1, len(parents)) if parents[i] != i - 1)


def _groups(texts: Sequence[Text], n_batch: int) -> list[list[Text]]:
    """Divide texts that wait for the draft model into those that fit in one pass."""
    groups: list[list[Text]] = []
    n_tokens = n_rows = 0
    for text in texts:
        ask = text.ask
        assert isinstance(ask, DraftForward)  # noqa: S101 - for the type checker
        n_tokens += len(ask.tokens)
        n_rows += ask.n_outputs
        if not groups or n_tokens > n_batch or n_rows > ask.session.n_logits_max:
            groups.append([])
            n_tokens, n_rows = len(ask.tokens), ask.n_outputs
        groups[-1].append(text)
    return groups
