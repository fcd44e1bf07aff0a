"""Paces for tests: one that decides at random, the policies, and invented costs."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from edgespec.drafting.acceptance import AcceptanceTables
from edgespec.drafting.pace import ModelAction, Pace, Policy, SuffixAction
from edgespec.drafting.profile import Clocks, PassCosts, guessed_curve, interpolated

OURS = [0.0, *(0.0174 * f for f in interpolated({1: 1.0, 2: 1.02, 4: 1.09, 8: 1.54, 16: 2.87, 33: 5.7}))]
STOCK = [0.0, *(0.027 * f for f in interpolated({1: 1.0, 2: 1.9, 4: 3.1, 8: 5.1, 16: 6.0, 33: 9.0}))]
STEEPER = [0.0, *(0.030 * f for f in interpolated({1: 1.0, 2: 1.1, 4: 1.43, 8: 2.05, 16: 3.85, 33: 7.8}))]
"""T(0), T(1) .. in seconds: of our kernels, of llama.cpp's, of ours where many tokens are dearer."""


@dataclass(frozen=True, slots=True)
class FixedPolicy(Policy):
    """A policy with a fixed length: `gamma` tokens a step."""

    gamma: int = 3


def with_gamma(policy, gamma):
    """`policy` with a fixed length."""
    return FixedPolicy(**asdict(policy), gamma=gamma)


def pace_of(policy, clocks, kind=Pace, acceptance=None):
    """The pace that an engine would make."""
    gamma = getattr(policy, "gamma", None)
    return kind(policy, Clocks(*clocks), acceptance or AcceptanceTables(), gamma=gamma)


class SoonDrafting(Pace):
    """Drafts from the first step on, as any pace does later: where texts are short, and drafts count."""

    _is_brief = False


class Wakes(SoonDrafting):
    """Lets the draft model read all that is unread, or only a part of it, in turns."""

    n = 0

    def next(self, path, depth, unread, offered, bucket):
        if depth or unread < 7:
            return super().next(path, depth, unread, offered, bucket)
        self.n += 1
        return ModelAction(0, 7 if self.n % 2 else None)


def soon_drafting(policy, clocks):
    """The pace that an engine would make, which drafts from the first step on."""
    return pace_of(policy, clocks, SoonDrafting)


POLICIES = {
    "auto": Policy(),
    "chain": Policy(branches=False),
    "model": Policy(suffix=False, staged=False),
    "suffix": Policy(model=False, staged=False),
    "staged": Policy(suffix=False),
    "auto, gamma 3": FixedPolicy(gamma=3),
    "staged, gamma 2": FixedPolicy(suffix=False, gamma=2),
}


def cases(policies):
    """Pairs of a policy's name and a rule: all by "block", and by "chain" what has all kinds of trees.

    What is drafted does not depend on the rule it is judged by; "random" drafts whatever can be drafted.
    """
    return [*((name, "block") for name in (*policies, "random")), ("auto", "chain"), ("random", "chain")]


class RandomPace(Pace):
    """Switches at random, from draft to draft and within a draft; uses only what a pace may know."""

    needs_model = True

    def __init__(self, policy, clocks):
        self.random = random.Random(1)
        super().__init__(policy, Clocks(*clocks), AcceptanceTables())

    def next(self, path, depth, unread, offered, bucket):
        kind = self.random.choice(["suffix", "model", "model", "stop"])
        if kind == "suffix" and offered:
            return SuffixAction(self.random.randint(1, len(offered)))
        if kind == "model":
            return ModelAction(self.random.randint(0, len(offered)))
        return None

    def verifies(self, path, depth, bucket, *, chance=1.0):
        return self.random.random() < 0.7

    def branches(self, path, n_drafted):
        return self.policy.branches and self.random.random() < 0.5

    @property
    def least_price(self):
        return self.random.random() * 0.2


def curves():
    sizes = 2_000_000_000, 100_000_000
    return Clocks(*(PassCosts(guessed_curve(size, own_kernels=True)) for size in sizes))


class WithoutGuesses(RandomPace):
    """Random decisions for a draft model that checks none of the suffix store's tokens."""

    def next(self, *args, **options):
        choice = super().next(*args, **options)
        return ModelAction(0) if isinstance(choice, ModelAction) else choice
