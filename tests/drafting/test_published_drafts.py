"""Published heads of every kind, tiny and random, beside tiny targets: the text, and what they read."""

from __future__ import annotations

import functools
import itertools
from contextlib import contextmanager

import gguf
import numpy as np
import pytest

import head_equations
from edgespec import Engine, SamplingParams
from edgespec.decoding.session import Forward, ForwardResult, TargetFeatures
from edgespec.drafting.acceptance import bucket_of
from edgespec.drafting.heads.blocks import BlockModel, rows_maker
from edgespec.drafting.heads.gemma import GemmaHead, LentCache, LentSession
from edgespec.drafting.heads.head import HeadModel
from edgespec.drafting.profile import ProfileKey, block_curve
from edgespec.errors import UsageError
from edgespec.llama.gguf_header import DRAFTS, check_model_file, read_header
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform import plugins
from head_files import N_EMBD, write_dflash, write_eagle, write_gemma
from measured_costs import measured
from reference import filtered_probs
from tiny_models import make_tiny
from tiny_states import tiny
from toy_models import chi_square_p_value
from toy_sessions import evaluate, run

TARGETS = ["llama", "qwen3", "qwen3moe", "openai-moe", "gemma4", "qwen35", "qwen3next", "lfm2", "nemotron-h"]
EAGLES = {
    "its own matrices": {},
    "the target's matrices": {"own": False},
    "cut vocabulary": {"kept": 200},
    "narrower": {"n_embd": 32, "kept": 250},
    "norms": {"norms": True},
}
BLOCKS = {
    "blocks": {},
    "blocks, cut vocabulary": {"kept": 200},
    "Markov": {"markov": 64},
    "Markov, cut vocabulary": {"markov": 24, "kept": 200},
    "Markov, from the first mask": {"markov": 64, "sample_from_anchor": False},
    "Markov, no confidence": {"markov": 64, "conf_proj.weight": None, "conf_proj.bias": None},
    "paths": {"top_k": 7},
}
FILES = {name: (write_eagle, options) for name, options in EAGLES.items()} | {
    name: (write_dflash, options) for name, options in BLOCKS.items()
}
FILES["blocks, the target's matrices"] = (write_dflash, {"own": False})
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_k=20)
PROMPTS = {
    "one token": [1],
    "short": [3, 7, 9] * 5,
    "longer than a pass": [(5 * i * i + 11) % 250 for i in range(700)],
}
N_PREDICT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eagle")


@pytest.fixture(scope="module")
def head_of(folder):
    """The file of a head for a target."""

    @functools.cache
    def written(name, file="its own matrices"):
        write, options = FILES[file]
        return write(folder / f"{name} {file}.gguf", target_of(name), **options)

    return written


def target_of(name):
    return tiny(name, 2 if name == "qwen3next" else 1)  # under 1 AVX2 kernels of llama.cpp decide a near-tie


def opened(name, draft, **options):
    return Engine(target_of(name), draft, n_threads=1, n_ctx=1024, profile=False, prefix_cache=0, **options)


@pytest.fixture(scope="module")
def plain():
    """What a target writes alone."""
    known = {}

    def answer(name, prompt, **options):
        key = (name, tuple(prompt), repr(options))
        if key not in known:
            with opened(name, None, drafter="none") as alone:
                known[key] = alone.generate(prompt, **options).token_ids
        return known[key]

    return answer


# ---- the text ----

