"""The routes of OpenAI's Responses API: answers as responses, whole or as events, kept, and listed."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.choice_writers import (
    AnswerCall,
    AnswerPart,
    AnswerText,
    ChoiceWriter,
    token_logprob,
)
from edgespec.apps.server.json_routes import refuse_routes
from edgespec.apps.server.request_options import read_sampling
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader, Service
from edgespec.apps.server.response_schema import FinishReason, Usage
from edgespec.apps.server.responses.request_reader import (
    CustomInput,
    ResponsesReader,
    ResponseTool,
    sealed,
)
from edgespec.apps.server.responses.schema import (
    ENCRYPTED,
    IncompleteDetails,
    InputTokens,
    OutputCall,
    OutputCustomCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputThought,
    ResponseAnswer,
    ResponsesRequest,
    ResponseUsage,
    SearchDefinition,
    new_id,
)
from edgespec.apps.server.responses.store import PATH, KeepingResponses, ResponseStore
from edgespec.apps.server.streaming import ALIVE_S, Answerer, AnswerWriter, with_warnings
from edgespec.decoding.records import PromptProgress, Result, Token
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine

# ---- answers ----

Event = tuple[str, dict[str, Any]]
"""The name of an event, and its fields."""

Written = TypeVar("Written", OutputMessage, OutputReasoning, OutputCall, OutputCustomCall)


def dumped(part: BaseModel) -> dict[str, Any]:
    """Return a part of an answer as JSON."""
    return part.model_dump(mode="json", exclude_none=True)


def dumped_answer(answer: ResponseAnswer) -> dict[str, Any]:
    """Return a response as the object of JSON that is sent and stored."""
    made = answer.model_dump(mode="json", exclude={"output", "usage"})
    usage = answer.usage and answer.usage.model_dump(mode="json", exclude_unset=True)
    return made | {"output": [dumped(item) for item in answer.output], "usage": usage}


# ---- items ----


class ItemWriter(ABC, Generic[Written]):
    """Writes an item of the output; its methods yield events."""

    def __init__(self, item: Written, index: int) -> None:
        """Write `item`, the output's number `index`."""
        self.item: Written = item
        self._index = index

    def begin(self) -> Iterator[Event]:
        """Yield the events that begin the item."""
        yield self._whole("output_item.added")

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add `text`, in whose place the likeliest tokens were those of `logprobs`."""

    def end(self, *, cut: bool) -> Iterator[Event]:
        """End the item; `cut`: the limit of tokens ended it."""
        yield from self._last()
        self.item.status = "incomplete" if cut else "completed"
        yield self._whole("output_item.done")

    @abstractmethod
    def _last(self) -> Iterator[Event]:
        """Yield the events before the item's end."""

    def _whole(self, name: str) -> Event:
        return f"response.{name}", {"output_index": self._index, "item": dumped(self.item)}

    def _event(self, name: str, /, **fields: Any) -> Event:  # noqa: ANN401 - JSON
        return f"response.{name}", {"item_id": self.item.id, "output_index": self._index, **fields}


class OutputTextWriter(ItemWriter[OutputMessage]):
    """Writes the events of a message item: text for the user as it comes."""

    def begin(self) -> Iterator[Event]:
        """Begin the item and its only part."""
        yield from super().begin()
        self._part = OutputText()
        yield self._event("content_part.added", content_index=0, part=dumped(self._part))
        self.item.content = [self._part]

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Yield the events of more text, with the probabilities of its tokens if they were asked for."""
        self._part.text += text
        self._part.logprobs += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=[*logprobs])

    def _last(self) -> Iterator[Event]:
        part = dumped(self._part)
        told = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("output_text.done", content_index=0, **told)
        yield self._event("content_part.done", content_index=0, part=part)


class ThoughtWriter(ItemWriter[OutputReasoning]):
    """Writes the events of a reasoning item: thoughts as they come."""

    def __init__(self, item: OutputReasoning, index: int, *, seals: bool) -> None:
        """Write `item`; `seals`: its text comes as `encrypted_content`, too."""
        super().__init__(item, index)
        self._seals = seals

    def begin(self) -> Iterator[Event]:
        """Begin the item and its only part."""
        yield from super().begin()
        self._part = OutputThought()
        yield self._event("content_part.added", content_index=0, part=dumped(self._part))
        self.item.content = [self._part]

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Yield the events of more thoughts."""
        self._part.text += text
        yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _last(self) -> Iterator[Event]:
        if self._seals:
            self.item.encrypted_content = sealed(self._part.text)
        yield self._event("reasoning_text.done", content_index=0, text=self._part.text)
        yield self._event("content_part.done", content_index=0, part=dumped(self._part))


