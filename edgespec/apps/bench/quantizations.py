"""Quantizations: tell which one a file has and how large another would be, and make missing ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import MessageFn, UsageError, silent
from edgespec.llama.gguf_header import read_header, read_tensors
from edgespec.llama.quantize import QUANT_TYPES, quantize
from edgespec.models.hub import check_disk
from edgespec.models.on_disk import file_stem, is_ollama_name, quantization_in
from edgespec.models.registry import Entry, load_registry, nearest
from edgespec.models.resolve import locate, resolve
from edgespec.models.store import Store, sha256_of

# About how many bits per weight the whole file has: for the disk check only.
BITS = {
    "q4_0": 4.6, "q4_1": 5.1, "q5_0": 5.6, "q5_1": 6.1, "q8_0": 8.6,
    "q2_k": 3.3, "q3_k_s": 3.7, "q3_k_m": 4.1, "q3_k_l": 4.4,
    "q4_k_s": 4.7, "q4_k_m": 5.0, "q5_k_s": 5.6, "q5_k_m": 5.8, "q6_k": 6.6,
    "q2_k_s": 3.1, "iq3_m": 3.9, "iq3_s": 3.7, "iq3_xs": 3.6, "iq3_xxs": 3.3, "iq2_m": 3.0, "iq2_s": 2.8,
    "iq2_xs": 2.7, "iq2_xxs": 2.4, "iq1_m": 2.2, "iq1_s": 2.0, "tq2_0": 2.6, "tq1_0": 2.3,
    "q2_0": 2.8, "q1_0": 1.7, "iq4_nl": 4.7, "iq4_xs": 4.5, "f16": 16.1, "bf16": 16.1, "f32": 32.1,
}  # fmt: skip

_FINER = 1.15  # times the bits: mixtures of one name differ that much
_COMMON_BITS = 4.6  # if the file's name does not tell; errs towards asking for more room
_IN_NAME = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(BITS, key=len, reverse=True))})(?![a-z0-9])", re.I)


def parse_types(text: str, field: str) -> list[str]:
    """Return the quantizations in `text`, separated by commas, each once. UsageError names the `field`."""
    types = list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for name in types:
        if name not in QUANT_TYPES:
            hint = nearest(name, QUANT_TYPES) or f" (known: {', '.join(QUANT_TYPES)})"
            raise UsageError(f"no quantization is called {name!r}{hint}", field=field)
    if not types:
        raise UsageError("name at least one quantization, such as q4_0", field=field)
    return types


def expected_bytes(source: Path, type_name: str) -> int:
    """Estimate the size of `source` as `type_name`, from the quantization in its name."""
    return int(
        source.stat().st_size * BITS[type_name] / BITS.get(quantization_in(source.stem).lower(), _COMMON_BITS)
    )


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Identity of a model file in a result."""

    name: str
    """The user's or the registry's name for it."""
    file: str
    """The file's name, without folders."""
    sha256: str
    size: int
    """Bytes."""
    quantization: str
    """Such as "Q4_K_M"; "" if neither registry nor file name shows it."""
    made_from: str = ""
    """The file it was quantized from on this machine, or ""; it can be no better than that one."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that a comparison runs."""

    name: str
    path: Path
    made_from: str = ""
    """Name of the model it was quantized from on this machine, or ""."""
    source: Path | None = None
    """The file of that model, if it is on this machine."""

    def facts(self, on_bytes: Callable[[int], None] = lambda _: None) -> FileFacts:
        """Return the facts; hashes the file, reporting to `on_bytes`, unless its hash is known."""
        entry = load_registry().entries.get(self.name)
        if entry and Store.default().file(entry) != self.path:  # another file of the same name
            entry = None
        return FileFacts(
            name=self.name,
            file=self.path.name,
            sha256=sha256_of(self.path, on_bytes),
            size=self.path.stat().st_size,
            quantization=(entry.quantization.upper() if entry else _own_type(self.path, self.name)),
            made_from=self.made_from,
        )


def _own_type(path: Path, name: str) -> str:
    return quantization_in(path.stem) or quantization_in(name)


def model_file(ref: str) -> ModelFile:
    """Return the model that `ref` means, pulled if need be. Raises as `resolve.resolve`."""
    found = locate(ref)
    base = found.derived.base if isinstance(found, Entry) and found.derived else ""
    if is_ollama_name(ref):
        return ModelFile(ref, resolve(ref))
    path = resolve(ref)
    source = Store.default().file(load_registry().get(base)) if base else None
    source = source if source and source.exists() else None
    return ModelFile(found.stem if isinstance(found, Path) else found.name, path, base, source)


def _bits(file: ModelFile) -> float:
    if bits := BITS.get(_own_type(file.path, file.name).lower()):
        return bits
    tensors = read_tensors(read_header(file.path))
    weights = sum(tensor.columns * tensor.rows * tensor.n_matrices for tensor in tensors)
    return 8 * sum(tensor.bytes for tensor in tensors) / weights


def variants(
    ref: str,
    types: Sequence[str],
    folder: Path,
    *,
    on_making: Callable[[str], None] = lambda _: None,
    on_message: MessageFn = silent,
) -> list[ModelFile]:
    """Return the model `ref` in each of the quantizations.

    If `ref` names a model of the registry, its variants there are used, and pulled if need be. All others are
    made in `folder`; `on_making` takes the name of a model before it is made. One that would have more bits
    than what it is made from is left out, with a message: it would be as wrong, and only larger. Raises
    UsageError and EdgespecError as `resolve.resolve` and `quantize.quantize`.
    """
    source = model_file(ref)
    origin = ModelFile(source.made_from, source.source) if source.source else source
    stem = _IN_NAME.sub("", file_stem(source.name)).strip("-._") or file_stem(source.name)
    # The user's own file may have the name of an entry and be another model.
    entries = load_registry().entries if isinstance(locate(ref), Entry) else {}
    found = []
    for type_ in types:
        name = f"{stem}-{type_}"
        if type_.upper() in (quantization_in(source.path.stem), quantization_in(source.name)):
            found.append(source)
        elif name in entries:
            found.append(model_file(name))
        elif BITS[type_] > _FINER * (bits := _bits(origin)):
            on_message(
                f"{name}: left out: {origin.name} has {bits:.1f} bits a weight, and cannot be made into "
                f"better ones; name a file of more bits as the target"
            )
        else:
            # The name contains the source's hash: a changed source gets new files.
            path = folder / f"{name}-of-{origin.facts().sha256[:12]}.gguf"
            if not path.exists():
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
                check_disk(folder, expected_bytes(origin.path, type_), name)
                on_making(name)
                quantize(origin.path, path, type_)
            found.append(ModelFile(name, path, origin.name, origin.path))
    return found
