"""The engine's options for a request: how its texts are sampled, how long they may be, and their seeds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_schema import ChatRequest, CompletionRequest, GenerationRequest
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import SAMPLING, SamplingParams
from edgespec.llama.weights import Model

DEFAULT_MAX_TOKENS = 16
"""Default max_tokens of /v1/completions, as in OpenAI's API."""


_REQUEST_NAMES = {
    name: option.request_name(name) for name, option in SAMPLING.items() if name != "logit_bias"
}


def read_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that were given, where other servers take more values for one."""
    return {
        name: read(value) if (read := SAMPLING[name].read) else value
        for name, value in given.items()
        if value is not None
    }


def engine_options(request: GenerationRequest, model: Model, n_predict: int | None) -> Options:
    """Return the options of a request's first text, which may have `n_predict` tokens. Raises ApiError."""
    return Options(
        params=SamplingParams(**_sampling(request, model)),
        n_predict=n_predict,
        stop=request.stop or (),
        stop_tokens=request.stop_token_ids or (),
        seed=None if request.seed is None else request.seed % (1 << 64),  # OpenAI's may be negative
        drafter=request.speculative.drafter if request.speculative else None,
        gamma=request.speculative.gamma if request.speculative else None,
    )


def _sampling(request: GenerationRequest, model: Model) -> dict[str, Any]:
    given = read_sampling({name: getattr(request, named) for name, named in _REQUEST_NAMES.items()})
    if request.repetition_penalty is not None:
        if given.get("repeat_penalty", request.repetition_penalty) != request.repetition_penalty:
            raise _contradiction("repetition_penalty", "repeat_penalty")
        given["repeat_penalty"] = request.repetition_penalty
        given.setdefault("penalty_last_n", -1)
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    if request.ignore_eos:
        bias |= dict.fromkeys(model.eog_tokens, -math.inf)
    if bias:
        given["logit_bias"] = bias
    return given


def requested_tokens(request: GenerationRequest) -> int | None:
    """Return how many tokens a request asks for; None: as many as the context holds. Raises ApiError."""
    given = {"max_tokens": request.max_tokens, "n_predict": request.n_predict}
    if isinstance(request, ChatRequest):
        given["max_completion_tokens"] = request.max_completion_tokens
    name, asked = _one_of(given)
    if asked is None:
        return DEFAULT_MAX_TOKENS if isinstance(request, CompletionRequest) else None
    if (
        asked == 0
        and isinstance(request, ChatRequest | CompletionRequest)
        and not getattr(request, "echo", None)
    ):
        line = "must be at least 1; 0 is for a text completion with echo, its prompt alone"
        raise ApiError(400, line, field=name)
    return None if asked < 0 else asked


def requested_thoughts(request: ChatRequest) -> int | None:
    """Return the most tokens of a thought that a request asks for; None: it does not say. Raises ApiError."""
    names = ("reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
    return _one_of({name: getattr(request, name) for name in names})[1]


def _one_of(given: Mapping[str, int | None]) -> tuple[str, int | None]:
    """Return the name and the value that was given; all below 0 are alike. Raises ApiError for several."""
    named = {name: value for name, value in given.items() if value is not None}
    if len({max(-1, value) for value in named.values()}) > 1:
        raise _contradiction(*[*named][1::-1])
    return next(iter(named.items()), ("", None))


def _contradiction(name: str, other: str) -> ApiError:
    return ApiError(400, f"is another name of {other}, which has another value: leave one out", field=name)


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Return the seed of a request's choice number `index`: the first has the request's own."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big")