PAIRS = [(name, "its own matrices") for name in TARGETS] + [("llama", file) for file in list(FILES)[1:]]
PAIRS += [(name, "blocks") for name in ("qwen3", "openai-moe", "qwen35", "gemma4")]
PAIRS += [(name, file) for name in ("qwen3", "qwen35") for file in ("norms", "Markov", "paths")]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen2", [1, 1, 1]),
        ("phi3", [1, 1, 1]),
        ("mistral3", [1, 1, 1]),
        ("qwen2", [1, 1, 2]),
        ("llama", [1, 1, 2]),
    ],
)
def test_an_architecture_whose_layers_llama_cpp_does_not_give(name, layers, folder):
    """edgespec's kernels leave them; without these the head is refused."""
    path = make_tiny(name, folder / f"{name} q8_0.gguf", weights_type="q8_0")
    head = write_eagle(
        folder / f"{name} q8_0 head.gguf", tiny(name), quantized=True, kept=200, target_layers=layers
    )
    with Engine(path, head, n_threads=1, n_ctx=1024, profile=False) as engine:
        options = {"params": GREEDY, "n_predict": N_PREDICT}
        for prompt in PROMPTS.values():
            alone = engine.generate(prompt, drafter="none", **options)
            result = engine.generate(prompt, drafter="model", gamma=4, **options)
            assert result.token_ids == alone.token_ids
            assert result.stats.n_drafted > 20
    with pytest.raises(UsageError, match="edgespec's kernels are not in use here"):
        Engine(path, head, n_threads=1, n_ctx=1024, profile=False, kernels="off")


@pytest.mark.parametrize(("name", "file"), PAIRS)
def test_the_text_is_plain_decodings_own(name, file, head_of, plain):
    """Greedy, and sampled for a seed, with chains of several tokens."""
    n_accepted = 0
    with opened(name, head_of(name, file)) as engine:
        for prompt, (drafter, gamma) in itertools.product(
            PROMPTS.values(), [("model", 1), ("model", 4), ("auto", None), ("tree", None)]
        ):
            engine.forget(tables=True)
            options = {"params": GREEDY, "n_predict": N_PREDICT}
            result = engine.generate(prompt, drafter=drafter, gamma=gamma, **options)
            assert result.token_ids == plain(name, prompt, **options), (drafter, gamma)
            n_accepted += result.sources.get("model", (0, 0))[1]
        for seed in range(3):
            options = {"params": WARM, "n_predict": N_PREDICT, "seed": seed}
            result = engine.generate(PROMPTS["short"], drafter="model", gamma=3, **options)
            assert result.token_ids == plain(name, PROMPTS["short"], **options)
            assert result.stats.n_drafted > 20
    if file != "blocks, the target's matrices":  # which knows nothing
        assert n_accepted > 10, "little was accepted: it proves little"


@pytest.mark.parametrize(
    ("name", "file"),
    [("llama", "cut vocabulary"), ("qwen35", "cut vocabulary")]
    + [("llama", file) for file in ("norms", "Markov, cut vocabulary", "Markov", "paths")],
)
def test_with_quantized_files_and_edgespecs_kernels(name, file, folder):
    path = make_tiny(name, folder / f"{name} q8_0.gguf", weights_type="q8_0")
    write, options = FILES[file]
    head = write(folder / f"{name} q8_0 {file}.gguf", tiny(name), quantized=True, **options)
    with Engine(path, head, n_threads=1, n_ctx=1024, profile=False) as engine:
        options = {"params": GREEDY, "n_predict": N_PREDICT}
        alone = engine.generate(PROMPTS["short"], drafter="none", **options)
        result = engine.generate(PROMPTS["short"], drafter="model", gamma=4, **options)
        assert result.token_ids == alone.token_ids
        assert result.stats.n_accepted > 3


@pytest.mark.proof
@pytest.mark.parametrize(
    ("file", "rule"),
    [
        *((file, "block") for file in ("its own matrices", "cut vocabulary", "norms", "blocks", "Markov")),
        ("paths", "block"),
        ("paths", "chain"),
    ],
)
def test_sampled_texts_by_counting(rule, file, head_of):
    count_texts(tiny("llama"), lambda **options: opened("llama", head_of("llama", file), **options), rule)


