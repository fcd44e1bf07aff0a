"""Memory that each layer of a model takes, and how much of it a pass reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from edgespec.llama.gguf import row_bytes
from edgespec.llama.gguf_header import GGUFHeader, read_tensors
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
