"""Chooses how many requests run at once, and how many tokens the caches hold."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from edgespec.drafting.profile import CONTEXTS, PassCosts, ProfileKey, guessed_curve, load
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError
from edgespec.llama.cache_types import SAFE_TYPES, possible_types, with_cache_type
from edgespec.llama.choices import CacheChoice
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.kernels import STOCK
from edgespec.llama.kv_cache import KVCacheSize
from edgespec.llama.rollback import MOST_COPIES, RollbackSize
from edgespec.models.footprint import (
    CTX_STEP,
    cell_bytes,
    draft_rollback,
    fits_in_memory,
    fitting_tokens,
    shape_of,
    states_bytes,
    target_rollback,
    weight_bytes,
    with_draft,
)

MOST_BY_DEFAULT = 16
"""Most requests at once where the user asks for no number."""

USUAL_CELLS = 1024
"""Tokens for each of several requests."""

DRAFT_CELLS = 1024
"""Tokens that the draft model keeps of each of several requests."""

CACHE_SHARE = 0.25
"""Largest share of the available memory for the caches of target and draft together."""

DRAFT_SHARE = 0.25
"""Fraction of the prefix cache given to the draft model, whose tokens are smaller."""

KEPT = 16
"""Most sequences in the prefix cache."""

_UNLIMITED, _LEAST_ROOM = 4096, 256  # tokens of room in the context for an answer without a limit
_ROOM_BYTES = 1 << 29  # of them: most answers are short, and all of a cache is written when it is made
_GAIN = 1.03  # "a few per cent": below that, the noise of a measured curve decides


class Capacity(msgspec.Struct, frozen=True):
    """The capacity of an engine: requests at once, and the size of its caches."""

    parallel: int
    """Most requests at once."""
    n_cells: int | None
    """Tokens that the target's cache holds, of all requests together; None: as many as one request needs."""
    n_bytes: int
    """Bytes of the caches of target and draft; with n_cells None, for one request of the longest context."""

    def __str__(self) -> str:
        """Return the capacity in words."""
        texts = "1 text" if self.parallel == 1 else f"{self.parallel} texts"
        cells = f"{self.n_cells:,} tokens of cache" if self.n_cells else "the cache grows with it"
        most = "" if self.n_cells else "up to "
        return f"{texts} at once, {cells}, {most}{self.n_bytes / 1e6:,.0f} MB"


