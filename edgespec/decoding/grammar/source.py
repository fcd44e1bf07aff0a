"""Grammars in the forms that users write, read and checked before any model is loaded.

llguidance compiles them all. It limits the time and memory that a grammar takes, but descends into rules that
refer to rules: so the length of a text is limited here, and it is compiled on a large stack.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from edgespec.decoding.json_schema.reading import Schema, compiled, read_schema
from edgespec.decoding.json_schema.words import explained
from edgespec.errors import UsageError

# ---- llama.cpp's GBNF, put so that llguidance's converter to Lark reads it as llama.cpp does ----


MOST_RULES = 3_000
"""Two seconds of the converter, which looks at all rules for each that it finds to be one of characters."""

_PART = re.compile(
    r'(?P<string>"(?:\\.?|[^"\\])*+(?:"|\Z))|(?P<set>\[(?:\\.?|[^\]\\])*+(?:\]|\Z))'
    r"|(?P<comment>#[^\n]*)|(?P<name>[a-zA-Z0-9_-]+)|\.",
    re.DOTALL,
)
_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_RULE = re.compile(r"^[ \t]*([a-zA-Z0-9_-]+)[ \t]*::=", re.MULTILINE)
_ANY = "[\\x00-\U0010ffff]"
_SET_OPERATORS = {"&&": r"&\x26", "~~": r"~\x7E", "--": r"-\x2D"}  # which a regular expression knows


def to_lark(text: str) -> str:
    """Return the Lark grammar of `text`; its rule "root" becomes "start".

    Raises UsageError, without the name of a file, for what is no GBNF.
    """
    plain = _PART.sub(lambda part: "" if part["comment"] else '""' if part["string"] else part[0], text)
    rules = Counter(_RULE.findall(plain))
    if len(rules) > MOST_RULES:
        raise UsageError(f"has {len(rules):,} rules; at most {MOST_RULES:,} are taken")
    twice = [name for name, n in rules.items() if n > 1]
    if twice:
        raise UsageError(f"the rule {twice[0]} is defined twice")
    try:
        return gbnf_to_lark(_PART.sub(_put, text))
    except RecursionError:
        raise UsageError("the grammar is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the converter raises plain exceptions
        raise UsageError(" ".join(str(error).split())) from None


def _put(part: re.Match[str]) -> str:
    found = part[0]
    if part["string"]:
        return _CODE.sub(_character, found)
    if part["set"]:
        found = _CODE.sub(_character, found)
        for operator, escaped in _SET_OPERATORS.items():
            found = found.replace(operator, escaped)
        return found
    if found == "start":
        return "start-rule"
    return _ANY if found == "." else found


def _character(code: re.Match[str]) -> str:
    number = int(code[1] or code[2], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise UsageError(f"{code[0]} is no character")
    return f"\\x{number:02X}" if number < 0x80 else chr(number)


# ---- source ----


MOST_GRAMMAR, MOST_SCHEMA = 1 << 18, 1 << 20
"""Longest texts, in characters."""

_STACK = 256 << 20  # bytes, of which those are used that are needed: the longest texts need a quarter
_SHOWN = 160  # characters of the library's messages
_COUNTED = re.compile(
    r"minProperties \(\d+\) is greater than number of properties \(\d+\)"
)  # less the required
_LATER = "no tokenizer"  # begins its remark on tokens named by number, which a model is needed to check

_GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++\s*+::=", re.MULTILINE)
_stack_size = threading.Lock()
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as llguidance compiles it. The constructors below raise UsageError for what is none."""

    compiled: str
    name: str
    """The name that errors use."""
    warnings: tuple[str, ...] = ()
    """Parts of it that are enforced only in part, or not at all."""

    @classmethod
    def gbnf(cls, text: str, name: str) -> GrammarSource:
        """Read llama.cpp's GBNF; the text must match the rule "root"."""
        _check_length(text, MOST_GRAMMAR, name)
        return cls.lark(_named(name, lambda: to_lark(text)), name, most=2 * MOST_GRAMMAR)

    @classmethod
    def lark(cls, text: str, name: str, *, most: int = MOST_GRAMMAR) -> GrammarSource:
        """Read Lark in llguidance's dialect; the text must match the rule "start"."""
        _check_length(text, most, name)
        return _checked(LLMatcher.grammar_from_lark(text), name)

    @classmethod
    def any(cls, text: str, name: str) -> GrammarSource:
        """Read GBNF, whose rules are told by "::=", or else Lark."""
        return cls.gbnf(text, name) if _GBNF_RULE.search(text) else cls.lark(text, name)

    @classmethod
    def regex(cls, pattern: str, name: str) -> GrammarSource:
        """Read a regular expression, which the whole text must match."""
        _check_length(pattern, MOST_GRAMMAR, name)
        return _checked(LLMatcher.grammar_from_regex(pattern), name)

    @classmethod
    def choice(cls, texts: Sequence[str], name: str) -> GrammarSource:
        """Take the texts of which one is to be written."""
        if not texts or not all(texts):
            raise UsageError("needs at least one text, and none that is empty", field=name)
        return cls.lark("start: " + " | ".join(json.dumps(text) for text in texts), name)

    @classmethod
    def json_schema(cls, schema: str | Schema, name: str, *, strict: bool = False) -> GrammarSource:
        """Read a JSON schema; `warnings` name what is not enforced, which with `strict` is an error."""
        given, unenforced = _named(name, lambda: read_schema(schema))
        made = _named(name, lambda: compiled(given))
        _check_length(made, MOST_SCHEMA, name)
        found = _checked(made, name)
        more = [one for message in found.warnings for one in explained(message, given, unenforced)]
        warnings = (*unenforced, *dict.fromkeys(more))
        if strict and warnings:
            raise UsageError(f"cannot be enforced: {'; '.join(warnings)}", field=name)
        return replace(found, warnings=warnings)

    def inside(self, lark: str) -> GrammarSource:
        """Return the grammar of `lark`, in which @answer stands for this one. Raises UsageError."""
        try:
            own = json.loads(self.compiled)["grammars"][0]
        except ValueError:
            own = {"lark_grammar": self.compiled}
        both = json.dumps({"grammars": [{"lark_grammar": lark}, own | {"name": "answer"}]})
        _check_length(both, 2 * MOST_SCHEMA, self.name)
        return _checked(both, self.name)


