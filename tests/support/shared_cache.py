"""A llama_context whose one cache many sequences share: what the kernels' promise is tried on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.kv_cache import create_context
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing


class Entry(NamedTuple):
    """A token of a batch."""

    token: int
    position: int
    sequences: tuple[int, ...]


class SharedCache(Closing):
    """Decodes batches of tokens of any sequences. A context manager."""

    def __init__(self, model: Model, *, n_cells: int, n_sequences: int, n_threads: int, n_batch: int) -> None:
        """Open a context of `n_cells` cells; up to `n_batch` tokens are decoded at once."""
        self.n_batch = n_batch
        self._n_vocab = model.n_vocab
        self._context = create_context(
            model,
            n_ctx=n_cells,
            n_threads=n_threads,
            n_batch=n_batch,
            n_logits_max=n_batch,
            n_sequences=n_sequences,
        )
        self._memory = llama.llama_get_memory(self._context)

    def decode(self, entries: Iterable[Entry]) -> npt.NDArray[np.float32]:
        """Return the logits after each of the tokens, copied."""
        entries = list(entries)
        batch = llama.llama_batch_init(len(entries), 0, max(len(entry.sequences) for entry in entries))
        batch.n_tokens = len(entries)
        for i, (token, position, sequences) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, 1
            batch.n_seq_id[i] = len(sequences)
            for j, sequence in enumerate(sequences):
                batch.seq_id[i][j] = sequence
        try:
            with backend.interruptible():
                code = llama.llama_decode(self._context, batch)
        finally:
            llama.llama_batch_free(batch)
        assert code == 0, (code, backend.failure_reason())
        rows = np.ctypeslib.as_array(
            llama.llama_get_logits(self._context), shape=(len(entries), self._n_vocab)
        )
        return rows.copy()

    def share(self, source: int, target: int, n: int) -> None:
        """Let `target` begin with the first n tokens of `source`: with the same cells."""
        llama.llama_memory_seq_cp(self._memory, source, target, 0, n)

    def cut(self, sequence: int, n_keep: int = 0) -> None:
        """Remove a sequence's tokens from `n_keep` on."""
        assert llama.llama_memory_seq_rm(self._memory, sequence, n_keep, -1)

    def can_end(self, sequence: int, n_keep: int, window: int) -> bool:
        """Whether a sequence can go on after `n_keep` tokens: llama.cpp reuses cells before a window."""
        first = int(llama.llama_memory_seq_pos_min(self._memory, sequence))
        return first <= max(0, n_keep - window)

    def state(self, sequence: int) -> ctypes.Array[ctypes.c_uint8]:
        """Return a copy of a sequence's cells."""
        size = llama.llama_state_seq_get_size(self._context, sequence)
        state = (ctypes.c_uint8 * size)()
        assert llama.llama_state_seq_get_data(self._context, state, size, sequence) == size
        return state

    def restore(self, sequence: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        """Put such a copy into free cells."""
        n = llama.llama_state_seq_set_data(self._context, state, len(state), sequence)
        assert n == len(state)

    def close(self) -> None:
        """Free the context."""
        if self._context:
            llama.llama_free(self._context)
        self._context = None
