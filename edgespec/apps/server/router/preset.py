"""The file of `edgespec serve --models`: a table for each model, whose keys are options of `edgespec serve`.

    keep_alive = "30m"

    [models.coder]
    pair = "qwen2.5-coder-1.5b"
    ctx = 16384
    aliases = ["gpt-4o-mini"]
    keep = true

The key of a table is the model's name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from edgespec.apps.server.ollama.response_schema import duration_s
from edgespec.cli.groups import flat_options
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.registry import NAME, convert_table

KEEP_ALIVE = "5m"
"""The time after which an idle model is unloaded, where nothing else is said; as in Ollama."""


class _WithKeepAlive(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    keep_alive: str | float | None = None
    """Idle time after which it is unloaded, as of `duration_s`."""

    def __post_init__(self) -> None:
        if self.keep_alive is not None:
            try:
                duration_s(self.keep_alive)
            except ValueError:
                raise ValueError('expected a time such as "30m", seconds, or -1 for ever') from None


class PresetModel(_WithKeepAlive, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file. Without `target`, `pair` and `speech` its key names a model or a pair."""

    target: str | None = None
    draft: str | None = None
    pair: str | None = None
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    keep: bool = False
    """Whether it is loaded at the start and never unloaded."""
    given: dict[str, Any] = {}
    """Its options of `edgespec serve`, by their names in Python."""


_OWN = {field.name for field in msgspec.structs.fields(PresetModel)} - {"given"}
_OF_THE_SERVER = {"max_queue", "max_body", "max_seconds", "max_audio"}
"""Limits of requests before their model is known."""


def _options_struct(groups: Iterable[type]) -> type[Struct]:
    """Return the options of `edgespec serve` that a table may have, with their types and limits."""
    found: list[tuple[str, Any, Any]] = []
    for name, kind, option in (one for group in groups for one in flat_options(group)):
        kinds = [kind]
        if get_origin(kind) in (Union, UnionType):
            kinds = [one for one in get_args(kind) if one is not NoneType]
        if option.min is not None or option.max is not None:
            kinds = [Annotated[kinds[0], Meta(ge=option.min, le=option.max)]]
        if name not in _OF_THE_SERVER:
            found.append((name, Union[*kinds, UnsetType], UNSET))
    return defstruct("PresetOptions", found, forbid_unknown_fields=True, kw_only=True)


class _PresetDocument(_WithKeepAlive, frozen=True, forbid_unknown_fields=True, kw_only=True):
    models: dict[str, Any]


def read_preset(file: Path, groups: Iterable[type]) -> dict[str, PresetModel]:
    """Return the models of a file, by name; `groups`: the options that they may have.

    Raises UsageError, one line with file, table and key.
    """
    options = _options_struct(groups)
    known = [*_OWN, *(field.name for field in msgspec.structs.fields(options)), "models"]
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        document = convert_table(tables, _PresetDocument, f"{file}: top level", known)
        models = {
            name: _model(table, options, f"{file}: models.{name}", known)
            for name, table in document.models.items()
        }
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from None
    except UsageError:
        raise
    except EdgespecError as error:
        raise UsageError(str(error)) from None
    if not models:
        raise UsageError(f"{file}: models: it names no model; add a table [models.NAME]")
    for name, model in models.items():
        _check(name, model, f"{file}: models.{name}")
    if document.keep_alive is not None:
        models = {
            name: model
            if model.keep_alive is not None
            else msgspec.structs.replace(model, keep_alive=document.keep_alive)
            for name, model in models.items()
        }
    return models


def _model(table: Any, options: type[Struct], where: str, known: Sequence[str]) -> PresetModel:  # noqa: ANN401
    if not isinstance(table, dict):
        return convert_table(table, PresetModel, where, known)
    given = convert_table({key: table[key] for key in table if key not in _OWN}, options, where, known)
    model = convert_table({key: table[key] for key in table if key in _OWN}, PresetModel, where, known)
    values = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not UNSET}
    return msgspec.structs.replace(model, given=values)


def _check(name: str, model: PresetModel, where: str) -> None:
    if not re.fullmatch(rf"{NAME}(:{NAME})?", name):
        raise UsageError(f"{where}: {name!r} is not a usable name (letters, digits and . _ + @ -)")
    if model.pair is not None and (model.target or model.draft):
        raise UsageError(f"{where}.pair: it contradicts target and draft: choose one")
    for key, value in {**msgspec.structs.asdict(model), **model.given}.items():
        if value == "":
            raise UsageError(f"{where}.{key} is empty: give it a value, or leave it out")
