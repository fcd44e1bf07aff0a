"""How a token is chosen from logits: the parameters, the C core's sampler for them, and the random numbers.

Order and meaning of the filters are llama.cpp's: logit bias, penalties, top-k, typical, top-p, min-p,
temperature. Equal logits are ordered by token id. `tests/support/reference.py` says them in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec import _core
from edgespec.errors import UsageError, check_number, whole_number

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits; the same for target and draft. Defaults as in llama.cpp.

    Raises:
        UsageError: a value is outside its range; the message names the option.
    """

    temperature: float = 0.8
    """0 is greedy: the likeliest token, no randomness."""
    top_k: int = 40
    """Keep the k likeliest tokens; 0 turns it off."""
    top_p: float = 0.95
    """Keep the likeliest tokens that together reach this probability; 1 turns it off."""
    min_p: float = 0.05
    """Keep tokens at least this fraction as likely as the likeliest; 0 turns it off."""
    typical_p: float = 1.0
    """Keep the tokens of most typical surprise up to this probability; 1 turns it off."""
    repeat_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of recent tokens; 1 turns it off."""
    frequency_penalty: float = 0.0
    """Subtracted from a recent token's logit for each occurrence."""
    presence_penalty: float = 0.0
    """Subtracted once from a recent token's logit."""
    penalty_last_n: int = 64
    """How many tokens, prompt included, count as recent; -1 for all, 0 for none."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; -inf forbids a token."""

    def __post_init__(self) -> None:
        for name in ("top_k", "penalty_last_n"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in _NUMBERS:
            check_number(name, getattr(self, name))
        checks = [
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or 1e-3 <= self.temperature <= 1e3,
                "0, or 0.001 to 1000",
            ),
            ("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 to 2^31 - 1"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("typical_p", self.typical_p, 0.0 < self.typical_p <= 1.0, "above 0 and at most 1"),
            ("repeat_penalty", self.repeat_penalty, 1e-3 <= self.repeat_penalty <= 1e3, "0.001 to 1000"),
            (
                "frequency_penalty",
                self.frequency_penalty,
                abs(self.frequency_penalty) <= 1e3,
                "-1000 to 1000",
            ),
            ("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 1e3, "-1000 to 1000"),
            ("penalty_last_n", self.penalty_last_n, -1 <= self.penalty_last_n < 1 << 31, "-1 to 2^31 - 1"),
        ]
        for name, value, good, wanted in checks:
            if not good:
                raise UsageError(f"must be {wanted}", field=name, value=value)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError("must say the bias of each token id", field="logit_bias")
        for token, bias in self.logit_bias.items():
            whole_number("logit_bias", token)
            check_number("logit_bias", bias)
            if not (bias == -math.inf or abs(bias) <= 1e4):
                problem = "must be -10000 to 10000, or -inf"
                raise UsageError(problem, field="logit_bias", value=f"{token}={bias}")

    @property
    def greedy(self) -> bool:
        """Whether no coin decides anything."""
        return self.temperature == 0.0

    @property
    def uses_prefix(self) -> bool:
        """Whether the distribution depends on the recent tokens themselves (penalties)."""
        neutral = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) == (1.0, 0.0, 0.0)
        return self.penalty_last_n != 0 and not neutral

    def sampler(self, n_vocab: int, n_slots: int) -> _core.Sampler:
        """Return the C core's sampler for these parameters.

        `n_slots` is the longest draft it will verify. Raises UsageError for a biased token id
        outside the vocabulary.
        """
        outside = [token for token in self.logit_bias if not 0 <= token < n_vocab]
        if outside:
            problem = f"the model's token ids are 0..{n_vocab - 1}"
            raise UsageError(problem, field="logit_bias", value=outside[0])
        return _core.Sampler(
            n_vocab,
            n_slots,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            penalty_last_n=self.penalty_last_n,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=dict(self.logit_bias),
        )


class Coins:
    """The random numbers of one generation: stream `seed` of the counter-based generator, in order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._next = 0

    def take(self, n: int) -> list[float]:
        """Return the next `n` coins, numbers in [0, 1)."""
        coins = _core.coins(self.seed, self._next, n)
        self._next += n
        return coins
