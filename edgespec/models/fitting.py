"""Tell which pairs of models fit into this machine's memory, from their files or else from models.toml."""

from __future__ import annotations

import re
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


READABLE = 8.0
"""Tokens a second of the best pair, at least: about what one reads."""

_ACTIVE = re.compile(r"([\d.]+)B-A([\d.]+)B", re.I)  # parameters, and those that a token uses


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
    tokens_per_s: float | None = None
    """About how fast the target writes without drafts, by the bytes that a token reads; None if unknown."""


def fitting_pairs(
    registry: Registry, store: Store, root: Path = Path("/"), *, bandwidth: float | None = None
) -> list[PairFit]:
    """Return all pairs, sorted by the memory they need, with unknown needs last.

    `root`: the folder with `proc`. `bandwidth`: bytes a second that are read of memory, None if not measured.
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
        read = _bytes_a_token(registry.get(pair.target), registry)
        speed = bandwidth / read if bandwidth and read else None
        found.append(PairFit(name, pair.target, pair.draft, needed, fits, speed))
    return sorted(found, key=lambda fit: (fit.needed is None, fit.needed or 0))


def best_pair(pairs: Sequence[PairFit], registry: Registry, root: Path = Path("/")) -> str | None:
    """Return the largest pair that fits, leaves room for other programs and is READABLE; None if none fits.

    If none is as fast as that, the fastest. Of equally large pairs (ALIKE) it is the last in models.toml; the
    user's own come after the shipped ones. Speeds that are not known count as fast enough.
    """
    total = total_bytes(root)
    if total is None:
        return None
    fitting = {
        fit.pair: fit.needed for fit in pairs if fit.fits and fit.needed and fit.needed <= BEST_SHARE * total
    }
    speeds = {fit.pair: fit.tokens_per_s for fit in pairs if fit.pair in fitting}
    readable = {name for name, speed in speeds.items() if speed is None or speed >= READABLE}
    if fitting and not readable:
        return max(speeds, key=lambda name: speeds[name] or 0.0)
    fitting = {name: needed for name, needed in fitting.items() if name in readable}
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


def _bytes_a_token(entry: Entry, registry: Registry) -> float | None:
    """Return the bytes of weights that a token reads: the file, but of experts those that are used."""
    size = _file_bytes(entry, registry)
    experts = _ACTIVE.fullmatch(entry.params)
    return size * float(experts[2]) / float(experts[1]) if size and experts else size


def _file_bytes(entry: Entry, registry: Registry) -> int | None:
    """Return the size of the entry's file; for a derived entry, an estimate from its base's size."""
    if entry.size or not entry.derived:
        return entry.size
    source = registry.get(entry.derived.base)
    bits = BITS.get(entry.derived.type), BITS.get(source.quantization.lower())
    return int(source.size * bits[0] / bits[1]) if source.size and bits[0] and bits[1] else None
