"""Whisper models of CTranslate2, whisper.cpp and the hub become the same GGUF; damaged ones one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgespec.apps.speech.speech_model import check_speech_file
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.weights.convert import convert_whisper, stored_shape
from edgespec.apps.speech.weights.reading import n_ordinary
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf import read_gguf, row_bytes, to_floats
from edgespec.models.on_disk import is_whisper_source
from tiny_gguf import write_tiny_gguf
from whisper_files import HEADS, TOKENS, sizes, weights, write_ctranslate2, write_hub, write_whisper_cpp

SIZES = sizes()
WEIGHTS = weights(SIZES)


def write(kind, folder):
    """Write the model in one of the forms; return what is to be converted."""
    if kind == "whisper.cpp":
        return write_whisper_cpp(folder / "ggml-tiny.bin", SIZES, WEIGHTS)
    if kind == "hub":
        return write_hub(folder / "hub", SIZES, WEIGHTS)
    if kind == "shards":
        return write_hub(folder / "shards", SIZES, WEIGHTS, shards=3)
    return write_ctranslate2(folder / "ct2", SIZES, WEIGHTS, int8=kind == "int8")


def tensors_of(path):
    gguf = read_gguf(path)
    data = path.read_bytes()
    found = {}
    for info in gguf.tensors:
        start = gguf.data_start + info.offset
        raw = np.frombuffer(data[start : start + info.bytes], np.uint8)
        width = row_bytes(info.kind, info.columns)
        found[info.name] = to_floats(raw.reshape(-1, width), info.kind, info.columns)
    return found


@pytest.mark.parametrize("kind", ["ctranslate2", "whisper.cpp", "hub", "shards", "int8"])
def test_every_form_becomes_the_same_file(tmp_path, kind):
    source, target = write(kind, tmp_path), tmp_path / "m.gguf"
    assert is_whisper_source(source)
    convert_whisper(source, target, "f16", name="tiny")
    gguf = check_speech_file(target).gguf
    assert gguf.text("general.architecture") == "whisper" and gguf.text("general.name") == "tiny"
    assert gguf.number("whisper.n_mels") == 80 and gguf.number("whisper.vocab_size") == SIZES.n_vocab
    assert gguf.number("whisper.encoder.block_count") == 1
    assert gguf.number("whisper.decoder.block_count") == 2
    assert gguf.number("whisper.decoder.context_length") == 16
    heads = [] if kind == "whisper.cpp" else HEADS
    assert gguf.integers("whisper.alignment_heads") == tuple(np.array(heads, int).reshape(-1))
    assert WhisperTokenizer.from_gguf(target).tokens == tuple(TOKENS)
    found = tensors_of(target)
    assert set(found) == set(WEIGHTS)
    for name, array in WEIGHTS.items():
        expected = array.reshape(stored_shape(name, array.shape)).reshape(found[name].shape)
        np.testing.assert_allclose(found[name], expected, atol=2e-3 if kind == "int8" else 0)


def test_alignment_heads_beside_a_file_of_whisper_cpp(tmp_path):
    source = write("whisper.cpp", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": HEADS}))
    convert_whisper(source, tmp_path / "m.gguf", "q8_0")
    assert read_gguf(tmp_path / "m.gguf").integers("whisper.alignment_heads") == (0, 1, 1, 0)


def test_alignment_heads_of_a_larger_model_are_left_out(tmp_path):
    """As in the description of a distilled model, which has fewer layers."""
    source = write("whisper.cpp", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": [*HEADS, [7, 0]]}))
    convert_whisper(source, tmp_path / "m.gguf", "q8_0")
    assert read_gguf(tmp_path / "m.gguf").integers("whisper.alignment_heads") == ()


def test_files_of_whisper_cpp_whose_vocabulary_has_its_end(tmp_path):
    """The hub's English ones: made from a vocabulary that holds <|endoftext|>."""
    source = tmp_path / "ggml-tiny.en.bin"
    write_whisper_cpp(source, SIZES, WEIGHTS, tokens=[*TOKENS, b"<|endoftext|>"])
    convert_whisper(source, tmp_path / "m.gguf", "q8_0")
    assert WhisperTokenizer.from_gguf(tmp_path / "m.gguf").tokens == tuple(TOKENS)
    write_whisper_cpp(source, SIZES, WEIGHTS, tokens=TOKENS[:-1])
    with pytest.raises(EdgespecError, match="259 ordinary tokens of 1,868, not 260"):
        convert_whisper(source, tmp_path / "m.gguf", "q8_0")


