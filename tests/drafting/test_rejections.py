"""Rejected places on disk: what is kept of a text, cut and foreign files, several processes, the bound."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from edgespec.decoding.options import Options
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.rejections import RejectedPlaces, RejectedText
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.models.store import hash_file
from edgespec.platform.kept import HISTORY
from random_heads import write_random_head

SHA256 = "0123456789abcdef" * 4
ASKED = Options(params=SamplingParams(temperature=0.0), n_predict=30, drafter="model", gamma=3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def messages():
    return []


@pytest.fixture
def places(messages):
    return RejectedPlaces(SHA256, on_message=messages.append)


def a_text(seed, n_tokens=40, n_prompt=10, n_places=5):
    rng = np.random.default_rng(seed)
    probs = np.sort(rng.dirichlet(np.full(20, 0.3), n_places))[:, :3:-1].astype(np.float32)
    return RejectedText(
        rng.integers(0, 1 << 17, n_tokens).astype(np.int32),
        n_prompt,
        np.sort(rng.choice(np.arange(n_prompt, n_tokens), n_places, replace=False)).astype(np.int32),
        rng.integers(0, 1 << 17, (n_places, 16)).astype(np.int32),
        np.where(probs < 1e-6, 0.0, probs).astype(np.float32),
    )


def same(one, other):
    exact = all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "places", "likeliest")
    )
    near = np.abs(np.log(np.maximum(one.probs, 1e-7)) - np.log(np.maximum(other.probs, 1e-7))).max()
    return exact and one.n_prompt == other.n_prompt and near < 0.07


def test_what_is_stored_comes_back(places, messages):
    assert places.texts() == []
    written = [a_text(seed, n_places=1 + seed) for seed in range(5)]
    for text in written:
        places.append(text)
    assert all(same(*pair) for pair in zip(places.texts(), written, strict=True))
    assert places.path.stat().st_mode & 0o777 == 0o600
    assert not messages


def test_a_damaged_file_is_refused_by_name_and_then_set_aside(places, messages):
    places.append(a_text(1))
    places.path.write_bytes(b"damaged" * 100)
    with pytest.raises(EdgespecError, match=r"rejected/texts\.db: file is not a database; not used"):
        places.texts()
    places.append(a_text(3))
    assert "set aside as texts.db.set-aside" in messages[0]
    assert len(places.texts()) == 1


def test_two_processes_append_at_once(places):
    children = []
    for first in (0, 100):
        if (child := os.fork()) == 0:
            for seed in range(first, first + 30):
                places.append(a_text(seed))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    found = {text.tokens.tobytes() for text in places.texts()}
    assert found == {a_text(seed).tokens.tobytes() for first in (0, 100) for seed in range(first, first + 30)}


def test_the_oldest_texts_go_first(messages):
    one = len(a_text(0).encoded()) + 1
    places = RejectedPlaces(SHA256, max_words=4 * one, on_message=messages.append)
    for seed in range(10):
        places.append(a_text(seed))
    kept = [text.tokens[0] for text in places.texts()]
    assert kept == [a_text(seed).tokens[0] for seed in range(10 - len(kept), 10)]
    places.append(a_text(1, n_tokens=4 * one))
    assert len(places.texts()) == len(kept), "one that is larger than the file may be is left out"


# ---- while texts are written ----


@pytest.fixture
def head(tmp_path, tiny_path):
    return write_random_head(tmp_path / "head.gguf", tiny_path)


def kept_of(tiny_path):
    return RejectedPlaces(hash_file(tiny_path)).texts()


def engine_of(tiny_path, head, **options):
    return Engine(tiny_path, head, n_threads=1, kernels="off", profile=False, n_ctx=256, **options)


def test_places_of_a_text_are_what_the_target_says_there(tiny_path, head):
    with engine_of(tiny_path, head, history=True) as engine:
        stream = engine.stream("the wind and", replace(ASKED, n_predict=60, n_logprobs=16))
        said = list(stream)
        tokens, n_prompt = stream.tokens, stream.result.prompt_tokens
        n_rejected = sum(
            n for positions, accepted, n in stream.result.stats.histogram if accepted < positions
        )
    (text,) = kept_of(tiny_path)
    assert (text.tokens.tolist(), text.n_prompt) == (tokens, n_prompt)
    assert len(text.places) == n_rejected > 5
    for place, ids, probs in zip(text.places, text.likeliest, text.probs, strict=True):
        assert ids[0] == tokens[place], "greedily, the text is the target's likeliest"
        if place - n_prompt < len(said):
            top = said[place - n_prompt].top
            assert ids.tolist() == [token for token, _ in top]
            np.testing.assert_allclose(np.log(probs), [logprob for _, logprob in top], atol=0.07)


@pytest.mark.parametrize(
    ("options", "is_kept"), [({}, False), ({"history": True, "learn": False}, False), ({"learn": True}, True)]
)
def test_places_are_kept_with_the_history_or_if_asked_for(tiny_path, head, options, is_kept):
    with engine_of(tiny_path, head, **options) as engine:
        engine.generate("the wind", ASKED)
    assert bool(kept_of(tiny_path)) == is_kept
    assert HISTORY.path().exists() == options.get("history", False)


def test_a_forgotten_text_is_not_kept(tiny_path, head):
    with engine_of(tiny_path, head, learn=True) as engine:
        engine.generate("the wind", ASKED)
        engine.forget()
    assert kept_of(tiny_path) == []


def test_without_a_head_nothing_is_learned_and_that_is_said(tiny_path, messages):
    with engine_of(tiny_path, None, drafter="suffix", learn=True, on_message=messages.append) as engine:
        engine.generate("the wind", n_predict=10)
    assert [line for line in messages if "nothing is learned: " in line]
    assert kept_of(tiny_path) == []
