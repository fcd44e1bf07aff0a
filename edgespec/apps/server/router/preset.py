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

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.choices import CacheChoice, KernelsChoice
from edgespec.models.entries import NAME, Positive, convert_table

KEEP_ALIVE = "5m"
"""The time after which an idle model is unloaded, where nothing else is said; as in Ollama."""

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEP = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(_UNITS)})", re.ASCII)


def duration_s(value: float | str) -> float:
    """Return the seconds of a time as Ollama writes it: 300, "5m", "1h30m"; infinity for a negative one.

    Raises ValueError for anything else.
    """
    text = str(value).strip()
    sign, rest = text[:1] == "-", text.lstrip("+-")
    steps = _STEP.findall(rest)
    if "".join(number + unit for number, unit in steps) == rest and steps:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in steps)
    else:
        seconds = float(rest)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return math.inf if sign and seconds else seconds


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
    drafter: str | None = None
    ctx: Positive | None = None
    parallel: Positive | None = None
    threads: Positive | None = None
    kernels: KernelsChoice | None = None
    cache_type: CacheChoice | None = None
    chat_template: str | None = None
    prefix_cache: Annotated[int, Meta(ge=0)] | None = None
    cache_reuse: Annotated[int, Meta(ge=0)] | None = None
    max_prompt: Positive | None = None
    embeddings: bool = False
    speech: str | None = None
    speech_draft: str | None = None
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    keep: bool = False
    """Whether it is loaded at the start and never unloaded."""

    def options(self) -> Iterator[str]:
        """Yield the options of the model's own `edgespec serve`, but for its models."""
        given = msgspec.structs.asdict(self)
        for name in _OPTIONS:
            value, option = given[name], f"--{name.replace('_', '-')}"
            if value is not None and value is not False:
                yield option if value is True else f"{option}={value}"


_OPTIONS = (
    "drafter",
    "ctx",
    "parallel",
    "threads",
    "kernels",
    "cache_type",
    "chat_template",
    "prefix_cache",
    "cache_reuse",
    "max_prompt",
    "embeddings",
    "speech",
    "speech_draft",
)


class _PresetDocument(_WithKeepAlive, frozen=True, forbid_unknown_fields=True, kw_only=True):
    models: dict[str, Any]


_FIELDS = [field.name for table in (_PresetDocument, PresetModel) for field in msgspec.structs.fields(table)]


def read_preset(file: Path) -> dict[str, PresetModel]:
    """Return the models of a file, by name. Raises UsageError, one line with file, table and key."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        document = convert_table(tables, _PresetDocument, f"{file}: top level", _FIELDS)
        models = {
            name: convert_table(table, PresetModel, f"{file}: models.{name}", _FIELDS)
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


def _check(name: str, model: PresetModel, where: str) -> None:
    if not re.fullmatch(rf"{NAME}(:{NAME})?", name):
        raise UsageError(f"{where}: {name!r} is not a usable name (letters, digits and . _ + @ -)")
    if model.pair is not None and (model.target or model.draft):
        raise UsageError(f"{where}.pair: it contradicts target and draft: choose one")
    for key, value in msgspec.structs.asdict(model).items():
        if value == "":
            raise UsageError(f"{where}.{key} is empty: give it a value, or leave it out")


def plain_name(model: str) -> str:
    """Return the name by which a server calls a model that was named so: of a file, without its folder."""
    return PurePath(model).name.removesuffix(".gguf")


def check_names(names: Sequence[tuple[str, Sequence[str]]], where: str) -> None:
    """Raise UsageError if two models have one name; `names`: of each, with the others it has."""
    owners: dict[str, int] = {}
    for i, (name, others) in enumerate(names):
        for one in dict.fromkeys([name, *others]):
            owner = owners.setdefault(one.lower(), i)
            if owner != i:
                raise UsageError(f"{where}: two models are called {one!r}: {names[owner][0]} and {name}")
