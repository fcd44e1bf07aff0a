"""The head in a target's own file (MTP), on tiny random models: the target's own text, and what it reads."""

from __future__ import annotations

import numpy as np
import pytest

from architecture_table import MTP
from edgespec import Engine, SamplingParams
from edgespec.decoding.options import WakePolicy
from edgespec.decoding.session import Forward, TargetFeatures
from edgespec.drafting.heads import mtp
from edgespec.drafting.heads.head import HeadModel
from edgespec.drafting.heads.mtp import MtpHead, MtpTarget, why_no_mtp
from edgespec.drafting.profile import ProfileKey
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import check_model_file, read_header
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from measured_costs import measured
from tiny_models import ARCHITECTURES
from tiny_states import tiny
from toy_sessions import evaluate, run

HEADS = [name for name, one in ARCHITECTURES.items() if MTP in one.kinds]
DENSE, HYBRID = "glm4-moe-mtp", "qwen35-mtp"
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_k=20)
PROMPTS = {
    "one token": [1],
    "short": [3, 7, 9] * 5,
    "longer than a pass": [(5 * i * i + 11) % 250 for i in range(700)],
}
N_PREDICT = 40


def opened(name, **options):
    seed = (
        2 if name == "qwen3next-mtp" else 1
    )  # under 1 AVX2 kernels of llama.cpp decide a near-tie otherwise
    return Engine(tiny(name, seed), n_threads=1, n_ctx=1024, profile=False, prefix_cache=0, **options)


