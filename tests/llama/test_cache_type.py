"""Caches in Q8_0: with edgespec's kernels and with llama.cpp's, and the option that asks for them."""

from __future__ import annotations

import numpy as np
import pytest

from command_line import run_cli, user_environment
from edgespec import Engine, SamplingParams
from edgespec.errors import UsageError
from edgespec.llama.gguf_header import read_header
from edgespec.llama.kv_cache import with_cache_type
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from operations import operations_of

TOKENS = np.random.default_rng(5).integers(0, 256, 90).tolist()
GREEDY = SamplingParams(temperature=0.0)


def logits(model, batch=16):
    with Session(model, n_ctx=128, n_threads=1) as session:
        parts = [TOKENS[i : i + batch] for i in range(0, len(TOKENS), batch)]
        return np.concatenate([session.eval(part, n_logits=len(part)).copy() for part in parts])


def distance(rows, others):
    return float(np.max(np.linalg.norm(rows - others, axis=1) / np.linalg.norm(others, axis=1)))


def test_a_quantized_cache_says_what_stock_s_says(kernels, packable_path):
    with Model(packable_path) as model, Model(packable_path, kernels=False) as stock:
        in_f16, stock_in_f16 = logits(model), logits(stock)
        for one in (model, stock):
            one.header = with_cache_type(one.header, "q8_0")
        ours, theirs = logits(model), logits(stock)
        assert not np.array_equal(ours, in_f16)
        assert not np.array_equal(theirs, stock_in_f16)
        assert distance(ours, theirs) < max(0.03, 3 * distance(in_f16, stock_in_f16))
        assert operations_of(model).declined == {}


def test_a_quantized_cache_does_not_depend_on_the_batch(kernels, packable_path):
    with Model(packable_path, header=with_cache_type(read_header(packable_path), "q8_0")) as model:
        each = logits(model, 1)
        for batch in (2, 7, 33, 64):
            np.testing.assert_array_equal(logits(model, batch), each)


def test_a_state_of_a_quantized_cache_comes_back(kernels, packable_path):
    with Model(packable_path, header=with_cache_type(read_header(packable_path), "q8_0")) as model:
        with Session(model, n_ctx=128, n_threads=1) as session:
            session.eval(TOKENS[:60])
            state, timeline = session.state(), session.tokens
            expected = session.eval(TOKENS[60:70], n_logits=10).copy()
        with Session(model, n_ctx=96, n_threads=1) as other:
            other.restore(state, timeline)
            np.testing.assert_array_equal(other.eval(TOKENS[60:70], n_logits=10), expected)


@pytest.mark.parametrize("choice", ["auto", "off"])
def test_drafting_over_a_quantized_cache_changes_nothing(packable_path, choice):
    texts = []
    for drafter in ("none", "suffix"):
        with Engine(
            packable_path, drafter=drafter, kernels=choice, cache_type="q8_0", n_threads=1, profile=False
        ) as engine:
            assert engine.kernels.endswith(", q8_0 cache")
            result = engine.generate("one two one two one two", params=GREEDY, n_predict=40, gamma=None)
            texts.append(result.text)
    assert texts[0] == texts[1]


def test_it_takes_about_half_the_memory(packable_path):
    in_f16 = read_header(packable_path)
    in_q8 = with_cache_type(in_f16, "q8_0")
    assert in_q8.kv_bytes(1000) / in_f16.kv_bytes(1000) == 34 / 64


def test_heads_of_another_width_are_refused(tiny_path):
    with pytest.raises(UsageError, match="heads' width, 16, must be a multiple of 32") as error:
        Engine(tiny_path, cache_type="q8_0")
    assert (error.value.field, error.value.value) == ("cache_type", "q8_0")


def test_an_unknown_type_is_refused(tiny_path):
    with pytest.raises(UsageError, match="must be one of f16, q8_0"):
        Engine(tiny_path, cache_type="q4_0")


def test_the_option(packable_path, tmp_path):
    env = user_environment(tmp_path)
    run = ("run", "--target", str(packable_path), "--drafter", "none", "-n", "4", "--temp", "0", "hello")
    process = run_cli(*run, "--cache-type", "q8_0", "--json", env=env)
    assert process.returncode == 0, process.stderr
    assert ", q8_0 cache" in process.stdout
    wrong = run_cli(*run, "--cache-type", "q4_0", env=env)
    assert wrong.returncode == 2
    assert "--cache-type" in wrong.stderr
