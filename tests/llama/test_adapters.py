"""LoRA adapters: products beside the kernels', texts of a crowd with several sets, what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from edgespec import Engine, Options, SamplingParams
from edgespec.engine import batcher
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.adapters import check_adapter, load_adapters
from edgespec.llama.choices import Lora, StateRoom, read_lora
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from random_adapters import ALL, write_adapter
from random_heads import write_random_head
from tiny_architectures import write_architecture
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny

N_CTX = 512
TOKENS = np.random.default_rng(5).integers(0, 256, 70).tolist()
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(7 * i * i + 3) % 250 for i in range(60)]
ADAPTERS = [(4, "F32"), (4, "F16"), (16, "F32"), (16, "F16"), (32, "F16"), (32, "Q8_0"), (32, "BF16")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the path of a quantized model of an architecture, made on first use."""
    directory = tmp_path_factory.mktemp("models")

    def path(name, kind="q4_0"):
        target = directory / f"{name}-{kind}.gguf"
        if not target.exists():
            whole = directory / f"{name}.gguf"
            source = (
                make_tiny(name, whole) if name == "qwen3moe" else write_architecture(directory, name, N_CTX)
            )
            quantize(source, target, kind)
        return target

    return path


def load(model, given):
    packed = {weight.name for weight in model.packed}
    model.adapters = load_adapters(model.handle, model.header, packed, given)


def rows(model, applied, batch):
    """The logits after each of TOKENS, read in batches with these adapters."""
    with Session(model, n_ctx=N_CTX, n_threads=2) as session:
        session.adapters = applied
        parts = [TOKENS[i : i + batch] for i in range(0, len(TOKENS), batch)]
        return np.concatenate([session.eval(part, n_logits=len(part)).copy() for part in parts])


def distance(a, b):
    """Of a usual row: where experts are chosen, some rows get others."""
    return float(np.median(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)))


@pytest.mark.proof
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "qwen3moe"])
def test_logits_are_llama_cpps_and_the_same_in_any_batch(kernels, models, tmp_path, name):
    target = models(name)
    files = [
        write_adapter(
            tmp_path / f"{rank}-{kind}.gguf", target, rank=rank, kind=kind, seed=rank, alpha=4.0 * rank
        )
        for rank, kind in ADAPTERS
    ]
    given = [Lora(file) for file in files]
    with Model(target) as ours, Model(target, kernels=False) as stock:
        assert ours.uses_kernels
        for model in (ours, stock):
            load(model, given)
        plain = rows(ours, (), 1)
        assert distance(plain, rows(stock, (), 1)) < 0.1
        for applied in [*(((number, 1.0),) for number in range(len(files))), ((0, 0.5), (3, -1.0))]:
            each = rows(ours, applied, 1)
            assert 2 * distance(each, rows(stock, applied, 1)) < distance(each, plain) > 0.1
            for batch in (2, 7, 16, 64):
                assert np.array_equal(rows(ours, applied, batch), each), (applied, batch)


@pytest.mark.proof
def test_an_adapter_of_all_matrices_of_a_model_with_an_output_of_its_own(kernels, tmp_path):
    source = write_tiny_gguf(tmp_path / "f32.gguf", n_embd=256, n_ff=512, n_head=4, n_head_kv=2, tied=False)
    quantize(source, target := tmp_path / "q4_0.gguf", "q4_0")
    file = write_adapter(tmp_path / "a.gguf", target, kind="F16", names=rf"{ALL}|(token_embd|output)\.weight")
    with Model(target) as ours, Model(target, kernels=False) as stock:
        for model in (ours, stock):
            load(model, [Lora(file)])
        each = rows(ours, ((0, 1.0),), 1)
        assert distance(each, rows(stock, ((0, 1.0),), 1)) < 0.2 < distance(each, rows(ours, (), 1))
        assert np.array_equal(rows(ours, ((0, 1.0),), 16), each)


# ---- whole engines ----


@pytest.fixture(scope="module")
def adapted(models, tmp_path_factory):
    """A target and two adapters."""
    directory, target = tmp_path_factory.mktemp("adapted"), models("qwen2", "f16")
    files = [
        write_adapter(directory / f"{rank}.gguf", target, rank=rank, kind=kind, seed=rank, strength=0.15)
        for rank, kind in ((4, "F32"), (16, "F16"))
    ]
    return target, files


SETS = [{}, {0: 1.0}, {1: 1.0}, {0: 0.5, 1: 1.0}]