def choose_capacity(
    costs: Sequence[float],
    target: GGUFHeader,
    draft: GGUFHeader | None,
    demand: EngineOptions,
    available: int | None,
) -> Capacity:
    """Return the capacity of a pair.

    `costs`: T(0), T(1) .. of the target's passes, in any unit. `available`: bytes of memory before anything
    is loaded; None: unknown, so no limit. The caches take at most a quarter of what the weights leave, unless
    more is demanded.
    """
    longest, kept_bytes = demand.n_ctx or target.n_ctx_train, demand.prefix_cache or 0
    one = cell_bytes(target)
    # States of one of several requests, and of a cached prefix.
    states = states_bytes(target, target_rollback(target, parallel=2)) + target.state_bytes
    draft_cells = min(DRAFT_CELLS, draft.n_ctx_train) if draft else 0
    draft_bytes = cell_bytes(draft) * draft_cells if draft else 0  # of one text
    draft_bytes += states_bytes(draft, draft_rollback()) if draft else 0
    kept_draft = kept_cells(draft, DRAFT_SHARE * kept_bytes) * cell_bytes(draft) if draft else 0
    weights = weight_bytes(target)
    weights += weight_bytes(draft) if draft and draft.path != target.path else 0  # a head in the same file
    budget = None if available is None else int(CACHE_SHARE * max(0, available - weights))
    parallel = demand.parallel or texts_that_pay(costs)
    if budget is not None and demand.parallel is None:
        parallel = max(1, min(parallel, (budget - kept_draft) // (one * USUAL_CELLS + draft_bytes + states)))
    if parallel == 1:
        states = states_bytes(target, target_rollback(target))
    if parallel == 1 and demand.n_cells is None:
        return Capacity(1, None, longest * one + states + 2 * draft_bytes + kept_bytes)
    cells = max(longest, parallel * USUAL_CELLS) + kept_cells(target, (1.0 - DRAFT_SHARE) * kept_bytes)
    if budget is not None:
        cells = min(cells, (budget - parallel * (draft_bytes + states) - kept_draft) // one)
    least = max(demand.n_ctx or 0, parallel * USUAL_CELLS)
    cells = demand.n_cells or max(least, cells // CTX_STEP * CTX_STEP)
    return Capacity(parallel, cells, cells * one + parallel * (draft_bytes + states) + kept_draft)


def kept_cells(header: GGUFHeader, n_bytes: float) -> int:
    """Return how many tokens a prefix cache of `n_bytes` holds."""
    return min(int(n_bytes) // cell_bytes(header), KEPT * header.n_ctx_train)


def kept_sequences(header: GGUFHeader, parallel: int, n_bytes: int, rollback: RollbackSize) -> int:
    """Return how many sequences a prefix cache of `n_bytes` holds.

    Several requests share a cache that always has room for them. But each recurrent state takes its own
    memory: a model with such states has as many sequences there as requests, or as the bytes allow.
    """
    if not n_bytes and parallel == 1:
        return 0
    states = states_bytes(header, replace(rollback, n_kept=1))
    if not states:
        return KEPT
    affordable = n_bytes // (states + USUAL_CELLS * cell_bytes(header))
    return min(KEPT, max(affordable, parallel if parallel > 1 else 0))


def fitting_ctx(n_prompt: int, n_predict: int, n_ctx_train: int) -> int:
    """Return the smallest context for a generation of at most `n_predict` tokens."""
    n_tokens = n_prompt + n_predict + 1
    return min(n_ctx_train, -(-n_tokens // CTX_STEP) * CTX_STEP)


def room_without_limit(header: GGUFHeader, n_prompt: int) -> int:
    """Return the tokens of room for an answer without a limit: 4,096, fewer if they take much memory."""
    n = min(_UNLIMITED, max(_LEAST_ROOM, _ROOM_BYTES // cell_bytes(header)))
    while n > _LEAST_ROOM:
        try:
            fits_in_memory([(header, min(n_prompt + n, header.n_ctx_train))], weights_loaded=True)
        except EdgespecError:
            n //= 2
        else:
            break
    return max(n, _LEAST_ROOM)


def choose_cache_type(
    target: GGUFHeader, draft: GGUFHeader | None, cache_type: CacheChoice, n_tokens: int
) -> GGUFHeader:
    """Return the target's header with a type of cache in which `n_tokens` fit in memory, before it is loaded.

    "auto": the most exact one. Raises UsageError if the model cannot have the type, and EdgespecError, with
    the tokens that fit in each, if the context does not fit.
    """
    can = [one for one in possible_types(target) if one in SAFE_TYPES]
    types = can if cache_type == "auto" else [cache_type]
    for i, one in enumerate(types):
        typed = with_cache_type(target, one)
        try:
            fits_in_memory(with_draft(typed, draft, n_tokens))
        except EdgespecError as error:
            if i + 1 == len(types):
                raise EdgespecError(f"{error}; {_what_fits(target, draft)}") from None
        else:
            break
    return typed


def _what_fits(
    target: GGUFHeader, draft: GGUFHeader | None = None, *, weights_loaded: bool = False, more_states: int = 0
) -> str:
    fitting = fitting_tokens(target, draft, weights_loaded=weights_loaded, more_states=more_states)
    sizes = ", ".join(f"{n:,} with {one}" for one, n in fitting.items())
    return f"tokens of context that fit, by --cache-type: {sizes}"


def check_cache(header: GGUFHeader, size: KVCacheSize, *, keeps: bool, is_draft: bool = False) -> None:
    """Raise EdgespecError if a cache of this size does not fit in memory besides the loaded weights.

    `keeps`: it also has a prefix cache, with copies of states. `is_draft`: its type cannot be chosen.
    """
    states = states_bytes(header, size.rollback, size.n_sequences)
    if keeps:
        states += MOST_COPIES * size.n_sequences * header.state_bytes
    more = states - shape_of(header).states
    try:
        fits_in_memory([(header, size.n_ctx)], weights_loaded=True, more_states=more)
    except EdgespecError as error:
        if is_draft:
            raise
        raise EdgespecError(f"{error}; {_what_fits(header, weights_loaded=True, more_states=more)}") from None


def texts_that_pay(costs: Sequence[float]) -> int:
    """Return how many requests at once pay, 1, 2, 4 .. `MOST_BY_DEFAULT`, for passes that cost T(0), T(1) ..

    Twice as many pay if together they write at least 3 % more tokens a second, n / T(n), than any fewer.
    """
    best, found, n = 1.0 / costs[1], 1, 2
    while n <= min(MOST_BY_DEFAULT, len(costs) - 1):
        if n / costs[n] >= _GAIN * best:
            best, found = n / costs[n], n
        n *= 2
    return found


def expected_capacity(
    target: GGUFHeader,
    draft: GGUFHeader | None,
    demand: EngineOptions,
    *,
    kernels: str,
    n_threads: int,
    available: int | None,
) -> Capacity:
    """Return the capacity that an engine of models not loaded yet would have, by the profile of this machine.

    `kernels`: the name of those that the target runs on.
    """
    profile = load(ProfileKey.of(target, draft, kernels=kernels, threads=n_threads))
    curve = profile.target if profile else guessed_curve(target.file_bytes, own_kernels=kernels != STOCK)
    return choose_capacity(PassCosts(curve).at(CONTEXTS[0]), target, draft, demand, available)
