"""The C interface of csrc/whisper (edgespec_whisper.h): its structures and functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.errors import EdgespecError
from edgespec.llama import backend

_REASON_BYTES = 512
_MOST_ID = 2**31 - 1
_pointer, _size, _text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
_int32 = ctypes.c_int32


class CDims(ctypes.Structure):
    """`struct es_whisper_dims`."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "n_mels",
            "n_vocab",
            "n_audio_ctx",
            "n_audio_state",
            "n_audio_head",
            "n_audio_layer",
            "n_text_ctx",
            "n_text_state",
            "n_text_head",
            "n_text_layer",
            "is_multilingual",
            "n_alignment_heads",
        )
    )


class CPart(ctypes.Structure):
    """`struct es_whisper_part`."""

    _fields_ = (
        ("sequence", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("n_tokens", ctypes.c_size_t),
        ("n_logits", ctypes.c_size_t),
        ("parents", ctypes.c_void_p),
        ("n_parents", ctypes.c_size_t),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "open": (_pointer, (_text, _int32, _int32, _text, _size)),
    "free": (None, (_pointer,)),
    "get_dims": (CDims, (_pointer,)),
    "alignment_heads": (ctypes.c_int, (_pointer, _pointer, _size)),
    "kernels_reason": (_text, (_pointer,)),
    "encode": (_pointer, (_pointer, _pointer, _size, _text, _size)),
    "cross_from": (_pointer, (_pointer, _pointer, _size, _text, _size)),
    "audio_free": (None, (_pointer,)),
    "states": (ctypes.c_int, (_pointer, _pointer, _size)),
    "cache_new": (_pointer, (_pointer, _size, _int32, _text, _size)),
    "cache_free": (None, (_pointer,)),
    "forward": (ctypes.c_int, (_pointer, ctypes.POINTER(CPart), _size, _pointer, _size, _text, _size)),
    "n_past": (ctypes.c_int, (_pointer, _int32)),
    "rewind": (ctypes.c_int, (_pointer, _int32, _int32)),
    "reorder": (ctypes.c_int, (_pointer, _pointer, _size)),
    "cross_attention": (
        ctypes.c_int,
        (_pointer, _pointer, _size, _pointer, _size, _pointer, _size, _text, _size),
    ),
}


class WhisperLibrary:
    """The library's functions, without `es_whisper_` before their names."""

    open: Callable[..., int | None]
    free: Callable[..., None]
    get_dims: Callable[..., CDims]
    alignment_heads: Callable[..., int]
    kernels_reason: Callable[..., bytes]
    encode: Callable[..., int | None]
    cross_from: Callable[..., int | None]
    audio_free: Callable[..., None]
    states: Callable[..., int]
    cache_new: Callable[..., int | None]
    cache_free: Callable[..., None]
    forward: Callable[..., int]
    n_past: Callable[..., int]
    rewind: Callable[..., int]
    reorder: Callable[..., int]
    cross_attention: Callable[..., int]

    def __init__(self, path: Path) -> None:
        """Load `path`. Raises EdgespecError if it is not there, or no such library."""
        if not path.exists():
            raise EdgespecError(
                f"speech is not built in this installation: no {path}; install edgespec again"
            )
        try:
            library = ctypes.CDLL(str(path))
            for name, (result, parameters) in _SIGNATURES.items():
                function = library[f"es_whisper_{name}"]
                function.restype, function.argtypes = result, parameters
                setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise EdgespecError(f"{error}; install edgespec again") from error


@cache
def whisper_library() -> WhisperLibrary:
    """Return the library, which lies beside the C core."""
    backend.clear_log()  # llama.cpp's libraries are loaded: the graphs call the ggml among them
    return WhisperLibrary(Path(_core.__file__).with_name("edgespec_whisper.so"))


def library_path(path: Path) -> bytes:
    """Return the path as C takes it."""
    return os.fsencode(path.absolute())


class Reason:
    """Room for the line in which the library says why it failed."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_REASON_BYTES)
        self.arguments = (self._buffer, _REASON_BYTES)
        """The last two arguments of a function that can fail."""

    def __str__(self) -> str:
        return self._buffer.value.decode(errors="replace") or "the library gives no reason"


def address(array: npt.NDArray[Any]) -> int:
    """Return where a contiguous array's numbers lie."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return int(array.ctypes.data)


def ids(tokens: object) -> npt.NDArray[np.int32]:
    """Return tokens as the library takes them. Raises ValueError for numbers that are no 32-bit ids."""
    wide = np.asarray(tokens, np.int64)
    if wide.ndim != 1 or (wide.size and (wide.min() < -1 or wide.max() > _MOST_ID)):
        raise ValueError("token ids and parents are 32-bit numbers in one row")
    return wide.astype(np.int32)
