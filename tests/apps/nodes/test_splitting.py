"""Sharing layers out: against all ways there are, and what a user is told."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.apps.nodes.connection import ConnectedNode
from edgespec.apps.nodes.description import NodeSpeed
from edgespec.apps.nodes.splitting import (
    LAYER_BYTES,
    LayerSizes,
    LocalMachine,
    SplitCosts,
    best_ends,
    place,
    sizes_of,
)
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.node_addresses import read_addresses
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny

N_CELLS = 512


def speed(ms, kernels="avx2"):
    return NodeSpeed(kernels=kernels, reason="", n_threads=1, layer_ms=ms and {1: ms / 2, 4: ms, 8: 2 * ms})


def node(text, memory, ms=1.0, round_trip_ms=1.0):
    (address,) = read_addresses(text, unsafe=False)
    return ConnectedNode(address.name, address, "127.0.0.1:1", "", speed(ms), memory, round_trip_ms / 1e3)


# ---- against all ways ----

numbers = st.integers(0, 40)
lists = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@st.composite
def cases(draw):
    weights = tuple(draw(lists))
    n, n_nodes = len(weights), draw(st.integers(1, 3))
    cache = tuple(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    read = tuple(float(LAYER_BYTES * draw(st.integers(1, 9))) for _ in weights)
    sizes = LayerSizes(weights, read, cache, *(draw(st.integers(0, 5)) for _ in range(3)))
    memory = [draw(numbers) for _ in range(1 + n_nodes)]
    costs = SplitCosts(
        [float(draw(st.integers(1, 4))) for _ in memory],
        [0.0, *(float(draw(st.integers(0, 20))) for _ in range(n_nodes))],
    )
    wished = [None, *(draw(st.none() | st.integers(1, 3)) for _ in range(n_nodes))]
    return sizes, memory, costs, wished


def every_way(sizes, memory, costs, wished):
    """The least time of all ways that fit, by trying them; None if there is none."""
    n, found = sizes.n_layers, []
    for cuts in itertools.combinations_with_replacement(range(n + 1), len(memory) - 1):
        ends = [*cuts, n]
        pieces = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        held = [sum(sizes.weights[i] + sizes.cache[i] for i in piece) for piece in pieces]
        held[0] += sizes.outside + sizes.logits + sizes.buffers
        held[1:] = [
            bytes_ + sizes.buffers if piece else 0 for bytes_, piece in zip(held[1:], pieces[1:], strict=True)
        ]
        if any(has > may for has, may in zip(held, memory, strict=True)):
            continue
        if any(wish not in (None, len(piece)) for wish, piece in zip(wished, pieces, strict=True)):
            continue
        ms = 0.0
        for k, piece in enumerate(pieces):
            if piece:
                layers = sum(sizes.read[i] for i in piece) / LAYER_BYTES
                ms += costs.layer_ms[k] * layers + (costs.network_ms[k] if k else 0.0)
        found.append(ms)
    return min(found, default=None)


def time_of(ends, sizes, costs):
    pieces = zip([0, *ends], ends, strict=False)
    return sum(costs.ms(sizes, i, begin, end) for i, (begin, end) in enumerate(pieces))


@given(cases())
def test_no_other_way_that_fits_is_faster(case):
    sizes, memory, costs, wished = case
    least = every_way(*case)
    ends = best_ends(sizes, memory, costs, wished)
    assert (ends is None) == (least is None)
    if ends is not None:
        assert time_of(ends, sizes, costs) == pytest.approx(least)
        # It is among the ways that were tried: it fits, and has the layers that were wished.
        begins = [0, *ends]
        assert ends == sorted(ends)
        assert sizes.home(ends[0]) <= memory[0]
        for i in range(1, len(memory)):
            assert sizes.node(begins[i], ends[i]) <= memory[i]
            assert wished[i] in (None, ends[i] - begins[i])


@pytest.mark.parametrize(("second_ms", "ends"), [(1.0, [10, 32, 32]), (0.5, [4, 4, 32])])
def test_the_documented_example(second_ms, ends):
    weights = (140_000_000,) * 32
    sizes = LayerSizes(weights, tuple(map(float, weights)), (0,) * 32, 500_000_000, 50_000_000, 0)
    costs = SplitCosts([1.0, 1.0, second_ms], [0.0, 1.0, 1.0])
    assert best_ends(sizes, [2 * 10**9, 4 * 10**9, 4 * 10**9], costs, [None] * 3) == ends


# ---- models ----


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "eight.gguf"
    return check_model_file(write_tiny_gguf(path, n_layer=8, n_embd=256, n_ff=512))


@pytest.fixture(scope="module")
def sizes(header):
    return sizes_of(header, N_CELLS, own_kernels=True, n_states=1)


def counts(split):
    return split.home.n_layers, *((share.node.name, share.n_layers) for share in split.nodes)


def test_weights_and_cache_are_all_counted_once(header, sizes):
    tensors = sum(tensor.bytes for tensor in header.gguf.tensors)
    assert sum(sizes.weights) + sizes.outside == tensors
    assert sum(sizes.cache) == header.kv_bytes(N_CELLS)
    assert len(set(sizes.weights)) == 1


@pytest.mark.parametrize("name", ["qwen3moe", "qwen35", "rwkv7", "mamba2"])
def test_experts_and_states_are_counted(tmp_path, name):
    header = check_model_file(make_tiny(name, tmp_path / "tiny.gguf"))
    sizes = sizes_of(header, N_CELLS, own_kernels=True, n_states=3)
    tensors = sum(tensor.bytes for tensor in header.gguf.tensors)
    assert sum(sizes.weights) + sizes.outside == tensors
    states = 3 * header.state_bytes
    assert header.kv_bytes(N_CELLS) + states - 3 * header.n_layer <= sum(sizes.cache)
    assert sum(sizes.cache) <= header.kv_bytes(N_CELLS) + states
    has_experts = any(tensor.n_matrices > 1 for tensor in header.gguf.tensors)
    assert all(read <= weights for read, weights in zip(sizes.read, sizes.weights, strict=True))
    assert has_experts or sizes.read == sizes.weights


def test_what_does_not_fit_here_goes_to_the_node(header, sizes):
    split = place(header, N_CELLS, LocalMachine(sizes.home(3), speed(1.0)), [node("a", 1 << 30)])
    assert counts(split) == (3, ("a", 5))
    assert (split.alone_ms, split.message) == (None, "")
    assert split.home.n_bytes == sizes.home(3)
    assert split.nodes[0].n_bytes == sizes.node(3, 8)
    assert split.nodes[0].network_ms == pytest.approx(1.0)


def test_the_fastest_node_gets_what_it_holds(header, sizes):
    nodes = [node("slow", 1 << 30, ms=1e4), node("fast", sizes.node(0, 2), ms=1e2)]
    split = place(header, N_CELLS, LocalMachine(sizes.home(3), speed(1e3)), nodes)
    assert counts(split) == (3, ("slow", 3), ("fast", 2))


def test_a_node_that_is_not_needed_is_left_out(header, sizes):
    nodes = [node("a", 1 << 30), node("b", 1 << 30)]
    split = place(header, N_CELLS, LocalMachine(sizes.home(3), speed(1.0)), nodes)
    assert counts(split) == (3, ("a", 5))
    assert split.message == "not used, as the layers fit without and no pass would be faster: b"


def test_no_node_is_used_where_none_helps(header):
    split = place(
        header, N_CELLS, LocalMachine(1 << 30, speed(1.0)), [node("a", 1 << 30), node("b", 1 << 30)]
    )
    assert counts(split) == (8,)
    assert split.message == (
        "all layers fit here, and no node makes a pass faster: none is used "
        "(a=LAYERS puts layers there all the same)"
    )


def test_a_faster_node_is_used_where_all_fits_here(header):
    nodes = [node("a", 1 << 30, ms=1.0, round_trip_ms=0.01)]
    split = place(header, N_CELLS, LocalMachine(1 << 30, speed(1e3)), nodes)
    assert counts(split) == (0, ("a", 8))
    assert split.ms < split.alone_ms


def test_a_gain_that_may_be_noise_uses_no_node(header):
    nodes = [node("a", 1 << 30, ms=0.95e3, round_trip_ms=0.0)]
    assert counts(place(header, N_CELLS, LocalMachine(1 << 30, speed(1e3)), nodes)) == (8,)


def test_the_user_says_how_many(header):
    nodes = [node("a=3", 1 << 30), node("b=1", 1 << 30)]
    split = place(header, N_CELLS, LocalMachine(1 << 30, speed(1.0)), nodes)
    assert counts(split) == (4, ("a", 3), ("b", 1))


def test_an_unknown_speed_counts_as_the_slowest(header, sizes):
    nodes = [node("unknown=5", 1 << 30, ms=None), node("slow=1", 1 << 30, ms=5.0)]
    split = place(header, N_CELLS, LocalMachine(sizes.home(3), speed(1.0)), nodes)
    assert [share.ms / share.n_layers for share in split.nodes] == pytest.approx(
        [5.0 * sizes.layers_read(0, 1)] * 2
    )


def test_without_edgespecs_kernels_here_scores_of_attention_take_memory(header, sizes):
    memory = sizes.home(8)
    assert place(header, N_CELLS, LocalMachine(memory, speed(1.0)), []).nodes == ()
    for home in (LocalMachine(memory, None), LocalMachine(memory, speed(None, "stock"))):
        with pytest.raises(EdgespecError, match="does not fit"):
            place(header, N_CELLS, home, [])


def test_a_model_that_does_not_fit_is_one_line(header, sizes):
    home = LocalMachine(sizes.home(2), speed(1.0))
    with pytest.raises(EdgespecError) as refused:
        place(header, N_CELLS, home, [node("a", sizes.node(0, 5))])
    line = str(refused.value)
    assert line.startswith("eight.gguf does not fit: about 0.0")
    assert ", a 0.0" in line
    assert line.endswith("; add a node, or choose a smaller quantization or context")


@pytest.mark.parametrize(
    ("text", "memory", "line"),
    [
        ("a=9", 1 << 30, "nodes a=9: the model has 8 layers, and 9 are given to nodes"),
        ("a=8", 1 << 20, "nodes a=8: 8 layers take 0.0"),
    ],
)
def test_layers_that_cannot_be_there_are_one_line(header, text, memory, line):
    with pytest.raises(UsageError) as refused:
        place(header, N_CELLS, LocalMachine(1 << 30, speed(1.0)), [node(text, memory)])
    assert str(refused.value).startswith(line)
