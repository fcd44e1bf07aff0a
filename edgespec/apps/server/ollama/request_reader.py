"""Turns Ollama's requests into those of OpenAI's API, which the server's one reader prepares."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edgespec.apps.server.api_errors import ApiError, checked, renaming, with_names
from edgespec.apps.server.ollama.options import ReadOptions, read_options
from edgespec.apps.server.ollama.request_schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaRequestMessage,
    OllamaToolCall,
)
from edgespec.apps.server.request_reader import ALIAS, PreparedText, RequestReader, Service, check_tokens
from edgespec.apps.server.request_schema import ChatRequest, CompletionRequest
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

_NAMES = {
    "response_format": "format",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
}
"""Ollama's names of OpenAI's fields."""
_EFFORTS: Mapping[Any, str] = {False: "none", "max": "xhigh"}
"""OpenAI's words for Ollama's."""


class OllamaReader:
    """Reads Ollama's requests to one model. Its methods are for any thread, and raise ApiError."""

    def __init__(self, reader: RequestReader, service: Service, model: Model) -> None:
        """Let `reader` prepare requests to `model`."""
        self._reader = reader
        self._service = service
        self._model = model

    def read(self, body: OllamaChatRequest | OllamaGenerateRequest) -> PreparedText:
        """Prepare a request that has messages or a prompt."""
        return self._conversation(body) if isinstance(body, OllamaChatRequest) else self._prompt(body)

    def _conversation(self, body: OllamaChatRequest) -> PreparedText:
        messages = openai_messages(body.messages or ())
        fields: dict[str, Any] = {"messages": messages}
        if body.tools:
            fields["tools"] = [_tool(tool) for tool in body.tools]
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True  # Ollama goes on with what an answer begins with
        return self._chat(body, fields, "messages")

    def _prompt(self, body: OllamaGenerateRequest) -> PreparedText:
        if body.raw or body.suffix or self._model.chat_template is None:
            return self._text(body)
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
        prepared = self._chat(body, {"messages": messages}, "prompt")
        if not body.context:
            return prepared
        check_tokens(body.context, self._model, "context")
        longer = replace(prepared, tokens=[*body.context, *prepared.tokens])
        return self._fitted(longer, read_options(body.options or {}), "prompt")

    def _chat(self, body: OllamaGenerationRequest, fields: dict[str, Any], param: str) -> PreparedText:
        options = read_options(body.options or {})
        fields["model"] = ALIAS
        if body.think not in (None, ""):
            fields |= self._thinking(body)
        if body.logprobs:
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
        if body.format:
            fields["response_format"] = _format(body.format)
        with renaming(partial(with_ollama_names, prompt=param)):
            prepared = self._reader.chat(checked(ChatRequest, fields))
        return self._fitted(prepared, options, param)

    def _thinking(self, body: OllamaGenerationRequest) -> dict[str, Any]:
        """Return the fields of OpenAI's API for `think`. Raises ApiError."""
        if body.think and not self._reader.thinks:
            raise ApiError(400, f'"{body.model}" does not support thinking', param="think")
        if body.think is True:  # as much as is usual
            switches = self._reader.thinking_switches - {"reasoning_effort"}
            return {"chat_template_kwargs": dict.fromkeys(switches, True)}
        return {"reasoning_effort": _EFFORTS.get(body.think, body.think)}

    def _text(self, body: OllamaGenerateRequest) -> PreparedText:
        kind = "raw mode" if body.raw else "suffix" if body.suffix else "a model without a chat template"
        for name in ("system", "context", "think"):
            if getattr(body, name):
                raise ApiError(400, f"{kind} does not support {name}: leave it out", param=name)
        options = read_options(body.options or {})
        fields: dict[str, Any] = {"model": ALIAS, "prompt": body.prompt}
        if body.format:
            fields["response_format"] = _format(body.format)
        if body.suffix:
            fields["suffix"] = body.suffix
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
        with renaming(partial(with_ollama_names, prompt="prompt")):
            prepared = self._reader.choices(checked(CompletionRequest, fields)).texts[0]
        return self._fitted(prepared, options, "prompt")

    def _fitted(self, prepared: PreparedText, options: ReadOptions, param: str) -> PreparedText:
        """Return `prepared` with Ollama's options, cut to the context that the request asks for."""
        n_ctx = min(options.n_ctx or self._service.n_ctx, self._service.n_ctx)
        room = n_ctx - len(prepared.tokens)
        if room < 1:
            whose = "options.num_ctx is" if n_ctx < self._service.n_ctx else "this server's context is"
            line = f"{param}: {len(prepared.tokens)} tokens, and {whose} {n_ctx}: send less, or allow more"
            raise ApiError(400, line, param=param, code="context_length_exceeded")
        unlimited = options.n_predict is None and n_ctx == self._service.n_ctx
        try:
            made = replace(
                prepared.options,
                params=options.params,
                n_predict=None if unlimited else min(options.n_predict or room, room),
                stop=(*prepared.options.stop, *options.stop),
                seed=options.seed,
                gamma=options.gamma,
            )
        except UsageError as error:
            name = "draft_num_predict" if error.field == "gamma" else error.field
            raise ApiError(400, error.spelled(f"options.{name}"), param="options") from None
        warnings = [re.sub(r"^\w+", lambda name: _NAMES.get(name[0], name[0]), w) for w in prepared.warnings]
        return replace(prepared, options=made, warnings=tuple(warnings))


def with_ollama_names(error: ApiError, prompt: str = "messages") -> ApiError:
    """Return `error` with the field at fault called as in Ollama's API, the messages `prompt`."""
    return with_names(error, {**_NAMES, "messages": prompt, "prompt": prompt})


def _format(wanted: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(wanted, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", **tool}  # clients may leave the type out


def openai_messages(messages: Sequence[OllamaRequestMessage]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API has them: calls with ids, and their arguments as text.

    Ollama's clients send no ids. They are made up here, as templates may need them: nine letters and digits,
    which is what Mistral's ask for. A result belongs to the call of its name, else to the first without one.
    """
    made: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role.lower(), "content": message.content or ""}
        if one["role"] == "assistant":
            one = {**(message.model_extra or {}), **one}
            if message.thinking:
                one["reasoning_content"] = message.thinking
            if message.tool_calls:
                waiting = [
                    _call(call, f"call{len(made):03}{i:02}") for i, call in enumerate(message.tool_calls)
                ]
                one["tool_calls"] = [*waiting]
        elif one["role"] == "tool":
            call = _called(message, waiting)
            one["tool_call_id"] = call["id"] if call else message.tool_call_id
            name = message.tool_name or (call and call["function"]["name"])
            if name:
                one["name"] = name
        made.append(one)
    return made


def _call(call: OllamaToolCall, identity: str) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or identity, "type": "function", "function": function}


def _called(message: OllamaRequestMessage, waiting: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Take the call that a tool's message answers out of those that wait; None if it is none of them."""
    if message.tool_call_id:
        fitting = [call for call in waiting if call["id"] == message.tool_call_id]
    else:
        fitting = [call for call in waiting if call["function"]["name"] == message.tool_name] or waiting
    if not fitting:
        return None
    call = fitting[0]
    waiting.remove(call)
    return call
