"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any
from weakref import WeakValueDictionary

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.choice_writers import AnswerHead, AnswerText, ChatChoiceWriter
from edgespec.apps.server.json_routes import refuse_routes, route_class
from edgespec.apps.server.request_options import read_sampling
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader, Service
from edgespec.apps.server.responses.input_items import Order, input_page
from edgespec.apps.server.responses.request_reader import PreparedResponse, ResponsesReader
from edgespec.apps.server.responses.request_schema import (
    ENCRYPTED,
    ITEMS,
    ResponsesRequest,
    SearchDefinition,
)
from edgespec.apps.server.responses.response_schema import (
    DeletedResponse,
    InputItemList,
    ResponseAnswer,
    new_id,
)
from edgespec.apps.server.responses.store import ResponseStore, StoredResponse
from edgespec.apps.server.responses.writer import ResponseWriter, dumped, dumped_answer
from edgespec.apps.server.streaming import Answerer, with_warnings
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.platform.messages import MessageFn

_PATH = "/v1/responses"
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "data"],
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'The answer; with "stream": true its events, the last of which has all of it.',
        "content": {ResponseWriter.media_type: {"schema": _EVENT}},
    }
}


_NO_COMPACTION = 'compact is not here: "truncation": "auto" leaves out the oldest turns instead'


def add_responses(
    app: FastAPI,
    engine: Engine,
    service: Service,
    reader: RequestReader,
    answerer: Answerer,
    *,
    log: MessageFn,
) -> None:
    """Add the routes to `app`; `log` takes a line for each failure that is not the client's fault."""
    store = ResponseStore()
    under_way: WeakValueDictionary[str, ResponseWriter] = WeakValueDictionary()
    own, fingerprint = ResponsesReader(reader, service, store), service.fingerprint(engine)

    @app.post(_PATH, response_model=ResponseAnswer, responses=_EVENTS)
    async def create(request: Request, body: ResponsesRequest) -> Response:
        prepared = await run_in_threadpool(own.read, body)
        begun = _begun(body, service.name)

        def keep(answer: ResponseAnswer) -> None:
            if answer.store:
                store.put(answer.id, _stored(answer, prepared))

        text = prepared.text
        head = AnswerHead(begun.id, begun.created_at, service.name, fingerprint)
        written = AnswerText(engine.target, keeps_tokens=body.wants_logprobs)
        writer = ResponseWriter(
            begun,
            ChatChoiceWriter(head, written, text.answer),
            prepared.tools,
            keep,
            seals=ENCRYPTED in (body.include or ()),
            warnings=text.warnings,
        )
        if body.stream:
            under_way[begun.id] = writer  # nobody else knows the id before the end
        found = await answerer.answer(
            request, PreparedRequest((text,)), writer, streams=bool(body.stream), user=body.user
        )
        return with_warnings(found, text.warnings)

    add_stored(app, store)

    async def cancel(response_id: str) -> Response:
        """End a response that is being written; one that has ended is returned as it is."""
        writer = under_way.get(response_id)
        if writer and writer.cancel():
            return Response(writer.answer, media_type=writer.whole_type)
        return _whole(store.get(response_id, "response_id"))

    app.router.add_api_route(
        _PATH + "/{response_id}/cancel",
        cancel,
        methods=["POST"],
        response_model=ResponseAnswer,
        route_class_override=route_class(log, any_type=True),  # there is no body
    )
    refuse_routes(app, [_PATH + "/compact"], _NO_COMPACTION)


def add_stored(app: FastAPI, store: ResponseStore) -> None:
    """Add to `app` the routes that read and delete the responses in `store`, and list their input."""

    @app.get(_PATH + "/{response_id}", response_model=ResponseAnswer)
    async def retrieve(response_id: str, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise ApiError(400, "stream: a stored response comes as a whole: leave it out", param="stream")
        return _whole(store.get(response_id, "response_id"))

    @app.get(_PATH + "/{response_id}/input_items", response_model=InputItemList)
    async def input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
        after: str | None = None,
    ) -> Response:
        """Return the items that a stored response answers, those of the responses before it included."""
        page = input_page(store.get(response_id, "response_id"), order, limit, after)
        return Response(page.model_dump_json(exclude_none=True), media_type=ResponseWriter.whole_type)

    @app.delete(_PATH + "/{response_id}")
    async def delete(response_id: str) -> DeletedResponse:
        """Forget a stored response."""
        store.delete(response_id)
        return DeletedResponse(id=response_id)


def _begun(body: ResponsesRequest, model: str) -> ResponseAnswer:
    """Return the answer to `body` before its first token."""
    sampling = SamplingParams(**read_sampling(body.model_dump(include={"temperature", "top_p"})))
    choice = body.tool_choice or "auto"
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    tools = [tool for tool in body.tools or () if not isinstance(tool, SearchDefinition)]
    return ResponseAnswer(
        id=new_id("resp"),
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None, "summary": None} | (_given(body.reasoning) if body.reasoning else {}),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=sampling.temperature,
        text=text | (_given(body.text) if body.text else {}),
        tool_choice=choice if isinstance(choice, str) else _given(choice),
        tools=[_given(tool) for tool in tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _whole(found: StoredResponse) -> Response:
    return Response(found.answer, media_type=ResponseWriter.whole_type)


def _given(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_none=True)


def _stored(answer: ResponseAnswer, prepared: PreparedResponse) -> StoredResponse:
    """Return what is kept of a response: itself, and the conversation that it ends."""
    output = ITEMS.validate_python([dumped(item) for item in answer.output])
    items = [*prepared.items, *((made.id, item) for made, item in zip(answer.output, output, strict=True))]
    whole = json.dumps(dumped_answer(answer), ensure_ascii=False)
    n_bytes = len(whole.encode()) + sum(len(item.model_dump_json().encode()) for _, item in items)
    return StoredResponse(whole, items, len(prepared.items), n_bytes)
