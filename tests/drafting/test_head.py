"""A draft head beside a real (tiny) target: the target's own text, what it reads, and what is refused."""

from __future__ import annotations

import random
import shutil
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec.decoding.grammars import Grammar
from edgespec.decoding.options import Options, WakePolicy
from edgespec.decoding.session import KEPT, Forward, TargetFeatures
from edgespec.drafting.draft import n_states_worth_reading
from edgespec.drafting.heads.head import HeadModel
from edgespec.drafting.heads.head_file import read_head
from edgespec.drafting.heads.made import Fusion
from edgespec.drafting.heads.matrices import EMBEDDINGS, MappedMatrix
from edgespec.drafting.pace import Policy
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from measured_costs import measured
from random_heads import write_random_head
from tiny_gguf import write_tiny_gguf
from toy_paces import FixedPolicy, curves, pace_of
from toy_sessions import run

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_k=20)
PROMPTS = {
    "one token": [1],
    "short": [3, 7, 9] * 5,
    "longer than a window": [(7 * i * i + 3) % 250 for i in range(250)],
    "longer than a pass": [(5 * i * i + 11) % 250 for i in range(700)],
}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    """A small model that the kernels run whole: its logits do not depend on what shares a pass."""
    directory = tmp_path_factory.mktemp("head")
    source = write_tiny_gguf(directory / "f32.gguf", n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_ctx=1024)
    quantize(source, directory / "q4_k_m.gguf", "q4_k_m")
    return directory / "q4_k_m.gguf"


@pytest.fixture(scope="module")
def head_path(target_path):
    return write_random_head(target_path.with_name("head.gguf"), target_path)


@pytest.fixture(scope="module")
def plain(target_path, kernels):
    """What the target writes alone."""
    known = {}
    with Engine(target_path, drafter="none", n_ctx=1024, profile=False) as engine:

        def answer(prompt, **options):
            key = (tuple(prompt), repr(options))
            if key not in known:
                known[key] = engine.generate(prompt, **options).token_ids
            return known[key]

        yield answer


@pytest.fixture(scope="module")
def engine(target_path, head_path, kernels):
    with Engine(target_path, head_path, n_ctx=1024, profile=False, prefix_cache=0) as engine:
        yield engine


def head_of(engine):
    """The head of an engine for one text, between its generations."""
    (head,) = engine._pair._idle_drafts
    assert isinstance(head, HeadModel)
    return head


# ---- the text ----


