"""A cut output vocabulary: the same logits for what is kept, any token as input, and the target's text."""

from __future__ import annotations

from collections import Counter

import gguf
import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.foreign.vocabulary_match import compare_vocabularies
from edgespec.errors import EdgespecError, UsageError
from edgespec.forge.vocabulary_cut import check_source, cut, read_vocabulary
from edgespec.llama.embeddings import Embeddings, read_cut
from edgespec.llama.gguf_header import check_model_file, read_header
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.pull import hash_file
from reference import filtered_probs
from tiny_gguf import BOS, CONTROL_TOKENS, EOS, MERGES, N_WORDS, vocabulary, write_tiny_gguf

N_VOCAB = N_WORDS + len(CONTROL_TOKENS)
NEWLINE = vocabulary()[0].index("\u010a")

HEADS = {"{arch}.attention.key_length": 64, "{arch}.attention.value_length": 64}
SHAPE = {"n_embd": 256, "n_ff": 256}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"vectors": {"attn_q.bias": 256, "attn_k.bias": 128, "attn_v.bias": 128}},
    "qwen3": {"vectors": {"attn_q_norm.weight": 64, "attn_k_norm.weight": 64}, "extra": HEADS},
    "gemma3": {
        "vectors": {
            "attn_q_norm.weight": 64,
            "attn_k_norm.weight": 64,
            "post_attention_norm.weight": 256,
            "post_ffw_norm.weight": 256,
        },
        "extra": HEADS,
    },
}


def some_ids(n: int = 48) -> np.ndarray:
    """Control tokens, the newline that llama.cpp looks up, and others: a multiple of 16."""
    others = np.random.default_rng(4).permutation(np.setdiff1d(np.arange(N_WORDS), [NEWLINE]))
    needed = [NEWLINE, *range(N_WORDS, N_VOCAB)]
    return np.sort(np.concatenate([needed, others[: n - len(needed)]]))


