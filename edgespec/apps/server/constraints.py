"""The constraint that an answer must match, by whichever field a request names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonFormat,
    ResponseFormat,
    SchemaFormat,
)
from edgespec.decoding.grammar.grammar import Grammar
from edgespec.decoding.grammar.source import GrammarSource
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

ConstraintKind = Literal["schema", "grammar", "choice", "regex"]

_STRUCTURED = "structured_outputs"
_KINDS: dict[str, ConstraintKind] = {
    "json_schema": "schema",
    "grammar": "grammar",
    "guided_json": "schema",
    "guided_choice": "choice",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    f"{_STRUCTURED}.json": "schema",
    f"{_STRUCTURED}.json_object": "schema",
    f"{_STRUCTURED}.choice": "choice",
    f"{_STRUCTURED}.regex": "regex",
    f"{_STRUCTURED}.grammar": "grammar",
}
_KEPT_GRAMMARS = 16
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class AnswerConstraint:
    """A schema, grammar, list of choices or pattern that an answer must match."""

    field: str
    """The request's own name of it, such as `structured_outputs.regex`."""
    kind: ConstraintKind
    text: str
    """The schema or the list of choices as JSON, the grammar, or the pattern."""
    strict: bool = False
    """Whether a part of it that cannot be enforced is a mistake."""

    @property
    def param(self) -> str:
        """The field of the request."""
        return self.field.partition(".")[0]


def constraint_of(request: GenerationRequest) -> AnswerConstraint | None:
    """Return the constraint of a request, if it has one. Raises ApiError for two: one would be dropped."""
    form = request.response_format if isinstance(request, ChatRequest | CompletionRequest) else None
    found = [*_of_format(form), *_of_fields(request)]
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        line = f"{second} and {first} contradict each other: an answer matches one of them; leave one out"
        raise ApiError(400, line, param=found[1].param)
    return found[0] if found else None


def _of_format(wanted: ResponseFormat | None) -> Iterator[AnswerConstraint]:
    name = "response_format"
    if isinstance(wanted, SchemaFormat):
        yield AnswerConstraint(name, "schema", json.dumps(wanted.whole), wanted.is_strict)
    elif isinstance(wanted, JsonFormat) and wanted.schema_ is not None:
        yield AnswerConstraint(name, "schema", json.dumps(wanted.schema_))
    elif isinstance(wanted, JsonFormat):
        yield AnswerConstraint(name, "schema", _ANY_OBJECT)


def _of_fields(request: GenerationRequest) -> Iterator[AnswerConstraint]:
    given = request.model_dump(include={name.partition(".")[0] for name in _KINDS}, by_alias=True)
    given |= {f"{_STRUCTURED}.{name}": value for name, value in (given[_STRUCTURED] or {}).items()}
    for name, kind in _KINDS.items():
        value = given.get(name)
        if value is None or value is False or (name == "grammar" and not value):  # llama-server's send ""
            continue
        if kind == "schema":
            value = _ANY_OBJECT if value is True else _schema(value, name)
        elif kind == "choice":
            value = json.dumps(value)
        yield AnswerConstraint(name, kind, value)


def _schema(given: dict[str, Any] | str, field: str) -> str:
    if isinstance(given, dict):
        return json.dumps(given)
    try:
        if not isinstance(json.loads(given), dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        line = f"{field}: is not the text of a JSON schema: {error}"
        raise ApiError(400, line, param=field.partition(".")[0]) from None
    return given


class Grammars:
    """Compiles constraints for one model. They are kept, since conversations send theirs again."""

    def __init__(self, model: Model) -> None:
        """Compile for `model`."""
        self._model = model
        self._kept = lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)

    def of(self, constraint: AnswerConstraint) -> Grammar:
        """Return the grammar of `constraint`, for any thread. Raises ApiError."""
        try:
            return self._kept(constraint)
        except UsageError as error:
            told = " ".join(error.spelled(constraint.field).split())
            raise ApiError(400, told, param=constraint.param) from None

    def _compile(self, constraint: AnswerConstraint) -> Grammar:
        model, text, name = self._model, constraint.text, constraint.field
        if constraint.kind == "choice":
            return Grammar.from_choice(model, json.loads(text), name=name)
        if constraint.kind == "regex":
            return Grammar.from_regex(model, text, name=name)
        if constraint.kind == "grammar":
            return Grammar(model, GrammarSource.any(text, name))
        return Grammar.from_json_schema(model, text, name=name, strict=constraint.strict)
