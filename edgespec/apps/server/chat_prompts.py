"""The prompt of a chat request, as the model's template writes it, and how its answer is to be read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_schema import (
    AssistantMessage,
    ChatRequest,
    Content,
    GivenMessage,
    Message,
    TextPart,
    Tool,
    ToolCall,
)
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm, AnswerReader
from edgespec.apps.server.tool_calls.argument_values import read_json
from edgespec.apps.server.tool_calls.call_forms import (
    FAMILIES,
    HERMES,
    KEYS,
    TOOLS,
    VALUES,
    CallForm,
    CallSamples,
    TemplateTraits,
    form_of,
)
from edgespec.apps.server.tool_calls.call_parser import ReadCall
from edgespec.errors import EdgespecError
from edgespec.llama.chat_template import (
    SWITCHES,
    BrokenTemplateError,
    RefusedByTemplateError,
    Thinking,
    joined_parts,
    switches_of,
)
from edgespec.llama.control_names import ModelText
from edgespec.llama.weights import Model

_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_RESERVED = (*_OWN_FIELDS, "documents", "bos_token", "eos_token", "raise_exception", "strftime_now")


@dataclass(frozen=True)
class _Template:
    """The traits of a template, the form of its calls, and what writes its messages."""

    traits: TemplateTraits
    form: CallForm | None
    writer: MessageWriter


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    """What the template wrote, with a MEDIA_MARKER for each image."""
    images: Sequence[bytes]
    """Their files."""
    answer: AnswerForm
    """How the answer is to be read."""
    reasoning_budget: int
    """The most tokens of its thought; -1: no limit."""


class ChatPrompts:
    """Makes prompts with one model's chat templates, on any thread."""

    def __init__(self, model: Model, name: str) -> None:
        """Use the templates of `model`, which the server calls `name`."""
        self._model = model
        self._name = name
        self._templates: dict[bool, _Template] = {}

        knows = model.chat_template is not None
        plain = self._template(tools=False).traits if knows else None
        self.takes_tools = knows and self._template(tools=True).traits.takes_tools
        """Whether a function that is offered reaches the model."""
        self.thinks = bool(plain and plain.thinking)
        """Whether the template knows thoughts."""
        self.takes_later_system = bool(plain and plain.takes_later_system)
        """Whether instructions amid a conversation reach the model."""
        self.thinking_switches = switches_of(plain.template) if plain and self.thinks else frozenset[str]()
        """The variables that tell the template whether to think, or how much, of those that it reads."""

    def write(self, request: ChatRequest, tools: Sequence[Tool], thinking: Thinking) -> ChatPrompt:
        """Return the prompt of `request`, in which `tools` are offered. Raises ApiError."""
        used = self._template(tools=bool(tools))
        given = request.chat_template_kwargs or {}
        self._check_variables(given, used.traits)
        variables = {**thinking.variables(used.traits.template), **given}
        continues = _continues(request)
        offered = [tool.model_dump(exclude_none=True) for tool in tools] or None
        messages = used.writer.write(request.messages)
        template, special = used.traits.template, bool(request.parse_special)
        try:
            if continues:
                text = template.render_continued(
                    messages, offered, variables=variables, parse_special=special
                )
            else:
                text = template.render(
                    messages,
                    offered,
                    add_generation_prompt=request.add_generation_prompt is not False,
                    variables=variables,
                    parse_special=special,
                )
        except RefusedByTemplateError as error:
            line = f"the model's chat template refuses these messages: {error}"
            raise ApiError(400, line, param="messages") from None
        except BrokenTemplateError as error:
            raise self._broken(error, used.traits) from None
        images = [image for one in request.messages if isinstance(one, GivenMessage) for image in one.images]
        functions = {tool.function.name: tool.function.parameters or {} for tool in tools}
        markers = template.thinking
        begun = markers is not None and _in_thought(text, markers, messages[-1] if continues else {})
        opens = not continues and request.add_generation_prompt is not False
        text = thinking.closed(text, template, begun=begun, opens=opens)
        begun = begun and not thinking.is_off
        short_ids = bool(tools) and used.traits.short_ids
        answer = AnswerForm(functions, used.form, markers, thinks_at_once=begun, short_ids=short_ids)
        return ChatPrompt(text, images, answer, thinking.limit(template))

    def _template(self, *, tools: bool) -> _Template:
        if tools not in self._templates:
            traits = TemplateTraits(self._model.template(tools=tools))
            form = choose_form(traits, self._is_token)
            self._templates[tools] = _Template(traits, form, MessageWriter(traits, form))
        return self._templates[tools]

    def _is_token(self, marker: str) -> bool:
        return len(self._model.tokenize(marker, add_special=False, parse_special=True)) == 1

    def _broken(self, error: EdgespecError, traits: TemplateTraits) -> ApiError:
        """Return the error of a template that fails: at any messages, or at these."""
        where = f"the chat template of {self._name}"
        if traits.works:
            return ApiError(400, f"{where} fails at these messages: {error}", param="messages")
        cure = "serve it with another (--chat-template)"
        return ApiError(400, f"{where} is broken: {error}; {cure}, or use /v1/completions", param="model")

    def _check_variables(self, variables: Mapping[str, Any], traits: TemplateTraits) -> None:
        """Raise ApiError for variables that the template does not read, or that the server sets."""
        name = "chat_template_kwargs"
        for key, value in variables.items():
            if key in _OWN_FIELDS:
                raise ApiError(400, "it is a field of the request itself", field=f"{name}.{key}")
            if key in _RESERVED:
                raise ApiError(400, "templates get it from the server", field=f"{name}.{key}")
            try:
                read = traits.template.variables
            except BrokenTemplateError:
                continue  # rendering tells
            if key in read or value is None:
                continue
            if key in SWITCHES and bool(value) is (traits.thinking is not None):
                continue  # always so
            known = f"it reads {', '.join(sorted(read))}" if read else "it reads none"
            line = f"the chat template of {self._name} does not read it; {known}"
            raise ApiError(400, line, field=f"{name}.{key}")