def texts(engine, drafter="auto", n_predict=40, gamma=None):
    """The greedy text of the prompt with each of the SETS, in shared passes if the engine has them."""
    streams = []
    for scales in SETS:
        options = Options(params=GREEDY, n_predict=n_predict, lora=scales, drafter=drafter, gamma=gamma)
        streams.append(engine.stream(PROMPT, options))
        if engine.parallel == 1:
            assert list(streams[-1]) is not None
    while not all(stream.finished for stream in streams):
        engine.step()
        for stream in streams:
            stream.made()
    return [stream.result.token_ids for stream in streams]


@pytest.mark.proof
@pytest.mark.parametrize("turn_s", [0.0, 0.05])
def test_a_crowd_with_several_sets_gets_what_each_gets_alone(
    kernels, adapted, tiny_draft_path, monkeypatch, tmp_path, turn_s
):
    target, files = adapted
    options = {"n_ctx": N_CTX, "profile": False, "lora": [*map(str, files)]}
    with Engine(target, drafter="none", kernels="off", **options) as engine:
        stock = texts(engine)
    with Engine(target, drafter="none", **options) as engine:
        alone = texts(engine)
        assert alone == stock and len({*alone}) == len(SETS)
    monkeypatch.setattr(batcher, "_TURN_S", turn_s)
    # The prefix cache has the same prompt of every set.
    many = {"parallel": 4, "n_cells": 2048, "prefix_cache": 0, **options}
    for draft in (tiny_draft_path, write_random_head(tmp_path / "head.gguf", target)):
        with Engine(target, draft, **many) as engine:
            for drafter, gamma in (("auto", None), ("model", 3), ("suffix", 3), ("none", None)):
                assert texts(engine, drafter, gamma=gamma) == alone
                assert texts(engine, drafter, gamma=gamma) == alone


