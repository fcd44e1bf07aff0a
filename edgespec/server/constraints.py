"""What an answer must match: the one constraint that a request has, whatever its client calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from edgespec.decoding.grammar.grammar import Grammar
from edgespec.decoding.grammar.source import GrammarSource
from edgespec.errors import UsageError
from edgespec.llama.weights import Model
from edgespec.server.faults import Fault
from edgespec.server.fields import StructuredOutputs
from edgespec.server.schema import (
    ChatRequest,
    CompletionRequest,
    JsonFormat,
    ResponseFormat,
    Sampled,
    SchemaFormat,
)

Kind = Literal["schema", "grammar", "choice", "regex"]
_KEPT_GRAMMARS = 16
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class AnswerConstraint:
    """What an answer must match."""

    field: str
    """The request's own name of it, such as `structured_outputs.regex`."""
    kind: Kind
    text: str
    """The schema or the list of choices as JSON, the grammar, or the pattern."""
    strict: bool = False
    """Whether a part of it that cannot be enforced is a mistake."""

    @property
    def param(self) -> str:
        """The field of the request."""
        return self.field.partition(".")[0]


def constraint_of(request: Sampled) -> AnswerConstraint | None:
    """Return the constraint of a request, if it has one. Raises Fault for two: one would be dropped."""
    form = request.response_format if isinstance(request, ChatRequest | CompletionRequest) else None
    found = [*_of_format(form), *_of_fields(request)]
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        line = f"{second} and {first} contradict each other: an answer matches one of them; leave one out"
        raise Fault(400, line, param=found[1].param)
    return found[0] if found else None


def _of_format(wanted: ResponseFormat | None) -> Iterator[AnswerConstraint]:
    name = "response_format"
    if isinstance(wanted, SchemaFormat):
        schema = wanted.json_schema
        yield AnswerConstraint(name, "schema", json.dumps(schema.schema_), bool(schema.strict))
    elif isinstance(wanted, JsonFormat) and wanted.schema_ is not None:
        yield AnswerConstraint(name, "schema", json.dumps(wanted.schema_))
    elif isinstance(wanted, JsonFormat):
        yield AnswerConstraint(name, "schema", _ANY_OBJECT)


def _of_fields(request: Sampled) -> Iterator[AnswerConstraint]:
    if request.json_schema is not None:
        yield AnswerConstraint("json_schema", "schema", json.dumps(request.json_schema))
    if request.grammar:  # llama-server's clients send "" for none
        yield AnswerConstraint("grammar", "grammar", request.grammar)
    if request.guided_json is not None:
        yield AnswerConstraint("guided_json", "schema", _schema(request.guided_json, "guided_json"))
    if request.guided_choice is not None:
        yield AnswerConstraint("guided_choice", "choice", json.dumps(request.guided_choice))
    if request.guided_regex is not None:
        yield AnswerConstraint("guided_regex", "regex", request.guided_regex)
    if request.guided_grammar is not None:
        yield AnswerConstraint("guided_grammar", "grammar", request.guided_grammar)
    if request.structured_outputs is not None:
        yield from _of_structured(request.structured_outputs)


def _of_structured(wanted: StructuredOutputs) -> Iterator[AnswerConstraint]:
    name = "structured_outputs"
    if wanted.json_ is not None:
        yield AnswerConstraint(f"{name}.json", "schema", _schema(wanted.json_, f"{name}.json"))
    if wanted.json_object:
        yield AnswerConstraint(f"{name}.json_object", "schema", _ANY_OBJECT)
    if wanted.choice is not None:
        yield AnswerConstraint(f"{name}.choice", "choice", json.dumps(wanted.choice))
    if wanted.regex is not None:
        yield AnswerConstraint(f"{name}.regex", "regex", wanted.regex)
    if wanted.grammar is not None:
        yield AnswerConstraint(f"{name}.grammar", "grammar", wanted.grammar)


def _schema(given: dict[str, Any] | str, field: str) -> str:
    if isinstance(given, dict):
        return json.dumps(given)
    try:
        if not isinstance(json.loads(given), dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        line = f"{field}: is not the text of a JSON schema: {error}"
        raise Fault(400, line, param=field.partition(".")[0]) from None
    return given


class Grammars:
    """Compiles constraints for one model. They are kept, since conversations send theirs again."""

    def __init__(self, model: Model) -> None:
        """Compile for `model`."""
        self._model = model
        self._kept = lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)

    def of(self, constraint: AnswerConstraint) -> Grammar:
        """Return the grammar of `constraint`, for any thread. Raises Fault."""
        try:
            return self._kept(constraint)
        except UsageError as error:
            told = " ".join(error.spelled(constraint.field).split())
            raise Fault(400, told, param=constraint.param) from None

    def _compile(self, constraint: AnswerConstraint) -> Grammar:
        model, text, name = self._model, constraint.text, constraint.field
        if constraint.kind == "choice":
            return Grammar.from_choice(model, json.loads(text), name=name)
        if constraint.kind == "regex":
            return Grammar.from_regex(model, text, name=name)
        if constraint.kind == "grammar":
            return Grammar(model, GrammarSource.any(text, name))
        return Grammar.from_json_schema(model, text, name=name, strict=constraint.strict)
