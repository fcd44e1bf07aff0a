"""Draft heads published as files of their own are recognised, and refused with the reason."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from edgespec import Engine
from edgespec.drafting.heads import published
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import check_model_file
from head_files import write_dflash, write_eagle, write_gemma
from tiny_models import make_tiny
from tiny_states import tiny
from tiny_vocabulary import vocabulary

N_EMBD, N_VOCAB = 64, 512


def write_head(path, architecture, **fields):
    """A head as far as its header goes; a field that is None is left out."""
    fields = {
        "block_count": 1,
        "embedding_length": N_EMBD,
        "target_hidden_size": N_EMBD,
        "target_layers": [0, 1, 1],
        "n_vocab": N_VOCAB,
        **fields,
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_token_list([f"<{i}>" for i in range(fields.pop("n_vocab"))])
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-path.stat().st_size % 32))  # where tensors would begin
    return path


def refusal(target, head, kind=UsageError, **options):
    with pytest.raises(kind) as caught:
        Engine(target, head, profile=False, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        (
            "dflash",
            {"hyper_connection.count": 4},
            "a DSpark head of DeepSeek V4's blocks, which edgespec does not run: llama.cpp cannot take",
        ),
        (
            "eagle3",
            {"norm_output": 1},
            "EAGLE-3.1 head with norms of another form, which edgespec does not run",
        ),
        (
            "eagle3",
            {"fc_norm": 1},
            "which edgespec does not run: llama.cpp has no form for norms of single layers",
        ),
        ("eagle3", {"target_layers": [0, 1]}, "damaged: it does not say which layers"),
        ("eagle3", {"target_layers": None}, "damaged: it does not say which layers"),
        ("eagle3", {"target_layers": [0, 1, 31]}, "goes into layer 31, from 0 on, and this model has 2"),
        ("eagle3", {"target_layers": [0, 1, 3]}, "goes into layer 3, from 0 on, and this model has 2"),
        (
            "eagle3",
            {"target_layers": [0, 1, 2]},
            "no hidden states of all of these layers of architecture llama",
        ),
        ("eagle3", {"target_hidden_size": 4096}, "hidden states of 4096 numbers, and this model has 64"),
        ("dflash", {"embedding_length": 4096}, "hidden states of 4096 numbers, and this model has 64"),
        ("eagle3", {"n_vocab": 5}, "it knows 5 tokens"),
        ("gemma4-assistant", {}, "for Gemma 4, not for architecture llama"),
    ],
)
def test_why_a_head_is_not_run(tmp_path, architecture, fields, said):
    message = refusal(tiny("llama"), write_head(tmp_path / "head.gguf", architecture, **fields))
    assert said in message
    assert ("does not fit llama-1.gguf" in message) == ("does not run" not in said)


WORDS, TYPES = vocabulary()


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"block_count": 2}, UsageError, "damaged: it has 2 blocks, not one"),
        ({"attention.value_length": 8}, UsageError, "keys and values are of different widths"),
        ({"n_embd": 32, "own": False}, UsageError, "those of the target are of another width"),
        ({"token_embd.weight": np.zeros((9, 64), np.float32)}, UsageError, "it has embeddings of 9 tokens"),
        ({"own": False, "kept": 9}, UsageError, "the target's is of other tokens"),
        ({"kept": 9, "d2t": np.arange(9, dtype=np.int32)}, UsageError, "not of 64-bit integers"),
        (
            {"kept": 2, "d2t": np.array([1, 400])},
            UsageError,
            "names some twice, or some that it does not know",
        ),
        ({"kept": 2, "d2t": np.array([1, 1])}, UsageError, "names some twice"),
        ({"fc.weight": None}, EdgespecError, "tensor 'fc.weight' not found"),
        ({"fc.weight": np.zeros((64, 64), np.float32)}, EdgespecError, "'fc.weight' has wrong shape"),
        ({"texts": (WORDS[::-1], TYPES)}, UsageError, "a head of another model than"),
    ],
)
def test_a_damaged_head_or_one_of_another_model(tmp_path, options, kind, said):
    head = write_eagle(tmp_path / "head.gguf", tiny("llama"), **options)
    assert said in refusal(tiny("llama"), head, kind)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        (
            {"markov": 32, "top_k": 7},
            UsageError,
            "with the parts of DSpark and of DFlash 2, which edgespec does",
        ),
        (
            {"markov_gate.weight": np.ones((8, 8), np.float32)},
            UsageError,
            "with parts of its own, which edgespec",
        ),
        ({"markov": 32, "block_size": None}, UsageError, "a DSpark head, damaged: it does not say how large"),
        ({"markov": 32, "markov_w2.weight": None}, EdgespecError, "tensor 'markov_w2.weight' not found"),
        ({"top_k": 8}, EdgespecError, "DFlash2 hidden size is too small for the selector lattice"),
        (
            {"top_k": 7, "blk.0.attn_conv_base": np.ones((2, 2, N_EMBD), np.float16)},
            UsageError,
            "a DFlash 2 head, damaged: its convolutions are not of 32-bit floats",
        ),
        ({"block_size": 1}, UsageError, "its blocks are of 1 tokens, and should be of 2 to 33"),
        ({"mask": None}, UsageError, "it does not say which token is the mask"),
        ({"mask": 4000}, UsageError, "it does not say which token is the mask"),
        ({"own": False, "kept": 9}, UsageError, "the target's is of other tokens"),
        ({"target_layers": [1, 3]}, UsageError, "goes into layer 3, from 0 on, and this model has 2"),
        ({"fc.weight": None}, EdgespecError, "tensor 'fc.weight' not found"),
    ],
)
def test_a_damaged_head_of_blocks(tmp_path, options, kind, said):
    head = write_dflash(tmp_path / "head.gguf", tiny("llama"), **options)
    assert said in refusal(tiny("llama"), head, kind)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"embedding_length_out": 128}, "it reads hidden states of 128 numbers, and this model has 64"),
        ({"attention.key_length": 64}, "its keys and values are of another size than this model's"),
        ({"attention.value_length_swa": 32}, "its keys and values are of another size"),
        ({"attention.head_count_kv": 4}, "its keys and values are of another size"),
        ({"attention.sliding_window_pattern": [True]}, "it does not say which of its layers have a sliding"),
        ({"nextn_predict_layers": 1}, "a Gemma 4 head, damaged: it says that 1 of its 2 layers draft"),
        ({"texts": (WORDS[::-1], TYPES)}, "a head of another model than"),
    ],
)
def test_a_gemma_head_that_does_not_fit(tmp_path, options, said):
    head = write_gemma(tmp_path / "head.gguf", tiny("gemma4"), **options)
    assert said in refusal(tiny("gemma4"), head)


def test_a_gemma_target_whose_last_layers_are_others(tmp_path):
    pattern = {"attention.sliding_window_pattern": (False, True, False, True)}
    target = make_tiny("gemma4", tmp_path / "target.gguf", metadata=pattern)
    head = write_gemma(tmp_path / "head.gguf", target)
    assert "last layers are not one with a sliding window and one without" in refusal(target, head)


def test_a_truncated_head(tmp_path):
    head = write_eagle(tmp_path / "head.gguf", tiny("llama"))
    head.write_bytes(head.read_bytes()[:-999])
    assert "truncated" in refusal(tiny("llama"), head, EdgespecError)


def test_a_library_without_these_functions(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "of_layers", lambda *_layers: None)
    head = write_eagle(tmp_path / "head.gguf", tiny("llama"))
    assert "this llama.cpp does not export what it needs" in refusal(tiny("llama"), head)


def test_a_target_whose_layers_are_not_given_out(tmp_path):
    head = write_head(tmp_path / "head.gguf", "eagle3")
    line = refusal(tiny("phi3"), head)
    assert "no hidden states of all of these layers of architecture phi3" in line
    assert "or it reads the embeddings" in line


def test_it_is_no_target(tmp_path):
    head = write_head(tmp_path / "head.gguf", "dflash")
    assert "a DFlash head, which drafts beside its own target only" in refusal(
        head, None, EdgespecError, drafter="none"
    )
    assert check_model_file(head, or_head=True).architecture == "dflash", "but it can have a name"
