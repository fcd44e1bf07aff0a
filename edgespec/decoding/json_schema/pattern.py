"""Regular expressions of JSON schemas, ECMA-262's, as Rust's regex crate takes them."""

from __future__ import annotations

import re

from edgespec.errors import UsageError

_SPACES = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_SETS = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACES}]",
    "S": f"[^{_SPACES}]",
}
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}

_PIECE = re.compile(
    r"""(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})
    | \\(?:u\{(?P<long>[0-9a-fA-F]{1,6})\} | u(?P<four>[0-9a-fA-F]{4}) | x(?P<two>[0-9a-fA-F]{2}))
    | \\c(?P<control>[A-Za-z])
    | (?P<property>\\[pP]\{[\w=]+\})
    | \\(?P<escaped>.)
    | (?P<group>\((?:\?(?:[:=!]|<[=!]|P?<\w+>|-?[a-z]+[:)])?)?)
    | (?P<repeat>\{[0-9]+(?:,[0-9]*)?\})
    | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_GROUP = re.compile(r"\((\?(:|P?<\w+>|-?i[:)]))?")


def rust_regex(pattern: str) -> str:
    """Return `pattern` in Rust's syntax. Raises UsageError that names what it has no word for."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        piece = _next(pattern, at)
        at = piece.end()
        if piece["group"]:
            if not _GROUP.fullmatch(piece[0]):
                raise _refused(pattern, f"a group that begins with {piece[0]}")
            out.append(piece[0])
        elif piece["repeat"] or (piece["plain"] and piece[0] in "^$|)*+?"):
            out.append(piece[0])
        elif piece[0] == ".":
            out.append(_ANY)
        elif piece[0] == "[":
            text, at = _class(pattern, at)
            out.append(text)
        else:
            text, is_set = _atom(pattern, piece)
            out.append(text if is_set else _written(text))
    return "".join(out)


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Return the class that begins at `at`, after its bracket, and where it ends."""
    negated = pattern.startswith("^", at)
    at += negated
    out: list[str] = []
    while not pattern.startswith("]", at):
        first, is_set, at = _member(pattern, at)
        if pattern.startswith("-", at) and not pattern.startswith("-]", at):
            last, is_last_set, end = _member(pattern, at + 1)
            if not is_set and not is_last_set:
                out.append(f"{_written(first)}-{_written(last)}")
                at = end
                continue
        out.append(first if is_set else _written(first))
    if not out:
        return (r"[\s\S]" if negated else r"[^\s\S]"), at + 1
    return f"[{'^' * negated}{''.join(out)}]", at + 1


def _member(pattern: str, at: int) -> tuple[str, bool, int]:
    if at >= len(pattern):
        raise _refused(pattern, "a class that does not end")
    piece = _next(pattern, at)
    if piece["group"] or piece["repeat"]:  # plain characters here
        return pattern[at], False, at + 1
    if piece["escaped"] == "b":
        return "\b", False, piece.end()
    return *_atom(pattern, piece), piece.end()


def _next(pattern: str, at: int) -> re.Match[str]:
    piece = _PIECE.match(pattern, at)
    if piece is None or piece[0] == "\\":
        raise _refused(pattern, "a backslash at its end")
    return piece


def _atom(pattern: str, piece: re.Match[str]) -> tuple[str, bool]:
    """Return the character that `piece` stands for; or a set of them, as written in Rust, and True."""
    if piece["pair"]:
        return bytes.fromhex(piece[0].replace("\\u", "")).decode("utf-16-be"), False
    code = piece["long"] or piece["four"] or piece["two"]
    if code:
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise _refused(pattern, f"{piece[0]}, half a character")
        return chr(number), False
    if piece["control"]:
        return chr(ord(piece["control"]) % 32), False
    if piece["property"]:
        return piece[0], True
    escaped = piece["escaped"]
    if not escaped:
        return piece[0], False
    if escaped in _SETS:
        return _SETS[escaped], True
    if escaped in _CONTROLS:
        return _CONTROLS[escaped], False
    if escaped.isalnum():
        raise _refused(pattern, piece[0])
    return escaped, False


def _written(character: str) -> str:
    return character if character.isalnum() else f"\\u{{{ord(character):x}}}"


def _refused(pattern: str, what: str) -> UsageError:
    return UsageError(f'the pattern "{pattern[:80]}" with {what}')
