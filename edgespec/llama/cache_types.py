"""Types of a cache of keys and values: those possible for a model, and its header with one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from edgespec.errors import UsageError
from edgespec.llama.choices import CacheType
from edgespec.llama.gguf_header import GGUFHeader

CACHE_TYPES: tuple[CacheType, ...] = get_args(CacheType)
"""All types, the most exact one first."""

SAFE_TYPES: tuple[CacheType, ...] = ("f16", "q8_0")
"""Types that serve every model: in Q4_0 the default target writes nonsense (docs/measurements/kernels.md)."""

_WIDTHS: dict[CacheType, int] = {"f16": 1, "q8_0": 32, "q4_0": 64}
# A head's width must be a multiple. Numbers are quantized in 32s; llama.cpp rotates keys and values by a
# Hadamard matrix before that where the width is a multiple of 64, and 4 bits without it lose too much.


def why_not(header: GGUFHeader, cache_type: CacheType) -> str:
    """Return why a model cannot have caches of a type; "" if it can."""
    if cache_type == "f16":
        return ""
    if not sum(header.n_head_kv):
        return f"{header.architecture} has no attention, so no keys and values"
    n = _WIDTHS[cache_type]
    for width in (header.head_dim_k, header.head_dim_v):
        if width % n:
            return f"its heads' width, {width}, must be a multiple of {n}"
    return ""


def possible_types(header: GGUFHeader) -> list[CacheType]:
    """Return the types that a model's cache can have, the most exact one first."""
    return [one for one in CACHE_TYPES if not why_not(header, one)]


def with_cache_type(header: GGUFHeader, cache_type: CacheType) -> GGUFHeader:
    """Return the header of the same model with caches in `cache_type`; raise UsageError if impossible."""
    if problem := why_not(header, cache_type):
        others = ", ".join(possible_types(header))
        raise UsageError(
            f"{header.path}: {problem}; choose {others}, or leave it out",
            field="cache_type",
            value=cache_type,
        )
    return replace(header, cache_type=cache_type)
