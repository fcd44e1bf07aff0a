"""Requests in the form of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import RequestPart, ToolName, check_needed

# ---- content ----

_NEEDED = {
    "text": ("text",),
    "document": ("source",),
    "search_result": ("source", "title", "content"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
}
"""The fields that a block of each type must have."""


def _only(*kinds: str) -> BeforeValidator:
    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in kinds:
            return value
        why = "has no place here" if kind in _NEEDED else "is not supported: this model reads text only"
        raise ValueError(f"content of type {kind[:40]!r} {why}")

    return BeforeValidator(check)


_READ = ("text", "document", "search_result")


class DocumentSource(RequestPart):
    """The text of a document, also in blocks."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str = ""
    content: str | list[Annotated[Block, _only("text")]] = ""


class Block(RequestPart):
    """A part of a message; which fields are read depends on the type, and others change nothing."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    type: Literal[
        "text", "document", "search_result", "tool_result", "thinking", "redacted_thinking", "tool_use"
    ]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field({})
    tool_use_id: str = ""
    is_error: bool = False
    content: str | list[Annotated[Block, _only(*_READ)]] = ""
    source: str | DocumentSource = ""
    title: str = ""
    context: str = ""

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        kind, source = given.get("type"), given.get("source")
        check_needed(given, _NEEDED, "content")
        if kind in ("document", "search_result") and isinstance(source, dict) != (kind == "document"):
            raise ValueError("source must be an object of a document, text of a search_result")
        if isinstance(source, dict) and source.get("type") not in ("text", "content"):
            form = str(source.get("type"))[:40]
            raise ValueError(f"a document of type {form!r} is not supported: send its text")
        return given


def _check_content(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    if not isinstance(value, str | list):
        raise ValueError("must be text, or a list of blocks")
    return value


_CONTENT = BeforeValidator(_check_content)
SystemContent = Annotated[str | list[Annotated[Block, _only("text")]], _CONTENT]


class UserTurn(RequestPart):
    """A message of the user, or results of calls."""

    role: Literal["user"]
    content: Annotated[str | list[Annotated[Block, _only(*_READ, "tool_result")]], _CONTENT]


class AssistantTurn(RequestPart):
    """An earlier answer; as the last message it is what the answer begins with."""

    role: Literal["assistant"]
    content: Annotated[
        str | list[Annotated[Block, _only("text", "thinking", "redacted_thinking", "tool_use")]], _CONTENT
    ]


class SystemTurn(RequestPart):
    """Instructions amid a conversation."""

    role: Literal["system"]
    content: SystemContent


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]

# ---- tools ----


def _of_the_client(kind: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"{kind[:40]!r} is a tool that is not here: send one with an input_schema")
    return kind


class ClientTool(RequestPart):
    """A tool of the client's own."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_of_the_client)] = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = Field(None, description="Examples within the schema.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


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
    system: SystemContent | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


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
    container: None = None
    thread: Any = Field(None, description="Refused, so that the client sends whole conversations.")
    compaction: None = None
