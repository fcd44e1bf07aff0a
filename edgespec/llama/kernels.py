"""The verify kernels: edgespec's own plugin for ggml, and the checks before it is loaded.

    EDGESPEC_KERNELS=off, no plugin, another processor, self-test not passed, refused by ggml
      -> stock kernels, and `Kernels.reason` says why in one line
    else
      -> `ggml_backend_load`, once per process: models loaded from then on are packed for it

The plugin has one switch and one list of packed tensors per process, so `packing` lets only one model load
at a time.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend
from edgespec.llama.gguf import TensorInfo, row_bytes, type_name
from edgespec.llama.kernel_timing import (
    CMatrixShape,
    CPrefetch,
    MatrixShape,
    Prefetch,
    WeightStream,
    beyond_caches,
)
from edgespec.llama.packed_file import PackedTensor
from edgespec.llama.selftest import SelfTest, self_test
from edgespec.platform.machine import available_bytes

STOCK = "stock"
TILES = "amx-int8"  # the instruction set with tile registers
"""Name of llama.cpp's own kernels, where edgespec names the kernels in use."""

_RUNS, _RUN_S, _PAUSE_S = 5, 0.1, 0.15  # of measuring how fast memory is read: what disturbs one may be over
_PIECE = 16 << 20  # bytes of one reading: short, so that some are not disturbed by other programs


class _CPackedTensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("type", ctypes.c_char * 16),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
    )


class Plugin:
    """The plugin's C interface (csrc/kernels/edgespec_kernels.h)."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises EdgespecError if it is no such library."""
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
            self._isa = library.es_kernels_isa
            self._set_isa = library.es_kernels_set_isa
            self._set_prefetch = library.es_kernels_set_prefetch
            self._set_wide_from = library.es_kernels_set_wide_from
            self._tiles = library.es_kernels_tiles
            self._refusal = library.es_kernels_refusal
            self._enable = library.es_kernels_enable
            self._device, self._ask_for_weights = (
                library.es_kernels_device,
                library.es_kernels_ask_for_weights,
            )
            self._map = library.es_kernels_map
            self._want_logits = library.es_kernels_want_logits
            self._keep_hidden = library.es_kernels_keep_hidden
            self._n_hidden = library.es_kernels_n_hidden
            self._n_packed = library.es_kernels_n_packed
            self._packed = library.es_kernels_packed
        except (OSError, AttributeError) as error:
            raise EdgespecError(f"{error}; install edgespec again") from error
        self._isa.restype = self._refusal.restype = ctypes.c_char_p
        self._set_isa.argtypes = (ctypes.c_char_p,)
        self._set_prefetch.argtypes = (CPrefetch,)
        self._set_wide_from.argtypes = (ctypes.c_int64,)
        self._enable.argtypes, self._enable.restype = (ctypes.c_int,), None
        self._device.argtypes, self._device.restype = (ctypes.c_int,), ctypes.c_void_p
        self._ask_for_weights.argtypes, self._ask_for_weights.restype = (ctypes.c_int,), None
        self._map.argtypes, self._map.restype = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64), None
        self._want_logits.argtypes, self._want_logits.restype = (ctypes.c_int64,), None
        self._keep_hidden.argtypes = (ctypes.c_void_p,)
        self._n_hidden.restype = ctypes.c_int64
        self._n_packed.restype = ctypes.c_int64
        self._packed.argtypes = (ctypes.c_int64, ctypes.POINTER(_CPackedTensor))
        self._library = library

    @property
    def isa(self) -> str:
        """The instruction set in use; "" if the kernels support none of this processor's."""
        return _text(self._isa())

    def set_isa(self, name: str) -> bool:
        """Choose another instruction set before the first model; False: unknown, or not on this processor."""
        return bool(self._set_isa(name.encode()) == 0)

    def set_prefetch(self, prefetch: Prefetch) -> bool:
        """Choose how weights are prefetched, before the first model; False: invalid."""
        return bool(self._set_prefetch(prefetch.for_c()) == 0)

    def set_wide_from(self, tokens: int) -> bool:
        """Choose from how many tokens on tile registers are used, 0: never; False: invalid."""
        return bool(self._set_wide_from(tokens) == 0)

    @property
    def why_no_tiles(self) -> str:
        """Why AMX's tile registers are not used; "" if they are."""
        return why_no_tiles(int(self._tiles()), self.isa)

    def join_ggml(self) -> str:
        """Register the plugin as a ggml backend; return "" or why ggml refused it."""
        backend.clear_log()
        load = backend.foreign_function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)
        if load(os.fsencode(self.path)):
            return ""
        return _text(self._refusal()) or backend.failure_reason()

    def enable(self, on: bool) -> None:
        """Set whether models loaded from now on are packed."""
        self._enable(int(on))

    def device(self, n_threads: int) -> int:
        """Return ggml's pointer to the device, for a library that makes a backend of it on this thread."""
        return int(self._device(n_threads))

    def ask_for_weights(self, on: bool) -> None:
        """Set whether the device's memory is that of weights, which it packs, for what this thread asks."""
        self._ask_for_weights(int(on))

    @contextmanager
    def mapping(self, file: int, offset: int, size: int) -> Iterator[None]:
        """Inside the block, packed weights of `size` bytes are mapped from a file at `offset`."""
        self._map(file, offset, size)
        try:
            yield
        finally:
            self._map(-1, 0, 0)

    @contextmanager
    def last_logits(self, n: int) -> Iterator[None]:
        """Inside the block, passes on this thread compute the logits of only their last `n` tokens.

        The rows of other tokens, which the library would compute, are undefined.
        """
        self._want_logits(n)
        try:
            yield
        finally:
            self._want_logits(-1)

    def hidden_states(self) -> tuple[Callable[[Any], int], Callable[[], int]]:
        """Return the functions `es_kernels_keep_hidden` and `es_kernels_n_hidden`."""
        return self._keep_hidden, self._n_hidden

    def matrices(self) -> tuple[Callable[..., Any], Callable[..., int], Callable[[int], None]]:
        """Return the functions `es_kernels_matrix_new`, `_multiply` and `_free` (`EightBitMatrix`)."""
        library = self._library
        make, multiply = library.es_kernels_matrix_new, library.es_kernels_matrix_multiply
        free = library.es_kernels_matrix_free
        int64, pointer, size = ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t
        make.argtypes, make.restype = (ctypes.c_int, int64, int64, pointer, size), pointer
        multiply.argtypes = (pointer, int64, pointer, size, pointer, size, ctypes.c_int)
        free.argtypes, free.restype = (pointer,), None
        return make, multiply, free

    def n_packed(self) -> int:
        """Return the number of tensors packed since the process began."""
        return int(self._n_packed())

    def packed(self, start: int) -> tuple[PackedTensor, ...]:
        """Return the tensors packed since `n_packed` was `start`."""
        tensors = []
        for i in range(start, self.n_packed()):
            found = _CPackedTensor()
            if self._packed(i, ctypes.byref(found)) == 0:
                name, kind = _text(found.name), _text(found.type)
                place = found.offset, found.data or 0
                tensors.append(PackedTensor(name, kind, found.rows, found.columns, found.bytes, *place))
        return tuple(tensors)


