"""Tokens over time, in which the last steps count most."""

from __future__ import annotations

STEPS = 32.0
"""Steps over which the rate is an average."""


class DecayingRate:
    """Tokens and cost of the last steps; older ones fade away."""

    def __init__(self) -> None:
        self.tokens = self.cost = 1.0

    def begin(self, cost: float, n_steps: float) -> None:
        """Begin as if `n_steps` steps of one token had cost `cost` each."""
        self.tokens, self.cost = n_steps, n_steps * cost

    def fade(self) -> None:
        """Count all steps so far a little less."""
        self.tokens *= 1.0 - 1.0 / STEPS
        self.cost *= 1.0 - 1.0 / STEPS

    def learn(self, n_tokens: int, cost: float) -> None:
        """Count a step."""
        self.tokens += n_tokens
        self.cost += cost

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.cost
