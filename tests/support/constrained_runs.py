"""A toy target under a constraint, whose distribution over texts is known, and what the real loop writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from edgespec._core import SuffixStore
from edgespec.decoding.constraint import Constraint
from edgespec.decoding.generate import Generation
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.tree import Position
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import Policy
from edgespec.drafting.tree_drafter import TreeDrafter
from reference import filtered_probs
from toy_models import chi_square_p_value
from toy_paces import POLICIES, RandomPace, curves, pace_of, soon_drafting
from toy_sessions import ToySession
from toy_tasks import task_of


@dataclass(frozen=True)
class ConstrainedTarget:
    """The target is `logits(2)`, its draft `logits(102)`; the last token of the vocabulary ends a text."""

    logits: Callable[[int], Callable[[tuple[int, ...]], np.ndarray]]
    n_vocab: int
    prompt: tuple[int, ...]
    length: int
    params: SamplingParams
    constrain: Callable[[], Constraint]
    may_follow: Callable[[tuple[int, ...]], Sequence[int]]
    """The tokens that may come after those of a text."""

    def is_eog(self, token: int) -> bool:
        return token == self.n_vocab - 1

    def expected(self):
        """Every sequence that may be emitted, with its probability."""

        def spread(sequence, chance):
            if len(sequence) == self.length or any(map(self.is_eog, sequence[-1:])):
                yield sequence, chance
                return
            row = np.full(self.n_vocab, -np.inf, np.float32)
            allowed = [*self.may_follow(sequence)]
            row[allowed] = self.logits(2)((*self.prompt, *sequence))[allowed]
            for token, p in enumerate(filtered_probs(row, self.params, (*self.prompt, *sequence))):
                if p > 0:
                    yield from spread((*sequence, token), chance * p)

        return dict(spread((), 1.0))


class Runs:
    """Generations of one drafter, one after the other."""

    def __init__(self, clock, target, policy, rule, *, scheduler=soon_drafting, masks_draft=True):
        self.clock, self.target, self.policy, self.rule = clock, target, policy, rule
        self.masks_draft = masks_draft
        self.clocks = curves()
        self.scheduler = scheduler(policy or Policy(), self.clocks)
        self.suffix = SuffixStore(1024)
        self.totals = Counter()

    def run(self, seed, n_predict=None):
        target, drafter = self.target, None
        constraint = target.constrain()
        if self.policy:
            draft = ToySession(target.logits(102), target.n_vocab, clock=self.clock, cost=lambda n: 0.001)
            drafter = TreeDrafter(
                self.scheduler,
                suffix=self.suffix,
                model=DraftModel(draft, n_vocab=target.n_vocab),
                is_eog=target.is_eog,
                clocks=self.clocks,
                constraint=constraint if self.masks_draft else None,
            )
        options = {"is_eog": target.is_eog, "clock": self.clock, "cost": lambda n: 0.05}
        n_predict = n_predict or target.length
        generation = Generation(
            ToySession(target.logits(2), target.n_vocab, **options),
            drafter,
            target.prompt,
            task_of(target.params, seed, rule=self.rule, n_predict=n_predict, constraint=constraint),
        )
        list(generation.events())
        if drafter:
            self.totals.update({source: accepted for source, (_, accepted) in drafter._totals.items()})
        return tuple(generation.tokens[len(target.prompt) :])

    def p_value(self, n):
        """That of the texts of `n` seeds, by what the target is expected to write."""
        counts = Counter(self.run(seed) for seed in range(n))
        wanted = self.target.expected()
        keys = list(dict.fromkeys(chain(wanted, counts)))
        seen = np.array([counts[key] for key in keys], float)
        return chi_square_p_value(seen, n * np.array([wanted.get(key, 0.0) for key in keys]))


def check_that_the_seed_decides(clock, target, n_predict):
    """Check that with the match rule each policy gives the text that the target writes alone."""
    plain = Runs(clock, target, None, "match")
    others = [Runs(clock, target, policy, "match") for policy in POLICIES.values()]
    others.append(Runs(clock, target, Policy(), "match", scheduler=RandomPace))
    texts = set()
    for seed in range(25):
        text = plain.run(seed, n_predict)
        texts.add(text)
        assert [runs.run(seed, n_predict) for runs in others] == [text] * len(others)
    assert len(texts) > 10
    assert all(runs.totals["forced"] for runs in others)


def forced_draft(target, text, most):
    """What is drafted after the prompt and `text`, without a pass of the draft model."""
    constraint, clocks = target.constrain(), curves()
    constraint.advance(text)
    drafter = TreeDrafter(
        pace_of(Policy(suffix=False, staged=False), clocks),
        suffix=None,
        model=DraftModel(ToySession(target.logits(102), target.n_vocab), n_vocab=target.n_vocab),
        is_eog=target.is_eog,
        clocks=clocks,
        constraint=constraint,
    )
    tokens = (*target.prompt, *text)
    drafter.begin(tokens, sampled=True, n_predict=None)
    sampler = target.params.sampler(target.n_vocab, drafter.n_max)
    position = Position(sampler, recent=lambda _: np.zeros(0, np.int32), coins=lambda n: [0.5] * n)
    tree = drafter.draft(tokens, most, position)
    assert not any(drafter._step.passes)
    assert {node.source for node in tree} == {"forced"}
    return [node.token for node in tree]
