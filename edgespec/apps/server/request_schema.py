"""Requests in the form of OpenAI's API; sampling and fields of other servers are in request_fields.py.

Types are strict ("1" is no number), as our OpenAPI description says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator

from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import (
    ConstraintFields,
    ImageUrl,
    OtherFields,
    RequestPart,
    ToolName,
    ignore,
    without_nulls,
)
from edgespec.decoding.choices import DrafterName
from edgespec.decoding.option_table import GENERATION, LARGEST_INT, MAX_GAMMA, MAX_LOGPROBS
from edgespec.decoding.records import Token
from edgespec.llama.chat_template import Effort

# ---- an assistant's message as a client sends it back: what of it is read, whichever server wrote it ----


CONTENT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": ["string", "object"]}},
            {"type": "null"},
        ]
    }
)
CALLS_SCHEMA = WithJsonSchema(
    {
        "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}],
        "description": "Its calls, with the name of the function and its arguments, as text or an object.",
    }
)

_THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "thinking",
    "thinking_blocks",
    "reasoning_details",
)
"""Names of the thoughts: DeepSeek's and llama-server's, vLLM's and OpenRouter's, Ollama's, LiteLLM's."""

_READ_ELSEWHERE = {*_THOUGHTS, "refusal", "audio", "function_call"} - {"reasoning_content"}
"""What is read as content, thoughts or calls, or has no effect in an earlier answer."""

_PARTS_SAID = ("text", "output_text", "refusal")
_PARTS_THOUGHT = ("thinking", "reasoning")
_TEXTS = ("text", "thinking", "reasoning", "refusal", "summary", "content")  # where a part has its text


def as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant's message in the form of `AssistantMessage`.

    Values that no server sends, such as a number for the content, are left for validation to refuse.
    """
    read = without_nulls(message)
    thoughts = [found for name in _THOUGHTS if (found := _text_of(read.get(name)))]
    if isinstance(content := read.get("content"), list):
        kinds = [(_kind(part), part) for part in content]
        read["content"] = "\n".join(_text_of(part) for kind, part in kinds if kind in _PARTS_SAID)
        thoughts += [_text_of(part) for kind, part in kinds if kind in _PARTS_THOUGHT]
        ignore(f"content of type {kind}" for kind, _ in kinds if kind not in _PARTS_SAID + _PARTS_THOUGHT)
    spoken = read["audio"].get("transcript") if isinstance(read.get("audio"), dict) else None
    if not read.get("content") and (said := _text_of(read.get("refusal")) or _text_of(spoken)):
        read["content"] = said
    if thoughts:
        read["reasoning_content"] = thoughts[0]  # the others say the same
    older = read.get("function_call")
    given = read.get("tool_calls") or ([{"function": older}] if older else [])
    if isinstance(given, list) and given:
        calls = [_call(call) for call in given]
        read["tool_calls"] = [call for call in calls if call]
        ignore([] if all(calls) else ["tool_calls without a function"])
    return {
        name: value for name, value in read.items() if name not in _READ_ELSEWHERE and value not in ([], {})
    }


def _call(call: object) -> dict[str, Any] | None:
    """Return a call of an earlier answer; None if it names no function, as those of hosted tools."""
    call = call if isinstance(call, dict) else {}
    called = call.get("function") or call.get("custom")
    if not isinstance(called, dict) or not isinstance(name := called.get("name"), str):
        return None
    arguments = called.get("arguments", called.get("input"))
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    identity = None if call.get("id") is None else str(call["id"])
    return {"id": identity, "function": {"name": name, "arguments": arguments}}


def _kind(part: object) -> str:
    return str(part.get("type", "text")) if isinstance(part, dict) else "text"


def _text_of(value: object) -> str:
    """Return the text of what was said or thought: a text, a part that has one, or a list of these."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text_of, value)))
    if isinstance(value, dict):
        return next(filter(None, (_text_of(value.get(name)) for name in _TEXTS)), "")
    return ""


# ---- requests ----


MAX_CHOICES = 128
"""Most answers to a request, as in OpenAI's API."""

MAX_PROMPTS = 2048
"""Most prompts of a request, as in OpenAI's API."""


MAX_IMAGES = 64
"""Most images of a request."""


class TextPart(RequestPart):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ImageFile(RequestPart):
    """The file of an image, in the request itself."""

    url: ImageUrl


class ImagePart(RequestPart):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageFile


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Content = str | Annotated[list[ContentPart], Field(min_length=1)]


class GivenMessage(RequestPart):
    """Instructions, a message of the user, or the result of a called function.

    "developer" is OpenAI's newer name for "system", "function" its older one for "tool".
    """

    role: Literal["system", "developer", "user", "tool", "function"]
    content: Content
    name: str | None = Field(None, description="Who speaks: handed to the chat template.")
    tool_call_id: str | None = None

    @property
    def images(self) -> list[bytes]:
        """The files of its images."""
        parts = [] if isinstance(self.content, str) else self.content
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    @model_validator(mode="after")
    def _instructs_in_words(self) -> Self:
        if self.role in ("system", "developer") and self.images:
            raise ValueError("instructions are text: send images as the user")
        return self