def on_large_stack(function: Callable[[], Found]) -> Found:
    """Call `function` in a thread with a stack of 256 MiB."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((True, function()))
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.extend((False, error))

    with _stack_size:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="edgespec-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    succeeded, found = outcome
    if not succeeded:
        raise found
    return found  # type: ignore[no-any-return]


def reason(message: str) -> str:
    """Return the library's `message` as one short line."""
    lines = message.partition("\n   1 |")[0].partition("<non-verbose/>")[0].split()  # without the grammar
    text = _COUNTED.sub("fewer properties are allowed than minProperties asks for", " ".join(lines))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _check_length(text: str, most: int, name: str) -> None:
    if len(text) > most:
        raise UsageError(f"has {len(text):,} characters; at most {most:,} are taken", field=name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"is not valid Unicode at character {error.start}", field=name) from None


def _named(name: str, read: Callable[[], Found]) -> Found:
    try:
        return read()
    except UsageError as error:
        raise UsageError(str(error), field=name) from None


def _checked(made: str, name: str) -> GrammarSource:
    is_error, messages = on_large_stack(lambda: LLMatcher.validate_grammar_with_warnings(made))
    if is_error:
        raise UsageError(reason(messages[0]), field=name)
    told = dict.fromkeys(reason(one) for one in messages if not one.startswith(_LATER))
    return GrammarSource(made, name, tuple(told))
