"""How a token is chosen from logits: the parameters, the C core's sampler for them, and the random numbers.

Order and meaning of the filters are llama.cpp's (`SAMPLERS`), after the logit bias. Equal logits are ordered
by token id. `tests/support/reference.py` has them in numpy.

Exactness: DRY and the penalties see the text before each node of a tree. XTC tosses a coin that is a function
of seed and position alone. Given these coins, the target and the draft each have one distribution at a
position, however often it is drafted, and speculative sampling is exact for it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from edgespec import _core
from edgespec.decoding.option_table import GENERATION, LARGEST_INT, Option, check_fields, option
from edgespec.errors import UsageError, check_number, check_text, whole_number

if TYPE_CHECKING:  # it imports numpy, which a start without a model goes without
    from edgespec.decoding.session import SessionModel

SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""The filters in their order, by llama.cpp's names."""

_NO_BREAKERS = array("i")
_MOST_BREAKERS = 64
_LONGEST_BREAKER = 40  # as in llama.cpp


def parse_bias(entries: list[str]) -> dict[int, float]:
    """Parse biases written as TOKEN=BIAS. Raises UsageError."""
    bias: dict[int, float] = {}
    for entry in entries:
        token, equals, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError("expected TOKEN=BIAS, such as 1234=-2.5", field="logit_bias", value=entry)
    return bias


