"""Tell which pairs of models fit into this machine's memory, from their files or else from models.toml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.entries import Entry, Registry
from edgespec.models.footprint import PROCESS_BYTES, USUAL_CTX, loaded_bytes, required_bytes
from edgespec.models.quantizations import BITS
from edgespec.models.store import Store
from edgespec.platform.memory import available_bytes, total_bytes

BEST_SHARE = 0.6
"""Largest share of the machine's memory for the best pair: other programs and their files need the rest."""

ALIKE = 64 << 20
"""Pairs that differ by fewer bytes than this count as equally large."""


@dataclass(frozen=True, slots=True)
class PairFit:
    """A pair of models.toml, and whether this machine can hold it."""

    pair: str
    target: str
    draft: str
    needed: int | None
    """Bytes of memory that both need with the usual context; None if models.toml says too little."""
    fits: bool | None
    """Whether so much is available now; None if unknown."""


def fitting_pairs(registry: Registry, store: Store, root: Path = Path("/")) -> list[PairFit]:
    """Return all pairs, sorted by the memory they need, with unknown needs last.

    `root`: the folder with `proc`.
    """
    available = available_bytes(root)
    needs = {
        name: expected_bytes(registry.get(name), registry, store)
        for name in dict.fromkeys(
            name for pair in registry.pairs.values() for name in (pair.target, pair.draft)
        )
    }
    found = []
    for name, pair in registry.pairs.items():
        target, draft = needs[pair.target], needs[pair.draft]
        needed = None if target is None or draft is None else PROCESS_BYTES + target + draft
        fits = None if needed is None or available is None else needed <= available
        found.append(PairFit(name, pair.target, pair.draft, needed, fits))
    return sorted(found, key=lambda fit: (fit.needed is None, fit.needed or 0))


def best_pair(pairs: Sequence[PairFit], registry: Registry, root: Path = Path("/")) -> str | None:
    """Return the largest pair that fits and leaves room for other programs; None if there is none.

    Of equally large pairs (ALIKE) it is the last in models.toml; the user's own come after the shipped ones.
    """
    total = total_bytes(root)
    if total is None:
        return None
    fitting = {
        fit.pair: fit.needed for fit in pairs if fit.fits and fit.needed and fit.needed <= BEST_SHARE * total
    }
    most = max(fitting.values(), default=0)
    alike = [name for name in registry.pairs if name in fitting and fitting[name] > most - ALIKE]
    return alike[-1] if alike else None


def expected_bytes(entry: Entry, registry: Registry, store: Store) -> int | None:
    """Return the memory that the model takes with the usual context; None if unknown."""
    if store.is_present(entry, registry):
        try:
            header = check_model_file(store.file(entry))
        except EdgespecError:
            pass  # a damaged file: estimate from models.toml
        else:
            return required_bytes(header, min(header.n_ctx_train, USUAL_CTX))
    size, shape = _file_bytes(entry, registry), registry.shape(entry)
    return loaded_bytes(size, shape, USUAL_CTX) if size and shape else None


def _file_bytes(entry: Entry, registry: Registry) -> int | None:
    """Return the size of the entry's file; for a derived entry, an estimate from its base's size."""
    if entry.size or not entry.derived:
        return entry.size
    source = registry.get(entry.derived.base)
    bits = BITS.get(entry.derived.type), BITS.get(source.quantization.lower())
    return int(source.size * bits[0] / bits[1]) if source.size and bits[0] and bits[1] else None
