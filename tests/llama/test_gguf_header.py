"""Every bad file ends in one clear line; damage never ends in a crash."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import check_model_file, read_header
from tiny_gguf import N_WORDS, write_tiny_gguf


def refusal(path: Path, kind: type[EdgespecError] = EdgespecError) -> str:
    with pytest.raises(EdgespecError) as caught:
        check_model_file(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_header_of_the_tiny_model(tiny_path: Path) -> None:
    header = check_model_file(tiny_path)
    assert header == read_header(str(tiny_path))
    assert (header.architecture, header.name, header.tokenizer) == ("llama", "tiny 1", "gpt2")
    assert (header.n_layer, header.n_embd, header.n_head, header.n_head_kv) == (2, 64, 4, (2, 2))
    assert (header.head_dim_k, header.head_dim_v, header.n_ctx_train) == (16, 16, 512)
    assert header.n_vocab == N_WORDS + 4
    assert header.file_bytes == tiny_path.stat().st_size >= header.expected_bytes
    # 2 layers x 2 heads x (16 + 16) numbers x 2 bytes, for 512 cells: 257 are rounded up
    assert header.kv_bytes(257) == header.kv_bytes(512) == 512 * 2 * 2 * 32 * 2


def test_heads_stated_per_layer(tmp_path: Path) -> None:
    path = tmp_path / "layers.gguf"
    writer = gguf.GGUFWriter(path, "openelm")
    writer.add_block_count(3)
    writer.add_embedding_length(64)
    writer.add_head_count([4, 4, 8])
    writer.add_head_count_kv([1, 0, 2])
    writer.add_key_length(8)
    writer.add_value_length(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = read_header(path)
    assert (header.n_head_kv, header.n_head) == ((1, 0, 2), 8)
    assert header.kv_bytes(1) == 256 * 3 * 12 * 2


def test_texts_are_fit_for_one_line(tmp_path: Path) -> None:
    assert read_header(write_tiny_gguf(tmp_path / "a.gguf", name="a\n\x1b[31mb")).name == "a[31mb"


def test_no_such_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.gguf", UsageError)


def test_directory(tmp_path: Path) -> None:
    assert "a directory" in refusal(tmp_path, UsageError)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    assert "not a regular file" in refusal(path, UsageError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    assert "Permission denied" in refusal(path, UsageError)


def test_read_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    assert "Permission denied" in refusal(path, UsageError)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"\x10\x02\x00\x00\x00\x00\x00\x00" + b'{"__metadata__":{"format":"pt"}}', "a safetensors file"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"\x80\x02}q\x00", "a Python pickle"),
        (b"\n<!DOCTYPE html><html><title>Log in</title>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a git-lfs pointer"),
        (b"tjgg\x03\x00\x00\x00", "a GGML file of 2023"),
        (bytes(4096), "zeros"),
        (b"Repository not found", "a text file"),
        (b"\x7fELF\x02\x01\x01", "an unknown kind of file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(64), "version 1 is not supported"),
        (b"GGUF\x00\x00\x00\x03" + bytes(64), "a big-endian GGUF"),
        (b"GGUF", "damaged or incomplete (4 bytes)"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "damaged or incomplete"),
    ],
)
def test_not_a_model(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert words in refusal(path)


def test_truncated_tensors_with_both_figures(tmp_path: Path, tiny_path: Path) -> None:
    whole = read_header(tiny_path)
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_path.read_bytes()[: whole.expected_bytes - 1])
    message = refusal(path)
    assert f"{whole.expected_bytes - 1:,} bytes of {whole.expected_bytes:,}" in message
    assert "download it again" in message


def test_truncated_header(tmp_path: Path, tiny_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_path.read_bytes()[:3000])
    assert "damaged or incomplete (3,000 bytes)" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "clip"}, "projector"),
        ({"general_type": "mmproj"}, "projector"),
        ({"general_type": "adapter"}, "a LoRA adapter"),
        ({"general_type": "imatrix"}, "an importance matrix"),
        ({"architecture": ""}, "no architecture"),
        ({"architecture": "bert"}, "embedding"),
        ({"architecture": "gemma-embedding"}, "embedding"),
        ({"architecture": "t5"}, "encoder-decoder"),
        ({"architecture": "eagle3"}, "an EAGLE-3 head"),
        ({"architecture": "qwen3", "extra": {"{arch}.pooling_type": 3}}, "embedding"),
        ({"extra": {"{arch}.attention.causal": False}}, "embedding"),
        ({"tokenizer": False}, "without a tokenizer"),
        ({"n_layer": 0}, "0 layers"),
        ({"extra": {"{arch}.pooling_type": "last"}}, "wrong type"),
    ],
)
def test_valid_gguf_of_the_wrong_kind(tmp_path: Path, changes: dict, words: str) -> None:
    assert words in refusal(write_tiny_gguf(tmp_path / "model.gguf", **changes))


def test_causal_models_with_suspicious_names_pass(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "model.gguf", architecture="pangu-embedded", extra={"{arch}.pooling_type": 0}
    )
    assert check_model_file(path).architecture == "pangu-embedded"


def _write_split(directory: Path, names: list[str]) -> list[Path]:
    return [
        write_tiny_gguf(directory / name, extra={"split.no": no, "split.count": len(names)})
        for no, name in enumerate(names)
    ]


def test_split_model(tmp_path: Path) -> None:
    first, second = _write_split(tmp_path, ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"])
    assert check_model_file(first).file_bytes == first.stat().st_size + second.stat().st_size
    message = refusal(second, UsageError)
    assert "part 2 of 2" in message
    assert first.name in message
    size = second.stat().st_size
    os.truncate(second, size - 100)
    with pytest.raises(EdgespecError, match=f"{second.name}: truncated"):
        check_model_file(first)
    second.unlink()
    with pytest.raises(UsageError, match=f"{second.name}: no such file"):
        check_model_file(first)


def test_split_model_with_other_names(tmp_path: Path) -> None:
    first, _ = _write_split(tmp_path, ["a.gguf", "b.gguf"])
    assert "original names" in refusal(first, UsageError)


LOAD_EACH = """
import sys
from edgespec.errors import EdgespecError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
for path in sys.argv[1:]:
    print("begin", path, flush=True)
    try:
        with Model(path) as model, Session(model, n_ctx=64, n_threads=1) as session:
            session.eval(model.tokenize("the cat", add_special=True, parse_special=True)[:8] or [0])
            model.tokenize_chat([{"role": "user", "content": "hi"}])
        print("works", flush=True)
    except EdgespecError as error:
        print("error", error, flush=True)
