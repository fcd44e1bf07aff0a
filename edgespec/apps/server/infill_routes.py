"""llama-server's route /infill, and its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.choice_writers import AnswerText
from edgespec.apps.server.infill_schema import (
    InfillAnswer,
    InfillPart,
    InfillRequest,
    InfillTimings,
    StopType,
)
from edgespec.apps.server.openapi import stream_responses
from edgespec.apps.server.request_reader import PreparedRequest, PreparedText, RequestReader, Service
from edgespec.apps.server.response_schema import Usage
from edgespec.apps.server.streaming import Answerer, AnswerWriter, with_warnings
from edgespec.decoding.records import Result, StopReason, Token
from edgespec.llama.weights import Model


def add_infill(
    app: FastAPI, target: Model, service: Service, reader: RequestReader, answerer: Answerer
) -> None:
    """Add the route to `app`."""

    @app.post("/infill", response_model=InfillAnswer | dict[str, Any], responses=stream_responses(InfillPart))
    async def infill(request: Request, body: InfillRequest) -> Response:
        """Write what stands between two texts, as llama-server does."""
        text = await run_in_threadpool(reader.infill, body)
        writer = InfillWriter(body, service.name, AnswerText(target, keeps_tokens=False), text)
        found = await answerer.answer(
            request, PreparedRequest((text,)), writer, streams=bool(body.stream), user=body.user
        )
        return with_warnings(found, body.warnings)


class InfillWriter(AnswerWriter[Token, Result]):
    """Turns the tokens of a text into llama-server's answer."""

    def __init__(
        self, request: InfillRequest, model: str, written: AnswerText, prepared: PreparedText
    ) -> None:
        """Begin the answer to `request` by `model`."""
        self._request, self._model, self._written = request, model, written
        self._prepared = prepared
        self._reads_only = request.n_predict == 0
        self._n = 0

    def add(self, index: int, tokens: Sequence[Token]) -> str:
        """Return the event of `tokens`, if they have text."""
        text = "" if self._reads_only else self._written.add(tokens)
        self._n += len(tokens)
        if not text:
            return ""
        n_prompt = len(self._prepared.tokens)
        part = InfillPart(content=text, tokens_predicted=self._n, tokens_evaluated=n_prompt)
        return f"data: {part.model_dump_json()}\n\n"

    def finish(self, index: int, result: Result) -> str:
        """Return the last event."""
        return f"data: {self._end(result, streamed=True)}\n\n"

    def collect(self, index: int, tokens: Sequence[Token]) -> None:
        """Add `tokens`."""
        if not self._reads_only:
            self._written.add(tokens)

    def whole(self, results: Sequence[Result]) -> str:
        """Return the answer."""
        return self._end(results[0], streamed=False)

    def _end(self, result: Result, *, streamed: bool) -> str:
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
            truncated=self._prepared.is_cut,
            stop_type=_stop_type(result.stop_reason, has_stops=bool(stops)),
            stopping_word=word if result.stop_reason == "stop" else "",
            timings=InfillTimings(
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
        return json.dumps(_picked(whole, wanted) if wanted else whole, ensure_ascii=False)


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
