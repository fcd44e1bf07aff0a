# ruff: noqa: RUF001 - DeepSeek's markers have a wide bar
"""Forms of calls: derived from a template's text of a sample call, or known from a family's markers.

How a chat template treats tools, calls and thoughts is found out by rendering small conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edgespec.apps.server.tool_calls.argument_values import write_json
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
    """The form in which the template takes earlier calls."""

    content: str | None = ""
    """The content of a message that has only calls."""
    arguments_are_text: bool = False
    """Whether the arguments are JSON text; else they are the object."""


class TemplateTraits:
    """The traits of one template; each is found when it is first asked for."""

    def __init__(self, template: ChatTemplate) -> None:
        """Examine `template`; no property raises, whatever the template does."""
        self.template = template

    @cached_property
    def takes_tools(self) -> bool:
        """Whether a function that is offered appears in the prompt."""
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
        """Whether instructions that come after the user's message appear in the prompt."""
        later = {"role": "system", "content": FIRST}
        return FIRST in (self._render([*_BEGINNINGS[0], later], tools=None) or "")

    @cached_property
    def short_ids(self) -> bool:
        """Whether ids of calls must be nine letters and digits."""
        style = self.style
        return self._calls([FIRST], style, _LONG_ID) is None and self._calls([FIRST], style) is not None

    @cached_property
    def style(self) -> CallStyle:
        """The style in which earlier calls must be given so that names and arguments appear in the prompt."""
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
        """A prompt that offers functions; empty if the template fails to write it."""
        return next((text for messages in _BEGINNINGS if (text := self._render(messages))), "")

    @cached_property
    def _beginning(self) -> Messages:
        """The conversation before a call, with functions offered if the template allows it."""
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


PYTHON_TAG = "<|python_tag|>"

_MARKER = re.compile(r"<[^<>\n]+>?|\[/?[A-Z_]{3,}\]")
_JSON_START = re.compile(r"(\[\s*)?\{")


@dataclass(frozen=True)
class ArgumentForm:
    """How arguments are written one by one: NAME `first` KEY `equals` VALUE `following` KEY ... `closing`."""

    first: str
    equals: str
    following: str
    closing: str
    none: str
    """The text after the name where there are no arguments."""
    quoted: bool
    """Whether values are Python's literals; else they are bare text."""
    quote: str = ""
    """The mark around texts, where other values have none."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the arguments of a call as text in this form."""
        if not arguments:
            return self.none
        pairs = (f"{key}{self.equals}{self._value(value)}" for key, value in arguments.items())
        return self.first + self.following.join(pairs) + self.closing

    def _value(self, value: object) -> str:
        if isinstance(value, str) and not self.quoted:
            return f"{self.quote}{value}{self.quote}"
        return write_json(value)

    @property
    def opener(self) -> str:
        """The marker right before a key."""
        found = re.findall(r"<[^<>\n]*$|<[^<>\n]+>$", self.first)
        return str(found[-1]) if found else self.first.strip()


@dataclass(frozen=True)
class CallForm:
    """The form of a model's calls: `before` NAME `after` ARGUMENTS, then `between` NAME ..., then `end`."""

    before: str
    after: str
    end: str
    between: str | None
    """None: an answer has one call at most."""
    keyed: ArgumentForm | None = None
    """How arguments are written, if not as a JSON object."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers with which a call begins; () if it has none: then a call must be the whole answer."""
        found = _JSON_START.search(self.before)
        lead = self.before[: found.start()] if found else self.before
        if self.keyed and self.keyed.quoted:
            lead = lead.rstrip().removesuffix("[")
        markers = _MARKER.findall(lead)
        if not markers and lead.strip():
            markers = lead.split()[:1]
        if not markers and self.is_bare:
            markers = [PYTHON_TAG]
        return tuple(dict.fromkeys(markers))

    @property
    def closers(self) -> tuple[str, ...]:
        """Markers that may follow a call."""
        found = dict.fromkeys(_MARKER.findall(f"{self.end} {self.between or ''}"))
        return tuple(marker for marker in found if marker not in self.openers)

    @property
    def is_bare(self) -> bool:
        """Whether nothing but its brackets marks a call."""
        return self.before.lstrip()[:1] in ("{", "[") and not _MARKER.match(self.before.lstrip())

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of calls: names and arguments."""
        parts = [self.before]
        for i, (name, arguments) in enumerate(calls):
            if i:
                parts.append(self.between or f"{self.end}\n{self.before}")
            parts += [name, self.keyed.write(arguments) if self.keyed else self.after + write_json(arguments)]
        return "".join([*parts, self.end])

    @property
    def markers(self) -> frozenset[str]:
        """All markers that it consists of."""
        parts = [self.before, self.after, self.end, self.between or ""]
        if self.keyed:
            keyed = self.keyed
            parts += [keyed.first, keyed.equals, keyed.following, keyed.closing, keyed.none, keyed.quote]
        found = (marker for part in parts for marker in _MARKER.findall(part))
        return frozenset([*found, *self.openers])


def markers_in(text: str) -> list[str]:
    """Return the markers of a text: each may be a control token."""
    return _MARKER.findall(text)


def form_of(samples: CallSamples) -> CallForm | None:
    """Return the form of a template's samples; None if it is unknown."""
    return _object_form(samples) or _keyed_form(samples)


