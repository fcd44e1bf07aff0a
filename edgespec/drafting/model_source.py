"""The draft model as a source: each pass adds tokens to the trunk of a proposal, and alternatives to them.

Exactness: whether a position is drafted, and how many tokens are drawn there, is decided by the model's
distribution at the position before a token is drawn, never by the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.decoding.drafter import Position
from edgespec.decoding.forward import DraftForward
from edgespec.decoding.grammar.constraint import Constraint
from edgespec.decoding.session import ForwardResult, Rows
from edgespec.decoding.tree import TreeNode
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.online_curve import OnlineCurve
from edgespec.drafting.predictor import bucket_of
from edgespec.drafting.proposal import Proposal
from edgespec.drafting.scheduler import Scheduler

_LIKELIEST = 4  # tokens looked at in each of the draft model's distributions
_MOST_SIBLINGS = 3  # tokens sampled at one position
_FEWER = 0.4  # chance of a sampled token over that of the one sampled before it


@dataclass(frozen=True, slots=True)
class _Place:
    """A position that a token is drafted for."""

    depth: int
    """Tokens of the trunk before it."""
    path: float
    """Probability that these are accepted."""
    bucket: int
    """Bucket of the draft model's confidence here."""


class ModelSource:
    """Runs the draft model and decides which of its tokens are proposed."""

    def __init__(
        self,
        model: DraftModel,
        scheduler: Scheduler,
        *,
        clock: OnlineCurve | None,
        is_eog: Callable[[int], bool],
        constraint: Constraint | None,
    ) -> None:
        """Propose tokens of `model` that `scheduler` and `constraint` allow; `clock` times its passes."""
        self._model = model
        self._scheduler = scheduler
        self._predictor = scheduler.learned.predictor
        self._clock = clock
        self._is_eog = is_eog
        self._constraint = constraint
        self._guesses: Sequence[int] = ()  # of the pass under way, as what follows
        self._n_sequence = self._n_read = self._n_past = 0

    def ask(
        self, tokens: Sequence[int], guesses: Sequence[int], proposal: Proposal
    ) -> DraftForward | ForwardResult:
        """Return the model's pass after `tokens` and the trunk, over `guesses` too, or its result."""
        model = self._model
        sequence = [*tokens, *proposal.drafted] if proposal.drafted else tokens
        self._n_sequence, self._guesses = len(sequence), guesses
        self._n_read = model.n_unread(len(sequence)) + len(guesses)
        self._n_past = model.n_past
        return model.ask(sequence, guesses)

    def propose(
        self, evaluated: ForwardResult, proposal: Proposal, position: Position, *, may_sample: bool
    ) -> None:
        """Propose the model's tokens, which the pass of `ask` gave.

        Each token is drawn from the model's own distribution at its position. As long as it is the one
        that was guessed there, the distribution at the next position is at hand too. `may_sample`: else
        only point masses make sense.
        """
        guesses, n_read = self._guesses, self._n_read
        if self._clock and evaluated.n_tokens <= n_read:  # else the batcher, which knows what was in it, does
            self._clock.observe(n_read, self._n_past, evaluated.seconds)
        n_right = 0
        for i, row in enumerate(evaluated.rows):
            drafts = self._draft_token(row, proposal, position, may_sample=may_sample)
            if not drafts or i == len(guesses):
                break
            if proposal.drafted[-1] != guesses[i] or self._is_eog(guesses[i]):
                break
            n_right += 1
        self._model.trim(self._n_sequence + n_right)
        proposal.passes.append((n_read, len(guesses)))

    def _draft_token(
        self, unmasked: Rows, proposal: Proposal, position: Position, *, may_sample: bool
    ) -> bool:
        """Let the trunk go on with a token of this row of logits; return False if it does not."""
        sampler, drafted = position.sampler, proposal.drafted
        row: Rows | None = unmasked
        ids = self._model.ids
        if self._constraint:
            ids = None
            row = self._constraint.mask(self._model.whole(unmasked), drafted)
        if row is None or (self._constraint and row.max() == -np.inf):
            return False  # nothing may follow, or nothing that the draft model knows
        likeliest = sampler.likeliest(row, _LIKELIEST, ids)
        place = _Place(proposal.depth, proposal.path, bucket_of(likeliest[0][1]))
        as_sampled = self._predictor.sampled.chance(place.depth, place.bucket)
        as_argmax = self._predictor.argmax.chance(place.depth, place.bucket)
        sampled = may_sample and as_sampled > as_argmax
        chance = as_sampled if sampled else as_argmax
        if proposal.n_left <= 0 or not self._scheduler.keeps(
            place.path * chance, place.depth, place.bucket, chance=chance
        ):
            return False
        n_siblings = self._n_siblings(place, proposal) if sampled else 0
        next_bucket, slot = proposal.bucket, proposal.n_slots
        coin = position.coins(1)[0] if sampled else 0.0
        token = sampler.sample(row, position.recent(drafted), coin, slot, ids)
        top = sampler.top(slot)
        if sampled:
            proposal.n_slots += 1
            proposal.grow(
                token,
                "sampled",
                chance,
                place.bucket,
                next_bucket=next_bucket,
                slot=slot,
                is_top=token == top,
            )
            self._draw_siblings(n_siblings, place, proposal, position)
        else:
            proposal.grow(top, "argmax", chance, place.bucket, next_bucket=next_bucket)
        self._add_likeliest(likeliest, place, proposal, propose=not sampled)
        return True

    def _n_siblings(self, place: _Place, proposal: Proposal) -> int:
        """Return how many more tokens to sample at the position of the trunk's next one."""
        if not self._scheduler.policy.siblings:
            return 0
        chance = self._predictor.second.chance(place.depth, place.bucket)
        n = 0
        while (
            n + 1 < _MOST_SIBLINGS
            and n + 1 < proposal.n_left
            and self._scheduler.branches(place.path * chance, place.depth + 1 + n)
        ):
            n += 1
            chance *= _FEWER
        return n

    def _draw_siblings(self, n: int, place: _Place, proposal: Proposal, position: Position) -> None:
        """Sample `n` alternatives to the trunk's last token, each without those before it."""
        last = proposal.trunk[-1]
        chance = self._predictor.second.chance(place.depth, place.bucket)
        for _ in range(n):
            slot = proposal.n_slots
            try:
                position.sampler.without(last.slot, last.token, slot)
            except ArithmeticError:  # nothing else can be sampled
                return
            token = position.sampler.draw(slot, position.coins(1)[0])
            path = place.path * chance
            last = TreeNode(place.depth - 1, token, "sampled", path, slot, chance, place.bucket, is_top=False)
            proposal.n_slots += 1
            proposal.branches.append(last)
            chance *= _FEWER

    def _add_likeliest(
        self, likeliest: Sequence[tuple[int, float]], place: _Place, proposal: Proposal, *, propose: bool
    ) -> None:
        """Propose the likeliest tokens of a position that may pay, and remember them to learn from."""
        taken, depth = proposal.drafted[-1], place.depth
        others = [(token, bucket_of(chance)) for token, chance in likeliest if token != taken]
        while len(proposal.others) < depth:
            proposal.others.append([])  # of positions that the suffix store filled
        proposal.others.append(others)
        for token, bucket in others if propose else ():
            chance = self._predictor.other.chance(depth, bucket)
            path = place.path * chance
            if self._scheduler.branches(path, depth + 1):
                proposal.branches.append(
                    TreeNode(depth - 1, token, "argmax", path, -1, chance, bucket, is_top=False)
                )
