"""What clients get, as in OpenAI's API; `edgespec` fields are ours, and other clients ignore them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from edgespec.records import Origin, Result

FinishReason = Literal["stop", "length", "tool_calls"]
"""The end of the text or a stop string; max_tokens or the context reached; calls to be made."""


class CachedTokens(BaseModel):
    """Of the prompt."""

    cached_tokens: int


class SourceCount(BaseModel):
    """What one source of drafts did."""

    drafted: int
    accepted: int


class DraftUsage(BaseModel):
    """What drafting did for an answer."""

    drafted: int
    accepted: int
    cached_tokens: int = Field(description="Prompt tokens that were not read again.")
    tokens_per_second: float | None = Field(description="Tokens after the first over the time after it.")
    seconds: float = Field(description="Of the generation, without its time in the queue.")
    seconds_to_first_token: float | None
    sources: dict[str, SourceCount]
    joules: float | None = Field(description="null where nothing measures them.")
    seed: int | None = Field(
        description="The same seed gives this text again; null if timing influenced it, so no seed does."
    )
    note: str = Field(description="Why drafting was on or off.")


class Usage(BaseModel):
    """Tokens counted, without the one that ends the text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    edgespec: DraftUsage

    @classmethod
    def of(cls, result: Result) -> Usage:
        """Return the usage of a generation."""
        n_cached = result.n_cached
        stats = result.stats
        return cls(
            prompt_tokens=result.prompt_tokens,
            completion_tokens=len(result.token_ids),
            total_tokens=result.prompt_tokens + len(result.token_ids),
            prompt_tokens_details=CachedTokens(cached_tokens=n_cached),
            edgespec=DraftUsage(
                drafted=stats.n_drafted,
                accepted=stats.n_accepted,
                cached_tokens=n_cached,
                tokens_per_second=stats.generation_tokens_per_s,
                seconds=stats.total_s,
                seconds_to_first_token=stats.ttft_s,
                sources={
                    name: SourceCount(drafted=drafted, accepted=accepted)
                    for name, (drafted, accepted) in result.sources.items()
                },
                joules=result.energy.joules if result.energy else None,
                seed=result.seed,
                note=result.note,
            ),
        )


class TopLogprob(BaseModel):
    """A likely token; `bytes` are its own, maybe part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, with the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The target's own probabilities: natural logarithms, at temperature 1 and unfiltered."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class Call(BaseModel):
    """A call that the model wants made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Answer(BaseModel):
    """A message of the model."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[Call] | None = None


class ChatChoice(BaseModel):
    """The one answer."""

    index: Literal[0] = 0
    message: Answer
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class Completion(BaseModel):
    """What all answers and chunks begin with."""

    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(description="Of this version, model and kernels.")


class ChatCompletion(Completion):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(BaseModel):
    """A part of a call: the name first, then the arguments."""

    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """A part of the call number `index`."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """The one answer's next part."""

    index: Literal[0] = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class Origins(BaseModel):
    """Where the text of a chunk comes from: characters and their origin, in order."""

    origins: list[tuple[int, Origin]]
    n_tokens: int
    """Tokens whose text begins in the chunk."""


class ChatChunk(Completion):
    """A `data:` line of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    edgespec: Origins | None = None


class TextLogprobs(BaseModel):
    """As ChatLogprobs, in the form of the older API."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    """The one text, or its next part."""

    index: Literal[0] = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextCompletion(Completion):
    """The answer of /v1/completions, and a `data:` line of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = None
    edgespec: Origins | None = None


class ServedModel(BaseModel):
    """What /v1/models says of the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "edgespec"
    edgespec: ModelFacts


class ModelFacts(BaseModel):
    """What a client may want to know of the pair."""

    aliases: list[str]
    draft: str | None
    drafters: list[str]
    n_ctx: int
    kernels: str
    chat: bool
    tools: bool
    energy: bool


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


class Health(BaseModel):
    """The answer of /health."""

    status: Literal["ok", "stopping"]
    busy: bool
    running: int = Field(description="Answers being written.")
    waiting: int = Field(description="Requests in the queue.")
    parallel: int = Field(description="Most answers at once.")


class ErrorBody(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The answer of every status of 400 and above."""

    error: ErrorBody
