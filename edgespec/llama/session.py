"""Evaluate a model along one sequence: a sequence of a cache that grows and can be cut back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from edgespec._core import Interrupt
from edgespec.decoding.session import Inputs, Rows, SequenceTokens, folded_spans, n_common
from edgespec.errors import EdgespecError
from edgespec.llama.backend import llama
from edgespec.llama.choices import AdapterSet
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.rollback import RollbackSize, State, bytes_of
from edgespec.platform.closing import Closing

if TYPE_CHECKING:
    from edgespec.llama.weights import Model

EmbeddingsFn = Callable[[Sequence[int]], Inputs | None]
"""Returns the rows that the first layer takes for n tokens, shape (n, n_embd); already scaled if the
architecture scales embeddings (Gemma). For a head: the target's hidden states; None if it takes tokens
alone."""


class Session(Closing):
    """A growing sequence of tokens and the model's cache of it. A context manager.

    The token ids are noted before a pass; `sequence` returns the first `n_past` of them. A failed or
    interrupted `eval` leaves the sequence as it was before the call; with a recurrent state it may also end
    with the first of the tokens to be read, or become empty.
    """

    _embeddings: EmbeddingsFn | None = None
    adapters: AdapterSet = ()
    """Those that its passes apply, from its first token on."""

    def __init__(  # noqa: PLR0913 - all that a cache of its own is made of
        self,
        model: Model,
        *,
        n_ctx: int,
        n_threads: int,
        n_batch: int = 512,
        n_logits_max: int = 64,
        embeddings: EmbeddingsFn | None = None,
        interrupt: Interrupt | None = None,
        rollback: RollbackSize | None = None,
    ) -> None:
        """Open a sequence of up to `n_ctx` tokens in its own cache.

        `n_batch`: most tokens computed in one pass. `n_logits_max`: most rows one `eval` returns; it sets the
        size of buffers. `embeddings`: returns the input rows of tokens, for a model whose own table lacks
        some. `interrupt` can end a pass: then `eval` raises KeyboardInterrupt. `rollback`: the room that a
        model with a recurrent state reserves for rewinding. Raises EdgespecError if the context cannot be
        created.
        """
        size = KVCacheSize(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_logits_max=n_logits_max,
            rollback=rollback or RollbackSize(),
        )
        takes_inputs = embeddings is not None
        cache = KVCache(model, size, n_threads=n_threads, takes_inputs=takes_inputs, interrupt=interrupt)
        self._begin(cache, owns_cache=True)
        self._embeddings = embeddings

    @classmethod
    def within(cls, cache: KVCache, n_ctx: int | None = None) -> Self:
        """Open a sequence of up to `n_ctx` tokens (None: all) in a cache that others share.

        The cache must have a sequence that is not in use.
        """
        session = cls.__new__(cls)
        session._begin(cache, n_ctx, owns_cache=False)
        return session

    def _begin(self, cache: KVCache, n_ctx: int | None = None, *, owns_cache: bool) -> None:
        self.cache, self.model = cache, cache.model
        self.n_ctx = min(n_ctx or cache.n_ctx, cache.n_ctx)
        """Most tokens of the sequence."""
        self._owns_cache = owns_cache
        self._written = array("i")
        # How many of their first tokens it and another have in the same cells, at most: `n_shared` says more.
        self._shared: dict[Session, int] = {}
        self.sequence = cache.open(self)
        """The sequence's number in the cache."""

    @property
    def n_past(self) -> int:
        """Tokens in the sequence."""
        return self.cache.rollback.n_past(self.sequence)

    @property
    def n_held(self) -> int:
        """Tokens of the sequence in the cache: fewer than `n_past` after `drop_first`."""
        return self.n_past - self.cache.rollback.n_dropped(self.sequence)

    def drop_first(self, n_tokens: int) -> bool:
        """Remove the first `n_tokens` tokens, but not all, from the cache.

        Later tokens attend only to the others, which keep their positions; `n_past` is unchanged. A `rewind`
        to `n_tokens` or fewer empties the sequence. Returns False, and does nothing, if the model has a
        recurrent state.
        """
        if not 0 <= n_tokens < self.n_past:
            raise ValueError(f"cannot drop {n_tokens} of {self.n_past} tokens")
        self._unshare(0)
        return self.cache.rollback.drop_first(self.sequence, n_tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens in the sequence."""
        return self.written.tolist()

    @property
    def written(self) -> array[int]:
        """The tokens as C ints, a hundred times as fast as `tokens`."""
        return self._written[: self.n_past]

    def n_same(self, tokens: array[int]) -> int:
        """Return the length of the common prefix of `tokens` and the sequence, compared in place."""
        return min(n_common(self._written, tokens), self.n_past)

    def note(self, n_past: int, tokens: Sequence[int]) -> None:
        """Note the tokens after the first `n_past`, replacing removed ones."""
        self._unshare(n_past)
        del self._written[n_past:]
        self._written.extend(tokens)

    def _unshare(self, n_tokens: int) -> None:
        """Note that tokens after the first `n_tokens` share no cells."""
        for other, both in [*self._shared.items()]:
            self._shared[other] = other._shared[self] = min(n_tokens, both)
            if not n_tokens:
                del self._shared[other], other._shared[self]

    def n_shared(self, other: Session) -> int:
        """Return how many of the first tokens share cells with `other`."""
        return min(self._shared.get(other, 0), self.n_past, other.n_past)

    def eval(self, tokens: Sequence[int], *, n_logits: int = 1, parents: Sequence[int] | None = None) -> Rows:
        """Append `tokens` to the sequence; return the logits after each of the last `n_logits`.

        With `parents` the last len(parents) tokens are a tree in depth-first pre-order: node i follows node
        parents[i]; -1 is the token before the tree, which must be in `tokens`. n_logits must then be
        len(parents) + 1: row 0 follows that token, row i + 1 follows node i. Of the tree only its *trunk*
        stays in the sequence: the first nodes with parents[i] == i - 1. With edgespec's kernels a node's row
        is bit for bit that of the same tokens in a chain (a sliding window of attention must be longer than
        the tree is deep); with llama.cpp's it may differ in the last bits, as between two batch sizes.

        The rows, shape (n_logits, n_vocab), are the library's own memory: valid until the next `eval` of a
        session of this cache, or `close`. More than `n_batch` tokens take several passes. Raises
        EdgespecError if the context is full (each node needs a cell while it is computed), the model cannot
        evaluate branches or the library fails, KeyboardInterrupt if the abort callback stops it.
        """
        inputs = self._embeddings(tokens) if self._embeddings else None
        return self.cache.forward([SequenceTokens(self.sequence, tokens, n_logits, parents, inputs)])[0].rows

    def begin_as(self, other: Session, n_tokens: int) -> None:
        """Begin the empty sequence with the first `n_tokens` of `other`, or fewer, sharing their cells.

        They are fewer if the model has recurrent states and none after `n_tokens` tokens.
        """
        n = self.cache.rollback.share(other.sequence, self.sequence, n_tokens)
        self.note(0, other._written[:n])
        for one, both in [*other._shared.items(), (other, n)]:
            self._shared[one] = one._shared[self] = min(n, both)

    def n_reachable(self, n_keep: int) -> int:
        """Return how many tokens `rewind(n_keep)` would leave."""
        return self.cache.rollback.n_reachable(self.sequence, n_keep)

    def rewind(self, n_keep: int) -> int:
        """Cut the sequence back to its first `n_keep` tokens, as if the others had never been read.

        Returns how many are left: fewer if the model has recurrent states and none after `n_keep` tokens;
        the others must then be read again. Raises EdgespecError if the model cannot rewind
        (`Model.can_rewind`).
        """
        n_past = self.n_past
        if not 0 <= n_keep <= n_past:
            raise ValueError(f"cannot keep {n_keep} of {n_past} tokens")
        if n_keep == n_past:
            return n_keep
        if n_keep == 0:
            self.clear()
            return 0
        if not self.model.can_rewind:
            raise EdgespecError(
                f"{self.model.name} cannot take tokens back (architecture {self.model.header.architecture})"
            )
        return self.cache.rollback.cut(self.sequence, n_keep)

    def checkpoint(self) -> None:
        """Checkpoint the present state, so that `rewind` can return to it, whatever follows."""
        self.cache.rollback.checkpoint(self.sequence)

    def checkpoint_at(self, *n_tokens: int) -> None:
        """Checkpoint at these lengths, or shortly before."""
        self.cache.rollback.checkpoint_at(self.sequence, n_tokens)

    def rest(self) -> None:
        """Free what only a sequence under way needs; this one ended and is kept."""
        self.cache.rollback.rest(self.sequence)

    def clear(self) -> None:
        """Empty the sequence."""
        if self._owns_cache:
            self.cache.clear()
        else:
            self.cache.rollback.cut(self.sequence, 0)

    @property
    def state_bytes(self) -> int:
        """Size in bytes of what `state` would return now."""
        return int(llama.llama_state_seq_get_size(self.cache.context, self.sequence))

    def state(self) -> State:
        """Return a copy of the sequence's cache, for `restore`."""
        size = self.state_bytes
        state: State = np.empty(size, np.uint8)
        n = llama.llama_state_seq_get_data(self.cache.context, bytes_of(state), size, self.sequence)
        if n != size:
            raise EdgespecError(f"{self.model.path}: llama.cpp copied {n} of {size} bytes of the cache")
        return state

    def copies(self) -> dict[int, State]:
        """The checkpoints by their number of tokens; only for a model with a recurrent state."""
        return self.cache.rollback.copies(self.sequence)

    def restore(
        self,
        state: State,
        timeline: Sequence[int],
        copies: Mapping[int, State] | None = None,
    ) -> None:
        """Set the sequence to `sequence` and its cache to `state`, copied from a session of this model.

        That session may have had another context size; `copies` are its own. Raises
        EdgespecError, and leaves the sequence empty, if the cache does not fit.
        """
        self.clear()
        self.note(0, timeline)
        context, size = self.cache.context, state.nbytes
        n = llama.llama_state_seq_set_data(context, bytes_of(state), size, self.sequence)
        self.cache.rollback.fold(self.sequence, folded_spans(self._written))
        if n != size or self.n_past != len(timeline):
            self.clear()
            raise EdgespecError(
                f"{self.model.path}: llama.cpp could not restore a cache of {len(timeline)} tokens"
            )
        self.cache.rollback.adopt(self.sequence, copies or {})

    def close(self) -> None:
        """End the sequence; a second call does nothing. Rows become invalid if the cache is its own."""
        if self.cache.end(self):
            self._unshare(0)
            if self._owns_cache:
                self.cache.close()


def n_cells(sessions: Iterable[Session]) -> int:
    """Return how many cells sessions of one cache have; shared ones count once."""
    lengths: dict[Session, int] = {}
    found = 0
    for session in sessions:
        n_held = session.n_held
        most = max((min(session._shared.get(one, 0), n) for one, n in lengths.items()), default=0)
        lengths[session] = n_held
        found += max(0, n_held - most)
    return found
