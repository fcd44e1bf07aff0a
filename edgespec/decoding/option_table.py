"""The table of a generation's options: a row describes an option for everything that offers it.

The rows of sampling are the metadata of the fields of `SamplingParams`, the others are below;
`sampling.TABLE` has all by name. From it come the command line's options (cli/groups.py), the fields of
requests (server/request_fields.py, server/ollama_api.py), the names in errors, and docs/options.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import msgspec

from edgespec.errors import UsageError, check_number, whole_number

MAX_GAMMA = 32
"""Most tokens drafted per step."""
MAX_LOGPROBS = 20
"""Most likeliest tokens that can be asked for per position."""
LARGEST_INT = (1 << 31) - 1


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of options: help, bounds and names, for every place that takes it."""

    help: str
    limits: tuple[float, float] | None = None
    """Bounds, both included; None: the value is no number."""
    whole: bool = True
    """Whether it is a whole number."""
    above: bool = False
    """Whether the lower bound itself is refused."""
    gap: float = 0.0
    """Values between 0 and this are refused."""
    default: str = ""
    """The default in words, where it is no value."""
    command: str = ""
    """Its name in the command line, if that is not the field's."""
    metavar: str | None = None
    parse: Callable[[list[str]], Any] | None = None
    """Reads the values of an option that may be given several times."""
    request: str = ""
    """Its name in OpenAI's or llama-server's requests, if that is not the field's; "-": it has none there."""
    request_bounds: tuple[float, float] | None = None
    """Narrower bounds there, or wider ones."""
    read: Callable[[float], float] | None = None
    """Reads a number of a request: where other servers take one that is refused here."""
    ollama: str = ""
    """Its name in Ollama's requests; "": it has none there."""

    @property
    def bounds(self) -> str:
        """The allowed values, in words."""
        if self.limits is None:
            return ""
        least, most = map(_number, self.limits)
        if self.limits[1] == math.inf:
            return f"{least} or more"
        if self.above:
            return f"above {least} and at most {most}"
        return f"{least}, or {_number(self.gap)} to {most}" if self.gap else f"{least} to {most}"

    def command_name(self, name: str) -> str:
        """Return the command-line name of the option whose field is called `name`."""
        return self.command or f"--{name.replace('_', '-')}"

    def request_name(self, name: str) -> str:
        """Return its name in OpenAI's or llama-server's requests."""
        return self.request or name

    def check(self, name: str, value: Any) -> Any:  # noqa: ANN401 - what a user gives
        """Return the value of the option called `name`, whole numbers as int. Raises UsageError."""
        if self.limits is None:
            return value
        least, most = self.limits
        if self.whole:
            value = whole_number(name, value)
        else:
            check_number(name, value)
        is_good = least < value <= most if self.above else least <= value <= most
        if not is_good or 0 < value < self.gap:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"must be {self.bounds}", field=name, value=shown)
        return value


def option(
    value: Any,  # noqa: ANN401 - of any type
    text: str,
    limits: tuple[float, float] | None = None,
    **columns: Any,  # noqa: ANN401 - others of `Option`
) -> Any:  # noqa: ANN401 - as of `field`
    """Return the dataclass field of an option: its default (or factory), help and bounds."""
    row = Option(help=text, limits=limits, whole=isinstance(value, int), **columns)
    made: dict[str, Any] = {"default_factory" if value is dict else "default": value}
    return field(**made, metadata={"option": row})


def check_fields(options: object, rows: Mapping[str, Option]) -> None:
    """Check the values of a frozen dataclass. Raises UsageError."""
    for name, option in rows.items():
        object.__setattr__(options, name, option.check(name, getattr(options, name)))


def _number(value: float) -> str:
    powers: dict[float, str] = {
        LARGEST_INT: "2^31 - 1",
        (1 << 64) - 1: "2^64 - 1",
        -(1 << 31): "-2^31",
        -(1 << 63): "-2^63",
    }
    return powers.get(value) or f"{value:g}"


GENERATION: Mapping[str, Option] = {
    "seed": Option(
        help="Same seed, same text, whatever is drafted.",
        limits=(0, (1 << 64) - 1),
        default="random",
        request_bounds=(-(1 << 63), (1 << 64) - 1),
        ollama="seed",
    ),
    "n_predict": Option(
        help="Most tokens of the answer; -1: to its end.",
        limits=(1, math.inf),
        request="max_tokens",
        ollama="num_predict",
    ),
    "reasoning_budget": Option(
        help="Most tokens of a model's thoughts, then it answers; 0: no thoughts, -1: no limit.",
        limits=(-1, LARGEST_INT),
        metavar="N",
    ),
    "stop": Option(help="Stop before this text; may be repeated.", ollama="stop"),
    "stop_tokens": Option(
        help="Token ids that end the text and are not part of it.", command="-", request="stop_token_ids"
    ),
    "drafter": Option(
        help="What drafts: the model, the head in the target's own file (mtp), text seen before "
        "(suffix), the model helped by it (staged), nothing, or what pays at each step (auto).",
        default="auto",
        request="speculative.drafter",
    ),
    "gamma": Option(
        help="Tokens drafted a step.",
        limits=(0, MAX_GAMMA),
        default="what pays",
        request="speculative.gamma",
        ollama="draft_num_predict",
    ),
    "rule": Option(
        help="Acceptance rule; all are exact.",
        default="match with --seed or at temperature 0, else block",
        request="-",
    ),
    "lenience": Option(
        help="Accept drafted tokens that the target likes L times as much as the exact rule wants.",
        limits=(0, 1),
        whole=False,
        above=True,
        metavar="L",
        default="1: exact",
        request="-",
    ),
    "lora": Option(
        help="LoRA adapter of the target; may be repeated. Requests scale each by its number.",
        metavar="FILE[:SCALE]",
        default="scale 1",
    ),
    "n_logprobs": Option(
        help="Likeliest tokens whose logarithms of probabilities come beside each token's own.",
        limits=(0, MAX_LOGPROBS),
        command="-",
        request="top_logprobs",
    ),
}
"""The options besides those of sampling."""
