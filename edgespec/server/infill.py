"""llama-server's `/infill`: what a request has, and what an answer says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from edgespec.decoding.records import Result, StopReason, Token
from edgespec.server.answers import DraftUsage, Usage
from edgespec.server.fields import RequestPart
from edgespec.server.schema import Sampled
from edgespec.server.writing import Written

StopType = Literal["none", "eos", "limit", "word"]
IN_PART = {
    "samplers": "samplers are applied in llama.cpp's default order",
}
"""Fields that editors always send, and what is done of them."""


class OtherFile(RequestPart):
    """A part of another file of the project."""

    text: str
    filename: str | None = None
    time: Any = Field(None, description="llama.vim's; changes nothing.")


class InfillRequest(Sampled):
    """The body of POST /infill: the text before the cursor is `input_prefix`, then `prompt`."""

    model: str = Field("edgespec", description="The model that is served.")
    input_prefix: str
    input_suffix: str
    input_extra: list[OtherFile] | None = None
    prompt: str | None = None
    n_predict: int | None = Field(
        None, ge=-1, description="-1, the default: what the context holds; 0: the prompt is only read."
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
        """What of it is done only in part."""
        return tuple(line for name, line in IN_PART.items() if getattr(self, name))


class Timings(BaseModel):
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
    timings: Timings
    edgespec: DraftUsage


class InfillWriting:
    """Turns the tokens of a text into llama-server's answer."""

    def __init__(
        self, request: InfillRequest, model: str, written: Written, n_prompt: int, *, is_cut: bool
    ) -> None:
        """Begin the answer to `request` by `model`; `is_cut`: not all of its text is in the prompt."""
        self._request, self._model, self._written = request, model, written
        self._n_prompt, self._is_cut = n_prompt, is_cut
        self._reads_only = request.n_predict == 0
        self._n = 0

    def add(self, tokens: Sequence[Token]) -> InfillPart | None:
        """Return the event of `tokens`, if they have text."""
        text = "" if self._reads_only else self._written.add(tokens)
        self._n += len(tokens)
        if not text:
            return None
        return InfillPart(content=text, tokens_predicted=self._n, tokens_evaluated=self._n_prompt)

    def end(self, result: Result, *, streamed: bool) -> dict[str, Any]:
        """Return the answer, or the last event of a stream."""
        n = 0 if self._reads_only else len(result.token_ids)
        stats = result.stats
        decoding_s = max(0.0, stats.total_s - (stats.ttft_s or stats.total_s))
        stops = self._request.stop or []
        word = stops if isinstance(stops, str) else stops[0] if len(stops) == 1 else ""
        answer = InfillAnswer(
            content="" if streamed else self._written.text,
            model=self._model,
            tokens_predicted=n,
            tokens_evaluated=result.prompt_tokens,
            tokens_cached=result.prompt_tokens + n,
            has_new_line="\n" in self._written.text,
            truncated=self._is_cut,
            stop_type=_stop_type(result.stop_reason, has_stops=bool(stops)),
            stopping_word=word if result.stop_reason == "stop" else "",
            timings=Timings(
                cache_n=result.n_cached,
                prompt_n=result.prompt_tokens - result.n_cached,
                prompt_ms=1e3 * stats.prefill_s,
                prompt_per_token_ms=_each_ms(stats.prompt_tokens_per_s),
                prompt_per_second=stats.prompt_tokens_per_s,
                predicted_n=n,
                predicted_ms=1e3 * decoding_s,
                predicted_per_token_ms=_each_ms(stats.generation_tokens_per_s),
                predicted_per_second=stats.generation_tokens_per_s,
            ),
            edgespec=Usage.of(result, warnings=self._request.warnings).edgespec,
        )
        whole = answer.model_dump()
        if not answer.edgespec.warnings:
            del whole["edgespec"]["warnings"]
        wanted = self._request.response_fields
        return _picked(whole, wanted) if wanted else whole


def time_limit(milliseconds: int) -> Callable[[], Callable[[Token], bool]]:
    """Return what ends a text so long after its first token, once it has a line break (`Options.until`)."""

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


def _each_ms(rate: float | None) -> float | None:
    return 1e3 / rate if rate else None


def _stop_type(reason: StopReason, *, has_stops: bool) -> StopType:
    if reason == "eog":
        return "eos"
    return "word" if reason == "stop" and has_stops else "limit"


def _picked(answer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of these names, of which one such as `timings/prompt_n` is in another."""
    found: dict[str, Any] = {}
    for name in names:
        value: Any = answer
        for step in name.split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
