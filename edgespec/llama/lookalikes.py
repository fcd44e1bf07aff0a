"""Recognize files that are given as a GGUF by mistake, from their first bytes."""

from __future__ import annotations

_OLD_GGML = (
    "a Whisper model of whisper.cpp (`edgespec quantize FILE --type q8_0` makes a GGUF of it, for "
    "`edgespec transcribe`), or a GGML file of 2023; download a language model as GGUF"
)
_MAGICS = (
    (b"version https://git-lfs", "a git-lfs pointer; fetch the real file with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?); convert the model to GGUF first"),
    (b"\x80\x02", "a Python pickle (a PyTorch checkpoint?); convert the model to GGUF first"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"\xfd7zXZ", "an xz archive; unpack it first"),
    *((magic, _OLD_GGML) for magic in (b"ggjt", b"tjgg", b"lmgg", b"fmgg")),
)


def describe_file(start: bytes) -> str:
    """Return what a file that begins with `start` seems to be and, if possible, what to do."""
    for magic, description in _MAGICS:
        if start.startswith(magic):
            return description
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 30:
        return "a safetensors file; convert the model to GGUF first"
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (a download that needs a login, or the wrong link); download the file itself"
    if not any(start):
        return "zeros (an interrupted download); download it again"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in start):
        return "a text file"
    return "an unknown kind of file"
