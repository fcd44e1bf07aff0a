"""Files by which Whisper models of other programs are known, without reading or importing more."""

from __future__ import annotations

from pathlib import Path

from edgespec.platform.files import why_no_file

ARCHITECTURE = "whisper"
"""The architecture in a GGUF file of ours."""

CTRANSLATE2_MODEL = "model.bin"
HUB_WEIGHTS, HUB_INDEX = "model.safetensors", "model.safetensors.index.json"
WHISPER_CPP_MAGIC = b"lmgg"


def is_whisper_source(path: Path) -> bool:
    """Whether `path` is a Whisper model of another program, to be converted; looks at few bytes of it."""
    if path.is_dir():
        return any((path / name).is_file() for name in (CTRANSLATE2_MODEL, HUB_WEIGHTS, HUB_INDEX))
    if why_no_file(path):
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == WHISPER_CPP_MAGIC
    except OSError:
        return False


def whisper_gguf(ref: str) -> str:
    """The line that refuses a Whisper model in GGUF where one is to be converted."""
    return (
        f"{ref}: a Whisper model in GGUF; other types are made of a folder of the hub (model.safetensors), "
        "a file of whisper.cpp (ggml-NAME.bin) or a folder of CTranslate2 (model.bin)"
    )


def foreign_whisper(ref: str) -> str:
    """The line that refuses a Whisper model of another program where a GGUF file is wanted."""
    return f"{ref}: a Whisper model, but no GGUF; convert it: edgespec quantize {ref} --type q8_0"
