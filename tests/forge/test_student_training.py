"""Students: JAX computes what llama.cpp computes, their files are cut drafts, and they learn the target."""

# ruff: noqa: E402 - what needs JAX is imported where it is known to be there

from __future__ import annotations

from functools import partial

import gguf
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="students are trained with JAX: pip install 'edgespec[forge]'")
jnp = jax.numpy

import optax

from edgespec.errors import UsageError
from edgespec.forge.dataset import TrainingText
from edgespec.forge.training import arithmetic, student
from edgespec.forge.training.family import TrainingBatch
from edgespec.forge.training.student import StudentFamily, StudentSettings, choose_layers
from edgespec.forge.training.weights import ModelWeights
from edgespec.forge.vocabulary_cut import cut, read_vocabulary
from edgespec.llama.embeddings import Embeddings, read_cut
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.pull import hash_file
from tiny_gguf import N_WORDS, write_tiny_gguf

SHAPE = {"n_embd": 64, "n_ff": 96, "n_head": 4, "n_head_kv": 2, "n_layer": 4, "n_padding": 4}
HEADS = {"{arch}.attention.key_length": 32, "{arch}.attention.value_length": 32}
SOURCES = {
    "llama": {"extra": {"{arch}.rope.freq_base": 500.0}},
    "qwen2": {"vectors": {"attn_q.bias": 64, "attn_k.bias": 32, "attn_v.bias": 32}, "tied": True},
    "qwen3": {
        "vectors": {"attn_q_norm.weight": 32, "attn_k_norm.weight": 32},
        "extra": HEADS,
        "head_dim": 32,
    },
}
N_TARGET = 48  # width of the target's hidden states


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Factors of products are float32, as the library has them in files of float32."""
    monkeypatch.setattr(arithmetic, "FACTOR", jnp.float32)
    monkeypatch.setattr(student, "FACTOR", jnp.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")

    def get(architecture):
        path = folder / f"{architecture}.gguf"
        if not path.exists():
            write_tiny_gguf(path, architecture=architecture, seed=3, **SHAPE, **SOURCES[architecture])
        return ModelWeights(check_model_file(path))

    return get


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    shape = {**SHAPE, "n_embd": N_TARGET, "n_head": 3, "n_head_kv": 1}
    return ModelWeights(check_model_file(write_tiny_gguf(path, seed=5, **shape)))


def kept(source):
    """Control tokens, single bytes, and a few others."""
    required = read_vocabulary(source.header).required
    return np.union1d(required, np.arange(N_WORDS - 20, N_WORDS - 4))


def make(source, target, **settings):
    return StudentFamily("whole", source, target, kept(source), StudentSettings(**settings))


def batch_of(student, target, lengths=((20, 6), (24, 5)), n_rows=2, seed=0):
    """Rows of two texts and padding; features that make the target rather sure of the next token."""
    rng = np.random.default_rng(seed)
    columns, answers_most = sum(n for n, _ in lengths) + 3, sum(n for n, _ in lengths)
    tokens = np.zeros((n_rows, columns), np.int32)
    text = np.full((n_rows, columns), -1, np.int32)
    answers = np.zeros((n_rows, answers_most), np.int32)
    weights = np.zeros((n_rows, answers_most), np.float32)
    features = np.zeros((n_rows, columns, N_TARGET), np.float16)
    output = target.rows(target.output)
    for r in range(n_rows):
        at = n = 0
        for i, (length, n_prompt) in enumerate(lengths):
            tokens[r, at : at + length] = rng.choice(student.token_ids, length)
            text[r, at : at + length] = i
            learnt = np.arange(at + n_prompt - 1, at + length - 1)
            toward = output[tokens[r, learnt + 1]]
            features[r, learnt] = 12 * toward / np.square(toward).sum(1, keepdims=True)
            answers[r, n : n + len(learnt)] = learnt
            weights[r, n : n + len(learnt)] = 1
            at, n = at + length, n + len(learnt)
    return TrainingBatch(tokens, student.embed(tokens), features, text, answers, weights)


def library_logits(path, tokens):
    """What the pinned llama.cpp computes of the file: all tokens in one pass."""
    made = read_cut(check_model_file(path))
    with (
        Model(path, kernels=False) as model,
        Session(model, n_ctx=64, n_threads=1, embeddings=Embeddings(made)) as session,
    ):
        return session.eval(tokens.tolist(), n_logits=len(tokens)).copy()


def changed(params, seed=1):
    """The parameters after some training, as it were."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(0, 1, x.shape) / np.sqrt(x.shape[0]), params)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"layers": (0, 2, 3)}, {"rank": 4}], ids=str)
