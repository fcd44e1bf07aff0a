"""Structured output on the command line: reads the grammar or schema that the text must match."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.cli.console import message
from edgespec.errors import UsageError
from edgespec.grammar.grammar import Grammar
from edgespec.grammar.grammar_check import check_grammar
from edgespec.llama.weights import Model
from edgespec.records import Result


@dataclass(frozen=True, slots=True)
class Structure:
    """A grammar or schema read from a file."""

    text: str
    name: str
    is_schema: bool

    def compile(self, model: Model) -> Grammar:
        """Return the grammar for `model`; tell the user what is not enforced. Raises UsageError."""
        if not self.is_schema:
            return Grammar(model, self.text, name=self.name)
        grammar = Grammar.from_json_schema(model, self.text, name=self.name)
        if grammar.ignored:
            message(f"{self.name}: not enforced: {', '.join(grammar.ignored)}")
        return grammar


def read_structure(grammar: Path | None, json_schema: Path | None) -> Structure | None:
    """Return the grammar or schema; None if none is given. Raises UsageError for a file that cannot be read.

    A grammar is checked here, before models are loaded.
    """
    path = grammar or json_schema
    if path is None:
        return None
    name = f"{'--grammar' if grammar else '--json-schema'} {path}"
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text at byte {error.start}; convert it first") from None
    if grammar:
        check_grammar(text, name)
    return Structure(text, name, is_schema=grammar is None)


def tell_if_cut(structure: Structure | None, result: Result) -> None:
    """Tell the user that a text does not match, because it ends too early."""
    if structure and result.stop_reason in ("length", "context", "stop"):
        limit = {"length": "-n", "context": "--ctx", "stop": "--stop"}[result.stop_reason]
        whole = "whole JSON" if structure.is_schema else "what the grammar wants"
        message(f"the text was cut by {limit} and may not be {whole}")