class Kernels(msgspec.Struct, frozen=True):
    """The kernels this process uses, or why it uses none."""

    reason: str
    """Why the stock kernels are used, in one line; "" if edgespec's are."""
    plugin: Plugin | None = None
    """edgespec's kernels, if they are used."""
    self_test: SelfTest | None = None
    """The self-test's result, if one was needed."""
    declined: bool = False
    """Whether the user said no (EDGESPEC_KERNELS=off)."""

    @property
    def available(self) -> bool:
        """Whether models can be packed."""
        return self.plugin is not None

    @property
    def name(self) -> str:
        """The instruction set in use, or "stock"."""
        return self.plugin.isa if self.plugin else STOCK


_lock = threading.RLock()
_loaded: Kernels | None = None


def plugin_path() -> Path:
    """Return the path of the plugin, in the folder of the C core; it may not exist."""
    return Path(_core.__file__).with_name("edgespec_kernels.so")


def load(*, retest: bool = False) -> Kernels:
    """Load the kernels into this process, or find out why not; later calls return the same.

    EDGESPEC_KERNELS is auto or off, EDGESPEC_KERNELS_ISA chooses a lower instruction set, in small letters or
    capitals. Raises UsageError for a bad value. `retest` runs the self-test even if its result is stored.
    """
    global _loaded  # noqa: PLW0603 - the plugin is loaded once per process
    with _lock:
        if _loaded is None:
            _loaded = _load(retest)
        return _loaded


def word_of(switch: str) -> str:
    """Return the word that an environment variable holds, in lower case; "" for none."""
    return os.environ.get(switch, "").strip().lower()


