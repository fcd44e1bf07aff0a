"""Requests to llama-server's `/infill`, and the parts of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

from edgespec.apps.server.request_fields import RequestPart
from edgespec.apps.server.request_schema import GenerationRequest, TokenLimit
from edgespec.apps.server.response_schema import DraftUsage
from edgespec.decoding.records import Token

StopType = Literal["none", "eos", "limit", "word"]


class OtherFile(RequestPart):
    """A part of another file of the project."""

    text: str
    filename: str | None = None
    time: Any = Field(None, description="llama.vim's; changes nothing.")


class InfillRequest(GenerationRequest):
    """The body of POST /infill: the text before the cursor is `input_prefix`, then `prompt`."""

    model: str = Field("edgespec", description="The model that is served.")
    input_prefix: str
    input_suffix: str
    input_extra: list[OtherFile] | None = None
    prompt: str | None = None
    n_predict: TokenLimit = Field(
        None, description="-1, the default: what the context holds; 0: the prompt is only read."
    )
    n: Literal[1] | None = None
    samplers: list[str] | None = Field(None, description="In part: their order is llama.cpp's default.")
    t_max_predict_ms: int | None = Field(
        None, ge=0, description="Time after the first token in which new lines may be begun; 0: no limit."
    )
    response_fields: list[str] | None = Field(
        None, description="The fields of the answer to send, such as timings/prompt_n."
    )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines on what is done only in part."""
        return ("samplers are applied in llama.cpp's default order",) if self.samplers else ()


class InfillTimings(BaseModel):
    """How long an answer took, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class InfillPart(BaseModel):
    """An event of a stream, before the last."""

    index: Literal[0] = 0
    content: str
    tokens: list[int] = []
    stop: Literal[False] = False
    id_slot: int = 0
    tokens_predicted: int
    tokens_evaluated: int


class InfillAnswer(BaseModel):
    """The answer of /infill, and the last event of a stream, whose content came before."""

    index: Literal[0] = 0
    content: str
    tokens: list[int] = []
    stop: Literal[True] = True
    id_slot: int = 0
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    has_new_line: bool
    truncated: bool = Field(description="Whether a part of the text was left out of the prompt.")
    stop_type: StopType
    stopping_word: str
    timings: InfillTimings
    edgespec: DraftUsage


def time_limit(milliseconds: int) -> Callable[[], Callable[[Token], bool]]:
    """Return the time limit of a text with a line break, counted from its first token (`Options.until`)."""

    def begin() -> Callable[[Token], bool]:
        deadline = 0.0
        has_line = False

        def is_last(token: Token) -> bool:
            nonlocal deadline, has_line
            now = time.monotonic()
            deadline = deadline or now + milliseconds / 1e3
            has_line = has_line or "\n" in token.text
            return has_line and now > deadline

        return is_last

    return begin
