"""The options of a generation: `Options`, which checks its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from edgespec.decoding.choices import DrafterChoice, DrafterName, NamedDrafter, Rule, Signal
from edgespec.decoding.option_table import GENERATION, check_fields
from edgespec.decoding.records import Token
from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import UsageError, check_choice, check_number, check_text, kind_of, whole_number

if TYPE_CHECKING:  # not at run time: a way to a server loads neither numpy nor llama.cpp
    from edgespec.decoding.grammars import Grammar

Span = int | Literal["rest"]
"""Number of tokens that the target writes when it is woken, or the rest of the text."""

SPAN = 16
"""Default span in tokens."""


@dataclass(frozen=True, slots=True)
class WakePolicy:
    """When a cascade's target is woken, and for how long. Raises UsageError for invalid values."""

    signal: Signal = "margin"
    threshold: float | None = None
    """Wake the target if the margin is at most this, or the entropy at least this; None: as calibrated. A
    margin of 0 or an entropy of infinity never wakes it; a margin of 1 or an entropy of 0 always does."""
    span: Span = SPAN

    def __post_init__(self) -> None:
        check_choice("signal", self.signal, Signal)
        if self.span != "rest" and (not isinstance(self.span, int) or self.span < 1):
            raise UsageError("must be 1 or more, or rest", field="span", value=self.span)
        if self.threshold is None:
            return
        if self.signal == "margin" and not 0.0 <= self.threshold <= 1.0:
            raise UsageError("a margin is 0 to 1", field="threshold", value=f"{self.threshold:g}")
        if self.signal == "entropy" and not self.threshold >= 0.0:  # nan too
            problem = "an entropy is 0 or more, in nats"
            raise UsageError(problem, field="threshold", value=f"{self.threshold:g}")

    def __str__(self) -> str:
        """Return when the target is woken, in words, such as "margin at most 0.4"."""
        if self.threshold is None:
            return f"{self.signal} as calibrated"
        limit = "at most" if self.signal == "margin" else "at least"
        return f"{self.signal} {limit} {self.threshold:g}"

    def wakes(self, value: float) -> bool:
        """Whether a position with this signal wakes the target; there is a threshold."""
        assert self.threshold is not None  # noqa: S101 - for the type checker: resolved before
        if self.signal == "entropy":
            return value >= self.threshold
        return self.threshold > 0.0 and value <= self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a generation.

    Two modes are lossy: with `cascade` the draft model writes, and wakes the target when it is unsure; with
    `lenience` below 1 the target accepts more than its distribution allows (docs/scheduler.md).

    Raises:
        UsageError: a value is out of range, or two contradict each other; the error names the field.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    """Seed of the random numbers; None: a random one."""
    n_predict: int | None = None
    """Most tokens; None: until the model ends the text, or the context is full."""
    reasoning_budget: int = -1
    """Most tokens of the thought that the answer begins with, for a model whose chat template knows thoughts;
    it is then ended, and the answer follows. -1: no limit."""
    drafter: DrafterChoice | None = None
    """Overrides the engine's drafter, for the models it loaded."""
    gamma: int | None = None
    """Tokens drafted per step, 0 for none; None: as many as pay."""
    rule: Rule | None = None
    """None: "match" if a seed is given or nothing is random, so that the seed decides the text; else mostly
    "block"."""
    stop: Sequence[str] = ()
    """Strings that end the text and are not part of it, or one such string."""
    stop_tokens: Sequence[int] = ()
    """Tokens that end the text, and are not part of it, as those that end a generation do."""
    until: Callable[[], Callable[[Token], bool]] | None = None
    """Makes the function that gets each token of a text and says whether it ends the text; None: none."""
    cascade: WakePolicy | None = None
    lenience: float = 1.0
    """A drafted token is accepted at this share of the probability that exactness asks for; 1 is exact."""
    grammar: Grammar | None = None
    """The grammar that the text must match (docs/structured.md)."""
    lora: Mapping[int, float] | None = None
    """Scales of the engine's adapters by number, those left out 0; None: as the engine was given them."""
    n_logprobs: int | None = None
    """Report the logarithm of each token's unfiltered probability under the target, and those of this many
    likeliest tokens; None: no logarithms."""
    prompt_logprobs: bool = False
    """Report such logarithms of the prompt's tokens too, `n_logprobs` each; nothing is drafted then, and
    `n_predict` may be 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "stop_tokens", tuple(token_ids("stop_tokens", self.stop_tokens)))
        left_out = {name for name in GENERATION if name != "lenience" and getattr(self, name) is None}
        if self.n_predict == 0 and self.prompt_logprobs:  # the prompt's are enough
            left_out.add("n_predict")
        check_fields(self, {name: row for name, row in GENERATION.items() if name not in left_out})
        if not isinstance(self.params, SamplingParams):
            raise UsageError("must be SamplingParams", field="params", value=self.params)
        for number, scale in (self.lora or {}).items():
            whole_number("lora", number)
            check_number("lora", scale)
        self._check_words()
        self._check_modes()

    def ends(self, is_eog: Callable[[int], bool]) -> Callable[[int], bool]:
        """Return a function that says whether a token ends the text; `is_eog`: the model's own."""
        stops = frozenset(self.stop_tokens)
        return (lambda token: token in stops or is_eog(token)) if stops else is_eog

    def changed(self, **keywords: Unpack[OptionKeywords]) -> Options:
        """Return a copy with other values; `params=None` means the default params."""
        if "params" in keywords and keywords["params"] is None:
            keywords["params"] = SamplingParams()
        return replace(self, **keywords)  # type: ignore[arg-type] # no None is left

    def _check_words(self) -> None:
        if "" in self.stop:
            raise UsageError("an empty string would stop at once", field="stop")
        if self.drafter is not None and not isinstance(self.drafter, NamedDrafter):
            check_choice("drafter", self.drafter, DrafterName)
        if self.rule is not None:
            check_choice("rule", self.rule, Rule)

    def _check_modes(self) -> None:
        if self.lenience < 1.0 and self.rule not in (None, "chain"):
            raise UsageError("contradicts a lenience below 1; leave it out", field="rule", value=self.rule)
        if self.prompt_logprobs and self.n_logprobs is None:
            raise UsageError("needs n_logprobs", field="prompt_logprobs")
        if not self.cascade:
            return
        for name in ("prompt_logprobs", "stop_tokens"):
            if getattr(self, name):
                raise UsageError("contradicts a cascade: choose one", field=name)
        if self.lenience < 1.0:
            problem = "contradicts a cascade: choose one"
            raise UsageError(problem, field="lenience", value=f"{self.lenience:g}")
        if self.rule not in (None, "match"):
            problem = "a cascade's target writes by the match rule; leave it out"
            raise UsageError(problem, field="rule", value=self.rule)
        if self.reasoning_budget >= 0:
            raise UsageError("contradicts a cascade: choose one", field="reasoning_budget")
        if self.grammar:
            raise UsageError("contradicts a cascade: choose one", field=self.grammar.name)


