"""Answers in the form of OpenAI's API; `edgespec` fields are ours, and other clients ignore them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from edgespec.decoding.records import Result

FinishReason = Literal["stop", "length", "tool_calls"]
"""The end of the text or a stop string; max_tokens or the context reached; calls to be made."""


class DraftUsage(TypedDict):
    """The figures of an answer: its drafting, time and energy."""

    drafted: int
    accepted: int
    cached_tokens: int
    """Prompt tokens that were in the cache."""
    exact: bool
    """Whether the text is distributed as the target's own."""
    tokens_per_second: float | None
    """Tokens after the first over the time after it; of several texts the mean."""
    seconds: float
    """Without the time in the queue; of several texts the sum."""
    seconds_to_first_token: float | None
    sources: dict[str, dict[str, int]]
    """Tokens that each source of drafts proposed, `drafted`, and those `accepted`."""
    joules: float | None
    """None if nothing measures them."""
    seed: int | None
    """The same seed gives this text again; None if timing influenced it, so no seed does."""
    note: str
    """What was drafted, or why nothing was."""
    warnings: NotRequired[list[str]]
    """Parts of the request that are done only in part."""


class Usage(TypedDict):
    """Tokens counted, without the one that ends the text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: NotRequired[dict[str, int]]
    """Of a model that thinks."""
    edgespec: DraftUsage


def usage_of(
    results: Sequence[Result],
    *,
    n_prompts: int = 1,
    n_thought: int | None = None,
    warnings: Sequence[str] = (),
) -> Usage:
    """Return the usage of a request's generations; each of its prompts has the same number of them.

    A prompt counts once. Seed and note are those of the first generation. `n_thought`: tokens of thoughts;
    None for a model that does not think.
    """
    first, prompts = results[0], results[:: len(results) // n_prompts]
    n_prompt = sum(result.prompt_tokens for result in prompts)
    n_cached = sum(result.n_cached for result in prompts)
    n_tokens = sum(len(result.token_ids) for result in results)
    joules = [result.energy.joules for result in results if result.energy and result.energy.joules]
    figures: DraftUsage = {
        "drafted": sum(result.stats.n_drafted for result in results),
        "accepted": sum(result.stats.n_accepted for result in results),
        "cached_tokens": n_cached,
        "exact": all(result.exact for result in results),
        "tokens_per_second": _mean(result.stats.generation_tokens_per_s for result in results),
        "seconds": sum(result.stats.total_s for result in results),
        "seconds_to_first_token": first.stats.ttft_s,
        "sources": _sources(results),
        "joules": sum(joules) if joules else None,
        "seed": first.seed,
        "note": first.note,
    }
    if warnings:
        figures["warnings"] = [*warnings]
    usage: Usage = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "edgespec": figures,
    }
    if n_thought is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": n_thought}
    return usage


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sources(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for result in results:
        for name, (drafted, accepted) in result.sources.items():
            so_far = found.setdefault(name, {"drafted": 0, "accepted": 0})
            so_far["drafted"] += drafted
            so_far["accepted"] += accepted
    return found


class AnswerMessage(TypedDict):
    """The message of an answer: text, thoughts, and calls of tools."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    refusal: None
    tool_calls: NotRequired[list[dict[str, Any]]]


class ChatChoice(TypedDict):
    """One of the answers (`n`) to a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    """The target's own probabilities: natural logarithms, at temperature 1 and unfiltered."""
    finish_reason: FinishReason


class TextChoice(TypedDict):
    """A text; its logprobs are in the form of the older API, None for a prompt's first token."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None


class CompletionBase(TypedDict):
    """The fields that chat and text completions share."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Of this version, model and kernels."""
    usage: Usage


class ChatCompletion(CompletionBase):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(CompletionBase):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelEntry(TypedDict):
    """A model in the answer of /v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    edgespec: dict[str, Any]
    """What it can do, its other names, and its context."""


class ModelList(TypedDict):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]