def _parse_breakers(entries: list[str]) -> tuple[str, ...]:
    return () if entries == ["none"] else tuple(entries)


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits; the same for target and draft. Defaults as in llama.cpp.

    Raises:
        UsageError: a value is outside its range; the message names the option.
    """

    temperature: float = option(
        0.8,
        "Temperature; 0 is greedy.",
        (0, 1000),
        gap=1e-3,
        command="--temp",
        request_bounds=(0, 2),
        read=lambda value: 0.0 if 0 <= value < 1e-3 else value,  # some clients send 1e-8 for greedy
        ollama="temperature",
    )
    top_k: int = option(
        40,
        "Keep the k likeliest; 0: off.",
        (0, LARGEST_INT),
        request_bounds=(-LARGEST_INT - 1, LARGEST_INT),
        read=lambda value: max(0, value),
        ollama="top_k",
    )
    top_p: float = option(
        0.95,
        "Keep this much probability; 1: off.",
        (0, 1),
        above=True,
        request_bounds=(0, 1),
        read=lambda value: 1e-9 if value == 0 else value,  # the likeliest, as in OpenAI's and Ollama's
        ollama="top_p",
    )
    min_p: float = option(0.05, "Keep this fraction of the likeliest; 0: off.", (0, 1), ollama="min_p")
    typical_p: float = option(
        1.0, "Locally typical sampling; 1: off.", (0, 1), above=True, command="--typical", ollama="typical_p"
    )
    top_n_sigma: float = option(
        -1.0,
        "Keep logits within so many standard deviations of the largest; 0 or below: off.",
        (-1, 1000),
        command="--top-nsigma",
    )
    xtc_probability: float = option(
        0.0, "How often XTC takes away the top choices, all but the least likely; 0: off.", (0, 1)
    )
    xtc_threshold: float = option(0.1, "Least probability of a top choice of XTC; above 0.5: off.", (0, 1))
    dynatemp_range: float = option(
        0.0, "The temperature is this much lower to higher, as entropy rises; 0: off.", (0, 1000)
    )
    dynatemp_exponent: float = option(
        1.0, "Exponent of the entropy in the dynamic temperature.", (0, 1000), command="--dynatemp-exp"
    )
    repeat_penalty: float = option(
        1.0, "Penalty for recent tokens; 1: off.", (1e-3, 1000), ollama="repeat_penalty"
    )
    presence_penalty: float = option(
        0.0,
        "Once for each recent token; 0: off.",
        (-1000, 1000),
        request_bounds=(-2, 2),
        ollama="presence_penalty",
    )
    frequency_penalty: float = option(
        0.0, "For each occurrence; 0: off.", (-1000, 1000), request_bounds=(-2, 2), ollama="frequency_penalty"
    )
    penalty_last_n: int = option(
        64,
        "Tokens that count as recent; -1: all, 0: none.",
        (-1, LARGEST_INT),
        command="--repeat-last-n",
        request="repeat_last_n",
        ollama="repeat_last_n",
    )
    dry_multiplier: float = option(0.0, "Penalty for continuing a repetition (DRY); 0: off.", (0, 1000))
    dry_base: float = option(1.75, "Factor of DRY's penalty for each more token; below 1: off.", (0, 1000))
    dry_allowed_length: int = option(2, "Tokens that may repeat without DRY's penalty.", (0, LARGEST_INT))
    dry_penalty_last_n: int = option(-1, "Tokens that DRY looks back on; -1: all, 0: off.", (-1, LARGEST_INT))
    dry_sequence_breakers: Sequence[str] = option(
        ("\n", ":", '"', "*"),
        "Text that DRY takes no repeat across; may be repeated; none: no such text.",
        default='line break, :, ", *',
        command="--dry-sequence-breaker",
        metavar="TEXT",
        parse=_parse_breakers,
    )
    logit_bias: Mapping[int, float] = option(
        dict, "Add to a token id's logit; -inf forbids it.", metavar="TOKEN=BIAS", parse=parse_bias
    )

    def __post_init__(self) -> None:
        check_fields(self, SAMPLING)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError("must say the bias of each token id", field="logit_bias")
        for token, bias in self.logit_bias.items():
            whole_number("logit_bias", token)
            check_number("logit_bias", bias)
            if not (bias == -math.inf or abs(bias) <= 1e4):
                problem = "must be -10000 to 10000, or -inf"
                raise UsageError(problem, field="logit_bias", value=f"{token}={bias}")
        self._check_breakers(self.dry_sequence_breakers)

    def _check_breakers(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise UsageError("must be a list of texts", field="dry_sequence_breakers")
        for text in texts:
            check_text("dry_sequence_breakers", text)
        if len(texts) > _MOST_BREAKERS or not all(1 <= len(text) <= _LONGEST_BREAKER for text in texts):
            problem = f"must be at most {_MOST_BREAKERS} texts of 1 to {_LONGEST_BREAKER} characters"
            raise UsageError(problem, field="dry_sequence_breakers")
        object.__setattr__(self, "dry_sequence_breakers", tuple(texts))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that no coin decides anything."""
        return self.temperature == 0.0 and self.dynatemp_range == 0.0 and self.xtc_probability == 0.0

    @property
    def banned(self) -> tuple[int, ...]:
        """The tokens that the bias forbids."""
        return tuple(token for token, bias in self.logit_bias.items() if bias == -math.inf)

    @property
    def _uses_dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_base >= 1.0 and self.dry_penalty_last_n != 0

    @property
    def looks_back(self) -> bool:
        """Whether the filters need the text before a position: its tokens, or their number (XTC)."""
        neutral = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) == (1.0, 0.0, 0.0)
        penalises = self.penalty_last_n != 0 and not neutral
        return penalises or self._uses_dry or self.xtc_probability > 0.0

    def sampler(
        self, n_vocab: int, n_slots: int, *, seed: int = 0, vocabulary: SessionModel | None = None
    ) -> _core.Sampler:
        """Return the C core's sampler for these parameters.

        `n_slots` is the longest draft it will verify, `seed` that of XTC's coins. Without a `vocabulary` DRY
        has no sequence breakers. Raises UsageError for a biased token id outside the vocabulary.
        """
        outside = [token for token in self.logit_bias if not 0 <= token < n_vocab]
        if outside:
            problem = f"the model's token ids are 0..{n_vocab - 1}"
            raise UsageError(problem, field="logit_bias", value=outside[0])
        breakers = _NO_BREAKERS
        if vocabulary and self._uses_dry:
            breakers = vocabulary.sequence_breakers(tuple(self.dry_sequence_breakers))
        numbers: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING if name not in _NO_NUMBERS}
        return _core.Sampler(
            n_vocab, n_slots, dry_breakers=breakers, seed=seed, logit_bias=dict(self.logit_bias), **numbers
        )


SAMPLING: Mapping[str, Option] = {one.name: one.metadata["option"] for one in fields(SamplingParams)}
"""The options of sampling."""
TABLE: Mapping[str, Option] = {**SAMPLING, **GENERATION}
"""The table: all options of a generation, by the names of their fields."""
_NO_NUMBERS = ("logit_bias", "dry_sequence_breakers")


class Coins:
    """The random numbers of one generation: stream `seed` of the counter-based generator, in order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._next = 0

    def draw(self, n: int) -> list[float]:
        """Return the next `n` coins, numbers in [0, 1)."""
        coins = _core.coins(self.seed, self._next, n)
        self._next += n
        return coins
