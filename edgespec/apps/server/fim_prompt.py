"""Prompts for the middle of a text, between what stands before it and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.apps.server.api_errors import ApiError
from edgespec.llama.fim import FimTokens
from edgespec.llama.weights import Model

_REPOSITORY = "project"  # its name, and that of a file without one: they are part of the form
_FILE = "file"
_SUFFIX_SHARE = 4  # of a text that is too long, a quarter of what is kept comes after the middle


@dataclass(frozen=True)
class FimGap:
    """Where a text is to be filled in."""

    before: str
    after: str
    beside: Sequence[tuple[str | None, str]] = ()
    """Other files of the project, name and text, the most important last."""


@dataclass(frozen=True)
class FimPrompt:
    """A prompt whose continuation fills a gap."""

    tokens: list[int]
    is_cut: bool
    """Whether a part of the text was left out."""


def fim_of(model: Model, param: str) -> FimTokens:
    """Return the tokens with which `model` fills gaps. Raises ApiError if it has none."""
    if model.fim is None:
        line = f"{param}: {model.name} cannot fill in the middle: its file names no tokens for it"
        raise ApiError(400, line, param=param)
    return model.fim


def make_fim_prompt(model: Model, fim: FimTokens, gap: FimGap, room: int) -> FimPrompt:
    """Return the prompt for `gap`, in at most `room` tokens.

    What does not fit is left out: of the text before the gap the beginning, of that after it the end, and
    other files from the first on.
    """
    before, after = (_plain(model, text) for text in (gap.before, gap.after))
    room_of_text = max(0, room - 3)
    n_after = min(len(after), max(room_of_text // _SUFFIX_SHARE, room_of_text - len(before)))
    n_before = min(len(before), room_of_text - n_after)
    is_cut = n_before < len(before) or n_after < len(after)
    kept = before[len(before) - n_before :]
    prompt = [fim.prefix, *kept, fim.suffix, *after[:n_after], fim.middle]
    if gap.beside:
        beside, left_out = _beside(model, fim, gap.beside, room - len(prompt))
        prompt, is_cut = beside + prompt, is_cut or left_out
    return FimPrompt(prompt, is_cut)


def _beside(
    model: Model, fim: FimTokens, files: Sequence[tuple[str | None, str]], room: int
) -> tuple[list[int], bool]:
    """Return the tokens of the last files that fit, and whether any file was left out."""
    head: list[int] = []
    if fim.repository is not None and fim.file is not None:
        head = [fim.repository, *_plain(model, f"{_REPOSITORY}\n")]
    own = _named(model, fim, None, "")
    room -= len(head) + len(own)
    kept: list[list[int]] = []
    for name, text in reversed(files):
        part = _named(model, fim, name, text)
        if len(part) > room:
            break
        kept.insert(0, part)
        room -= len(part)
    if not kept:
        return [], True
    return [*head, *(token for part in kept for token in part), *own], len(kept) < len(files)


def _named(model: Model, fim: FimTokens, name: str | None, text: str) -> list[int]:
    """Return a file's tokens, or for an empty `text` those that stand before the file with the gap."""
    if fim.file is not None:
        ended = text if not text or text.endswith("\n") else f"{text}\n"
        return [fim.file, *_plain(model, f"{name or _FILE}\n{ended}")]
    return _plain(model, f"{name}\n{text}\n\n" if name else f"{text}\n\n") if text else []


def _plain(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=False) if text else []
