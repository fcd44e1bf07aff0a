"""The model registry: look up entries by name, in the shipped models.toml and the user's own.

models.toml, shipped  \
                           >  Registry  -- store.py: which files are here -- pull.py: get the others
models.toml, yours    /
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import NAME, Registry, parse
from edgespec.platform.files import write_atomically
from edgespec.platform.kept import OWN_MODELS
from edgespec.platform.state_file import FileIdentity, identity_of

DEFAULT_VARIABLE = "EDGESPEC_MODEL"


@functools.lru_cache(maxsize=4)
def _load(user_file: Path, identity: FileIdentity | None) -> Registry:
    """Parse once per change: `identity` is a key for the cache; None means that there is no file."""
    try:
        return parse(user_file, "" if identity is None else user_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise EdgespecError(f"{user_file}: cannot be read: {error}") from None


def user_models_file() -> Path:
    """Return the path of the user's own models.toml, which may not exist."""
    return OWN_MODELS.path()


def load_registry() -> Registry:
    """Return the shipped entries, extended and overridden by the user's file (read once per change).

    $EDGESPEC_MODEL overrides its default model.
    """
    file = user_models_file()
    try:
        registry = _load(file, identity_of(file))
    except (FileNotFoundError, NotADirectoryError):
        registry = _load(file, None)
    return replace(registry, default=os.environ.get(DEFAULT_VARIABLE) or registry.default)


# --- The user's own entries ---------------------------------------------------------------------


def _changed(change: Callable[[dict[str, Any]], None]) -> str:
    """Return the text of the user's models.toml after `change`, with comments and layout of the rest.

    Raises EdgespecError, for a file that is written in a way that cannot be changed in places too.
    """
    import tomlkit

    file = user_models_file()
    text = file.read_bytes().decode() if file.exists() else ""
    wanted, document = tomllib.loads(text), tomlkit.parse(text)
    change(wanted)
    change(document)
    text = document.as_string()
    if _filled(tomllib.loads(text)) != _filled(wanted):
        raise EdgespecError(f"{file}: cannot be changed as it is written: give each model its own table")
    parse(file, text)
    return text


def _filled(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value != {}}


def check_name(name: str) -> None:
    """Raise UsageError if `name` is no valid name for a model, or that of a pair."""
    if not re.fullmatch(NAME, name):
        problem = "not a usable name (letters, digits and . _ + @ -); choose another"
        raise UsageError(problem, field="name", value=repr(name))
    if name in load_registry().pairs:  # commands that take both would not know which is meant
        raise UsageError("a pair of this name exists already; choose another", field="name", value=name)


def add_local(
    name: str, path: Path, size: int, sha256: str, *, mark: str = "", parts: Sequence[str] = ()
) -> None:
    """Append an entry for the user's own GGUF at `path` to the user's models.toml.

    `mark`: "mtp" if its file has a head that drafts for it, "speech" for a Whisper model, or "".
    `parts`: as in `Entry`.

    Raises:
        UsageError: `name` is unusable or taken.

    """
    check_name(name)
    if name in load_registry().entries:
        raise UsageError("a model of this name exists already; choose another", field="name", value=name)
    text = with_local(name, path, size, sha256, mark=mark, parts=parts)
    write_atomically(user_models_file(), text)


def with_local(
    name: str, path: Path, size: int, sha256: str, *, mark: str = "", parts: Sequence[str] = ()
) -> str:
    """Return the text of the user's models.toml with this entry, as of `add_local`, new or changed."""
    if not str(path).isprintable():
        raise UsageError(f"{str(path)!r}: models.toml cannot hold this file name; rename the file")
    facts = {"path": str(path), "size": size, "sha256": sha256, **({mark: True} if mark else {})}
    facts |= {"parts": list(parts)} if parts else {}

    def put(document: dict[str, Any]) -> None:
        models = document.setdefault("models", {})
        if name in models:
            models[name].update(facts)
        else:
            models[name] = facts

    return _changed(put)


def remove_local(name: str) -> None:
    """Remove the entry `name` from the user's models.toml and leave the rest of the text unchanged."""

    def remove(document: dict[str, Any]) -> None:
        document.get("models", {}).pop(name, None)

    file = user_models_file()
    before, after = (
        text.splitlines(keepends=True) for text in (file.read_bytes().decode(), _changed(remove))
    )
    # The lines above the next table are about that one, but tomlkit counts them to the table before.
    at = next((i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), len(after))
    gone = before[at : at + len(before) - len(after)]
    rest = list(takewhile(lambda line: line.lstrip()[:1] in ("", "#"), reversed(gone)))[::-1]
    write_atomically(file, "".join([*after[:at], *rest, *after[at:]]))


def set_default(name: str) -> None:
    """Write the model or pair that is taken where none is named into the user's models.toml; "": none."""

    def change(document: dict[str, Any]) -> None:
        if name:
            document["default"] = name
        else:
            document.pop("default", None)

    write_atomically(user_models_file(), _changed(change))
