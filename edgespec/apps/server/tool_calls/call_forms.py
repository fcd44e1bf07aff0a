# ruff: noqa: RUF001 - DeepSeek's markers have a wide bar
"""Forms of calls: found in a template's text of a sample call, or known by the markers of a family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.apps.server.tool_calls.argument_values import write_json
from edgespec.llama.template_traits import FIRST, KEYS, SECOND, VALUES, CallSamples

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
        """Markers with which a call begins; () if it has none, and is a whole answer."""
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
    """Return the form of a template's samples; None if they are in none that is known."""
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
    """A form that a marker in a template's text gives away."""

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
    """Return the form of arguments in tags of their own; `closers`: of an argument and of the function."""
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
    """Return the forms to read where the model's own is `own`: all, if it is not known."""
    if own is None:
        return [HERMES, *(family.form for family in FAMILIES if family.form != HERMES)]
    return [own] if own == HERMES else [own, HERMES]
