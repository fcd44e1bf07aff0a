"""The ways in which llama.cpp returns the hidden states of a pass.

    LAST_NORM   those after the last norm, by its public interface, which computes the logits of all tokens
    NEXTN       those from which a head in the model's own file continues, of all tokens, and as many
                logits as were asked for; only architectures with such a head have them
    NEXTN_HEAD  those of the head itself; of tokens without logits some architectures have none, so that the
                logits of all are asked for
    of_kernels  those after any layers, concatenated, from edgespec's kernels (kernels.py)
    of_layers   the inputs of some layers, concatenated, for a head in its own file

The functions of all but LAST_NORM are declared in no public header, but in `llama-ext.h`, and exported under
C++ names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edgespec.decoding.session import Features, Rows, SequenceTokens
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.kernels import LAST_NORM_OUT, KernelStates, needs_logits

if TYPE_CHECKING:
    from edgespec.llama.weights import Model

_CONTEXT = "P13llama_context"  # the type of its pointer, as C++ names have it


class HiddenStates(msgspec.Struct, frozen=True):
    """One way of getting hidden states out of a pass; the library's support is checked once."""

    ask: Callable[[Any, bool], object]
    """Takes a context, and whether the passes that follow keep hidden states."""
    addresses: Callable[[Any], Sequence[int | None]]
    """Takes a context; returns where those of its last pass are, rows in the order of the tokens: of each
    layer, whose rows stand side by side."""
    all_logits: bool = False
    """Whether a pass that keeps them computes the logits of all of its tokens."""
    kernel_layers: tuple[int, ...] = ()
    """Layers whose states edgespec's kernels leave instead: then the library is asked for nothing."""
    stays: bool = False
    """Whether they are asked for once and then always kept: each change costs the library as much as a new
    context, and keeping them costs hardly anything."""


def exported(name: str, arguments: str, restype: type | None, *argtypes: type) -> Callable[..., Any] | None:
    """Return a function of the library that is exported under a C++ name; None if it is missing.

    `arguments`: the types of its arguments as encoded in such names (Itanium C++ ABI, 5.1.5).
    """
    try:
        return backend.foreign_function(f"_Z{len(name)}{name}{arguments}", restype, *argtypes)
    except AttributeError:
        return None


def _nextn(*, all_logits: bool) -> HiddenStates | None:
    keep = exported(
        "llama_set_embeddings_nextn",
        f"{_CONTEXT}bb",
        None,
        ctypes.c_void_p,
        ctypes.c_bool,
        ctypes.c_bool,
    )
    address = exported("llama_get_embeddings_nextn", _CONTEXT, ctypes.c_void_p, ctypes.c_void_p)
    if keep is None or address is None:
        return None
    of_all = False  # not only of the tokens whose logits are wanted
    return HiddenStates(
        lambda context, wanted: keep(context, wanted, of_all),
        lambda context: (address(context),),
        all_logits=all_logits,
    )


def of_layers(layers: Sequence[int], n_layers: int) -> HiddenStates | None:
    """Return the way to get the inputs of these layers of a model; None if the library lacks it.

    Layer `n_layers`, the number of the model's layers, stands for the state from which a head in its file
    would continue, if that is the output of the last layer. The library aborts for an architecture that does
    not export them, or a missing layer.
    """
    keep = exported(
        "llama_set_embeddings_layer_inp",
        f"{_CONTEXT}jb",
        None,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_bool,
    )
    address = exported(
        "llama_get_embeddings_layer_inp",
        f"{_CONTEXT}j",
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    last = _nextn(all_logits=False)
    if keep is None or address is None or last is None:
        return None
    return HiddenStates(
        lambda context, wanted: [
            last.ask(context, wanted) if layer == n_layers else keep(context, layer, wanted)
            for layer in layers
        ],
        lambda context: tuple(
            last.addresses(context)[0] if layer == n_layers else address(context, layer) for layer in layers
        ),
        stays=True,
    )


def of_kernels(layers: Sequence[int], n_all_layers: int) -> HiddenStates:
    """Return the way for a model on edgespec's kernels; a layer may be LAST_NORM_OUT."""
    return HiddenStates(
        lambda _context, _wanted: None,
        lambda _context: (),
        all_logits=needs_logits(layers, n_all_layers),
        kernel_layers=tuple(layers),
    )


# Our own prototype: llama_cpp's returns a pointer object, whose address costs another conversion.
_last_norm = backend.foreign_function("llama_get_embeddings", ctypes.c_void_p, ctypes.c_void_p)

LAST_NORM = HiddenStates(llama.llama_set_embeddings, lambda context: (_last_norm(context),), all_logits=True)
NEXTN = _nextn(all_logits=False)
NEXTN_HEAD = _nextn(all_logits=True)
"""Both are None if the library does not export what they need."""


# ---- the outputs of a pass: rows of logits, and the hidden states that they were made from ----


# Our own prototype: llama_cpp's returns a pointer object, whose address costs another conversion.
_get_logits = backend.foreign_function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)


class Outputs:
    """The buffers of a context that hold what its last pass computed."""

    with_features = False
    """Whether the passes that follow keep hidden states."""

    def __init__(self, context: llama.llama_context_p, model: Model, n_logits_max: int, n_batch: int) -> None:
        """Read from `context`, a context of `model`.

        Its passes have at most `n_batch` tokens and return at most `n_logits_max` rows of logits.
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
        """Set whether later passes keep hidden states."""
        if with_features == self.with_features:
            return
        if not (self._asked and self._states.stays):
            self._states.ask(self._context, with_features)
            self._asked = True
        self.with_features = with_features

    @property
    def all_logits(self) -> bool:
        """Whether later passes compute the logits of all their tokens."""
        return self.with_features and self._states.all_logits

    def keeping(self, parts: Sequence[SequenceTokens]) -> AbstractContextManager[None]:
        """Return a context manager for a pass in which edgespec's kernels keep the wanted states."""
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

        None if they were not wanted, or edgespec's kernels do not keep them.
        """
        states = self._kernel_states
        rows = states.rows() if states else None
        return rows if rows is not None and len(rows) == n_logits else None

    def rows(self, n_logits: int) -> Rows:
        """Return the logits of the last pass, shape (n_logits, n_vocab)."""
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
    """Return the reader of hidden states kept by edgespec's kernels; None: other kernels run `model`."""
    plugin = model.plugin if model.remote is None else None
    ways = model.hidden_states
    layers = ways.kernel_layers or ((LAST_NORM_OUT,) if ways is LAST_NORM else ())
    if plugin is None or not layers:
        return None
    n_layers = model.header.n_layer - model.header.n_nextn
    return KernelStates(plugin, layers, n_layers, model.n_embd)


def _view(address: int, n_rows: int, width: int) -> Rows:
    """Return the rows at `address`, shape (n_rows, width), of which only written ones are read."""
    buffer = (ctypes.c_float * (n_rows * width)).from_address(address)
    return np.frombuffer(memoryview(buffer), np.float32).reshape(n_rows, width)
