"""Ollama's API: chat, generate, what is served; a clear line for each route that is missing.

Requests become those of OpenAI's API, and parts of answers lines. Each of Ollama's `options` is honoured, or
changes no text, or is refused by name, as is a field that its API lacks.
Clients may send any Content-Type or none, as `curl -d` does. The gate (gate.py) keeps other web pages out
by their Origin, and `route_class` those that a browser reveals in another header.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.answer_events import AnswerCall, AnswerEvent, EventWriter
from edgespec.apps.server.api_errors import ApiError, checked, field_error
from edgespec.apps.server.embedding_routes import (
    MAX_TEXTS,
    EmbeddedTexts,
    EmbeddingService,
    VectorTexts,
    cut_rows,
)
from edgespec.apps.server.json_routes import NO_VECTORS, absent, route_class
from edgespec.apps.server.names import RequestedModel
from edgespec.apps.server.ollama_answers import (
    SPOKEN,
    duration_s,
    listed,
    loaded,
    nothing_asked,
    rfc3339,
)
from edgespec.apps.server.request_fields import ImageBase64, RequestPart, ignore, image_part, without_nulls
from edgespec.apps.server.request_reader import (
    PreparedRequest,
    RequestReader,
    Service,
    read_sampling,
)
from edgespec.apps.server.request_schema import ChatRequest, CompletionRequest
from edgespec.apps.server.streaming import STREAMED, Answerer, Prepared, WholeWriter
from edgespec.decoding.option_table import MAX_LOGPROBS
from edgespec.decoding.records import PromptProgress, Token
from edgespec.decoding.sampling import SAMPLING, TABLE, SamplingParams
from edgespec.errors import MessageFn, UsageError
from edgespec.llama import gguf as gguf_file
from edgespec.llama.gguf import GGUF, STRING
from edgespec.llama.weights import Model

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


DEFAULTS: Mapping[str, float] = {"top_p": 0.9, "min_p": 0.0}
"""Ollama's defaults that differ from edgespec's: its clients expect them where they name none."""

HONOURED = {
    **{option.ollama: option.whole for option in TABLE.values() if option.ollama},
    "num_ctx": True,
}
"""Options that do what they do in Ollama, and whether each is a whole number."""

OPTIONS_SCHEMA = WithJsonSchema({"type": ["object", "null"], "properties": {name: {} for name in HONOURED}})
"""Description of the options; `read_options` checks them."""


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options `given` as fields of the engine's `Options`, and `n_ctx`, None for the server's.

    Raises ApiError for an option that cannot be honoured.
    """
    values = without_nulls(given)
    if values.get("mirostat"):
        raise _fault("mirostat", "mirostat is not here: leave it out, or send 0")
    ignore(f"options.{name}" for name in values if name not in HONOURED)
    stop = values.pop("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise _fault("stop", "must be a list of strings")
    if "" in stop:
        raise _fault("stop", "an empty string would stop at once")
    for name in values.keys() & HONOURED.keys():
        values[name] = _number(name, values[name], is_whole=HONOURED[name])
    n_ctx, n_predict, seed = values.get("num_ctx"), values.get("num_predict", -1), values.get("seed", -1)
    if n_ctx is not None and n_ctx < 1:
        raise _fault("num_ctx", "must be 1 or more")
    if n_predict not in (-1, -2) and n_predict < 1:  # -1: without end, -2: until the context is full
        raise _fault("num_predict", "must be 1 or more, or -1 for as many as the context holds")
    sampling = {name: values.get(option.ollama) for name, option in SAMPLING.items()}
    try:
        params = SamplingParams(**{**DEFAULTS, **read_sampling(sampling)})
    except UsageError as error:
        raise field_error(error, f"options.{SAMPLING[error.field].ollama}") from None
    return {
        "params": params,
        "n_predict": None if n_predict < 0 else n_predict,
        "n_ctx": n_ctx,
        "seed": None if seed == -1 else seed % (1 << 64),
        "stop": tuple(stop),
        "gamma": values.get("draft_num_predict"),
    }


def _number(name: str, value: Any, *, is_whole: bool) -> float:  # noqa: ANN401 - JSON
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (is_whole and value != int(value)):
        raise _fault(name, f"must be {'an integer' if is_whole else 'a number'}")
    return int(value) if is_whole else value


def _fault(name: str, problem: str) -> ApiError:
    return ApiError(400, problem, field=f"options.{name[:80]}")


def _absent(line: str) -> BeforeValidator:
    """Refuse any value but an empty one with `line`."""

    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if value:
            raise ValueError(line)
        return value

    return BeforeValidator(check)


class OllamaRequest(RequestPart):
    """The body of a request, none of whose fields is dropped in silence."""

    model: RequestedModel = ""


class OllamaRequestPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class OllamaCalledFunction(OllamaRequestPart):
    """A call's function; its arguments are an object, or the text of one as in OpenAI's API."""

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaToolCall(OllamaRequestPart):
    """A call of an earlier answer."""

    id: str | None = None
    function: OllamaCalledFunction


class OllamaRequestMessage(OllamaRequestPart):
    """A message of any role; one of the assistant may have fields of other servers."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[ImageBase64] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaGenerationRequest(OllamaRequest):
    """The fields of /api/chat and /api/generate."""

    stream: bool | None = Field(None, description="Lines as they are written, unless it is false.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description='"json", or a JSON schema that the answer matches.'
    )
    options: Annotated[dict[str, Any] | None, OPTIONS_SCHEMA] = None
    keep_alive: float | str | None = Field(None, description="The model stays as long as the server.")
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None
    truncate: bool | None = Field(None, description="Accepted: what does not fit is refused, never cut.")
    shift: bool | None = Field(None, description="Accepted: an answer ends where the context is full.")
    logprobs: bool | Literal[0] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("keep_alive")
    @classmethod
    def _is_duration(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            duration_s(value)
        return value

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` asks to free the model at once."""
        return self.keep_alive is not None and duration_s(self.keep_alive) == 0


class OllamaChatRequest(OllamaGenerationRequest):
    """The body of POST /api/chat."""

    messages: list[OllamaRequestMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaGenerationRequest):
    """The body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[ImageBase64] | None = None
    template: Annotated[
        str | None, _absent("the model's own template is used: write the prompt as it shall be, with raw")
    ] = None
    context: Annotated[list[int] | None, _absent("is not supported: send the conversation to /api/chat")] = (
        None
    )


class OllamaNameRequest(OllamaRequest):
    """The body of POST /api/pull and /api/show."""

    name: str = Field("", description="The older name of `model`.")
    stream: bool | None = Field(None, description="Of /api/pull: lines, unless it is false.")


_EFFORTS: Mapping[Any, str] = {False: "none", "max": "xhigh"}
"""OpenAI's words for Ollama's."""


def read_request(reader: RequestReader, body: OllamaChatRequest | OllamaGenerateRequest) -> PreparedRequest:
    """Prepare a request that has messages or a prompt, on any thread. Raises ApiError."""
    options = read_options(body.options or {})
    fields: dict[str, Any] = {"stream": body.stream is not False}
    if body.format:
        schema = {"type": "json_schema", "schema": body.format}
        fields["response_format"] = {"type": "json_object"} if body.format == "json" else schema
    if isinstance(body, OllamaChatRequest):
        messages = openai_messages(body.messages or ())
        if body.tools:
            fields["tools"] = [{"type": "function", **tool} for tool in body.tools]  # who may leave it out
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True  # Ollama continues the beginning of an answer
    elif body.raw or body.suffix or reader.model.chat_template is None:
        fields |= _text_fields(body)
        return _fitted(reader, reader.choices(checked(CompletionRequest, fields)), options)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": _content(body.prompt, body.images)}]
    fields |= {"messages": messages, **_thinking(reader, body)}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return _fitted(reader, reader.choices(checked(ChatRequest, fields)), options)


def _thinking(reader: RequestReader, body: OllamaGenerationRequest) -> dict[str, Any]:
    """Return the fields of OpenAI's API for `think`. Raises ApiError."""
    if body.think in (None, ""):
        return {}
    if body.think and not reader.prompts.thinks:
        name = body.model or reader.service.name
        raise ApiError(400, f'"{name}" does not support thinking', param="think")
    if body.think is True:  # as much as is usual
        switches = reader.prompts.thinking_switches - {"reasoning_effort"}
        return {"chat_template_kwargs": dict.fromkeys(switches, True)}
    return {"reasoning_effort": _EFFORTS.get(body.think, body.think)}


def _text_fields(body: OllamaGenerateRequest) -> dict[str, Any]:
    kind = "raw mode" if body.raw else "suffix" if body.suffix else "a model without a chat template"
    for name in ("system", "think", "images"):
        if getattr(body, name):
            raise ApiError(400, f"{kind} does not support {name}: leave it out", param=name)
    return {
        "prompt": body.prompt,
        "suffix": body.suffix or None,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def _fitted(reader: RequestReader, request: PreparedRequest, options: dict[str, Any]) -> PreparedRequest:
    """Return `request` with Ollama's options, cut to the context that it asks for."""
    (text,), most = request.texts, reader.service.n_ctx
    n_ctx = min(options.pop("n_ctx") or most, most)
    room = n_ctx - len(text.tokens)
    if room < 1:
        whose = "options.num_ctx is" if n_ctx < most else "this server's context is"
        line = f"{len(text.tokens)} tokens, and {whose} {n_ctx}: send less, or allow more"
        raise ApiError(400, line, field="messages", code="context_length_exceeded")
    if options["n_predict"] is not None or n_ctx < most:
        options["n_predict"] = min(options["n_predict"] or room, room)
    options["stop"] = (*text.options.stop, *options["stop"])
    try:
        made = replace(text.options, **options)
    except UsageError as error:
        name = "draft_num_predict" if error.field == "gamma" else error.field
        raise field_error(error, f"options.{name}") from None
    return replace(request, texts=(replace(text, options=made),))


def openai_messages(messages: Sequence[OllamaRequestMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API: calls with ids, and their arguments as text.

    Ollama's clients send no ids. They are made up here, as templates may need them: nine letters and digits,
    which is what Mistral's ask for. A result belongs to the call of its name, else to the first without one.
    """
    made: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        content = _content(message.content, message.images)
        one: dict[str, Any] = {"role": message.role.lower(), "content": content}
        if one["role"] == "assistant":
            one = {**(message.model_extra or {}), **one}
            if message.thinking:
                one["reasoning_content"] = message.thinking
            if message.tool_calls:
                waiting = [
                    _given(call, f"call{len(made):03}{i:02}") for i, call in enumerate(message.tool_calls)
                ]
                one["tool_calls"] = [*waiting]
        elif one["role"] == "tool":
            call = _called(message, waiting)
            one["tool_call_id"] = call["id"] if call else message.tool_call_id
            name = message.tool_name or (call and call["function"]["name"])
            if name:
                one["name"] = name
        made.append(one)
    return made


def _content(text: str | None, images: Sequence[bytes] | None) -> str | list[dict[str, Any]]:
    """Return a message's content: its text, or parts if there are images, which come first as in Ollama."""
    if not images:
        return text or ""
    return [*map(image_part, images), *([{"type": "text", "text": text}] if text else [])]


def _given(call: OllamaToolCall, identity: str) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or identity, "type": "function", "function": function}


def _called(message: OllamaRequestMessage, waiting: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Remove and return the open call that a tool's message answers; None if there is none."""
    if message.tool_call_id:
        fitting = [call for call in waiting if call["id"] == message.tool_call_id]
    else:
        fitting = [call for call in waiting if call["function"]["name"] == message.tool_name] or waiting
    if not fitting:
        return None
    call = fitting[0]
    waiting.remove(call)
    return call


# ---- facts of a model ----

_LONGEST_ARRAY = 5  # longer ones are shown empty, as in Ollama
_NOT_SHOWN = ("general.name", "tokenizer.chat_template")  # told in fields of their own


def shown(target: Model, service: Service, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model for /api/show, from its entry in /api/tags."""
    gguf, full = target.header.gguf, service.named.full
    license_text = gguf.text("general.license")
    info = {key: _value(gguf, field) for key, field in gguf.fields.items() if key not in _NOT_SHOWN}
    return {
        **({"license": license_text} if license_text else {}),
        "modelfile": f"# The one model of this server, made from no Modelfile.\nFROM {full}\n",
        "parameters": f"{'num_ctx':<30} {service.n_ctx}",
        "template": target.chat_template or "",
        "model_info": {**info, "general.parameter_count": target.n_params},
        **{name: entry[name] for name in ("details", "capabilities", "modified_at")},
    }


def _value(gguf: GGUF, field: gguf_file.Field) -> Any:  # noqa: ANN401 - any value of a GGUF file
    if not field.is_array:
        return field.value
    if field.n > _LONGEST_ARRAY:
        return []
    if field.kind == STRING:
        return [text.decode(errors="replace") for text in gguf.texts(field.key)]
    return gguf.numbers(field.key).tolist()


# ---- answers as lines ----


class OllamaWriter(EventWriter):
    """Writes an answer in Ollama's form: lines, or one. A part is a line without its model and its time."""

    media_type = "application/x-ndjson"

    def __init__(
        self, body: OllamaGenerationRequest, request: PreparedRequest, model: Model, name: str
    ) -> None:
        """Begin the answer to `body` of the `model` that the request called `name`."""
        super().__init__(request, model, keeps_tokens=bool(body.logprobs))
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._name = name

    def write(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Yield the line of a part of the answer; the last one has the statistics."""
        if event.call:
            call = _call(event.call)
            said: dict[str, Any] = {"content": call} if isinstance(call, str) else {"calls": [call]}
            line = self._line(**said, tokens=event.tokens)
        elif event.kind == "thought":
            line = self._line(thinking=event.text, tokens=event.tokens)
        else:
            line = self._line(event.text, tokens=event.tokens)
        yield line | self._end() if event.kind == "end" else line

    def encode(self, part: dict[str, Any]) -> str:
        """Return a line."""
        return json.dumps(self._told(part), ensure_ascii=False) + "\n"

    def answer(self) -> dict[str, Any]:
        """Return the whole answer: one line with its statistics."""
        text = self.texts[0]
        told = [*map(_call, text.calls)]
        said = text.content + "".join(call for call in told if isinstance(call, str))
        calls = [call for call in told if not isinstance(call, str)]
        return self._told(self._line(said, text.thoughts, calls, text.tokens) | self._end())

    def idle(self, *, is_waiting: bool) -> str:
        """Return a line that adds nothing."""
        return self.encode(self._line())

    def queued(self, place: int) -> str:
        """Return nothing: Ollama's clients know of no queue."""
        return ""

    def reading(self, progress: PromptProgress) -> str:
        """Return "": Ollama's clients expect no such line, and would not skip it."""
        return ""

    def _told(self, part: dict[str, Any]) -> dict[str, Any]:
        told = {"model": self._name, "created_at": rfc3339(time.time()), **part}
        return {**told, "done": "done_reason" in told}

    def _line(
        self,
        content: str = "",
        thinking: str = "",
        calls: Sequence[dict[str, Any]] = (),
        tokens: Sequence[Token] = (),
    ) -> dict[str, Any]:
        """Return what a line adds; `tokens`: those whose logprobs it has."""
        told: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            told["response"] = content
        else:
            called = {"tool_calls": calls} if calls else {}
            told = {"message": {"role": "assistant", "content": content, **told, **called}}
        if tokens:
            told["logprobs"] = self.logprobs(tokens)
        return told

    def _end(self) -> dict[str, Any]:
        result = self.results[0]
        total_s, stats = time.perf_counter() - self.request.came, result.stats
        first_s = stats.total_s if stats.ttft_s is None else stats.ttft_s
        return {
            "done": True,
            "done_reason": "length" if result.stop_reason in ("length", "context") else "stop",
            "total_duration": _ns(total_s),
            "load_duration": _ns(max(0.0, total_s - stats.total_s)),
            "prompt_eval_count": result.prompt_tokens,
            "prompt_eval_duration": _ns(first_s),
            "eval_count": len(result.token_ids),
            "eval_duration": _ns(stats.total_s - first_s),
            "edgespec": self.usage()["edgespec"],
        }


def _call(call: AnswerCall) -> dict[str, Any] | str:
    """Return a call; one that was cut off has no object of arguments, and is text."""
    text = call.arguments
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return f'{{"name": {json.dumps(call.name)}, "arguments": {text}'
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


_ONE_MODEL = "this server has one model, chosen when it starts: edgespec serve --target MODEL"
_ABSENT = {
    ("POST", "/push"): _ONE_MODEL,
    ("POST", "/create"): _ONE_MODEL,
    ("POST", "/copy"): _ONE_MODEL,
    ("DELETE", "/delete"): _ONE_MODEL,
    ("POST", "/blobs/{digest}"): _ONE_MODEL,
    ("POST", "/embed"): NO_VECTORS,
    ("POST", "/embeddings"): NO_VECTORS,
}
"""Ollama's routes that are not here, and what to do instead."""


def add_ollama(
    app: FastAPI, engine: Engine, reader: RequestReader, answerer: Answerer, *, log: MessageFn
) -> None:
    """Add Ollama's routes to `app`; `log` takes a line for each failure that is not the client's fault."""
    known = {
        "completion": True,
        "tools": reader.prompts.takes_tools,
        "insert": engine.target.fim is not None,
        "thinking": reader.prompts.thinks,
        "vision": not engine.media_problem(ask_hub=False),
    }
    capabilities = [name for name, has in known.items() if has]
    router = APIRouter(
        prefix="/api",
        route_class=route_class(log, any_type=True),
    )
    add_facts(router, engine.target, reader.service, capabilities)
    _add_generations(router, reader, answerer)
    for (method, path), line in _ABSENT.items():
        router.add_api_route(path, absent(line), methods=[method], include_in_schema=False)
    app.include_router(router)


def add_facts(router: APIRouter, target: Model, service: Service, capabilities: Sequence[str]) -> None:
    """Add the routes that describe the model."""
    entry = listed(service.named, target.header) | {"capabilities": [*capabilities]}
    entry["details"]["context_length"] = service.n_ctx

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [entry]}

    @router.get("/ps")
    async def running() -> dict[str, Any]:
        return {"models": [loaded(entry) | {"context_length": service.n_ctx}]}

    @router.get("/version")
    async def spoken() -> dict[str, Any]:
        """Return the version of Ollama whose API this is, and ours."""
        return {"version": SPOKEN, "edgespec": version("edgespec")}

    @router.post("/show")
    async def show(body: OllamaNameRequest) -> dict[str, Any]:
        """Describe the model: what it can do, its template, the metadata of its file."""
        service.names.find(body.model or body.name)
        return await run_in_threadpool(shown, target, service, entry)

    @router.post("/pull", response_model=dict[str, Any], responses=STREAMED)
    async def pull(body: OllamaNameRequest) -> Response:
        """Report the served model as pulled: programs pull before they ask. No other is downloaded."""
        try:
            service.names.find(body.model or body.name)
        except ApiError:
            raise ApiError(404, _ONE_MODEL) from None
        line = '{"status":"success"}\n'
        if body.stream is False:
            return Response(line, media_type="application/json")
        return Response('{"status":"pulling manifest"}\n' + line, media_type=OllamaWriter.media_type)


def _add_generations(router: APIRouter, reader: RequestReader, answerer: Answerer) -> None:
    def read(body: OllamaChatRequest | OllamaGenerateRequest) -> PreparedRequest | Response:
        reader.service.names.find(body.model)
        is_chat = isinstance(body, OllamaChatRequest)
        if body.messages if isinstance(body, OllamaChatRequest) else body.prompt or body.images:
            return read_request(reader, body)
        reason: Literal["load", "unload"] = "unload" if body.unloads else "load"
        return JSONResponse(nothing_asked(named(body), chat=is_chat, reason=reason))

    def named(body: OllamaGenerationRequest) -> str:
        return body.model or reader.service.named.full

    def writer(body: OllamaGenerationRequest, request: PreparedRequest) -> OllamaWriter:
        return OllamaWriter(body, request, reader.model, named(body))

    answerer.serve(router, "/chat", OllamaChatRequest, read, writer)
    answerer.serve(router, "/generate", OllamaGenerateRequest, read, writer)


# ---- vectors ----


class OllamaVectorRequest(OllamaRequest):
    """Fields that /api/embed and /api/embeddings share."""

    options: Annotated[dict[str, Any] | None, OPTIONS_SCHEMA] = None
    keep_alive: float | str | None = Field(None, description="The model stays as long as the server.")
    truncate: bool | None = Field(None, description="false: a text that is too long is refused, not cut.")


class OllamaEmbedRequest(OllamaVectorRequest):
    """The body of POST /api/embed."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    dimensions: int | None = Field(None, ge=1, description="As of /v1/embeddings.")


class OllamaEmbeddingsRequest(OllamaVectorRequest):
    """The body of POST /api/embeddings."""

    prompt: str | None = None


def add_ollama_embeddings(app: FastAPI, service: EmbeddingService, answerer: Answerer) -> None:
    """Add POST /api/embed and /api/embeddings, and the facts of the model, to `app`."""
    model, named = service.worker.embedder.model, service.service.named
    # Ollama has no word for a model that ranks.
    capabilities = [] if service.ranks else ["embedding"]
    router = APIRouter(prefix="/api", route_class=route_class(service.log, any_type=True))
    add_facts(router, model, service.service, capabilities)

    def prepared(body: OllamaVectorRequest, texts: Sequence[str], param: str) -> Prepared[VectorTexts]:
        n_ctx = service.service.n_ctx
        most = min(read_options(body.options or {})["n_ctx"] or n_ctx, n_ctx)
        tokens = service.tokens(texts, param, most=None if body.truncate is False else most)
        return Prepared((VectorTexts(tokens),))

    def read(body: OllamaEmbedRequest) -> Prepared[VectorTexts] | Response:
        service.check(body.model, ranks=False, dimensions=body.dimensions)
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        if len(texts) > 1 and "" in texts:
            raise ApiError(400, f"input.{texts.index('')}: an empty text has no vector", param="input")
        if not any(texts):  # Ollama only loads the model
            return JSONResponse(embedded(body, [], 0, time.perf_counter()))
        return prepared(body, texts, "input")

    def embedded(body: OllamaEmbedRequest, rows: list[Any], n_tokens: int, came: float) -> dict[str, Any]:
        return {
            "model": body.model or named.full,
            "embeddings": rows,
            "total_duration": round(1e9 * (time.perf_counter() - came)),
            "load_duration": 0,
            "prompt_eval_count": n_tokens,
        }

    def writer(body: OllamaEmbedRequest, request: Prepared[VectorTexts]) -> WholeWriter[EmbeddedTexts]:
        def write(found: EmbeddedTexts) -> dict[str, Any]:
            rows = cut_rows(found.rows, body.dimensions).tolist()
            return embedded(body, rows, found.n_tokens, request.came)

        return WholeWriter(write)

    def read_one(body: OllamaEmbeddingsRequest) -> Prepared[VectorTexts] | Response:
        service.check(body.model, ranks=False)
        return prepared(body, [body.prompt], "prompt") if body.prompt else JSONResponse({"embedding": []})

    def older(_: object, __: object) -> WholeWriter[EmbeddedTexts]:
        return WholeWriter(lambda found: {"embedding": found.rows[0].tolist()})

    answerer.serve(router, "/embed", OllamaEmbedRequest, read, writer)
    answerer.serve(router, "/embeddings", OllamaEmbeddingsRequest, read_one, older)
    app.include_router(router)
