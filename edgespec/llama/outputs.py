"""The outputs of a pass of llama.cpp: rows of logits, and the hidden states that they were made from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import numpy as np

from edgespec.decoding.session import Features, Rows, SequenceTokens
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.hidden_states import LAST_NORM
from edgespec.llama.kernels import LAST_NORM_OUT, KernelStates
from edgespec.llama.weights import Model

# Our own prototype: llama_cpp's returns a pointer object, whose address costs another conversion.
_get_logits = backend.foreign_function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)


class Outputs:
    """The buffers of a context that hold what its last pass computed."""

    with_features = False
    """Whether the passes that follow keep hidden states."""

    def __init__(self, context: llama.llama_context_p, model: Model, n_logits_max: int, n_batch: int) -> None:
        """Read from `context`, a context of `model`.

        Its passes have at most `n_batch` tokens and give at most `n_logits_max` rows of logits.
        """
        self._context, self._model = context, model
        self._n_logits_max, self._n_batch = n_logits_max, n_batch
        self._states = model.hidden_states
        self._rows_address = 0
        self._rows: Rows = np.empty((0, model.n_vocab), np.float32)
        self._asked = False
        self._layer_addresses: Sequence[int | None] = ()
        self._layers: list[Features] = []
        self._kernel_states = _kernel_states(model)

    def ask(self, *, with_features: bool) -> None:
        """Say for the passes that follow whether hidden states are kept."""
        if with_features == self.with_features:
            return
        if not (self._asked and self._states.stays):
            self._states.ask(self._context, with_features)
            self._asked = True
        self.with_features = with_features

    @property
    def all_logits(self) -> bool:
        """Whether the passes that follow compute the logits of all of their tokens."""
        return self.with_features and self._states.all_logits

    def keeping(self, parts: Sequence[SequenceTokens]) -> AbstractContextManager[None]:
        """The context manager of a pass over these parts, so that edgespec's kernels leave what is wanted."""
        states = self._kernel_states
        if states is None:
            return nullcontext()
        if self.with_features and self._states.kernel_layers:
            return states.keeping(np.ones(sum(len(part.tokens) for part in parts), np.bool_))
        if self.with_features or not any(part.with_last_states for part in parts):
            return nullcontext()
        flags = [np.arange(len(part.tokens)) >= len(part.tokens) - part.n_logits for part in parts]
        return states.keeping(np.concatenate(flags))

    def last_states(self, n_logits: int) -> Features | None:
        """Return the hidden states of the last pass's `n_logits` tokens with logits.

        None where they were not wanted, or edgespec's kernels do not leave them.
        """
        states = self._kernel_states
        rows = states.rows() if states else None
        return rows if rows is not None and len(rows) == n_logits else None

    def rows(self, n_logits: int) -> Rows:
        """Return the logits of the last pass, which computed `n_logits` rows."""
        if n_logits == 0:
            return self._rows[:0]
        address = _get_logits(self._context)
        if address != self._rows_address:  # the buffer moves only when it grows
            self._rows = _view(address, self._n_logits_max, self._model.n_vocab)
            self._rows_address = address
        return self._rows[:n_logits]

    def features(self, lengths: Sequence[int]) -> list[Features]:
        """Return the hidden states of the last pass, cut into sections of these lengths.

        Raises EdgespecError if the model has none to give.
        """
        ends = list(accumulate(lengths))
        if self._states.kernel_layers:
            rows = self._kernel_states.rows() if self._kernel_states else None
            if rows is None or len(rows) != ends[-1]:
                raise EdgespecError(
                    f"{self._model.path}: edgespec's kernels do not run all of its layers here"
                )
            return [rows[end - n : end] for n, end in zip(lengths, ends, strict=True)]
        addresses = self._states.addresses(self._context)
        if addresses != self._layer_addresses:
            if not all(addresses):
                raise EdgespecError(f"{self._model.path}: llama.cpp gives no hidden states of this model")
            n_rows = self._n_logits_max if self._states.all_logits else self._n_batch
            self._layers = [_view(address or 0, n_rows, self._model.n_embd) for address in addresses]
            self._layer_addresses = addresses
        states = self._layers[0]
        if len(self._layers) > 1:
            states = np.concatenate([layer[: sum(lengths)] for layer in self._layers], axis=1)
        return [states[end - n : end] for n, end in zip(lengths, ends, strict=True)]


def _kernel_states(model: Model) -> KernelStates | None:
    """The reader of the hidden states that edgespec's kernels leave; None: other kernels run `model`."""
    plugin = model.plugin if model.remote is None else None
    ways = model.hidden_states
    layers = ways.kernel_layers or ((LAST_NORM_OUT,) if ways is LAST_NORM else ())
    if plugin is None or not layers:
        return None
    n_layers = model.header.n_layer - model.header.n_mtp
    return KernelStates(plugin, layers, n_layers, model.n_embd)


def _view(address: int, n_rows: int, width: int) -> Rows:
    """Return rows at `address`. They are as many as a pass can have; only those it had are ever read."""
    buffer = (ctypes.c_float * (n_rows * width)).from_address(address)
    return np.frombuffer(memoryview(buffer), np.float32).reshape(n_rows, width)
