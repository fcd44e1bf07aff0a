"""Schedulers for tests: one that decides at random, the policies, and invented cost curves."""

from __future__ import annotations

import random

from edgespec.drafting.costs import OnlineCurve, guessed_curve
from edgespec.drafting.policy import Policy, RunModel, TakeSuffix
from edgespec.drafting.scheduler import Scheduler

POLICIES = {
    "auto": Policy(),
    "chain": Policy(branches=False),
    "model": Policy(suffix=False, staged=False),
    "suffix": Policy(model=False, staged=False),
    "staged": Policy(suffix=False),
    "auto, gamma 3": Policy(gamma=3),
    "staged, gamma 2": Policy(suffix=False, gamma=2),
}


class RandomScheduler(Scheduler):
    """Switches at random, from draft to draft and within a draft; uses only what a scheduler may know."""

    def __init__(self, *args):
        super().__init__(*args)
        self.random = random.Random(1)

    def next(self, path, depth, unread, offered, bucket, prefix=None):
        kind = self.random.choice(["suffix", "model", "model", "stop"])
        if kind == "suffix" and offered:
            return TakeSuffix(self.random.randint(1, len(offered)))
        if kind == "model":
            return RunModel(self.random.randint(0, len(offered)))
        return None

    def keeps(self, path, depth, bucket, *, chance=1.0):
        return self.random.random() < 0.7

    def branches(self, path, n_drafted):
        return self.policy.branches and self.random.random() < 0.5

    @property
    def least_price(self):
        return self.random.random() * 0.2

    def worth_reading(self, unread):
        return unread


def curves():
    target = OnlineCurve(guessed_curve(2_000_000_000, own_kernels=True))
    return target, OnlineCurve(guessed_curve(100_000_000, own_kernels=True))
