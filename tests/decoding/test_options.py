"""What a generation is asked for: bad values and contradictions are refused, by the name of their field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgespec import SamplingParams
from edgespec.decoding.option_table import MAX_GAMMA, MAX_LOGPROBS
from edgespec.decoding.options import Options, WakePolicy
from edgespec.errors import UsageError


def test_what_is_left_out() -> None:
    assert Options() == Options(params=SamplingParams(), n_predict=None, lenience=1.0)
    assert Options(seed=1).changed(params=None, gamma=2) == Options(seed=1, gamma=2)
    assert Options(stop="x").stop == Options(stop=["x"]).stop == ("x",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", -1),
        ("gamma", MAX_GAMMA + 1),
        ("n_predict", 0),
        ("seed", -1),
        ("seed", 1 << 64),
        ("n_logprobs", -1),
        ("n_logprobs", MAX_LOGPROBS + 1),
        ("drafter", "magic"),
        ("rule", "fair"),
        ("lenience", None),
        *[("lenience", value) for value in (0.0, -1.0, -0.5, 1.01, 1.5, math.nan, math.inf)],
    ],
)
def test_bad_values(field: str, value: object) -> None:
    with pytest.raises(UsageError, match="must be ") as found:
        Options(**{field: value})  # type: ignore[arg-type]
    assert found.value.field == field
    said = f"{value:g}" if isinstance(value, float) else value
    assert str(found.value).startswith(f"{field} {said}: ")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("rule", {"lenience": 0.5, "rule": "match"}),
        ("lenience", {"lenience": 0.5, "cascade": WakePolicy(threshold=0.5)}),
        ("rule", {"rule": "block", "cascade": WakePolicy(threshold=0.5)}),
    ],
)
def test_contradictions(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"contradicts|leave it out") as found:
        Options(**options)
    assert found.value.field == field


@pytest.mark.parametrize(
    ("field", "wake_policy"),
    [
        ("threshold", {"signal": "margin", "threshold": 1.5}),
        ("threshold", {"signal": "margin", "threshold": math.nan}),
        ("threshold", {"signal": "entropy", "threshold": -0.1}),
        ("threshold", {"signal": "entropy", "threshold": math.nan}),
        ("signal", {"signal": "surprise", "threshold": 0.5}),
        ("span", {"threshold": 0.5, "span": 0}),
        ("span", {"threshold": 0.5, "span": "all"}),
    ],
)
def test_what_a_cascade_cannot_be_told(field: str, wake_policy: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as found:
        WakePolicy(**wake_policy)
    assert found.value.field == field
    assert str(found.value).startswith(f"{field} {wake_policy[field]}: ")
