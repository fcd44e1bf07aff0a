"""Which models keep a state, and how large it is, by the header of a file.

An attention layer keeps keys and values of each token. A recurrent layer (a state space, a gated delta net, a
short convolution) keeps one state of the whole text instead, which every token changes: earlier tokens cannot
be cut off it. Hybrid models have layers of both kinds. rollback.py takes tokens back there.

The figures are those of llama.cpp (`llama_hparams::n_embd_r`, `n_embd_s`, `is_recr`; all states are F32).
"""

from __future__ import annotations

from collections.abc import Callable

RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
"""Architectures without attention."""

SNAPSHOTS = frozenset(
    {
        *("qwen35", "qwen35moe", "qwen4exp", "kimi-k3", "glm5-next", "nemotron_h", "nemotron_h_moe"),
        *("lfm2", "lfm2moe", "bailingmoe3"),
    }
)
"""Architectures whose passes can leave the state after each of their last tokens (`n_rs_seq`):
`llm_arch_supports_rs_rollback`, without deepseek4, whose cache is of a kind of its own."""

BOTH_IN_A_LAYER = frozenset({"falcon-h1"})
"""Architectures whose layers attend and keep a state as well."""

_EVERY_LAYER = RECURRENT | BOTH_IN_A_LAYER
_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
"""Architectures in which every n-th layer attends and the others keep a state, if the file says no more."""
_LAYERS_WITHOUT_HEADS = frozenset(
    {
        *("jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"),
        *("kimi-linear", "kimi-k3", "glm5-next", "bailingmoe3"),
    }
)
"""Architectures in which a layer without key/value heads keeps a state."""
_ONE_BLOCK_A_LAYER = frozenset({"nemotron_h", "nemotron_h_moe"})
"""Architectures of these in which a layer with a feed-forward has nothing else."""

Integers = Callable[[str], tuple[int, ...]]
"""Returns the whole numbers of a metadata field without the architecture's prefix; () if it is not there."""


def recurrent_layers(architecture: str, n_layer: int, integers: Integers) -> frozenset[int]:
    """Return which of a model's layers keep a state."""
    layers = range(n_layer)
    if architecture in _EVERY_LAYER:
        return frozenset(layers)
    if architecture in _INTERVALS:
        stated = integers("attention.recurrent_layers")
        if stated:
            return frozenset(i for i, one in enumerate(stated[:n_layer]) if one)
        interval = max(1, *integers("full_attention_interval") or (_INTERVALS[architecture],))
        n_trunk = n_layer - max(integers("nextn_predict_layers"), default=0)
        return frozenset(i for i in range(n_trunk) if (i + 1) % interval)
    if architecture in _LAYERS_WITHOUT_HEADS:
        heads = _of_each(integers("attention.head_count_kv"), n_layer)
        widths = _of_each(integers("feed_forward_length"), n_layer)
        alone = architecture in _ONE_BLOCK_A_LAYER
        return frozenset(i for i in layers if heads[i] == 0 and not (alone and widths[i]))
    return frozenset()


def _of_each(values: tuple[int, ...], n_layer: int) -> tuple[int, ...]:
    """Return a value for each layer; a file may state one for all."""
    if len(values) == 1:
        return values * n_layer
    return (*values, *[-1] * n_layer)[:n_layer]


def layer_state_bytes(n_embd: int, n_head: int, head_dim: int, integers: Integers) -> int:
    """Return the bytes that one recurrent layer keeps of one text."""

    def value(key: str, default: int = 0) -> int:
        return max(integers(key), default=default)

    if head := value("wkv.head_size"):
        return 4 * (value("token_shift_count", 2) * n_embd + n_embd * head)
    inner, states = value("ssm.inner_size"), value("ssm.state_size")
    taps = max(0, value("ssm.conv_kernel") - 1)
    if length := value("shortconv.l_cache"):
        return 4 * (n_embd * (length - 1) + inner * states)
    if head := value("kda.head_dim"):
        return 4 * (3 * (taps or 3) * n_head * head + head * head * n_head)
    if not inner:  # linear attention: a matrix for each head
        return 4 * head_dim * head_dim * n_head
    return 4 * (taps * (inner + 2 * value("ssm.group_count") * states) + inner * states)
