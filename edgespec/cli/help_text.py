"""Changes to typer's --help: flags without a type, choices that wrap, paragraphs of whole lines."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperArgument, TyperOption

_LONG = 24  # characters of a type's column: longer choices may go on in its next line


def in_paragraphs(text: str) -> str:
    """Return a docstring with each paragraph in one line, which the terminal's width wraps."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def mend_help() -> None:
    """Change how typer shows the types of options and arguments."""
    for kind in (TyperOption, TyperArgument):
        _mend(kind)


def _mend(kind: Any) -> None:  # noqa: ANN401 - typer's own classes
    typer_shows = kind.display_type_rich

    def display_type_rich(self: Any, ctx: Any) -> str | None:  # noqa: ANN401
        """Return the type; None for a flag, which takes no value."""
        if getattr(self, "is_flag", False):
            return None
        shown = typer_shows(self, ctx)
        if shown is None or (kind is TyperOption and self.metavar is not None):
            return shown if shown is None else str(shown)
        shown = re.sub(r"list\[(.*)\]", r"\1", str(shown)).replace(" range>", ">")
        return shown.replace("|", " | ") if len(shown) > _LONG else shown

    kind.display_type_rich = display_type_rich
