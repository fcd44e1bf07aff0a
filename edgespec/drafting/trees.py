"""The drafter: a tree of tokens a step, from the suffix store, the draft model, or one after the other.

    suffix   what the store offers goes to the target as it is: point masses, for free
    model    the draft model's own tokens, a pass each
    staged   the draft model checks what the store offers in one pass and adds a token of its own: its
             tokens at a fraction of the passes (staged speculative decoding, arXiv 2308.04623)

First the trunk: the scheduler says at each of its ends what comes next. A guess that the draft model checks
changes nothing in what it proposes: each of its tokens is drawn from its own distribution, and a guess only
decides whether the distribution after it is already there.

Then the branches, which cost no pass of the draft model: where it hesitated, its next likeliest tokens, or,
where tokens are sampled, another one sampled without the first; and what else the suffix store has seen. The
passes of tree.py make one tree of trunk and branches, as large as pays. A step without branches is a chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from edgespec.decoding.drafter import Outcome, Position
from edgespec.decoding.tree import Node, Source, Tree, balance, cut, fold, merge, order, prune
from edgespec.drafting.costs import N_MAX, OnlineCurve
from edgespec.drafting.learning import (
    ForcedChance,
    Offer,
    learn_offers,
    learn_others,
    learn_tree,
    n_emitted_of,
)
from edgespec.drafting.model import DraftModel
from edgespec.drafting.predictor import bucket_of
from edgespec.drafting.scheduler import RunModel, Scheduler, TakeSuffix
from edgespec.drafting.sleep import Sleep
from edgespec.drafting.suffix import SuffixDrafts, n_before_answer
from edgespec.grammar.grammar import Constraint
from edgespec.llama.session import Rows
from edgespec.options import MAX_GAMMA

_OFFERED = 16  # tokens asked of the suffix store at once
_LIKELIEST = 4  # tokens looked at in each of the draft model's distributions
_MOST_SIBLINGS = 3  # tokens sampled at one position
_STORE_NODES = 8  # of the suffix store's tree
_FEWER = 0.4  # chance of a sampled token over that of the one sampled before it


@dataclass(slots=True)
class DraftStep:
    """What a step knew, chose and got; `--explain` prints it."""

    rate: float = 0.0
    """Tokens a second (or a joule) that the decision was made with."""
    unit: str = "tokens/s"
    offered: list[float] = field(default_factory=list)
    """Estimated acceptances of what the suffix store offered first."""
    n_unread: int | None = None
    """Tokens the draft model had not read; None without one."""
    n_woken: int = 0
    """Tokens the draft model read to wake up."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """(tokens read, guesses among them) of each pass of the draft model."""
    passes_of_tree: list[tuple[str, Tree]] = field(default_factory=list)
    """What trunk, branches and store gave, and the tree after each pass; none for a chain."""
    proposed: Tree = ()
    n_accepted: int = 0
    n_emitted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0


class TreeDrafter:
    """Proposes a tree of tokens a step; a Drafter. One for a generation."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        suffix: SuffixDrafts | None,
        model: DraftModel | None,
        is_eog: Callable[[int], bool],
        clocks: tuple[OnlineCurve, OnlineCurve | None],
        on_step: Callable[[DraftStep], None] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """Propose from `suffix` and `model` what `scheduler` chooses.

        `clocks` are the curves of target and draft model in seconds, told of every pass that is timed.
        `on_step` is told of every step. Only what `constraint` allows is proposed; it follows the timeline.
        """
        self._scheduler = scheduler
        policy = scheduler.policy
        self._suffix = suffix if policy.suffix or policy.staged else None
        self._model = model if policy.model else None
        self._is_eog = lru_cache(maxsize=4096)(is_eog)
        self._target_clock, self._draft_clock = clocks
        self._on_step = on_step
        self._constraint = constraint
        self._forced_chance = ForcedChance()
        self.n_max = MAX_GAMMA if policy.gamma is None else policy.gamma
        self._sampled = False
        self._sleep = Sleep(scheduler, self._model, clocks[1]) if self._model else None
        self._n_timeline = 0
        self._draft_s = 0.0
        self._now = DraftStep()
        self._offers: list[Offer] = []
        self._trunk: list[Node] = []
        self._branches: list[Node] = []
        self._others: list[list[tuple[int, int]]] = []
        self._n_slots = 0
        self._n_pending = 1
        self._totals: dict[Source, tuple[int, int]] = {}
        self._n_passes = 0

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Start on a new timeline."""
        self._sampled = sampled
        self._n_pending = 1
        self._scheduler.begin(len(tokens), n_predict)
        if self._suffix:
            self._suffix.begin(tokens, n_silent=n_before_answer(tokens, self._is_eog))
        self._now = DraftStep()
        if self._sleep:
            self._sleep.begin(tokens)
            self._now.n_woken = self._sleep.wake(tokens)

    def draft(self, tokens: Sequence[int], room: int, position: Position) -> Tree:
        """Propose up to `room` tokens, none after an end-of-generation token."""
        started = time.perf_counter()
        scheduler, model = self._scheduler, self._model
        self._n_timeline = len(tokens)
        self._now = now = DraftStep(unit=scheduler.unit)
        self._offers, self._trunk, self._branches, self._others = [], [], [], []
        self._n_slots = 0
        room = min(room, self.n_max - self._n_pending + 1)
        if model:
            room = min(room, model.n_ctx // 2 - 1)
        drafted: list[int] = []
        offer = self._offer(drafted, room)
        now.offered = offer.chances
        if model and self._sleep:
            model.make_room(len(tokens) + max(room, 0))
            with model.blamed:
                now.n_woken = self._sleep.wake(tokens, position.sampler)
            now.n_unread = model.n_unread(len(tokens))
        scheduler.start_step(
            len(tokens), offer.chances, n_draft=model.n_past if model else 0, n_pending=self._n_pending
        )
        now.rate = scheduler.rate
        after_model = False
        while self._n_nodes < room:
            if self._take_forced(drafted, room):
                if self._is_eog(drafted[-1]):
                    break
                offer = self._offer(drafted, room - self._n_nodes)
                after_model = False
                continue
            n_unread = model.n_unread(len(tokens) + len(drafted)) if model else 0
            if after_model:
                scheduler.learn_follow_up(self._path, len(drafted), offer.chances)
            choice = scheduler.next(self._path, len(drafted), n_unread, offer.chances, self._bucket)
            after_model = False
            n_before = len(drafted)
            if isinstance(choice, TakeSuffix):
                self._take(offer, choice.n, drafted)
                offer = Offer(len(drafted))  # what more there is was offered and not taken
            elif isinstance(choice, RunModel) and model and n_unread:
                guesses = offer.tokens[: min(choice.n_guesses, room - self._n_nodes - 1)]
                with model.blamed:
                    self._run(model, tokens, drafted, guesses, room, position=position)
                offer = self._offer(drafted, room - self._n_nodes)
                after_model = True
            if len(drafted) == n_before or self._is_eog(drafted[-1]):
                break
        now.proposed = self._compiled(room)
        self._draft_s = time.perf_counter() - started
        return now.proposed

    @property
    def _n_nodes(self) -> int:
        """Nodes that are proposed in any case: the trunk, and what was sampled beside it."""
        return len(self._trunk) + sum(node.slot >= 0 for node in self._branches)

    @property
    def _path(self) -> float:
        return self._trunk[-1].path if self._trunk else 1.0

    @property
    def _bucket(self) -> int:
        return self._trunk[-1].bucket if self._trunk else 0

    def _compiled(self, room: int) -> Tree:
        """Make one tree of the trunk and the branches, as large as pays."""
        trunk = tuple(self._trunk)
        trees = [(*trunk, *self._branches), self._store_tree()] if trunk else []
        if not any(trees[1:]) and not self._branches:
            return trunk
        scheduler = self._scheduler
        stages = [(name, tree) for name, tree in zip(("drafted", "store"), trees, strict=True) if tree]
        tree = merge(trees)
        stages.append(("merge", tree))
        tree = balance(tree)
        stages.append(("balance", tree))
        if self._constraint:
            tree = fold(tree, self._constraint.forced, room)
            stages.append(("fold", tree))
        tree = order(tree)
        stages.append(("order", tree))
        tree = prune(tree, scheduler.least_price)
        stages.append(("prune", tree))
        tree = cut(tree, scheduler.verify_costs, scheduler.rate, room, scheduler.least_price)
        stages.append(("cut", tree))
        self._now.passes_of_tree = stages
        return tree

    def _store_tree(self) -> Tree:
        """Return what the suffix store has seen to follow the timeline, where it has seen several things."""
        policy = self._scheduler.policy
        if self._suffix is None or not (policy.suffix and policy.may_branch and self._offers[0].tokens):
            return ()
        predictor = self._scheduler.learnt.predictor
        nodes: list[Node] = []
        depths: list[int] = []
        place: list[int | None] = []  # in `nodes`, of what was offered; None: what cannot be
        texts: list[tuple[int, ...]] = [()]  # that end with each node, and last at the root
        left = [1.0]  # chance that siblings before leave, of each node and last of the root
        for token, above, probability in zip(*self._suffix.offer_tree((), _STORE_NODES), strict=True):
            parent = place[above] if above >= 0 else -1
            if parent is None or (parent >= 0 and self._is_eog(nodes[parent].token)):
                place.append(None)
                continue
            if self._constraint and not self._constraint.allows(texts[parent], token):
                place.append(None)
                continue
            texts.insert(-1, (*texts[parent], token))
            place.append(len(nodes))
            depth = depths[parent] + 1 if parent >= 0 else 0
            bucket = bucket_of(probability)
            chance = min(predictor.offered(depth, bucket), left[parent])
            left[parent] -= chance
            left.insert(-1, 1.0)
            path = chance * (nodes[parent].path if parent >= 0 else 1.0)
            nodes.append(Node(parent, token, "suffix", path, chance=chance, bucket=bucket))
            depths.append(depth)
        return tuple(nodes)

    def _offer(self, drafted: Sequence[int], room: int) -> Offer:
        """Ask the suffix store what may follow `drafted`."""
        if self._suffix is None or room < 1:
            return Offer(len(drafted))
        tokens, probabilities = self._suffix.offer(drafted, min(room, _OFFERED))
        if self._constraint:
            n = self._constraint.fitting(drafted, tokens)
            tokens, probabilities = tokens[:n], probabilities[:n]
        buckets = [bucket_of(p) for p in probabilities]
        chance = self._scheduler.learnt.predictor.offered
        chances = [chance(depth, bucket) for depth, bucket in enumerate(buckets, len(drafted))]
        offer = Offer(len(drafted), tokens, buckets, chances)
        self._offers.append(offer)
        return offer

    def _take(self, offer: Offer, n: int, drafted: list[int]) -> None:
        """Propose the first `n` offered tokens to the target."""
        for token, bucket, chance in zip(offer.tokens[:n], offer.buckets, offer.chances, strict=False):
            self._grow(drafted, token, "suffix", chance, bucket=bucket)
            if self._is_eog(token):
                break

    def _take_forced(self, drafted: list[int], room: int) -> bool:
        """Propose what the grammar leaves no choice about, if anything and if it pays."""
        if not self._constraint:
            return False
        tokens = self._constraint.forced_run(drafted)[: room - self._n_nodes]
        chance = self._forced_chance.now
        n = self._scheduler.n_worthwhile(self._path, len(drafted), [chance] * len(tokens)) if tokens else 0
        for token in tokens[:n]:
            self._grow(drafted, token, "forced", chance, bucket=self._bucket)
        return n > 0

    def _grow(
        self,
        drafted: list[int],
        token: int,
        source: Source,
        chance: float,
        *,
        bucket: int,
        next_bucket: int = 0,
        slot: int = -1,
        is_top: bool = True,
    ) -> None:
        """Let the trunk end with `token`."""
        at = len(drafted)
        self._trunk.append(
            Node(at - 1, token, source, self._path * chance, slot, chance, bucket, next_bucket, is_top)
        )
        drafted.append(token)

    def _run(
        self,
        model: DraftModel,
        tokens: Sequence[int],
        drafted: list[int],
        guesses: Sequence[int],
        room: int,
        *,
        position: Position,
    ) -> None:
        """Run the draft model once and propose its tokens.

        Each token is drawn from the model's own distribution at its position. As long as it is the one
        that was guessed there, the distribution at the next position is at hand too. A position may be
        left out, and the number of tokens drawn there is chosen, because of its distribution, before a token
        is drawn: never because of the token.
        """
        scheduler, predictor = self._scheduler, self._scheduler.learnt.predictor
        sampler, recent, coins = position.sampler, position.recent, position.coins
        timeline = [*tokens, *drafted] if drafted else tokens
        n_read = model.n_unread(len(timeline)) + len(guesses)
        n_past = model.n_past
        started = time.perf_counter()
        rows = model.run(timeline, guesses)
        if self._draft_clock:
            self._draft_clock.observe(n_read, n_past, time.perf_counter() - started)
        n_right = 0
        next_bucket = self._bucket
        for i, unmasked in enumerate(rows):
            depth = len(drafted)
            row: Rows | None = unmasked
            if self._constraint:
                row = self._constraint.mask(unmasked, drafted, sampler, recent(drafted), exact=False)
            if row is None:
                break  # the grammar allows nothing that the draft model likes
            likeliest = sampler.likeliest(row, _LIKELIEST)
            bucket = bucket_of(likeliest[0][1])
            as_sampled = predictor.sampled.chance(depth, bucket)
            as_argmax = predictor.argmax.chance(depth, bucket)
            sampled = self._sampled and as_sampled > as_argmax
            chance = as_sampled if sampled else as_argmax
            path = self._path
            if self._n_nodes >= room or not scheduler.keeps(path * chance, depth, bucket):
                break
            siblings = sampled and scheduler.policy.siblings
            n_siblings = self._n_siblings(path, depth, bucket, room) if siblings else 0
            slot = self._n_slots
            token = sampler.sample(row, recent(drafted), coins(1)[0] if sampled else 0.0, slot)
            top = sampler.top(slot)
            if sampled:
                self._n_slots += 1
                self._grow(
                    drafted,
                    token,
                    "sampled",
                    chance,
                    bucket=bucket,
                    next_bucket=next_bucket,
                    slot=slot,
                    is_top=token == top,
                )
                self._draw_siblings(n_siblings, path, depth, bucket=bucket, position=position)
            else:
                token = top
                self._grow(drafted, token, "argmax", chance, bucket=bucket, next_bucket=next_bucket)
            self._add_likeliest(likeliest, token, path, depth, propose=not sampled)
            next_bucket = bucket
            if i == len(guesses):
                break
            if token != guesses[i] or self._is_eog(token):
                break
            n_right += 1
        model.trim(len(timeline) + n_right)
        self._now.passes.append((n_read, len(guesses)))

    def _n_siblings(self, path: float, depth: int, bucket: int, room: int) -> int:
        """Return how many tokens more to sample at a place of the trunk, whose parent has `path`."""
        chance = self._scheduler.learnt.predictor.second.chance(depth, bucket)
        n = 0
        while (
            n + 1 < _MOST_SIBLINGS
            and self._n_nodes + n + 1 < room
            and self._scheduler.branches(path * chance, depth + 1 + n)
        ):
            n += 1
            chance *= _FEWER
        return n

    def _draw_siblings(self, n: int, path: float, depth: int, *, bucket: int, position: Position) -> None:
        """Sample `n` tokens beside the trunk's last, each without those before it."""
        last = self._trunk[-1]
        chance = self._scheduler.learnt.predictor.second.chance(depth, bucket)
        for _ in range(n):
            try:
                position.sampler.without(last.slot, last.token, self._n_slots)
            except ArithmeticError:  # nothing else can be sampled
                return
            token = position.sampler.draw(self._n_slots, position.coins(1)[0])
            last = Node(
                depth - 1, token, "sampled", path * chance, self._n_slots, chance, bucket, is_top=False
            )
            self._n_slots += 1
            self._branches.append(last)
            chance *= _FEWER

    def _add_likeliest(
        self,
        likeliest: Sequence[tuple[int, float]],
        taken: int,
        path: float,
        depth: int,
        *,
        propose: bool,
    ) -> None:
        """Propose the likeliest tokens of a position that may pay, and remember them to learn from."""
        scheduler = self._scheduler
        others = [(token, bucket_of(chance)) for token, chance in likeliest if token != taken]
        while len(self._others) < depth:
            self._others.append([])  # of positions that the suffix store filled
        self._others.append(others)
        for token, bucket in others if propose else ():
            chance = scheduler.learnt.predictor.other.chance(depth, bucket)
            if scheduler.branches(path * chance, depth + 1):
                self._branches.append(
                    Node(depth - 1, token, "argmax", path * chance, -1, chance, bucket, is_top=False)
                )

    def accept(self, tokens: Sequence[int], outcome: Outcome) -> None:
        """Learn what became of the draft, and follow the timeline."""
        started = time.perf_counter()
        now, emitted = self._now, outcome.emitted
        n_drafted = len(now.proposed)
        n_trunk = n_emitted_of(self._trunk, emitted)
        if self._model:
            self._model.trim(min(len(tokens) - 1, self._n_timeline + n_trunk))
        if self._suffix:
            self._suffix.extend(emitted)
        predictor = self._scheduler.learnt.predictor
        learn_offers(predictor, self._offers, n_trunk, emitted)
        learn_others(predictor, self._others, n_trunk, emitted)
        learn_tree(predictor, now.proposed, outcome)
        self._forced_chance.learn(now.proposed, outcome)
        self._target_clock.observe(min(outcome.n_evaluated, N_MAX), self._n_timeline, outcome.verify_s)
        self._n_pending = 1 + sum(i != depth for depth, i in enumerate(outcome.path))
        accepted = set(outcome.path)
        for i, node in enumerate(now.proposed):
            n, n_accepted = self._totals.get(node.source, (0, 0))
            self._totals[node.source] = (n + 1, n_accepted + (i in accepted))
        self._n_passes += len(now.passes)
        now.n_accepted, now.n_emitted = len(outcome.path), len(emitted)
        now.verify_s = outcome.verify_s
        now.draft_s = self._draft_s + time.perf_counter() - started
        self._scheduler.learn(len(emitted), now.draft_s + now.verify_s, n_drafted, now.passes)
        if self._on_step:
            self._on_step(now)

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted of each source, over the generation."""
        names: dict[Source, str] = {
            "suffix": "suffix",
            "sampled": "model",
            "argmax": "model",
            "forced": "forced",
        }
        found = dict.fromkeys(names.values(), (0, 0))
        for source, (drafted, accepted) in self._totals.items():
            so_far = found[names[source]]
            found[names[source]] = (so_far[0] + drafted, so_far[1] + accepted)
        return {name: counts for name, counts in found.items() if counts[0]}

    def note(self) -> str:
        """Say in one sentence why drafting was on or off."""
        return self._scheduler.explain(self.sources(), asleep=self._model is not None and not self._n_passes)
