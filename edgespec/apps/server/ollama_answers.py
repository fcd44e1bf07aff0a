"""The parts that answers of Ollama's API share: an error, versions, digests, times."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from edgespec.apps.server.names import NamedModel
    from edgespec.llama.gguf_header import GGUFHeader


SPOKEN = "0.12.11"
"""The version of Ollama whose API this is: clients ask for the least that they need."""

FOREVER = "2318-01-01T00:00:00Z"
"""When the model leaves the memory: never while the server runs. Ollama's longest time ends about then."""


def digest(header: GGUFHeader) -> str:
    """Return the SHA-256 of the model's file where it is known, else that of its metadata and its size.

    Hashing the file would take seconds for each gigabyte. Either names this model and no other.
    """
    from edgespec.models.store import known_sha256

    if known := known_sha256(header.path):
        return known
    with header.path.open("rb") as file:
        hashed = hashlib.sha256(file.read(header.gguf.data_start))
    hashed.update(str(header.file_bytes).encode())
    return hashed.hexdigest()


def listed(named: NamedModel, header: GGUFHeader) -> dict[str, Any]:
    """Return a model as /api/tags lists it."""
    return {
        "name": named.full,
        "model": named.full,
        "modified_at": rfc3339(header.path.stat().st_mtime),
        "size": header.file_bytes,
        "digest": digest(header),
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": header.architecture,
            "families": [header.architecture],
            "parameter_size": named.size,
            "quantization_level": named.quantization,
            "embedding_length": header.n_embd,
        },
    }


def loaded(entry: Mapping[str, Any], until: str = FOREVER) -> dict[str, Any]:
    """Return a model as /api/ps lists it, from its entry in /api/tags."""
    return {**entry, "size_vram": 0, "expires_at": until}


def nothing_asked(model: str, *, chat: bool, reason: Literal["load", "unload"]) -> dict[str, Any]:
    """Return the answer to a request without a prompt, which only loads the model or frees it."""
    said = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    told = {"model": model, "created_at": rfc3339(time.time()), **said}
    return {**told, "done": True, "done_reason": reason}


def rfc3339(seconds: float) -> str:
    """Return a time, in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEP = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(_UNITS)})", re.ASCII)


def duration_s(value: float | str) -> float:
    """Return the seconds of a time as Ollama writes it: 300, "5m", "1h30m"; infinity for a negative one.

    Raises ValueError for anything else.
    """
    text = str(value).strip()
    sign, rest = text[:1] == "-", text.lstrip("+-")
    steps = _STEP.findall(rest)
    if "".join(number + unit for number, unit in steps) == rest and steps:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in steps)
    else:
        try:
            seconds = float(rest)
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError('a duration is a number of seconds, or a text such as "5m" or "-1"')
    return math.inf if sign and seconds else seconds
