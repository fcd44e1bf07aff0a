"""Find the file that a model reference means.

resolve("a/path.gguf" | "registry-name" | "hf:OWNER/REPO[:TYPE]" | URL | "ollama:NAME:TAG" | ...)  ->  Path
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError, MessageFn, UsageError, silent
from edgespec.models.hub import is_hub_name, is_plain
from edgespec.models.on_disk import PREFIX as OLLAMA
from edgespec.models.on_disk import foreign_whisper, is_ollama_name, is_whisper_source, ollama_names
from edgespec.models.registry import Entry, load_registry
from edgespec.models.store import Store
from edgespec.platform.files import expand_user, why_no_file

if TYPE_CHECKING:
    from edgespec.llama.gguf_header import GGUFHeader
    from edgespec.models.pull import ProgressFn


class ModelRef:
    """A model's name, which is located at its first use and passed on with the result."""

    def __init__(self, name: str) -> None:
        """Refer to the model called `name`, as of `resolve`."""
        self.name = name

    @cached_property
    def found(self) -> Path | Entry:
        """The file or the entry that the name means. Raises as `locate`."""
        return locate(self.name)


def ref_of(model: str | ModelRef) -> ModelRef:
    """Return a reference to a model by its name; a reference is returned as it is."""
    return model if isinstance(model, ModelRef) else ModelRef(model)


def locate(ref: str) -> Path | Entry:
    """Return the file if `ref` is a path or one of another program's, else the entry; nothing is pulled.

    Raises:
        UsageError: no such file, a directory, or an unknown name (the nearest ones are offered).
        EdgespecError: another program's store holds it only in part, or in no usable form.

    """
    if not ref.strip():
        raise UsageError("the name of a model is empty: give one, or leave it out for the default")
    if is_ollama_name(ref) or is_hub_name(ref):
        from edgespec.models.pull import Puller

        first, *_ = Puller().expand(ref)
        return first.path or first
    path = expand_user(ref)
    why = why_no_file(path)
    if not why:
        return path
    registry = load_registry()
    if os.sep in ref or ref.lower().endswith(".gguf") or (path.exists() and ref not in registry.entries):
        if is_whisper_source(path):
            raise UsageError(foreign_whisper(ref))
        raise UsageError(f"{ref}: {why}{'; name a .gguf file in it' if path.is_dir() else ''}")
    return registry.get(ref)


def is_missing(model: ModelRef) -> bool:
    """Whether a model may have to be pulled; raises as `locate`. Any part of a hub model may be missing."""
    if not isinstance(model.found, Entry):
        return False
    return is_hub_name(model.name) or not Store.default().is_present(model.found, load_registry())


def model_named(word: str, *, alone: bool) -> str | None:
    """Return the model or pair that a word on the command line names; None for any other word.

    Ollama's models may be named as there, without "ollama:". `alone`: the word might also be a whole prompt,
    such as and/or; then only its form shows that it is a file or a hub repository.
    """
    registry = load_registry()
    if word in registry.entries or word in registry.pairs or is_ollama_name(word):
        return word
    if not word or len(word.split()) != 1:
        return None
    if is_hub_name(word) and not (alone and is_plain(word) and not word.startswith("hf:")):
        return word
    if word.lower().endswith(".gguf"):
        return word
    found = f"{OLLAMA}{word}"
    return found if {found, f"{found}:latest"} & {*ollama_names(registry.folders)} else None


def resolve(
    model: str | ModelRef,
    *,
    pull_missing: bool = True,
    on_progress: ProgressFn | None = None,
    on_message: MessageFn = silent,
) -> Path:
    """Return the file that a model reference means; a model that is present is not hashed again.

    `model` is a path, a registry name, a file or a repository of the hub (hub.py), or the name of one
    in another program's store (on_disk.py).

    Raises:
        UsageError: no such file, a directory, or an unknown name (the nearest ones are offered).
        EdgespecError: it is not on this machine, and pulling failed or is not allowed.

    """
    ref, found = (model := ref_of(model)).name, model.found
    if isinstance(found, Path):
        return found
    if not is_missing(model):
        return Store.default().file(found)
    from edgespec.models.pull import Puller, no_progress

    puller = Puller(on_progress=on_progress or no_progress, on_message=on_message)
    entries = puller.expand(ref) if is_hub_name(ref) else [found]  # all parts of a split model
    if all(puller.store.is_present(entry, puller.registry) for entry in entries):
        return puller.store.file(found)
    if not pull_missing:
        raise EdgespecError(f"{ref} is not on this machine; get it with `edgespec models pull {ref}`")
    puller.plan(entries)
    first, *_ = [puller.ensure(entry) for entry in entries]
    return first


# ---- headers of models by name ----
#
# A file in another program's store may be called `sha256-970aa74c...`, which says nothing to anybody.


def model_header(model: ModelRef) -> GGUFHeader:
    """Return the header of a text-generating model, pulled if need be.

    Raises as `resolve` and `check_model_file`.
    """
    from edgespec.llama.gguf_header import check_model_file  # files are pulled while llama.cpp is compiled

    path = resolve(model)
    with named_as(model.name, path):
        return check_model_file(path)


@contextmanager
def named_as(ref: str, path: Path) -> Iterator[None]:
    """In errors of the block, call the file `path` by the name `ref` if it is in another program's store."""
    try:
        yield
    except EdgespecError as error:
        if is_ollama_name(ref) and str(path) in str(error):
            raise type(error)(str(error).replace(str(path), ref)) from error
        raise