def token_ids(
    field: str, given: object, n_vocab: int | None = None, *, wanted: str = "a list of token ids"
) -> list[int]:
    """Return a list of token ids, which may be numpy integers. Raises UsageError for anything else.

    `n_vocab`: the number of the model's tokens, if known. `wanted`: the allowed values, for the error.
    """
    is_bytes = isinstance(given, (bytes, bytearray, memoryview))
    if is_bytes or isinstance(given, (str, Mapping, Set)) or not isinstance(given, Iterable):
        cure = "; decode them to text" if is_bytes else ""
        raise UsageError(f"must be {wanted}, not {kind_of(given)}{cure}", field=field)
    found: list[int] = []
    for i, token in enumerate(given):
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise UsageError(f"number {i} is a {type(token).__name__}, not a token id", field=field)
        if not 0 <= int(token) < (n_vocab or 1 << 31):
            known = "0 or more" if n_vocab is None else f"0 to {n_vocab - 1}"
            raise UsageError(f"no token {token}: the model's are {known}", field=field)
        found.append(int(token))
    return found


def _texts(field: str, given: Any) -> tuple[str, ...]:  # noqa: ANN401 - what a user gives
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, bytes, bytearray, memoryview))
    texts: tuple[Any, ...] = tuple(given) if is_list else (given,)
    for text in texts:
        check_text(field, text)
    return texts


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for the type checker, which compares in `changed`."""

    params: SamplingParams | None
    seed: int | None
    n_predict: int | None
    reasoning_budget: int
    drafter: DrafterChoice | None
    gamma: int | None
    rule: Rule | None
    stop: Sequence[str]
    stop_tokens: Sequence[int]
    until: Callable[[], Callable[[Token], bool]] | None
    cascade: WakePolicy | None
    lenience: float
    grammar: Grammar | None
    lora: Mapping[int, float] | None
    n_logprobs: int | None
    prompt_logprobs: bool
