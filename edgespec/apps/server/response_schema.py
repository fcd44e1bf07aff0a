"""Answers in the form of OpenAI's API; `edgespec` fields are ours, and other clients ignore them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from edgespec.decoding.records import Result

FinishReason = Literal["stop", "length", "tool_calls"]
"""The end of the text or a stop string; max_tokens or the context reached; calls to be made."""


class CachedTokens(BaseModel):
    """How much of the prompt was in the cache."""

    cached_tokens: int


class ThoughtTokens(BaseModel):
    """How much of the answer was thought."""

    reasoning_tokens: int


class SourceCount(BaseModel):
    """Tokens that one source of drafts proposed, and those accepted."""

    drafted: int
    accepted: int


class DraftUsage(BaseModel):
    """The figures of an answer: what drafting did for it, its time, its energy."""

    drafted: int
    accepted: int
    cached_tokens: int = Field(description="Prompt tokens that were in the cache.")
    exact: bool = Field(description="Whether the text is distributed as the target's own.")
    tokens_per_second: float | None = Field(
        description="Tokens after the first over the time after it; of several texts the mean."
    )
    seconds: float = Field(description="Without the time in the queue; of several texts the sum.")
    seconds_to_first_token: float | None
    sources: dict[str, SourceCount]
    joules: float | None = Field(description="null where nothing measures them.")
    seed: int | None = Field(
        description="The same seed gives this text again; null if timing influenced it, so no seed does."
    )
    note: str = Field(description="What was drafted, or why nothing was.")
    warnings: list[str] = Field([], description="Parts of the request that are done only in part.")


class Usage(BaseModel):
    """Tokens counted, without the one that ends the text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ThoughtTokens | None = None
    """Of a model that thinks."""
    edgespec: DraftUsage

    @classmethod
    def of(
        cls,
        *results: Result,
        n_prompts: int = 1,
        n_thought: int | None = None,
        warnings: Sequence[str] = (),
    ) -> Usage:
        """Return the usage of a request's generations, as many for each of its prompts.

        A prompt counts once. Seed and note are those of the first generation. `n_thought`: tokens of
        thoughts, None of a model that does not think.
        """
        first = results[0]
        prompts = results[:: len(results) // n_prompts]
        n_prompt = sum(result.prompt_tokens for result in prompts)
        n_cached = sum(result.n_cached for result in prompts)
        n_tokens = sum(len(result.token_ids) for result in results)
        joules = [result.energy.joules for result in results if result.energy and result.energy.joules]
        details = (
            {}
            if n_thought is None
            else {"completion_tokens_details": ThoughtTokens(reasoning_tokens=n_thought)}
        )
        warned: dict[str, Any] = {"warnings": [*warnings]} if warnings else {}
        return cls(
            prompt_tokens=n_prompt,
            completion_tokens=n_tokens,
            total_tokens=n_prompt + n_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=n_cached),
            **details,
            edgespec=DraftUsage(
                drafted=sum(result.stats.n_drafted for result in results),
                accepted=sum(result.stats.n_accepted for result in results),
                cached_tokens=n_cached,
                exact=all(result.exact for result in results),
                tokens_per_second=_mean(result.stats.generation_tokens_per_s for result in results),
                seconds=sum(result.stats.total_s for result in results),
                seconds_to_first_token=first.stats.ttft_s,
                sources=_sources(results),
                joules=sum(joules) if joules else None,
                seed=first.seed,
                note=first.note,
                **warned,
            ),
        )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sources(results: Sequence[Result]) -> dict[str, SourceCount]:
    found: dict[str, SourceCount] = {}
    for result in results:
        for name, (drafted, accepted) in result.sources.items():
            so_far = found.get(name, SourceCount(drafted=0, accepted=0))
            found[name] = SourceCount(drafted=so_far.drafted + drafted, accepted=so_far.accepted + accepted)
    return found


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


class AnswerToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(BaseModel):
    """The message of an answer: text, thoughts, and calls of tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    """The thoughts before it, where the model has any."""
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(BaseModel):
    """One of the answers (`n`) to a chat completion: its message, and why it ended."""

    index: int = 0
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class CompletionBase(BaseModel):
    """The fields that all answers and chunks begin with."""

    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(description="Of this version, model and kernels.")


class ChatCompletion(CompletionBase):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(BaseModel):
    """Logprobs as in ChatLogprobs, in the form of the older API; null for a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """A text."""

    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextCompletion(CompletionBase):
    """The answer of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelEntry(BaseModel):
    """A model in the answer of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "edgespec"
    edgespec: dict[str, Any] = Field(description="What it can do, its other names, and its context.")


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


class ErrorBody(BaseModel):
    """The error within an ErrorAnswer."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The answer of every status of 400 and above."""

    error: ErrorBody
