"""What all answers of Ollama's API share: an error, versions, digests, times."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.llama.gguf_header import GGUFHeader

SPOKEN = "0.12.11"
"""The version of Ollama whose API this is: clients ask for the least that they need."""

FOREVER = "2318-01-01T00:00:00Z"
"""When the model leaves the memory: never while the server runs. Ollama's longest time ends about then."""


def digest(header: GGUFHeader) -> str:
    """Return the SHA-256 of the model's file where it is known, else that of its metadata and its size.

    Hashing the file would take seconds for each gigabyte. Either names this model and no other.
    """
    from edgespec.models.hashes import known_sha256

    if known := known_sha256(header.path):
        return known
    with header.path.open("rb") as file:
        hashed = hashlib.sha256(file.read(header.gguf.data_start))
    hashed.update(str(header.file_bytes).encode())
    return hashed.hexdigest()


def rfc3339(seconds: float) -> str:
    """Return a time, in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
