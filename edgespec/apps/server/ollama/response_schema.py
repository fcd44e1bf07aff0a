"""Answers in the form of Ollama's API; `edgespec` fields are ours, and other clients ignore them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from edgespec.llama.gguf_header import GGUFHeader

SPOKEN = "0.12.11"
"""The version of Ollama whose API this is: clients ask for the least that they need."""

FOREVER = "2318-01-01T00:00:00Z"
"""When the model leaves the memory: never while the server runs. Ollama's longest time ends about then."""


class OllamaError(BaseModel):
    """The answer of every status of 400 and above, and the last line of a stream that failed."""

    error: str


class ModelDetails(BaseModel):
    """The model's family, size and quantization."""

    parent_model: str
    format: Literal["gguf"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class ListedModel(BaseModel):
    """The model in the answer of /api/tags."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails
    capabilities: list[str]


class ModelTags(BaseModel):
    """The answer of /api/tags."""

    models: list[ListedModel]


class LoadedModel(BaseModel):
    """The model in the answer of /api/ps."""

    name: str
    model: str
    size: int = Field(description="Bytes of weights and caches, of target and draft.")
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class LoadedModels(BaseModel):
    """The answer of /api/ps."""

    models: list[LoadedModel]


class PullLine(BaseModel):
    """A line of /api/pull, with the file's bytes; without a stream the last one alone."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


class TensorFacts(BaseModel):
    """A tensor of the model's file."""

    name: str
    type: str
    shape: list[int]


class ShownModel(BaseModel):
    """The answer of /api/show."""

    license: str | None = None
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    tensors: list[TensorFacts] | None = None
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    """The answer of /api/version."""

    version: str = Field(description="The version of Ollama whose API this is.")
    edgespec: str


# ---- facts of a model as Ollama writes them ----


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
