"""The verify kernels alone: against slow references, and bit for bit where that is promised."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import EdgespecError
from edgespec.llama import kernels
from edgespec.llama.kernel_timing import CPrefetch, MatrixShape, Prefetch, WeightStream
from edgespec.llama.selftest_child import PREFETCHES
from tree_shapes import paths, random_shape

NEWER = {"q1_0": (41, 128, 18), "q2_0": (42, 64, 18)}
"""Types whose numbers gguf's package does not read: ggml's number, columns and bytes of a block."""
TYPES = {
    name: NEWER[name][0] if name in NEWER else gguf.GGMLQuantizationType[name.upper()]
    for name in (
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "nvfp4", *NEWER),
        *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "tq1_0", "tq2_0"),
        *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
        *("f16", "bf16"),
    )
}
# Where the F16 scales are in a block.
SCALES = {
    **{"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2)},
    **{"q6_k": (208,), "tq1_0": (52,), "tq2_0": (64,)},
}
# Types whose scales are bytes: where they are, and bytes of them that are common, large, small and odd.
BYTE_SCALES = {
    "mxfp4": (1, range(118, 125), (200,), (0, 1), (0, 1)),
    "nvfp4": (4, range(40, 70), (0x7E,), range(9), (0x7F, 1)),
}
FLOATS = ("f16", "bf16")
ISAS = (
    *("amx-int8", "avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "avx2-tiles"),
    *("neon-i8mm", "neon-dotprod", "neon"),
)
MAX_TOKENS = 32

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not kernels.plugin_path().exists(), reason="the kernels are not built"),
]


class CAttention(ctypes.Structure):
    """`struct es_attention`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("head_dim", "value_dim", "n_head", "n_head_kv", "n", "n_kv")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "sinks")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("cache_type", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def library():
    library = ctypes.CDLL(str(kernels.plugin_path()))
    pointer, int64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    library.es_kernels_repack.argtypes = (ctypes.c_int, int64, int64, pointer, size, pointer)
    library.es_kernels_matmul.argtypes = (
        ctypes.c_int, int64, int64, pointer, size, int64, pointer, pointer, ctypes.c_int,
    )  # fmt: skip
    library.es_kernels_experts.argtypes = (
        ctypes.c_int, *[int64] * 3, pointer, size, int64, int64, pointer, ctypes.c_int, pointer, pointer,
        ctypes.c_int,
    )  # fmt: skip
    library.es_kernels_unary.argtypes = (ctypes.c_int, ctypes.c_int64, pointer, pointer)
    library.es_kernels_attention.argtypes = (ctypes.POINTER(CAttention), pointer, ctypes.c_int)
    library.es_kernels_cached.argtypes = (ctypes.c_int, int64, pointer, pointer)
    library.es_kernels_hadamard.argtypes = (int64, int64, pointer, pointer, pointer, ctypes.c_int)
    library.es_kernels_isa.restype = ctypes.c_char_p
    library.es_kernels_set_prefetch.argtypes = (CPrefetch,)
    library.es_kernels_set_wide_from.argtypes = (int64,)
    chosen = library.es_kernels_isa()
    yield library
    library.es_kernels_set_isa(chosen)


@pytest.fixture(params=ISAS)
def isa(request, library):
    if library.es_kernels_set_isa(request.param.encode()) != 0:
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def address(array):
    assert array.flags.c_contiguous
    return array.ctypes.data


def unit(name):
    """Return the columns and the bytes of a type's smallest part of a row that can be packed."""
    block, size = NEWER[name][1:] if name in NEWER else gguf.GGML_QUANT_SIZES[TYPES[name]]
    return (block, size) if block > 1 else (32, 32 * size)


def dequantized(data, name):
    """Return what blocks stand for."""
    if name not in NEWER:
        return quants.dequantize(data, TYPES[name])
    blocks = data.reshape(-1, 18)
    n_bits = 1 if name == "q1_0" else 2
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), -1, n_bits)
    values = 2.0 * bits[..., 0] - 1 if n_bits == 1 else bits[..., 0] + 2.0 * bits[..., 1] - 1
    return (blocks[:, :2].copy().view(np.float16) * values.astype(np.float32)).reshape(len(data), -1)


def encode_floats(name, values):
    """Return F16 or BF16 numbers as rows of bytes."""
    floats = values.astype(np.float32)
    raw = quants.quantize(floats, TYPES[name])
    return np.ascontiguousarray(raw).view(np.uint8).reshape(len(values), -1)


