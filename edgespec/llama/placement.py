"""Layers of a model on nodes: which go where, how the library is told, and what becomes of a lost node.

    this machine    embedding, layers 0 .. n_home - 1, last norm, output matrix
    nodes           the layers that follow, in order, each with its part of the cache

A row of logits is large (600 KB) and a hidden state small (6 KB): so the output matrix stays here. The
connections (csrc/rpc_transport) do not fail: one that is lost answers all with zeros, and
whoever calls the library asks afterwards whether one was lost (`Remote.call`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError, NodeLost, UsageError
from edgespec.llama import backend, rpc
from edgespec.llama.backend import llama
from edgespec.llama.gguf_header import GGUFHeader

SILENCE_S = 30.0
"""Seconds without a byte from a node after which it is lost, if EDGESPEC_NODE_WAIT says no other number."""
SILENCE_PER_TOKEN_S = 0.25
"""Seconds more for each token of a pass."""

MOST_ON_NODES = 128
"""Most tokens that a pass over nodes should have: a slow board takes seconds for them, and whoever wants to
end a pass, or to know whether a node hangs, waits for all of them."""

INTERRUPTED_EARLIER = "an earlier pass was interrupted, and given up with the connection"
"""Why a node is lost for those whom that interruption was not meant for."""

_NOT_OF_A_LAYER = rb"^(?!blk\.)"  # tensors of this name, which is a regular expression, stay here


class _Override(ctypes.Structure):
    """`struct llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


_cpu_buffer_type = backend.foreign_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)

_device_memory = backend.foreign_function(
    "ggml_backend_dev_memory",
    None,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)


@dataclass(frozen=True, slots=True)
class RemoteLayers:
    """Layers that one node holds."""

    name: str
    """The node's, as the user wrote it."""
    endpoint: str
    """The address that llama.cpp connects to: "127.0.0.1:40123"."""
    n_layers: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the layers of a model are."""

    n_home: int
    """The first layers, which are here; embedding, last norm and output matrix are here always."""
    nodes: tuple[RemoteLayers, ...]
    """The layers that follow, in order."""

    def __post_init__(self) -> None:
        if self.n_home < 0 or not self.nodes or any(node.n_layers < 1 for node in self.nodes):
            raise ValueError(f"{self} is no placement")

    @property
    def n_layers(self) -> int:
        """Layers of the whole model."""
        return self.n_home + sum(node.n_layers for node in self.nodes)

    def __str__(self) -> str:
        """Return the placement as the key of what is measured with it: "8 + board1 10 + board2 10"."""
        return " + ".join([str(self.n_home), *(f"{node.name} {node.n_layers}" for node in self.nodes)])


class Remote:
    """The nodes of a model that is loaded, or is about to be."""

    def __init__(self, placement: Placement, header: GGUFHeader, interrupt: Interrupt | None = None) -> None:
        """Connect to the nodes of `placement` for the model of `header`; `interrupt` ends the wait for them.

        Raises NodeLost where one cannot be reached, EdgespecError if there are too many, KeyboardInterrupt.
        """
        n_beside = header.n_layer - placement.n_layers  # blocks after the model's own, which are not loaded
        if n_beside not in (0, header.n_mtp):
            raise ValueError(f"a placement of {placement.n_layers} layers for a model of {header.n_layer}")
        most = int(llama.llama_max_devices())
        if len(placement.nodes) > most:
            raise EdgespecError(f"{len(placement.nodes)} nodes: llama.cpp knows at most {most}")
        self.placement = placement
        self.explain: Callable[[str], str] = lambda _name: ""
        """Takes the name of a node that was lost; says why, where more is known of the way there."""
        self.more_s = 0.0
        """Seconds to wait longer than a pass may take otherwise."""
        self._library = rpc.load()
        self._library.set_patience(interrupt, wait_s())
        try:
            for node in placement.nodes:
                self._library.forget(node.endpoint)
            devices = [self._device(node) for node in placement.nodes]
        finally:
            self._library.set_patience(None, wait_s())
        for node in placement.nodes:
            self._require(node)
        # The library reads these while it loads the model, and the split later too.
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        self._split = (ctypes.c_float * most)(*(node.n_layers for node in placement.nodes))
        # For the library the output is one more layer after the last one. The override keeps it here.
        self._split[len(devices) - 1] += n_beside + 1
        self._n_remote = header.n_layer - placement.n_home + 1
        self._overrides = (_Override * 2)(
            _Override(_NOT_OF_A_LAYER, _cpu_buffer_type()), _Override(None, None)
        )

    def _device(self, node: RemoteLayers) -> int:
        try:
            return self._library.connect(node.endpoint)[0]
        except EdgespecError:
            self._require(node)
            raise

    def place(self, params: llama.llama_model_params) -> None:
        """Say in `params` where the layers go; this object must live as long as the model."""
        # llama_cpp says other types than it declares to ctypes.
        params.devices = ctypes.addressof(self._devices)  # type: ignore[assignment]
        params.tensor_buft_overrides = ctypes.addressof(self._overrides)  # type: ignore[assignment]
        params.tensor_split = ctypes.cast(self._split, ctypes.POINTER(ctypes.c_float))  # type: ignore[assignment]
        params.n_gpu_layers = self._n_remote

    @contextmanager
    def call(
        self, n_tokens: int = 0, interrupt: Interrupt | None = None, *, waits: bool = False
    ) -> Iterator[None]:
        """Let the library use the nodes inside the block, and wait as long as a pass of `n_tokens` may take.

        `waits`: the block leaves work on the nodes of which it asks nothing back; wait until it is done.
        `interrupt` ends the wait sooner. Raises NodeLost before the block if a node was lost earlier; at its
        end if one was lost in it, so that what the library has computed means nothing, or KeyboardInterrupt
        if it was given up because of `interrupt`.
        """
        for node in self.placement.nodes:
            self._require(node, INTERRUPTED_EARLIER)
        self._library.set_patience(interrupt, wait_s() + self.more_s + SILENCE_PER_TOKEN_S * n_tokens)
        try:
            yield
            if waits:
                self._wait()
        finally:
            self._library.set_patience(None, wait_s())
        for node in self.placement.nodes:
            self._require(node)

    def _wait(self) -> None:
        """Return when the nodes have done all that was asked of them: they answer in order."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        for device in self._devices[:-1]:
            _device_memory(device, ctypes.byref(free), ctypes.byref(total))

    @property
    def is_lost(self) -> bool:
        """Whether a node was lost: the model must be loaded again."""
        return any(self._library.lost(node.endpoint) for node in self.placement.nodes)

    def _require(self, node: RemoteLayers, interrupted: str = "") -> None:
        """Raise if a node was lost; `interrupted`: why, if it was given up. "": that is an interruption."""
        reason = self._library.lost(node.endpoint)
        if reason == rpc.INTERRUPTED:
            if not interrupted:
                raise KeyboardInterrupt
            reason = interrupted
        elif reason:
            reason = self.explain(node.name) or reason
        if reason:
            raise NodeLost(node.name, reason)


def wait_s() -> float:
    """Return `SILENCE_S`, or what the user says. Raises UsageError for what cannot be."""
    wanted = os.environ.get("EDGESPEC_NODE_WAIT") or str(SILENCE_S)
    try:
        seconds = float(wanted)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise UsageError(f"EDGESPEC_NODE_WAIT={wanted}: must be seconds, 0.1 to 86400")
    return seconds