def count_texts(target, open_engine, rule):
    """All texts of three tokens, of which the target allows three at each place."""
    prompt, length, n = PROMPTS["short"], 3, 400
    params = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)
    chances = {(): 1.0}
    with Model(target, kernels=False) as model, Session(model, n_ctx=256, n_threads=1) as session:
        for _ in range(length):
            longer = {}
            for text, chance in chances.items():
                session.clear()
                probs = filtered_probs(session.eval([*prompt, *text])[0], params)
                longer |= {(*text, int(t)): chance * probs[t] for t in np.flatnonzero(probs)}
            chances = longer
    counts = dict.fromkeys(chances, 0)
    n_accepted = 0
    with open_engine(kernels="off") as engine:
        for _ in range(n):
            result = engine.generate(
                prompt, params=params, n_predict=length, drafter="model", gamma=2, rule=rule
            )
            counts[tuple(result.token_ids)] += 1  # another text would be a KeyError
            n_accepted += result.stats.n_accepted
    assert n_accepted > n / 5, "little was accepted: it proves little"
    expected = n * np.array(list(chances.values()))
    assert chi_square_p_value(np.array(list(counts.values())), expected) > 1e-4


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("llama", "its own matrices"),
        ("qwen35", "its own matrices"),
        ("llama", "blocks"),
        ("qwen35", "blocks"),
        ("llama", "Markov"),
        ("llama", "paths"),
    ],
)
def test_texts_that_share_passes(name, file, head_of, plain):
    prompts = [PROMPTS["short"], [9, 8, 7], PROMPTS["longer than a pass"][:100], [3, 7, 9] * 20]
    with opened(name, head_of(name, file), parallel=3) as engine:
        options = {"params": GREEDY, "n_predict": N_PREDICT}
        streams = [engine.stream(p, drafter="model", gamma=3, **options) for p in prompts[:3]]
        while not all(stream.finished for stream in streams):
            engine.step()
            for stream in list(streams):
                stream.made()
                if stream.finished and len(streams) == 3:
                    streams.append(engine.stream(prompts[3], drafter="model", gamma=3, **options))
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result.token_ids == plain(name, prompt, **options)
            assert stream.result.stats.n_drafted > 10


# ---- what it reads ----


def loaded(name, path):
    """The target and its head."""
    header = check_model_file(tiny(name))
    draft = checked(path, header)
    target = draft.load_target(header, kernels=False, remote=None)
    return target, draft.load(target, kernels=False, n_threads=1)


def checked(path, target):
    """The draft in the file `path`, for the file of `target`."""
    header = read_header(path)
    draft = plugins.load(DRAFTS, header.draft_kind)("target", "draft", header)
    draft.check(target)
    return draft


@contextmanager
def beside(path):
    """A llama target and its head in the file `path`, and a session of each."""
    target, head = loaded("llama", path)
    with (
        target,
        head,
        Session(target, n_ctx=256, n_threads=1) as session,
        KVCache(head, KVCacheSize(n_ctx=256), n_threads=1, takes_inputs=True) as cache,
        Session.within(cache) as head_session,
    ):
        yield target, head, session, head_session


def test_the_states_are_what_goes_into_the_layers(head_of):
    """What goes into the first layer is the embeddings; the encoder is one matrix."""
    path, text = head_of("llama"), [(5 * i * i + 11) % 250 for i in range(100)]
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny("llama")).tensors}
    fusion = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == "fc.weight")
    target, head = loaded("llama", path)
    with target, head:
        found = []
        for n_batch in (128, 32):
            with Session(target, n_ctx=128, n_threads=1, n_batch=n_batch) as session:
                found.append(Forward(session, text, 3, with_features=True).run().copy().features)
        states = found[0]
        assert states.shape == (len(text), 3 * target.n_embd)
        assert np.allclose(states, found[1], atol=1e-2)
        first, second, again = np.split(states, 3, axis=1)
        assert np.allclose(first, weights["token_embd.weight"][text], atol=1e-6)
        assert np.array_equal(second, again)
        assert not np.allclose(first, second, atol=0.1)
        assert np.allclose(head.encode(states), states @ fusion.T, atol=1e-3)


def test_what_the_last_layer_leaves(folder):
    """EAGLE-3.1's published head reads it: the logits are made of it."""
    path = write_eagle(folder / "last.gguf", tiny("openai-moe"), norms=True, target_layers=[0, 1, 2])
    weights = head_equations.read_weights(tiny("openai-moe"))
    target, head = loaded("openai-moe", path)
    with target, head, Session(target, n_ctx=128, n_threads=1) as session:
        result = Forward(session, [3, 7, 9, 11], 4, with_features=True).run().copy()
    last = head_equations.rms_norm(result.features[:, -N_EMBD:], weights["output_norm.weight"])
    assert np.allclose(result.rows, last @ weights["output.weight"].T, atol=2e-2)
    with opened("openai-moe", path) as engine:
        options = {"params": GREEDY, "n_predict": N_PREDICT}
        alone = engine.generate(PROMPTS["short"], drafter="none", **options)
        result = engine.generate(PROMPTS["short"], drafter="model", gamma=4, **options)
        assert result.token_ids == alone.token_ids
        assert result.stats.n_drafted > 20


