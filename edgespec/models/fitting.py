"""Which pairs of models this machine can hold: told from the files that are here, else from models.toml."""

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
"""Share of the machine's memory that the best pair takes at most: the rest is for all other programs, and for
the files that they read."""

ALIKE = 64 << 20
"""Bytes by which pairs of about the same size differ."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair of models.toml, and whether this machine can hold it."""

    pair: str
    target: str
    draft: str
    needed: int | None
    """Bytes of memory expected for both with the usual context; None: models.toml says too little of them."""
    fits: bool | None
    """Whether as much is available now; None: not known."""


def fitting_pairs(registry: Registry, store: Store, root: Path = Path("/")) -> list[Fit]:
    """Return all pairs by the memory they need, those of which it is not known last.

    `root`: where /proc is.
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
        found.append(Fit(name, pair.target, pair.draft, needed, fits))
    return sorted(found, key=lambda fit: (fit.needed is None, fit.needed or 0))


def best_pair(pairs: Sequence[Fit], registry: Registry, root: Path = Path("/")) -> str | None:
    """Return the largest pair that fits and leaves room for other programs; None if there is none.

    Of those of about the same size it is the last in models.toml, where a user's own come after all others.
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
    """Return the memory that the model takes with the usual context; None if too little is known of it."""
    if store.is_present(entry, registry):
        try:
            header = check_model_file(store.file(entry))
        except EdgespecError:
            pass  # damaged: what it should be is known all the same
        else:
            return required_bytes(header, min(header.n_ctx_train, USUAL_CTX))
    size, shape = _file_bytes(entry, registry), registry.shape(entry)
    return loaded_bytes(size, shape, USUAL_CTX) if size and shape else None


def _file_bytes(entry: Entry, registry: Registry) -> int | None:
    """Return the size of the entry's file; of one that is to be made here about, from that of its source."""
    if entry.size or not entry.derived:
        return entry.size
    source = registry.get(entry.derived.base)
    bits = BITS.get(entry.derived.type), BITS.get(source.quantization.lower())
    return int(source.size * bits[0] / bits[1]) if source.size and bits[0] and bits[1] else None
