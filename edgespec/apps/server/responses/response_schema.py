"""Answers in the form of OpenAI's Responses API; `edgespec` fields are ours."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from pydantic import BaseModel, Field

from edgespec.apps.server.response_schema import CachedTokens, DraftUsage, TokenLogprob, Usage


def new_id(kind: str) -> str:
    """Return the id of a new response, whose kind is "resp", or of an item."""
    return f"{kind}_{secrets.token_hex(24)}"


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of a message in the answer."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputRefusal(BaseModel):
    """A refusal that another server's model wrote, as a client sent it back."""

    type: Literal["refusal"] = "refusal"
    refusal: str


class OutputMessage(BaseModel):
    """An item with a message of the model to the user."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText | OutputRefusal] = []


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
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
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
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(BaseModel):
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True


# ---- the input of a stored response ----


class InputTextPart(BaseModel):
    """Text of a message or of what a call gave."""

    type: Literal["input_text"] = "input_text"
    text: str


class InputMessage(BaseModel):
    """A message of the user or of the system."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    status: Literal["completed"] = "completed"
    content: list[InputTextPart]


class CallOutput(BaseModel):
    """The result of a tool's call, as the client sent it; `call_id` says which call."""

    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: Literal["completed"] = "completed"
    call_id: str
    output: str | list[InputTextPart]


ListedItem = InputMessage | CallOutput | OutputItem


class InputItemList(BaseModel):
    """The answer of GET /v1/responses/{id}/input_items: a page of the input."""

    object: Literal["list"] = "list"
    data: list[ListedItem]
    first_id: str
    last_id: str
    has_more: bool