@pytest.mark.parametrize("file", ["its own matrices", "norms"])
def test_the_equations_of_eagle(file, head_of):
    """Against 64-bit floats: the encoder, then a text beside the target's states, then beside its own."""
    path, text = head_of("llama", file), [(7 * i * i + 3) % 200 for i in range(20)]
    weights = head_equations.read_weights(path)
    with beside(path) as (_target, head, session, head_session):
        states = Forward(session, text, with_features=True).run().copy().features
        inputs = head.encode(states[:-1])
        read = Forward(head_session, text[1:], len(text) - 1, inputs=inputs, with_features=True).run().copy()
        then = Forward(head_session, [17], inputs=read.features[-1:]).run().copy()
    expected = head_equations.eagle_inputs(weights, states[:-1].astype(np.float64))
    assert np.allclose(inputs, expected, atol=1e-3)
    rows, own = head_equations.eagle_block(weights, text[1:], expected)
    assert np.allclose(read.rows, rows, atol=2e-2)
    assert np.allclose(read.features, own, atol=2e-2)
    rows, _ = head_equations.eagle_block(weights, [*text[1:], 17], np.concatenate([expected, own[-1:]]))
    assert np.allclose(then.rows[0], rows[-1], atol=2e-2)
    if file == "norms":
        without = states[:-1] @ weights["fc.weight"].T
        assert not np.allclose(inputs, without, atol=0.1), "the norm changes something"


@pytest.mark.parametrize("file", EAGLES)
def test_its_rows_are_those_of_all_tokens_read_at_once(file, head_of):
    """Token i beside the target's states of token i - 1; along a draft beside the head's own."""
    text = [(7 * i * i + 3) % 200 for i in range(30)]
    with beside(head_of("llama", file)) as (target, head_model, session, head_session):
        states = Forward(session, text, with_features=True).run().copy().features
        features = TargetFeatures(target.n_state)
        head = HeadModel(head_session, features, n_vocab=target.n_vocab, encode=head_model.encode)
        features.set(0, text[:2], states[:2])
        rows = []
        for i in range(2, len(text) + 1):
            result = evaluate(head, text[:i]).copy()
            rows.append(result.rows[0])
            if i < len(text) - 1:
                features.set(i, [text[i]], states[i : i + 1])
        own = result.features[-1:]
        after = run(head, [*text, 17])[0].copy()

        head_session.clear()
        inputs = head_model.encode(states[:-1])
        part = Forward(head_session, text[1:], len(text) - 1, inputs=inputs, with_features=True)
        together = part.run().rows.copy()
        by_hand = Forward(head_session, [17], inputs=own).run().rows
        known = np.isfinite(together[0])
        assert known.sum() == EAGLES[file].get("kept", target.n_vocab)
        assert np.array_equal(np.isfinite(rows), np.tile(known, (len(rows), 1)))
        assert np.allclose(np.array(rows)[:, known], together[:, known], atol=1e-3)
        assert np.allclose(after[known], by_hand[0][known], atol=1e-3)
        assert not np.allclose(rows[0][known], rows[1][known], atol=0.1)