@pytest.mark.parametrize("architecture", SOURCES)
def test_llama_cpp_computes_the_same_of_the_file(source, target, tmp_path, architecture, settings):
    one = make(source(architecture), target, **settings)
    params = changed(one.init(jax.random.key(0)))
    batch = batch_of(one, target)
    logits = np.asarray(one.logits(params, one.frozen, batch)).reshape(*batch.answers.shape, -1)
    one.export(params, tmp_path / "student.gguf", "f32")
    header = check_model_file(tmp_path / "student.gguf")
    assert header.n_layer == len(settings.get("layers", range(4)))
    for r in range(2):
        for number in range(2):
            columns = np.flatnonzero(batch.text[r] == number)
            theirs = library_logits(header.path, batch.tokens[r, columns])
            own = (batch.weights[r] > 0) & (batch.text[r][batch.answers[r]] == number)
            mine = logits[r][own]
            assert np.allclose(mine, theirs[batch.answers[r][own] - columns[0]], atol=0.02), (r, number)
            assert np.abs(mine).max() > 1


@pytest.mark.slow
def test_the_parts_of_llama_3_rope(tmp_path, source, target):
    """Frequencies that a file divides by factors of its own."""
    path = write_with_factors(tmp_path / "factors.gguf", source("llama").header.path)
    one = make(ModelWeights(check_model_file(path)), target)
    params, batch = one.init(jax.random.key(0)), batch_of(one, target, lengths=((40, 5), (4, 2)))
    one.export(params, tmp_path / "student.gguf", "f32")
    theirs = library_logits(tmp_path / "student.gguf", batch.tokens[0, :40])
    mine = np.asarray(one.logits(params, one.frozen, batch)).reshape(*batch.answers.shape, -1)[0, :35]
    assert np.allclose(mine, theirs[4:39], atol=0.02)
    plain = make(source("llama"), target)
    other = np.asarray(plain.logits(params, plain.frozen, batch)).reshape(*batch.answers.shape, -1)[0, :35]
    assert not np.allclose(mine, other, atol=0.1)


def write_with_factors(path, source):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.architecture")):
            continue
        kind = field.types[0]
        writer.add_key_value(
            field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None
        )
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 6, 8, dtype=np.float32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("type_", ["q8_0", "q4_0", "f16"])
def test_untrained_it_is_the_cut_model_requantized(source, target, tmp_path, type_):
    """Byte for byte what quantizing the whole file and cutting it gives."""
    one = make(source("qwen2"), target)
    params = one.init(jax.random.key(0))
    one.export(params, tmp_path / "student.gguf", type_)
    whole = tmp_path / "whole.gguf"
    quantize(one._source.header.path, whole, type_, pure=True)
    cut(check_model_file(whole), tmp_path / "cut.gguf", one.token_ids, source_sha256=hash_file(whole))
    mine, theirs = (
        {t.name: t for t in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors} for name in ("student", "cut")
    )
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.tensor_type == theirs[name].tensor_type
        assert np.array_equal(tensor.data, theirs[name].data), name


@pytest.mark.slow
def test_the_layers_that_are_left_out_are_those_missed_least(tmp_path, target):
    """Of this source two layers in a row do nothing at all."""
    path = write_tiny_gguf(tmp_path / "source.gguf", **{**SHAPE, "n_layer": 6, "n_padding": 4})
    idle = {f"blk.{i}.{part}.weight" for i in (2, 3) for part in ("attn_output", "ffn_down")}
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name in idle:
            tensor.data[:] = 0
        elif tensor.name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensor.data[:] *= 4
    del reader
    source = ModelWeights(check_model_file(path))
    # A target that says what all layers of the source say: its features are the source's own.
    ids = kept(source)
    whole = StudentFamily("whole", source, source, ids)
    params = whole.init(jax.random.key(0))
    texts = []
    for seed in range(3):
        tokens = np.random.default_rng(seed).choice(ids, 40).astype(np.int32)
        x, text = jnp.asarray(whole.embed(tokens[None]), jnp.float32), jnp.zeros((1, 40), jnp.int32)
        hidden = whole._decoder.hidden(params["layers"], x, text)[0, :-1]
        features = np.asarray(arithmetic.rms_norm(hidden, params["norm"], 1e-5)).astype(np.float16)
        texts.append(TrainingText(tokens, 5, 0, features, 0.0, "prompt:built-in", seed))
    assert choose_layers(source, source, ids, texts, 4) == (0, 1, 4, 5)
    assert set(choose_layers(source, source, ids, texts, 5)) in ({0, 1, 2, 4, 5}, {0, 1, 3, 4, 5})
    for n in (1, 6):
        with pytest.raises(UsageError, match="2 to 5 of the model's 6 layers"):
            choose_layers(source, source, ids, texts, n)


