"""What clients send, as in OpenAI's API: unknown fields are ignored, known ones checked.

Types are strict ("1" is no number), as our OpenAPI description says. Fields of OpenAI's API that this server
does not support accept only the value that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgespec.choices import DrafterName
from edgespec.options import MAX_GAMMA

MAX_TOP_LOGPROBS = 20
"""Likeliest tokens a request may ask for at each position, as in OpenAI's API."""

UNSUPPORTED = {
    "n": "one answer a request: send the request several times",
    "best_of": "one answer a request",
    "echo": "the prompt is not sent back",
    "suffix": "text is only continued",
    "audio": "this server writes text",
    "modalities": "this server writes text",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "this server searches nothing",
}
"""Fields that other servers know, and what to do instead."""


class RequestPart(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class TextPart(RequestPart):
    """A part of a message's content."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"content of type {kind[:40]!r} is not supported: this model reads text only")
        return data


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(RequestPart):
    """Instructions; "developer" is OpenAI's newer name for "system"."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(RequestPart):
    """What the user says."""

    role: Literal["user"]
    content: Content


class CalledFunction(RequestPart):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(RequestPart):
    """A call that the model made in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(RequestPart):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(RequestPart):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(RequestPart):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(RequestPart):
    """Tools are functions: OpenAI's hosted ones are not here."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestPart):
    """The function to be called."""

    name: str


class NamedTool(RequestPart):
    """A `tool_choice` that forces one function."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(RequestPart):
    """Plain text."""

    type: Literal["text"]


class JsonFormat(RequestPart):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestPart):
    """A JSON schema; `strict` is ignored, as every answer is held to it."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")


class SchemaFormat(RequestPart):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class Speculative(RequestPart):
    """edgespec's own: how this answer is drafted. None of it changes what may be answered."""

    drafter: DrafterName | None = None
    gamma: int | None = Field(None, ge=0, le=MAX_GAMMA, description="Tokens drafted a step; 0: none.")


class StreamOptions(RequestPart):
    """What a stream ends with."""

    include_usage: bool | None = None


class Sampled(RequestPart):
    """What both kinds of completion have in common."""

    model: str = Field(description='A name that /v1/models lists; "edgespec" is always the served one.')
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, description="Cut to what fits in the context.")
    temperature: float | None = Field(None, ge=0, le=2, description="Below 0.001 it is greedy; default 0.8.")
    top_p: float | None = Field(None, ge=0, le=1, description="Default 0.95.")
    top_k: int | None = Field(None, ge=0, lt=1 << 31, description="Not OpenAI's; 0: off; default 40.")
    min_p: float | None = Field(None, ge=0, le=1, description="Not OpenAI's; default 0.05.")
    repeat_penalty: float | None = Field(None, ge=0.001, le=1000, description="Not OpenAI's; default 1: off.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: int | None = Field(
        None, ge=-(1 << 63), lt=1 << 64, description="The same seed gives the same text, whatever is drafted."
    )
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
        | None
    ) = None
    user: str | None = Field(
        None, description="Who waits in the queue; by default the API key, or the address."
    )
    n: Literal[1] | None = None
    speculative: Speculative | None = None


class ChatRequest(Sampled):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None


class CompletionRequest(Sampled):
    """The body of POST /v1/completions. Its `max_tokens` is 16 where none is given, as OpenAI's."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1)]
        | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1, max_length=1)]
    ) = Field(description="Text or token ids: one prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
