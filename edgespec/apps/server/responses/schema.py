"""Requests in the form of OpenAI's Responses API: the fields, the items of the input, the tools.

An item is a part of an earlier answer or what a client adds to it: of an item's other fields, which are facts
of a server, nothing is read.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.json_schema import SkipJsonSchema

from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import OtherFields, RequestPart, ToolName, in_form, only
from edgespec.apps.server.request_schema import SpeculativeOptions
from edgespec.apps.server.response_schema import CachedTokens, DraftUsage, Usage
from edgespec.decoding.option_table import GENERATION, MAX_LOGPROBS

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


# ---- items of the input ----


class ItemPart(RequestPart):
    """An item, or a part of one."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})


class ItemText(ItemPart):
    """A part of a text: what was asked, answered, refused or returned by a tool."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str = ""

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, kind: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if isinstance(kind, str) and kind not in (*_TEXTS, "refusal"):
            raise ValueError(f"content of type {kind[:40]!r} is not supported: this model reads text only")
        return kind


ItemContent = str | list[ItemText]


def text_of(content: ItemContent) -> str:
    """Return the text of an item's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal for part in content)


class MessageItem(ItemPart):
    """A message of anybody; where an item has no type, it is one."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class ReasoningItem(ItemPart):
    """The thoughts before an answer: as text, or as this server made `encrypted_content` of them."""

    type: Literal["reasoning"]
    summary: list[ItemText] | None = None
    content: list[ItemText] | None = None
    encrypted_content: str | None = None


class CallItem(ItemPart):
    """A call of an earlier answer."""

    call_id: str
    name: str
    namespace: str | None = None


class FunctionCallItem(CallItem):
    """An earlier call of a function: its name, and its arguments as JSON text."""

    type: Literal["function_call"]
    arguments: str


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(ItemPart):
    """The result of a tool's call, which the client made: `call_id` says which call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: ItemContent


Item = Annotated[
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem,
    Field(discriminator="type"),
]


# ---- tools ----


class ToolDefinition(RequestPart):
    """Fields that functions and custom tools share. The client runs them."""

    name: ToolName
    description: str | None = None
    defer_loading: Any = Field(None, description="Changes nothing: every tool is offered at once.")
    allowed_callers: Any = Field(None, description="Changes nothing: the model itself calls.")


class FunctionDefinition(ToolDefinition):
    """A function; `parameters` is a JSON schema of an object."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = Field(None, description="Changes nothing.")


class PlainInput(RequestPart):
    """The format of a custom tool that takes any text."""

    type: Literal["text"]


class GrammarInput(RequestPart):
    """The format of a custom tool whose text matches a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomDefinition(ToolDefinition):
    """A tool that takes one text; `format` says of which form, None: any."""

    type: Literal["custom"]
    format: Annotated[PlainInput | GrammarInput, Field(discriminator="type")] | None = None


_FLAT = in_form(
    '{"type": "function", "name": ..., "parameters": ...}', "type", "function", "input_schema", "inputSchema"
)
CalledDefinition = Annotated[FunctionDefinition | CustomDefinition, Field(discriminator="type"), _FLAT]


class NamespaceDefinition(RequestPart):
    """Tools with a name in common, which a call tells beside its own."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[CalledDefinition]


class SearchDefinition(ItemPart):
    """A search of OpenAI's, of pages or of tools, which Codex offers unasked: left out, with a warning."""

    type: Literal["web_search", "tool_search"]


ToolEntry = Annotated[
    FunctionDefinition | CustomDefinition | NamespaceDefinition | SearchDefinition,
    Field(discriminator="type"),
    _FLAT,
]


class ChosenTool(ItemPart):
    """A tool by its name; what else a client repeats of it changes nothing."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedChoice(RequestPart):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


_CHOSEN = '{"type": "function", "name": ...}'
ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | AllowedChoice,
    in_form(_CHOSEN, "type", "function"),
    only(
        f'"none", "auto", "required", or {_CHOSEN}, or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    ),
]


# ---- the request ----


class PlainAnswer(RequestPart):
    """The form of an answer that is any text."""

    type: Literal["text"]


class ObjectAnswer(RequestPart):
    """The form of an answer that is any JSON object."""

    type: Literal["json_object"]


class SchemaAnswer(RequestPart):
    """The form of an answer that is JSON and matches a schema."""

    type: Literal["json_schema"]
    name: str = "response"
    description: str | None = Field(None, description="Changes nothing: the prompt is left alone.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(
        None, description="true: a schema that cannot be enforced in every part is refused."
    )


class TextOptions(RequestPart):
    """The form of the answer's text; `verbosity` changes nothing."""

    format: Annotated[PlainAnswer | ObjectAnswer | SchemaAnswer, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="No model here knows it: a warning says so."
    )


