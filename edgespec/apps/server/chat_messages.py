"""Messages of a request as chat templates take them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from edgespec.apps.server.request_schema import AssistantMessage, Content, Message, ToolCall, ToolMessage
from edgespec.apps.server.tool_calls.argument_values import read_json
from edgespec.apps.server.tool_calls.call_forms import HERMES, CallForm
from edgespec.llama.control_names import ModelText
from edgespec.llama.template_traits import TemplateTraits

_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's newer and older names, unknown to templates
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _object(text: str) -> Any:  # noqa: ANN401 - JSON
    """Return the object that a text is; text that is no JSON is returned as it is."""
    try:
        return read_json(text)
    except ValueError:
        return text


class MessageWriter:
    """Writes messages for one template: plain text, "system", and calls as that template takes them."""

    def __init__(self, traits: TemplateTraits, form: CallForm | None = None) -> None:
        """Write for the template with these traits, whose model calls in `form`."""
        self._traits = traits
        self._form = form or HERMES

    def write(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return `messages` in the template's terms."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        text = _text(message.content)
        made: dict[str, Any] = {"role": message.role, "content": self._parts(text)}
        made["role"] = _ROLES.get(message.role, message.role)
        if name := getattr(message, "name", None):
            made["name"] = name
        if isinstance(message, ToolMessage) and message.tool_call_id is not None:
            made["tool_call_id"] = self._id(message.tool_call_id)
        if isinstance(message, AssistantMessage):
            if message.reasoning_content is not None:
                made["reasoning_content"] = message.reasoning_content
            if message.tool_calls and self._traits.takes_tools and not self._traits.shows_calls:
                # The template offers tools, and yet leaves earlier calls out.
                made["content"] = self._parts(self._with_calls(text, message.tool_calls))
            elif message.tool_calls:
                made["content"] = made["content"] or self._traits.style.content
                made["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return made

    def _parts(self, text: str) -> Any:  # noqa: ANN401
        return [{"type": "text", "text": text}] if self._traits.typed_content else text

    def _with_calls(self, text: str, calls: Sequence[ToolCall]) -> str:
        """Return `text`, and earlier calls in the model's form, for a template that would leave them out.

        The form's markers may be control tokens. They are where nothing else in the message could be.
        """
        named = [(call.function.name, call.function.arguments) for call in calls]
        written = self._form.write([(name, _object(arguments)) for name, arguments in named])
        joined = "\n".join(filter(None, [text, written]))
        names = self._traits.template.names
        has_names = any(any(names.find(word)) for word in (text, *(word for pair in named for word in pair)))
        return joined if has_names else ModelText(joined)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.function.name, "arguments": self._arguments(call.function.arguments)}
        made: dict[str, Any] = {"type": "function", "function": function}
        if call.id is not None:
            made["id"] = self._id(call.id)
        return made

    def _arguments(self, text: str) -> Any:  # noqa: ANN401 - JSON
        """Return the object that most templates write as JSON, or its text for others."""
        return text if self._traits.style.arguments_are_text else _object(text)

    def _id(self, call_id: str) -> str:
        """Return `call_id`, or one made of it where the template takes only nine letters and digits."""
        if not self._traits.short_ids or _SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]
