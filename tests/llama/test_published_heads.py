"""Draft heads published as files of their own are recognised, and refused with the reason."""

from __future__ import annotations

import gguf
import pytest

from edgespec import Engine
from edgespec.errors import EdgespecError, UsageError
from tiny_states import tiny

N_EMBD, N_VOCAB = 64, 512


def write_head(path, architecture, **fields):
    """A head as far as its header goes; a field that is None is left out."""
    fields = {
        "block_count": 1,
        "embedding_length": N_EMBD,
        "target_hidden_size": N_EMBD,
        "target_layers": [0, 1, 2],
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
        ("eagle3", {}, "an EAGLE-3 head, which edgespec does not run; leave it out"),
        ("dflash", {"target_layers": [0, 1, 1, 2, 2]}, "a DFlash head, which edgespec does not run"),
        ("eagle3", {"target_layers": [0, 1]}, "damaged: it does not say which layers"),
        ("eagle3", {"target_layers": None}, "damaged: it does not say which layers"),
        ("eagle3", {"target_layers": [0, 1, 31]}, "reads layer 31, and this model has 2"),
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


def test_a_target_whose_layers_are_not_given_out(tmp_path):
    head = write_head(tmp_path / "head.gguf", "eagle3")
    assert "no hidden states of single layers of architecture phi3" in refusal(tiny("phi3"), head)


def test_it_is_no_target(tmp_path):
    head = write_head(tmp_path / "head.gguf", "dflash")
    assert "a DFlash head, which drafts beside its own target only" in refusal(
        head, None, EdgespecError, drafter="none"
    )