def _object_form(samples: CallSamples) -> CallForm | None:
    first = _split_object(samples.one, FIRST)
    if first is None:
        return None
    before, after, end = first
    between = None
    if samples.two and (again := _split_object(samples.two, FIRST)):
        second = _split_object(again[2], SECOND)
        if second and again[:2] == first[:2] and second[1:] == (after, end):
            between = second[0]
    return CallForm(before, after, end, between)


def _split_object(text: str, name: str) -> tuple[str, str, str] | None:
    """The texts before the name, between it and the arguments' object, and after that."""
    before, found, rest = text.partition(name)
    decoder = json.JSONDecoder()
    for start in re.finditer(r"\{", rest if found else ""):
        try:
            value, end = decoder.raw_decode(rest, start.start())
        except ValueError:
            continue
        if isinstance(value, dict) and value == dict(zip(KEYS, VALUES, strict=True)):
            return before, rest[: start.start()], rest[end:]
    return None


def _keyed_form(samples: CallSamples) -> CallForm | None:
    parts = _split_keyed(samples.one, FIRST)
    if parts is None or samples.bare is None:
        return None
    before, first, equals, following, end = parts
    quoted = equals.endswith(('"', "'"))
    none = samples.bare.partition(FIRST)[2]
    if quoted:  # the quotes are the value's
        equals, following, end = equals[:-1], following[1:], end[1:]
    shared = _shared_end(end, none)
    if re.search(r"<[^<>]*$", end.removesuffix(shared)):  # it begins within a marker
        shared = shared.partition(">")[2]
    closing = end.removesuffix(shared)
    none, quote = none.removesuffix(shared), ""
    if (mark := re.search(r"<[^<>]+>$", equals)) and closing.startswith(mark.group()):
        quote = mark.group()
        equals, following, closing = (part.replace(quote, "", 1) for part in (equals, following, closing))
    keyed = ArgumentForm(first, equals, following, closing, none, quoted, quote)
    between = None
    if samples.two and (again := _split_keyed(samples.two, FIRST)):
        rest = again[4][1:] if quoted else again[4]
        found = _split_keyed(rest, SECOND)
        if found and found[0].startswith(quote + closing):
            between = found[0].removeprefix(quote + closing)
    return CallForm(before, first, shared, between, keyed)


def _split_keyed(text: str, name: str) -> tuple[str, str, str, str, str] | None:
    """The texts before, between and after the name, its two keys and their values."""
    before, _, rest = text.partition(name)
    parts = [before]
    for needle in (KEYS[0], VALUES[0], KEYS[1], VALUES[1]):
        part, found, rest = rest.partition(needle)
        if not found:
            return None
        parts.append(part)
    first, equals, following, again = parts[1:]
    if equals.strip("\"'") != again.strip("\"'"):
        return None
    return before, first, equals, following, rest


def _shared_end(one: str, other: str) -> str:
    n = 0
    while n < min(len(one), len(other)) and one[-1 - n] == other[-1 - n]:
        n += 1
    return one[len(one) - n :]


# ---- families whose templates show no earlier calls ----


@dataclass(frozen=True)
class _Family:
    """A form of calls that a marker in a template's text identifies."""

    sign: str
    """A regular expression."""
    form: CallForm


