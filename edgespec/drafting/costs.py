"""Arithmetic on the costs of passes, T(0), T(1) .. of a curve."""

from __future__ import annotations

from collections.abc import Sequence


def extrapolated(costs: Sequence[float], last: int, first: int = 0, step: int = 1) -> list[float]:
    """Return T(first), T(first + step) .. up to T(last) for `costs` T(0) .. T(N_MAX).

    Beyond them, T grows as in their upper half.
    """
    end = len(costs) - 1
    slope = max(0.0, (costs[end] - costs[len(costs) // 2]) / (end - len(costs) // 2))
    return [costs[n] if n <= end else costs[end] + slope * (n - end) for n in range(first, last + 1, step)]


def per_request(costs: Sequence[float], n: int) -> list[float]:
    """Return each one's share of the passes that `n` requests make together, with as many tokens each.

    `costs`: T(0) .. T(N_MAX). Returns S(0) .. S(N_MAX), S(i) = T(n i) / n.
    """
    return [cost / n for cost in extrapolated(costs, n * (len(costs) - 1), step=n)]


def one_more_each(costs: Sequence[float], n: int, m: int, n_values: int) -> list[float]:
    """The costs of a pass over `n` tokens for one of `m` requests that add i tokens each, i = 0, 1 ..

    Element i is T(n) + (T(n + m i) - T(n)) / m: each pays an equal part of what all of them add. The price of
    the last token alone would not do: T has steps, so that it may be nothing, and then every one seems free.
    `costs`: T(0) .. T(N_MAX).
    """
    together = extrapolated(costs, n + m * (n_values - 1), n, m)
    return [together[0] + (cost - together[0]) / m for cost in together]
