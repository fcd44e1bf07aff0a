"""The reader of GGUF files: what it says is what the gguf package says, and damage is one line."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import EdgespecError
from edgespec.llama.gguf import (
    F32,
    STRING,
    TOKEN_TYPES,
    TOKENS,
    block_size,
    is_type,
    read_gguf,
    row_bytes,
    to_floats,
)
from edgespec.llama.quantize import ASK_IMPORTANCE, QUANT_TYPES, quantize
from tiny_gguf import write_tiny_gguf

KINDS = {
    "uint8": 200, "int8": -3, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000,
    "int32": -2_000_000_000, "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1,
}  # fmt: skip


def test_fields_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "fields.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in KINDS.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve \n")
    writer.add_array("numbers", [3, -1, 2])
    writer.add_array("floats", [0.5, -2.0])
    writer.add_token_list(["a", "", "\N{SNOWMAN}\0b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_gguf(path)
    assert {key: found.number(key) for key in KINDS} == KINDS
    assert found.integers("yes") == (1,)
    assert found.text("text") == "naïve \n"
    assert found.integers("numbers") == (3, -1, 2)
    assert found.numbers("floats").tolist() == [0.5, -2.0]
    assert found.texts(TOKENS) == [b"a", b"", "\N{SNOWMAN}\0b".encode()]
    assert found.tensors == ()
    assert (found.text("no"), found.integers("no"), found.texts("no"), found.n_texts("no")) == ("", (), [], 0)
    assert found.numbers("no").size == 0
    with pytest.raises(KeyError):
        found.number("no")
    data = path.read_bytes()
    joined = b"".join(found.raw(field) for field in found.fields.values())
    assert data[24 : 24 + len(joined)] == joined


UNREAD = {"q2_0"}  # by the gguf package


@pytest.mark.parametrize("type_", sorted(set(QUANT_TYPES) - ASK_IMPORTANCE - UNREAD - {"bf16"}))
def test_tensors_are_those_of_the_gguf_package(tmp_path: Path, type_: str) -> None:
    source = write_tiny_gguf(tmp_path / "source.gguf", n_embd=256, n_ff=256, tied=True)
    quantize(source, tmp_path / "model.gguf", type_)
    found, reference = read_gguf(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    assert found.data_start == reference.data_offset
    assert len(found.tensors) == len(reference.tensors)
    for mine, theirs in zip(found.tensors, reference.tensors, strict=True):
        assert (mine.name, mine.kind) == (theirs.name, theirs.tensor_type)
        assert mine.shape == tuple(theirs.shape.tolist())
        assert mine.bytes == theirs.n_bytes
        assert mine.type.lower() == theirs.tensor_type.name.lower()
        assert found.data_start + mine.offset == theirs.data_offset


def test_types_beyond_ggmls_table_are_none() -> None:
    known = [kind for kind in range(-5, 1000) if is_type(kind)]
    assert max(known) < 100
    assert set(known) >= {int(kind) for kind in gguf.GGMLQuantizationType}
    for kind in set(gguf.GGMLQuantizationType) - {gguf.GGMLQuantizationType.Q8_1}:  # wrong there; in no file
        block, size = gguf.GGML_QUANT_SIZES[kind]
        assert (block_size(kind), row_bytes(kind, 4 * block)) == (block, 4 * size)


def test_rows_as_floats(tiny_path: Path) -> None:
    raw = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(to_floats(raw.view(np.uint8), F32, 4), raw)


@pytest.mark.parametrize("key", ["llama.block_count", TOKENS, TOKEN_TYPES, "general.name"])
def test_a_field_of_another_type_is_damage(tiny_path: Path, key: str) -> None:
    found = read_gguf(tiny_path)
    asked = {
        found.text: "general.name",
        found.integers: "llama.block_count",
        found.n_texts: TOKENS,
        found.numbers: TOKEN_TYPES,
    }
    for ask, good in asked.items():
        if key == good or (ask == found.integers and key == TOKEN_TYPES):
            ask(key)
        else:
            with pytest.raises(EdgespecError, match=f"damaged: '{key}' has the wrong type"):
                ask(key)


# ---- damage ----


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def written(path: Path, *fields: bytes, tensors: bytes = b"", n_tensors: int = 0) -> Path:
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, len(fields)) + b"".join(fields) + tensors)
    return path


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    layout = f"<I{len(shape)}QIQ"
    return struct.pack("<Q", len(name)) + name + struct.pack(layout, len(shape), *shape, kind, offset)


HUGE = struct.pack("<Q", (1 << 64) - 1)
DAMAGES = {
    "a key twice": ([field(b"a", 4, bytes(4))] * 2, b"", 0),
    "a key without a name": ([field(b"", 4, bytes(4))], b"", 0),
    "an unknown type": ([field(b"a", 13, bytes(8))], b"", 0),
    "an array of arrays": ([field(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(20))], b"", 0),
    "an endless key": ([HUGE + b"a"], b"", 0),
    "an endless text": ([field(b"a", 8, HUGE + b"text")], b"", 0),
    "an endless array": ([field(b"a", 9, struct.pack("<I", 5) + HUGE)], b"", 0),
    "an endless list": ([field(b"a", 9, struct.pack("<I", 8) + HUGE + bytes(800))], b"", 0),
    "a list with an endless text": ([field(b"a", 9, struct.pack("<IQ", 8, 3) + HUGE * 3)], b"", 0),
    "an alignment of 0": ([field(b"general.alignment", 4, bytes(4))], b"", 0),
    "an alignment of 3": ([field(b"general.alignment", 4, b"\3\0\0\0")], b"", 0),
    "a tensor twice": ([], tensor(b"a", (8,)) + tensor(b"a", (8,), offset=32), 2),
    "a tensor's long name": ([], tensor(b"a" * 64, (8,)), 1),
    "five dimensions": ([], tensor(b"a", (1, 1, 1, 1, 1)), 1),
    "many dimensions": ([], struct.pack("<Q", 1) + b"a" + b"\xff" * 100, 1),
    "an unknown tensor type": ([], tensor(b"a", (8,), kind=4), 1),
    "a type beyond the table": ([], tensor(b"a", (8,), kind=1 << 30), 1),
    "half a block": ([], tensor(b"a", (48,), kind=2), 1),
    "tensors over one another": ([], tensor(b"a", (64,)) + tensor(b"b", (64,), offset=32), 2),
    "more tensors than there are": ([], tensor(b"a", (8,)), 1 << 40),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line(tmp_path: Path, damage: str) -> None:
    fields, tensors, n_tensors = DAMAGES[damage]
    path = written(tmp_path / "bad.gguf", *fields, tensors=tensors, n_tensors=n_tensors)
    with pytest.raises(EdgespecError, match=r"bad\.gguf: damaged or incomplete") as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def read_all(path: Path) -> None:
    """Read every field as what it says that it is."""
    found = read_gguf(path)
    for key, one in found.fields.items():
        found.raw(one)
        if one.is_array and one.kind == STRING:
            assert len(found.texts(key)) == one.n
        elif one.is_array:
            assert len(found.numbers(key)) == one.n


def test_any_flipped_bit_and_any_cut_is_survived(tmp_path: Path, tiny_path: Path) -> None:
    data = tiny_path.read_bytes()
    start = read_gguf(tiny_path).data_start
    rng = random.Random(7)
    path = tmp_path / "damaged.gguf"
    refused = {"bit": 0, "cut": 0}
    for i in range(2000):
        damaged, kind = bytearray(data[: start + 64]), "bit" if i % 4 else "cut"
        if kind == "bit":
            bit = rng.randrange(start * 8)
            damaged[bit // 8] ^= 1 << bit % 8
        else:
            del damaged[rng.randrange(start - 32) :]  # the last bytes may be padding
        path.write_bytes(damaged)
        try:
            read_all(path)
        except EdgespecError as error:
            refused[kind] += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 400 + len(str(path))
    assert refused["cut"] == 500
    assert 300 < refused["bit"] < 1500


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    found = read_gguf(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EdgespecError, match="became shorter"):
        found.texts(TOKENS)
