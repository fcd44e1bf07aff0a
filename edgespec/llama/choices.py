"""Options of a model whose value is one of a few words. Light to import: tab completion imports it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from edgespec.errors import UsageError
from edgespec.platform.files import expand_user

KernelsChoice = Literal["auto", "off"]
"""edgespec's own kernels if they can be used, or llama.cpp's."""

CacheType = Literal["f16", "q8_0", "q4_0"]
"""How the target's cache holds keys and values: as 16-bit floats, or in 8 or 4 bits with one scale per 32."""

CacheChoice = Literal["auto", CacheType]
"""A `CacheType`, or the more exact of F16 and Q8_0 in which the context fits in memory."""

Pooling = Literal["mean", "cls", "last"]
"""The vector of a text: the mean of its tokens' states, that of the first token, or of the last."""


class StateRoom(NamedTuple):
    """The folder that states of prompts are kept in (prompt_states.py), and its limit."""

    path: Path
    limit: int
    """Bytes of all files together, whatever models they are of; the least recently used are deleted."""


class Lora(NamedTuple):
    """A LoRA adapter (adapters.py): its file, and its scale in texts that ask for no other."""

    path: Path
    scale: float = 1.0


AdapterSet: TypeAlias = tuple[tuple[int, float], ...]
"""The adapters that a text is written with: number and scale of each whose scale is not 0."""


def read_lora(given: str) -> Lora:
    """Return the adapter of `--lora`: FILE[:SCALE]. Raises UsageError."""
    path, _, end = given.rpartition(":")
    try:
        scale = float(end)
    except ValueError:
        path, scale = given, 1.0
    if not path or not math.isfinite(scale):
        raise UsageError("not FILE or FILE:SCALE, such as style.gguf:0.5", field="lora", value=given)
    return Lora(expand_user(path), scale)


SERVED_PREFIXES = 256 << 20
"""Bytes of the prefix cache of `serve`, where the user asks for no number."""


def read_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of `--rpc`: comma-separated HOST:PORT. Raises UsageError."""
    found = tuple(part.strip() for part in text.split(","))
    for address in found:
        host, _, port = address.rpartition(":")
        if not re.fullmatch(r"[\w.-]+", host) or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise UsageError("not HOST:PORT,HOST:PORT, such as 127.0.0.1:50052", field="rpc", value=address)
    if len(set(found)) < len(found):
        raise UsageError("names a node twice", field="rpc", value=text)
    return found
