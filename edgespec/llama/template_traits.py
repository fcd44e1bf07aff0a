"""How a chat template treats tools, calls and thoughts, found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edgespec.decoding.session import n_common
from edgespec.errors import EdgespecError
from edgespec.llama.chat_template import ChatTemplate, Messages, Tools

FIRST, SECOND = "probe_alpha", "probe_beta"
"""Names of the functions in the samples."""
KEYS = ("key_one", "key_two")
"""Names of their arguments."""
VALUES = ("value one", "value two")
"""The arguments themselves."""
CALL_ID = "q1W2e3R4t"
"""The id of a call in the samples: nine letters and digits, as the strictest templates want."""

_LONG_ID = "call_0123456789abcdef01234567"  # as OpenAI's are
_TASK = "What is to be done?"
_ANSWER = "\ue000 Said \ue001"  # begins and ends with what no template writes
_EDGES = ">]\n\t :"  # what a header may end with


def _tool(name: str) -> dict[str, Any]:
    described = {key: {"type": "string", "description": f"The {key}."} for key in KEYS}
    parameters = {"type": "object", "properties": described, "required": [*KEYS]}
    function = {"name": name, "description": f"Does what {name} does.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: Tools = (_tool(FIRST), _tool(SECOND))
"""The functions in the samples."""


@dataclass(frozen=True)
class CallSamples:
    """Texts that the template expects of its model for certain calls; None: it refuses them."""

    one: str
    """A call of FIRST with KEYS and VALUES."""
    two: str | None
    """The same, and a call of SECOND."""
    bare: str | None
    """A call of FIRST without arguments."""


@dataclass(frozen=True)
class CallStyle:
    """How the template takes earlier calls."""

    content: str | None = ""
    """The content of a message that has only calls."""
    arguments_are_text: bool = False
    """Whether the arguments are JSON text; else they are the object."""


class TemplateTraits:
    """The traits of one template; each is found when it is first asked for."""

    def __init__(self, template: ChatTemplate) -> None:
        """Examine `template`; nothing raises, whatever the template does."""
        self.template = template

    @cached_property
    def takes_tools(self) -> bool:
        """Whether a function that is offered stands in the prompt."""
        return any(FIRST in text for messages in _BEGINNINGS if (text := self._render(messages)))

    @cached_property
    def works(self) -> bool:
        """Whether it can write a conversation at all."""
        return any(
            self._render(messages, tools=tools) is not None
            for messages in _BEGINNINGS
            for tools in (None, TOOLS)
        )

    @cached_property
    def thinking(self) -> tuple[str, str] | None:
        """The texts that begin and end thoughts; None if the template knows none."""
        return self.template.thinking

    @cached_property
    def typed_content(self) -> bool:
        """Whether a message's content must be a list of parts."""
        content = [{"type": "text", "text": _TASK}]
        return not self._shows(_TASK, _TASK) and self._shows(content, _TASK)

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether instructions that come after the user's message stand in the prompt."""
        later = {"role": "system", "content": FIRST}
        return FIRST in (self._render([*_BEGINNINGS[0], later], tools=None) or "")

    @cached_property
    def short_ids(self) -> bool:
        """Whether ids of calls must be nine letters and digits."""
        style = self.style
        return self._calls([FIRST], style, _LONG_ID) is None and self._calls([FIRST], style) is not None

    @cached_property
    def style(self) -> CallStyle:
        """How earlier calls are given to it, so that their names and arguments appear in the prompt."""
        for arguments_are_text in (False, True):
            for content in ("", None):
                style = CallStyle(content, arguments_are_text)
                text = self._calls([FIRST], style)
                if text and FIRST in text and VALUES[0] in text and "{'" not in text:
                    return style
        return CallStyle()

    @cached_property
    def shows_calls(self) -> bool:
        """Whether earlier calls make any difference to the prompt."""
        plain = {"role": "assistant", "content": self.style.content}
        without = self._render([*self._beginning, plain], begins_answer=False)
        return self._calls([FIRST], self.style) != without

    @cached_property
    def samples(self) -> CallSamples | None:
        """The template's own form of calls; None if it does not write earlier calls."""
        one = self._sample([FIRST])
        if one is None or not all(part in one for part in (FIRST, *KEYS, *VALUES)):
            return None
        two = self._sample([FIRST, SECOND])
        return CallSamples(one, two if two and SECOND in two else None, self._sample([FIRST], {}))

    @cached_property
    def prompt_with_tools(self) -> str:
        """A prompt that offers functions; empty if the template fails at it."""
        return next((text for messages in _BEGINNINGS if (text := self._render(messages))), "")

    @cached_property
    def _beginning(self) -> Messages:
        """The conversation before a call: one in which functions are offered, where any is."""
        offered = (m for m in _BEGINNINGS if FIRST in (self._render(m) or ""))
        return next(offered, _BEGINNINGS[0])

    def _sample(self, names: Sequence[str], arguments: Mapping[str, str] | None = None) -> str | None:
        """The model's text for these calls, without the end of its turn."""
        text = self._calls(names, self.style, arguments=arguments)
        answer = {"role": "assistant", "content": _ANSWER}
        said = self._render([*self._beginning, answer], begins_answer=False)
        if not text:
            return None
        begun = self._render(self._beginning)
        tail = ""
        if said and _ANSWER in said:
            tail = said.partition(_ANSWER)[2]
        if begun and text.startswith(begun):
            text = text[len(begun) :]
        elif said:
            shared = n_common(text, said)
            while shared and text[shared - 1] not in _EDGES:
                shared -= 1  # a marker's first characters may be those of another
            text = text[shared:]
        for end in (_shared_marks(text, tail), self.template.eos):
            if end:
                text = text.removesuffix(end)
        if self.thinking and (thought := text.partition(FIRST)[0].rpartition(self.thinking[1])[1]):
            text = text.partition(thought)[2].lstrip()
        return text

    def _calls(
        self,
        names: Sequence[str],
        style: CallStyle,
        call_id: str = CALL_ID,
        arguments: Mapping[str, str] | None = None,
    ) -> str | None:
        given: Any = dict(zip(KEYS, VALUES, strict=True)) if arguments is None else {**arguments}
        if style.arguments_are_text:
            given = '{"' + '", "'.join(f'{key}": "{value}' for key, value in given.items()) + '"}'
            given = given if arguments is None else "{}"
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
            for name in names
        ]
        message = {"role": "assistant", "content": style.content, "tool_calls": calls}
        return self._render([*self._beginning, message], begins_answer=False)

    def _shows(self, content: object, needle: str) -> bool:
        return needle in (self._render([{"role": "user", "content": content}], tools=None) or "")

    def _render(
        self, messages: Messages, *, tools: Tools | None = TOOLS, begins_answer: bool = True
    ) -> str | None:
        try:
            return self.template.render(messages, tools, add_generation_prompt=begins_answer)
        except EdgespecError:
            return None


_BEGINNINGS: tuple[Messages, ...] = (
    ({"role": "user", "content": _TASK},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": _TASK}),
)


def _shared_marks(one: str, other: str) -> str:
    n = n_common(one[::-1], other[::-1])
    end = one[len(one) - n :]
    starts = [0] if end == other else [at for at in (end.find("<"), end.find("\n")) if at >= 0]
    return end[min(starts, default=n) :]
