"""The drafter: each step a tree of tokens, from the suffix store, the draft model, or both in turn.

    suffix   the store's tokens go to the target unchanged: point masses, for free
    model    the draft model's own tokens, a pass each
    staged   the draft model checks the store's tokens in one pass and adds one of its own: its tokens at a
             fraction of the passes (staged speculative decoding, arXiv 2308.04623)

First the trunk: at its end the pace decides what comes next. A guess that the draft model checks does not
change what it proposes. Each of its tokens is drawn from its own distribution; a guess only decides whether
the distribution after it is already there.

Then the branches, which cost no pass of the draft model: its likeliest other tokens where it hesitated (and
more, each sampled without those before it, where the policy has siblings), and other continuations of the
suffix store. The passes of decoding/passes.py make one tree of trunk and branches, as large as pays. A step
without branches is a chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial

import msgspec
import numpy as np

from edgespec._core import SuffixStore
from edgespec.decoding.constraint import Constraint
from edgespec.decoding.passes import balance, cut, fold, merge, order
from edgespec.decoding.records import Step
from edgespec.decoding.session import (
    Forward,
    ForwardResult,
    Rows,
    TokenView,
    forward_together,
    is_one_pass,
)
from edgespec.decoding.tree import Position, Source, Tree, TreeNode
from edgespec.drafting.acceptance import AcceptanceTables, bucket_of
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import MAX_UNREAD, ModelAction, Pace, SuffixAction
from edgespec.drafting.profile import N_MAX, Clocks, PassCosts
from edgespec.drafting.rejections import PlacesOfText
from edgespec.drafting.step import DraftStep, learn_step
from edgespec.drafting.suffix import Document, n_before_answer
from edgespec.errors import EdgespecError, MessageFn, silent

# ---- the draft model as a source ----


_LIKELIEST = 4  # tokens looked at in each of the draft model's distributions
_MOST_SIBLINGS = 3  # tokens sampled at one position
_FEWER = 0.4  # chance of a sampled token over that of the one sampled before it


class _Place(msgspec.Struct, frozen=True):
    """A position that a token is drafted for."""

    depth: int
    """Tokens of the trunk before it."""
    path: float
    """Probability that these are accepted."""
    bucket: int
    """Bucket of the draft model's confidence here."""


