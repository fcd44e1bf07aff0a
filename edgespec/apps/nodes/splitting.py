"""The split of a model's layers over machines: pure, from sizes, free memory and measured speed.

    this machine   embedding, layers 0 .. n_home - 1, last norm, output matrix
    node 1         the layers that follow            each with its part of the cache
    node 2         ..

The layers run one after another, so a pass takes the sum of what the machines take for theirs, and a round
trip for each node that has any:

    ms = sum over machines of (bytes of its layers x speed) + sum over used nodes of (round trip + transfer)

The counts with the least sum are found among all that fit into memory (dynamic programming over machines and
layers). So the fastest machines get as many layers as they hold, and a node that is not needed gets none,
unless its layers run there so much faster (`WORTH_IT`) that the round trip is worth it.

Example: 32 layers of 140 MB, 2 GB free here, of which output matrix and buffers take 0.55, and 4 GB on each
of two nodes that are as fast, 1 ms away. Here are 10 layers, 22 on the first node, none on the second. If the
second one were twice as fast, it would get the 28 that it holds, and 4 would be here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

from edgespec.apps.nodes.connection import ConnectedNode
from edgespec.apps.nodes.description import NodeSpeed
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf import row_bytes
from edgespec.llama.gguf_header import GGUFHeader, read_tensors
from edgespec.llama.kernels import STOCK
from edgespec.llama.prefetch import LAYER
from edgespec.llama.recurrent import recurrent_layers

TOKENS = 4
"""Tokens of the pass whose time is made short: nodes are for passes that check several."""

LAYER_BYTES = sum(row_bytes(shape.type, shape.columns) * shape.rows for shape in LAYER)
"""Bytes of the layer that `NodeSpeed.layer_ms` was measured with."""

_BATCH = 512  # tokens of a pass over a prompt, for the buffers
_ROWS = 64  # of logits, of one pass
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a model's layers, in bytes."""

    weights: tuple[int, ...]
    """Weights of each layer."""
    read: tuple[float, ...]
    """Weights that a pass of `TOKENS` tokens reads in each layer: not all experts."""
    cache: tuple[int, ...]
    """Keys and values of all tokens, and states."""
    outside: int
    """Tensors that belong to no layer."""
    buffers: int
    """Buffers of a pass, on each machine with layers."""
    logits: int
    """Rows of logits, which are on this machine."""

    @cached_property
    def _held(self) -> list[int]:
        layers = zip(self.weights, self.cache, strict=True)
        return list(accumulate((weights + cache for weights, cache in layers), initial=0))

    @cached_property
    def _reads(self) -> list[float]:
        return list(accumulate(self.read, initial=0.0))

    @property
    def n_layers(self) -> int:
        """Layers of the model, without those of an MTP head."""
        return len(self.weights)

    def home(self, n: int) -> int:
        """The bytes of the first `n` layers here, with all that belongs to none."""
        return self.outside + self.buffers + self.logits + self._held[n]

    def node(self, begin: int, end: int) -> int:
        """The bytes of the layers `begin` .. `end` - 1 on a node."""
        return self._held[end] - self._held[begin] + self.buffers if end > begin else 0

    def layers_read(self, begin: int, end: int) -> float:
        """The work of a pass in the layers, in layers of `LAYER_BYTES`."""
        return (self._reads[end] - self._reads[begin]) / LAYER_BYTES


def sizes_of(header: GGUFHeader, n_cells: int, *, own_kernels: bool, n_states: int) -> LayerSizes:
    """Return the sizes of the model's layers, with a cache of `n_cells` tokens and `n_states` states.

    `own_kernels`: the passes are edgespec's, whose attention keeps no scores.
    """
    n_layers = header.n_layer - header.n_mtp
    weights, read, outside = [0] * n_layers, [0.0] * n_layers, 0
    share = _experts_read(header)
    for tensor in read_tensors(header):
        match = _BLOCK.match(tensor.name)
        if match and int(match[1]) < n_layers:
            weights[int(match[1])] += tensor.bytes
            read[int(match[1])] += tensor.bytes * (share if tensor.n_matrices > 1 else 1.0)
        else:
            outside += tensor.bytes
    return LayerSizes(
        weights=tuple(weights),
        read=tuple(read),
        cache=_cache_bytes(header, n_layers, n_cells, n_states),
        outside=outside,
        buffers=_buffer_bytes(header, n_cells, own_kernels=own_kernels),
        logits=4 * _ROWS * header.n_vocab,
    )


def _experts_read(header: GGUFHeader) -> float:
    n_used, n = (
        max(header.gguf.integers(f"{header.architecture}.{key}"), default=0)
        for key in ("expert_used_count", "expert_count")
    )
    return min(1.0, TOKENS * n_used / n) if n and n_used else 1.0


