"""Hidden states that edgespec's kernels leave while they run a pass, of any layers of any architecture.

The kernels run the whole graph of a pass, and copy the residual after the layers that are wanted: no pass
more, and no part of a graph more (csrc/kernels/hidden.h). llama.cpp's own ways are in hidden_states.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from edgespec.llama.kernels import Plugin

LAST_NORM_OUT = -1
"""In place of a layer: what the logits are made from, after the last norm."""

MOST_LAYERS = 8
"""Layers whose states one pass leaves."""


class _CHidden(ctypes.Structure):
    """`struct es_hidden`."""

    _fields_ = (
        ("n_layers", ctypes.c_int32),
        ("layers", ctypes.c_int32 * MOST_LAYERS),
        ("n_all_layers", ctypes.c_int32),
        ("width", ctypes.c_int64),
        ("n_tokens", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("wanted", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


def needs_logits(layers: Sequence[int], n_all_layers: int) -> bool:
    """Say whether only tokens whose logits are computed have a state of one of these layers."""
    return any(layer in (LAST_NORM_OUT, n_all_layers - 1) for layer in layers)


class KernelStates:
    """The hidden states of a context's passes, and the buffer that holds them."""

    def __init__(self, plugin: Plugin, layers: Sequence[int], n_all_layers: int, width: int) -> None:
        """Prepare for the states after `layers` (from 0, or LAST_NORM_OUT), each of `width` numbers.

        Raises ValueError for layers that the model of `n_all_layers` lacks, for none and for too many.
        """
        if not 1 <= len(layers) <= MOST_LAYERS or not all(-1 <= layer < n_all_layers for layer in layers):
            raise ValueError(f"hidden states of layers {list(layers)}, of {n_all_layers}")
        self._keep, self._n_kept = plugin.hidden_states()
        self._width = width
        once = list(dict.fromkeys(layers))
        self._places = None if len(once) == len(layers) else [once.index(layer) for layer in layers]
        self._asked = _CHidden(n_layers=len(once), n_all_layers=n_all_layers, width=width)
        self._asked.layers[: len(once)] = once
        self._rows = np.empty((0, len(once) * width), np.float32)
        self._n_rows = 0

    @contextmanager
    def keeping(self, wanted: npt.NDArray[np.bool_]) -> Iterator[None]:
        """While entered, one pass over as many tokens as `wanted` has on this thread leaves their states.

        Where `needs_logits`, the wanted tokens must be those whose logits are asked for.
        """
        n = int(np.count_nonzero(wanted))
        if n > len(self._rows):
            self._rows = np.empty((n, self._rows.shape[1]), np.float32)
        asked = self._asked
        asked.n_tokens, asked.capacity = len(wanted), len(self._rows)
        asked.wanted, asked.out = wanted.ctypes.data, self._rows.ctypes.data
        self._n_rows = -1
        if self._keep(ctypes.byref(asked)):
            raise ValueError(f"hidden states of {n} of {len(wanted)} tokens")
        try:
            yield
            self._n_rows = int(self._n_kept())
        finally:
            self._keep(None)

    def rows(self) -> npt.NDArray[np.float32] | None:
        """Return the states of the last pass's wanted tokens, shape (n, n_layers * width).

        Valid until the next pass. None: the kernels have not run all of these layers.
        """
        if self._n_rows < 0:
            return None
        rows = self._rows[: self._n_rows]
        if self._places is None:
            return rows
        by_layer = rows.reshape(self._n_rows, -1, self._width)
        return by_layer[:, self._places].reshape(self._n_rows, -1)
