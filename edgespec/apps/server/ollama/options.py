"""Ollama's `options`: each is honoured, or changes no text, or is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
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


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options `given` as fields of the engine's `Options`, and `n_ctx`, None for the server's.

    Raises ApiError for an option that cannot be honoured.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if values.get("mirostat"):
        raise _fault("mirostat", "mirostat is not here: leave it out, or send 0")
    ignore(f"options.{name}" for name in values if name not in HONOURED)
    stop = values.pop("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise _fault("stop", "must be a list of strings")
    if "" in stop:
        raise _fault("stop", "an empty string would stop at once")
    for name in values.keys() & HONOURED.keys():
        values[name] = _number(name, values[name], is_whole=HONOURED[name])
    n_ctx, n_predict, seed = values.get("num_ctx"), values.get("num_predict", -1), values.get("seed", -1)
    if n_ctx is not None and n_ctx < 1:
        raise _fault("num_ctx", "must be 1 or more")
    if n_predict not in (-1, -2) and n_predict < 1:  # -1: without end, -2: until the context is full
        raise _fault("num_predict", "must be 1 or more, or -1 for as many as the context holds")
    sampling = {name: values.get(option.ollama) for name, option in SAMPLING.items()}
    try:
        params = SamplingParams(**{**DEFAULTS, **read_sampling(sampling)})
    except UsageError as error:
        raise field_error(error, f"options.{SAMPLING[error.field].ollama}") from None
    return {
        "params": params,
        "n_predict": None if n_predict < 0 else n_predict,
        "n_ctx": n_ctx,
        "seed": None if seed == -1 else seed % (1 << 64),
        "stop": tuple(stop),
        "gamma": values.get("draft_num_predict"),
    }


def _number(name: str, value: Any, *, is_whole: bool) -> float:  # noqa: ANN401 - JSON
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (is_whole and value != int(value)):
        raise _fault(name, f"must be {'an integer' if is_whole else 'a number'}")
    return int(value) if is_whole else value


def _fault(name: str, problem: str) -> ApiError:
    return ApiError(400, problem, field=f"options.{name[:80]}")