@pytest.mark.parametrize("file", ["blocks", "blocks, cut vocabulary"])
def test_a_block_follows_all_states_read_at_once(file, head_of):
    """Each draft begins behind what was read before; its pass leaves nothing."""
    text = [(7 * i * i + 3) % 200 for i in range(30)]
    with beside(head_of("llama", file)) as (target, block_head, session, head_session):
        states = Forward(session, text, with_features=True).run().copy().features
        assert states.shape == (len(text), 2 * target.n_embd)
        features = TargetFeatures(target.n_state)
        make_rows = rows_maker(block_head, 1)
        model = BlockModel(head_session, features, block_head, n_vocab=target.n_vocab, make_rows=make_rows)
        assert not model.follows(1), "it knows no state"
        features.set(0, text[:1], states[:1])
        drafts = []
        for n in (2, 3, 7, 8, 20, 30):
            features.set(features.end, text[features.end : n - 1], states[features.end : n - 1])
            assert model.follows(n)
            assert model.n_unread(n) == 2
            rows = [run(model, text[:n])[0].copy()]
            for drafted in range(1, 5):
                assert model.follows(n + drafted)
                assert model.n_unread(n + drafted) == 1
                rows.append(run(model, [*text[:n], *range(drafted)])[0].copy())
            assert not model.follows(n + 5), "the block has five masks"
            assert model.n_past == n - 1
            drafts.append(rows)

        block = [text[-1], *[block_head.mask] * 5]
        seen = []
        for changed in (0.0, 5.0):
            states[3] += changed
            head_session.clear()
            Forward(head_session, text[:-1], 0, inputs=states[:-1]).run()
            seen.append(Forward(head_session, block, 6).run().rows[1:].copy())
        known = np.isfinite(seen[0][0])
        assert known.sum() == FILES[file][1].get("kept", target.n_vocab)
        assert np.allclose(np.array(drafts[-1])[:, known], seen[0][:, known], atol=1e-3)
        assert not np.allclose(seen[0][:, known], seen[1][:, known], atol=1e-3), "states count"


@pytest.mark.parametrize("file", BLOCKS)
def test_the_equations_of_blocks(file, head_of):
    """Against 64-bit floats: each place after the head's likeliest token, and after others."""
    text = [(7 * i * i + 3) % 200 for i in range(30)]
    path = head_of("llama", file)
    weights = head_equations.read_weights(path)
    with beside(path) as (target, head, session, head_session):
        states = Forward(session, text, with_features=True).run().copy().features[:-1]
        features = TargetFeatures(target.n_state)
        model = BlockModel(
            head_session, features, head, n_vocab=target.n_vocab, make_rows=rows_maker(head, 1)
        )
        features.set(0, text[:-1], states)
        block = [text[-1], *[head.mask] * (head.n_block - 1)]
        logits, hidden = head_equations.block_logits(weights, states.astype(np.float64), block)
        for n_right in range(head.n_block):  # then others are drafted
            tokens = [*text]
            for place in range(head.first, head.n_block):
                assert model.follows(len(tokens))
                drafted = evaluate(model, tokens)
                expected, chance = place_after(
                    weights, logits[place : place + 1], hidden[place : place + 1], tokens[-1:]
                )
                row, known = drafted.rows[0], np.isfinite(expected)
                assert np.array_equal(np.isfinite(row), known)
                assert np.allclose(row[known], expected[known], atol=0.1)  # a matrix of 8 bits a number
                assert (drafted.confidence is None) == (chance is None)
                assert chance is None or abs(drafted.confidence - chance) < 1e-2
                likeliest = np.argsort(-row)
                tokens.append(int(likeliest[0 if place < n_right else place % 3]))
            assert not model.follows(len(tokens)), "the block ends"


def place_after(weights, logits, hidden, before):
    """The logits of a place of a block after a token, and the confidence, by the equations of its kind."""
    if "selector_hidden.weight" in weights:
        return head_equations.pair_scores(weights, logits[0], hidden[0], before[0], 7), None
    if "markov_w1.weight" not in weights:
        return logits[0], None
    chance = head_equations.confidences(weights, hidden, before)[0] if "conf_proj.weight" in weights else None
    return head_equations.markov_logits(weights, logits, before)[0], chance


def test_a_path_goes_on_after_a_token_that_is_no_candidate(head_of):
    """A grammar may choose one: then the place says what it says by itself."""
    target, head = loaded("llama", head_of("llama", "paths"))
    with target, head:
        rows = rows_maker(head, 1)(target.n_vocab)
        block = np.arange(6 * head.n_vocab, dtype=np.float32).reshape(6, -1)
        packed = np.zeros((6, head.n_embd), np.float32)
        packed[:, :7] = range(7)
        rows.set(ForwardResult(block, 0.0, 6, packed))
        assert np.isfinite(rows.logits_at(1, 6)[0]).sum() == 7
        assert np.array_equal(rows.logits_at(1, 7)[0][0], block[2])


