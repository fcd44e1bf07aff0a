"""Quantized caches: with edgespec's kernels and with llama.cpp's, and the option that asks for them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from command_line import run_cli, user_environment
from edgespec import Engine, SamplingParams
from edgespec.engine import capacity
from edgespec.engine.capacity import choose_cache_type
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.cache_types import with_cache_type
from edgespec.llama.gguf_header import read_header
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models import footprint
from edgespec.models.footprint import PROCESS_BYTES, required_bytes
from edgespec.platform.machine import MemoryLeft
from operations import operations_of
from tiny_gguf import write_tiny_gguf
from tiny_states import tiny

TOKENS = np.random.default_rng(5).integers(0, 256, 90).tolist()
GREEDY = SamplingParams(temperature=0.0)


def logits(model, batch=16):
    with Session(model, n_ctx=128, n_threads=1) as session:
        parts = [TOKENS[i : i + batch] for i in range(0, len(TOKENS), batch)]
        return np.concatenate([session.eval(part, n_logits=len(part)).copy() for part in parts])


def distance(rows, others):
    return float(np.max(np.linalg.norm(rows - others, axis=1) / np.linalg.norm(others, axis=1)))


@pytest.mark.parametrize(("cache_type", "most"), [("q8_0", 0.03), ("q4_0", 0.15)])
def test_a_quantized_cache_says_what_stock_s_says(kernels, packable_path, cache_type, most):
    with Model(packable_path) as model, Model(packable_path, kernels=False) as stock:
        in_f16, stock_in_f16 = logits(model), logits(stock)
        for one in (model, stock):
            one.header = with_cache_type(one.header, cache_type)
        ours, theirs = logits(model), logits(stock)
        assert not np.array_equal(ours, in_f16)
        assert not np.array_equal(theirs, stock_in_f16)
        assert distance(ours, theirs) < max(most, 3 * distance(in_f16, stock_in_f16))
        assert distance(ours, in_f16) < 2 * most
        assert operations_of(model).declined == {}


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_a_quantized_cache_does_not_depend_on_the_batch(kernels, packable_path, cache_type):
    with Model(packable_path, header=with_cache_type(read_header(packable_path), cache_type)) as model:
        each = logits(model, 1)
        for batch in (2, 7, 33, 64):
            np.testing.assert_array_equal(logits(model, batch), each)


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_a_state_of_a_quantized_cache_comes_back(kernels, packable_path, cache_type):
    with Model(packable_path, header=with_cache_type(read_header(packable_path), cache_type)) as model:
        with Session(model, n_ctx=128, n_threads=1) as session:
            session.eval(TOKENS[:60])
            state, timeline = session.state(), session.tokens
            expected = session.eval(TOKENS[60:70], n_logits=10).copy()
        with Session(model, n_ctx=96, n_threads=1) as other:
            other.restore(state, timeline)
            np.testing.assert_array_equal(other.eval(TOKENS[60:70], n_logits=10), expected)


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("choice", ["auto", "off"])
def test_drafting_over_a_quantized_cache_changes_nothing(packable_path, choice, cache_type):
    texts = []
    for drafter in ("none", "suffix"):
        with Engine(
            packable_path, drafter=drafter, kernels=choice, cache_type=cache_type, n_threads=1, profile=False
        ) as engine:
            assert engine.kernels.endswith(f", {cache_type} cache")
            result = engine.generate("one two one two one two", params=GREEDY, n_predict=40, gamma=None)
            texts.append(result.text)
    assert texts[0] == texts[1]


def test_it_takes_half_or_a_quarter_of_the_memory(packable_path):
    in_f16 = read_header(packable_path)
    for cache_type, share in (("q8_0", 34 / 64), ("q4_0", 18 / 64)):
        assert with_cache_type(in_f16, cache_type).kv_bytes(1000) / in_f16.kv_bytes(1000) == share


def refusal(path, cache_type):
    with pytest.raises(UsageError) as error:
        Engine(path, cache_type=cache_type)
    assert (error.value.field, error.value.value) == ("cache_type", cache_type)
    return str(error.value)


def test_heads_of_another_width_are_refused(tiny_path, tmp_path):
    said = refusal(tiny_path, "q8_0")
    assert "heads' width, 16, must be a multiple of 32; choose f16, or leave it out" in said
    narrow = write_tiny_gguf(tmp_path / "narrow.gguf", n_embd=64, n_head=2, n_head_kv=1)
    assert "heads' width, 32, must be a multiple of 64; choose f16, q8_0, or" in refusal(narrow, "q4_0")
    with Engine(narrow, cache_type="q8_0", drafter="none", profile=False) as engine:
        assert engine.kernels.endswith(", q8_0 cache")


def test_models_without_attention_are_refused():
    path = tiny("mamba2")
    for cache_type in ("q8_0", "q4_0"):
        assert "mamba2 has no attention" in refusal(path, cache_type)


# ---- auto ----


@pytest.fixture
def memory(monkeypatch):
    """Sets the memory that is left to what models take, each a header and its tokens, and so much more."""

    def leave(*models, more=0):
        n = PROCESS_BYTES + sum(required_bytes(*model) for model in models) + more
        monkeypatch.setattr(footprint, "memory_left", lambda _root: MemoryLeft(n, ""))

    return leave


@pytest.fixture
def large(packable_path):
    """A target whose cache of 8,192 tokens is larger than all else."""
    header = read_header(packable_path)
    return replace(header, n_head_kv=(512,) * header.n_layer, n_ctx_train=8192, n_head=1)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_auto_is_the_most_exact_type_that_fits(memory, large, cache_type):
    memory((with_cache_type(large, cache_type), 8192))
    assert choose_cache_type(large, None, "auto", 8192).cache_type == cache_type
    assert choose_cache_type(large, None, "auto", 256).cache_type == "f16"


def test_auto_does_not_take_a_type_that_may_ruin_the_text(memory, large):
    memory((with_cache_type(large, "q4_0"), 8192))
    with pytest.raises(EdgespecError, match=r"by --cache-type: .* 8,192 with q4_0"):
        choose_cache_type(large, None, "auto", 8192)


def test_a_draft_counts(memory, large, packable_path):
    memory((with_cache_type(large, "f16"), 8192))
    assert choose_cache_type(large, read_header(packable_path), "auto", 8192).cache_type == "q8_0"


def test_a_context_that_fits_in_no_type_says_what_would(memory, large):
    memory((with_cache_type(large, "q8_0"), 4096), more=-1)
    with pytest.raises(EdgespecError, match="not enough memory") as error:
        choose_cache_type(large, None, "auto", 8192)
    sizes = dict(re.findall(r"([\d,]+) with (\w+)", str(error.value)))
    tokens = {name: int(n.replace(",", "")) for n, name in sizes.items()}
    assert tokens["q8_0"] == 4096 - 256
    assert tokens["f16"] < tokens["q8_0"] < tokens["q4_0"] < 8192
    for name, n in tokens.items():
        assert choose_cache_type(large, None, name, n).cache_type == name
        with pytest.raises(EdgespecError, match="not enough memory"):
            choose_cache_type(large, None, name, n + 256)


def test_auto_says_what_it_took(packable_path, tiny_path):
    lines = []
    for path in (packable_path, tiny_path):
        with Engine(
            path,
            cache_type="auto",
            n_ctx=256,
            parallel=2,
            drafter="none",
            profile=False,
            on_message=lines.append,
        ) as engine:
            assert engine.capacity.n_cells == 512
            assert not engine.kernels.endswith("cache")
    assert (
        sum("cache in f16, the most exact safe type in which 512 tokens fit" in line for line in lines) == 2
    )


def test_auto_is_what_the_engine_runs_with(packable_path, monkeypatch):
    """Where F16 does not fit."""
    fits = capacity.fits_in_memory

    def no_f16(models, **more):
        if models[0][0].cache_type == "f16":
            raise EdgespecError("not enough memory")
        fits(models, **more)

    monkeypatch.setattr(capacity, "fits_in_memory", no_f16)
    with Engine(packable_path, cache_type="auto", n_ctx=256, drafter="none", profile=False) as engine:
        assert engine.kernels.endswith(", q8_0 cache")
        assert engine.generate("one two", params=GREEDY, n_predict=4).text


def test_auto_is_refused_for_nodes():
    with pytest.raises(UsageError, match="name a type") as error:
        EngineOptions(rpc=("localhost:1",), cache_type="auto")
    assert error.value.field == "cache_type"


def test_the_option(packable_path, tmp_path):
    env = user_environment(tmp_path)
    run = ("run", "--target", str(packable_path), "--drafter", "none", "-n", "4", "--temp", "0", "hello")
    for cache_type in ("q8_0", "q4_0"):
        process = run_cli(*run, "--cache-type", cache_type, "--json", env=env)
        assert process.returncode == 0, process.stderr
        assert f", {cache_type} cache" in process.stdout
    chosen = run_cli(*run, "--cache-type", "auto", env=env)
    assert (chosen.returncode, "cache in f16" in chosen.stderr) == (0, True)
    wrong = run_cli(*run, "--cache-type", "q5_0", env=env)
    assert wrong.returncode == 2
    assert "--cache-type" in wrong.stderr