class ModelSource:
    """Runs the draft model and decides which of its tokens to propose."""

    def __init__(
        self,
        model: DraftModel,
        pace: Pace,
        *,
        clock: PassCosts | None,
        is_eog: Callable[[int], bool],
        constraint: Constraint | None,
    ) -> None:
        """Propose tokens of `model` that `pace` and `constraint` allow; `clock` times its passes."""
        self._model = model
        self._pace = pace
        self._acceptance = pace.acceptance
        self._clock = clock
        self._is_eog = is_eog
        self._constraint = constraint
        self._guesses: Sequence[int] = ()  # of the pass under way, as what follows
        self._n_sequence = self._n_read = self._n_past = 0

    def ask(self, tokens: Sequence[int], guesses: Sequence[int], step: DraftStep) -> Forward | ForwardResult:
        """Return the model's pass after `tokens` and the trunk, `guesses` included, or its result."""
        model = self._model
        sequence = TokenView(tokens, step.drafted) if step.drafted else tokens
        self._n_sequence, self._guesses = len(sequence), guesses
        self._n_read = model.n_unread(len(sequence)) + len(guesses)
        self._n_past = model.n_held
        return model.ask(sequence, guesses)

    def propose(
        self, evaluated: ForwardResult, step: DraftStep, position: Position, *, may_sample: bool
    ) -> None:
        """Propose the model's tokens, from the result of the pass of `ask`.

        Each token is drawn from the model's own distribution at its position. As long as it is the one
        that was guessed there, the distribution at the next position is known too. `may_sample`: else
        only point masses make sense.
        """
        guesses, n_read = self._guesses, self._n_read
        if self._clock and evaluated.n_tokens <= n_read:  # else the batcher, which knows what was in it, does
            self._clock.observe(n_read, self._n_past, evaluated.seconds)
        n_right = 0
        for i, row in enumerate(evaluated.rows):
            confidence = None if i else evaluated.confidence
            drafts = self._draft_token(row, step, position, confidence, may_sample=may_sample)
            if not drafts or i == len(guesses):
                break
            if step.drafted[-1] != guesses[i] or self._is_eog(guesses[i]):
                break
            n_right += 1
        self._model.trim(self._n_sequence + n_right)
        step.passes.append((n_read, len(guesses)))

    def _draft_token(
        self,
        unmasked: Rows,
        step: DraftStep,
        position: Position,
        confidence: float | None,
        *,
        may_sample: bool,
    ) -> bool:
        """Extend the trunk by a token of this row of logits; return False if none is proposed.

        `confidence`: the head's estimate for the row, if it makes one; else its highest probability is used.
        """
        sampler, drafted = position.sampler, step.drafted
        row: Rows | None = unmasked
        ids = self._model.ids
        if self._constraint:
            ids = None
            row = self._constraint.mask(self._model.whole(unmasked), drafted)
        if row is None or (self._constraint and row.max() == -np.inf):
            return False  # nothing may follow, or nothing that the draft model knows
        likeliest = sampler.likeliest(row, _LIKELIEST, ids)
        bucket = bucket_of(likeliest[0][1] if confidence is None else confidence)
        place = _Place(step.depth, step.path, bucket)
        table = self._acceptance.sampled if may_sample else self._acceptance.argmax
        chance = table.chance(place.depth, place.bucket)
        if step.n_nodes_left <= 0 or not self._pace.verifies(
            place.path * chance, place.depth, place.bucket, chance=chance
        ):
            return False
        n_siblings = self._n_siblings(place, step) if may_sample else 0
        next_bucket, slot = step.bucket, step.n_slots
        coin = position.coins(1)[0] if may_sample else 0.0
        ratio = self._model.temperature_ratio
        try:
            token = sampler.sample(row, position.recent(drafted), coin, slot, ids, ratio)
        except ArithmeticError:
            if np.isnan(row).any() or row.max() == np.inf:
                raise
            return False  # the bias forbids all that the draft model's row has
        top = sampler.top(slot)
        if may_sample:
            step.n_slots += 1
            step.grow(
                token,
                "sampled",
                chance,
                place.bucket,
                next_bucket=next_bucket,
                slot=slot,
                is_top=token == top,
            )
            self._draw_siblings(n_siblings, place, step, position)
        else:
            step.grow(top, "argmax", chance, place.bucket, next_bucket=next_bucket)
        self._add_likeliest(likeliest, place, step)
        return True

    def _n_siblings(self, place: _Place, step: DraftStep) -> int:
        """Return how many more tokens to sample at the position of the trunk's next one."""
        if not self._pace.policy.siblings:
            return 0
        chance = self._acceptance.second.chance(place.depth, place.bucket)
        n = 0
        while (
            n + 1 < _MOST_SIBLINGS
            and n + 1 < step.n_nodes_left
            and self._pace.branches(place.path * chance, place.depth + 1 + n)
        ):
            n += 1
            chance *= _FEWER
        return n

    def _draw_siblings(self, n: int, place: _Place, step: DraftStep, position: Position) -> None:
        """Sample `n` alternatives to the trunk's last token, each without those before it."""
        last = step.trunk[-1]
        chance = self._acceptance.second.chance(place.depth, place.bucket)
        for _ in range(n):
            slot = step.n_slots
            try:
                position.sampler.without(last.slot, last.token, slot)
            except ArithmeticError:  # nothing else can be sampled
                return
            token = position.sampler.draw(slot, position.coins(1)[0])
            path = place.path * chance
            last = TreeNode(place.depth - 1, token, "sampled", path, slot, chance, place.bucket, is_top=False)
            step.n_slots += 1
            step.branches.append(last)
            chance *= _FEWER

    def _add_likeliest(self, likeliest: Sequence[tuple[int, float]], place: _Place, step: DraftStep) -> None:
        """Propose the likeliest tokens of a position that may pay, and store them for learning."""
        taken, depth = step.drafted[-1], place.depth
        others = [(token, bucket_of(chance)) for token, chance in likeliest if token != taken]
        while len(step.others) < depth:
            step.others.append([])  # of positions that the suffix store filled
        step.others.append(others)
        for token, bucket in others:
            chance = self._acceptance.other.chance(depth, bucket)
            path = place.path * chance
            if self._pace.branches(path, depth + 1):
                step.branches.append(
                    TreeNode(depth - 1, token, "argmax", path, -1, chance, bucket, is_top=False)
                )


# ---- tree_drafter ----


_NAMES: dict[Source, str] = {"suffix": "suffix", "sampled": "model", "argmax": "model", "forced": "forced"}
"""The names of sources, as a user reads them."""

_OFFERED = 16  # tokens asked of the suffix store at once
_NODES = 8  # of the suffix store's tree


