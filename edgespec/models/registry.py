"""The model registry: look up entries by name, in the shipped models.toml and the user's own.

models.toml, shipped  \
                           >  Registry  -- store.py: which files are here -- pull.py: get the others
models.toml, yours    /
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import NAME, Registry, parse
from edgespec.platform.files import write_atomically
from edgespec.platform.kept import OWN_MODELS

DEFAULT_VARIABLE = "EDGESPEC_MODEL"


@functools.lru_cache(maxsize=4)
def _load(user_file: Path, mtime_ns: int | None) -> Registry:
    """Parse once per change: `mtime_ns` is a key for the cache; None means that there is no file."""
    try:
        return parse(user_file, "" if mtime_ns is None else user_file.read_text(encoding="utf-8"))
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
        registry = _load(file, file.stat().st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        registry = _load(file, None)
    return replace(registry, default=os.environ.get(DEFAULT_VARIABLE) or registry.default)


# --- The user's own entries ---------------------------------------------------------------------


def _rewrite_user_file(text: str) -> None:
    file = user_models_file()
    parse(file, text)
    write_atomically(file, text)


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
    if not str(path).isprintable():
        raise UsageError(f"{str(path)!r}: models.toml cannot hold this file name; rename the file")
    file = user_models_file()
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    separator = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    quoted = json.dumps(str(path), ensure_ascii=False)  # JSON's escapes are TOML's too
    more = f"{mark} = true\n" if mark else ""
    if parts:
        more += f"parts = {json.dumps(list(parts))}\n"
    _rewrite_user_file(
        f'{text}{separator}[models."{name}"]\npath = {quoted}\nsize = {size}\nsha256 = "{sha256}"\n{more}'
    )


def remove_local(name: str) -> None:
    """Remove the entry `name` from the user's models.toml and leave the rest of the text unchanged."""
    file = user_models_file()
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    header = re.compile(rf"""\s*\[\s*models\s*\.\s*(["']?){re.escape(name)}\1\s*\]\s*(#.*)?\n?""")
    start = next((i for i, line in enumerate(lines) if header.fullmatch(line)), None)
    if start is None:
        raise EdgespecError(f"{file}: cannot find the table of {name}; take it out by hand")
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("[")), len(lines))
    _rewrite_user_file("".join(lines[:start] + lines[end:]))


def set_default(name: str) -> None:
    """Write the model or pair that is taken where none is named into the user's models.toml; "": none."""
    file = user_models_file()
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    tables = next((i for i, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    kept = [line for i, line in enumerate(lines) if i >= tables or not re.match(r"\s*default\s*=", line)]
    _rewrite_user_file("".join([f"default = {json.dumps(name, ensure_ascii=False)}\n"] * bool(name) + kept))
