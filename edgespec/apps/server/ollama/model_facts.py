"""The served model as Ollama's API describes it: its names, its size, the metadata of its file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.ollama.response_schema import (
    ListedModel,
    LoadedModel,
    ModelDetails,
    PullLine,
    ShownModel,
    TensorFacts,
)
from edgespec.apps.server.request_reader import ALIAS, Service
from edgespec.engine.engine import Engine
from edgespec.llama.gguf import STRING, Field
from edgespec.llama.gguf_header import GGUFHeader, read_tensors
from edgespec.models.hashes import known_sha256

LATEST = "latest"
"""The tag of a name without one."""

FOREVER = "2318-01-01T00:00:00Z"
"""When the model leaves the memory: never while the server runs. Ollama's longest time ends about then."""

_LONGEST_ARRAY = 5  # longer ones are shown empty unless `verbose` is true, as in Ollama
_SIZES = {"Small": "S", "Medium": "M", "Large": "L"}
_NOT_SHOWN = ("general.name", "tokenizer.chat_template")  # told in fields of their own


class OllamaModelFacts:
    """The served model, as Ollama's API describes one."""

    def __init__(self, engine: Engine, service: Service, capabilities: Sequence[str]) -> None:
        """Describe `engine`'s target, which can do `capabilities`."""
        self._engine = engine
        self._service = service
        self._capabilities = [*capabilities]
        target = engine.target
        self._header = target.header
        self._digest = digest(self._header)
        self._modified = rfc3339(target.path.stat().st_mtime)
        self._details = ModelDetails(
            parent_model="",
            format="gguf",
            family=self._header.architecture,
            families=[self._header.architecture],
            parameter_size=human_number(target.n_params),
            quantization_level=quantization(target.ftype),
            context_length=service.n_ctx,
            embedding_length=self._header.n_embd,
        )
        self.names = ServedNames(service, self._details.quantization_level, self._details.parameter_size)

    def listed(self) -> ListedModel:
        """Return the model for /api/tags."""
        return ListedModel(
            name=self.names.full,
            model=self.names.full,
            modified_at=self._modified,
            size=self._header.file_bytes,
            digest=self._digest,
            details=self._details,
            capabilities=self._capabilities,
        )

    def loaded(self) -> LoadedModel:
        """Return the model for /api/ps."""
        engine = self._engine
        weights = engine.target.size_bytes + (engine.draft.size_bytes if engine.draft else 0)
        return LoadedModel(
            name=self.names.full,
            model=self.names.full,
            size=weights + engine.capacity.n_bytes,
            digest=self._digest,
            details=self._details,
            expires_at=FOREVER,
            size_vram=0,
            context_length=self._service.n_ctx,
        )

    def pulled(self) -> list[PullLine]:
        """Return what /api/pull says of the model, which is here."""
        digest, n_bytes = f"sha256:{self._digest}", self._header.file_bytes
        status = f"pulling {self._digest[:12]}"
        fetched = PullLine(status=status, digest=digest, total=n_bytes, completed=n_bytes)
        others = ("verifying sha256 digest", "writing manifest", "success")
        return [PullLine(status="pulling manifest"), fetched, *(PullLine(status=line) for line in others)]

    def shown(self, *, verbose: bool) -> ShownModel:
        """Return the model for /api/show."""
        template = self._engine.target.chat_template or ""
        shown = ShownModel(
            modelfile=f"# The one model of this server, made from no Modelfile.\nFROM {self.names.full}\n",
            parameters=f"{'num_ctx':<30} {self._service.n_ctx}",
            template=template,
            details=self._details,
            model_info=self._model_info(verbose=verbose),
            capabilities=self._capabilities,
            modified_at=self._modified,
        )
        if license_text := self._header.gguf.text("general.license"):
            shown.license = license_text
        if verbose:
            shown.tensors = [
                TensorFacts(name=tensor.name, type=tensor.type, shape=[*tensor.shape])
                for tensor in read_tensors(self._header)
            ]
        return shown

    def _model_info(self, *, verbose: bool) -> dict[str, Any]:
        fields = self._header.gguf.fields
        found = {key: self._value(field, verbose=verbose) for key, field in fields.items()}
        for key in _NOT_SHOWN:
            found.pop(key, None)
        return {**found, "general.parameter_count": self._engine.target.n_params}

    def _value(self, field: Field, *, verbose: bool) -> Any:  # noqa: ANN401 - any value of a GGUF file
        if not field.is_array:
            return field.value
        if field.n > _LONGEST_ARRAY and not verbose:
            return []
        gguf = self._header.gguf
        if field.kind == STRING:
            return [text.decode(errors="replace") for text in gguf.texts(field.key)]
        return gguf.numbers(field.key).tolist()


class ServedNames:
    """The served model's name, its aliases, and what may stand after a colon."""

    def __init__(self, service: Service, quantization: str, size: str) -> None:
        """Accept the model's name also without its `quantization`, or with that or its `size` as a tag."""
        self.full = service.name if ":" in service.name else f"{service.name}:{LATEST}"
        """The name that lists show."""
        names = {name.lower() for name in (service.name, *service.aliases)}
        self._names = names | {name.removesuffix(f"-{quantization.lower()}") for name in names}
        self._tags = {LATEST, quantization.lower(), size.lower()}

    def check(self, asked: str) -> None:
        """Raise an ApiError if no model of this name is served, in Ollama's words."""
        if not asked:
            raise ApiError(400, "model is required", param="model")
        if not self._is_served(asked.lower()):
            line = f"model '{asked[:80]}' not found: this server has '{self.full}', also called '{ALIAS}'"
            raise ApiError(404, line, param="model", code="model_not_found")

    def _is_served(self, asked: str) -> bool:
        name, _, tag = asked.rpartition(":")
        # Ollama writes qwen2.5-coder:1.5b for what is qwen2.5-coder-1.5b-q4_k_m here.
        return bool({asked, f"{name}-{tag}"} & self._names) or (name in self._names and tag in self._tags)


def digest(header: GGUFHeader) -> str:
    """Return the SHA-256 of the model's file where it is known, else that of its metadata and its size.

    Hashing the file would take seconds for each gigabyte. Either names this model and no other.
    """
    if known := known_sha256(header.path):
        return known
    with header.path.open("rb") as file:
        hashed = hashlib.sha256(file.read(header.gguf.data_start))
    hashed.update(str(header.file_bytes).encode())
    return hashed.hexdigest()


def quantization(ftype: str) -> str:
    """Return llama.cpp's name of a quantization as Ollama writes it: Q4_K_M for "Q4_K - Medium"."""
    name, _, rest = ftype.removeprefix("(guessed) ").removeprefix("all ").partition(" - ")
    name = re.split(r"[ ,]", name)[0]
    return f"{name}_{_SIZES[rest]}" if rest in _SIZES else name


def human_number(n: int) -> str:
    """Return a number of parameters as Ollama writes it: 1.5B, 494.03M."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if n >= unit:
            return f"{n // unit}{letter}" if n % unit == 0 else f"{n / unit:.{digits}f}{letter}"
    return str(n)


def rfc3339(seconds: float) -> str:
    """Return a time, in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