@pytest.fixture(scope="module", params=HEADS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def engine(name):
    with opened(name) as engine:
        assert isinstance(engine.draft, MtpHead), "auto uses it where no other draft is given"
        assert engine.draft_name == "mtp"
        yield engine


@pytest.fixture(scope="module")
def plain():
    """What a target writes alone."""
    known = {}

    def answer(name, prompt, **options):
        key = (name, tuple(prompt), repr(options))
        if key not in known:
            with opened(name, drafter="none") as alone:
                known[key] = alone.generate(prompt, **options).token_ids
        return known[key]

    return answer


# ---- the text ----


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_is_plain_decodings_own(engine, name, plain, prompt):
    expected = plain(name, prompt, params=GREEDY, n_predict=N_PREDICT)
    n_accepted = 0
    for drafter, gamma in (
        ("mtp", 1),
        ("mtp", 4),
        ("mtp", None),
        ("auto", None),
        ("chain", 3),
        ("tree", None),
    ):
        engine.forget(tables=True)
        result = engine.generate(prompt, params=GREEDY, n_predict=N_PREDICT, drafter=drafter, gamma=gamma)
        assert result.token_ids == expected, (drafter, gamma)
        n_accepted += result.sources.get("model", (0, 0))[1]
    assert n_accepted > 20, "little was accepted: it proves little"
    assert result.draft == "mtp"


def test_sampled_text_of_a_seed_is_plain_decodings_own(engine, name, plain):
    for seed in range(3):
        options = {"params": WARM, "n_predict": N_PREDICT, "seed": seed}
        result = engine.generate(PROMPTS["short"], **options, drafter="mtp", gamma=3)
        assert result.token_ids == plain(name, PROMPTS["short"], **options)


def test_conversations_that_go_on(engine, name, plain):
    """A prompt that begins like the text before it: the head keeps what it read."""
    # A context that had to grow would make it begin anew.
    engine.generate(PROMPTS["longer than a pass"], params=GREEDY, n_predict=2, drafter="mtp", gamma=3)
    engine.forget()
    text, begins_at = PROMPTS["longer than a pass"][:200], 0
    for turn in range(3):
        result = engine.generate(text, params=GREEDY, n_predict=30, drafter="mtp", gamma=3)
        assert result.token_ids == plain(name, text, params=GREEDY, n_predict=30)
        (head,) = engine._pair._idle_drafts
        assert head.features.end == len(text) + 29
        if turn:
            assert result.n_cached > 0
            assert head._offset == begins_at, "what it had read was kept"
        begins_at = head._offset
        text = [*text, *result.token_ids, 5, 6, turn]


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_texts_that_share_passes(name, plain):
    prompts = [PROMPTS["short"], [9, 8, 7], PROMPTS["longer than a pass"][:100], [3, 7, 9] * 20]
    with opened(name, parallel=3) as engine:
        options = {"params": GREEDY, "n_predict": N_PREDICT}
        streams = [engine.stream(p, drafter="mtp", gamma=3, **options) for p in prompts[:3]]
        while not all(stream.finished for stream in streams):
            engine.step()
            for stream in list(streams):
                stream.made()
                if stream.finished and len(streams) == 3:
                    streams.append(engine.stream(prompts[3], drafter="mtp", gamma=3, **options))
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result.token_ids == plain(name, prompt, **options)
            assert stream.result.stats.n_drafted > 10


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_ctrl_c_in_any_pass(name, plain, monkeypatch):
    """Whatever pass it ends, what was written is the target's, and the next text is not harmed."""
    prompt, options = PROMPTS["short"], {"params": GREEDY, "n_predict": N_PREDICT}
    whole = plain(name, prompt, **options)
    n_passes = stop_at = 0
    decode = KVCache._decode

    def interrupted(self, *arguments):
        nonlocal n_passes
        n_passes += 1
        if n_passes == stop_at:
            raise KeyboardInterrupt
        return decode(self, *arguments)

    monkeypatch.setattr(KVCache, "_decode", interrupted)
    with opened(name) as engine:
        for n in (1, 2, 3, 4, 5, 9, 14):
            engine.forget()
            stop_at, n_passes = n, 0
            stream = engine.stream(prompt, drafter="mtp", gamma=3, **options)
            with pytest.raises(KeyboardInterrupt):
                list(stream)
            assert whole[: len(stream.result.token_ids)] == stream.result.token_ids
            n_passes = -1000
            assert engine.generate(prompt, drafter="mtp", gamma=3, **options).token_ids == whole


# ---- what it reads ----


def test_its_rows_are_those_of_all_tokens_read_at_once(name):
    """Token i beside the target's state of token i - 1; along a draft beside the head's own."""
    text = [(7 * i * i + 3) % 200 for i in range(30)]
    with (
        MtpTarget(check_model_file(tiny(name)), kernels=False) as target,
        Session(target, n_ctx=256, n_threads=1) as session,
        KVCache(MtpHead(target), KVCacheSize(n_ctx=256), n_threads=1, takes_inputs=True) as cache,
        Session.within(cache) as head_session,
    ):
        states = Forward(session, text, with_features=True).run().copy().features
        assert states.shape == (len(text), target.n_embd)
        features = TargetFeatures(target.n_embd)
        head = HeadModel(head_session, features, n_vocab=target.n_vocab)
        features.set(0, text[:2], states[:2])
        rows = []
        for i in range(2, len(text) + 1):
            result = evaluate(head, text[:i]).copy()
            rows.append(result.rows[0])
            if i < len(text) - 1:
                features.set(i, [text[i]], states[i : i + 1])
        own = result.features[-1:]
        assert not head.follows(len(text) + 2), "it has not been at the token between"
        after = run(head, [*text, 17])[0].copy()

        head_session.clear()
        together = Forward(head_session, text[1:], len(text) - 1, inputs=states[:-1]).run().rows.copy()
        assert np.allclose(rows, together, atol=1e-3)
        by_hand = Forward(head_session, [17], inputs=own).run().rows
        assert np.allclose(after, by_hand[0], atol=1e-3)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_states_of_a_text_longer_than_a_pass(name):
    """They are gathered from all of its passes, also where a model that keeps a state divides them."""
    text = [(5 * i * i + 11) % 250 for i in range(100)]
    with MtpTarget(check_model_file(tiny(name)), kernels=False) as target:
        found = []
        for n_batch in (128, 32):
            with Session(target, n_ctx=128, n_threads=1, n_batch=n_batch) as session:
                result = Forward(session, text, 3, with_features=True).run().copy()
                found.append((result.rows, result.features))
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert np.allclose(one, other, atol=1e-2)


def test_its_costs_are_measured_and_kept_apart(name):
    with Engine(tiny(name), n_threads=1, kernels="off", profile=False) as engine:
        costs, target, head = measured(engine), engine.target, engine.draft
        assert costs.draft is not None
        assert all(seconds > 0.0 for seconds in costs.draft.at(128)[1:])
        drafts = (None, head.header, target.header)  # the last: the model is its own draft
        keys = {ProfileKey.of(target.header, one, kernels="stock", threads=1) for one in drafts}
        assert len(keys) == 3
        assert 0 < head.header.file_bytes < target.header.file_bytes


# ---- what is refused ----


def refusal(path, kind=UsageError, **options):
    with pytest.raises(kind) as caught, Engine(path, profile=False, **options) as engine:
        engine.generate([1, 2], n_predict=2, cascade=WakePolicy(threshold=0.5))
    message = str(caught.value)
    assert "\n" not in message
    return message


def without(name, path, pattern):
    """A copy of a tiny model without the tensors that begin with `pattern`, where their names stand."""
    data = tiny(name).read_bytes()
    path.write_bytes(data.replace(pattern, b"x" + pattern[1:]))
    return path


def test_what_has_no_head_is_refused(tmp_path):
    assert "its file has no MTP head" in refusal(tiny("glm4-moe"), drafter="mtp")
    stripped = without(DENSE, tmp_path / "stripped.gguf", b"blk.2.nextn.eh_proj")
    assert "left out of the file" in why_no_mtp(read_header(stripped))
    only = without(DENSE, tmp_path / "only.gguf", b"blk.0.")
    only.write_bytes(only.read_bytes())
    assert "only the MTP head of a model" in refusal(only, EdgespecError)
    with pytest.raises(UsageError, match="the target's own head drafts"):
        Engine(tiny(DENSE), tiny("llama"), drafter="mtp", profile=False)
    assert "which cannot write in a cascade" in refusal(tiny(DENSE))
    with (
        Engine(tiny(DENSE), tiny("llama"), profile=False) as engine,
        pytest.raises(UsageError, match="no head in the target's own file was loaded"),
    ):
        engine.generate([1], drafter="mtp")


def test_a_library_without_these_functions_drafts_otherwise(monkeypatch, plain):
    monkeypatch.setattr(mtp, "NEXTN", None)
    lines = []
    with opened(DENSE, on_message=lines.append) as engine:
        assert engine.draft is None
        prompt = PROMPTS["short"]
        assert engine.generate(prompt, params=GREEDY, n_predict=9).token_ids == plain(
            DENSE, prompt, params=GREEDY, n_predict=9
        )
    said = "nothing but text seen before drafts: this llama.cpp does not export what an MTP head needs"
    assert said in lines
    assert "does not export" in refusal(tiny(DENSE), drafter="mtp")
