"""Products of a matrix with 8 bits a number, by the kernels and by the C core."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from edgespec.drafting.heads.matrices import EightBitMatrix
from edgespec.llama import kernels

pytestmark = pytest.mark.proof


@pytest.fixture(params=["kernels", "core"])
def plugin(request):
    found = kernels.load().plugin
    if request.param == "core":
        return None
    if found is None:
        pytest.skip("the kernels are not used on this processor")
    return found


def _floats(*shape, seed=1):
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (33, 256), (7, 32)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_products_are_those_of_the_matrix(plugin, rows, columns, n_threads):
    floats, vectors = _floats(rows, columns), _floats(5, columns, seed=2)
    matrix = EightBitMatrix(floats, n_threads, plugin)
    out = np.empty((5, rows), np.float32)
    matrix.multiply(vectors, out)
    # Half a step of 127 for each number of both, added up as random errors are.
    step = np.abs(floats).max() / 254 + np.abs(vectors).max() / 254
    assert np.abs(out - vectors @ floats.T).max() < 3 * step * np.sqrt(columns)
    alone = np.empty((1, rows), np.float32)
    for vector, row in zip(vectors, out, strict=True):
        matrix.multiply(vector[None], alone)
        assert np.array_equal(alone[0], row)


def test_its_memory_outlives_the_floats_and_is_freed_once(plugin):
    matrix = EightBitMatrix(_floats(16, 32), 1, plugin)
    gc.collect()
    out = np.full((1, 16), np.nan, np.float32)
    matrix.multiply(np.zeros((1, 32), np.float32), out)
    assert not out.any()
    del matrix
    gc.collect()


@pytest.mark.parametrize(
    ("vectors", "out"),
    [
        (np.zeros((1, 64), np.float32), np.zeros((1, 16), np.float32)),
        (np.zeros((1, 32), np.float32), np.zeros((1, 15), np.float32)),
        (np.zeros((2, 32), np.float32), np.zeros((1, 16), np.float32)),
        (np.zeros((0, 32), np.float32), np.zeros((0, 16), np.float32)),
        (np.zeros((1, 32), np.float64), np.zeros((1, 16), np.float32)),
        (np.zeros((1, 64), np.float32)[:, ::2], np.zeros((1, 16), np.float32)),
    ],
)
def test_vectors_that_do_not_fit_are_refused(vectors, out):
    plugin = kernels.load().plugin
    if plugin is None:
        pytest.skip("the kernels are not used on this processor")
    with pytest.raises(ValueError, match=r"contiguous|not of this matrix"):
        EightBitMatrix(_floats(16, 32), 1, plugin).multiply(vectors, out)