@pytest.mark.parametrize(("bias", "chance"), [(-30.0, 0.0), (30.0, 1.0)])
def test_what_is_learned_of_confidence(bias, chance, folder):
    """Each drafted token is counted in the bucket of the head's own confidence."""
    path = folder / f"confidence {bias}.gguf"
    write_dflash(path, tiny("llama"), markov=64, **{"conf_proj.bias": np.array([bias], np.float32)})
    steps = []
    with opened("llama", path, kernels="off") as engine:
        options = {"params": GREEDY, "n_predict": N_PREDICT, "drafter": "model", "gamma": 4}
        engine.generate(PROMPTS["short"], on_step=steps.append, **options)
    buckets = [node.bucket for step in steps for node in step.proposed if node.source == "argmax"]
    assert len(buckets) > 20
    assert set(buckets) == {bucket_of(chance)}


# ---- a head in the target's own cache ----


@pytest.fixture(scope="module")
def gemma(folder):
    """A target that often says its last word again, and its head."""
    target = make_tiny("gemma4", folder / "gemma target.gguf", post_norm=0.3)
    return target, write_gemma(folder / "gemma head.gguf", target)


def opened_gemma(gemma, **options):
    target, head = gemma
    return Engine(target, head, n_threads=1, n_ctx=1024, profile=False, **options)


def test_the_equations_of_gemma(gemma):
    """Against 64-bit floats, in the keys and values that the target left: a draft of several tokens."""
    target_path, path = gemma
    text = [(7 * i * i + 3) % 200 for i in range(50)]  # longer than the window
    weights = head_equations.read_weights(path)
    embeddings = head_equations.read_weights(target_path)["token_embd.weight"]
    header = check_model_file(target_path)
    head_header = checked(path, header).header
    with (
        Model(target_path, kernels=False, header=header) as target,
        GemmaHead(head_header, target, kernels=False) as head,
        Session(target, n_ctx=256, n_threads=1) as session,
        LentCache(head, session.cache, n_threads=1) as cache,
    ):
        lent = LentSession(cache, session)
        states = Forward(session, text[:-1], with_features=True).run().copy().features
        window, whole = reversed(head_equations.cells_of(session.state()))
        assert (len(window[0]), len(whole[0])) == (32, 49)
        own, token = states[-1], text[-1]
        expected = own.astype(np.float64)
        for _ in range(4):
            drafted = Forward(lent, [token], inputs=own[None], with_features=True).run().copy()
            logits, expected = head_equations.gemma_pass(
                weights, [window, whole], embeddings[token], expected, 32
            )
            assert np.allclose(drafted.rows[0], logits, atol=2e-2)
            assert np.allclose(drafted.features[0], expected, atol=2e-2)
            assert session.n_past == lent.n_past == 49, "a pass leaves nothing"
            own, token = drafted.features[0], int(np.argsort(-drafted.rows[0])[1])
        with pytest.raises(ValueError, match="in use"):
            LentCache(head, session.cache, n_threads=1)


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_the_text_in_one_cache(kernels, gemma):
    """Greedy, and sampled for a seed; a cache that is replaced by a larger one in between."""
    n_accepted = 0
    with opened_gemma(gemma, kernels=kernels) as engine:
        for prompt, (drafter, gamma) in itertools.product(
            [*PROMPTS.values()][:2], [("model", 1), ("model", 4), ("auto", None), ("tree", None)]
        ):
            engine.forget(tables=True)
            for options in ({"params": GREEDY}, {"params": WARM, "seed": 3}):
                alone = engine.generate(prompt, drafter="none", n_predict=N_PREDICT, **options)
                result = engine.generate(prompt, drafter=drafter, gamma=gamma, n_predict=N_PREDICT, **options)
                assert result.token_ids == alone.token_ids, (drafter, gamma)
                n_accepted += result.sources.get("model", (0, 0))[1]
    assert n_accepted > 20, "little was accepted: it proves little"
    target, head = gemma
    with Engine(target, head, n_threads=1, profile=False, kernels=kernels) as engine:
        for prompt in ([3, 7, 9], PROMPTS["longer than a pass"], [3, 7, 9]):
            options = {"params": GREEDY, "n_predict": N_PREDICT}
            alone = engine.generate(prompt, drafter="none", **options)
            result = engine.generate(prompt, drafter="model", gamma=3, **options)
            assert result.token_ids == alone.token_ids
            assert result.stats.n_drafted > 20


