"""Which file, and which tokenizer: what has the same name, and what has another."""

import dataclasses
import shutil

import gguf
import pytest

from edgespec.drafting.history import History, find_histories
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import check_model_file, read_header, tokenizer_fingerprint
from edgespec.llama.quantize import quantize
from tiny_gguf import IM_END, write_tiny_gguf

# ---- files ----


def test_fingerprints(tiny_path, tmp_path):
    header = check_model_file(tiny_path)
    first = header.fingerprint()
    assert len(first) == 64
    copy = tmp_path / "copy.gguf"
    shutil.copy(tiny_path, copy)
    other = dataclasses.replace(header, path=copy)
    assert other.fingerprint() == first, "the name does not matter"
    data = bytearray(tiny_path.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert other.fingerprint() != first
    copy.write_bytes(tiny_path.read_bytes() + b"\0")
    assert other.fingerprint() != first
    split = dataclasses.replace(header, other_parts=(copy,))
    assert split.fingerprint() != first, "all parts count"
    with pytest.raises(OSError, match="gone"):
        dataclasses.replace(header, path=tmp_path / "gone").fingerprint()


def test_fingerprint_of_a_small_file(tiny_path, tmp_path):
    header = check_model_file(tiny_path)
    small = tmp_path / "small"
    found = set()
    for data in (b"", b"1", b"12"):
        small.write_bytes(data)
        found.add(dataclasses.replace(header, path=small).fingerprint())
    assert len(found) == 3


# ---- tokenizers ----


def test_one_fingerprint_for_a_family(tmp_path, tiny_path, tiny_draft_path, tiny_target):
    quantize(tiny_path, tmp_path / "q8.gguf", "q8_0")
    padded = []
    for n in (3, 64):  # named after their ids, as llama.cpp's converter does
        names = {IM_END + i: f"[PAD{IM_END + i}]" for i in range(1, n + 1)}
        padded.append(write_tiny_gguf(tmp_path / f"padded{n}.gguf", n_padding=n, texts=names))
    finetuned = write_tiny_gguf(tmp_path / "finetuned.gguf", chat_template=None, name="another")
    paths = [tiny_path, tiny_draft_path, tmp_path / "q8.gguf", *padded, finetuned]
    fingerprints = {tokenizer_fingerprint(read_header(path)) for path in paths}
    assert fingerprints == {tokenizer_fingerprint(tiny_target.header)}
    (name,) = fingerprints
    assert name.startswith("gpt-2-")
    History(name)


def test_other_tokens_other_fingerprint(tmp_path, tiny_path):
    changed = [
        write_tiny_gguf(tmp_path / f"{i}.gguf", texts={token: "other"})
        for i, token in enumerate((0, 100, 283))
    ]
    names = {tokenizer_fingerprint(read_header(path)) for path in (tiny_path, *changed)}
    assert len(names) == 4


def write_vocabulary(path, *, texts, pre=None, model="llama", more=()):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    for key, value in more:
        writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokenizer_fingerprint(read_header(path))


def test_fingerprints_of_lists_that_nothing_or_something_else_follows(tmp_path):
    texts = [f"token {i}" for i in range(300)]
    last = write_vocabulary(tmp_path / "last.gguf", texts=texts)
    assert last.startswith("llama-")
    for key in ("general.name", "tokenizer.ggml.added", "llama.note"):
        assert write_vocabulary(tmp_path / f"{key}.gguf", texts=texts, more=[(key, "x")]) == last
    texts[-1] = "another"
    assert write_vocabulary(tmp_path / "other.gguf", texts=texts) != last


def test_the_readable_part_can_be_a_file_name(tmp_path, monkeypatch):
    name = write_vocabulary(tmp_path / "odd.gguf", texts=["a"], pre="../odd name\n" + "x" * 100)
    assert name.startswith(".._odd_name_x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    History(name).append([1])
    assert [history.fingerprint for history in find_histories()] == [name]


def test_a_file_without_tokens_has_no_fingerprint(tmp_path):
    path = write_tiny_gguf(tmp_path / "bare.gguf", tokenizer=False)
    with pytest.raises(EdgespecError, match="no token list"):
        tokenizer_fingerprint(read_header(path))


@pytest.mark.pair
def test_the_real_pair_shares_a_history(pair):
    names = {tokenizer_fingerprint(read_header(path)) for path in pair}
    assert len(names) == 1
    assert names.pop().startswith("qwen2-")
