"""An assistant's message as a client sends it back: what of it is read, whichever server wrote it.

Clients return answers with fields of all kinds of servers. A conversation must not fail for one of them: what
was said, thought and called is read by whatever name; what else is known to change nothing is left out; the
rest stays in the message, so that the answer can tell of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import WithJsonSchema

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

_CHANGES_NOTHING = frozenset(
    {
        "annotations",
        "created",
        "created_at",
        "encrypted_content",
        "finish_reason",
        "id",
        "index",
        "logprobs",
        "metadata",
        "model",
        "object",
        "parsed",
        "provider_specific_fields",
        "reasoning_id",
        "reasoning_opaque",
        "reasoning_signature",
        "signature",
        "status",
        "stop_reason",
        "tool_call_id",
        "type",
        "usage",
    }
)
"""Facts of a server about an answer, which are no part of it."""

_PARTS_SAID = ("text", "output_text", "refusal")
_PARTS_THOUGHT = ("thinking", "reasoning")
_TEXTS = ("text", "thinking", "reasoning", "refusal", "summary", "content")  # where a part has its text


def as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant's message in the terms of `AssistantMessage`, and with what is not read of it.

    Values that no server sends, such as a number for the content, stay for the validation to refuse.
    """
    told = {name: value for name, value in message.items() if value is not None}
    read = {name: value for name, value in told.items() if name not in _CHANGES_NOTHING}
    thoughts = [found for name in _THOUGHTS if (found := _text_of(read.pop(name, None)))]
    if isinstance(content := read.get("content"), list):
        kinds = [(_kind(part), part) for part in content]
        read["content"] = "\n".join(_text_of(part) for kind, part in kinds if kind in _PARTS_SAID)
        thoughts += [_text_of(part) for kind, part in kinds if kind in _PARTS_THOUGHT]
        others = {kind for kind, _ in kinds} - {*_PARTS_SAID, *_PARTS_THOUGHT}
        read |= {f"content of type {kind}": True for kind in others}
    refusal, audio = _text_of(read.pop("refusal", None)), read.pop("audio", None)
    spoken = audio.get("transcript") if isinstance(audio, dict) else None
    if not read.get("content") and (said := refusal or _text_of(spoken)):
        read["content"] = said
    if thoughts:
        read["reasoning_content"] = thoughts[0]  # the others say the same
    return _with_calls(read)


def _with_calls(read: dict[str, Any]) -> dict[str, Any]:
    older = read.pop("function_call", None)
    given = read.get("tool_calls") or ([{"function": older}] if older else [])
    if not given or not isinstance(given, list):
        return read
    calls = [_call(call) for call in given]
    read["tool_calls"] = [call for call in calls if call]
    return read if all(calls) else read | {"tool_calls without a function": True}


def _call(call: object) -> dict[str, Any] | None:
    """Return a call of an earlier answer; None if it names no function, as those of hosted tools."""
    call = call if isinstance(call, dict) else {}
    called = call.get("function") or call.get("custom")
    if not isinstance(called, dict) or not isinstance(name := called.get("name"), str):
        return None
    arguments = called.get("arguments", called.get("input"))
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call.get("id") is None else made | {"id": str(call["id"])}


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