def make_cut(source, path, ids):
    cut(check_model_file(source), path, ids, source_sha256=hash_file(source))
    return read_cut(read_header(path))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A file of an architecture, in a quantization; each is made once."""
    folder = tmp_path_factory.mktemp("quantized")

    def get(architecture="llama", type_="q8_0", tied=False):
        path = folder / f"{architecture}-{type_}-{tied}.gguf"
        if not path.exists():
            source = folder / "source.gguf"
            write_tiny_gguf(
                source,
                architecture=architecture,
                tied=tied,
                n_padding=4,
                **SHAPE,
                **ARCHITECTURES[architecture],
            )
            quantize(source, path, type_)
        return path

    return get


def same_logits(source, path, ids):
    """Whether the cut model's logits are the full one's at the kept ids: passes of many tokens and of one."""
    made = make_cut(source, path, ids)
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, 60).tolist()
    assert set(tokens) - set(ids.tolist()), "tokens go in that cannot come out"
    with (
        Model(source) as full,
        Model(path) as small,
        Session(full, n_ctx=64, n_threads=1) as a,
        Session(small, n_ctx=64, n_threads=1, embeddings=Embeddings(made)) as b,
    ):
        assert small.n_vocab == len(ids)
        for part in (tokens[:40], tokens[40:41], tokens[41:45], tokens[45:]):
            theirs = a.eval(part, n_logits=len(part))
            mine = b.eval(part, n_logits=len(part))
            if not np.array_equal(theirs[:, ids], mine):
                return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_what_is_kept_are_the_full_models(quantized, tmp_path, architecture, tied):
    assert same_logits(quantized(architecture, "q8_0", tied), tmp_path / "cut.gguf", some_ids())


@pytest.mark.slow
@pytest.mark.parametrize("type_", ["q4_0", "q4_1", "q5_0", "q4_k_m", "q6_k", "q2_k", "iq4_nl"])
def test_logits_in_each_quantization(quantized, tmp_path, type_):
    assert same_logits(quantized(type_=type_), tmp_path / "cut.gguf", some_ids())


@pytest.mark.parametrize("type_", ["q4_0", "q4_k_m"])
def test_logits_with_the_kernels(kernels, quantized, tmp_path, type_):
    assert same_logits(quantized(type_=type_), tmp_path / "cut.gguf", some_ids())
    with Model(tmp_path / "cut.gguf") as model:
        assert model.uses_kernels


@pytest.mark.parametrize("type_", ["f32", "f16", "bf16"])
def test_embeddings_of_floats(quantized, tmp_path, type_):
    """Rows as the gguf package has them. Logits may differ in the last bits: sums go by tiles of rows."""
    source = quantized(type_=type_)
    made = make_cut(source, tmp_path / "cut.gguf", some_ids())
    matrix = next(t for t in gguf.GGUFReader(source).tensors if t.name == "token_embd.weight")
    want = gguf.dequantize(matrix.data, matrix.tensor_type)
    tokens = [0, 5, N_VOCAB - 1, 5]
    assert np.array_equal(Embeddings(made)(tokens), want[tokens])


def test_the_scale_of_gemma(quantized, tmp_path):
    source = quantized("gemma3")
    made = make_cut(source, tmp_path / "cut.gguf", some_ids())
    matrix = next(t for t in gguf.GGUFReader(source).tensors if t.name == "token_embd.weight")
    assert np.array_equal(
        Embeddings(made)([7]), gguf.dequantize(matrix.data, matrix.tensor_type)[[7]] * np.float32(16)
    )


def test_what_the_file_says(quantized, tmp_path):
    source, path, ids = quantized(), tmp_path / "cut.gguf", some_ids()
    made = make_cut(source, path, ids)
    assert made.source_sha256 == hash_file(source)
    assert made.n_vocab == N_VOCAB + 4
    assert made.token_ids.tolist() == ids.tolist()
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(path)

    def value(reader, key):
        return reader.fields[key].contents()

    texts, kinds = vocabulary(4)
    kept = [texts[i] for i in ids]
    assert value(new, "tokenizer.ggml.tokens") == kept
    assert value(new, "tokenizer.ggml.token_type") == [kinds[i] for i in ids]
    assert kept[value(new, "tokenizer.ggml.eos_token_id")] == texts[EOS]
    assert kept[value(new, "tokenizer.ggml.bos_token_id")] == texts[BOS]
    merges = value(new, "tokenizer.ggml.merges")
    assert merges == [m for m in MERGES if {*m.split(), m.replace(" ", "")} <= set(kept)]
    assert value(new, "llama.vocab_size") == len(ids)
    changed = {"tokens", "token_type", "merges", "eos_token_id", "bos_token_id"}
    for key in old.fields:
        if (
            not key.startswith("GGUF.")
            and key != "llama.vocab_size"
            and key.rpartition(".")[2] not in changed
        ):
            assert value(new, key) == value(old, key), key
    tensors = {tensor.name: tensor for tensor in new.tensors}
    assert list(tensors) == [tensor.name for tensor in old.tensors]
    for tensor in old.tensors:
        rows = tensor.data[ids] if tensor.name in ("token_embd.weight", "output.weight") else tensor.data
        assert np.array_equal(tensors[tensor.name].data, rows), tensor.name


def test_what_every_cut_keeps(tmp_path):
    source = write_tiny_gguf(tmp_path / "m.gguf", n_padding=3, kinds={260: int(gguf.TokenType.USER_DEFINED)})
    found = read_vocabulary(check_model_file(source))
    assert found.n_vocab == N_VOCAB + 3
    assert found.required.tolist() == [*range(256), 260, *range(N_WORDS, N_VOCAB)]
    assert found.unused.tolist() == [N_VOCAB, N_VOCAB + 1, N_VOCAB + 2]


def test_ordinary_models_are_not_cut(tiny_path):
    assert read_cut(read_header(tiny_path)) is None


def test_a_file_without_its_embeddings(quantized, tmp_path):
    path = tmp_path / "cut.gguf"
    made = make_cut(quantized(), path, some_ids())
    path.write_bytes(path.read_bytes()[: made.offset])
    check_model_file(path)  # to others it is complete
    with pytest.raises(EdgespecError, match="embeddings after its last tensor are missing"):
        read_cut(read_header(path))


def test_metadata_that_is_incomplete(tmp_path):
    path = write_tiny_gguf(tmp_path / "odd.gguf", extra={"edgespec.draft.n_vocab": 12})
    with pytest.raises(EdgespecError, match=r"odd\.gguf: damaged: incomplete .* `edgespec draft make`"):
        read_cut(read_header(path))


def test_what_cannot_be_cut(quantized, tmp_path):
    make_cut(quantized(), tmp_path / "cut.gguf", some_ids())
    with pytest.raises(UsageError, match="its vocabulary is cut already"):
        check_source(check_model_file(tmp_path / "cut.gguf"))
    other = write_tiny_gguf(tmp_path / "other.gguf", architecture="granite")
    with pytest.raises(UsageError, match=r"a granite model; the vocabulary can be cut of llama, qwen2"):
        check_source(check_model_file(other))
    check_source(check_model_file(quantized()))


def test_a_file_that_cannot_be_written(quantized, tmp_path):
    with pytest.raises(EdgespecError, match=r"cannot write .*no/cut\.gguf"):
        make_cut(quantized(), tmp_path / "no" / "cut.gguf", some_ids())
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(EdgespecError, match="cannot write"):
        make_cut(quantized(), tmp_path / "folder.gguf", some_ids())
    assert [path.name for path in tmp_path.iterdir()] == ["folder.gguf"], "no half of a file"


def test_a_draft_model_speaks_the_full_vocabulary(quantized, tmp_path):
    source, ids = quantized(), some_ids()
    made = make_cut(source, tmp_path / "cut.gguf", ids)
    tokens = list(range(40, 60))
    with Model(source) as full, Model(made.path) as small:
        a = DraftModel(Session(full, n_ctx=64, n_threads=1), n_vocab=N_VOCAB)
        session = Session(small, n_ctx=64, n_threads=1, embeddings=Embeddings(made))
        b = DraftModel(session, n_vocab=N_VOCAB, cut=made)
        assert a.n_vocab == b.n_vocab == N_VOCAB
        for draft in (a, b):
            draft.begin()
            draft.read(tokens)
        theirs, mine = a.run(tokens, [3, 270]), b.run(tokens, [3, 270])
        assert np.array_equal(b.ids, ids) and a.ids is None
        assert np.array_equal(mine, theirs[:, ids])
        whole = b.whole(mine[0])
        assert np.array_equal(whole[ids], mine[0])
        assert np.isneginf(np.delete(whole, ids)).all()
        assert np.array_equal(a.whole(theirs[0]), theirs[0])
    with Model(made.path) as small, Session(small, n_ctx=64, n_threads=1, embeddings=Embeddings(made)) as one:
        few = DraftModel(one, n_vocab=int(ids[20]), cut=made)
        assert np.array_equal(few.ids, ids[:20]), "the others are none of the target's"
        assert few.run(tokens).shape == (1, 20)


def test_it_is_of_the_full_vocabulary(quantized, tmp_path, tiny_target):
    ids = some_ids()
    made = make_cut(quantized(), tmp_path / "cut.gguf", ids)
    with Model(made.path) as draft:
        match = compare_vocabularies(tiny_target, draft)
    assert match.equal, match.reason
    assert match.n_common == N_VOCAB

    stranger = write_tiny_gguf(tmp_path / "stranger.gguf", texts={int(ids[7]): "strange"})
    with Model(stranger) as target, Model(made.path) as draft:
        match = compare_vocabularies(target, draft)
        assert not match.equal
        assert f"first difference at id {ids[7]}: 'strange'" in match.reason
    with pytest.raises(EdgespecError, match="choose the model that it was cut from"):
        Engine(stranger, made.path, kernels="off")
    kinds = {int(ids[7]): int(gguf.TokenType.CONTROL)}
    with (
        Model(write_tiny_gguf(tmp_path / "control.gguf", kinds=kinds)) as target,
        Model(made.path) as draft,
    ):
        assert "is a control token in one of them only" in compare_vocabularies(target, draft).reason
    with Model(write_tiny_gguf(tmp_path / "eos.gguf", eos=BOS)) as target, Model(made.path) as draft:
        assert "EOS is" in compare_vocabularies(target, draft).reason


def test_it_is_no_target(quantized, tmp_path):
    make_cut(quantized(), tmp_path / "cut.gguf", some_ids())
    with pytest.raises(UsageError, match="it cannot be a target"):
        Engine(tmp_path / "cut.gguf", drafter="none", kernels="off")


@pytest.fixture(scope="module")
def pair_of_cut(tmp_path_factory, quantized):
    """A target that is unsure, and a draft that knows a sixth of its tokens."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_gguf(folder / "target.gguf", seed=7, peak=0.7)
    make_cut(quantized(), folder / "draft.gguf", some_ids())
    with Engine(target, folder / "draft.gguf", kernels="off", n_threads=1, profile=False) as engine:
        yield engine


