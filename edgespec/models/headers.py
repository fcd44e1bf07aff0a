"""Headers of models by name, with errors that name a model as the user does.

A file in another program's store may be called `sha256-970aa74c...`, which says nothing to anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.models.found.catalog import is_found_name, stored_model
from edgespec.models.resolve import resolve


def model_header(ref: str) -> GGUFHeader:
    """Return the header of the text-generating model `ref`, pulled if need be.

    Raises as `resolve` and `check_model_file`.
    """
    path = resolve(ref)
    with named_as(ref, path):
        return check_model_file(path)


@contextmanager
def named_as(ref: str, path: Path) -> Iterator[None]:
    """Call the file `path` by the name `ref` in errors of the block, if it is in another program's store."""
    try:
        yield
    except EdgespecError as error:
        if is_found_name(ref) and str(path) in str(error):
            raise type(error)(str(error).replace(str(path), ref)) from error
        raise


def notes_of(ref: str, header: GGUFHeader) -> list[str]:
    """Return what another program keeps of a model beside its file and edgespec does not use, a line each."""
    model = stored_model(ref)
    notes = list(model.notes) if model else []
    if model and model.source == "ollama" and not header.gguf.text("tokenizer.chat_template"):
        notes.append("its file has no chat template, and Ollama's is not used: --chat-template names one")
    return notes
