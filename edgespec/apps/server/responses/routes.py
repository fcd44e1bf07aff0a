"""The routes of OpenAI's Responses API: answers as responses, whole or as events, and kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.answer_events import AnswerCall, AnswerEvent, EventWriter
from edgespec.apps.server.json_routes import refuse_routes
from edgespec.apps.server.request_options import read_sampling
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader
from edgespec.apps.server.response_schema import Usage
from edgespec.apps.server.responses.request_reader import (
    count_tokens,
    custom_input,
    read_response,
    read_tools,
    sealed,
)
from edgespec.apps.server.responses.schema import ENCRYPTED, ResponsesRequest, SearchDefinition
from edgespec.apps.server.responses.store import PATH, KeepingResponses, ResponseStore, new_id
from edgespec.apps.server.streaming import ALIVE_S, Answerer
from edgespec.decoding.records import PromptProgress
from edgespec.decoding.sampling import SamplingParams
from edgespec.llama.weights import Model

# ---- answers ----

Event = dict[str, Any]
"""An event with its type; parts of it change as the answer goes on."""


class ResponseWriter(EventWriter):
    """Writes an answer as a response, whole or as events."""

    def __init__(self, body: ResponsesRequest, request: PreparedRequest, model: Model, name: str) -> None:
        """Begin the answer to `body` of the `model` that is served as `name`."""
        super().__init__(request, model, keeps_tokens=body.wants_logprobs)
        self._answer = _begun(body, name)
        self._tools = read_tools(body).offered
        self._seals = ENCRYPTED in (body.include or ())
        self._item: dict[str, Any] = {}  # the last one of the output
        self._part: dict[str, Any] = {}  # its text
        self._called: AnswerCall | None = None  # the last call
        self._n_events = 0
        self._spoke = time.monotonic()

    def begin(self) -> str:
        """Return the events that begin a stream, before any item."""
        return "".join(self.encode(self._about(status)) for status in ("created", "in_progress"))

    def write(self, event: AnswerEvent) -> Iterator[Event]:
        """Yield the events of a part of the answer, or of its end."""
        logprobs = self.logprobs(event.tokens)
        if event.kind == "thought":
            yield from self._add("reasoning", event.text)
        elif event.kind == "text" or (logprobs and self._item.get("type") == "message"):
            yield from self._add("message", event.text, logprobs)
        if event.call:
            yield from self._call(event.call)
        if event.kind == "end":
            yield from self._last(cut=event.reason == "length")

    def _last(self, *, cut: bool) -> Iterator[Event]:
        """Yield the events that end the last item and the stream; `cut`: the limit of tokens ended it."""
        answer = self._answer
        if not self._item:
            yield from self._add("message", "")
        yield from self._end_item(cut=cut)
        answer["status"] = "incomplete" if cut else "completed"
        if cut:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            answer["completed_at"] = int(time.time())
        answer["usage"] = _usage(self.usage(), n_thought=self.texts[0].n_thought or 0)
        yield self._about(answer["status"])

    def encode(self, part: Event) -> str:
        """Return a server-sent event, numbered."""
        name = part["type"]
        told = {"type": name, "sequence_number": self._n_events, **part}
        self._n_events += 1
        self._spoke = time.monotonic()
        return f"event: {name}\ndata: {json.dumps(told, ensure_ascii=False)}\n\n"

    def answer(self) -> dict[str, Any]:
        """Return the whole response."""
        return self._answer

    def idle(self, *, is_waiting: bool) -> str:
        """Return an event that says nothing new: for comments Codex would not wait longer than 5 minutes."""
        return self.encode(self._about("in_progress"))

    def reading(self, progress: PromptProgress) -> str:
        """Return a comment, and such an event where none has come for a while."""
        silent = time.monotonic() > self._spoke + ALIVE_S
        return super().reading(progress) + (self.idle(is_waiting=True) if silent else "")

    # ---- items ----

    def _add(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add text to the last item, or to a new one unless it is of this `kind`."""
        if self._item.get("type") != kind:
            if kind == "message":
                fields: dict[str, Any] = {"role": "assistant", "status": "in_progress"}
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            else:
                fields = {"status": "in_progress", "summary": []}
                part = {"type": "reasoning_text", "text": ""}
            yield from self._begin("msg" if kind == "message" else "rs", kind, **fields, content=[])
            self._part = part
            yield self._event("content_part.added", content_index=0, part=part)
            self._item["content"] = [part]
        self._part["text"] += text
        if kind == "message":
            self._part["logprobs"] += logprobs
            yield self._event("output_text.delta", content_index=0, delta=text, logprobs=[*logprobs])
        else:
            yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _call(self, call: AnswerCall) -> Iterator[Event]:
        tool = self._tools[call.name]
        names = {"call_id": call.id, "name": tool.name}
        if tool.namespace is not None:
            names["namespace"] = tool.namespace
        if tool.type == "custom":
            begun = self._begin("ctc", "custom_tool_call", status="in_progress", **names, input="")
        else:
            begun = self._begin("fc", "function_call", status="in_progress", **names, arguments="")
        yield from begun
        self._called = call
        if tool.type == "function" and call.arguments:
            self._item["arguments"] = call.arguments
            yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _begin(self, prefix: str, kind: str, **fields: Any) -> Iterator[Event]:  # noqa: ANN401 - JSON
        yield from self._end_item(cut=False)
        self._item = {"id": new_id(prefix), "type": kind, **fields}
        self._answer["output"].append(self._item)
        yield self._whole("added")

    def _end_item(self, *, cut: bool) -> Iterator[Event]:
        """End the last item, if there is one; `cut`: the limit of tokens ended it."""
        item, part = self._item, self._part
        kind = item.get("type")
        if kind == "message":
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("output_text.done", content_index=0, **told)
        elif kind == "reasoning":
            if self._seals:
                item["encrypted_content"] = sealed(part["text"])
            yield self._event("reasoning_text.done", content_index=0, text=part["text"])
        elif kind == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **told)
        elif self._called:  # the text of a custom tool comes as a whole
            if text := custom_input(self._called.arguments):
                item["input"] = text
                yield self._event("custom_tool_call_input.delta", delta=text)
            yield self._event("custom_tool_call_input.done", input=text)
        if "content" in item:
            yield self._event("content_part.done", content_index=0, part=part)
        if item:
            item["status"] = "incomplete" if cut else "completed"
            yield self._whole("done")

    # ---- events ----

    def _whole(self, name: str) -> Event:
        index = len(self._answer["output"]) - 1
        return {"type": f"response.output_item.{name}", "output_index": index, "item": self._item}

    def _event(self, name: str, /, **fields: Any) -> Event:  # noqa: ANN401 - JSON
        place = {"item_id": self._item["id"], "output_index": len(self._answer["output"]) - 1}
        return {"type": f"response.{name}", **place, **fields}

    def _about(self, status: str) -> Event:
        return {"type": f"response.{status}", "response": self._answer}


