"""Requests, answers and events in the form of Anthropic's Messages API; `edgespec` fields are ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import RequestPart, ToolName, in_form

# ---- content ----

HARMLESS = Field(None, description="Changes nothing.")


class BlockPart(RequestPart):
    """The fields that any block may have."""

    cache_control: Any = Field(None, description="Changes nothing: prompts are always cached.")


class Citations(RequestPart):
    """Whether the answer cites a document: it does not."""

    enabled: Literal[False] | None = None


class GivenText(BlockPart):
    """A block of text in a message."""

    type: Literal["text"]
    text: str
    citations: Any = Field(None, description="Changes nothing: those of an earlier answer.")


_KINDS = frozenset(
    ["text", "document", "search_result", "tool_result", "thinking", "redacted_thinking", "tool_use"]
)


def _only(*kinds: str) -> BeforeValidator:
    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in kinds:
            return value
        why = "has no place here" if kind in _KINDS else "is not supported: this model reads text only"
        raise ValueError(f"content of type {kind[:40]!r} {why}")

    return BeforeValidator(check)


TextGiven = Annotated[GivenText, _only("text")]


class TextDocument(RequestPart):
    """The source of a document that is given as text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class BlocksDocument(RequestPart):
    """The text of a document, also in blocks."""

    type: Literal["content"]
    content: str | list[TextGiven]


class GivenDocument(BlockPart):
    """A block with a document, which is read as text."""

    type: Literal["document"]
    source: Annotated[TextDocument | BlocksDocument, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        source = data.get("source") if isinstance(data, dict) else None
        kind = source.get("type") if isinstance(source, dict) else None
        if isinstance(kind, str) and kind not in ("text", "content"):
            raise ValueError(f"a document of type {kind[:40]!r} is not supported: send its text")
        return data


class GivenSearchResult(BlockPart):
    """A piece of text with its origin."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextGiven]
    citations: Citations | None = None


class GivenThoughts(BlockPart):
    """Thoughts of an earlier answer; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class SealedThoughts(BlockPart):
    """Thoughts of an earlier answer of another server, which alone can read them."""

    type: Literal["redacted_thinking"]
    data: str


class GivenCall(BlockPart):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = HARMLESS
    toolset_name: Any = HARMLESS


def _check_content(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    if not isinstance(value, str | list):
        raise ValueError("must be text, or a list of blocks")
    return value


_CONTENT = BeforeValidator(_check_content)

_READ = ("text", "document", "search_result")

ReadBlock = Annotated[
    GivenText | GivenDocument | GivenSearchResult, Field(discriminator="type"), _only(*_READ)
]


class CallResult(BlockPart):
    """The result of a tool's call, which the client made: `tool_use_id` says which call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ReadBlock] | None = None
    is_error: bool | None = None
    toolset_name: Any = HARMLESS


UserBlock = Annotated[
    GivenText | GivenDocument | GivenSearchResult | CallResult,
    Field(discriminator="type"),
    _only(*_READ, "tool_result"),
]
AssistantBlock = Annotated[
    GivenText | GivenThoughts | SealedThoughts | GivenCall,
    Field(discriminator="type"),
    _only("text", "thinking", "redacted_thinking", "tool_use"),
]

# ---- messages ----


class UserTurn(RequestPart):
    """A message of the user, or results of calls."""

    role: Literal["user"]
    content: Annotated[str | list[UserBlock], _CONTENT]


class AssistantTurn(RequestPart):
    """An earlier answer; as the last message it is what the answer begins with."""

    role: Literal["assistant"]
    content: Annotated[str | list[AssistantBlock], _CONTENT]


class SystemTurn(RequestPart):
    """Instructions amid a conversation."""

    role: Literal["system"]
    content: Annotated[str | list[TextGiven], _CONTENT]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]

# ---- tools ----


class ClientTool(RequestPart):
    """A tool that the client carries out: its own, or one whose input Anthropic describes."""

    type: str | None = Field(None, description='"custom", or "bash_...", "text_editor_...", "memory_...".')
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = Field(None, description="Examples within the schema.")
    cache_control: Any = HARMLESS
    eager_input_streaming: Any = HARMLESS
    max_characters: Any = HARMLESS
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


_FORM = in_form('{"name": ..., "input_schema": ...}', "name", "function", "parameters", "inputSchema")


class ToolChoice(RequestPart):
    """Whether a tool is called: as the model likes, any, the one of this name, none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('send the name of the tool with "type": "tool", and with no other type')
        return self


# ---- the whole ----


class ThinkingConfig(RequestPart):
    """Whether and how much the model thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Most tokens of its thoughts.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thoughts are not sent. Otherwise they are sent whole."
    )

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError('send budget_tokens with "type": "enabled", and with no other type')
        return self


class OutputFormat(RequestPart):
    """The form of an answer that is JSON and matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = HARMLESS


class OutputConfig(RequestPart):
    """How the answer is written: its form, and how much a model thinks."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much a model that thinks does so."
    )
    format: OutputFormat | None = None


class RequestMetadata(RequestPart):
    """Who asks: `user_id` says whose turn it is in the queue."""

    user_id: str | None = Field(None, description="Whose turn it is in the queue.")


class CountTokensRequest(RequestPart):
    """The body of POST /v1/messages/count_tokens."""

    model: RequestedModel = Field(ALIAS, description="A name that /v1/models lists; default: the first.")
    messages: list[Turn] = Field(min_length=1)
    system: Annotated[str | list[TextGiven], _CONTENT] | None = None
    tools: list[Annotated[ClientTool, _FORM]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")
    cache_control: Any = Field(None, description="Changes nothing: prompts are always cached.")
    context_management: Any = Field(
        None,
        description="Changes nothing: of a conversation nothing is dropped; what does not fit is refused.",
    )
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Any = HARMLESS


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(
        ge=0, description="Cut to what fits in the context; 0: the prompt is read for later."
    )
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    service_tier: Any = Field(None, description="Changes nothing: there is one tier.")
    inference_geo: Any = HARMLESS
    diagnostics: Any = HARMLESS
    fallbacks: Any = Field(None, description="Changes nothing: this model refuses nothing.")
    container: None = None
    thread: Any = Field(None, description="Refused, so that the client sends whole conversations.")
    compaction: None = None


# ---- answers ----

MessageEnd = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
"""The model's own end, max_tokens, a stop sequence, calls to be made, or the context full."""


class MessagesErrorBody(BaseModel):
    """The error within a MessagesError."""

    type: str
    message: str


class MessagesError(BaseModel):
    """The answer of every status of 400 and above, and the last event of a stream that failed."""

    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str


class TokenCount(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
