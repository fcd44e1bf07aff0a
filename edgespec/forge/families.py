"""Training one family of drafts (training/, which needs the extra `forge`), and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from edgespec.errors import EdgespecError


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of training a draft."""

    n_tokens: int
    """Trained on, repetitions counted."""
    hours: float
    acceptance: tuple[float, ...]
    """On held-out texts: share right at position 1, at position 2 given that the first was, ..."""


def require_jax() -> None:
    """Raise EdgespecError in one line if what training needs is not installed."""
    if not all(map(find_spec, ("jax", "optax"))):
        problem = "training needs JAX: pip install 'edgespec[forge]', or train nothing (--hours 0)"
        raise EdgespecError(problem)
