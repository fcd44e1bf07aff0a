"""OpenAI's Responses API: answers as responses, whole or as events, and stored.

Requests become those for chat completions, which the server's one reader prepares.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, Response
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.answer_events import AnswerCall, AnswerEvent, EventWriter
from edgespec.apps.server.api_errors import ApiError, checked
from edgespec.apps.server.json_routes import refuse_routes
from edgespec.apps.server.request_fields import ignore, without_nulls
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader, read_sampling
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.apps.server.response_schema import Usage
from edgespec.apps.server.responses_schema import (
    ENCRYPTED,
    LOGPROBS,
    AllowedChoice,
    ChosenTool,
    CustomDefinition,
    FunctionDefinition,
    GrammarInput,
    Item,
    NamespaceDefinition,
    ResponsesRequest,
    SearchDefinition,
    ToolChoice,
    content_of,
    text_of,
)
from edgespec.apps.server.responses_store import PATH, KeepingResponses, ResponseStore, new_id
from edgespec.apps.server.streaming import ALIVE_S, Answerer
from edgespec.decoding.grammars import GrammarSource
from edgespec.decoding.records import PromptProgress
from edgespec.decoding.sampling import SAMPLING, SamplingParams
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

# ---- tools as functions, which are what models' templates know ----
# A custom tool takes text: it becomes a function of one string. The tools of a namespace carry its name.

INPUT = "input"
"""The argument of a custom tool's function."""

ToolKey = tuple[str | None, str]
"""The namespace and the name of a tool."""


class ResponseTool(NamedTuple):
    """A tool, by the names that its calls use."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass
class ReadTools:
    """The tools of a request, by their names in a chat completion."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Those of a request for a chat completion."""
    offered: dict[str, ResponseTool] = field(default_factory=dict)
    """Which tool each function is."""
    warnings: list[str] = field(default_factory=list)
    """Lines on what is done only in part."""

    @property
    def names(self) -> dict[ToolKey, str]:
        """The function that each tool became."""
        return {(tool.namespace, tool.name): name for name, tool in self.offered.items()}