@pytest.mark.parametrize("prompt", ["hello", "the wind", "in and on"])
def test_greedy_text_is_the_targets(pair_of_cut, prompt):
    params = SamplingParams(temperature=0)
    plain = pair_of_cut.generate(prompt, params=params, n_predict=80, gamma=0, chat=False)
    drafted = pair_of_cut.generate(prompt, params=params, n_predict=80, gamma=3, drafter="model", chat=False)
    assert drafted.stats.n_drafted > 0
    assert drafted.token_ids == plain.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["match", "block"])
def test_what_is_sampled_is_distributed_as_the_target_alone_would(pair_of_cut, rule):
    """Chi-square over three tokens; the draft has q = 0 for most of what the target may say."""
    params = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)
    prompt, n_runs = pair_of_cut.target.tokenize("hello", add_special=True, parse_special=False), 1500
    expected = {}
    with Session(pair_of_cut.target, n_ctx=64, n_threads=1) as session:
        level = {(): 1.0}
        for _ in range(3):
            longer = {}
            for tokens, chance in level.items():
                session.clear()
                p = filtered_probs(session.eval([*prompt, *tokens])[0], params, ())
                longer |= {(*tokens, int(t)): chance * p[t] for t in np.flatnonzero(p)}
            level = longer
        expected = level
    known = set(some_ids().tolist())
    assert any(not set(tokens) & known for tokens in expected)
    seen = Counter()
    for seed in range(n_runs):
        result = pair_of_cut.generate(
            prompt, params=params, n_predict=3, gamma=2, drafter="model", rule=rule, seed=seed
        )
        seen[tuple(result.token_ids)] += 1
    ended = {tokens for tokens in seen if len(tokens) < 3}
    assert not ended, "no token of these ends the text"
    assert set(seen) <= set(expected)
    chi = sum((seen[tokens] - n_runs * p) ** 2 / (n_runs * p) for tokens, p in expected.items())
    n = len(expected)
    assert chi < n + 5 * np.sqrt(2 * n), f"{chi:.0f} with {n} outcomes"


@pytest.mark.pair
@pytest.mark.slow
def test_the_real_draft_cut(pair, tmp_path):
    """At temperature 0 the text is the target's, and most of what is drafted is accepted."""
    target, source = pair
    required = read_vocabulary(check_model_file(source)).required
    make_cut(source, tmp_path / "cut.gguf", np.union1d(required, np.arange(32746)))
    params = SamplingParams(temperature=0)
    with Engine(target, tmp_path / "cut.gguf", profile=False) as engine:
        for prompt in ("Write a quicksort in Python.", "Explain to a child why the sky is blue."):
            plain = engine.generate(prompt, params=params, n_predict=32, gamma=0)
            drafted = engine.generate(prompt, params=params, n_predict=32, gamma=3, drafter="model")
            print(f"alpha {drafted.stats.alpha:.2f}")
            assert drafted.stats.n_accepted > 0.4 * drafted.stats.n_drafted
            if engine.target.uses_kernels:  # stock kernels sum in another order for each size of a batch
                assert drafted.token_ids == plain.token_ids