def test_each_set_has_its_turn_and_no_pass_has_two(adapted, monkeypatch):
    target, files = adapted
    monkeypatch.setattr(batcher, "_TURN_S", 0.0)
    with Engine(
        target, drafter="none", parallel=4, n_ctx=N_CTX, profile=False, lora=[*map(str, files)]
    ) as one:
        wanted = [{0: 1.0}, {0: 1.0}, {1: 1.0}, {}]
        options = [Options(params=GREEDY, n_predict=12, lora=scales) for scales in wanted]
        streams = [one.stream(PROMPT[:5], each) for each in options]
        made = []
        while not all(stream.finished for stream in streams):
            one.step()
            made.append(tuple(len(stream.made()) for stream in streams))
    writing = made[3:-3]
    assert {tuple(map(bool, counts)) for counts in writing} == {
        (True, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
    }
    assert all(before != after for before, after in pairwise(writing))


def test_states_on_disk_and_tables_belong_to_a_set(kernels, adapted, tmp_path):
    target, files = adapted
    lines = []
    options = {
        "drafter": "suffix",
        "n_ctx": N_CTX,
        "lora": [f"{files[0]}:0", str(files[1])],
        "states": StateRoom(tmp_path / "states", 1 << 30),
        "on_message": lines.append,
    }

    def text(scales):
        with Engine(target, **options) as engine:
            found = engine.generate(PROMPT, params=GREEDY, n_predict=40, lora=scales)
            names = {name for name in engine._knowledge._acceptance if " " in name}
        restored = any("restored" in line for line in lines)
        lines.clear()
        return found.token_ids, restored, names

    usual, was_known, names = text(None)
    assert not was_known and len(names) == 1
    assert text({1: 1.0}) == (usual, True, names)
    other, was_known, others = text({0: 1.0, 1: 1.0})
    assert other != usual and not was_known and others > names
    base, was_known, of_base = text({})
    assert base not in (usual, other) and not was_known and of_base == others
    assert text({0: 1.0, 1: 1.0}) == (other, True, others)


def test_scales_are_set_for_texts_that_ask_for_none(adapted):
    target, files = adapted
    with Engine(target, drafter="none", n_ctx=N_CTX, profile=False, lora=[f"{files[0]}:0.5"]) as engine:

        def text(scales=None):
            return engine.generate(PROMPT, params=GREEDY, n_predict=20, lora=scales).token_ids

        assert text() == text({0: 0.5}) != text({})
        engine.scale_adapters({0: 1.0})
        assert text() == text({0: 1.0}) != text({0: 0.5})
        engine.scale_adapters({})
        assert engine.adapters == (Lora(files[0], 0.0),)
        assert text() == text({})
        for wrong in ({1: 1.0}, {-1: 1.0}):
            with pytest.raises(UsageError, match="no adapter"):
                text(wrong)
            with pytest.raises(UsageError, match="no adapter"):
                engine.scale_adapters(wrong)


# ---- what is refused ----


def _renamed(tensors, old, new):
    for name in [*tensors]:
        tensors[name.replace(old, new)] = tensors.pop(name)


Q = "blk.0.attn_q.weight"
WRONG = {
    "general.type": {"texts": {"general.type": "model"}},
    "adapter.type": {"texts": {"adapter.type": "dora"}},
    "general.architecture": {"texts": {"general.architecture": "llama"}},
    f"{Q}.lora_b: {Q}.lora_a is missing": {"change": lambda tensors: tensors.pop(f"{Q}.lora_a")},
    f"{Q}.lora_a: {Q}.lora_b is missing": {"change": lambda tensors: tensors.pop(f"{Q}.lora_b")},
    "blk.7.ffn_up.weight.lora_a": {
        "change": lambda tensors: _renamed(tensors, "blk.1.ffn_up", "blk.7.ffn_up")
    },
    "weight.lora_x: its name ends": {"change": lambda tensors: _renamed(tensors, "lora_a", "lora_x")},
    "blk.0.attn_q.bias.lora_a": {"change": lambda tensors: _renamed(tensors, "attn_q.weight", "attn_q.bias")},
    f"{Q}.lora_a: the rank": {"change": lambda t: t.update({f"{Q}.lora_b": t[f"{Q}.lora_b"][:, :2].copy()})},
    f"{Q}.lora_a: its shape is (128, 4)": {
        "change": lambda t: t.update({f"{Q}.lora_a": t[f"{Q}.lora_a"][:, :128].copy()})
    },
    f"{Q}.lora_b: its shape is (4, 64)": {
        "change": lambda t: t.update({f"{Q}.lora_b": t[f"{Q}.lora_b"][:64].copy()})
    },
    f"{Q}.lora_a: its type": {
        "change": lambda t: t.update({f"{Q}.lora_a": t[f"{Q}.lora_a"].astype(np.int32)})
    },
    f"{Q}.lora_a: its shape is (256, 4, 2)": {
        "change": lambda t: t.update({f"{Q}.lora_a": np.stack([t[f"{Q}.lora_a"]] * 2)})
    },
    "token_embd.weight.lora_a: this matrix is also": {"names": rf"{ALL}|token_embd\.weight"},
    "blk.0.attn_norm.weight: its name ends": {
        "change": lambda t: t.update({"blk.0.attn_norm.weight": np.ones(256, np.float32)})
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_the_first_wrong_tensor_of_an_adapter_is_named(models, tmp_path, what):
    target = models("qwen2")
    if "also" in what:
        target = write_tiny_gguf(tmp_path / "tied.gguf", tied=True)
    path = write_adapter(tmp_path / "wrong.gguf", target, **WRONG[what])
    with pytest.raises(EdgespecError) as refused:
        check_adapter(path, check_model_file(target))
    line = str(refused.value)
    assert line.startswith(str(path)) and what in line and "\n" not in line


def test_an_adapter_of_another_model_ends_the_start_in_one_line(models, tmp_path):
    other = write_tiny_gguf(tmp_path / "other.gguf", architecture="qwen2", n_embd=64, n_ff=128, n_head=4)
    path = write_adapter(tmp_path / "other-adapter.gguf", other)
    with pytest.raises(
        EdgespecError, match=r"other-adapter.gguf: no LoRA adapter of .*: blk\.0\.attn_q\.weight\.lora_a: "
    ):
        Engine(models("qwen2"), drafter="none", lora=[str(path)])
    with pytest.raises(UsageError, match=r"missing\.gguf"):
        Engine(models("qwen2"), drafter="none", lora=["missing.gguf"])


def test_a_cut_file_is_incomplete(models, tmp_path):
    target = models("qwen2")
    path = write_adapter(tmp_path / "cut.gguf", target)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EdgespecError, match="incomplete"):
        check_adapter(path, check_model_file(target))


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.gguf", "a.gguf", 1.0),
        ("a.gguf:0.5", "a.gguf", 0.5),
        ("b:c/a.gguf", "b:c/a.gguf", 1.0),
        ("b:c/a.gguf:-2e-1", "b:c/a.gguf", -0.2),
        ("a.gguf:", "a.gguf:", 1.0),
        ("a.gguf:x1", "a.gguf:x1", 1.0),
    ],
)
def test_only_a_last_part_that_is_a_number_is_a_scale(text, path, scale):
    assert (str(read_lora(text).path), read_lora(text).scale) == (path, scale)


@pytest.mark.parametrize("text", [":0.5", "a.gguf:nan", "a.gguf:inf", ""])
def test_an_adapter_without_a_name_or_a_finite_scale_is_refused(text):
    with pytest.raises(UsageError) as refused:
        read_lora(text)
    assert refused.value.field == "lora"
