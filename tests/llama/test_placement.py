"""Layers of a model on nodes that are processes of their own: the bits are those of one process."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.errors import NodeLost
from edgespec.llama.gguf_header import read_header
from edgespec.llama.placement import Placement, RemoteLayers
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from running_node import node, placement
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny

TOKENS = [1, *np.random.default_rng(3).integers(5, 90, 40).tolist()]
TREE = [-1, 0, 1, 0, -1, 4]


@pytest.fixture(scope="session")
def deep_path(tmp_path_factory):
    """A model of four layers with matrices that edgespec's kernels take."""
    folder = tmp_path_factory.mktemp("deep")
    source = write_tiny_gguf(
        folder / "f32.gguf", n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, tied=True
    )
    quantize(source, folder / "q4_k_m.gguf", "q4_k_m")
    return folder / "q4_k_m.gguf"


def written(model):
    """Rows of logits of all that a session does, and the state that it could be copied with."""
    with Session(model, n_ctx=256, n_threads=1, n_batch=16) as session:
        rows = [session.eval(TOKENS).copy(), session.eval([7]).copy()]
        if model.can_rewind and not model.keeps_state:
            rows.append(session.eval([9, *[11, 12, 13, 14, 15, 16]], n_logits=7, parents=TREE).copy())
        session.rewind(session.rewind(30))
        rows.append(session.eval([*TOKENS[session.n_past :], 5]).copy())
        state, timeline, copies = session.state(), session.tokens, session.copies()
        rows.append(session.eval([17, 18, 19], n_logits=3).copy())
    with Session(model, n_ctx=512, n_threads=2, n_batch=32) as larger:
        larger.restore(state, timeline, copies)
        rows.append(larger.eval([17, 18, 19], n_logits=3).copy())
    np.testing.assert_array_equal(rows[-1], rows[-2])
    return np.concatenate(rows)


def test_layers_on_one_node_and_on_two(kernels, tmp_path, deep_path):
    with Model(deep_path) as model:
        here = written(model)
    with node(tmp_path, kernels=True) as (first, _), node(tmp_path, kernels=True) as (second, _):
        for where in (
            placement(2, (first, 2)),
            placement(0, (second, 4)),
            placement(1, (first, 1), (second, 2)),
        ):
            with Model(deep_path, placement=where) as model:
                n_home = 7 * where.n_home + 1  # matrices of a layer, and the output's
                assert len(model.packed) == n_home
                np.testing.assert_array_equal(written(model), here)


@pytest.mark.parametrize("name", ["qwen3moe", "rwkv7", "qwen35", "gemma3n", "falcon-h1", "lfm2"])
def test_architectures(kernels, tmp_path, name):
    path = make_tiny(name, tmp_path / "tiny.gguf", weights_type="q8_0")
    with Model(path) as model:
        here = written(model)
    n_layers = read_header(path).n_layer
    with (
        node(tmp_path, kernels=True) as (ready, _),
        Model(path, placement=placement(n_layers - 1, (ready, 1))) as model,
    ):
        np.testing.assert_array_equal(written(model), here)


def test_a_port_where_nothing_listens_is_one_line(deep_path):
    nowhere = Placement(2, (RemoteLayers("board1", "127.0.0.1:9", 2),))
    with pytest.raises(NodeLost, match=r"the node board1 is lost: Connection refused; look whether"):
        Model(deep_path, placement=nowhere)


def test_a_placement_of_another_model_is_refused(deep_path):
    with pytest.raises(ValueError, match="a placement of 3 layers for a model of 4"):
        Model(deep_path, placement=Placement(1, (RemoteLayers("board1", "127.0.0.1:9", 2),)))