class SuffixSource:
    """Asks the suffix store for continuations of a sequence, and estimates their acceptance."""

    def __init__(
        self,
        document: Document,
        acceptance: AcceptanceTables,
        *,
        is_eog: Callable[[int], bool],
        constraint: Constraint | None,
    ) -> None:
        """Offer continuations of `document` that `constraint` allows, rated by the tables `acceptance`."""
        self._document = document
        self._acceptance = acceptance
        self._is_eog = is_eog
        self._constraint = constraint

    def extend(self, emitted: Sequence[int]) -> None:
        """Append the tokens that followed the sequence."""
        self._document.extend(emitted)

    def offer(self, step: DraftStep) -> Tree:
        """Return a continuation of the trunk, a chain, and store it for learning."""
        drafted = step.drafted
        n = min(step.n_nodes_left, _OFFERED)
        if n < 1:
            return ()
        tokens, probabilities = self._document.offer(drafted, n)
        if self._constraint:
            tokens = tokens[: self._constraint.fitting(drafted, tokens)]
        nodes: list[TreeNode] = []
        path = step.path
        for depth, (token, p) in enumerate(zip(tokens, probabilities, strict=False), len(drafted)):
            bucket = bucket_of(p)
            chance = self._acceptance.offered(depth, bucket)
            path *= chance
            nodes.append(TreeNode(depth - 1, token, "suffix", path, chance=chance, bucket=bucket))
        step.offers.append(tuple(nodes))
        return step.offers[-1]

    def propose(self, offer: Tree, step: DraftStep) -> None:
        """Propose the offered tokens to the target."""
        for node in offer:
            step.add(node)
            if self._is_eog(node.token):
                break

    def tree(self) -> Tree:
        """Return a tree of the likeliest continuations of the sequence, if several were seen."""
        nodes: list[TreeNode] = []
        depths: list[int] = []
        place: list[int | None] = []  # in `nodes`, of what was offered; None: what cannot be
        texts: list[tuple[int, ...]] = [()]  # that end with each node, and last at the root
        left = [1.0]  # chance that siblings before leave, of each node and last of the root
        for token, above, probability in zip(*self._document.offer_tree((), _NODES), strict=True):
            parent = place[above] if above >= 0 else -1
            if parent is None or not self._may_follow(nodes, parent, texts[parent], token):
                place.append(None)
                continue
            texts.insert(-1, (*texts[parent], token))
            place.append(len(nodes))
            depth = depths[parent] + 1 if parent >= 0 else 0
            bucket = bucket_of(probability)
            chance = min(self._acceptance.offered(depth, bucket), left[parent])
            left[parent] -= chance
            left.insert(-1, 1.0)
            path = chance * (nodes[parent].path if parent >= 0 else 1.0)
            nodes.append(TreeNode(parent, token, "suffix", path, chance=chance, bucket=bucket))
            depths.append(depth)
        return tuple(nodes)

    def _may_follow(self, nodes: list[TreeNode], parent: int, text: tuple[int, ...], token: int) -> bool:
        if parent >= 0 and self._is_eog(nodes[parent].token):
            return False
        return not self._constraint or self._constraint.allows(text, token)