def _joined(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def read_tools(body: ResponsesRequest) -> ReadTools:
    """Return the tools of `body`. Raises ApiError."""
    read = ReadTools()
    functions = []
    choice = body.tool_choice
    is_forced = (choice.mode if isinstance(choice, AllowedChoice) else choice) not in (None, "none", "auto")
    for place, tool, namespace in _tools(body, read.warnings):
        key, name = (namespace, tool.name), _joined(namespace, tool.name)
        if key in read.names:
            raise ApiError(400, f"there are two tools called {name[:80]!r}", field=place)
        while name in read.offered:  # a__b in c, and b__c in a
            name += "_"
        read.offered[name] = ResponseTool(tool.type, tool.name, namespace)
        if isinstance(tool, CustomDefinition):
            functions.append(_of_text(name, tool, place))
            if isinstance(tool.format, GrammarInput) and not (is_forced and tool.format.syntax == "regex"):
                read.warnings.append(f"{place}.format: not enforced: the model is shown the grammar")
        else:
            functions.append(
                {"name": name, **tool.model_dump(include={"description", "parameters", "strict"})}
            )
    if functions:
        read.fields["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice is not None:
        read.fields["tool_choice"] = _choice(choice, read)
    return read


def _tools(
    body: ResponsesRequest, warnings: list[str]
) -> Iterator[tuple[str, FunctionDefinition | CustomDefinition, str | None]]:
    """Yield each tool with its place in the request and its namespace."""
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, SearchDefinition):
            warnings.append(f"tools.{i}: {tool.type} is left out: this server searches nothing")
        elif isinstance(tool, NamespaceDefinition):
            for j, inner in enumerate(tool.tools):
                yield f"tools.{i}.tools.{j}", inner, tool.name
        else:
            yield f"tools.{i}", tool, None


def _of_text(name: str, tool: CustomDefinition, place: str) -> dict[str, Any]:
    """Return the function of a custom tool."""
    text: dict[str, Any] = {"type": "string"}
    if isinstance(tool.format, GrammarInput):
        syntax, definition = tool.format.syntax, tool.format.definition
        if mistake := _mistake(syntax, definition):
            raise ApiError(400, mistake, field=f"{place}.format.definition")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            text["description"] = f"Text that matches this Lark grammar:\n{definition}"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    parameters = {**schema, "additionalProperties": False}
    return {"name": name, "description": tool.description, "parameters": parameters}


@lru_cache(maxsize=64)
def _mistake(syntax: Literal["lark", "regex"], definition: str) -> str:
    """Return what is wrong with a grammar, if anything is."""
    read = GrammarSource.lark if syntax == "lark" else GrammarSource.regex
    try:
        read(definition, syntax)
    except UsageError as error:
        return " ".join(str(error).split())
    return ""


def _choice(choice: ToolChoice, read: ReadTools) -> Any:  # noqa: ANN401 - JSON
    def named(chosen: ChosenTool) -> dict[str, Any]:
        name = read.names.get((chosen.namespace, chosen.name), chosen.name)  # or joined by the client
        if name not in read.offered or read.offered[name].type != chosen.type:
            line = f"no {chosen.type} tool {chosen.name[:80]!r} in tools"
            raise ApiError(400, line, field="tool_choice")
        return {"type": "function", "function": {"name": name}}

    if isinstance(choice, ChosenTool):
        return named(choice)
    if isinstance(choice, AllowedChoice):
        tools = [named(chosen) for chosen in choice.tools]
        return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": tools}}
    return choice


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool is called with, from the arguments of its function.

    The arguments may be cut off; if they have another form, they are the text.
    """
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


# ---- thoughts that a client keeps without reading them, and sends back ----

_MARK = "edgespec:"


def sealed(thought: str) -> str:
    """Return the `encrypted_content` of a thought: its text in base64, which is no encryption.

    Clients that store nothing here send this back, and leave the text out.
    """
    return _MARK + base64.b64encode(thought.encode()).decode()


def _thought(item: Item) -> str:
    """Return the text of thoughts, "" if another server has encrypted them."""
    if text := text_of(item.content):
        return text
    if (content := item.encrypted_content) and content.startswith(_MARK):
        try:
            return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
        except ValueError:
            pass
    return text_of(item.summary)


# ---- requests ----

_SAME_FIELDS = {
    *(option.request_name(name) for name, option in SAMPLING.items() if name != "logit_bias"),
    *("model", "parallel_tool_calls", "top_logprobs", "seed", "speculative", "lora", "stream", "user"),
}


def read_response(reader: RequestReader, body: ResponsesRequest) -> PreparedRequest:
    """Prepare a request, on any thread. Raises ApiError."""
    items, tools = _items(body), read_tools(body)
    ignore(f"include {name}" for name in body.include or () if name not in (LOGPROBS, ENCRYPTED))
    prepared = reader.choices(_chat(body, items, tools))
    return replace(prepared, warnings=(*tools.warnings, *_unread(body, items), *prepared.warnings))


def count_tokens(reader: RequestReader, body: ResponsesRequest) -> int:
    """Return how many tokens the prompt of a request has, on any thread. Raises ApiError."""
    return len(reader.prompt_tokens(_chat(body, _items(body), read_tools(body))))


def _chat(body: ResponsesRequest, items: Sequence[Item], tools: ReadTools) -> ChatRequest:
    """Return the request for a chat completion."""
    form = body.text.format if body.text else None
    given = {
        "logprobs": True if body.wants_logprobs else None,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": form.model_dump(by_alias=True, exclude_none=True) if form else None,
    }
    fields = body.model_dump(include=_SAME_FIELDS, exclude_none=True) | tools.fields
    fields |= without_nulls(given)
    return checked(ChatRequest, fields | {"messages": _messages(body.instructions, items, tools.names)})


def _items(body: ResponsesRequest) -> list[Item]:
    """Return the whole input, with the stored conversation before it."""
    given = body.input
    if isinstance(given, str):
        given = [Item.model_validate({"role": "user", "content": given})]
    if items := [*body.edgespec_conversation, *(given or ())]:
        return items
    line = "send text or items, or the previous_response_id of a response to continue"
    raise ApiError(400, line, field="input")


def _messages(
    instructions: str | None, items: Sequence[Item], functions: Mapping[ToolKey, str]
) -> list[dict[str, Any]]:
    """Return the messages of items: thoughts, text and calls of one answer are one message.

    `functions`: the names of the tools' functions, by the namespace and the name of each tool.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the called functions, by the calls' ids

    def assistant(*without: str) -> dict[str, Any]:
        """Return the last message if it is the assistant's and lacks the fields `without`, else a new one."""
        if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & {*without}:
            messages.append({"role": "assistant"})
        return messages[-1]

    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item.type == "reasoning":
            if thought := _thought(item):
                assistant("content", "tool_calls")["reasoning_content"] = thought
        elif item.type == "message":
            if item.role == "assistant":
                assistant("content", "tool_calls")["content"] = content_of(item.content)
            else:
                messages.append({"role": item.role, "content": content_of(item.content)})
        elif item.type in ("function_call", "custom_tool_call"):
            key, text = (item.namespace, item.name), item.arguments
            name = names[item.call_id] = functions.get(key) or _joined(*key)
            if item.type == "custom_tool_call":
                text = json.dumps({INPUT: item.input}, ensure_ascii=False)
            call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": text}}
            assistant().setdefault("tool_calls", []).append(call)
        else:
            named = {"name": names[item.call_id]} if item.call_id in names else {}
            output = content_of(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output, **named})
    return messages


def _unread(body: ResponsesRequest, items: Sequence[Item]) -> Iterator[str]:
    if body.text and body.text.verbosity not in (None, "medium"):
        yield "text.verbosity: not honoured: say in the instructions how long the answer should be"
    if any(item.type == "reasoning" and item.encrypted_content and not _thought(item) for item in items):
        yield "input: thoughts that another server has encrypted are not read"


# ---- answers ----

Event = dict[str, Any]
"""An event with its type; parts of it change while the answer is written."""


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
        """Return an event that changes nothing: with only comments, Codex gives up after 5 minutes."""
        return self.encode(self._about("in_progress"))

    def reading(self, progress: PromptProgress) -> str:
        """Return a comment, with an event like `idle`'s if none was sent for a while."""
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
    """Add the routes to `app`. `is_routed`: the process that passes its requests on stores the responses."""
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