"""


def outcomes(paths: list[Path], environment: dict[str, str]) -> dict[Path, str]:
    """Load each file, many in one process; where one ends the process, go on with the next."""
    seen: dict[Path, str] = {}
    while left := [path for path in paths if path not in seen]:
        run = subprocess.run(
            [sys.executable, "-c", LOAD_EACH, *map(str, left)],
            check=False,
            capture_output=True,
            env=environment,
            timeout=300,
        )
        lines = run.stdout.decode(errors="replace").splitlines()
        for begin, result in zip(lines[::2], lines[1::2], strict=False):
            seen[Path(begin.removeprefix("begin "))] = result
        stderr = run.stderr.decode(errors="replace")
        if run.returncode == 0:
            assert stderr == ""
            break
        assert run.returncode == 1, (lines[-1], run.returncode, stderr)
        seen[Path(lines[-1].removeprefix("begin "))] = stderr.rstrip("\n")
    return seen


def test_flipped_bits_and_cuts_never_crash(
    tmp_path: Path, tiny_path: Path, child_environment: dict[str, str]
) -> None:
    data = tiny_path.read_bytes()
    header_bytes = gguf.GGUFReader(tiny_path).data_offset
    rng = random.Random(20240)
    paths = []
    for bit in rng.sample(range(header_bytes * 8), 200):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        paths.append(tmp_path / f"bit{bit}.gguf")
        paths[-1].write_bytes(damaged)
    cuts = rng.sample(range(header_bytes), 10) + rng.sample(range(header_bytes, len(data) - 32), 10)
    for size in cuts:
        paths.append(tmp_path / f"cut{size}.gguf")
        paths[-1].write_bytes(data[:size])

    seen = outcomes(paths, child_environment)
    assert set(seen) == set(paths)
    for path, outcome in seen.items():
        assert "\n" not in outcome
        assert outcome.startswith(("works", "error ", "edgespec: error: llama.cpp stopped: llama-")), outcome
        assert not (path.name.startswith("cut") and outcome == "works")
    n_works = sum(outcome == "works" for outcome in seen.values())
    assert 0 < n_works < 200
