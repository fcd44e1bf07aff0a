"""Schemas of many makers, each with values that must be allowed and others that must not.

Values are written compactly, properties in the order of the schema. An object that names properties and says
nothing of others is closed (docs/structured.md), so what is allowed here has no others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class Text(str):
    """JSON as it is written, where that matters."""


@dataclass(frozen=True)
class Row:
    name: str
    schema: Any
    yes: tuple[Any, ...]
    no: tuple[Any, ...] = ()
    unenforced: str = ""
    """A word of the warning about what is not enforced."""

    @property
    def is_openapi(self) -> bool:
        """Whether the schema says what validators of JSON Schema do not know."""
        return '"nullable"' in json.dumps(self.schema)

    def texts(self, values: tuple[Any, ...]) -> list[str]:
        return [written(value) for value in values]


def written(value: Any) -> str:
    if isinstance(value, Text):
        return value
    return json.dumps(value, ensure_ascii=False)


def rows() -> list[Row]:
    from schema_corpus import generators, keywords, models, patterns, tools

    return [*keywords.ROWS, *models.rows(), *generators.ROWS, *tools.ROWS, *patterns.rows()]