def _load(retest: bool) -> Kernels:
    choice = word_of("EDGESPEC_KERNELS") or "auto"
    if choice not in ("auto", "off"):
        raise UsageError(f"EDGESPEC_KERNELS={choice}: must be auto or off")
    if choice == "off":
        return Kernels("EDGESPEC_KERNELS=off", declined=True)
    path = plugin_path()
    if not path.exists():
        return Kernels(f"edgespec's kernels are not installed (64-bit x86 and ARM Linux only): no {path}")
    try:
        plugin = _open(path, word_of("EDGESPEC_KERNELS_ISA"))
    except UsageError:
        raise
    except EdgespecError as error:
        return Kernels(str(error))
    if not plugin.isa:
        return Kernels("edgespec's kernels need a processor with AVX2")
    test = self_test(path, plugin.isa, retest=retest)
    if not test.passed:
        return Kernels(f"the self-test of edgespec's kernels {test.reason}", self_test=test)
    plugin.set_prefetch(test.choice.prefetch)  # refuses an invalid one: the default stays
    plugin.set_wide_from(test.choice.wide_from)
    if refusal := plugin.join_ggml():
        return Kernels(f"ggml and edgespec's kernels do not fit: {refusal}", self_test=test)
    return Kernels("", plugin, test)


def _open(path: Path, isa: str) -> Plugin:
    plugin = Plugin(path)
    if isa and not plugin.set_isa(isa):
        raise UsageError(
            f"EDGESPEC_KERNELS_ISA={isa}: not an instruction set of edgespec's kernels on this processor "
            "(amx-int8, avx512-bf16, avx512-vnni, avx-vnni, avx2; neon-i8mm, neon-dotprod, neon)"
        )
    return plugin


def load_untested(path: Path, isa: str) -> str:
    """Load the kernels without checks, for the self-test itself; return "" or why ggml refused them."""
    global _loaded  # noqa: PLW0603 - as in `load`
    plugin = _open(path, isa)
    refusal = plugin.join_ggml()
    _loaded = Kernels(refusal, None if refusal else plugin)
    return refusal


_NO_TILES = {
    -1: "this processor has none",
    **dict.fromkeys(
        (errno.EINVAL, errno.EOPNOTSUPP), "this Linux gives none to programs (5.16 and newer can)"
    ),
    **dict.fromkeys(
        (errno.EPERM, errno.EACCES, errno.ENOSYS), "a container or seccomp filter refuses arch_prctl"
    ),
    errno.ENOSPC: "a signal stack of this process is too small for them",
}


def why_no_tiles(answer: int, isa: str) -> str:
    """Return why `isa` uses no tile registers; "" if it does. `answer` is what es_kernels_tiles() returns."""
    if answer:
        return _NO_TILES.get(answer) or f"arch_prctl: {os.strerror(answer)}"
    return "" if isa == TILES else f"{isa} is used"


class WeightPacking:
    """The tensors packed while a model loads; none if the kernels are not in use."""

    def __init__(self, plugin: Plugin | None, on: bool) -> None:
        self._plugin = plugin
        self._start = plugin.n_packed() if plugin else 0
        self.on = on
        """Whether tensors that fit are packed."""

    def begun(self) -> bool:
        """Whether a tensor was packed."""
        return self._plugin is not None and self._plugin.n_packed() > self._start

    def mapping(self, file: int, offset: int, size: int) -> AbstractContextManager[None]:
        """Return a context in which packed weights of `size` bytes are mapped from a file at `offset`."""
        return self._plugin.mapping(file, offset, size) if self._plugin else nullcontext()

    def restart(self) -> None:
        """Forget the tensors: the model is loaded again."""
        self._start = self._plugin.n_packed() if self._plugin else 0

    def tensors(self) -> tuple[PackedTensor, ...]:
        """Return the packed tensors."""
        return self._plugin.packed(self._start) if self._plugin else ()


