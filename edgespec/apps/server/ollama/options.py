"""Ollama's `options`: each is honoured, or changes no text, or is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import WithJsonSchema

from edgespec.apps.server.api_errors import ApiError, field_error
from edgespec.apps.server.request_fields import ignore
from edgespec.apps.server.request_options import read_sampling
from edgespec.decoding.sampling import SAMPLING, TABLE, SamplingParams
from edgespec.errors import UsageError

DEFAULTS: Mapping[str, float] = {"top_p": 0.9, "min_p": 0.0}
"""Ollama's defaults that differ from edgespec's: its clients expect them where they name none."""

HONOURED = {
    **{option.ollama: option.whole for option in TABLE.values() if option.ollama},
    "num_ctx": True,
}
"""Options that do what they do in Ollama, and whether each is a whole number."""

OPTIONS_SCHEMA = WithJsonSchema({"type": ["object", "null"], "properties": {name: {} for name in HONOURED}})
"""Description of the options; `read_options` checks them."""


@dataclass(frozen=True)
class ReadOptions:
    """The options of a request, as the engine takes them."""

    params: SamplingParams
    n_predict: int | None
    """Most tokens; None: as many as the context holds."""
    n_ctx: int | None
    """Most tokens of prompt and answer together; None: the server's."""
    seed: int | None
    stop: tuple[str, ...]
    gamma: int | None
    """Tokens drafted a step; None: as many as pay."""


def read_options(given: Mapping[str, Any]) -> ReadOptions:
    """Return the options `given`. Raises ApiError for an option that cannot be honoured."""
    values = {name: value for name, value in given.items() if value is not None}
    if values.get("mirostat"):
        raise _fault("mirostat", "mirostat is not here: leave it out, or send 0")
    ignore(f"options.{name}" for name in values if name not in HONOURED)
    stop = _stop(values.pop("stop", ()))
    numbers: dict[str, Any] = {
        name: _number(name, values[name], is_whole=is_whole)
        for name, is_whole in HONOURED.items()
        if name in values
    }
    n_ctx = numbers.get("num_ctx")
    if n_ctx is not None and n_ctx < 1:
        raise _fault("num_ctx", "must be 1 or more")
    seed = numbers.get("seed", -1)
    return ReadOptions(
        params=_params(numbers),
        n_predict=_n_predict(numbers.get("num_predict", -1)),
        n_ctx=n_ctx,
        seed=None if seed == -1 else seed % (1 << 64),
        stop=stop,
        gamma=numbers.get("draft_num_predict"),
    )


def _params(numbers: Mapping[str, Any]) -> SamplingParams:
    given = {name: numbers.get(option.ollama) for name, option in SAMPLING.items()}
    try:
        return SamplingParams(**{**DEFAULTS, **read_sampling(given)})
    except UsageError as error:
        name = SAMPLING[error.field].ollama
        raise field_error(error, f"options.{name}") from None


def _n_predict(asked: int) -> int | None:
    if asked in (-1, -2):  # without end, and until the context is full: here both end with the context
        return None
    if asked < 1:
        raise _fault("num_predict", "must be 1 or more, or -1 for as many as the context holds")
    return asked


def _stop(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise _fault("stop", "must be a list of strings")
    if "" in texts:
        raise _fault("stop", "an empty string would stop at once")
    return tuple(texts)


def _number(name: str, value: Any, *, is_whole: bool) -> float:  # noqa: ANN401 - JSON
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (is_whole and value != int(value)):
        raise _fault(name, f"must be {'an integer' if is_whole else 'a number'}")
    return int(value) if is_whole else value


def _fault(name: str, problem: str) -> ApiError:
    return ApiError(400, problem, field=f"options.{name[:80]}")
