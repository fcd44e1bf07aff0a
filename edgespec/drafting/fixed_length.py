"""The scheduler of a user who sets gamma: every step drafts that many tokens, whatever it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgespec.drafting.answer_lengths import LengthDistribution
from edgespec.drafting.costs import N_MAX
from edgespec.drafting.expected_gain import MAX_UNREAD, Chain, Prefix
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.policy import DraftAction, ModelAction, Policy, SuffixAction
from edgespec.drafting.scheduler import Scheduler

_LIKELY = 0.5  # chance of the suffix store's first token, from which it is taken rather than the model's


class FixedLength(Scheduler):
    """Drafts chains of `gamma` tokens; only their source is left to choose."""

    needs_model = True
    chooses_length = False

    def __init__(
        self,
        gamma: int,
        learned: LearnedCosts,
        policy: Policy,
        lengths: LengthDistribution | None = None,
    ) -> None:
        """Draft `gamma` tokens a step from the sources that `policy` allows."""
        super().__init__(learned, replace(policy, branches=False), lengths)
        self.n_max = gamma

    def chain(self, path: float, depth: int, chances: Sequence[float]) -> Chain:
        """Return an empty chain: what it drafts does not compete with others' tokens."""
        return Chain(path, ())

    def learn_follow_up(self, path: float, depth: int, offered: Sequence[float]) -> None:
        """Do nothing: the gain of an offer decides nothing here."""

    def next(
        self,
        path: float,
        depth: int,
        unread: int,
        offered: Sequence[float],
        bucket: int,
        prefix: Prefix | None = None,
    ) -> DraftAction:
        """Say where the next token comes from, until `gamma` are drafted."""
        policy = self.policy
        can_run = policy.model and 0 < unread <= MAX_UNREAD
        n_left = self.n_max - depth
        if n_left <= 0:
            return None
        if policy.suffix and offered and (not can_run or offered[0] >= _LIKELY):
            return SuffixAction(min(n_left, len(offered)))
        if not can_run:
            return None
        return ModelAction(min(n_left - 1, len(offered), N_MAX - unread) if policy.staged else 0)

    def n_worthwhile(self, path: float, depth: int, chances: Sequence[float]) -> int:
        """Return how many of the tokens that need no pass still fit into the length."""
        return max(0, min(len(chances), self.n_max - depth))

    def keeps(self, path: float, depth: int, bucket: int, *, chance: float = 1.0) -> bool:
        """Keep every token of the draft model up to the length."""
        return depth < self.n_max

    def n_to_prefill(self, unread: int) -> int:
        """Return `unread`: the draft model prefills all at once."""
        return unread if self.learned.draft and self.policy.model else 0

    def n_to_probe(self, unread: int) -> int:
        """Return 0: the draft model is never idle."""
        return 0

    def explain(
        self, sources: Mapping[str, tuple[int, int]], *, n_unread: int = 0, has_run: bool = False
    ) -> str:
        """Say that the length was the user's choice."""
        tokens = "1 token" if self.n_max == 1 else f"{self.n_max} tokens"
        asked = f"drafts of {tokens} a step were asked for{self._plain_note()}"
        why = "no earlier text was there to repeat" if not self.policy.model else "the answer was over before"
        return asked if sources else f"nothing was drafted, though {asked}: {why}"
