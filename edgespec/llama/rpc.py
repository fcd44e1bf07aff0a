"""Layers of a model on other machines, through llama.cpp's RPC backend.

    this machine                                        a node: `edgespec node`
    embedding, first layers, norm, output matrix  <->   last layers, with their part of the cache

The backend is compiled with llama-cpp-python and lies beside libllama (llama_cpp.cmake). Its protocol has no
authentication, and its clients can run code on the node, so it belongs inside a tunnel. Layers on nodes run
on llama.cpp's kernels. If a connection breaks, the backend ends this process; backend.py reports it.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend
from edgespec.llama.backend import foreign_function, llama
from edgespec.llama.gguf_header import GGUFHeader, read_tensors

DEFAULT_PORT = 50052
"""Where llama.cpp's own server listens too."""

MOST_TOKENS = 128
"""Most tokens that a pass over nodes should have: Ctrl-C waits for all of them."""

USUAL_CELLS = 4096
"""Tokens of cache that nodes get room for, if the user says nothing."""

_CONNECT_S = 10.0
_USED_SHARE = 0.9  # of a node's free memory: its buffers for passes need some, too
_NOT_OF_A_LAYER = rb"^(?!blk\.)"  # tensors of this name, which is a regular expression, stay here
_CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU

_pointer = ctypes.c_void_p
_by_type = foreign_function("ggml_backend_dev_by_type", _pointer, ctypes.c_int)
_load = foreign_function("ggml_backend_load", _pointer, ctypes.c_char_p)
_find = foreign_function("ggml_backend_reg_get_proc_address", _pointer, _pointer, ctypes.c_char_p)
_device_count = foreign_function("ggml_backend_reg_dev_count", ctypes.c_size_t, _pointer)
_device = foreign_function("ggml_backend_reg_dev_get", _pointer, _pointer, ctypes.c_size_t)
_cpu_buffer_type = foreign_function("ggml_backend_cpu_buffer_type", _pointer)
_memory = foreign_function(
    "ggml_backend_dev_memory",
    None,
    *(_pointer, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
)


def serve(host: str, port: int, *, n_threads: int, cache: Path | None) -> None:
    """Serve this machine's processors at `host` and `port`, to one client at a time, until the process ends.

    `cache`: the folder where large tensors are kept by their hash, for the next load of the same model.
    Returns only if it cannot listen. Raises EdgespecError if the backend is missing.
    """
    devices = (_pointer * 1)(_by_type(_CPU_DEVICE))
    start = ctypes.CFUNCTYPE(
        None, *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, _pointer)
    )(_find(_registry(), b"ggml_backend_rpc_start_server"))
    folder = None if cache is None else os.fsencode(cache)
    start(f"{host}:{port}".encode(), folder, n_threads, 1, ctypes.addressof(devices))


class _Override(ctypes.Structure):
    """`struct llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class RemoteLayers:
    """The last layers of a model, on nodes; llama.cpp distributes them by the nodes' free memory.

    It must live as long as the model: the library reads it.
    """

    def __init__(self, addresses: tuple[str, ...], header: GGUFHeader, n_cells: int) -> None:
        """Connect to the nodes, which get room for `n_cells` tokens of cache.

        As many layers go there as fit. Raises EdgespecError if a node cannot be reached, or none fits.
        """
        most = int(llama.llama_max_devices())
        if len(addresses) > most:
            raise UsageError(f"llama.cpp knows at most {most} nodes", field="rpc", value=len(addresses))
        devices = [device for address in addresses for device in _connect(address)]
        room = int(_USED_SHARE * sum(map(_free_bytes, devices)))
        weights = _layer_bytes(header)
        cache = (header.kv_bytes(n_cells) + header.state_bytes) // len(weights)
        self.n_layers = _n_fitting([size + cache for size in weights], room)
        """Layers on nodes."""
        if not self.n_layers:
            raise EdgespecError(f"--rpc {','.join(addresses)}: no layer fits into {room >> 20} MB there")
        self.home = _home_part(header, header.n_layer - self.n_layers, sum(weights[-self.n_layers :]))
        """The header as if the file held only what is here, for estimates of memory."""
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        self._overrides = (_Override * 2)(
            _Override(_NOT_OF_A_LAYER, _cpu_buffer_type()), _Override(None, None)
        )

    def place(self, params: llama.llama_model_params) -> None:
        """Write into `params` where the layers go."""
        # llama_cpp says other types than it declares to ctypes.
        params.devices = ctypes.addressof(self._devices)  # type: ignore[assignment]
        params.tensor_buft_overrides = ctypes.addressof(self._overrides)  # type: ignore[assignment]
        params.n_gpu_layers = self.n_layers + 1  # for the library the output is one more layer


def _registry() -> int:
    path = backend.library_folder() / "ggml_rpc.so"
    if not path.exists():
        raise EdgespecError(
            "llama.cpp's RPC backend is missing: install llama-cpp-python as docs/many-machines.md says, or "
            f"call `make` in edgespec's sources (no {path})"
        )
    backend.clear_log()
    registry = _load(os.fsencode(path))
    if not registry:
        raise EdgespecError(f"{path} cannot be loaded: {backend.failure_reason()}")
    return int(registry)


def _connect(address: str) -> list[int]:
    """Return the devices that a node offers, each a `ggml_backend_dev_t`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()  # else the library waits for minutes
    except OSError as error:
        reason = error.strerror or str(error)
        raise EdgespecError(f"--rpc {address}: {reason}; look whether `edgespec node` runs there") from None
    add = ctypes.CFUNCTYPE(_pointer, ctypes.c_char_p)(_find(_registry(), b"ggml_backend_rpc_add_server"))
    registry = add(address.encode())
    if not registry:
        reason = backend.failure_reason()
        raise EdgespecError(f"--rpc {address}: it does not answer as a node of this version does: {reason}")
    return [int(_device(registry, i)) for i in range(_device_count(registry))]


def _free_bytes(device: int) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value


def _layer_bytes(header: GGUFHeader) -> list[int]:
    """Return the bytes of each layer's weights."""
    n_layer = max(1, header.n_layer)
    sizes = [0] * n_layer
    for tensor in read_tensors(header):
        if (found := re.match(r"blk\.(\d+)\.", tensor.name)) and int(found[1]) < n_layer:
            sizes[int(found[1])] += tensor.bytes
    return sizes


def _n_fitting(sizes: list[int], room: int) -> int:
    """Return how many of the last layers fit."""
    n = 0
    for size in reversed(sizes):
        room -= size
        if room < 0:
            break
        n += 1
    return n


def _home_part(header: GGUFHeader, n_home: int, away: int) -> GGUFHeader:
    """Return `header` without the `away` bytes of weights in the layers from `n_home` on."""
    heads = header.n_head_kv
    return replace(
        header,
        file_bytes=max(0, header.file_bytes - away),
        n_head_kv=heads[:n_home] if len(heads) == header.n_layer else heads,
        state_bytes=header.state_bytes * n_home // max(1, header.n_layer),
    )