def test_quantized_weights_and_a_quantized_cache(folder):
    """On edgespec's kernels, if they are there: attention is then another operation, for both models."""
    keys = dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), 32)
    options = {"weights_type": "q8_0", "metadata": keys | {"rope.dimension_count_swa": 32}, "post_norm": 0.3}
    target = make_tiny("gemma4", folder / "gemma q8_0.gguf", **options)
    plain = make_tiny("gemma4", folder / "gemma f32.gguf", **options | {"weights_type": "f32"})
    pair = target, write_gemma(folder / "gemma q8_0 head.gguf", plain, width=32, quantized=True)
    for cache_type in ("f16", "q8_0"):
        with opened_gemma(pair, cache_type=cache_type) as engine:
            options = {"params": WARM, "seed": 3, "n_predict": N_PREDICT}
            alone = engine.generate(PROMPTS["short"], drafter="none", **options)
            result = engine.generate(PROMPTS["short"], drafter="model", gamma=3, **options)
            assert result.token_ids == alone.token_ids
            assert result.stats.n_accepted > 3


def test_texts_that_share_passes_in_one_cache(gemma):
    """More texts than there is room for at once: some are read again, none changes."""
    prompts = [PROMPTS["short"], [9, 8, 7], PROMPTS["longer than a pass"][:100], [3, 7, 9] * 20]
    options = {"params": GREEDY, "n_predict": N_PREDICT}
    with opened_gemma(gemma) as engine:
        plain = [engine.generate(prompt, drafter="none", **options).token_ids for prompt in prompts]
    for n_cells in (1024, 200):
        with opened_gemma(gemma, parallel=3, n_cells=n_cells) as engine:
            streams = [engine.stream(p, drafter="model", gamma=3, **options) for p in prompts[:3]]
            while not all(stream.finished for stream in streams):
                engine.step()
                for stream in list(streams):
                    stream.made()
                    if stream.finished and len(streams) == 3:
                        streams.append(engine.stream(prompts[3], drafter="model", gamma=3, **options))
            assert [stream.result.token_ids for stream in streams] == plain
            assert all(stream.result.stats.n_drafted > 10 for stream in streams)


@pytest.mark.proof
@pytest.mark.parametrize("rule", ["block", "chain"])
def test_sampled_texts_in_one_cache_by_counting(rule, gemma):
    count_texts(gemma[0], lambda **options: opened_gemma(gemma, **options), rule)


def test_its_costs_are_measured_in_the_targets_cache(gemma):
    with opened_gemma(gemma, kernels="off") as engine:
        costs = measured(engine)
        assert all(seconds > 0.0 for seconds in costs.draft.at(128)[1:])
        assert costs.draft.read < costs.target.read / 100, "it reads no text"


# ---- costs ----


def test_a_block_costs_one_pass(head_of):
    head_file = head_of("llama", "blocks")
    with Engine(tiny("llama"), head_file, n_threads=1, kernels="off", profile=False) as engine:
        draft, head = measured(engine).draft, engine.draft
        curve = block_curve(draft, head.n_block)
        assert curve == block_curve(curve, head.n_block)
        costs = curve.at(128)
        assert costs[2] == costs[5] == draft.at(128)[head.n_block]
        assert 0 < costs[1] < costs[2] / 100


def test_its_costs_are_measured_and_kept_apart(head_of):
    with Engine(tiny("llama"), head_of("llama"), n_threads=1, kernels="off", profile=False) as engine:
        costs, target, head = measured(engine), engine.target, engine.draft
        assert costs.draft is not None
        assert all(seconds > 0.0 for seconds in costs.draft.at(128)[1:])
        other = read_header(head_of("llama", "narrower"))
        keys = {
            ProfileKey.of(target.header, one, kernels="stock", threads=1)
            for one in (None, head.header, other)
        }
        assert len(keys) == 3
