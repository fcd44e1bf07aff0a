"""Completion in shells beyond typer's: names with colons in bash, the first Tab in zsh.

bash breaks words at colons (COMP_WORDBREAKS), so that `ollama:qwen` comes as three words, and puts what is
completed behind the last colon.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import typer

_AT_THE_FIRST_TAB = '\nif [[ $zsh_eval_context[-1] == loadautofunc ]]; then %(complete_func)s "$@"; fi\n'


def mend_completion() -> None:
    """Change typer's classes and scripts; nothing for a typer that has others."""
    # zsh reads the script at the first Tab; as typer writes it, only the second one would complete.
    with suppress(AttributeError, KeyError):  # private names, which another typer may not have
        typer._completion_shared._completion_scripts["zsh"] += _AT_THE_FIRST_TAB
    with suppress(AttributeError):
        bash: Any = typer._completion_classes.BashComplete
        formatted, read = bash.format_completion, bash.get_completion_args

        def format_completion(self: Any, item: Any) -> str:  # noqa: ANN401 - of typer's private click
            return str(formatted(self, item))[getattr(self, "n_typed", 0) :]

        def get_completion_args(self: Any) -> tuple[list[str], str]:  # noqa: ANN401
            _join_words()
            args, incomplete = read(self)
            self.n_typed = incomplete.rfind(":") + 1
            return args, incomplete

        bash.format_completion, bash.get_completion_args = format_completion, get_completion_args


def _join_words() -> None:
    """Put the words that bash broke at colons together in its variables."""
    words, last = os.environ.get("COMP_WORDS", "").split("\n"), os.environ.get("COMP_CWORD", "")
    if not last.isdecimal():
        return
    joined: list[str] = []
    glued = False  # whether the last word ends in a colon that bash broke at
    at = int(last)
    for i, word in enumerate(words[: int(last) + 1]):
        is_colon = bool(word) and not word.strip(":")
        if joined and i > 1 and (is_colon or glued):
            joined[-1] += word
            at -= 1
        else:
            joined.append(word)
        glued = is_colon
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(joined), str(at)
