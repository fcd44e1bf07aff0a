"""LiteLLM, through the four APIs of edgespec that it knows."""

from __future__ import annotations

import json
from typing import Any

import litellm

from asked import ASKED, URL, check, read_file

_PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_FUNCTION = {"name": "read_file", "description": "Return the text of a file.", "parameters": _PARAMETERS}


def called(function: Any) -> str:  # noqa: ANN401 - LiteLLM's
    return read_file(**json.loads(function.arguments))


def chat(model: str, address: str) -> str:
    """Return the last answer of a conversation, whose answers stream."""
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    tools = [{"type": "function", "function": _FUNCTION}]
    while True:
        parts = litellm.completion(
            model=model, api_base=address, api_key="none", messages=messages, tools=tools, stream=True
        )
        message = litellm.stream_chunk_builder([*parts], messages=messages).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": called(call.function)})


def responses() -> str:
    """Return the text of the last response; each goes on with the one before."""
    said: dict[str, Any] = {"input": ASKED}
    while True:
        events = litellm.responses(
            model="openai/edgespec",
            api_base=f"{URL}/v1",
            api_key="none",
            tools=[{"type": "function", **_FUNCTION}],
            stream=True,
            **said,
        )
        answer = [*events][-1].response
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": called(call)}
            for call in calls
        ]
        said = {"input": outputs, "previous_response_id": answer.id}


check("/v1/chat/completions", chat("openai/edgespec", f"{URL}/v1"))
check("/v1/responses", responses())
check("/v1/messages", chat("anthropic/edgespec", URL))
check("/api/chat", chat("ollama_chat/edgespec", URL))
