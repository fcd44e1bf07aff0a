"""Several texts in shared passes: each is what its prompt gets alone, and nobody is starved."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec import Engine
from edgespec.decoding.grammars import Grammar
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.pace import BatchPace
from edgespec.engine.batcher import PREFILL_CHUNK, split_prefill_budget
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.quantize import quantize
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.proof

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_k=20)
COMMON = [(7 * i * i + 3) % 250 for i in range(150)]  # with which several prompts begin


@dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]
    options: Options


def request(seed: int) -> Request:
    """A random prompt with random options; its text depends on nothing but them."""
    rng = random.Random(seed)
    own = [rng.randrange(250) for _ in range(rng.choice([1, 5, 30, 120, 300]))]
    repeated = own[-20:] * rng.choice([0, 0, 3])
    tokens = COMMON[: rng.choice([0, 0, 20, 150])] + own + repeated
    params = rng.choice([GREEDY, WARM, replace(WARM, repeat_penalty=1.2)])
    options = Options(
        params=params,
        seed=seed,
        n_predict=rng.choice([1, 7, 30, 60]),
        drafter=rng.choice(["auto", "none", "suffix", "model", "tree", None]),
        gamma=rng.choice([None, None, 3]),
        n_logprobs=rng.choice([None, 2]),
    )
    if options.drafter == "none":
        options = replace(options, gamma=None)
    return Request(tuple(tokens), options)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    """A small model that the kernels run whole."""
    directory = tmp_path_factory.mktemp("batcher")
    source = write_tiny_gguf(directory / "f32.gguf", n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_ctx=1024)
    quantize(source, directory / "q4_k_m.gguf", "q4_k_m")
    return directory / "q4_k_m.gguf"


@pytest.fixture(scope="module")
def alone(target_path, tiny_draft_path, kernels):
    """What a request gets from an engine for one text."""
    known = {}
    with Engine(target_path, tiny_draft_path, n_ctx=1024, profile=False) as engine:

        def answer(one: Request, **options):
            key = (one.tokens, repr(one.options), repr(options))
            if key not in known:
                known[key] = engine.generate(one.tokens, one.options, **options)
            return known[key]

        yield answer


def shared(target_path, tiny_draft_path, parallel=4, n_cells=4096, **options):
    return Engine(
        target_path,
        tiny_draft_path,
        parallel=parallel,
        n_cells=n_cells,
        n_ctx=1024,
        profile=False,
        prefix_cache=0,
        **options,
    )


@pytest.mark.parametrize("n_cells", [4096, 620], ids=["room for all", "texts pause"])
@pytest.mark.parametrize("seed", range(4))
def test_texts_that_come_and_go_are_those_of_their_prompts_alone(
    target_path, tiny_draft_path, alone, seed, n_cells
):
    rng = random.Random(seed)
    requests = [request(100 * seed + i) for i in range(24)]
    waiting, running, paused = list(requests), [], 0
    with shared(target_path, tiny_draft_path, n_cells=n_cells) as engine:
        while waiting or running:
            while waiting and len(running) < 4 and rng.random() < 0.7:
                one = waiting[0]
                beside = n_cells < 4096 or engine.has_room(len(one.tokens), one.options.n_predict)
                if not beside:
                    break
                running.append((waiting.pop(0), engine.stream(one.tokens, one.options)))
            engine.step()
            if engine._requests.batcher:
                paused += sum(text.is_preempted for text in engine._requests.batcher.requests)
            for one, stream in list(running):
                stream.made()
                expected = alone(one)
                if stream.finished:
                    assert stream.result.token_ids == expected.token_ids
                    assert stream.result.stop_reason == expected.stop_reason
                    running.remove((one, stream))
                elif rng.random() < 0.01:
                    stream.close()
                    n = len(stream.result.token_ids)
                    assert stream.result.token_ids == expected.token_ids[:n]
                    running.remove((one, stream))
    assert paused or n_cells == 4096


def test_texts_do_not_depend_on_when_drafts_rest(target_path, tiny_draft_path, alone, monkeypatch):
    """Nothing is drafted meanwhile, but where the user fixed the length; the text is the same."""
    rng = random.Random(3)
    monkeypatch.setattr(BatchPace, "is_paused", property(lambda _pace: rng.random() < 0.5))
    requests = [request(900 + i) for i in range(12)]
    with shared(target_path, tiny_draft_path) as engine:
        for group in (requests[:4], requests[4:8], requests[8:]):
            streams = [engine.stream(one.tokens, one.options) for one in group]
            while not all(stream.finished for stream in streams):
                engine.step()
                for stream in streams:
                    stream.made()
            for one, stream in zip(group, streams, strict=True):
                assert stream.result.token_ids == alone(one).token_ids
        monkeypatch.setattr(BatchPace, "is_paused", property(lambda _pace: True))
        tokens = COMMON[:20] * 4
        made = [engine.stream(tokens, params=GREEDY, n_predict=30, drafter="suffix") for _ in range(2)]
        fixed = engine.stream(tokens, params=GREEDY, n_predict=30, drafter="model", gamma=3)
        for stream in [*made, fixed]:
            for _ in stream:
                pass
        assert fixed.result.stats.n_drafted >= 20
        assert made[0].result.token_ids == made[1].result.token_ids == fixed.result.token_ids
        assert sum(stream.result.stats.n_drafted for stream in made) <= 3, "only before the first shared pass"


def test_logprobs_are_the_same_too(target_path, tiny_draft_path, alone):
    one = Request(tuple(COMMON[:40]), Options(params=GREEDY, n_predict=20, n_logprobs=3))
    with Engine(target_path, tiny_draft_path, n_ctx=1024, profile=False) as engine:
        expected = [(token.id, token.logprob, token.top) for token in engine.stream(one.tokens, one.options)]
    with shared(target_path, tiny_draft_path) as engine:
        others = [engine.stream(COMMON[: 20 * i], params=WARM, n_predict=60) for i in (2, 3)]
        stream = engine.stream(one.tokens, one.options)
        assert [(token.id, token.logprob, token.top) for token in stream] == expected
        assert all(len(other.made()) > 1 for other in others)


def test_each_text_has_a_grammar_of_its_own(target_path, tiny_draft_path):
    words = ["ab", "cde", "fghi"]
    with shared(target_path, tiny_draft_path) as engine:
        grammars = [Grammar(engine.target, f'root ::= "{word}"') for word in words]
        streams = [
            engine.stream(COMMON[:30], params=GREEDY, n_predict=30, grammar=grammar) for grammar in grammars
        ]
        plain = engine.stream(COMMON[:30], params=GREEDY, n_predict=30)
        for stream in [*streams, plain]:
            for _ in stream:
                pass
        assert [stream.result.text for stream in streams] == words
        assert plain.result.text not in words


def test_one_that_fails_ends_alone(target_path, tiny_draft_path, alone):
    one, other = request(1), request(2)
    with shared(target_path, tiny_draft_path) as engine:
        forbidden = {token: float("-inf") for token in range(engine.target.n_vocab)}
        bad = engine.stream(
            COMMON[:50], params=SamplingParams(temperature=0.0, logit_bias=forbidden), n_predict=20
        )
        good = [engine.stream(r.tokens, r.options) for r in (one, other)]
        while not all(stream.finished for stream in good):
            engine.step()
            for stream in good:
                stream.made()
        with pytest.raises(EdgespecError, match="forbids every token"):
            bad.made()
        assert bad.finished
        for stream, r in zip(good, (one, other), strict=True):
            assert stream.result.token_ids == alone(r).token_ids


def test_as_many_as_asked_for(target_path, tiny_draft_path):
    with shared(target_path, tiny_draft_path, parallel=2) as engine:
        first, second = (engine.stream([1, 2, 3], params=GREEDY, n_predict=5) for _ in range(2))
        assert not engine.has_room(3, 5)
        with pytest.raises(UsageError, match="parallel 2: as many texts are being written"):
            engine.stream([1, 2, 3])
        first.close()
        assert engine.has_room(3, 5)
        assert len(list(second)) == 5


def test_a_prompt_that_no_cache_could_hold(target_path, tiny_draft_path):
    with shared(target_path, tiny_draft_path, n_cells=512) as engine:
        with pytest.raises(EdgespecError, match="does not fit in a context of 512"):
            engine.stream([1] * 600)
        assert engine.generate([1, 2, 3], params=GREEDY, n_predict=3).token_ids


def test_a_prompt_is_shared_with_a_text_under_way(target_path, tiny_draft_path, alone):
    with shared(target_path, tiny_draft_path) as engine:
        first = engine.stream([*COMMON, 1, 2], params=GREEDY, n_predict=40)
        next(first)
        second = engine.stream([*COMMON, 3, 4], params=GREEDY, n_predict=10)
        list(second)
        assert second.result.n_cached == len(COMMON)
        one = Request((*COMMON, 3, 4), Options(params=GREEDY, n_predict=10))
        assert second.result.token_ids == alone(one).token_ids


def test_what_texts_share_takes_room_once(target_path, tiny_draft_path, alone):
    prompt, options = [(5 * i * i + 1) % 250 for i in range(300)], Options(params=GREEDY, n_predict=20)
    with shared(target_path, tiny_draft_path, n_cells=640) as engine:
        streams = [engine.stream(prompt, options)]
        assert not engine.has_room([*prompt, 1], 20), "none of it is read yet"
        next(streams[0])
        assert not engine.has_room([7] * 301, 20) and not engine.has_room(301, 20)
        for i in range(1, 4):
            assert engine.has_room([*prompt, i], 20)
            streams.append(engine.stream([*prompt, i], options))
        while not all(stream.finished for stream in streams):
            engine.step()
            assert not any(one.is_preempted for one in engine._requests.batcher.requests)
            for stream in streams:
                stream.made()
        for i, stream in enumerate(streams):
            one = Request((*prompt, i) if i else tuple(prompt), options)
            assert stream.result.token_ids == alone(one).token_ids


def test_those_who_write_get_a_token_in_every_pass(target_path, tiny_draft_path):
    """Whatever is read beside them."""
    with shared(target_path, tiny_draft_path) as engine:
        writers = [engine.stream(COMMON[:10], params=GREEDY, n_predict=100, drafter="none") for _ in range(2)]
        engine.step()
        for writer in writers:
            assert len(writer.made()) == 1
        long = engine.stream([(3 * i) % 250 for i in range(900)], params=GREEDY, n_predict=5, drafter="none")
        steps = 0
        while not long.made():
            engine.step()
            steps += 1
            assert [len(writer.made()) for writer in writers] == [1, 1]
            assert engine.last_pass.n_prefilled <= PREFILL_CHUNK
        assert steps == -(-900 // PREFILL_CHUNK)


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_prompt_tells_how_far_it_is_read(target_path, tiny_draft_path, kernels, parallel):
    """After each pass, and the first is short: how long the next ones may be is measured then."""
    prompt = [(3 * i) % 250 for i in range(900)]
    with shared(target_path, tiny_draft_path, parallel=parallel) as engine:
        stream = engine.stream(prompt, params=GREEDY, n_predict=2, drafter="none")
        seen = [stream.prompt_progress]
        while not stream.made():
            engine.step()
            seen.append(stream.prompt_progress)
        assert {progress.n_tokens for progress in seen} == {900}
        read = [progress.n_read for progress in seen]
        assert read[:2] == [0, 128] and read[-1] == 900
        assert read == sorted(set(read)) and len(read) > 3
        stream.close()
        again = engine.stream([*prompt, 5], params=GREEDY, n_predict=2, drafter="none")
        assert again.prompt_progress == (900, 901), "what the cache holds counts as read"


def test_passes_that_only_read_take_as_long_whatever_the_machine(target_path, tiny_draft_path, kernels):
    with shared(target_path, tiny_draft_path) as engine:
        engine.generate(COMMON[:5], params=GREEDY, n_predict=1, drafter="none")
        batcher = engine._requests.batcher
        chosen = {}
        for rate in (3.0, 130.0, 400.0, 1e6):
            batcher._choose_n_read(rate)
            chosen[rate] = batcher._n_read
        assert chosen == {3.0: PREFILL_CHUNK, 130.0: PREFILL_CHUNK, 400.0: 192, 1e6: 512}


def test_a_short_question_does_not_wait_for_a_long_document(target_path, tiny_draft_path):
    with shared(target_path, tiny_draft_path) as engine:
        writer = engine.stream(COMMON[:10], params=GREEDY, n_predict=200, drafter="none")
        engine.step()
        long = engine.stream([(3 * i) % 250 for i in range(900)], params=GREEDY, n_predict=5)
        short = engine.stream([(5 * i) % 250 for i in range(45)], params=GREEDY, n_predict=5)
        for _ in range(2):
            engine.step()
        assert short.made()
        while not long.made():
            engine.step()
        assert not writer.finished


@given(st.integers(1, 512), st.lists(st.integers(1, 2000), max_size=20))
def test_what_is_read_is_dealt(budget, wanted):
    given_ = dict(split_prefill_budget(budget, list(enumerate(wanted))))
    assert sum(given_.values()) == min(budget, sum(wanted))
    assert all(0 < n <= wanted[i] for i, n in given_.items())
    if wanted:
        assert given_[0] >= min(wanted[0], max(min(16, budget), budget // 4))


def test_a_text_that_pauses_goes_on_where_it_was(target_path, tiny_draft_path, alone):
    requests = [
        Request(tuple(COMMON[i : i + 100]), Options(params=GREEDY, n_predict=200, drafter="none"))
        for i in range(3)
    ]
    with shared(target_path, tiny_draft_path, n_cells=512) as engine:
        streams = [engine.stream(one.tokens, one.options) for one in requests]
        texts = list(engine._requests.batcher.requests)
        was_paused = set()
        while not all(stream.finished for stream in streams):
            engine.step()
            was_paused |= {i for i, text in enumerate(texts) if text.is_preempted}
            for stream in streams:
                stream.made()
        assert was_paused and 0 not in was_paused, "the first never pauses"
        for stream, one in zip(streams, requests, strict=True):
            assert stream.result.token_ids == alone(one).token_ids


def test_the_draft_models_passes_are_shared(target_path, tiny_draft_path):
    with shared(target_path, tiny_draft_path) as engine:
        for i in range(3):
            engine.stream(COMMON[: 30 + i], params=GREEDY, n_predict=40, drafter="model", gamma=2)
        sizes = []
        forward = KVCache.forward

        def counted(self, parts):
            if self.model is engine.draft:
                sizes.append(len(parts))
            return forward(self, parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVCache, "forward", counted)
            for _ in range(6):
                engine.step()
        assert sizes.count(3) >= 6


def failing_passes(engine, patch, error, *, role="draft", after=0, times=math.inf, least=1):
    """Let passes of a model over `least` tokens or more raise `error`: so often, `after` this many."""
    model, forward, n_made = getattr(engine, role), KVCache.forward, itertools.count()

    def fails(self, parts):
        is_meant = self.model is model and sum(len(part.tokens) for part in parts) >= least
        if is_meant and after <= next(n_made) < after + times:
            raise error
        return forward(self, parts)

    patch.setattr(KVCache, "forward", fails)


@pytest.mark.parametrize("least", [1, 24], ids=["each pass", "those that read"])
@pytest.mark.parametrize(
    "error", [EdgespecError("llama.cpp failed"), MemoryError(), OSError(12, "no memory")]
)
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_text_goes_on_without_a_draft_that_fails(
    target_path, tiny_draft_path, alone, parallel, error, least
):
    options = Options(params=GREEDY, n_predict=20, drafter="model", gamma=3)
    requests = [Request(tuple(COMMON[: 30 + i]), options) for i in range(parallel)]
    said = []
    with (
        shared(target_path, tiny_draft_path, parallel=parallel, on_message=said.append) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        said.clear()
        for fails in (True, False):
            if fails:
                failing_passes(engine, patch, error, least=least)
            streams = [engine.stream(one.tokens, one.options) for one in requests]
            for stream, one in zip(streams, requests, strict=True):
                list(stream)
                assert stream.result.token_ids == alone(one).token_ids
                assert ("draft failed" in stream.result.note) == fails
                assert fails or stream.result.sources["model"][0] > 10
            patch.undo()
        assert len(said) == parallel
        assert all("draft failed" in line and "\n" not in line for line in said)


@pytest.mark.parametrize("after", [0, 6])
@pytest.mark.parametrize(("role", "times"), [("draft", 1), ("draft", 3), ("target", 3)])
def test_an_interrupted_pass_ends_no_text_and_leaves_the_pair_usable(
    target_path, tiny_draft_path, alone, role, times, after
):
    options = Options(params=GREEDY, n_predict=20, drafter="model", gamma=3)
    requests = [Request(tuple(COMMON[: 30 + i]), options) for i in range(3)]
    interrupted = 0
    with shared(target_path, tiny_draft_path) as engine, pytest.MonkeyPatch.context() as patch:
        failing_passes(engine, patch, KeyboardInterrupt(), role=role, after=after, times=times)
        streams = [engine.stream(one.tokens, one.options) for one in requests]
        left = engine.stream(COMMON[:40], options)
        while not all(stream.finished for stream in streams):
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupted += 1
                left.close()
            for stream in streams:
                stream.made()
        for stream, one in zip(streams, requests, strict=True):
            assert stream.result.token_ids == alone(one).token_ids
            assert stream.result.sources["model"][0] > 10
    assert interrupted == times


def test_no_room_for_a_drafts_cache_is_one_line(target_path, tiny_draft_path, alone, monkeypatch):
    def refuse(*_):
        raise EdgespecError("no context of 2048 tokens")

    one, said = request(3), []
    with shared(target_path, tiny_draft_path, on_message=said.append) as engine:
        said.clear()
        monkeypatch.setattr(engine._pair, "begin_draft", refuse)
        options = replace(one.options, drafter="auto", gamma=None)
        assert engine.generate(one.tokens, options).token_ids == alone(Request(one.tokens, options)).token_ids
    assert len(said) == 1
    assert "no context of 2048" in said[0]


def test_many_drafts_take_turns(target_path, tiny_draft_path, alone):
    """More drafted tokens than one pass has rows: those left out are first in the next."""
    requests = [
        Request(tuple(COMMON[i : i + 40]), Options(params=GREEDY, n_predict=60, drafter="model", gamma=20))
        for i in range(4)
    ]
    with shared(target_path, tiny_draft_path) as engine:
        streams = [engine.stream(one.tokens, one.options) for one in requests]
        for _ in range(12):
            engine.step()
        assert all(stream.made() for stream in streams)
        for stream, one in zip(streams, requests, strict=True):
            list(stream)
            assert stream.result.token_ids == alone(one).token_ids


def test_drafts_leave_a_row_to_a_prompt_that_ends(target_path, tiny_draft_path, alone):
    """Two long drafts are as many rows as a pass has; who came later would wait until one of them ends."""
    options = Options(params=GREEDY, n_predict=300, drafter="model", gamma=31)
    question = Request(tuple(COMMON[60:100]), Options(params=GREEDY, n_predict=3, drafter="none"))
    with shared(target_path, tiny_draft_path, parallel=3) as engine:
        writers = [engine.stream(COMMON[i : i + 40], options) for i in range(2)]
        for _ in range(3):
            engine.step()
        assert engine.last_pass.n_tokens >= 32
        stream = engine.stream(question.tokens, question.options)
        for _ in range(6):
            engine.step()
        assert stream.made()
        list(stream)
        assert stream.result.token_ids == alone(question).token_ids
        assert not any(writer.finished for writer in writers)