def _continues(request: ChatRequest) -> bool:
    """Whether the last message is to be continued. Raises ApiError for contradictions."""
    if not request.continue_final_message:
        return False
    name = "continue_final_message"
    if request.add_generation_prompt:
        raise ApiError(400, "contradicts add_generation_prompt: choose one", field=name)
    last = request.messages[-1]
    if not isinstance(last, AssistantMessage):
        raise ApiError(400, f"the last message must be the assistant's, not {last.role}'s", field=name)
    if last.tool_calls:
        raise ApiError(400, "the last message has tool_calls, after which no text comes", field=name)
    return True


def _in_thought(prompt: str, thinking: tuple[str, str], continued: Mapping[str, Any]) -> bool:
    opener, closer = thinking
    if continued:
        said = str(continued["content"])
        return said.rfind(opener) > said.rfind(closer)
    return prompt.rstrip().endswith(opener)


# ---- messages as templates take them ----

_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's newer and older names, unknown to templates
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return joined_parts([part.text if isinstance(part, TextPart) else None for part in content])


def _instructs(message: Message) -> bool:
    return message.role in ("system", "developer")


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
        """Return `messages` in the template's terms.

        System messages at the beginning are joined; all are, where the template allows no later ones.
        """
        n = next((i for i, one in enumerate(messages) if not _instructs(one)), len(messages))
        first, rest = [*messages[:n]], [*messages[n:]]
        if any(map(_instructs, rest)) and not self._traits.takes_later_system:
            first += filter(_instructs, rest)
            rest = [one for one in rest if not _instructs(one)]
        if len(first) > 1:
            text = "\n\n".join(_text(one.content) for one in first)
            first = [first[0].model_copy(update={"content": text})]
        return [self._message(message) for message in [*first, *rest]]

    def _message(self, message: Message) -> dict[str, Any]:
        text = _text(message.content)
        role = _ROLES.get(message.role, message.role)
        made: dict[str, Any] = {"role": role, "content": self._parts(text)}
        if message.name:
            made["name"] = message.name
        if isinstance(message, AssistantMessage):
            if message.reasoning_content is not None:
                made["reasoning_content"] = message.reasoning_content
            if message.tool_calls and self._traits.takes_tools and not self._traits.shows_calls:
                # The template offers tools, and yet leaves earlier calls out.
                made["content"] = self._parts(self._with_calls(text, message.tool_calls))
            elif message.tool_calls:
                made["content"] = made["content"] or self._traits.style.content
                made["tool_calls"] = [self._call(call) for call in message.tool_calls]
        elif role == "tool" and message.tool_call_id is not None:
            made["tool_call_id"] = self._id(message.tool_call_id)
        return made

    def _parts(self, text: str) -> Any:  # noqa: ANN401
        return [{"type": "text", "text": text}] if self._traits.typed_content else text

    def _with_calls(self, text: str, calls: Sequence[ToolCall]) -> str:
        """Return `text`, and earlier calls in the model's form, for a template that would leave them out.

        The form's markers may be control tokens; nothing else in the message may.
        """
        named = [(call.function.name, call.function.arguments) for call in calls]
        written = self._form.write([(name, _object(arguments)) for name, arguments in named])
        joined = "\n".join(filter(None, [text, written]))
        names = self._traits.template.names
        has_names = any(any(names.find(word)) for word in (text, *(word for pair in named for word in pair)))
        return joined if has_names else ModelText(joined)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        text = call.function.arguments
        arguments = text if self._traits.style.arguments_are_text else _object(text)
        function = {"name": call.function.name, "arguments": arguments}
        made: dict[str, Any] = {"type": "function", "function": function}
        if call.id is not None:
            made["id"] = self._id(call.id)
        return made

    def _id(self, call_id: str) -> str:
        if not self._traits.short_ids or _SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]


# ---- the form of calls ----

_SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def choose_form(
    traits: TemplateTraits, has_token: Callable[[str], bool] = lambda _marker: False
) -> CallForm | None:
    """Return the form in which the model of a template writes calls; None if unknown.

    `has_token`: says whether a marker is a token of the model's own.
    """
    if traits.samples and (found := form_of(traits.samples)) and is_read(found, traits.samples):
        return found
    for text in (traits.prompt_with_tools, traits.template.source):
        for family in FAMILIES:
            if re.search(family.sign, text, re.DOTALL):
                return family.form
    return next((family.form for family in FAMILIES if any(map(has_token, family.form.openers))), None)


def is_read(form: CallForm, samples: CallSamples) -> bool:
    """Whether the reader finds a call in the text that the template writes for it."""
    reader = AnswerReader(AnswerForm(_SCHEMAS, form))
    parts = [*reader.feed(samples.one), *reader.finish()]
    calls = [part.arguments for part in parts if isinstance(part, ReadCall)]
    said = "".join(samples.one[part.start : part.end] for part in parts if not isinstance(part, ReadCall))
    return calls == [json.dumps(dict(zip(KEYS, VALUES, strict=True)))] and not said.strip()
