"""Draft heads published as files of their own are recognised, and refused with the reason."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from edgespec import Engine
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import head_file as published_heads
from edgespec.llama.gguf_header import check_model_file
from head_files import write_dflash, write_eagle
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
            "with more parts (DSpark, DFlash 2), which edgespec does not run",
        ),
        ("eagle3", {"target_layers": [0, 1]}, "damaged: it does not say which layers"),
        ("eagle3", {"target_layers": None}, "damaged: it does not say which layers"),
        ("eagle3", {"target_layers": [0, 1, 31]}, "goes into layer 31, from 0 on, and this model has 2"),
        ("eagle3", {"target_layers": [0, 1, 2]}, "goes into layer 2, from 0 on, and this model has 2"),
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
        ({"block_size": 1}, UsageError, "its blocks are of 1 tokens, and should be of 2 to 33"),
        ({"mask": None}, UsageError, "it does not say which token is the mask"),
        ({"mask": 4000}, UsageError, "it does not say which token is the mask"),
        ({"own": False, "kept": 9}, UsageError, "the target's is of other tokens"),
        ({"target_layers": [1, 2]}, UsageError, "goes into layer 2, from 0 on, and this model has 2"),
        ({"fc.weight": None}, EdgespecError, "tensor 'fc.weight' not found"),
    ],
)
def test_a_damaged_head_of_blocks(tmp_path, options, kind, said):
    head = write_dflash(tmp_path / "head.gguf", tiny("llama"), **options)
    assert said in refusal(tiny("llama"), head, kind)


def test_a_truncated_head(tmp_path):
    head = write_eagle(tmp_path / "head.gguf", tiny("llama"))
    head.write_bytes(head.read_bytes()[:-999])
    assert "truncated" in refusal(tiny("llama"), head, EdgespecError)


def test_a_library_without_these_functions(tmp_path, monkeypatch):
    monkeypatch.setattr(published_heads, "of_layers", lambda _layers: None)
    head = write_eagle(tmp_path / "head.gguf", tiny("llama"))
    assert "this llama.cpp does not export what it needs" in refusal(tiny("llama"), head)


def test_a_target_whose_layers_are_not_given_out(tmp_path):
    head = write_head(tmp_path / "head.gguf", "eagle3")
    line = refusal(tiny("phi3"), head)
    assert "no hidden states of single layers of architecture phi3" in line
    assert "or it reads the embeddings" in line


def test_it_is_no_target(tmp_path):
    head = write_head(tmp_path / "head.gguf", "dflash")
    assert "a DFlash head, which drafts beside its own target only" in refusal(
        head, None, EdgespecError, drafter="none"
    )
    assert check_model_file(head, or_head=True).architecture == "dflash", "but it can have a name"
