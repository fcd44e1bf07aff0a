"""The route of `edgespec run`: a generation of the server's engine, as local_run.py describes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_reader import PreparedRequest, PreparedText
from edgespec.apps.server.streaming import Answerer, AnswerWriter
from edgespec.cli.local_run import PATH, RunPart, RunRequest, write_part
from edgespec.decoding.grammar.grammar import Grammar
from edgespec.decoding.grammar.source import GrammarSource
from edgespec.decoding.options import Options
from edgespec.decoding.records import PromptProgress, Result, StopReason, Token
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.capacity import fitting_ctx, room_without_limit
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError


class RunWriter(AnswerWriter[Token, Result]):
    """Writes an answer as lines of RunPart."""

    media_type = "application/x-ndjson"

    def __init__(self, prompt: Sequence[int], *, limit: StopReason) -> None:
        """Answer to the tokens of a prompt; `limit`: what ends a text of `n_predict` tokens."""
        self._prompt = tuple(prompt)
        self._limit = limit

    def add(self, _index: int, made: Sequence[Token], /) -> str:
        """Return a line of tokens."""
        return write_part(RunPart(tokens=tuple((token.id, token.text, token.origin) for token in made)))

    def finish(self, _index: int, end: Result, /) -> str:
        """Return the last line."""
        if end.stop_reason == "length":
            end = replace(end, stop_reason=self._limit)
        end = replace(end, energy=None)  # measured unasked
        return write_part(RunPart(result=msgspec.Raw(msgspec.json.encode(end)), prompt=self._prompt))

    def idle(self, *, is_waiting: bool) -> str:
        """Return an empty line."""
        return "\n"

    def queued(self, place: int) -> str:
        """Return a line with the place in the queue."""
        return write_part(RunPart(queue=place))

    def reading(self, progress: PromptProgress) -> str:
        """Return a line with how far the prompt is read."""
        return write_part(RunPart(read=progress))

    def failed(self, error: ApiError) -> str:
        """Return the last line of an answer that failed."""
        return write_part(RunPart(error=str(error)))

    def collect(self, _index: int, made: Sequence[Token], /) -> None:
        """Do nothing: the answer always streams."""

    def whole(self, _ends: Sequence[Result], /) -> str:
        """Return nothing: the answer always streams."""
        return ""


def add_run(app: FastAPI, engine: Engine, answerer: Answerer) -> None:
    """Add the route; the gate lets in who has the key."""

    @app.post(PATH, include_in_schema=False)
    async def run(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=RunRequest)
            tokens, options = await run_in_threadpool(_prepared, engine, asked)
        except (msgspec.DecodeError, EdgespecError) as error:
            raise ApiError(400, str(error)) from None
        prepared = PreparedRequest((PreparedText(tokens, options),))
        writer = RunWriter(tokens, limit="context" if asked.n_predict is None else "length")
        return await answerer.answer(request, prepared, writer, streams=True, user="edgespec run")


def _prepared(engine: Engine, asked: RunRequest) -> tuple[list[int], Options]:
    """Return prompt and options. Raises EdgespecError for what an engine of its own would do otherwise."""
    bias = {token: -math.inf if value is None else value for token, value in asked.logit_bias.items()}
    fields = cast("dict[str, Any]", asked.params)
    tokens = engine.prompt_tokens(
        asked.prompt, system=asked.system, chat=asked.chat, parse_special=asked.special
    )
    n_train = engine.target.n_ctx_train
    n_predict = asked.n_predict or room_without_limit(engine.target.header, len(tokens))
    n_ctx, room = fitting_ctx(len(tokens), n_predict, n_train), engine.n_ctx_shared or n_train
    if len(tokens) >= n_ctx or n_ctx > room:
        raise EdgespecError(f"prompt and answer do not fit in its context of {room} tokens")
    options = Options(
        params=SamplingParams(**fields, logit_bias=bias),
        seed=asked.seed,
        n_predict=asked.n_predict or n_ctx - len(tokens),
        drafter=cast("Any", asked.drafter),
        gamma=asked.gamma,
        rule=cast("Any", asked.rule),
        stop=asked.stop,
        grammar=Grammar(engine.target, GrammarSource(*asked.grammar)) if asked.grammar else None,
    )
    return tokens, options
