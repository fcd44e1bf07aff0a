"""Structured output on the command line: the grammar, schema or pattern that the text must match."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import message
from edgespec.cli.options import OUTPUT
from edgespec.decoding.records import Result
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.decoding.grammar.source import GrammarSource


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The grammar, schema or pattern that the text must match; at most one of these."""

    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write only text that matches this grammar: llama.cpp's GBNF, or Lark (- reads stdin).",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="Write only JSON that this schema describes: a file, the schema itself, or - for stdin.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Write only text that this regular expression matches as a whole.",
            rich_help_panel=OUTPUT,
        ),
    ] = None

    def contradictions(self, *, cascade: bool, reads_stdin: bool) -> dict[str, bool]:
        """Return which of these options contradict each other, or a cascade, or a prompt from stdin."""
        given = {
            f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if value is not None
        }
        names = [*given]
        found = {" and ".join(names): len(names) > 1}
        for name, value in given.items():
            found[f"{name} and --mode cascade"] = cascade
            found[f"a prompt from stdin and {name} -"] = value == "-" and reads_stdin
        return found

    def read(self) -> GrammarSource | None:
        """Return what the text must match; None for any text. Raises UsageError, before models are loaded."""
        if self.grammar is None and self.json_schema is None and self.regex is None:
            return None
        from edgespec.decoding.grammar.source import GrammarSource

        if self.grammar is not None:
            name = f"--grammar {self.grammar}"
            text = _read(self.grammar, name)
            return GrammarSource.lark(text, name) if _is_lark(self.grammar) else GrammarSource.any(text, name)
        if self.regex is not None:
            return GrammarSource.regex(self.regex, "--regex")
        given = self.json_schema or ""
        if given.lstrip().startswith(("{", "[")):
            return GrammarSource.json_schema(given, "--json-schema")
        name = f"--json-schema {given}"
        return GrammarSource.json_schema(_read(given, name), name)

    def tell_if_cut(self, result: Result) -> None:
        """Tell the user that a text does not match, because it ends too early."""
        limit = {"length": "-n", "context": "--ctx", "stop": "--stop"}.get(result.stop_reason)
        if limit and (self.grammar or self.json_schema or self.regex):
            whole = "be whole JSON" if self.json_schema else "match as a whole"
            message(f"the text was cut by {limit} and may not {whole}")


def tell_warnings(source: GrammarSource) -> None:
    """Tell the user what of a schema is not enforced."""
    for warning in source.warnings:
        message(f"{source.name}: not enforced: {warning}")


def _is_lark(path: str) -> bool:
    return Path(path).suffix.lower() == ".lark"


def _read(path: str, name: str) -> str:
    """Return the text of a file, or of stdin for "-", without a byte order mark."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text at byte {error.start}; convert it first") from None