class ReasoningOptions(RequestPart):
    """How much the model thinks before it answers."""

    effort: str | None = Field(None, description="As reasoning_effort of a chat completion.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Changes nothing: the thoughts come as they are."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The older name of summary."
    )
    context: Literal["auto"] | None = Field(None, description="The chat template decides.")
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(RequestPart):
    """Options of a stream, none of which changes anything."""

    include_obfuscation: bool | None = Field(None, description="OpenAI's; changes nothing.")


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Those of tools and pictures that are not here change nothing."""


_ABSENT = {
    "conversation": "send its items, or previous_response_id",
    "prompt": "send its text as instructions",
    "context_management": "send less",
    "moderation": "nothing is judged here",
}
"""Fields of what OpenAI keeps or does besides, and what to do instead."""


CONVERSATION = "edgespec_conversation"
"""The field with the items of the stored conversation that a request goes on with, which the server adds."""


class ResponsesRequest(OtherFields):
    """The body of POST /v1/responses."""

    model: RequestedModel = Field(ALIAS, description="A name that /v1/models lists; default: the first.")
    input: str | list[Item] | None = Field(
        None, description="Text, or items; what goes on with a stored response may have none."
    )
    instructions: str | None = Field(None, description="The system message; an earlier one ends with it.")
    previous_response_id: str | None = Field(None, description="Go on with a stored response.")
    store: bool | None = Field(None, description="Keep the response in memory for a while. Default true.")
    tools: list[ToolEntry] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Any = Field(None, description="Changes nothing: it counts calls of OpenAI's own tools.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, description="Cut to what fits in the context.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Accepted: what does not fit is refused, never cut."
    )
    include: list[Included] | None = None
    metadata: dict[str, str] | None = Field(None, description="Kept with the response.")
    user: str | None = Field(
        None, description="Who waits in the queue; by default the API key, or the address."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64, description=GENERATION["seed"].help)
    speculative: SpeculativeOptions | None = None
    safety_identifier: str | None = Field(None, description="Sent back.")
    prompt_cache_key: str | None = Field(None, description="Sent back: the cache finds prompts itself.")
    client_metadata: Any = Field(None, description="Codex's; changes nothing.")
    prompt_cache_options: Any = Field(None, description="Changes nothing: the cache keeps what fits.")
    background: Literal[False] | None = None
    edgespec_conversation: SkipJsonSchema[list[Item]] = Field([])
    conversation: None = None
    prompt: None = None
    context_management: None = None
    moderation: None = None

    @field_validator("input", CONVERSATION, mode="before")
    @classmethod
    def _with_types(cls, given: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if not isinstance(given, str | list | None):
            raise ValueError("must be text, or a list of items")
        return [_with_type(item) for item in given] if isinstance(given, list) else given

    @field_validator(*_ABSENT, mode="before")
    @classmethod
    def _refused(cls, given: Any, info: ValidationInfo) -> None:  # noqa: ANN401 - whatever the client sent
        if given is not None and info.field_name:
            raise ValueError(f"{info.field_name} is not supported here: {_ABSENT[info.field_name]}")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer tells how likely its tokens are."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


def _with_type(item: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    if not isinstance(item, dict) or item.get("type") is not None or "role" not in item:
        return item
    return {**item, "type": "message"}


class InputTokens(BaseModel):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def new_id(kind: str) -> str:
    """Return the id of a new response, whose kind is "resp", or of an item."""
    return f"{kind}_{secrets.token_hex(24)}"


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of a message in the answer."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[dict[str, Any]] = []


class OutputMessage(BaseModel):
    """An item with a message of the model to the user."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class OutputThought(BaseModel):
    """The text of an item of thoughts."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputReasoning(BaseModel):
    """An item with the model's thoughts."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[OutputThought] = []
    encrypted_content: str | None = Field(
        None, description="The same text in base64, for clients that send back this alone."
    )


class OutputCall(BaseModel):
    """A call of a function that the model asks for."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""


class OutputCustomCall(BaseModel):
    """A call of a custom tool that the model asks for."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: str | None = None
    input: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputDetails(CachedTokens):
    """How much of the prompt was in the cache, and how much now is."""

    cache_write_tokens: int


class OutputDetails(BaseModel):
    """How much of the answer was thought."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens counted, without the one that ends the text."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    edgespec: DraftUsage

    @classmethod
    def of(cls, usage: Usage, *, n_thought: int) -> ResponseUsage:
        """Return `usage` in this API's words; `n_thought` tokens of the answer are thoughts."""
        n_cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=n_cached, cache_write_tokens=usage.prompt_tokens - n_cached
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=n_thought),
            total_tokens=usage.total_tokens,
            edgespec=usage.edgespec,
        )


class IncompleteDetails(BaseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class ResponseError(BaseModel):
    """Why a response failed."""

    code: ErrorCode
    message: str


class ResponseAnswer(BaseModel):
    """The answer of /v1/responses: what was asked, and the items of the output."""

    id: str
    object: Literal["response"] = "response"
    created_at: int = Field(description="Seconds since 1970.")
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