def _tagged(open_: str, close: str) -> CallForm:
    before = f'{open_}{{"name": "'
    return CallForm(before, '", "arguments": ', f"}}{close}", f"}}{close}\n{before}")


def _listed(open_: str, close: str, *, keys: tuple[str, str] = ("name", "arguments")) -> CallForm:
    return CallForm(f'{open_}[{{"{keys[0]}": "', f'", "{keys[1]}": ', f"}}]{close}", f'}}, {{"{keys[0]}": "')


def _with_tags(
    open_: str, close: str, name: str, key: str, equals: str, closers: tuple[str, str]
) -> CallForm:
    """Return the form of arguments in their own tags; `closers`: of an argument and of the function."""
    value_end, function_end = closers
    first, _, none = name.partition("NAME")
    keyed = ArgumentForm(f"{none}{key}", equals, f"{value_end}{key}", value_end, none, quoted=False)
    before = f"{open_}{first}"
    end = f"{function_end}{close}"
    return CallForm(before, keyed.first, end, f"{end}\n{before}", keyed)


HERMES = _tagged("<tool_call>\n", "\n</tool_call>")
"""The form of most models, and of those whose own is not known."""

LLAMA = CallForm('{"name": "', '", "parameters": ', "}", '}; {"name": "')
"""A bare object."""

_GEMMA = ArgumentForm("{", ":", ",", "", "{", quoted=False, quote='<|"|>')
_PYTHON = ArgumentForm("(", "=", ", ", "", "(", quoted=True)

FAMILIES: tuple[_Family, ...] = (
    _Family(
        r"<function=[^>]*>.*<parameter=",
        _with_tags(
            "<tool_call>\n",
            "</tool_call>",
            "<function=NAME>\n",
            "<parameter=",
            ">\n",
            ("\n</parameter>\n", "</function>\n"),
        ),
    ),
    _Family(
        r"<arg_key>",
        _with_tags(
            "<tool_call>",
            "</tool_call>",
            "NAME\n",
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            ("</arg_value>\n", ""),
        ),
    ),
    _Family(r"<tool_call>", HERMES),
    _Family(
        r"\[TOOL_CALLS\].*\[ARGS\]",
        CallForm("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]"),
    ),
    _Family(r"\[TOOL_CALLS\]", _listed("[TOOL_CALLS]", "")),
    _Family(
        r"<\|tool_(call|list)_start\|>",
        CallForm("<|tool_call_start|>[", "(", ")]<|tool_call_end|>", "), ", _PYTHON),
    ),
    _Family(
        r"<｜tool▁calls▁begin｜>.*<｜tool▁sep｜>.*```json",
        CallForm(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        ),
    ),
    _Family(
        r"<｜tool▁calls▁begin｜>",
        CallForm(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        ),
    ),
    _Family(
        r"<\|START_ACTION\|>",
        _listed("<|START_ACTION|>", "<|END_ACTION|>", keys=("tool_name", "parameters")),
    ),
    _Family(r"Action:\s*```json", _listed("Action:\n```json\n", "\n```", keys=("tool_name", "parameters"))),
    _Family(r"functools\[", _listed("functools", "")),
    _Family(r"<\|tool_call\|>.*<\|/tool_call\|>", _listed("<|tool_call|>", "<|/tool_call|>")),
    _Family(
        r"<tool_call\|>",
        CallForm("<|tool_call>call:", "{", "}<tool_call|>", "}<tool_call|><|tool_call>call:", _GEMMA),
    ),
    _Family(r"<\|tool_call\|>", _listed("<|tool_call|>", "")),
    _Family(r"<TOOLCALL>", _listed("<TOOLCALL>", "</TOOLCALL>")),
    _Family(r"<tool_calls>", _listed("<tool_calls>", "</tool_calls>")),
    _Family(r'<\|python_tag\|>|"name": function name, "parameters"', LLAMA),
)
"""Known families, the likeliest first."""


def readable_forms(own: CallForm | None) -> Sequence[CallForm]:
    """Return the forms to read if the model's own is `own`: all, if that is unknown."""
    if own is None:
        return [HERMES, *(family.form for family in FAMILIES if family.form != HERMES)]
    return [own] if own == HERMES else [own, HERMES]