class FunctionWriter(ItemWriter[OutputCall]):
    """Writes a call of a function."""

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add a part of the arguments."""
        self.item.arguments += text
        if text:
            yield self._event("function_call_arguments.delta", delta=text)

    def _last(self) -> Iterator[Event]:
        told = {"name": self.item.name, "arguments": self.item.arguments}
        yield self._event("function_call_arguments.done", **told)


class CustomWriter(ItemWriter[OutputCustomCall]):
    """Writes a call of a custom tool."""

    def __init__(self, item: OutputCustomCall, index: int) -> None:
        """Write `item`."""
        super().__init__(item, index)
        self._input = CustomInput()

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add a part of the arguments of its function."""
        if added := self._input.feed(text):
            yield from self._add(added)

    def _add(self, text: str) -> Iterator[Event]:
        self.item.input += text
        yield self._event("custom_tool_call_input.delta", delta=text)

    def _last(self) -> Iterator[Event]:
        if rest := self._input.finish().removeprefix(self.item.input):
            yield from self._add(rest)
        yield self._event("custom_tool_call_input.done", input=self.item.input)


AnyItemWriter = OutputTextWriter | ThoughtWriter | FunctionWriter | CustomWriter


# ---- the response ----


class ResponseWriter(AnswerWriter[Token, Result, Event]):
    """Turns the parts of an answer into a response."""

    def __init__(
        self,
        answer: ResponseAnswer,
        writing: ChoiceWriter,
        tools: Mapping[str, ResponseTool],
        *,
        seals: bool = False,
        warnings: Sequence[str] = (),
    ) -> None:
        """Begin `answer`; `tools`: those offered, by the names of their functions.

        `seals`: thoughts come as `encrypted_content`, too.
        `warnings`: lines on what is done only in part.
        """
        self._answer = answer
        self._writing = writing
        self._tools = tools
        self._seals = seals
        self._warnings = warnings
        self._item: AnyItemWriter | None = None
        self._reason: FinishReason | None = None
        self._n_events = 0
        self._spoke = time.monotonic()

    def begin(self) -> str:
        """Return the events that begin a stream, before any item."""
        return self._sent(map(self._about, ("created", "in_progress")))

    def parts(self, index: int, tokens: Sequence[Token]) -> Iterator[Event]:
        """Yield the events that `tokens` complete."""
        yield from self._write(self._writing.add(tokens))

    def last_parts(self, index: int, result: Result) -> Iterator[Event]:
        """Yield the events that end the last item and the stream."""
        yield from self._finish(result)

    def encode(self, event: Event) -> str:
        """Return a server-sent event, numbered."""
        name, fields = event
        told = {"type": name, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        self._spoke = time.monotonic()
        return f"event: {name}\ndata: {json.dumps(told, ensure_ascii=False)}\n\n"

    def whole(self, results: Sequence[Result]) -> str:
        """Return the whole response of a request that does not stream, as JSON text."""
        self.drain(self.last_parts(0, results[0]))
        return json.dumps(dumped_answer(self._answer), ensure_ascii=False)

    def idle(self, *, is_waiting: bool) -> str:
        """Return an event that says nothing new: for comments Codex would not wait longer than 5 minutes."""
        return self._sent([self._about("in_progress")])

    def reading(self, progress: PromptProgress) -> str:
        """Return a comment, and such an event where none has come for a while."""
        silent = time.monotonic() > self._spoke + ALIVE_S
        return super().reading(progress) + (self.idle(is_waiting=True) if silent else "")

    # ---- from parts ----

    def _write(self, parts: Iterable[AnswerPart]) -> Iterator[Event]:
        model = self._writing.written.model
        for part in parts:
            logprobs = [token_logprob(model, token) for token in part.tokens]
            if part.kind == "thought":
                yield from self._add(ThoughtWriter, part.text)
            elif part.kind == "text":
                yield from self._add(OutputTextWriter, part.text, logprobs)
            elif logprobs and isinstance(self._item, OutputTextWriter):
                yield from self._item.add("", logprobs)
            if part.kind == "call" and part.call:
                yield from self._call(part.call)
            elif part.kind == "arguments" and self._item:
                yield from self._item.add(part.text)
            self._reason = part.reason

    def _add(
        self,
        kind: type[OutputTextWriter | ThoughtWriter],
        text: str,
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> Iterator[Event]:
        if not isinstance(self._item, kind):
            yield from self._end_item()
            index = len(self._answer.output)
            if kind is OutputTextWriter:
                yield from self._begin(OutputTextWriter(OutputMessage(id=new_id("msg")), index))
            else:
                item = OutputReasoning(id=new_id("rs"), encrypted_content=None)
                yield from self._begin(ThoughtWriter(item, index, seals=self._seals))
        assert self._item  # noqa: S101
        yield from self._item.add(text, logprobs)

    def _call(self, call: AnswerCall) -> Iterator[Event]:
        yield from self._end_item()
        index, tool = len(self._answer.output), self._tools[call.name]
        names: dict[str, Any] = {"call_id": call.id, "name": tool.name, "namespace": tool.namespace}
        if tool.type == "custom":
            yield from self._begin(CustomWriter(OutputCustomCall(id=new_id("ctc"), **names), index))
        else:
            yield from self._begin(FunctionWriter(OutputCall(id=new_id("fc"), **names), index))

    def _begin(self, item: AnyItemWriter) -> Iterator[Event]:
        self._item = item
        self._answer.output.append(item.item)
        yield from item.begin()

    def _end_item(self, *, cut: bool = False) -> Iterator[Event]:
        if self._item:
            yield from self._item.end(cut=cut)

    def _finish(self, result: Result) -> Iterator[Event]:
        yield from self._write(self._writing.finish(result))
        answer, cut = self._answer, self._reason == "length"
        if not self._item:
            yield from self._add(OutputTextWriter, "")
        yield from self._end_item(cut=cut)
        answer.status = "incomplete" if cut else "completed"
        if cut:
            answer.incomplete_details = IncompleteDetails()
        else:
            answer.completed_at = int(time.time())
        answer.usage = ResponseUsage.of(
            Usage.of(result, warnings=self._warnings), n_thought=self._writing.n_thought or 0
        )
        yield self._about(answer.status)

    # ---- events ----

    def _about(self, status: str) -> Event:
        return f"response.{status}", {"response": dumped_answer(self._answer)}

    def _sent(self, events: Iterable[Event]) -> str:
        return "".join(map(self.encode, events))


# ---- routes ----

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


_NO_COMPACTION = "compact is not here: send less"


def add_responses(
    app: FastAPI,
    engine: Engine,
    service: Service,
    reader: RequestReader,
    answerer: Answerer,
    *,
    is_routed: bool,
) -> None:
    """Add the routes to `app`. `is_routed`: whoever passes its requests on keeps the responses."""
    own = ResponsesReader(reader)

    @app.post(PATH, response_model=ResponseAnswer, responses=_EVENTS)
    async def create(request: Request, body: ResponsesRequest) -> Response:
        prepared = await run_in_threadpool(own.read, body)
        begun = _begun(body, service.name)
        text = prepared.text
        written = AnswerText(engine.target, keeps_tokens=body.wants_logprobs)
        writer = ResponseWriter(
            begun,
            ChoiceWriter(written, text.answer),
            prepared.tools,
            seals=ENCRYPTED in (body.include or ()),
            warnings=text.warnings,
        )
        found = await answerer.answer(
            request, PreparedRequest((text,)), writer, streams=bool(body.stream), user=body.user
        )
        return with_warnings(found, text.warnings)

    @app.post(PATH + "/input_tokens")
    async def count(body: ResponsesRequest) -> InputTokens:
        """Count the tokens of a request's prompt; nothing is answered."""
        return InputTokens(input_tokens=await run_in_threadpool(own.count, body))

    if not is_routed:
        store = ResponseStore()
        app.add_middleware(KeepingResponses, store=store)

        @app.get(PATH + "/{response_id}", response_model=ResponseAnswer)
        async def retrieve(response_id: str, stream: bool = False) -> Response:
            """Return a stored response."""
            return store.show(response_id, streams=stream)

    refuse_routes(app, [PATH + "/compact"], _NO_COMPACTION)


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
        user=body.user,
    )


def _given(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_none=True)
