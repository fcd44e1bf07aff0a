"""Tasks for a loop under test, in one line."""

from __future__ import annotations

from typing import Any

from edgespec.choices import Rule
from edgespec.decoding.loop import Task
from edgespec.grammar.constraint import Constraint
from edgespec.options import Options
from edgespec.sampling import Coins, SamplingParams


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
