"""Answers and streamed events in the form of Anthropic's Messages API; `edgespec` fields are ours."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from edgespec.apps.server.response_schema import DraftUsage

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


class MessageUsage(BaseModel):
    """Tokens counted. All three kinds of input tokens together are the prompt's."""

    input_tokens: int = Field(description="Of the prompt: those that were read for this answer.")
    cache_creation_input_tokens: int = Field(description="Always 0: whatever is read is kept, if it fits.")
    cache_read_input_tokens: int = Field(description="Of the prompt: those that were in the cache.")
    output_tokens: int


class AnswerUsage(MessageUsage):
    """The usage of an answer that has ended."""

    edgespec: DraftUsage


class TextBlock(BaseModel):
    """A block of text in the answer."""

    type: Literal["text"] = "text"
    text: str = ""


class ThinkingBlock(BaseModel):
    """Thoughts. The signature is the same for all: this server asks for none."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(BaseModel):
    """A call that the model asks for."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesAnswer(BaseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: MessageEnd | None = None
    stop_sequence: str | None = None
    usage: AnswerUsage | MessageUsage


class TokenCount(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


# ---- events ----


class MessageStart(BaseModel):
    """The first event: an answer without content. What of the prompt was in the cache is not known yet."""

    type: Literal["message_start"] = "message_start"
    message: MessagesAnswer


class Ping(BaseModel):
    """The event "ping": the server lives, and has nothing to send yet."""

    type: Literal["ping"] = "ping"


class BlockStart(BaseModel):
    """A block of the answer begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: AnswerBlock


class TextPiece(BaseModel):
    """Text that a block goes on with."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingPiece(BaseModel):
    """Thoughts that a block goes on with."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignaturePiece(BaseModel):
    """The signature with which thoughts end."""

    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputPiece(BaseModel):
    """JSON text that a call's input goes on with."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class BlockDelta(BaseModel):
    """The event of a block that goes on: more text, thoughts or arguments."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(BaseModel):
    """The event of a block that has ended."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class AnswerEnd(BaseModel):
    """Why the answer ended, in the event before the last."""

    stop_reason: MessageEnd | None
    stop_sequence: str | None


class MessageEndDelta(BaseModel):
    """The last event but one: why the answer ended, and its usage."""

    type: Literal["message_delta"] = "message_delta"
    delta: AnswerEnd
    usage: AnswerUsage | MessageUsage


class MessageStop(BaseModel):
    """The last event of a stream."""

    type: Literal["message_stop"] = "message_stop"


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageEndDelta | MessageStop
