"""Find the file of the Whisper model that a reference means."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import UsageError
from edgespec.models.registry import load_registry
from edgespec.models.resolve import resolve
from edgespec.models.store import Store
from edgespec.models.whisper.gguf_file import check_speech_file
from edgespec.models.whisper.kinds import foreign_whisper, is_whisper_source
from edgespec.platform.files import expand_user

_PREFIX, _SHORT = "whisper-", {"large": "whisper-large-v3", "turbo": "whisper-large-v3-turbo"}


def speech_ref(ref: str) -> str:
    """Return a reference to a Whisper model with OpenAI's short names, such as small, as the registry's."""
    entries = load_registry().entries
    named = _SHORT.get(ref, _PREFIX + ref)
    return named if ref not in entries and named in entries and not expand_user(ref).exists() else ref


def speech_models_here() -> list[tuple[str, Path]]:
    """Return names and files of the registry's Whisper models that are on this disk."""
    registry, store = load_registry(), Store.default()
    entries = [entry for entry in registry.entries.values() if entry.speech]
    return [(entry.name, store.file(entry)) for entry in entries if store.is_present(entry, registry)]


def speech_model(ref: str) -> Path:
    """Return the GGUF file of the Whisper model that `ref` means, pulled if need be; see `resolve`.

    Raises UsageError for a Whisper model of another program, which is to be converted first, and as
    `resolve`; EdgespecError for any other file.
    """
    ref = speech_ref(ref)
    if ref.strip() and is_whisper_source(expand_user(ref)):
        raise UsageError(foreign_whisper(ref))
    path = resolve(ref)
    check_speech_file(path, ref)
    return path