@pytest.mark.parametrize(
    ("n_vocab", "n_tokens", "languages"), [(51_864, 50_256, 99), (51_865, 50_257, 99), (51_866, 50_257, 100)]
)
def test_openais_vocabularies(n_vocab, n_tokens, languages):
    assert n_ordinary(n_vocab) == n_tokens
    assert len(WhisperTokenizer((b"a",) * n_tokens, n_vocab).languages) == languages


def test_types(tmp_path):
    convert_whisper(write("hub", tmp_path), tmp_path / "a.gguf", "q8_0")
    kinds = {info.name: info.type for info in read_gguf(tmp_path / "a.gguf").tensors}
    assert kinds["encoder.conv1.weight"] == "f16"  # rows of 240 are no whole blocks
    assert kinds["encoder.conv2.weight"] == kinds["decoder.token_embedding.weight"] == "q8_0"
    assert kinds["encoder.positional_embedding"] == kinds["decoder.ln.bias"] == "f32"
    with pytest.raises(UsageError, match="cannot be 'q2_k'"):
        convert_whisper(tmp_path / "hub", tmp_path / "c.gguf", "q2_k")


def test_a_failure_leaves_no_file(tmp_path):
    source = write("hub", tmp_path)
    target = tmp_path / "out" / "m.gguf"
    target.parent.mkdir()

    def stop(done, _total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_whisper(source, target, "q8_0", on_progress=stop)
    assert not list(target.parent.iterdir())
    broken = dict(WEIGHTS, **{"decoder.ln.bias": np.full(64, np.nan, np.float32)})
    with pytest.raises(EdgespecError, match=r"decoder.ln.bias holds numbers that are not finite"):
        convert_whisper(write_hub(tmp_path / "nan", SIZES, broken), target, "q8_0")
    assert not list(target.parent.iterdir())


def test_what_is_missing_or_of_another_model_is_said(tmp_path):
    target = tmp_path / "m.gguf"
    less = {name: array for name, array in WEIGHTS.items() if name != "encoder.ln_post.bias"}
    with pytest.raises(EdgespecError, match=r"the tensor encoder.ln_post.bias is missing"):
        convert_whisper(write_hub(tmp_path / "less", SIZES, less), target, "q8_0")
    with pytest.raises(EdgespecError, match="CTranslate2 calls it 'TransformerSpec', not a Whisper model"):
        convert_whisper(
            write_ctranslate2(tmp_path / "c", SIZES, WEIGHTS, spec="TransformerSpec"), target, "q8_0"
        )
    folder = write_hub(tmp_path / "llama", SIZES, WEIGHTS)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EdgespecError, match="describes no Whisper model"):
        convert_whisper(folder, target, "q8_0")
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"config\.json: no such file"):
        convert_whisper(folder, target, "q8_0")
    with pytest.raises(UsageError, match=r"no Whisper model: neither model\.bin"):
        convert_whisper(tmp_path, target, "q8_0")
    other = write_tiny_gguf(tmp_path / "text.gguf")
    with pytest.raises(EdgespecError, match="a language model, which writes text; choose a Whisper model"):
        check_speech_file(other)


@pytest.mark.parametrize("kind", ["ctranslate2", "whisper.cpp", "hub"])
def test_damaged_files_are_one_line(tmp_path, kind):
    source = write(kind, tmp_path)
    file = (
        source
        if source.is_file()
        else source / ("model.bin" if kind == "ctranslate2" else "model.safetensors")
    )
    whole = file.read_bytes()
    rng = np.random.default_rng(7)
    refused = 0
    for i in range(60):
        data = bytearray(whole)
        if i % 2:
            data = data[: rng.integers(0, len(data))]
        else:  # in descriptions, which are at the start, and between tensors
            for _ in range(8):
                data[rng.integers(0, 20_000 if i % 4 else 200)] = rng.integers(0, 256)
        file.write_bytes(data)
        try:
            convert_whisper(source, tmp_path / "m.gguf", "f16")
        except EdgespecError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 30
