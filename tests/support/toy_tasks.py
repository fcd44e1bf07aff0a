"""Tasks for a loop under test, in one line."""

from __future__ import annotations

from typing import Any

from edgespec.decoding.choices import Rule
from edgespec.decoding.constraint import Constraint
from edgespec.decoding.generate import Task
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import Coins, SamplingParams


def task_of(
    params: SamplingParams,
    seed: int = 1,
    *,
    rule: Rule = "block",
    constraint: Constraint | None = None,
    n_predict: int | None = None,
    **options: Any,
) -> Task:
    """Return the task of one text without end; `options` are those of Options."""
    return Task(
        options=Options(params=params, n_predict=n_predict, **options),
        rule=rule,
        coins=Coins(seed),
        constraint=constraint,
    )
