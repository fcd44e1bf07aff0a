"""The kernels of layers whose memory is a state, alone: against slow references, and bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from edgespec.llama import kernels

ISAS = ("avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "neon-i8mm", "neon-dotprod", "neon")
N = ctypes.c_int64

pytestmark = pytest.mark.skipif(not kernels.plugin_path().exists(), reason="the kernels are not built")


class DeltaNet(ctypes.Structure):
    """`struct es_delta_net`."""

    _fields_ = (
        *((name, N) for name in ("width", "heads", "key_heads", "tokens", "sequences", "slots", "decays")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "decay", "beta", "state")),
    )


class StateScan(ctypes.Structure):
    """`struct es_state_scan`."""

    _fields_ = (
        *((name, N) for name in ("width", "rows", "heads", "groups", "tokens", "sequences", "slots")),
        *((name, ctypes.c_void_p) for name in ("x", "dt", "a", "b", "c", "state")),
    )


@pytest.fixture(scope="module")
def library():
    library = ctypes.CDLL(str(kernels.plugin_path()))
    library.es_kernels_delta_net.argtypes = (ctypes.POINTER(DeltaNet), ctypes.c_void_p, ctypes.c_int)
    library.es_kernels_state_scan.argtypes = (ctypes.POINTER(StateScan), ctypes.c_void_p, ctypes.c_int)
    library.es_kernels_isa.restype = ctypes.c_char_p
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


def normal(rng, *shape):
    return rng.normal(0, 1, shape).astype(np.float32)


class Net:
    """Random inputs of a delta net; arrays have the sequences first, then the tokens."""

    def __init__(self, rng, width, *, heads=4, key_heads=2, tokens=7, sequences=2, by_column=False):
        self.sizes = width, heads, key_heads
        self.q, self.k = (
            normal(rng, sequences, tokens, key_heads, width) / np.float32(width**0.5) for _ in range(2)
        )
        self.v = normal(rng, sequences, tokens, heads, width)
        decays = width if by_column else 1
        self.decay = -np.abs(normal(rng, sequences, tokens, heads, decays)) * np.float32(0.3)
        self.beta = rng.random((sequences, tokens, heads), np.float32)
        self.state = normal(rng, sequences, heads, width, width)

    def of_tokens(self, part):
        """The same with some of the tokens, from the same state."""
        net = object.__new__(Net)
        vars(net).update(vars(self))
        for name in ("q", "k", "v", "decay", "beta"):
            setattr(net, name, np.ascontiguousarray(getattr(self, name)[:, part]))
        return net

    def run(self, library, slots=1, n_threads=2):
        width, heads, key_heads = self.sizes
        sequences, tokens = self.beta.shape[:2]
        n_out = sequences * tokens * heads * width
        out = np.full(n_out + slots * self.state.size, np.nan, np.float32)
        arrays = (self.q, self.k, self.v, self.decay, self.beta, self.state)
        asked = DeltaNet(
            width, heads, key_heads, tokens, sequences, slots, self.decay.shape[3], *map(address, arrays)
        )
        assert library.es_kernels_delta_net(ctypes.byref(asked), address(out), n_threads) == 0
        return out[:n_out].reshape(self.v.shape), out[n_out:].reshape(slots, *self.state.shape)

    def expected(self):
        """The outputs, and the state after each token, from the formulas in double precision."""
        width, heads, key_heads = self.sizes
        q, k = (a.astype(np.float64)[:, :, np.arange(heads) % key_heads] for a in (self.q, self.k))
        state, outputs, states = self.state.astype(np.float64), [], []
        for t in range(self.beta.shape[1]):
            state = state * np.exp(self.decay[:, t, :, None])
            before = np.einsum("shji,shi->shj", state, k[:, t])
            delta = (self.v[:, t] - before) * self.beta[:, t, :, None]
            state = state + delta[..., None] * k[:, t, :, None]
            outputs.append(np.einsum("shji,shi->shj", state, q[:, t]) / width**0.5)
            states.append(state)
        return np.stack(outputs, 1), states


class Scan:
    """Random inputs of a state space."""

    def __init__(self, rng, width, *, rows=10, heads=4, groups=2, tokens=7, sequences=2):
        self.sizes = width, rows, heads, groups
        self.x = normal(rng, sequences, tokens, heads, rows)
        self.dt = normal(rng, sequences, tokens, heads) * 3
        self.dt[0, 0, 0] = 25.0  # above where softplus is the number itself
        self.a = -np.abs(normal(rng, heads))
        self.b, self.c = (normal(rng, sequences, tokens, groups, width) for _ in range(2))
        self.state = normal(rng, sequences, heads, rows, width)

    def of_tokens(self, part):
        scan = object.__new__(Scan)
        vars(scan).update(vars(self))
        for name in ("x", "dt", "b", "c"):
            setattr(scan, name, np.ascontiguousarray(getattr(self, name)[:, part]))
        return scan

    def run(self, library, slots=1, n_threads=2):
        width, rows, heads, groups = self.sizes
        sequences, tokens = self.dt.shape[:2]
        out = np.full(self.x.size + slots * self.state.size, np.nan, np.float32)
        arrays = (self.x, self.dt, self.a, self.b, self.c, self.state)
        asked = StateScan(width, rows, heads, groups, tokens, sequences, slots, *map(address, arrays))
        assert library.es_kernels_state_scan(ctypes.byref(asked), address(out), n_threads) == 0
        return out[: self.x.size].reshape(self.x.shape), out[self.x.size :].reshape(slots, *self.state.shape)

    def expected(self):
        _, _, heads, groups = self.sizes
        b, c = (a.astype(np.float64)[:, :, np.arange(heads) // (heads // groups)] for a in (self.b, self.c))
        state, outputs, states = self.state.astype(np.float64), [], []
        for t in range(self.dt.shape[1]):
            step = np.logaddexp(0, self.dt[:, t].astype(np.float64))
            decay = np.exp(step * self.a)
            state = state * decay[..., None, None]
            state = state + (self.x[:, t] * step[..., None])[..., None] * b[:, t, :, None]
            outputs.append(np.einsum("shri,shi->shr", state, c[:, t]))
            states.append(state)
        return np.stack(outputs, 1), states


CASES = [
    *((Net, width, {"by_column": by_column}) for width in (16, 32, 64, 128) for by_column in (False, True)),
    *((Scan, width, {}) for width in (16, 32, 64, 128, 256)),
]


@pytest.mark.parametrize(("kind", "width", "more"), CASES)
def test_outputs_and_states_are_those_of_the_formulas(library, isa, kind, width, more):
    """With states of the last tokens kept: fewer than there are tokens, as many, and more."""
    case = kind(np.random.default_rng(3), width, **more)
    outputs, states = case.expected()
    for slots in (1, 3, 7, 9):
        out, kept = case.run(library, slots)
        np.testing.assert_allclose(out, outputs, rtol=2e-5, atol=2e-5 * np.abs(outputs).max())
        for slot in range(slots):
            if slot >= len(states):
                assert np.isnan(kept[slot]).all()
                continue
            np.testing.assert_allclose(kept[slot], states[-1 - slot], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("kind", "width", "more"), CASES)
def test_states_do_not_depend_on_the_batch_or_the_threads(library, isa, kind, width, more):
    case = kind(np.random.default_rng(4), width, **more)
    outputs, states = case.run(library, 7, 1)
    for n_threads in (2, 3, 5):
        out, kept = case.run(library, 7, n_threads)
        np.testing.assert_array_equal(out, outputs)
        np.testing.assert_array_equal(kept, states)
    for cut in (1, 4):
        first, kept = case.of_tokens(slice(0, cut)).run(library)
        rest = case.of_tokens(slice(cut, None))
        rest.state = kept[0].copy()
        second, kept = rest.run(library)
        np.testing.assert_array_equal(np.concatenate([first, second], 1), outputs)
        np.testing.assert_array_equal(kept[0], states[0])


def test_what_cannot_be_run_is_refused(library):
    out = np.zeros(1 << 16, np.float32)
    net, scan = Net(np.random.default_rng(1), 48), Scan(np.random.default_rng(1), 24)
    with pytest.raises(AssertionError):
        net.run(library)
    with pytest.raises(AssertionError):
        scan.run(library)
    for heads, key_heads, tokens, slots, decays in (
        (0, 1, 1, 1, 1), (3, 2, 1, 1, 1), (2, 2, 0, 1, 1), (2, 2, 1, 0, 1), (2, 2, 1, 1, 2),
    ):  # fmt: skip
        asked = DeltaNet(16, heads, key_heads, tokens, 1, slots, decays, *[address(out)] * 6)
        assert library.es_kernels_delta_net(ctypes.byref(asked), address(out), 1) == -1