def random_blocks(rng, name, n):
    """Return n blocks of random bytes, of those that ggml writes: not all bytes are ternary digits."""
    data = rng.integers(0, 256, (n, unit(name)[1]), dtype=np.uint8)
    if name == "tq1_0":
        digits = np.array([1] * 48 + [3] * 4)  # the last four have one digit less
        data[:, :52] = (data[:, :52].astype(int) * 243 // 256 // digits * digits * 256 + 242) // 243
    return data


def set_scales(data, name, scales, offset=None):
    """Give blocks their scales, one each, F16 numbers: all of them, or those at an offset."""
    raw = np.float16(scales).view(np.uint8).reshape(-1, 2)
    if name == "iq1_m":  # the high nibbles of four words
        data[:, 49:56:2] = data[:, 49:56:2] & 15 | np.stack([raw << 4, raw & 0xF0], 2).reshape(-1, 4)
        return
    for at in SCALES.get(name, (0,)) if offset is None else (offset,):
        data[:, at : at + 2] = raw


@st.composite
def blocks(draw, name):
    """Return the blocks of a matrix: random, and with all kinds of scales and quants."""
    block = unit(name)[0]
    rows, columns = draw(st.integers(1, 35)), block * draw(st.integers(1, 3 if block == 256 else 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fill = draw(st.sampled_from(["random", "zeros", "ones"]))
    data = random_blocks(rng, name, rows * columns // block)
    if fill != "random":
        data[:] = 0 if fill == "zeros" else data.max(0)
    kind = draw(st.sampled_from(["normal", "zero", "negative zero", "largest", "smallest", "one large"]))
    if name in BYTE_SCALES:
        n, common, large, small, odd = BYTE_SCALES[name]
        choice = {"zero": (0,), "largest": large, "smallest": small, "one large": odd}.get(kind, common)
        data[:, :n] = rng.choice(choice, (len(data), n))
        return data.reshape(rows, -1), columns
    for offset in SCALES.get(name, (0,)):
        scale = rng.normal(0, 0.02, (rows, columns) if name in FLOATS else len(data))
        match kind:
            case "zero":
                scale[:] = 0.0
            case "negative zero":
                scale[:] = -0.0
            case "largest":
                scale[:] = rng.choice([-65504.0, 65504.0], scale.shape)
            case "smallest":
                scale[:] = rng.choice([-6e-8, 6e-8], scale.shape)
            case "one large":
                scale.flat[rng.integers(scale.size)] = 1000.0
        if name in FLOATS:
            return encode_floats(name, scale), columns
        set_scales(data, name, scale, offset)
    return data.reshape(rows, -1), columns


def sane_weights(rng, name, n_blocks=7, n_large_blocks=3):
    """Return 37 rows of random weights and their columns; their scales are moderate."""
    block, size = unit(name)
    n = n_large_blocks if block == 256 else n_blocks
    if name in FLOATS:
        return encode_floats(name, rng.normal(0, 0.02, (37, n * block))), n * block
    weights = random_blocks(rng, name, 37 * n)
    if name in BYTE_SCALES:
        n_scales, common = BYTE_SCALES[name][:2]
        weights[:, :n_scales] = rng.choice(common, (37 * n, n_scales))
    else:
        set_scales(weights, name, rng.choice([0.008, 0.016], len(weights)))
    return weights.reshape(37, n * size), n * block


@st.composite
def activations(draw, n, columns):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(0, 1, (n, columns)).astype(np.float32)
    kind = draw(st.sampled_from(["normal", "equal", "negative zero", "outlier", "tiny", "large"]))
    x[:] = {"equal": 0.75, "negative zero": -0.0}.get(kind, x)
    if kind == "outlier":
        x[:, rng.integers(columns)] = 1e4
    x *= np.float32({"tiny": 1e-35, "large": 1e8}.get(kind, 1))
    return x


def matmul(library, name, columns, data, x, n_threads=2):
    y = np.full((len(x), len(data)), np.nan, np.float32)
    code = library.es_kernels_matmul(
        int(TYPES[name]),
        len(data),
        columns,
        address(data),
        data.nbytes,
        len(x),
        address(x),
        address(y),
        n_threads,
    )
    assert code == 0
    return y


def quantized(x, name):
    """The activations as the kernels round them: 8 bits under one scale for each block, from the formulas."""
    if name == "f16":
        return x.astype(np.float64)
    if name == "bf16":
        return dequantized(encode_floats(name, x), name).astype(np.float64)
    block = 256 if unit(name)[0] == 256 else 32
    parts = x.reshape(len(x), -1, min(block, x.shape[1]))
    largest = np.abs(parts).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(largest > np.float32(1e-30), np.rint(parts * (np.float32(127) / largest)), 0)
    return (q * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("name", TYPES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_products_are_those_of_the_dequantized_weights(library, name, data):
    weights, columns = data.draw(blocks(name))
    x = data.draw(activations(data.draw(st.integers(1, 9)), columns))
    repacked = np.empty_like(weights)
    w = dequantized(weights, name).astype(np.float64)
    rounded = quantized(x, name)
    # float32 sums of products that may cancel: relative to the largest weight of a row.
    tolerance = (
        3e-6
        * np.abs(rounded).sum(1)[:, None]
        * np.abs(w).max(1)[None]
        * (4 if "1" in name or "k" in name else 1)
    )
    for isa in ISAS:
        if library.es_kernels_set_isa(isa.encode()) != 0:
            continue
        code = library.es_kernels_repack(
            int(TYPES[name]), len(weights), columns, address(weights), weights.nbytes, address(repacked)
        )
        assert code == 0
        np.testing.assert_array_equal(repacked, weights)
        y = matmul(library, name, columns, weights, x)
        assert np.all(np.abs(y - rounded @ w.T) <= tolerance + 1e-30), isa


@pytest.mark.parametrize("name", TYPES)
def test_products_of_integers_are_exact(library, isa, name):
    """With scales of one: what the packed weights and the activations are multiplied and added as."""
    rng = np.random.default_rng(11)
    block = unit(name)[0]
    weights = random_blocks(rng, name, 37 * 256 // block)
    if name in FLOATS:
        weights = encode_floats(name, rng.integers(-128, 129, (37, 256)))
    elif name in BYTE_SCALES:
        weights[:, : BYTE_SCALES[name][0]] = {"mxfp4": 128, "nvfp4": 8 << 3}[name]
    else:
        is_fraction = name.startswith(("iq1", "iq2", "iq3_xxs"))  # of an eighth at the least
        set_scales(weights, name, np.full(len(weights), 8 if is_fraction else 1))
    weights = weights.reshape(37, -1)
    most = 8 if name.startswith("iq") else 128  # else the sums might be no whole numbers of 24 bits
    x = rng.integers(1 - most, most, (9, 256)).astype(np.float32)
    x[:, ::32] = 127  # the largest of each block, so that the scale of its activations is one
    expected = x.astype(np.int64) @ dequantized(weights, name).astype(np.int64).T
    assert np.abs(expected).max() < 1 << 24
    np.testing.assert_array_equal(matmul(library, name, 256, weights, x), expected)


@pytest.mark.parametrize("name", TYPES)
def test_products_are_the_same_bits_on_all_instruction_sets(library, name):
    rng = np.random.default_rng(12)
    weights, columns = sane_weights(rng, name)
    x = rng.normal(0, 1, (100, columns)).astype(np.float32)
    for n in (11, 16, 37, 64, 100):  # from 16 on by tile registers, where there are any, 64 at the most
        products = {
            isa: matmul(library, name, columns, weights, x[:n])
            for isa in ISAS
            if library.es_kernels_set_isa(isa.encode()) == 0
        }
        first = next(iter(products.values()))
        for isa, each in products.items():
            np.testing.assert_array_equal(each, first, isa)


@pytest.mark.parametrize("name", TYPES)
def test_a_product_does_not_depend_on_the_batch_or_the_threads(library, isa, name):
    rng = np.random.default_rng(7)
    weights, columns = sane_weights(rng, name)
    x = rng.normal(0, 1, (MAX_TOKENS, columns)).astype(np.float32)
    each = np.concatenate(
        [matmul(library, name, columns, weights, x[i : i + 1], 1) for i in range(MAX_TOKENS)]
    )
    assert np.isfinite(each).all()
    for n in range(1, MAX_TOKENS + 1):
        for n_threads in (1, 2, 3, 4):
            np.testing.assert_array_equal(matmul(library, name, columns, weights, x[:n], n_threads), each[:n])


# ---- experts ----


def experts(library, name, weights, ids, x, n_threads=2):
    """The products of x (n, 1 or n_used, columns) with those of `weights` (experts, rows, bytes) in `ids`."""
    y = np.full((*ids.shape, weights.shape[1]), np.nan, np.float32)
    code = library.es_kernels_experts(
        int(TYPES[name]), len(weights), weights.shape[1], x.shape[2], address(weights), weights.nbytes,
        *ids.shape, address(ids), int(x.shape[1] == 1), address(x), address(y), n_threads,
    )  # fmt: skip
    assert code == 0
    return y


def several(rng, name, n_experts):
    """Random matrices of 37 rows, one for each expert, and their columns."""
    matrices = [sane_weights(rng, name) for _ in range(n_experts)]
    return np.stack([weights for weights, _ in matrices]), matrices[0][1]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n_used", [1, 3])
def test_experts_are_the_products_of_their_matrices(library, isa, name, n_used):
    """Whatever the tokens beside one: experts with none, one and many tokens, all to the bit."""
    rng = np.random.default_rng(21)
    weights, columns = several(rng, name, 6)
    ids = np.sort(rng.choice(6, (MAX_TOKENS, n_used)), 1).astype(np.int32)
    ids[:20, 0] = 1  # more than a tile
    ids[ids == 4] = 5  # nobody's
    for inputs in (1, n_used):
        x = rng.normal(0, 1, (MAX_TOKENS, inputs, columns)).astype(np.float32)
        expected = np.stack(
            [
                [matmul(library, name, columns, weights[e], x[t, [u % inputs]])[0] for u, e in enumerate(row)]
                for t, row in enumerate(ids)
            ]
        )
        for n in (1, 2, 9, MAX_TOKENS):
            for n_threads in (1, 2, 3):
                y = experts(library, name, weights, ids[:n], x[:n], n_threads)
                np.testing.assert_array_equal(y, expected[:n])


def test_an_expert_that_is_not_there_writes_nothing(library, isa):
    rng = np.random.default_rng(22)
    weights, columns = several(rng, "q4_0", 3)
    x = rng.normal(0, 1, (4, 1, columns)).astype(np.float32)
    ids = np.array([[0, 3], [-1, 2], [1, 1 << 30], [2, 0]], np.int32)
    y = experts(library, "q4_0", weights, ids, x)
    there = (ids >= 0) & (ids < 3)
    assert np.isnan(y[~there]).all()
    np.testing.assert_array_equal(
        y[there], experts(library, "q4_0", weights, np.where(there, ids, 0), x)[there]
    )


@pytest.fixture
def prefetching(library):
    """Choose how weights are fetched ahead; the default is back afterwards."""

    def choose(prefetch):
        return library.es_kernels_set_prefetch(prefetch.for_c())

    yield choose
    assert choose(Prefetch()) == 0


@pytest.mark.parametrize("name", TYPES)
def test_a_product_does_not_depend_on_the_prefetch(library, isa, name, prefetching):
    """Its levels are functions of their own: each batch size of each type comes from both."""
    rng = np.random.default_rng(9)
    weights, columns = sane_weights(rng, name, 5, 2)
    x = rng.normal(0, 1, (17, columns)).astype(np.float32)
    for n in (*range(1, 9), 17):
        rows = matmul(library, name, columns, weights, x[:n])
        for prefetch in (*PREFETCHES, Prefetch(1, 0), Prefetch(2, 1 << 20)):
            assert prefetching(prefetch) == 0
            np.testing.assert_array_equal(matmul(library, name, columns, weights, x[:n]), rows, f"{prefetch}")
        assert prefetching(Prefetch()) == 0


@pytest.mark.parametrize(
    "prefetch", [Prefetch(0), Prefetch(3), Prefetch(-1), Prefetch(1, -1), Prefetch(2, (1 << 20) + 1)]
)
def test_a_prefetch_that_does_not_exist_is_refused(library, prefetching, prefetch):
    library.es_kernels_prefetch.restype = CPrefetch
    assert prefetching(Prefetch(2, 4096)) == 0
    assert prefetching(prefetch) == -1
    kept = library.es_kernels_prefetch()
    assert (kept.level, kept.bytes) == (2, 4096)


def test_tile_registers_are_used_from_a_number_of_tokens_on(library, isa):
    """Which are numbers of 16 and more, or 0, never."""
    rng = np.random.default_rng(10)
    weights, columns = sane_weights(rng, "q4_k")
    x = rng.normal(0, 1, (40, columns)).astype(np.float32)
    rows = matmul(library, "q4_k", columns, weights, x)
    try:
        for wide_from in (0, 16, 41):
            assert library.es_kernels_set_wide_from(wide_from) == 0
            np.testing.assert_array_equal(matmul(library, "q4_k", columns, weights, x), rows)
        assert {library.es_kernels_set_wide_from(wide_from) for wide_from in (-1, 1, 15)} == {-1}
    finally:
        library.es_kernels_set_wide_from(16)


# ---- timing ----


@pytest.fixture
def stream(library, isa):
    with WeightStream(kernels.plugin_path(), isa, 4 << 20) as stream:
        yield stream


def test_every_type_and_number_of_tokens_can_be_timed(stream):
    """Again and again: the stream is gone through more than once."""
    shapes = [MatrixShape(int(type_), 100, 512) for type_ in TYPES.values()]
    assert all(stream.packed_bytes(shape) > 0 for shape in shapes)
    for n in (1, 7, 8, 9, 33):
        for _ in range(8):
            for n_threads in (1, 3):
                assert 0 < stream.products(shapes, n, Prefetch(2, 4096), n_threads) < 60
    assert 0 < stream.read(4 << 20, Prefetch(), 2) < 60
    assert stream.peak(1000, 2) > 0


def test_a_stream_that_cannot_be_had(library, tmp_path):
    isa = library.es_kernels_isa().decode()
    with pytest.raises(EdgespecError, match="no memory for"):
        WeightStream(kernels.plugin_path(), isa, 1 << 60)
    with pytest.raises(EdgespecError, match="no kernels for avx9"):
        WeightStream(kernels.plugin_path(), "avx9", 1 << 20)
    with pytest.raises(EdgespecError, match="install edgespec again"):
        WeightStream(tmp_path / "none.so", isa, 1 << 20)


# ---- attention ----


def attention(library, q, k, v, mask, scale, n_threads=2, *, sinks=None, soft_cap=0.0):
    """`k` and `v`: F32, F16, or the bytes of Q8_0 or Q4_0."""
    n, n_head, head_dim = q.shape
    kind, block = {np.dtype(np.float32): (0, 0), np.dtype(np.float16): (1, 0)}.get(
        k.dtype, {34: (8, 34), 18: (2, 18)}.get(k.shape[2] * 32 // head_dim)
    )
    value_dim = v.shape[2] // block * 32 if block else v.shape[2]
    out = np.full((n, n_head, value_dim), np.nan, np.float32)
    asked = CAttention(
        head_dim, value_dim, n_head, k.shape[1], n, len(k), address(q), address(k), address(v),
        None if mask is None else address(mask), None if sinks is None else address(sinks),
        scale, soft_cap, kind,
    )  # fmt: skip
    assert library.es_kernels_attention(ctypes.byref(asked), address(out), n_threads) == 0
    return out


def reference_attention(q, k, v, mask, scale, *, sinks=None, soft_cap=0.0):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a.astype(np.float64), group, 1) for a in (k, v))
    scores = np.einsum("nhd,khd->nhk", q.astype(np.float64), k) * scale
    scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
    scores = scores + mask[:, None].astype(np.float64)
    if sinks is not None:  # scores without a value
        of_each = np.broadcast_to(sinks.astype(np.float64)[None, :, None], (*scores.shape[:2], 1))
        scores, v = np.concatenate([scores, of_each], -1), np.concatenate([v, np.zeros_like(v[:1])])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nhk,khd->nhd", weights / weights.sum(-1, keepdims=True), v)


def in_blocks(values, name):
    """Return an array of rows in Q8_0 or Q4_0, and what they stand for."""
    raw = quants.quantize(values.astype(np.float32), TYPES[name])
    return raw, quants.dequantize(raw, TYPES[name])


def attention_inputs(rng, head_dim, n_head, n_head_kv, n, n_kv, window=None, spread=1.0):
    q = rng.normal(0, spread, (n, n_head, head_dim)).astype(np.float32)
    k, v = (rng.normal(0, spread, (n_kv, n_head_kv, head_dim)).astype(np.float16) for _ in range(2))
    position, cached = np.arange(n)[:, None] + n_kv - n, np.arange(n_kv)[None]
    seen = (cached <= position) & (cached > position - (window or n_kv))
    return q, k, v, np.where(seen, 0, -np.inf).astype(np.float16)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_attention_is_the_softmax_of_the_scores(library, data):
    head_dim = data.draw(st.sampled_from([16, 32, 48, 64, 80, 96, 128, 160, 256, 576]))
    n_head_kv, group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    n = data.draw(st.integers(1, 70))
    n_kv = n + data.draw(st.integers(0, 700))
    window = data.draw(st.sampled_from([None, 1, 40, 512]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    spread = data.draw(st.sampled_from([1.0, 0.0, 12.0]))
    q, k, v, mask = attention_inputs(rng, head_dim, n_head_kv * group, n_head_kv, n, n_kv, window, spread)
    if data.draw(st.booleans()):
        mask += np.float16(-1.5) * (rng.random(mask.shape) < 0.5).astype(np.float16)
    scale = head_dim**-0.5
    more = {
        "sinks": rng.normal(0, 2, q.shape[1]).astype(np.float32) if data.draw(st.booleans()) else None,
        "soft_cap": data.draw(st.sampled_from([0.0, 3.0, 50.0])),
    }
    narrower = [max(16, head_dim * part // 9 // 16 * 16) for part in (9, 8, 5, 1)]
    v = v[..., : data.draw(st.sampled_from(narrower))].copy()
    is_whole = head_dim % 32 == v.shape[2] % 32 == 0
    kind = data.draw(st.sampled_from(["f16", "q8_0", "q4_0"] if is_whole else ["f16"]))
    (k, k_values), (v, v_values) = [(one, one) if kind == "f16" else in_blocks(one, kind) for one in (k, v)]
    expected = reference_attention(q, k_values, v_values, mask, scale, **more)
    for isa in ISAS:
        if library.es_kernels_set_isa(isa.encode()) == 0:
            out = attention(library, q, k, v, mask, scale, **more)
            # The error of a score is that of its products; the weights feel it in full.
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5 * max(spread, 1) ** 3)


@pytest.mark.parametrize(
    ("head_dim", "n_head", "n_head_kv"), [(16, 8, 1), (64, 14, 2), (80, 4, 4), (128, 12, 2), (256, 4, 1)]
)
@pytest.mark.parametrize("n_kv", [70, 256, 777, 2048])
def test_attention_does_not_depend_on_the_batch_or_the_threads(
    library, isa, head_dim, n_head, n_head_kv, n_kv
):
    rng = np.random.default_rng(3)
    n = MAX_TOKENS
    q, k, v, mask = attention_inputs(rng, head_dim, n_head, n_head_kv, n, n_kv, window=600)
    each = np.concatenate(
        [attention(library, q[i : i + 1].copy(), k, v, mask[i : i + 1].copy(), 0.1, 1) for i in range(n)]
    )
    for size in (2, 3, 8, 17, n):
        for n_threads in (1, 2, 3, 4):
            out = attention(library, q[:size].copy(), k, v, mask[:size].copy(), 0.1, n_threads)
            np.testing.assert_array_equal(out, each[:size])
    # Nor on cells of the cache that a token does not see, whatever their number and content.
    longer = np.concatenate([k, np.ones((300, *k.shape[1:]), np.float16)])
    wider = np.concatenate([mask, np.full((n, 300), -np.inf, np.float16)], 1)
    np.testing.assert_array_equal(
        attention(library, q, longer, longer, wider, 0.1), attention(library, q, k, k, mask, 0.1)
    )


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("n_kv", [70, 777])
def test_attention_with_all_there_is_does_not_depend_on_the_batch(library, isa, n_kv, kind):
    """A quantized cache, sinks and soft-capping, a mask that is added."""
    rng = np.random.default_rng(13)
    n, n_head = 17, 6
    q, k, v, mask = attention_inputs(rng, 64, n_head, 2, n, n_kv)
    mask += np.float16(-0.5) * (rng.random(mask.shape) < 0.5).astype(np.float16)
    k, v = in_blocks(k, kind)[0], in_blocks(v, kind)[0]
    more = {"sinks": rng.normal(0, 2, n_head).astype(np.float32), "soft_cap": 4.0}
    each = np.concatenate([attention(library, q[[i]], k, v, mask[[i]], 0.2, 1, **more) for i in range(n)])
    for size in (2, 8, n):
        for n_threads in (1, 2, 3):
            out = attention(library, q[:size], k, v, mask[:size], 0.2, n_threads, **more)
            np.testing.assert_array_equal(out, each[:size])


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "n_head", "in_f16"),
    [
        *[(head_dim, head_dim, 2, True) for head_dim in (0, 8, 40, 72, 592)],
        *[(64, value_dim, 2, True) for value_dim in (0, 8, 40, 80)],
        *[(48, 32, 2, False), (64, 48, 2, False), (64, 64, 3, True)],
    ],
)
def test_attention_of_other_widths_is_left_to_others(library, isa, head_dim, value_dim, n_head, in_f16):
    """Steps over a row have up to 16 numbers: the rest of one would be another's."""
    some = np.zeros(1 << 16, np.float32)
    asked = CAttention(
        head_dim, value_dim, n_head, 2, 1, 4, *[address(some)] * 3, None, None, 1.0, 0.0, 1 if in_f16 else 8
    )
    out = np.full(1024, np.nan, np.float32)
    assert library.es_kernels_attention(ctypes.byref(asked), address(out), 1) == -1
    assert np.isnan(out).all()


@pytest.mark.parametrize("n_kv", [1, 64, 1500])
def test_attention_without_a_mask_sees_all(library, isa, n_kv):
    q, k, v, mask = attention_inputs(np.random.default_rng(4), 64, 4, 2, 9, n_kv)
    expected = attention(library, q, k, v, np.zeros_like(mask), 0.125)
    for n in (1, 2, 9):
        out = attention(library, q[:n], k, v, None, 0.125, n_threads=n % 3 + 1)
        np.testing.assert_array_equal(out, expected[:n])


@pytest.mark.parametrize(
    ("n_kv", "head_dim", "value_dim"), [(1, 64, 64), (31, 32, 16), (100, 96, 80), (777, 64, 64)]
)
def test_full_attention(library, isa, n_kv, head_dim, value_dim):
    """Keys, values and weights have 8 bits; the same bits for any number of queries and threads."""
    rng = np.random.default_rng(5)
    n, n_head = 21, 3
    q, k = (rng.normal(0, 1, (m, n_head, head_dim)).astype(np.float32) for m in (n, n_kv))
    v = rng.normal(0, 1, (n_kv, n_head, value_dim)).astype(np.float32)
    k[n_kv // 2] *= 20  # one key that has most of the weight of some queries, none of that of others
    out = attention(library, q, k, v, None, head_dim**-0.5)
    expected = reference_attention(q, k, v, np.zeros((n, n_kv)), head_dim**-0.5)
    assert np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2)) < 0.03
    for size in (1, 3, 8, n):
        again = attention(library, q[:size], k, v, None, head_dim**-0.5, n_threads=size % 4 + 1)
        np.testing.assert_array_equal(again, out[:size])


def test_gelu_with_the_error_function(library, isa):
    x = np.concatenate([np.linspace(-9, 9, 20_003), [0.0, -0.0, 1e-30, -1e4, 1e4]]).astype(np.float32)
    y = np.empty_like(x)
    assert library.es_kernels_unary(16, len(x), address(x), address(y)) == 0
    exact = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)]
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=5e-7)
    assert library.es_kernels_unary(17, len(x), address(x), address(y)) == -1  # XIELU


@settings(deadline=None)
@given(data=st.data())
def test_what_a_cache_keeps_is_near_what_it_got(library, data):
    """As near as ggml's own."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(0, 1, (data.draw(st.integers(1, 5)), 32)).astype(np.float32)
    x *= np.float32(data.draw(st.sampled_from([1.0, 0.0, 0.02, 100.0])))
    for isa in ISAS:
        if library.es_kernels_set_isa(isa.encode()) == 0:
            raw = np.zeros((len(x), 34), np.uint8)
            assert library.es_kernels_cached(8, x.size, address(x), address(raw)) == 0
            kept = quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
            step = np.abs(x).max(1, keepdims=True) / 127
            assert (np.abs(kept - x) <= 0.57 * step + 1e-7).all()  # the scale is rounded to F16
            nibbles = np.zeros((len(x), 18), np.uint8)
            assert library.es_kernels_cached(2, x.size, address(x), address(nibbles)) == 0
            kept = quants.dequantize(nibbles, gguf.GGMLQuantizationType.Q4_0)
            most = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)  # is -8; +8 would be 7
            allowed = np.where(x * most < -np.abs(most) * np.abs(most) * 7.4 / 8, 1.01, 0.51)
            assert (np.abs(kept - x) <= allowed * np.abs(most) / 8 + 1e-7).all()
            theirs = quants.dequantize(quants.quantize(x, TYPES["q4_0"]), TYPES["q4_0"])
            assert np.abs(kept - theirs).max() <= 1.01 * np.abs(most).max() / 8 + 1e-7
            half = np.zeros(x.shape, np.float16)
            assert library.es_kernels_cached(1, x.size, address(x), address(half)) == 0
            np.testing.assert_array_equal(half, x.astype(np.float16))
    assert library.es_kernels_cached(8, 31, address(x), address(raw)) == -1
    assert library.es_kernels_cached(3, 32, address(x), address(raw)) == -1


@pytest.mark.parametrize("width", [64, 128, 512])
def test_rows_times_a_hadamard_matrix(library, isa, width):
    """The same bits alone and among others, and twice is nothing."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = (matrix / np.sqrt(width)).astype(np.float32)
    x = np.random.default_rng(6).normal(0, 1, (9, width)).astype(np.float32)

    def product(rows, n_threads=1):
        y = np.full_like(rows, np.nan)
        assert library.es_kernels_hadamard(width, len(rows), *map(address, (matrix, rows, y)), n_threads) == 0
        return y

    rows = product(x, 2)
    np.testing.assert_allclose(rows, x.astype(np.float64) @ matrix, rtol=0, atol=2e-6)
    for i in range(len(x)):
        np.testing.assert_array_equal(product(x[[i]]), rows[[i]])
    np.testing.assert_allclose(product(rows, 3), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("head_dim", "n_head", "n_head_kv"), [(64, 14, 2), (128, 6, 2), (80, 3, 3)])
def test_attention_of_a_branch_is_that_of_a_chain(library, isa, head_dim, n_head, n_head_kv, window):
    """Bit for bit, whatever lies between: sums are grouped as if nothing did."""
    rng = np.random.default_rng(8)
    for n_past in (1, *range(60, 71), 128, 130, 240, 255, 256, 257, 511):
        n = int(rng.integers(2, MAX_TOKENS))
        parents = random_shape(rng, n)
        n_kv = n_past + n + int(rng.integers(0, 100))
        q, k, v, _ = attention_inputs(rng, head_dim, n_head, n_head_kv, n, n_kv)
        mask = np.full((n, n_kv), -np.inf, np.float16)
        each = np.empty_like(q)
        for node, path in enumerate(paths(parents)):
            cells = [*range(n_past), *(n_past + other for other in path)]
            seen = slice(max(0, len(cells) - window) if window else 0, None)
            mask[node, cells[seen]] = 0
            alone = np.full((1, len(cells)), -np.inf, np.float16)
            alone[0, seen] = 0
            each[node] = attention(library, q[[node]], k[cells], v[cells], alone, 0.1, 1)[0]
        for n_threads in (1, 2, 3, 4):
            np.testing.assert_array_equal(
                attention(library, q, k, v, mask, 0.1, n_threads), each, f"{n_past=} {parents=}"
            )


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_attention_with_any_gaps_is_the_softmax_of_the_scores(library, data):
    n, n_kv = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 700))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q, k, v, mask = attention_inputs(rng, 64, 6, 2, n, n_kv)
    share = data.draw(st.sampled_from([0.01, 0.5, 0.99]))
    mask[:] = np.where(rng.random((n, n_kv)) < share, rng.choice([0, -1.5], (n, n_kv)), -np.inf)
    mask[:, rng.integers(n_kv)] = 0
    expected = reference_attention(q, k, v, mask, 0.125)
    for isa in ISAS:
        if library.es_kernels_set_isa(isa.encode()) == 0:
            np.testing.assert_allclose(
                attention(library, q, k, v, mask, 0.125), expected, rtol=2e-5, atol=2e-5
            )


def test_a_token_that_sees_nothing_gets_zeros(library, isa):
    rng = np.random.default_rng(4)
    q, k, v, mask = attention_inputs(rng, 64, 2, 1, 3, 100)
    mask[1] = -np.inf
    out = attention(library, q, k, v, mask, 0.1)
    assert (out[1] == 0).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [(0, 256, 0), (16, 0, 0), (16, 256, 100), (16, 33, 288), (-1, 256, 144), (1 << 40, 256, 144)],
)
def test_what_cannot_be_packed_is_refused(library, rows, columns, size):
    data = np.zeros(4096, np.uint8)
    x = np.zeros(4096, np.float32)
    code = library.es_kernels_matmul(
        2, rows, columns, address(data), size, 1, address(x), address(x.copy()), 1
    )
    assert code == -1


def test_an_unknown_instruction_set_is_refused(library):
    before = library.es_kernels_isa()
    assert library.es_kernels_set_isa(b"avx1024") == -1
    assert library.es_kernels_isa() == before


def test_the_plugin_exports_its_interface_and_nothing_else():
    """A leaked standard template compiled for AVX-512 would be called by code for every CPU."""
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(kernels.plugin_path())], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    exported = {line.split()[-1] for line in names if line}
    assert {name for name in exported if not name.startswith("es_kernels_")} == {"ggml_backend_init"}


def test_without_ggml_the_plugin_stays_out():
    code = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "library.es_kernels_refusal.restype = ctypes.c_char_p\n"
        "assert not library.ggml_backend_init()\n"
        "print(library.es_kernels_refusal().decode())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(kernels.plugin_path())], capture_output=True, text=True, check=False
    )
    assert result.stdout == "libggml-base.so.0 is not loaded\n", result.stderr