def _usage(usage: Usage, *, n_thought: int) -> dict[str, Any]:
    """Return `usage` in this API's words; `n_thought` tokens of the answer are thoughts."""
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    n_new = usage["prompt_tokens"] - n_cached
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": n_new},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": n_thought},
        "total_tokens": usage["total_tokens"],
        "edgespec": usage["edgespec"],
    }


# ---- routes ----


def add_responses(app: FastAPI, reader: RequestReader, answerer: Answerer, *, is_routed: bool) -> None:
    """Add the routes to `app`. `is_routed`: whoever passes its requests on keeps the responses."""
    answerer.serve(
        app,
        PATH,
        ResponsesRequest,
        partial(read_response, reader),
        lambda body, request: ResponseWriter(body, request, reader.model, reader.service.name),
    )

    @app.post(PATH + "/input_tokens")
    async def count(body: ResponsesRequest) -> dict[str, Any]:
        """Count the tokens of a request's prompt; nothing is answered."""
        n_tokens = await run_in_threadpool(count_tokens, reader, body)
        return {"object": "response.input_tokens", "input_tokens": n_tokens}

    if not is_routed:
        store = ResponseStore()
        app.add_middleware(KeepingResponses, store=store)

        @app.get(PATH + "/{response_id}", response_model=dict[str, Any])
        async def retrieve(response_id: str, stream: bool = False) -> Response:
            """Return a stored response."""
            return store.show(response_id, streams=stream)

    refuse_routes(app, [PATH + "/compact"], "compact is not here: send less")


def _begun(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the answer to `body` before its first token."""
    sampling = SamplingParams(**read_sampling(body.model_dump(include={"temperature", "top_p"})))
    choice = body.tool_choice or "auto"
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None} | _given(body.reasoning),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": text | _given(body.text),
        "tool_choice": choice if isinstance(choice, str) else _given(choice),
        "tools": [_given(tool) for tool in body.tools or () if not isinstance(tool, SearchDefinition)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
        "output": [],
        "usage": None,
    }


def _given(part: BaseModel | None) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_none=True) if part else {}
