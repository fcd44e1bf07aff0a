"""Description of a machine as a node, for the client that splits a model's layers.

    edgespec node --describe --json     a NodeDescription, through ssh: no port is opened for it

A node that runs keeps what it serves in a file, which it holds locked as long as it lives:

    CACHE/nodes/50052.json              a RunningNode
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import msgspec

from edgespec.llama import kernels, rpc
from edgespec.llama.kernel_timing import Prefetch, WeightStream, beyond_caches
from edgespec.llama.prefetch import LAYER
from edgespec.platform.announced import announced as announcement
from edgespec.platform.announced import living
from edgespec.platform.cpu import read_cpu
from edgespec.platform.kept import NODES
from edgespec.platform.memory import available_bytes, total_bytes

SIZES = (1, 2, 4, 8)
"""Tokens of the passes that are timed."""

LEAST_MEMORY = 64 << 20
"""Bytes for layers: none of a model worth the network fits in less."""

_LEAST_RESERVE = 128 << 20
_ROUND_S = 0.1


class NodeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a machine as a node."""

    kernels: str
    """The instruction set of edgespec's kernels, or "stock": llama.cpp's."""
    reason: str
    """Why llama.cpp's kernels are used; "" if edgespec's are."""
    n_threads: int
    layer_ms: dict[int, float] | None
    """Tokens of a pass -> milliseconds of the products of one layer of Qwen2.5-1.5B in Q4_K_M; None: unknown,
    as with llama.cpp's kernels."""


class RunningNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that waits for clients, or has one."""

    host: str
    port: int
    pid: int
    memory_bytes: int
    """Memory that clients may take."""
    speed: NodeSpeed


class NodeDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, and the nodes that run on it."""

    edgespec: str
    """Version; the next two are versions too."""
    llama_cpp_python: str
    ggml: str
    protocol: tuple[int, int, int]
    """Version of the RPC protocol: major, minor, patch."""
    processor: str
    n_processors: int
    memory_bytes: int | None
    """Memory that a node started now could give its clients; None: unknown."""
    total_bytes: int | None
    speed: NodeSpeed
    """Speed of the first running node, else measured now."""
    running: tuple[RunningNode, ...]
    network: str = ""
    """Identity of the network whose ports the nodes listen on (`network`); "": unknown."""


def describe(n_threads: int, loaded: kernels.Kernels) -> NodeDescription:
    """Describe this machine. Takes half a second more where no node runs, whose speed is known already."""
    running = running_nodes()
    cpu = read_cpu()
    return NodeDescription(
        edgespec=version("edgespec"),
        llama_cpp_python=version("llama-cpp-python"),
        ggml=rpc.ggml_version(),
        protocol=rpc.PROTOCOL,
        processor=cpu.model,
        n_processors=cpu.count,
        memory_bytes=memory_to_give(),
        total_bytes=total_bytes(),
        speed=running[0].speed if running else measure_speed(loaded, n_threads),
        running=running,
        network=network(),
    )


def network() -> str:
    """Return an identity of this machine and its network, the same under all of its names.

    Containers of one machine have networks of their own. "": the system does not say.
    """
    with suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {Path('/proc/self/ns/net').stat().st_ino}"
    return ""


def memory_to_give() -> int | None:
    """Return the bytes that clients may take: what is free but for a sixteenth, which work itself takes."""
    available = available_bytes()
    return None if available is None else max(0, available - max(_LEAST_RESERVE, available // 16))


def measure_speed(loaded: kernels.Kernels, n_threads: int) -> NodeSpeed:
    """Time the products of a layer, with weights that come from memory; takes half a second."""
    layer_ms = None
    available = available_bytes() or 0
    if loaded.plugin and (size := beyond_caches()) < available / 4:
        prefetch = loaded.self_test.choice.prefetch if loaded.self_test else Prefetch()
        with WeightStream(loaded.plugin.path, loaded.plugin.isa, size) as stream:
            layer_ms = {n: _layer_ms(stream, n, prefetch, n_threads) for n in SIZES}
    return NodeSpeed(kernels=loaded.name, reason=loaded.reason, n_threads=n_threads, layer_ms=layer_ms)


def _layer_ms(stream: WeightStream, n: int, prefetch: Prefetch, n_threads: int) -> float:
    times: list[float] = []
    began = perf_counter()
    while len(times) < 3 or perf_counter() - began < _ROUND_S:
        times.append(stream.products(LAYER, n, prefetch, n_threads))
    return round(1e3 * min(times), 4)  # the fastest: other programs only make it slower


# ---- nodes that run ----


def _folder() -> Path:
    return NODES.path()


def announced(node: RunningNode) -> AbstractContextManager[None]:
    """Let `running_nodes` find `node` inside the block. Where no file can be written, nobody finds it."""
    return announcement(_folder() / f"{node.port}.json", msgspec.json.encode(node))


def running_nodes() -> tuple[RunningNode, ...]:
    """Return the user's nodes that run on this machine, by their ports; delete the files of others."""
    found = []
    for content in living(_folder()):
        with suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(content, type=RunningNode))
    return tuple(sorted(found, key=lambda node: node.port))
