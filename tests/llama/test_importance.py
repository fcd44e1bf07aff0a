"""Importance of columns: against products by hand, from llama.cpp's files, and into types that ask for it."""

from __future__ import annotations

import re
import struct

import gguf
import numpy as np
import pytest

from edgespec.apps.forge.importance import CHUNK, measure_importance, read_importance
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.kernels import load
from edgespec.llama.quantize import ASK_IMPORTANCE, quantize
from edgespec.llama.weights import Model
from tiny_architectures import write_architecture
from tiny_models import make_tiny

TOKENS = np.random.default_rng(2).integers(0, 256, 2 * CHUNK + 9).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("importance")
    experts = make_tiny("qwen3moe", directory / "experts.gguf")
    return {"llama": write_architecture(directory, "llama", CHUNK), "qwen3moe": experts}


def numbers(path, name):
    return next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)


def test_the_first_layers_columns_by_hand(models):
    path, told = models["llama"], []
    found = measure_importance(
        path, [TOKENS[:700], TOKENS[700:]], n_threads=2, on_progress=lambda *now: told.append(now)
    )
    rows = numbers(path, "token_embd.weight")[TOKENS[: 2 * CHUNK]].astype(np.float64)
    normed = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5)
    expected = (normed * numbers(path, "blk.0.attn_norm.weight")) ** 2
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], expected.mean(0), rtol=1e-3)
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"], found["blk.0.attn_v.weight"])
    assert found["blk.0.ffn_down.weight"].shape == (512,)
    assert told == [(CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK)]


def test_experts_have_columns_of_their_own(models):
    path = models["qwen3moe"]
    found = measure_importance(path, [TOKENS], n_threads=2)
    down = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down_exps.weight")
    columns, _, n_experts = (int(n) for n in down.shape)
    experts = found["blk.0.ffn_down_exps.weight"].reshape(n_experts, columns)
    assert len(np.unique(experts.sum(1))) == n_experts
    quantize(path, path.with_suffix(".q.gguf"), "q4_0", importance=found)


@pytest.mark.parametrize("name", ["iq2_xs", "iq3_xxs"])
def test_types_that_ask_for_it(models, tmp_path, name):
    path, out = models["llama"], tmp_path / "out.gguf"
    assert name in ASK_IMPORTANCE
    if name != "iq3_xxs":
        with pytest.raises(UsageError, match=f"{name} asks for the importance of columns"):
            quantize(path, out, name)
    quantize(path, out, name, importance=measure_importance(path, [TOKENS], n_threads=2))
    with Model(out) as model:
        assert bool(model.packed) == load().available
    assert [one.name for one in tmp_path.iterdir()] == ["out.gguf"]


# ---- llama.cpp's files ----


def as_gguf(path, sums, counts):
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_string("general.type", "imatrix")
    for name, numbers in sums.items():
        writer.add_tensor(f"{name}.in_sum2", numbers)
        writer.add_tensor(f"{name}.counts", counts[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_dat(path, means, n_passes):
    data = struct.pack("<i", len(means))
    for name, row in means.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", n_passes, len(row))
        data += (row * n_passes).astype("<f4").tobytes()
    path.write_bytes(data)
    return path


def test_both_forms_of_file_hold_the_same(tmp_path):
    means = np.array([[1, 2, 3], [4, 5, 6], [1, 1, 1]], np.float32)
    counts = np.array([[2], [10], [0]], np.float32)
    new = read_importance(as_gguf(tmp_path / "a.gguf", {"x.weight": means * counts}, {"x.weight": counts}))
    old = read_importance(as_dat(tmp_path / "a.dat", {"x.weight": means.reshape(-1)}, 7))
    for found in (new, old):
        np.testing.assert_allclose(found["x.weight"], means.reshape(-1), rtol=1e-6)


def test_a_damaged_file_is_one_line(tmp_path):
    whole = as_dat(tmp_path / "a.dat", {"x.weight": np.ones(40, np.float32)}, 1).read_bytes()
    modern = as_gguf(
        tmp_path / "a.gguf",
        {"x.weight": np.ones((1, 40), np.float32)},
        {"x.weight": np.ones((1, 1), np.float32)},
    ).read_bytes()
    file = tmp_path / "cut"
    for data in (whole, modern):
        for n in range(0, len(data) - gguf.GGUF_DEFAULT_ALIGNMENT, 7):
            file.write_bytes(data[:n])
            with pytest.raises(EdgespecError) as refused:
                read_importance(file)
            assert "\n" not in str(refused.value)
            assert str(file) in str(refused.value)
    file.write_bytes(whole[:-4] + struct.pack("<f", float("nan")))
    with pytest.raises(EdgespecError, match=re.escape("x.weight holds numbers that are no mean squares")):
        read_importance(file)
    with pytest.raises(UsageError, match="no such file"):
        read_importance(tmp_path / "none")
