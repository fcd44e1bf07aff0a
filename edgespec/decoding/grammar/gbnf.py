"""llama.cpp's GBNF, put so that llguidance's converter to Lark reads it as llama.cpp does."""

from __future__ import annotations

import re
from collections import Counter

from llguidance.gbnf_to_lark import gbnf_to_lark

from edgespec.errors import UsageError

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
