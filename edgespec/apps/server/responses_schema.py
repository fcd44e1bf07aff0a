"""Requests in the form of OpenAI's Responses API: the fields, the items of the input, the tools.

An item is a part of an earlier answer, or what a client adds to it. An item's other fields, which are facts
of a server, are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import (
    ImageUrl,
    OtherFields,
    RequestPart,
    ToolName,
    check_needed,
    image_part,
    without_nulls,
)
from edgespec.apps.server.request_schema import AdapterScale, ResponseFormat, SpeculativeOptions
from edgespec.decoding.option_table import GENERATION, MAX_LOGPROBS

# ---- items of the input ----


class ItemPart(RequestPart):
    """An item, or a part of one."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})


class ItemText(ItemPart):
    """A part of a text: what was asked, answered, refused or returned by a tool."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str = ""


class ItemImage(RequestPart):
    """An image that the user or a tool sends."""

    type: Literal["input_image"]
    image_url: ImageUrl

    @model_validator(mode="before")
    @classmethod
    def _is_here(cls, given: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if isinstance(given, dict) and given.get("file_id") is not None:
            raise ValueError("no files are kept here: leave file_id out, and send the image as image_url")
        return given


ItemContent = str | list[Annotated[ItemText | ItemImage, Field(discriminator="type")]]


def text_of(content: str | Sequence[ItemText | ItemImage] | None) -> str:
    """Return the text of an item's content."""
    if isinstance(content, str):
        return content
    return "\n".join(_said(part) for part in content or () if isinstance(part, ItemText))


def _said(part: ItemText) -> str:
    return part.text or part.refusal


def content_of(content: ItemContent | None) -> str | list[dict[str, Any]]:
    """Return an item's content as that of a message: its text, or its parts where there are images."""
    if isinstance(content, str) or not any(isinstance(part, ItemImage) for part in content or ()):
        return text_of(content)
    return [
        image_part(part.image_url) if isinstance(part, ItemImage) else {"type": "text", "text": _said(part)}
        for part in content or ()
    ]


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
}
"""The fields that an item of each type must have."""


class Item(ItemPart):
    """A message, thoughts, a tool's call or its result; with a role and no type a message."""

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
    ]
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: ItemContent | None = None
    summary: list[ItemText] | None = None
    encrypted_content: str | None = Field(None, description="Thoughts, as this server wrote them.")
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = Field("", description="JSON text.")
    input: str = Field("", description="The text of a custom tool's call.")
    output: ItemContent | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if not isinstance(given, dict):
            return given
        given = without_nulls(given)
        if "role" in given:
            given = {"type": "message", **given}
        check_needed(given, _NEEDED, "an item")
        return given


# ---- tools ----


class ToolDefinition(RequestPart):
    """Fields that functions and custom tools share. The client runs them."""

    name: ToolName
    description: str | None = None


class FunctionDefinition(ToolDefinition):
    """A function; `parameters` is a JSON schema of an object."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class PlainInput(RequestPart):
    """The format of a custom tool that takes any text."""

    type: Literal["text"]


class GrammarInput(RequestPart):
    """The format of a custom tool whose text matches a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomDefinition(ToolDefinition):
    """A tool that takes one text; `format`: the form of that text, None: any."""

    type: Literal["custom"]
    format: Annotated[PlainInput | GrammarInput, Field(discriminator="type")] | None = None


CalledDefinition = Annotated[FunctionDefinition | CustomDefinition, Field(discriminator="type")]


class NamespaceDefinition(RequestPart):
    """Tools with a common name, which a call gives together with its own."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[CalledDefinition]


class SearchDefinition(ItemPart):
    """A search that OpenAI runs, of the web or of tools, which Codex offers: ignored with a warning."""

    type: Literal["web_search", "tool_search"]


ToolEntry = Annotated[
    FunctionDefinition | CustomDefinition | NamespaceDefinition | SearchDefinition,
    Field(discriminator="type"),
]


class ChosenTool(ItemPart):
    """A tool by its name; other fields of it that a client repeats change nothing."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedChoice(RequestPart):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | ChosenTool | AllowedChoice


# ---- the request ----


class TextOptions(RequestPart):
    """The form of the answer's text."""

    format: ResponseFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="No model here knows it: a warning says so."
    )


class ReasoningOptions(RequestPart):
    """How much the model thinks before it answers."""

    effort: str | None = Field(None, description="As reasoning_effort of a chat completion.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Sent back.")


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

CONVERSATION = "edgespec_conversation"
"""The field with the items of the stored conversation that a request continues, which the server adds."""


class ResponsesRequest(OtherFields):
    """The body of POST /v1/responses."""

    model: RequestedModel = Field(ALIAS, description="A name that /v1/models lists; default: the first.")
    input: str | list[Item] | None = Field(
        None, description="Text, or items; one that continues a stored response may have none."
    )
    instructions: str | None = Field(None, description="The system message; an earlier one ends with it.")
    previous_response_id: str | None = Field(None, description="Go on with a stored response.")
    store: bool | None = Field(None, description="Keep the response in memory for a while. Default true.")
    tools: list[ToolEntry] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, description="Cut to what fits in the context.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[str] | None = None
    metadata: dict[str, str] | None = Field(None, description="Kept with the response.")
    user: str | None = Field(
        None, description="Who waits in the queue; by default the API key, or the address."
    )
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64, description=GENERATION["seed"].help)
    speculative: SpeculativeOptions | None = None
    lora: list[AdapterScale] | None = None
    safety_identifier: str | None = Field(None, description="Sent back.")
    prompt_cache_key: str | None = Field(None, description="Sent back: the cache finds prompts itself.")
    background: Literal[False] | None = None
    edgespec_conversation: SkipJsonSchema[list[Item]] = Field([])
    conversation: None = None
    prompt: None = None
    context_management: None = None
    moderation: None = None

    @field_validator("input", mode="before")
    @classmethod
    def _text_or_items(cls, given: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if not isinstance(given, str | list | None):
            raise ValueError("must be text, or a list of items")
        return given

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the logprobs of its tokens."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())