def _cache_bytes(header: GGUFHeader, n_layers: int, n_cells: int, n_states: int) -> tuple[int, ...]:
    """The bytes that each layer keeps of the text: keys and values of the cells, or states."""
    all_heads = sum(header.n_head_kv)
    cache = [header.kv_bytes(n_cells) * heads // max(1, all_heads) for heads in header.n_head_kv]
    cache += [0] * (header.n_layer - len(cache))
    if header.state_bytes:
        recurrent = recurrent_layers(
            header.architecture,
            header.n_layer,
            lambda key: header.gguf.integers(f"{header.architecture}.{key}"),
        )
        for i in recurrent:
            cache[i] += n_states * header.state_bytes // len(recurrent)
    return tuple(cache[:n_layers])


def _buffer_bytes(header: GGUFHeader, n_cells: int, *, own_kernels: bool) -> int:
    """Return an allowance for what lies between the operations of a pass over a prompt, on each machine.

    The widest are those of the feed-forward layer, and the mask; without edgespec's kernels the scores of
    attention too.
    """
    tokens = min(_BATCH, n_cells)
    scores = 1 if own_kernels else header.n_head + 1
    return 4 * tokens * (3 * header.n_ff + 6 * header.n_embd + scores * n_cells)


# ---- the split ----

WORTH_IT = 1.1
"""Speed-up over this machine that a node needs to get layers which could be here: its weights come over the
network first, and speeds are measured within a few per cent."""

_SAME_MS = 1e-9
_UNKNOWN_MS = 10.0  # of that layer, where no machine's speed is known


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """This machine, for the model whose layers are shared out."""

    memory_bytes: int
    """Memory that the model may take here: weights, cache and buffers of its passes."""
    speed: NodeSpeed | None
    """Measured speed; None: unknown."""
    n_states: int = 1
    """States that a cache of recurrent layers keeps, snapshots included (footprint.target_rollback)."""


@dataclass(frozen=True, slots=True)
class LayerShare:
    """Layers that one machine gets, with the memory (bytes) and time (ms) they take there."""

    node: ConnectedNode | None
    """Node; None: this machine."""
    n_layers: int
    n_bytes: int
    """Memory for weights, cache and buffers; on this machine with embedding and output matrix."""
    ms: float
    """Expected time of its layers' products, in a pass of `TOKENS` tokens."""
    network_ms: float
    """Expected time of the network there and back, in the same pass."""


@dataclass(frozen=True)
class LayerSplit:
    """Numbers of layers on each machine."""

    home: LayerShare
    nodes: tuple[LayerShare, ...]
    """Nodes that get any, in the order of the layers; () if none is worth it."""
    unused: tuple[ConnectedNode, ...]
    alone_ms: float | None
    """Expected time of the products of a pass of `TOKENS` tokens here alone; None: the model does not fit."""

    @property
    def ms(self) -> float:
        """Expected time of a pass of `TOKENS` tokens, without the output matrix."""
        return sum(share.ms + share.network_ms for share in (self.home, *self.nodes))

    @property
    def message(self) -> str:
        """Return in a line what a user may not expect: nodes that are not used, or not needed; else ""."""
        if self.unused and not self.nodes:
            return (
                "all layers fit here, and no node makes a pass faster: none is used "
                f"({self.unused[0].name}=LAYERS puts layers there all the same)"
            )
        if self.unused:
            names = ", ".join(node.name for node in self.unused)
            return f"not used, as the layers fit without and no pass would be faster: {names}"
        return ""


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """Costs of a pass on each machine, this one first."""

    layer_ms: Sequence[float]
    """Time of the products of a layer of `LAYER_BYTES`."""
    network_ms: Sequence[float]
    """Time of the network there and back."""

    def ms(self, sizes: LayerSizes, machine: int, begin: int, end: int) -> float:
        """Return the milliseconds of the layers `begin` .. `end` - 1 on a machine; 0 for none."""
        if begin == end:
            return 0.0
        return self.network_ms[machine] + self.layer_ms[machine] * sizes.layers_read(begin, end)


def place(header: GGUFHeader, n_cells: int, home: LocalMachine, nodes: Sequence[ConnectedNode]) -> LayerSplit:
    """Return which machine gets which layers of the model, with a cache of `n_cells` tokens.

    Blocks of an MTP head count as this machine's. Raises EdgespecError if the model does not fit, UsageError,
    with the field "nodes", if the user wants layers on a node that do not fit there.
    """
    own_kernels = home.speed is not None and home.speed.kernels != STOCK
    sizes = sizes_of(header, n_cells, own_kernels=own_kernels, n_states=home.n_states)
    _check_wishes(sizes, nodes)
    speeds = _layer_ms([home.speed, *(node.speed for node in nodes)])
    costs = SplitCosts(speeds, [0.0, *(_network_ms(node, header.n_embd) for node in nodes)])
    judged = replace(costs, layer_ms=[speeds[0], *(WORTH_IT * ms for ms in speeds[1:])])
    wished = [None, *(node.address.n_layers for node in nodes)]
    memory = [home.memory_bytes, *(node.memory_bytes for node in nodes)]
    ends = best_ends(sizes, memory, judged, wished)
    if ends is None:
        raise EdgespecError(_too_large(header, sizes, home, nodes))
    n = sizes.n_layers
    alone = costs.ms(sizes, 0, 0, n) if sizes.home(n) <= home.memory_bytes else None
    return _split(sizes, nodes, costs, ends, alone)


def _split(
    sizes: LayerSizes,
    nodes: Sequence[ConnectedNode],
    costs: SplitCosts,
    ends: Sequence[int],
    alone: float | None,
) -> LayerSplit:
    home = LayerShare(None, ends[0], sizes.home(ends[0]), costs.ms(sizes, 0, 0, ends[0]), 0.0)
    used, unused = list[LayerShare](), list[ConnectedNode]()
    for i, (node, begin, end) in enumerate(zip(nodes, ends, ends[1:], strict=False), 1):
        if begin == end:
            unused.append(node)
            continue
        way = costs.network_ms[i]
        ms = costs.ms(sizes, i, begin, end) - way
        used.append(LayerShare(node, end - begin, sizes.node(begin, end), ms, way))
    return LayerSplit(home, tuple(used), tuple(unused), alone)


def best_ends(
    sizes: LayerSizes, memory: Sequence[int], costs: SplitCosts, wished: Sequence[int | None]
) -> list[int] | None:
    """Return where each machine's layers end, so that a pass takes the least time; None if they do not fit.

    This machine is the first of all. `memory`: bytes of each; `wished`: how many layers it has to have.
    """
    n = sizes.n_layers
    # best[k]: the least ms of the first k layers on the machines so far.
    best = [costs.ms(sizes, 0, 0, k) if sizes.home(k) <= memory[0] else inf for k in range(n + 1)]
    choices: list[list[int]] = []
    for i in range(1, len(memory)):
        now, begins = [inf] * (n + 1), [0] * (n + 1)
        for end in range(n + 1):
            wish = wished[i]
            first, last = (0, end) if wish is None else (end - wish, end - wish)
            for begin in range(last, max(-1, first - 1), -1):
                if sizes.node(begin, end) > memory[i]:
                    break  # more layers take more
                # Of equals the one with more layers on earlier machines, so that later ones are not needed.
                if (ms := best[begin] + costs.ms(sizes, i, begin, end)) < now[end] - _SAME_MS:
                    now[end], begins[end] = ms, begin
        choices.append(begins)
        best = now
    if best[n] == inf:
        return None
    ends = [n]
    for begins in reversed(choices):
        ends.insert(0, begins[ends[0]])
    return ends


def _layer_ms(speeds: Sequence[NodeSpeed | None]) -> list[float]:
    """Return the milliseconds of a layer of `LAYER_BYTES` on each machine; unknown: as on the slowest."""
    times = [speed.layer_ms and speed.layer_ms.get(TOKENS) if speed else None for speed in speeds]
    slowest = max((ms for ms in times if ms), default=_UNKNOWN_MS)
    return [ms or slowest for ms in times]


def _network_ms(node: ConnectedNode, n_embd: int) -> float:
    """Return the milliseconds that a pass is on the way: hidden states, there and back."""
    n_bytes = 2 * 4 * TOKENS * n_embd  # numbers of 4 bytes
    transfer_s = n_bytes / node.bytes_per_s if node.bytes_per_s else 0.0
    return 1e3 * (node.round_trip_s + transfer_s)


# ---- what does not fit ----


def _check_wishes(sizes: LayerSizes, nodes: Sequence[ConnectedNode]) -> None:
    """Raise UsageError if a user wants more layers on a node than there are, or than fit."""
    wished = sum(node.address.n_layers or 0 for node in nodes)
    for node in nodes:
        n = node.address.n_layers or 0
        if n and wished > sizes.n_layers:
            raise UsageError(
                f"the model has {sizes.n_layers} layers, and {wished} are given to nodes",
                field="nodes",
                value=f"{node.name}={n}",
            )
        least = min((sizes.node(i, i + n) for i in range(sizes.n_layers - n + 1)), default=0)
        if n and least > node.memory_bytes:
            raise UsageError(
                f"{n} layers take {_gigabytes(least)}, and {_gigabytes(node.memory_bytes)} are free there",
                field="nodes",
                value=f"{node.name}={n}",
            )


def _too_large(
    header: GGUFHeader, sizes: LayerSizes, home: LocalMachine, nodes: Sequence[ConnectedNode]
) -> str:
    offered = ", ".join(f"{node.name} {_gigabytes(node.memory_bytes)}" for node in nodes)
    needed = sizes.home(sizes.n_layers) + len(nodes) * sizes.buffers
    return (
        f"{header.path.name} does not fit: about {_gigabytes(needed)} are needed, "
        f"{_gigabytes(sizes.home(0))} of it here in any case; free are {_gigabytes(home.memory_bytes)} here, "
        f"{offered}; add a node, or choose a smaller quantization or context"
    )


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