@pytest.mark.parametrize("drafter", ["auto", "model", "tree", "chain", "staged"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_is_plain_decodings_own(engine, plain, prompt, drafter):
    result = engine.generate(prompt, params=GREEDY, n_predict=50, drafter=drafter)
    assert result.token_ids == plain(prompt, params=GREEDY, n_predict=50)


@pytest.mark.parametrize("gamma", [1, 3, 9, 32])
def test_greedy_text_with_drafts_of_any_length(engine, plain, gamma):
    n_accepted = 0
    for prompt in PROMPTS.values():
        result = engine.generate(prompt, params=GREEDY, n_predict=50, drafter="model", gamma=gamma)
        assert result.token_ids == plain(prompt, params=GREEDY, n_predict=50)
        n_accepted += result.sources["model"][1]
    assert n_accepted > 20, "little was accepted: it proves little"


def test_sampled_text_of_a_seed_is_plain_decodings_own(engine, plain):
    for seed in range(5):
        for prompt in PROMPTS.values():
            options = {"params": WARM, "n_predict": 40, "seed": seed}
            assert engine.generate(prompt, **options, drafter="model", gamma=4).token_ids == plain(
                prompt, **options
            )


def test_logprobs_and_grammar(engine, target_path):
    prompt = PROMPTS["short"]
    with Engine(target_path, drafter="none", n_ctx=1024, profile=False) as alone:
        for options in ({"n_logprobs": 3}, {"grammar": 'root ::= ("ab" | "cde ")+'}):
            found = []
            for one, drafter in ((alone, None), (engine, "model"), (engine, "auto")):
                chosen = dict(options)
                if "grammar" in options:
                    chosen["grammar"] = Grammar(one.target, options["grammar"])
                stream = one.stream(prompt, params=GREEDY, n_predict=40, drafter=drafter, **chosen)
                found.append([(token.id, token.logprob, token.top) for token in stream])
            assert found[0] == found[1] == found[2]


def test_conversations_that_go_on(engine, plain):
    """A prompt that begins like the text before it: only the new part is read, by target and head."""
    text = list(PROMPTS["longer than a window"])
    engine.generate([9, 8, 7], params=GREEDY, n_predict=5)
    n_before = begins_at = 0
    for turn in range(4):
        result = engine.generate(text, params=GREEDY, n_predict=30, drafter="model", gamma=3)
        assert result.token_ids == plain(text, params=GREEDY, n_predict=30)
        head = head_of(engine)
        assert head.features.end == len(text) + 29
        if turn:
            assert result.n_cached == n_before - 1
            assert head._offset == begins_at, "what it had read was kept"
        begins_at, n_before = head._offset, len(text) + 30
        text += [*result.token_ids, 5, 6, turn]


def test_ctrl_c_in_any_pass(engine, plain, monkeypatch):
    """Whatever pass it ends, what was written is the target's, and the next text is not harmed."""
    prompt = PROMPTS["longer than a window"]
    whole = plain(prompt, params=GREEDY, n_predict=50)
    n_passes = stop_at = 0
    decode = KVCache._decode

    def interrupted(self, *arguments):
        nonlocal n_passes
        n_passes += 1
        if n_passes == stop_at:
            raise KeyboardInterrupt
        return decode(self, *arguments)

    monkeypatch.setattr(KVCache, "_decode", interrupted)
    for n in (1, 2, 3, 5, 8, 9, 10, 11, 20, 33):
        engine.forget()
        stop_at = n
        n_passes = 0
        stream = engine.stream(prompt, params=GREEDY, n_predict=50, drafter="model", gamma=3)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert whole[: len(stream.result.token_ids)] == stream.result.token_ids
        n_passes = -1000
        again = engine.generate(prompt, params=GREEDY, n_predict=50, drafter="model", gamma=3)
        assert again.token_ids == whole


def random_end(rng):
    return [rng.randrange(250) for _ in range(rng.choice([1, 120, 200]))]


def random_options(rng, seed):
    gamma, drafter = rng.choice([(None, "auto"), (None, "model"), (3, "model"), (2, "auto"), (None, "none")])
    return Options(
        params=rng.choice([GREEDY, WARM]),
        seed=seed,
        n_predict=rng.choice([7, 40, 60]),
        drafter=drafter,
        gamma=gamma,
    )


@pytest.mark.parametrize("n_cells", [4096, 620], ids=["room for all", "texts pause"])
def test_texts_that_share_passes(target_path, head_path, plain, n_cells):
    """Texts that come and go, begin alike, and pause, are each what they are alone."""
    rng = random.Random(n_cells)
    common = PROMPTS["longer than a window"][:150]
    n_paused = 0
    with Engine(
        target_path, head_path, n_ctx=1024, profile=False, prefix_cache=0, parallel=4, n_cells=n_cells
    ) as engine:
        waiting = [
            (common[: rng.choice([0, 20, 150])] + random_end(rng), random_options(rng, seed))
            for seed in range(16)
        ]
        running, n_drafted = [], 0
        while waiting or running:
            while waiting and len(running) < 4 and rng.random() < 0.7:
                if n_cells == 4096 and not engine.has_room(len(waiting[0][0]), waiting[0][1].n_predict):
                    break
                prompt, options = waiting.pop(0)
                running.append((prompt, options, engine.stream(prompt, options)))
            engine.step()
            if engine._requests.batcher:
                n_paused += sum(text.is_preempted for text in engine._requests.batcher.requests)
            for one in list(running):
                prompt, options, stream = one
                stream.made()
                if stream.finished:
                    running.remove(one)
                    n_drafted += stream.result.sources.get("model", (0, 0))[0]
                    alone = {"params": options.params, "seed": options.seed, "n_predict": options.n_predict}
                    assert stream.result.token_ids == plain(prompt, **alone)
    assert n_drafted > 20, "two in five draft whatever a pass takes"
    assert bool(n_paused) == (n_cells < 4096)


def test_who_reads_is_not_starved_by_those_who_draft_much(target_path, head_path, plain):
    """All tokens of a pass then have rows of logits, of which there are few."""
    with Engine(target_path, head_path, n_ctx=1024, profile=False, parallel=4, n_cells=4096) as engine:
        for i in range(3):
            engine.stream([i + 1, 5, 9], params=GREEDY, n_predict=900, drafter="model", gamma=30)
        for _ in range(3):
            engine.step()
        prompt = PROMPTS["longer than a window"]
        stream = engine.stream(prompt, params=GREEDY, n_predict=3, drafter="model")
        n_steps = 0
        while not stream.finished:
            engine.step()
            stream.made()
            n_steps += 1
        assert stream.result.token_ids == plain(prompt, params=GREEDY, n_predict=3)
        assert n_steps < 40


# ---- what it reads ----


def test_its_rows_are_those_of_the_definition(engine, target_path, head_path):
    """Token i goes in as We e(t_i) + Wf f_(i-1): all tokens at once give what drafting gave one by one."""
    prompt = PROMPTS["short"]
    head = read_head(check_model_file(head_path))
    fusion = Fusion(head, MappedMatrix(engine.target.header, EMBEDDINGS))
    matrices = {"n_vocab": engine.target.n_vocab, "token_ids": head.token_ids, "fusion": fusion}
    result = engine.generate(prompt, params=GREEDY, n_predict=30, drafter="model", gamma=3)
    text = [*prompt, *result.token_ids]
    with Session(engine.target, n_ctx=256, n_threads=1) as target:
        states = Forward(target, text, with_features=True).run().copy().features
    kept = head_of(engine).features
    known = kept.rows(kept.first, kept.end)
    assert np.array_equal(known, states[kept.first : kept.end])
    with (
        Model(head_path) as model,
        KVCache(model, KVCacheSize(n_ctx=256), n_threads=1, takes_inputs=True) as cache,
        Session.within(cache) as session,
    ):
        drafting = HeadModel(session, kept, **matrices)
        n = len(text) - 1
        rows = [run(drafting, text[:i])[0].copy() for i in range(kept.first + 2, n)]
        session.clear()
        inputs = fusion(text[kept.first + 1 : n], states[kept.first : n - 1])
        together = Forward(session, text[kept.first + 1 : n], len(inputs), inputs=inputs).run().rows
        assert np.array_equal(drafting.ids, head.token_ids)
        assert np.allclose(np.array(rows), together[: len(rows)], atol=1e-4)


@pytest.mark.parametrize("gamma", [None, 4])
def test_in_a_long_text_it_attends_to_the_last_tokens(
    target_path, head_path, plain, kernels, monkeypatch, gamma
):
    """Its rows are those of a head that has read nothing else, and the text is the target's own."""
    monkeypatch.setattr("edgespec.engine.pair.MAX_DRAFT_CTX", 128)
    monkeypatch.setattr("edgespec.drafting.heads.head.WINDOW", 64)
    monkeypatch.setattr("edgespec.drafting.heads.head._STEP", 16)
    prompt, held, dropped = PROMPTS["short"], [], []
    drop_first, finish = Session.drop_first, HeadModel._finish_read

    def noted(session, n_tokens):
        dropped.append(n_tokens)
        return drop_first(session, n_tokens)

    def finished(head, *arguments):
        held.append(head.n_held)
        return finish(head, *arguments)

    monkeypatch.setattr(Session, "drop_first", noted)
    monkeypatch.setattr(HeadModel, "_finish_read", finished)
    with Engine(target_path, head_path, n_ctx=1024, profile=False) as engine:
        result = engine.generate(prompt, params=GREEDY, n_predict=400, drafter="model", gamma=gamma)
        assert result.token_ids == plain(prompt, params=GREEDY, n_predict=400)
        assert not gamma or len(dropped) > 10
        # What it holds is bounded always, and reached where times do not choose the lengths.
        assert (40 if gamma else 0) < max(held) <= 80 + 32
        again = engine.generate([*prompt, *result.token_ids, 9], params=GREEDY, n_predict=50, drafter="model")
        assert again.token_ids == plain([*prompt, *result.token_ids, 9], params=GREEDY, n_predict=50)
        other = engine.generate([8, *prompt], params=GREEDY, n_predict=50, drafter="model")
        assert other.token_ids == plain([8, *prompt], params=GREEDY, n_predict=50)


def test_its_rows_in_a_window_are_those_of_a_head_that_began_there(
    engine, target_path, head_path, monkeypatch
):
    monkeypatch.setattr("edgespec.drafting.heads.head.WINDOW", 64)
    monkeypatch.setattr("edgespec.drafting.heads.head._STEP", 16)
    head = read_head(check_model_file(head_path))
    fusion = Fusion(head, MappedMatrix(engine.target.header, EMBEDDINGS))
    matrices = {"n_vocab": engine.target.n_vocab, "token_ids": head.token_ids, "fusion": fusion}
    text = PROMPTS["longer than a window"]
    with Session(engine.target, n_ctx=256, n_threads=1, n_logits_max=256) as target:
        states = Forward(target, text, with_features=True).run().copy().features
    with Model(head_path) as model, Session(model, n_ctx=256, n_threads=1) as _:

        def opened(cache):
            return HeadModel(Session.within(cache), features, **matrices)

        features = TargetFeatures(head.n_embd)
        features.set(0, text, states)
        size = KVCacheSize(n_ctx=256, n_sequences=2)
        with KVCache(model, size, n_threads=1, takes_inputs=True) as cache:
            long = opened(cache)
            for n in range(2, len(text) + 1):
                long.make_room(n)
                rows = run(long, text[:n]).copy()
            assert 60 < long.n_held <= 80
            assert long.n_past == len(text) - 1
            short = opened(cache)
            short._start_at(len(text) - long.n_held)
            assert np.allclose(rows, run(short, text), atol=1e-4)


def test_states_that_are_kept():
    features = TargetFeatures(1)
    rng = np.random.default_rng(3)
    text, first = [], 0
    for _ in range(300):
        at = max(first, len(text) - int(rng.integers(0, 4)))
        if rng.random() < 0.02:  # a gap
            first = at = len(text) + int(rng.integers(1, 9))
            text += [0] * (at - len(text))
        new = rng.integers(0, 1000, int(rng.integers(1, 64))).tolist()
        text[at:] = new
        features.set(at, new, np.array(new, np.float32)[:, None])
        assert features.end == len(text)
        assert features.first >= first
        assert features.end - features.first >= min(KEPT, len(text) - first)
        rows = features.rows(features.first, features.end)
        assert rows[:, 0].tolist() == text[features.first :]
        first = features.first
    features.begin([*text[:-5], 1001, 1002])
    assert features.end == len(text) - 5
    features.begin([])
    features.set(7, [1], np.ones((1, 1), np.float32))
    assert (features.first, features.end) == (7, 8)


def test_states_of_a_prompt_are_asked_for_where_they_pay():
    """Where the answer may be long: as many as there are; short: none; and it depends on the prompt."""
    target = SimpleNamespace(
        n_vocab=152_000,
        n_embd=1536,
        n_params=1_543_000_000,
        hidden_states=SimpleNamespace(all_logits=True),
        uses_kernels=False,
        leaves_last_states=False,
    )
    usual = Policy(staged=False)

    def worth(n_unread, n_predict=None, policy=usual, n=1, n_known=0):
        pace = pace_of(policy, curves())
        pace.n_known = n_known
        return n_states_worth_reading(pace, target, n_unread, n_predict, n_requests=n)

    for n_unread in (64, 100, 1000):
        assert worth(n_unread, 2000) == 32
        assert worth(n_unread, 2) == 0
        for policy in (Policy(suffix=False), FixedPolicy(gamma=3)):
            assert worth(n_unread, 4, policy) == 32, "the head was asked for"
        assert worth(n_unread, 2000, n=16) == 0, "where 16 share a pass, no draft pays"
        assert worth(n_unread, 2000, Policy(suffix=False), n=16) == 32, "the head was asked for"
    assert worth(60, 8) == 0
    assert worth(60, 8, n_known=2000) == 0, "of which nothing is read anew"

    target.uses_kernels = True  # which leave the logits out
    assert worth(1000, 2) == 0, "passes of their own still cost something"
    assert worth(60) == 32

    target.leaves_last_states = True  # which is most of what the others are worth
    assert worth(60, 30) == 0 < worth(60, 2000)

    # The head is in the target's file, and reads as many tokens.
    target.hidden_states.all_logits = target.leaves_last_states = False
    for n_unread in (100, 1000):
        assert worth(n_unread, 2000) == min(KEPT, n_unread)
        assert worth(n_unread, 2) == 0
        assert worth(n_unread, 4, Policy(suffix=False)) == min(KEPT, n_unread)


def test_requests_that_join_in_one_step_are_judged_together(target_path, head_path, kernels, monkeypatch):
    """The first of them too: its prompt is read in a pass that all share."""
    asked = []

    def worth(*_arguments, n_requests):
        asked.append(n_requests)
        return 0

    monkeypatch.setattr("edgespec.engine.engine.n_states_worth_reading", worth)
    with Engine(target_path, head_path, n_ctx=256, profile=False, parallel=3) as engine:
        streams = [engine.stream([i + 1, 7, 9], params=GREEDY, n_predict=4) for i in range(3)]
        for stream in streams:
            list(stream)
    assert asked == [3, 3, 3]


def test_steps_take_the_states_that_kernels_leave(target_path, head_path, plain, kernels, monkeypatch):
    """Asked for otherwise they cost a row of logits for each token of the pass, of others' prompts too."""
    prompts = [[i + 1, *PROMPTS["short"]] for i in range(3)]
    expected = [plain(prompt, params=GREEDY, n_predict=40) for prompt in prompts]
    steps = []
    forward = KVCache.forward

    def seen(cache, parts):
        if cache.model.path == target_path:
            steps.extend(part for part in parts if len(part.tokens) < len(prompts[0]))
        return forward(cache, parts)

    monkeypatch.setattr(KVCache, "forward", seen)
    with Engine(target_path, head_path, n_ctx=256, profile=False, parallel=3) as engine:
        options = {"params": GREEDY, "n_predict": 40, "drafter": "model", "gamma": 2}
        streams = [engine.stream(prompt, **options) for prompt in prompts]
        for tokens, stream in zip(expected, streams, strict=True):
            assert tuple(token.id for token in stream) == tokens
            assert stream.result.sources["model"][0] > 0
    of_chains = [part for part in steps if part.n_logits == len(part.tokens)]
    assert len(of_chains) > 30
    assert all(part.with_last_states and not part.with_features for part in of_chains)
    after_branches = [part for part in steps if part.n_logits < len(part.tokens)]
    assert all(part.with_features for part in after_branches), "they have accepted tokens without logits"


# ---- what is refused ----


def refusal(target, draft, kind=EdgespecError, **options):
    with pytest.raises(kind) as caught:
        Engine(target, draft, profile=False, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_head_for_another_target(tmp_path, target_path, head_path):
    other = write_tiny_gguf(tmp_path / "other.gguf")
    assert "made for another model, not for other.gguf" in refusal(other, head_path, UsageError)
    quantize(target_path.with_name("f32.gguf"), tmp_path / "q8_0.gguf", "q8_0")
    assert "another quantization of this model" in refusal(tmp_path / "q8_0.gguf", head_path, UsageError)


def test_a_head_is_no_target_and_writes_no_cascade(target_path, head_path, engine):
    assert "a draft head; it cannot be a target" in refusal(head_path, None, UsageError, drafter="none")
    with pytest.raises(UsageError, match="a draft head, which cannot write in a cascade by itself"):
        engine.generate([1, 2], cascade=WakePolicy(threshold=0.5))


def test_damaged_heads(tmp_path, target_path, head_path):
    cut = tmp_path / "cut.gguf"
    shutil.copy(head_path, cut)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 1)
    assert "the fusion matrix after its last tensor is missing" in refusal(target_path, cut)
    for key, value, said in (
        ("edgespec.head.fusion_offset", None, "incomplete edgespec.head"),
        ("edgespec.draft.token_ids", [4, 3], "its list of tokens is not ascending"),
        ("edgespec.draft.token_ids", [4, 1 << 20], "its list of tokens is not ascending"),
        ("edgespec.draft.token_ids", [4, 5], "its list of tokens does not fit its matrix"),
        ("edgespec.head.fusion_type", 255, "the fusion matrix after its last tensor is missing"),
        ("edgespec.head.fusion_type", int(gguf.GGMLQuantizationType.F32), "is missing"),
    ):
        path = write_random_head(tmp_path / "damaged.gguf", target_path, metadata={key: value})
        assert said in refusal(target_path, path), key


def test_what_goes_in_is_the_fusion_matrix_times_both(target_path, head_path, tmp_path):
    """Of each type of matrix, one token at a time and many at once."""
    embeddings = MappedMatrix(check_model_file(target_path), EMBEDDINGS)
    reader = gguf.GGUFReader(target_path)
    table = {tensor.name: tensor for tensor in reader.tensors}["token_embd.weight"]
    whole = gguf.quants.dequantize(table.data, table.tensor_type)
    tokens = [3, 200, 3, 17]
    assert np.array_equal(embeddings(tokens), whole[tokens])
    states = np.random.default_rng(5).normal(0, 1, (40, 256)).astype(np.float32)
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.F32, kinds.F16, kinds.Q8_0):
        path = write_random_head(tmp_path / f"{kind.name}.gguf", target_path, fusion_type=kind)
        head = read_head(check_model_file(path))
        raw = np.fromfile(path, np.uint8, offset=head.fusion_offset).reshape(256, -1)
        matrix = gguf.quants.dequantize(raw.view(np.float32) if kind == kinds.F32 else raw, kind)
        fusion = Fusion(head, embeddings)
        many = [*range(40)]
        for ids, given in ((tokens, states[:4]), (many, states)):
            want = np.concatenate([whole[ids], given], axis=1) @ matrix.reshape(256, 512).T
            assert np.allclose(fusion(ids, given), want, atol=0.05)
        if kind == kinds.Q8_0:
            assert np.allclose(
                fusion(tokens, states[:4]),
                (np.concatenate([whole[tokens], states[:4]], axis=1)) @ matrix.T,
                atol=1e-3,
            )
        with pytest.raises(ValueError, match="hidden states of shape"):
            fusion(tokens, states[:3])


def test_a_profile_of_it_holds_what_goes_in(target_path, head_path, monkeypatch):
    """A timed pass makes its inputs as a pass of a draft does."""
    n_fused = 0
    fused = Fusion.__call__

    def counted(self, tokens, states):
        nonlocal n_fused
        n_fused += 1
        return fused(self, tokens, states)

    monkeypatch.setattr(Fusion, "__call__", counted)
    with Engine(target_path, head_path, n_threads=1, profile=False) as engine:
        costs = measured(engine, budget_s=0.5)
    assert costs.draft is not None
    assert n_fused > costs.sweeps * costs.n_sizes
