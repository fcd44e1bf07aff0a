"""Patterns of strings in JSON schemas: of formats, and ECMA-262's as Rust's regex crate takes them."""

from __future__ import annotations

import re

from edgespec.errors import UsageError

_DAY = (
    "^[0-9]{4}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|"
    "^(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
STRICTER = {
    "date": (_DAY,),
    "date-time": (_DAY, "^.{17}[0-5]"),
    "email": (r"^[^@]{1,64}@(?:[^.]{1,63}\.)*[^.]{1,63}$",),
    "hostname": ("^.{1,253}$",),
    "time": ("^.{6}[0-5]",),
    **{f"uuid{version}": (f"^.{{14}}{version}",) for version in range(1, 9)},
}
"""Formats -> patterns against what the library lets pass: any 29th of February or leap second, long names."""
ENCODINGS = {
    "base16": "^(?:[0-9A-Fa-f]{2})*$",
    "base32": "^(?:[A-Z2-7]{8})*(?:[A-Z2-7]{2}={6}|[A-Z2-7]{4}={4}|[A-Z2-7]{5}={3}|[A-Z2-7]{7}=)?$",
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
"""Values of "contentEncoding" -> patterns."""

_SPACES = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}
_HEX = "[0-9a-fA-F]"
_ONE = (
    rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|\\u\{{{_HEX}{{1,6}}\}}|\\u{_HEX}{{4}}|\\x{_HEX}{{2}}"
    r"|\\c[A-Za-z]|\\[pP]\{[\w=]+\}|\\.|[^\\]"
)
_MEMBER = re.compile(rf"({_ONE})(?:-({_ONE}))?", re.DOTALL)
_PIECE = re.compile(
    r"(?P<kept>\((?:\?(?::|P?<\w+>|-?i[:)])|(?!\?))|\{[0-9]+(?:,[0-9]*)?\}|[\^$|)*+?])"
    rf"|(?P<group>\(\?(?:<?[=!]|.?))|(?P<any>\.)|\[(?P<class>(?:\\.|[^\\\]])*)\]|(?P<one>(?!\[)(?:{_ONE}))",
    re.DOTALL,
)


def rust_regex(pattern: str) -> str:
    """Return `pattern` in Rust's syntax. Raises UsageError that names what it has no word for."""
    out, at = "", 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if not piece or piece["group"]:
            ends = "a class that does not end" if pattern[at] == "[" else "a backslash at its end"
            raise UsageError(f"a group that begins with {piece['group']!a}" if piece else ends)
        at = piece.end()
        if piece["class"] is not None:
            out += _class(piece["class"])
        else:
            out += piece["kept"] or (piece["any"] and _ANY) or _written(piece["one"])
    return out


def _class(members: str) -> str:
    if members in ("", "^"):
        return r"[\s\S]" if members else r"[^\s\S]"
    out, inside = "[^" if members[0] == "^" else "[", members.removeprefix("^")
    for ends in _MEMBER.findall(inside):
        both = [_written(r"\x08" if one == r"\b" else one) for one in ends if one]
        dash = "-" if not any(one[0] == "[" or one[:2] in (r"\p", r"\P") for one in both) else r"\u{2d}"
        out += dash.join(both)
    return out + "]"


def _written(one: str) -> str:
    """Return a character, or the set that an escape stands for, as Rust writes it."""
    escaped = one[1:] if one[0] == "\\" else ""
    if escaped.lower() in _SETS:
        return f"[{'^' * escaped.isupper()}{_SETS[escaped.lower()]}]"
    if escaped[:1] in ("p", "P") and len(escaped) > 1:
        return one
    if len(escaped) > 10:  # both halves of one
        character = bytes.fromhex(one.replace("\\u", "")).decode("utf-16-be")
    elif escaped[:1] in ("u", "x") and len(escaped) > 1:
        number = int(escaped[1:].strip("{}"), 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise UsageError(f"{one}, half a character")
        character = chr(number)
    elif escaped[:1] == "c" and len(escaped) > 1:
        character = chr(ord(escaped[1]) % 32)
    elif escaped.isalnum() and escaped not in _CONTROLS:
        raise UsageError(one)
    else:
        character = _CONTROLS.get(escaped, escaped or one)
    return character if character.isalnum() else f"\\u{{{ord(character):x}}}"
