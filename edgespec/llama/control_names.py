"""Names of control tokens within a message, where they are text and not these tokens.

A chat template makes one string of its own parts and of what users, tools and models wrote. A message could
end its turn and begin another's by writing the names of control tokens. So before the template runs, a mark
is put into each such name in the messages; it survives whatever the template does, and is then removed:

    messages -> marked -> template -> `RenderedPrompt`: text, and where the marks were (`breaks`) -> tokens

A piece of the prompt with a break, from one control token of the template's to the next, is tokenized as
plain text. Without such names nothing is marked, and this module has no effect.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, SupportsIndex

import msgspec

from edgespec.errors import EdgespecError
from edgespec.llama.backend import llama

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Texts that begin and end thoughts, of all families."""

MEDIA_MARKER = f"<__media_{secrets.token_hex(16)}__>"
"""Stands in a message for a medium, such as an image; no text can guess it."""


def split_at_media(prompt: str) -> list[str]:
    """Return the parts of a prompt between the markers of media."""
    cuts = [0, *(at for found in re.finditer(MEDIA_MARKER, prompt) for at in found.span()), len(prompt)]
    return [prompt[start:end] for start, end in zip(cuts[::2], cuts[1::2], strict=True)]


_MARKS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xE000, 0xF900))]
"""Characters for marks: those for use within programs, then private ones."""


class RenderedPrompt(str):
    """The text that a chat template wrote, with the places where names of control tokens are text.

    Its parts (`prompt[a:b]`) keep these places; other methods of `str` return plain text.
    """

    breaks: tuple[int, ...]
    """Offsets, ascending: no control token spans one."""

    def __new__(cls, text: str, breaks: Iterable[int] = ()) -> RenderedPrompt:
        """Return `text` with these breaks."""
        made = super().__new__(cls, text)
        made.breaks = tuple(breaks)
        return made

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        """Return a character, or a part with its breaks."""
        part = super().__getitem__(key)
        if not isinstance(key, slice) or not self.breaks:
            return part
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError("parts of a prompt are whole")
        return RenderedPrompt(part, (at - start for at in self.breaks if start < at < stop))


class ModelText(str):
    """Text of a message in the model's own form: names of control tokens in it are these tokens."""

    __slots__ = ()


class ControlNames:
    """The names of a vocabulary's control tokens."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Store `names`; one of a single character cannot be told from text, and is ignored."""
        self._names = frozenset(name for name in names if len(name) > 1)
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        self._starts = re.compile("|".join(sorted({re.escape(name[:2]) for name in self._names})) or "(?!)")
        self._beginnings = frozenset(name[:n] for name in self._names for n in range(1, len(name)))

    def __contains__(self, text: str) -> bool:
        """Whether `text` is a name."""
        return text in self._names

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each name in `text`; the longest, of names that begin alike."""
        at = 0
        while found := self._starts.search(text, at):
            at = found.start()
            n = next((n for n in self._lengths if text[at : at + n] in self._names), 0)
            if n:
                yield at, at + n
            at += n or 1

    def render(self, template: Callable[..., str], *words: Any) -> RenderedPrompt:  # noqa: ANN401 - JSON
        """Return the text of `template` called with `words`, in which names of control tokens stay text.

        `words`: input from outside, such as messages and tools: texts, and lists and mappings of them.
        """
        texts = [text for value in words for text in _texts(value)]
        if not any(map(self._may_be_read, texts)):
            return RenderedPrompt(template(*words))
        mark = next(mark for mark in _MARKS if not any(mark in t or _escaped(mark) in t for t in texts))
        try:
            written = template(*self._marked(words, mark))
        except EdgespecError as error:
            raise type(error)(str(error).replace(mark, "")) from error
        # The template may write a mark as JSON or Python do where they escape.
        parts = re.split(f"{mark}|{re.escape(_escaped(mark))}", written)
        text = "".join(parts)
        breaks = [*accumulate(map(len, parts[:-1]))]
        spans = [*self.find(text)]
        return RenderedPrompt(text, (at for at in breaks if any(start < at < end for start, end in spans)))

    def pieces(self, prompt: RenderedPrompt) -> Iterator[tuple[RenderedPrompt, bool]]:
        """Yield the parts of `prompt`, and whether each is plain text; else names in it are tokens."""
        start, plain = 0, 0
        for begin, end in [*self._tokens(prompt), (len(prompt), len(prompt))]:
            if any(plain < at < begin for at in prompt.breaks):
                yield _part(prompt, start, plain), False
                yield _part(prompt, plain, begin), True
                start = begin
            plain = end
        yield _part(prompt, start, len(prompt)), False

    def _tokens(self, prompt: RenderedPrompt) -> Iterator[tuple[int, int]]:
        bounds = [0, *prompt.breaks, len(prompt)]
        for start, stop in pairwise(bounds):
            for begin, end in self.find(str(prompt)[start:stop]):
                yield start + begin, start + end

    def _may_be_read(self, text: str) -> bool:
        return next(self.find(text), None) is not None or self._begins_at_end(text)

    def _begins_at_end(self, text: str) -> bool:
        longest = min(len(text) + 1, self._lengths[0] if self._lengths else 0)
        return any(text[-n:] in self._beginnings for n in range(1, longest))

    def _marked(self, value: Any, mark: str, spared: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - JSON
        """Return `value` with marks in all its texts; names that are `spared` get none."""
        if isinstance(value, ModelText):
            return value
        if isinstance(value, str):
            return self._marked_text(value, mark, spared)
        if isinstance(value, Mapping):
            thinks = value.get("role") == "assistant"
            return {
                # Templates cut the thoughts out of earlier answers, where the model's own markers are.
                self._marked(key, mark): self._marked(
                    one, mark, _THOUGHT_MARKERS if thinks and key == "content" else spared
                )
                for key, one in value.items()
            }
        if isinstance(value, (list, tuple)):
            marked = (self._marked(one, mark, spared) for one in value)
            return tuple(marked) if isinstance(value, tuple) else [*marked]
        return value

    def _marked_text(self, text: str, mark: str, spared: tuple[str, ...]) -> str:
        if not self._may_be_read(text):
            return text
        parts, at = [], 0
        for start, end in self.find(text):
            if text[start:end] not in spared:
                parts.append(text[at : start + 1])
                at = start + 1
        parts.append(text[at:])
        return mark.join(parts) + (mark if self._begins_at_end(text) else "")


_THOUGHT_MARKERS = tuple(marker for pair in THINKING for marker in pair)


def _texts(value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yield all texts in `value`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _part(prompt: RenderedPrompt, start: int, stop: int) -> RenderedPrompt:
    part = prompt[start:stop]
    return part if isinstance(part, RenderedPrompt) else RenderedPrompt(part)


# ---- tokens of code completion ----


class FimTokens(msgspec.Struct, frozen=True):
    """Tokens before the prefix, the suffix and the middle, and before a repository and each file."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


def fim_tokens(vocab: llama.llama_vocab_p) -> FimTokens | None:
    """Return the tokens of a vocabulary; None if it has not all of the first three."""
    found = [
        None if (token := of(vocab)) < 0 else token
        for of in (
            llama.llama_vocab_fim_pre,
            llama.llama_vocab_fim_suf,
            llama.llama_vocab_fim_mid,
            llama.llama_vocab_fim_rep,
            llama.llama_vocab_fim_sep,
        )
    ]
    prefix, suffix, middle, repository, file = found
    if prefix is None or suffix is None or middle is None:
        return None
    return FimTokens(prefix, suffix, middle, repository, file)
