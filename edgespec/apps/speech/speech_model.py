"""Whisper models: the file that a reference means, its facts, and the refusal of other files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.hub import is_hub_name
from edgespec.models.on_disk import ARCHITECTURE, foreign_whisper, is_whisper_source
from edgespec.models.registry import load_registry
from edgespec.models.resolve import locate, resolve
from edgespec.platform.files import expand_user

if TYPE_CHECKING:  # it loads llama.cpp, which a name alone does not need
    from edgespec.llama.gguf_header import GGUFHeader

_CHOOSE = "choose a Whisper model, such as whisper-base (`edgespec models list --all`)"
_NO_WHISPER = f"a language model, which writes text; {_CHOOSE}"

_PREFIX, _SHORT = "whisper-", {"large": "whisper-large-v3", "turbo": "whisper-large-v3-turbo"}


def speech_ref(ref: str) -> str:
    """Return the reference to a Whisper model, with OpenAI's short names, such as small, expanded."""
    entries = load_registry().entries
    named = _SHORT.get(ref, _PREFIX + ref)
    return named if ref not in entries and named in entries and not expand_user(ref).exists() else ref


def is_english(ref: str) -> bool:
    """Whether `ref` is the registry's name of an English-only model, pulled or not."""
    return speech_ref(ref) in load_registry().entries and ref.endswith(".en")


def check_speech_file(path: Path, name: str = "") -> GGUFHeader:
    """Read the header of a complete Whisper model, called `name`. Raises EdgespecError for any other file."""
    from edgespec.llama.gguf_header import check_complete_file, other_kind

    header = check_complete_file(path)
    if header.architecture != ARCHITECTURE:
        kind = other_kind(header)
        raise EdgespecError(f"{name or path}: {f'{kind}; {_CHOOSE}' if kind else _NO_WHISPER}")
    return header


def check_speech_ref(ref: str) -> None:
    """Raise what `speech_model` raises for `ref`, as far as that can be known before it is pulled."""
    ref = speech_ref(ref)
    if ref.strip() and is_whisper_source(expand_user(ref)):
        raise UsageError(foreign_whisper(ref))
    found = locate(ref)
    if isinstance(found, Path):
        check_speech_file(found, ref)
    elif not found.speech and not is_hub_name(ref):
        raise EdgespecError(f"{ref}: {_NO_WHISPER}")


def speech_model(ref: str) -> Path:
    """Return the GGUF file of the Whisper model that `ref` means, pulled if need be; see `resolve`.

    Raises UsageError for a Whisper model of another program, which must be converted first, and as
    `resolve`; EdgespecError for any other file.
    """
    ref = speech_ref(ref)
    if ref.strip() and is_whisper_source(expand_user(ref)):
        raise UsageError(foreign_whisper(ref))
    path = resolve(ref)
    check_speech_file(path, ref)
    return path


def speech_facts(path: Path) -> dict[str, object]:
    """Return the facts of a Whisper model. Raises EdgespecError for an incomplete one."""
    from edgespec.apps.speech.tokenizer import WhisperTokenizer
    from edgespec.apps.speech.weights.convert import SIZE_KEYS

    gguf = check_speech_file(path).gguf
    tokenizer = WhisperTokenizer.from_gguf(path)

    def size(name: str) -> int:
        return max(gguf.integers(f"whisper.{SIZE_KEYS[name]}"), default=0)

    return {
        "layers": [size("n_audio_layer"), size("n_text_layer")],
        "width": size("n_text_state"),
        "mels": size("n_mels"),
        "languages": len(tokenizer.languages) if tokenizer.is_multilingual else 1,
        "word_times": bool(gguf.integers("whisper.alignment_heads")),
        "bytes": path.stat().st_size,
    }


def pull_speech(model: str, draft: str) -> None:
    """Pull a Whisper model and its draft (a name, "auto" or "none") if they are missing."""
    from edgespec.cli.progress import pull_named

    names = [model] if draft in ("auto", "none") else [model, draft]
    for name in names:
        check_speech_ref(name)
    pull_named(*map(speech_ref, names))
