"""Ollama's `options`: each is honoured, or changes no text, or is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import WithJsonSchema

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_options import LEAST_TEMPERATURE, LEAST_TOP_P
from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import UsageError

DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.0}
"""Ollama's defaults that differ from edgespec's: its clients expect them where they name none."""

HARMLESS: Mapping[str, str] = {
    "num_thread": "edgespec uses the cores it may use",
    "num_batch": "the size of a pass is chosen here",
    "num_gpu": "this server computes on the processor",
    "main_gpu": "this server computes on the processor",
    "low_vram": "this server computes on the processor",
    "numa": "the placement of memory is the machine's",
    "use_mmap": "the model is loaded already",
    "use_mlock": "the model is loaded already",
    "f16_kv": "the cache was made when the server started",
    "logits_all": "logprobs asks for probabilities",
    "num_keep": "nothing of a conversation is ever dropped",
    "mirostat_tau": "mirostat is off",
    "mirostat_eta": "mirostat is off",
}
"""Options that change no text here, with any value, and why."""

ONLY: Mapping[str, tuple[float, str]] = {
    "mirostat": (0, "mirostat is not here"),
    "tfs_z": (1, "tail-free sampling is not here"),
    "penalize_newline": (True, "a penalty is for all tokens"),
    "vocab_only": (False, "this server writes text"),
    "embedding_only": (False, "this server writes text"),
}
"""Options of which only the value that changes nothing is accepted, and the answer to any other."""

INTEGERS = ("num_predict", "num_ctx", "seed", "top_k", "repeat_last_n", "draft_num_predict")
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)
HONOURED = (*INTEGERS, *NUMBERS, "stop")
"""Options that do what they do in Ollama."""

OPTIONS_SCHEMA = WithJsonSchema(
    {"type": ["object", "null"], "properties": {name: {} for name in (*HONOURED, *HARMLESS, *ONLY)}}
)
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
    for name in values.keys() - set(HONOURED):
        _check_other(name, values[name])
    numbers = {name: _integer(name, values[name]) for name in INTEGERS if name in values}
    sampling = {name: _number(name, values[name]) for name in NUMBERS if name in values}
    seed = numbers.get("seed", -1)
    return ReadOptions(
        params=_params({**DEFAULTS, **sampling}, numbers),
        n_predict=_n_predict(numbers.get("num_predict", -1)),
        n_ctx=_n_ctx(numbers.get("num_ctx")),
        seed=None if seed == -1 else seed % (1 << 64),
        stop=_stop(values.get("stop", ())),
        gamma=numbers.get("draft_num_predict"),
    )


def _check_other(name: str, value: Any) -> None:  # noqa: ANN401 - JSON
    if name in HARMLESS:
        return
    if name not in ONLY:
        raise _fault(name, f"there is no such option; there are {', '.join(sorted(HONOURED))}")
    neutral, reason = ONLY[name]
    if value != neutral:
        shown = str(neutral).lower() if isinstance(neutral, bool) else f"{neutral:g}"
        raise _fault(name, f"{reason}: leave it out, or send {shown}")


def _params(sampling: dict[str, float], numbers: Mapping[str, int]) -> SamplingParams:
    if 0 <= sampling["temperature"] < LEAST_TEMPERATURE:
        sampling["temperature"] = 0.0
    if 0 <= sampling["top_p"] < LEAST_TOP_P:
        sampling["top_p"] = LEAST_TOP_P
    try:
        return SamplingParams(
            **sampling,  # type: ignore[arg-type] # its names are those of NUMBERS
            top_k=max(0, numbers.get("top_k", 40)),
            penalty_last_n=numbers.get("repeat_last_n", 64),
        )
    except UsageError as error:
        name = "repeat_last_n" if error.field == "penalty_last_n" else str(error.field)
        raise ApiError(400, error.spelled(f"options.{name}"), param="options") from None


def _n_predict(asked: int) -> int | None:
    if asked in (-1, -2):  # without end, and until the context is full: here both end with the context
        return None
    if asked < 1:
        raise _fault("num_predict", "must be 1 or more, or -1 for as many as the context holds")
    return asked


def _n_ctx(asked: int | None) -> int | None:
    if asked is not None and asked < 1:
        raise _fault("num_ctx", "must be 1 or more")
    return asked


def _stop(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise _fault("stop", "must be a list of strings")
    if "" in texts:
        raise _fault("stop", "an empty string would stop at once")
    return tuple(texts)


def _integer(name: str, value: Any) -> int:  # noqa: ANN401 - JSON
    number = _number(name, value, "an integer")
    if number != int(number):
        raise _fault(name, "must be an integer")
    return int(value)


def _number(name: str, value: Any, wanted: str = "a number") -> float:  # noqa: ANN401 - JSON
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fault(name, f"must be {wanted}")
    return value


def _fault(name: str, problem: str) -> ApiError:
    return ApiError(400, f"options.{name[:80]}: {problem}", param="options")
