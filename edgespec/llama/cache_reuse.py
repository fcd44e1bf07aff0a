"""Parts of a prompt that were read at other places of earlier texts, and can be moved instead of read again.

What a token takes from the text before it stays when that text changes: a text that follows is not the
target's own (docs/cache.md). So it is done only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import n_common
from edgespec.errors import UsageError
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.rollback import State
from edgespec.llama.session import Session
from edgespec.llama.weights import Model

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_FACTOR, -1, 1 << 64)


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens that a prompt has in common with an earlier text, at another place or after another text."""

    at: int
    """Their place in the prompt."""
    start: int
    """Their place in the text."""
    n_tokens: int

    @property
    def stop(self) -> int:
        """The place in the prompt after the last of them."""
        return self.at + self.n_tokens

    def copy(self, cache: KVCache, sequence: int, prompt: Sequence[int]) -> MovedChunk:
        """Return the match with a copy of its cells in `sequence`, the text's."""
        state = cache.part(sequence, self.start, self.start + self.n_tokens)
        return MovedChunk(self, [*prompt[self.at : self.stop]], state)


@dataclass(frozen=True, slots=True)
class MovedChunk:
    """A match, and a copy of its cells."""

    match: Match
    tokens: list[int]
    state: State

    def move_into(self, cache: KVCache, sequence: int) -> bool:
        """Append what of it is not there to a sequence that reaches it; return whether the library could."""
        return cache.move_in(sequence, self.state, self.match.start, self.match.stop, self.tokens)


def find_matches(text: Sequence[int], prompt: Sequence[int], begin: int, least: int) -> list[Match]:
    """Return the parts of `prompt` from `begin` on that `text` has, of `least` tokens or more.

    In the order of the prompt; its last token is left out. Of several places in the text the one nearest to
    the last match's is taken.
    """
    end = len(prompt) - 1
    if end - begin < least or len(text) < least:
        return []
    known = _hashes(text, least)
    order = np.argsort(known, kind="stable")
    known = known[order]
    wanted = _hashes(prompt[begin:end], least)
    first = np.searchsorted(known, wanted, "left")
    last = np.searchsorted(known, wanted, "right")
    found: list[Match] = []
    shift = 0
    for i in np.flatnonzero(last > first).tolist():
        at = begin + i
        if found and at < found[-1].stop:
            continue
        places = order[first[i] : last[i]]  # ascending
        after = int(np.searchsorted(places, at - shift))
        near = places[max(0, after - 1) : after + 1].tolist()
        start = min(near, key=lambda place: abs(place - (at - shift)))
        n = n_common(text[start:], prompt[at:end])
        if n >= least:  # else only their hashes are alike
            found.append(Match(at, start, n))
            shift = at - start
    return found


def _hashes(tokens: Sequence[int], n: int) -> npt.NDArray[np.uint64]:
    """Return a number for each `n` tokens that follow each other, the same for the same tokens."""
    sums = np.zeros(len(tokens) + 1, np.uint64)  # modulo 2^64
    np.cumsum(np.asarray(tokens, np.uint64) * _powers(_FACTOR, len(tokens)), out=sums[1:])
    return (sums[n:] - sums[:-n]) * _powers(_INVERSE, len(tokens) - n + 1)


def _powers(factor: int, n: int) -> npt.NDArray[np.uint64]:
    factors = np.full(n, factor, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def check_reuse(model: Model, least: int, n_threads: int) -> None:
    """Raise UsageError if tokens are to be moved (`least` is not 0) and those of `model` cannot be.

    It is tried in a small cache: the library rotates all keys, most of them by nothing, and these must keep
    their bits. Where a rotation also scales (YaRN) they do not.
    """
    why = None if not least else _why_not(model, n_threads)
    if why:
        problem = f"{model.name} cannot have it (architecture {model.header.architecture}): {why}"
        raise UsageError(problem, field="cache_reuse", value=least)


def _why_not(model: Model, n_threads: int) -> str | None:
    if not model.can_rewind or model.keeps_state:
        return "it keeps a state, or takes no tokens back"
    size = KVCacheSize(n_ctx=64, n_batch=64, n_sequences=2)
    with KVCache(model, size, n_threads=n_threads) as cache:
        if not cache.can_shift:
            cache_type = model.header.cache_type
            held = f", held in {cache_type}," if cache_type != "f16" else ""
            return f"the positions of what it has read{held} cannot be shifted"
        tokens = [*range(1, 9)]
        kept, moved = Session.within(cache), Session.within(cache)
        kept.eval(tokens)
        moved.eval(tokens[:2])
        before = kept.state()
        if not cache.move_in(moved.sequence, cache.part(kept.sequence, 1, 8), 1, 9, tokens[1:]):
            return "llama.cpp could not shift the positions of what it has read"
        if not np.array_equal(kept.state(), before):
            return "a shift of positions would change what it has read of other texts"
    return None