class ToolCallFunction(RequestPart):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(RequestPart):
    """A call that the model made in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction


class AssistantMessage(RequestPart):
    """An earlier answer, as this server or another one wrote it; other facts in it have no effect."""

    role: Literal["assistant"]
    name: str | None = None
    content: Annotated[str | None, CONTENT_SCHEMA] = None
    tool_calls: Annotated[list[ToolCall] | None, CALLS_SCHEMA] = None
    reasoning_content: Annotated[str | None, WithJsonSchema({})] = Field(
        None, description="Its thoughts, also as reasoning and by other names: handed to the chat template."
    )

    @model_validator(mode="before")
    @classmethod
    def _as_read(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        return as_read(data) if isinstance(data, dict) else data


Message = Annotated[GivenMessage | AssistantMessage, Field(discriminator="role")]


class ToolFunction(RequestPart):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestPart):
    """A tool, which is a function: OpenAI's hosted tools are not supported."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(RequestPart):
    """A function of `tools`; other fields of it that a client repeats change nothing."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    name: str


class NamedTool(RequestPart):
    """A tool by its name; as `tool_choice` it forces the function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestPart):
    """Functions of `tools` that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(RequestPart):
    """A `tool_choice` that allows some of the functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class TextFormat(RequestPart):
    """The form of an answer that is any text."""

    type: Literal["text"]


class JsonFormat(RequestPart):
    """Any JSON object, or JSON that matches a schema, as in llama-server."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def whole(self) -> dict[str, Any]:
        """The schema."""
        return {"type": "object"} if self.schema_ is None else self.schema_


class JsonSchema(RequestPart):
    """A JSON schema that the answer has to match, with a name."""

    name: str = "response"
    description: str | None = Field(None, description="Changes nothing: the prompt is left alone.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(
        None, description="true: a schema that cannot be enforced in every part is refused."
    )


class SchemaFormat(RequestPart):
    """JSON that matches a schema: OpenAI's form, or with the parts of `json_schema` beside the type."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="llama-server's.")
    name: str | None = Field(None, description="Sent back by /v1/responses.")
    description: str | None = Field(None, description="Sent back by /v1/responses.")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_one_schema(self) -> Self:
        if (self.json_schema is None) == (self.schema_ is None):
            raise ValueError("send the schema as json_schema.schema, or as schema")
        return self

    @property
    def whole(self) -> dict[str, Any]:
        """The schema, wherever in the request it stands."""
        return self.json_schema.schema_ if self.json_schema else self.schema_ or {}

    @property
    def is_strict(self) -> bool:
        """Whether a schema that cannot be enforced in every part is refused."""
        return bool(self.strict or (self.json_schema and self.json_schema.strict))


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class SpeculativeOptions(RequestPart):
    """edgespec's own: how this answer is drafted. None of it changes what may be answered."""

    drafter: DrafterName | None = None
    gamma: int | None = Field(None, ge=0, le=MAX_GAMMA, description=GENERATION["gamma"].help)


class AdapterScale(RequestPart):
    """llama-server's: the scale of an adapter, by its number in /lora-adapters."""

    id: int = Field(ge=0)
    scale: float


class StreamOptions(RequestPart):
    """What a stream sends besides text: tokens used, at its end."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


TokenLimit = Annotated[int, Field(ge=-2)] | None
"""Most tokens of an answer; -1, and llama-server's -2: as many as the context holds."""


ThoughtTokens = Annotated[int, Field(ge=-1, le=LARGEST_INT)] | None


class GenerationRequest(ConstraintFields, OtherFields):
    """The fields of all requests for a generation."""

    model: RequestedModel = Field(ALIAS, description="A name that /v1/models lists; default: the first.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit = Field(
        None, description="Cut to what fits in the context; -1, or -2: as many as it holds."
    )
    n_predict: TokenLimit = Field(None, description="llama-server's name of max_tokens.")
    repetition_penalty: float | None = Field(
        None, ge=0.001, le=1000, description="vLLM's: repeat_penalty over the whole text."
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31)]] | None = Field(
        None, description="vLLM's: tokens that end the text and are no part of it."
    )
    ignore_eos: bool | None = Field(None, description="The model may not end the text: max_tokens does.")
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64, description=GENERATION["seed"].help)
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
        | None
    ) = None
    user: str | None = Field(
        None, description="Who waits in the queue; by default the API key, or the address."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    speculative: SpeculativeOptions | None = None
    lora: list[AdapterScale] | None = Field(None, description="Adapters that are left out are off.")


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenLimit = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | Literal[0] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='More variables of the chat template, such as {"enable_thinking": false}.'
    )
    reasoning_effort: Effort | None = Field(
        None, description="How much the model thinks before it answers; none: it does not."
    )
    reasoning_budget: ThoughtTokens = Field(None, description=GENERATION["reasoning_budget"].help)
    reasoning_budget_tokens: ThoughtTokens = Field(None, description="llama-server's reasoning_budget.")
    thinking_budget_tokens: ThoughtTokens = Field(None, description="llama-server's, too.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message, which is the assistant's."
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: do not begin the assistant's message. Default true."
    )
    modalities: list[Literal["text"]] | None = None
    parse_special: bool | None = Field(
        None, description="Read names of control tokens in messages and tools as these tokens; default false."
    )


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions. Its `max_tokens` is 16 where none is given, as OpenAI's."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ]
    ) = Field(description="Text or token ids, or a list of such prompts.")
    max_tokens: TokenLimit = Field(
        None, description="Cut to what fits in the context, as -1 is; 0 only with echo: the prompt alone."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Write this many; the n likeliest a token are the answer."
    )
    echo: bool | None = Field(None, description="Whether the answer begins with the prompt.")
    suffix: str | None = Field(None, description="What follows the answer; needs a model trained for it.")
    parse_special: bool | None = Field(
        None, description="Read names of control tokens in a prompt as these tokens; default true."
    )
    response_format: ResponseFormat | None = None


# ---- infill: llama-server's ----


class OtherFile(RequestPart):
    """A part of another file of the project."""

    text: str
    filename: str | None = None


class InfillRequest(GenerationRequest):
    """The body of POST /infill: the text before the cursor is `input_prefix`, then `prompt`."""

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