class TreeDrafter:
    """A Drafter that proposes a tree of tokens each step. One per generation.

    `draft` alone is enough for one request. To draft for several together, call `start` of each, and then
    `draft_together`; `draft` returns the result.
    """

    forward: Forward | None = None
    """The draft model's pass that it waits for."""
    error: Exception | None = None
    """What its own code failed with, raised by `draft`."""
    rejected: PlacesOfText | None = None
    """Told of each draft of the model's that was rejected."""
    on_message: MessageFn = staticmethod(silent)
    """Takes a line where the draft model fails."""
    _failed = ""

    def __init__(
        self,
        pace: Pace,
        *,
        suffix: SuffixStore | None,
        model: DraftModel | None,
        is_eog: Callable[[int], bool],
        clocks: Clocks,
        on_step: Callable[[DraftStep], None] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """Propose from `suffix` and `model` what `pace` chooses.

        `clocks` get the time of every pass, `on_step` every step. Only tokens that `constraint` allows are
        proposed; it follows the sequence.
        """
        self.pace = pace
        policy = pace.policy
        is_eog = lru_cache(maxsize=4096)(is_eog)
        self._is_eog = is_eog
        self._suffix = suffix if policy.suffix or policy.staged else None
        self._model = model if policy.model else None
        self._target_clock, self.draft_clock = clocks
        self._suffix_source: SuffixSource | None = None  # once a sequence has begun
        self._model_source = (
            ModelSource(self._model, pace, clock=self.draft_clock, is_eog=is_eog, constraint=constraint)
            if self._model
            else None
        )
        self._on_step = on_step
        self._constraint = constraint
        self.n_max = pace.n_max
        self._sampled = False
        self._n_pending = 1  # tokens that are always in the target's next pass
        self._step = DraftStep(0, 0, pace.unit)
        self._started = 0.0  # when the draft under way began; 0: there is none
        self._tokens: Sequence[int] = ()  # it follows these
        self._position: Position
        self._offer: Tree = ()  # of the suffix store at the trunk's end
        self._totals: dict[Source, tuple[int, int]] = {}
        self._n_passes = 0

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Start on a new sequence, the prompt `tokens`; learned costs are kept."""
        self._sampled = sampled
        self._n_pending = 1
        self._started = 0.0
        self.pace.begin(len(tokens), n_predict)
        with self._guarded():  # first: where it is interrupted, all of this comes again
            if self._model:
                self._model.begin(tokens)
                if self.pace.needs_model and self._model.follows(len(tokens)):
                    self._read(self._model, tokens)
        if self._suffix is not None:
            self._suffix_source = SuffixSource(
                Document(self._suffix, tokens, n_silent=n_before_answer(tokens, self._is_eog)),
                self.pace.acceptance,
                is_eog=self._is_eog,
                constraint=self._constraint,
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Drop the draft model if it fails in the block, with a message that names it."""
        try:
            with self._model.blamed if self._model else nullcontext():
                yield
        except (EdgespecError, MemoryError, OSError) as error:
            self.lose_model(error)

    def lose_model(self, error: Exception) -> None:
        """Continue without the draft model, which failed; its tokens so far are kept."""
        self._model = self._model_source = None
        self.forward = None
        what = " ".join(f"{error}".split()) or type(error).__name__
        self._failed = f"the draft failed: {what}; the text went on without it"
        self.on_message(self._failed)
        drafted = self._step.drafted
        if self.is_drafting and not (drafted and self._is_eog(drafted[-1])):
            self._offer = self._ask_store(self._step)
            self._decide()

    @property
    def n_draft_held(self) -> int:
        """Tokens to which the draft model's next pass attends."""
        return self._model.n_held if self._model else 0

    @property
    def n_drafted(self) -> int:
        """Tokens of the trunk so far."""
        return self._step.depth

    @property
    def is_drafting(self) -> bool:
        """Whether a draft was started that `draft` has not returned yet."""
        return self._started > 0.0

    def draft(self, tokens: Sequence[int], room: int, position: Position) -> Tree:
        """Propose up to `room` tokens, none after an end-of-generation token."""
        if not self.is_drafting:
            self.start(tokens, room, position)
        draft_together([self])
        if self.error:
            raise self.error
        step = self._step
        if not self._is_paused:
            step.rate = self.pace.rate
            self._compile(step)
        step.draft_s = time.perf_counter() - self._started
        self._started = 0.0
        return step.proposed

    @property
    def _is_paused(self) -> bool:
        if not self.pace.is_paused:
            return False
        return not (self._constraint and self._constraint.may_force)  # what is forced costs nothing to guess

    def start(self, tokens: Sequence[int], room: int, position: Position) -> None:
        """Start the draft that `draft` returns for these arguments, up to its first decision."""
        self._started = time.perf_counter()
        self._tokens, self._position = tokens, position
        self.forward = None
        pace, model = self.pace, self._model
        if self._is_paused:
            pace.start_step(len(tokens), n_pending=self._n_pending)
            self._step = DraftStep(len(tokens), 0, pace.unit)
            return
        room = min(room, self.n_max - self._n_pending + 1)
        if model:
            room = min(room, model.n_ctx // 2 - 1)
        step = self._step = DraftStep(len(tokens), room, pace.unit)
        offer = self._ask_store(step)
        if model:
            with self._guarded():
                model.make_room(len(tokens) + max(room, 0))
                step.n_unread = model.n_unread(len(tokens))
        pace.start_step(
            len(tokens), step.offered, n_draft=model.n_held if model else 0, n_pending=self._n_pending
        )
        if self._model is model:  # else it was lost, and the draft has been advanced
            self._offer = offer
            self._decide()

    def _ask_store(self, step: DraftStep) -> Tree:
        return self._suffix_source.offer(step) if self._suffix_source else ()

    def _decide(self) -> None:
        """Extend the trunk as long as it pays, up to a pass of the draft model or the draft's end."""
        model, step = self._model, self._step
        while step.n_nodes_left > 0:
            depth = step.depth
            if self._propose_forced(step):
                if self._is_eog(step.drafted[-1]):
                    return
                self._offer = self._ask_store(step)
                continue
            n_all = len(self._tokens) + depth
            n_unread = model.n_unread(n_all) if model and model.follows(n_all) else 0
            chances = [node.chance for node in self._offer]
            action = self.pace.next(step.path, depth, n_unread, chances, step.bucket)
            if isinstance(action, SuffixAction) and self._suffix_source:
                self._suffix_source.propose(self._offer[: action.n], step)
                self._offer = ()  # what more there is was offered and not taken
                if step.depth == depth or self._is_eog(step.drafted[-1]):
                    return
                continue
            if isinstance(action, ModelAction) and model and n_unread:
                self._ask_model(model, action)
            return

    def _ask_model(self, model: DraftModel, action: ModelAction) -> None:
        step, asked = self._step, None
        guesses = [node.token for node in self._offer[: min(action.n_guesses, step.n_nodes_left - 1)]]
        tokens = TokenView(self._tokens, step.drafted) if step.drafted else self._tokens
        with self._guarded():
            if action.n_recent:
                model.skip(len(tokens), action.n_recent)
            if (n_unread := model.n_unread(len(tokens))) > MAX_UNREAD:
                self._read(model, tokens)
                step.n_prefilled += n_unread - 1
            if self._model_source:
                asked = self._model_source.ask(self._tokens, guesses, step)
        if isinstance(asked, Forward):
            self.forward = asked
        elif asked:
            result = asked
            self._propose(lambda: result)

    def _read(self, model: DraftModel, tokens: Sequence[int]) -> None:
        """Let the draft model read all unread tokens except the last, which its next pass reads."""
        model.skip(len(tokens), model.n_ctx // 2)
        n_unread, started = model.n_unread(len(tokens)) - 1, time.perf_counter()
        model.read(tokens)
        if self.draft_clock:
            n_before = max(0, model.n_held - n_unread)
            self.draft_clock.observe_read(n_unread, n_before, time.perf_counter() - started)

    def read(self, result: ForwardResult | Exception) -> None:
        """Continue with the result of `forward`, or without the model if it failed, to the next decision."""
        forward, self.forward = self.forward, None
        if isinstance(result, Exception):
            self.lose_model(result)
        elif forward:
            self._propose(partial(forward.finish, result))

    def _propose(self, evaluate: Callable[[], ForwardResult]) -> None:
        step, source = self._step, self._model_source
        depth = step.depth
        with self._guarded():
            if source:
                source.propose(evaluate(), step, self._position, may_sample=self._sampled)
        if self._model_source:  # else it was lost, and the draft has been advanced
            self._offer = self._ask_store(step)
            if step.depth > depth and not self._is_eog(step.drafted[-1]):
                self._decide()

    def _propose_forced(self, step: DraftStep) -> bool:
        """Propose the tokens that the grammar forces, if there are any and they pay."""
        if not self._constraint:
            return False
        tokens = self._constraint.forced_run(step.drafted)[: step.n_nodes_left]
        if not tokens:
            return False
        n = self.pace.n_worthwhile(step.path, step.depth, [1.0] * len(tokens))
        for token in tokens[:n]:
            step.grow(token, "forced", 1.0, step.bucket)
        return n > 0

    def _compile(self, step: DraftStep) -> None:
        """Build one tree from the trunk and the branches, as large as pays."""
        trunk = step.proposed = tuple(step.trunk)
        store = self._store_tree(step)
        if not trunk or not (store or step.branches):
            return
        pace = self.pace
        drafted = (*trunk, *step.branches)
        stages = [(name, tree) for name, tree in (("drafted", drafted), ("store", store)) if tree]
        tree = merge([drafted, store])
        stages.append(("merge", tree))
        tree = balance(tree)
        stages.append(("balance", tree))
        if self._constraint:
            tree = fold(tree, self._constraint.forced, step.room)
            stages.append(("fold", tree))
        tree = order(tree)
        stages.append(("order", tree))
        tree = cut(tree, pace.verify_costs, pace.rate, step.room, pace.least_price)
        stages.append(("cut", tree))
        step.passes_of_tree, step.proposed = stages, tree

    def _store_tree(self, step: DraftStep) -> Tree:
        policy = self.pace.policy
        if not (self._suffix_source and step.trunk and policy.suffix and policy.branches):
            return ()
        return self._suffix_source.tree() if step.offers[0] else ()

    def accept(self, tokens: Sequence[int], made: Step, result: ForwardResult) -> None:
        """Learn the outcome of the draft, and follow the sequence."""
        started = time.perf_counter()
        step = self._step
        with self._guarded():
            if self._model:
                n_read = step.n_sequence + step.n_right(made.tokens)
                self._model.trim(min(len(tokens) - 1, n_read))
        if self._suffix_source:
            self._suffix_source.extend(made.tokens)
        learn_step(self.pace.acceptance, step, made)
        if self.rejected is not None and step.trunk:
            self.rejected.note(step, made, result.rows, self._position.sampler)
        n_own = self._n_pending + len(step.proposed)
        if result.n_tokens <= n_own <= N_MAX:  # else the batcher, which knows what was in it, does
            self._target_clock.observe(n_own, step.n_sequence, result.seconds)
        self._n_pending = made.n_pending
        for i, node in enumerate(step.proposed):
            n, n_accepted = self._totals.get(node.source, (0, 0))
            self._totals[node.source] = (n + 1, n_accepted + (i in made.path))
        self._n_passes += len(step.passes)
        step.draft_s += time.perf_counter() - started
        step.n_accepted, step.n_emitted, step.verify_s = made.n_accepted, len(made.tokens), result.seconds
        self.pace.learn(step.n_emitted, step.draft_s + step.verify_s, made.n_drafted, step.passes)
        if self._on_step:
            self._on_step(step)

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted of each source, over the generation."""
        found = dict.fromkeys(_NAMES.values(), (0, 0))
        for source, (drafted, accepted) in self._totals.items():
            so_far = found[_NAMES[source]]
            found[_NAMES[source]] = (so_far[0] + drafted, so_far[1] + accepted)
        return {name: counts for name, counts in found.items() if counts[0]}

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now; None: not known."""
        return self.pace.plain_rate()

    def note(self) -> str:
        """Return a sentence about what was drafted, or why nothing was."""
        said = self.pace.explain(self.sources(), has_run=self._n_passes > 0)
        return f"{said}; {self._failed}" if self._failed else said


def draft_together(
    drafters: Sequence[TreeDrafter],
    *,
    n_batch: int = 0,
) -> None:
    """Complete the drafts of all started `drafters`; they share passes of their draft model.

    `n_batch`: most tokens of a shared pass. All rows of a pass are read before the next one. An interrupted
    pass changes nothing: a second call resumes.
    """
    while passes := [(drafter, drafter.forward) for drafter in drafters if drafter.forward]:
        for group in _groups(passes, n_batch):
            _pass_together(group)


def _go_on(drafter: TreeDrafter, act: Callable[[], None]) -> None:
    """Advance one drafter; the others continue if it fails."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised again by `draft`
        drafter.forward = None
        drafter.error = error


def _pass_together(group: Sequence[tuple[TreeDrafter, Forward]]) -> None:
    """Run one pass of the draft model for a group of drafters."""
    parts = [forward for _, forward in group]
    n_past = sum(drafter.n_draft_held for drafter, _ in group) // len(group)
    results = forward_together(parts)
    first, n_tokens = results[0], sum(len(part.tokens) for part in parts)
    clock = group[0][0].draft_clock
    shared = first if isinstance(first, ForwardResult) and len(parts) > 1 and is_one_pass(parts) else None
    if clock and shared and shared.n_tokens == n_tokens <= N_MAX:  # else one was made for each
        clock.observe(n_tokens, n_past, shared.seconds)
    for (drafter, _), result in zip(group, results, strict=True):
        _go_on(drafter, partial(drafter.read, result))


def _groups(
    passes: Sequence[tuple[TreeDrafter, Forward]], n_batch: int
) -> list[list[tuple[TreeDrafter, Forward]]]:
    """Group the draft model's passes so that each group fits in one."""
    groups: list[list[tuple[TreeDrafter, Forward]]] = []
    n_tokens = n_rows = 0
    for drafter, forward in passes:
        n_tokens += len(forward.tokens)
        n_rows += forward.n_outputs
        if not groups or n_tokens > n_batch or n_rows > forward.session.cache.n_logits_max:
            groups.append([])
            n_tokens, n_rows = len(forward.tokens), forward.n_outputs
        groups[-1].append((drafter, forward))
    return groups