def test_a_shallow_student_has_the_layers_it_was_given(source, target, tmp_path):
    layers = (0, 2, 3)
    one = make(source("llama"), target, layers=layers)
    one.export(one.init(jax.random.key(0)), tmp_path / "student.gguf", "f32")
    made = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "student.gguf").tensors}
    for mine, theirs in enumerate(layers):
        assert np.array_equal(
            made[f"blk.{mine}.ffn_up.weight"], one._source.rows(f"blk.{theirs}.ffn_up.weight")
        )
    assert not any(name.startswith("blk.3.") for name in made)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"rank": 8}, {"rank": 8, "output": False}], ids=str)
def test_it_learns_what_the_target_says(source, target, settings):
    one = make(source("qwen2"), target, layers=(0, 3), **settings)
    batch = jax.tree.map(jnp.asarray, batch_of(one, target))
    params, key = one.init(jax.random.key(0)), jax.random.key(1)
    gradients = jax.jit(jax.value_and_grad(one.loss))
    optimizer = optax.adam(1e-2)
    moments, losses = optimizer.init(params), []
    for _ in range(100):
        loss, gradient = gradients(params, one.frozen, batch, key)
        losses.append(float(loss))
        updates, moments = optimizer.update(gradient, moments)
        params = optax.apply_updates(params, updates)
    assert losses[-1] < 0.5 * losses[0]
    assert ("output" in params) == settings.get("output", True)


def test_the_loss_is_the_divergence_over_the_kept_tokens(source, target):
    one = make(source("llama"), target)
    batch, params = batch_of(one, target), changed(one.init(jax.random.key(0)))
    loss = one.loss(params, one.frozen, batch, jax.random.key(0))
    own = batch.weights.reshape(-1) > 0
    q = np.asarray(one.logits(params, one.frozen, batch), np.float64)[own]
    rows = np.arange(2)[:, None]
    features = batch.features[rows, batch.answers].reshape(-1, N_TARGET)[own]
    p = features.astype(np.float64) @ target.rows(target.output, one.token_ids).T
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    assert float(loss) == pytest.approx((np.exp(p) * (p - q)).sum(1).mean(), rel=1e-3)


@pytest.mark.slow
def test_a_change_of_low_rank_begins_as_no_change(source, target):
    whole, narrow = (make(source("llama"), target, rank=rank) for rank in (None, 4))
    batch = batch_of(whole, target)
    a, b = (np.asarray(one.logits(one.init(jax.random.key(0)), one.frozen, batch)) for one in (whole, narrow))
    assert np.allclose(a, b, atol=1e-4)
    sizes = [sum(x.size for x in jax.tree.leaves(one.init(jax.random.key(0)))) for one in (whole, narrow)]
    assert sizes[1] < sizes[0] / 4


def test_walks_are_right_where_each_likeliest_token_is_the_texts(source, target):
    one = make(source("llama"), target)
    batch, params = batch_of(one, target), one.init(jax.random.key(0))
    likeliest = one.token_ids[np.asarray(one.logits(params, one.frozen, batch)).argmax(-1)]
    likeliest = likeliest.reshape(batch.answers.shape)
    right = np.asarray(one.rollout(params, one.frozen, batch, 3))
    answered = batch.weights > 0
    following = batch.tokens[np.arange(2)[:, None], batch.answers + 1]
    for r, i in zip(*np.nonzero(answered), strict=True):
        for step in range(3):
            if i + step < answered.shape[1] and answered[r, i + step]:
                assert right[r, i, step] == (likeliest[r, i + step] == following[r, i + step])
    assert right.shape == (*batch.answers.shape, 3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"architecture": "gemma3"}, "a gemma3 model; only plain llama, qwen2, qwen3 models can be trained"),
        ({"vectors": {"attn_norm_2.weight": 64}}, r"its layers have or lack attn_norm_2\.weight"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, r"RoPE is scaled \(yarn\)"),
        ({"extra": {"llama.attention.value_length": 32}}, "RoPE turns a part of each head, or"),
    ],
)
def test_what_cannot_be_trained(tmp_path, target, options, problem):
    path = write_tiny_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(UsageError, match=problem):
        make(ModelWeights(check_model_file(path)), target)


def test_a_type_that_weights_cannot_have(source, target, tmp_path):
    one = make(source("llama"), target)
    export = partial(one.export, one.init(jax.random.key(0)), tmp_path / "student.gguf")
    with pytest.raises(UsageError, match="unknown type of tensors 'q4_k_m'"):
        export("q4_k_m")
    assert not list(tmp_path.iterdir())
    export("q3_k")  # rows of 64 are no whole blocks of it
    assert {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "student.gguf").tensors} == {"Q8_0", "F32"}
