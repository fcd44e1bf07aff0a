"""Checkpoints and the optimizer: no damage goes unseen, and steps have the length they should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgespec.apps.forge.training import loop
from edgespec.apps.forge.training.loop import orthogonal

TREE = {"matrix": np.arange(40, dtype=np.float32).reshape(8, 5), "deep": {"number": np.float32(3)}}


def test_any_damage_is_found(tmp_path):
    path = tmp_path / loop.CHECKPOINT
    loop.write_arrays(path, TREE, {"n": 3})
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.choice(len(sound), 200, replace=False):
        data = bytearray(sound)
        data[at] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:  # what says nothing of the arrays, such as the time of a file, may be wrong
            tree, facts = loop.read_arrays(path, TREE)
        except loop.DamagedFileError:
            continue
        assert facts == {"n": 3}
        jax.tree.map(np.testing.assert_array_equal, tree, TREE)
    for n in (0, 1, len(sound) // 2, len(sound) - 1):
        path.write_bytes(sound[:n])
        with pytest.raises(loop.DamagedFileError):
            loop.read_arrays(path, TREE)
    path.write_bytes(sound + bytes(32))  # earlier versions wrote a checksum after the zip
    tree, facts = loop.read_arrays(path, TREE)
    assert facts == {"n": 3}
    jax.tree.map(np.testing.assert_array_equal, tree, TREE)


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32)])
def test_muon_steps_are_equally_long_in_all_directions(shape):
    rng = np.random.default_rng(1)
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = np.geomspace(1.0, 0.05, min(shape))
    found = np.asarray(orthogonal(jnp.asarray((u * values) @ v, jnp.float32)))
    lengths = np.diag(u.T @ found @ v.T) / max(1.0, shape[1] / shape[0]) ** 0.5
    assert lengths.min() > 0.4
    assert lengths.max() < 1.4
    assert np.abs(u.T @ found @ v.T - np.diag(np.diag(u.T @ found @ v.T))).max() < 0.1
