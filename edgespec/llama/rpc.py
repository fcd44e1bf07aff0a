"""llama.cpp's RPC backend: it serves a device to other machines, and uses those that other machines serve.

    this machine                                    the node
    llama_model_params.devices = connect(...)  <->  serve(endpoint, device, ...)

The backend is compiled with llama-cpp-python and lies beside libllama (llama_cpp.cmake); its connections are
edgespec's own (csrc/rpc_transport). The protocol has no authentication, and who speaks it can run code on the
node: it belongs inside a tunnel.

A client's connection that breaks, hangs or answers nonsense is *lost*: all that is asked of it succeeds from
then on, with zeros, and `Rpc.lost` says so. A server ends the process where a client asks for what cannot be,
so it runs in a child process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from edgespec import _core
from edgespec._core import Interrupt
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import foreign_function

GGML_VERSION = "0.25.3"
"""The ggml whose RPC backend the connections are made for, and the only one they are used with."""

PROTOCOL = (7, 0, 0)
"""The protocol's version: major, minor, patch. Both sides need the same major one, and the node's minor one
must not be newer."""

DEFAULT_PORT = 50052
"""Where llama.cpp's own server listens too."""

INTERRUPTED = "interrupted while it worked"
"""Why a connection is lost that was given up because of an interruption."""

INTERRUPTED_S = 2.0
"""Seconds that what is under way on a node may still take after an interruption."""

_REASON_BYTES = 256
_CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU

_pointer = ctypes.c_void_p
_by_type = foreign_function("ggml_backend_dev_by_type", _pointer, ctypes.c_int)
_load = foreign_function("ggml_backend_load", _pointer, ctypes.c_char_p)
_find = foreign_function("ggml_backend_reg_get_proc_address", _pointer, _pointer, ctypes.c_char_p)
_device_count = foreign_function("ggml_backend_reg_dev_count", ctypes.c_size_t, _pointer)
_device = foreign_function("ggml_backend_reg_dev_get", _pointer, _pointer, ctypes.c_size_t)
_version = foreign_function("ggml_version", ctypes.c_char_p)


class Rpc:
    """The backend and its connections, loaded."""

    def __init__(self, own: ctypes.CDLL, registry: int) -> None:
        self._set_patience, self._lost, self._forget = own.es_rpc_patience, own.es_rpc_lost, own.es_rpc_forget
        self._set_patience.argtypes, self._set_patience.restype = (ctypes.c_int,) * 3, None
        self._lost.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
        self._forget.argtypes, self._forget.restype = (ctypes.c_char_p,), None
        self._keep_in = own.es_rpc_keep_in
        self._keep_in.argtypes, self._keep_in.restype = (ctypes.c_char_p, ctypes.c_uint64), None
        self._add_server = ctypes.CFUNCTYPE(_pointer, ctypes.c_char_p)(
            _find(registry, b"ggml_backend_rpc_add_server")
        )
        self._start_server = ctypes.CFUNCTYPE(
            None, *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, _pointer)
        )(_find(registry, b"ggml_backend_rpc_start_server"))

    def serve(
        self, endpoint: str, device: int, *, n_threads: int, kept: Path | None, least_free: int
    ) -> None:
        """Serve `device`, a `ggml_backend_dev_t`, at `endpoint` ("127.0.0.1:50052"), to one client at a time.

        `kept`: the folder that keeps weights by their hash, while `least_free` bytes stay free on its disk.
        Returns only where it cannot begin to listen; why is then on stderr. Ends the process if a client asks
        for what is impossible.
        """
        devices = (_pointer * 1)(device)
        folder = None if kept is None else os.fsencode(kept)
        self._keep_in(folder, least_free)
        self._start_server(endpoint.encode(), folder, n_threads, 1, ctypes.addressof(devices))

    def connect(self, endpoint: str) -> tuple[int, ...]:
        """Return the devices, each a `ggml_backend_dev_t`, that a server offers at `endpoint`.

        Raises EdgespecError if there is none; `lost` then says why.
        """
        registry = self._add_server(endpoint.encode())
        if not registry:
            raise EdgespecError(f"{endpoint}: {self.lost(endpoint) or 'the node offers no device'}")
        return tuple(_device(registry, i) for i in range(_device_count(registry)))

    def set_patience(self, interrupt: Interrupt | None, silence_s: float) -> None:
        """Let all connections wait `silence_s` for a byte, and `INTERRUPTED_S` after an interruption.

        The latter begins when a connection first sees the interruption, and ends at the next call of this.
        """
        fd = -1 if interrupt is None else interrupt.fd
        self._set_patience(fd, round(1e3 * silence_s), round(1e3 * INTERRUPTED_S))

    def forget(self, endpoint: str) -> None:
        """Let a new connection to `endpoint` be made after one was lost, and all that used it is closed."""
        self._forget(endpoint.encode())

    def lost(self, endpoint: str) -> str:
        """Return why a connection to `endpoint` was lost; "" if none was."""
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        return reason.value.decode() if self._lost(endpoint.encode(), reason, _REASON_BYTES) else ""


_loaded: Rpc | None = None


def backend_path() -> Path:
    """Return the path of the backend, in libllama's folder; it may not exist."""
    return backend.library_folder() / "ggml_rpc.so"


def _transport_path() -> Path:
    return Path(_core.__file__).with_name("rpc_transport.so")


def missing() -> str:
    """Return in one line what to do where backend or connections are missing; "" if both are there."""
    absent = [path for path in (backend_path(), _transport_path()) if not path.exists()]
    if not absent:
        return ""
    if sys.platform != "linux":
        return "llama.cpp's RPC backend, which nodes need, is built on Linux only"
    return (
        "llama.cpp's RPC backend, which nodes need, is missing: install llama-cpp-python as docs/nodes.md "
        f"says, or call `make` in edgespec's sources (no {absent[0]})"
    )


def require() -> None:
    """Raise EdgespecError, with what to do, where there is no backend."""
    if reason := missing():
        raise EdgespecError(reason)


def load() -> Rpc:
    """Load the backend, once per process. Raises EdgespecError if it is missing or does not fit."""
    global _loaded  # noqa: PLW0603 - loaded once per process
    if _loaded is None:
        require()
        if (version := ggml_version()) != GGML_VERSION:
            raise EdgespecError(
                f"edgespec's connections to nodes are made for ggml {GGML_VERSION}, and {version} is "
                "installed; install edgespec again, with the llama-cpp-python that it asks for"
            )
        # Global, so that the backend finds its connections there.
        own = ctypes.CDLL(str(_transport_path()), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        _loaded = Rpc(own, _registry(backend_path()))
    return _loaded


def _registry(path: Path) -> int:
    backend.clear_log()
    registry = _load(os.fsencode(path))
    if not registry:
        raise EdgespecError(f"{path} cannot be loaded: {backend.failure_reason()}")
    return int(registry)


def ggml_version() -> str:
    """Return the version of the ggml in use."""
    return str(_version().decode())


def cpu_device() -> int:
    """Return llama.cpp's own device of this machine's processors, a `ggml_backend_dev_t`."""
    return int(_by_type(_CPU_DEVICE))