@contextmanager
def packing(wanted: bool) -> Iterator[WeightPacking]:
    """Load one model inside the block: packed if `wanted` and the kernels are available, else unpacked."""
    with _lock:
        loaded = load() if wanted else _loaded
        plugin = loaded.plugin if loaded else None
        if plugin:
            plugin.enable(wanted)
        yield WeightPacking(plugin, bool(plugin and wanted))


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def memory_bandwidth(loaded: Kernels, n_threads: int) -> float | None:
    """Return the bytes a second that `n_threads` threads read from memory, measured for a second.

    None if there is too little memory for measuring.
    """
    size = beyond_caches()
    if size > (available_bytes() or 0) / 4:
        return None
    if not loaded.plugin:
        parts = np.array_split(np.ones(size // 8), n_threads)
        with ThreadPoolExecutor(n_threads) as pool:
            return size / _fastest(lambda: _timed(lambda: list(pool.map(np.sum, parts))))
    prefetch = loaded.self_test.choice.prefetch if loaded.self_test else Prefetch()
    with WeightStream(loaded.plugin.path, loaded.plugin.isa, size) as stream:
        return _PIECE / _fastest(lambda: stream.read(_PIECE, prefetch, n_threads))


def _fastest(read: Callable[[], float]) -> float:
    """Return the fewest seconds that `read` takes in several short runs: other programs only add time."""
    times: list[float] = []
    for run in range(_RUNS):
        time.sleep(_PAUSE_S if run else 0.0)
        ends = time.perf_counter() + _RUN_S
        times.append(read())
        while time.perf_counter() < ends:
            times.append(read())
    return min(times)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


# ---- hidden states that the kernels leave ----
#
# The kernels run the whole graph of a pass, and copy the residual after the layers that are wanted: no pass
# more, and no part of a graph more (csrc/kernels/hidden.h). llama.cpp's own ways are in hidden_states.py.

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
    """Whether one of these layers has states only of tokens whose logits are computed."""
    return any(layer in (LAST_NORM_OUT, n_all_layers - 1) for layer in layers)


class KernelStates:
    """The hidden states of a context's passes, and the buffer that holds them."""

    def __init__(self, plugin: Plugin, layers: Sequence[int], n_all_layers: int, width: int) -> None:
        """Prepare for the states after `layers` (from 0, or LAST_NORM_OUT), each of `width` numbers.

        Raises ValueError for no layers, too many, and layers that the model of `n_all_layers` lacks.
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
        """Inside the block, one pass on this thread, over as many tokens as `wanted` has, keeps their states.

        With `needs_logits`, the wanted tokens must be those whose logits are asked for.
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


class KernelCoverage(msgspec.Struct, frozen=True):
    """The weights of a model that run on the kernels, in bytes of the file."""

    packed: int
    total: int
    """Bytes of all matrices that a pass multiplies with."""
    declined: tuple[str, ...]
    """Types that they do not take, by ggml's names, those with most bytes first."""

    @property
    def share(self) -> float:
        """Their share of all bytes, 0 to 1."""
        return self.packed / self.total if self.total else 0.0


def multiplied(tensors: Iterable[TensorInfo]) -> list[MatrixShape]:
    """Return the matrices that each pass of a model multiplies with."""
    matrices = [tensor for tensor in tensors if tensor.is_matrix]
    if any(tensor.name == "output.weight" for tensor in matrices):  # else the embeddings are that matrix too
        matrices = [tensor for tensor in matrices if tensor.name != "token_embd.weight"]
    return [MatrixShape(one.kind, one.rows * one.n_matrices, one.columns) for one in matrices]


def kernel_coverage(matrices: Iterable[MatrixShape]) -> KernelCoverage | None:
    """Return the kernels' share of these matrices; None without kernels for this processor."""
    packed_bytes = _asks_plugin()
    if packed_bytes is None:
        return None
    packed = total = 0
    by_type: dict[int, int] = {}
    for shape in matrices:
        n_bytes = row_bytes(shape.type, shape.columns) * shape.rows
        total += n_bytes
        if packed_bytes(shape) >= 0:
            packed += n_bytes
        else:
            by_type[shape.type] = by_type.get(shape.type, 0) + n_bytes
    declined = sorted(by_type, key=lambda kind: -by_type[kind])
    return KernelCoverage(packed, total, tuple(map(type_name, declined)))


def packing_growth(matrices: Iterable[MatrixShape]) -> int:
    """Return how many more bytes these take in memory, once packed, than in the file; 0 without the kernels.

    Types below two bits are packed as whole numbers, which take up to twice the bytes of their codes.
    """
    packed_bytes = _asks_plugin()
    if packed_bytes is None or word_of("EDGESPEC_KERNELS") == "off":
        return 0
    more = 0
    for shape in matrices:
        packed = packed_bytes(shape)
        if packed >= 0:
            more += packed - row_bytes(shape.type, shape.columns) * shape.rows
    return max(0, more)


@functools.cache
def _asks_plugin() -> Callable[[MatrixShape], int] | None:
    """Return the function that gives a matrix's packed bytes, -1 for none; the plugin need not join ggml."""
    try:
        library = ctypes.CDLL(str(plugin_path()))
        ask, isa = library.es_kernels_packed_bytes, library.es_kernels_isa
    except (OSError, AttributeError):
        return None
    ask.argtypes, ask.restype = (ctypes.POINTER(CMatrixShape),), ctypes.c_int64
    isa.restype = ctypes.c_char_p
    return (lambda shape: int(ask(CMatrixShape(*shape)))) if isa() else None
