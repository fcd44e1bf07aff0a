"""The prompt of a chat request: what the model's template makes of it, and how its answer is to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.chat_messages import MessageWriter
from edgespec.apps.server.request_schema import AssistantMessage, ChatRequest, Tool
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm
from edgespec.apps.server.tool_calls.call_forms import CallForm
from edgespec.apps.server.tool_calls.form_choice import choose_form
from edgespec.errors import EdgespecError
from edgespec.llama.chat_template import BrokenTemplateError, RefusedByTemplateError
from edgespec.llama.template_traits import TemplateTraits
from edgespec.llama.weights import Model

_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_RESERVED = (*_OWN_FIELDS, "documents", "bos_token", "eos_token", "raise_exception", "strftime_now")
_THINKING_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")


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
    answer: AnswerForm
    """How the answer is to be read."""


class ChatPrompts:
    """Makes prompts with one model's chat templates. For any thread."""

    def __init__(self, model: Model, name: str) -> None:
        """Use the templates of `model`, which the server calls `name`."""
        self._model = model
        self._name = name
        self._templates: dict[bool, _Template] = {}

    @property
    def takes_tools(self) -> bool:
        """Whether a function that is offered reaches the model."""
        return self._model.chat_template is not None and self._template(tools=True).traits.takes_tools

    @property
    def thinks(self) -> bool:
        """Whether the template knows thoughts."""
        return (
            self._model.chat_template is not None and self._template(tools=False).traits.thinking is not None
        )

    @property
    def thinking_switches(self) -> frozenset[str]:
        """The variables that tell the template whether to think, or how much, of those that it reads."""
        if not self.thinks:
            return frozenset()
        try:
            return self._template(tools=False).traits.template.variables & {*_THINKING_SWITCHES}
        except BrokenTemplateError:
            return frozenset()

    def write(self, request: ChatRequest, tools: Sequence[Tool]) -> ChatPrompt:
        """Return the prompt of `request`, in which `tools` are offered. Raises ApiError."""
        used = self._template(tools=bool(tools))
        variables = request.chat_template_kwargs or {}
        self._check_variables(variables, used.traits)
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
        functions = {tool.function.name: tool.function.parameters or {} for tool in tools}
        thinking = used.traits.thinking
        begun = thinking is not None and _in_thought(text, thinking, messages[-1] if continues else {})
        short_ids = bool(tools) and used.traits.short_ids
        answer = AnswerForm(functions, used.form, thinking, thinks_at_once=begun, short_ids=short_ids)
        return ChatPrompt(text, answer)

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
        """Raise ApiError for what the template would not read, or gets from elsewhere."""
        name = "chat_template_kwargs"
        for key, value in variables.items():
            if key in _OWN_FIELDS:
                raise ApiError(400, f"{name}.{key}: it is a field of the request itself", param=name)
            if key in _RESERVED:
                raise ApiError(400, f"{name}.{key}: templates get it from the server", param=name)
            try:
                read = traits.template.variables
            except BrokenTemplateError:
                continue  # rendering tells
            if key in read or value is None:
                continue
            if key in _THINKING_SWITCHES and bool(value) is (traits.thinking is not None):
                continue  # always so
            known = f"it reads {', '.join(sorted(read))}" if read else "it reads none"
            line = f"{name}.{key}: the chat template of {self._name} does not read it; {known}"
            raise ApiError(400, line, param=name)


def _continues(request: ChatRequest) -> bool:
    """Return whether the last message is to be continued. Raises ApiError for contradictions."""
    if not request.continue_final_message:
        return False
    name = "continue_final_message"
    if request.add_generation_prompt:
        line = f"{name} and add_generation_prompt contradict each other: choose one"
        raise ApiError(400, line, param=name)
    last = request.messages[-1]
    if not isinstance(last, AssistantMessage):
        raise ApiError(
            400, f"{name}: the last message must be the assistant's, not {last.role}'s", param=name
        )
    if last.tool_calls:
        raise ApiError(400, f"{name}: the last message has tool_calls, after which no text comes", param=name)
    return True


def _in_thought(prompt: str, thinking: tuple[str, str], continued: Mapping[str, Any]) -> bool:
    """Return whether a prompt ends within a thought."""
    opener, closer = thinking
    if continued:
        said = str(continued["content"])
        return said.rfind(opener) > said.rfind(closer)
    return prompt.rstrip().endswith(opener)
