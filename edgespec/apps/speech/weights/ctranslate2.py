"""Read Whisper models of CTranslate2: a folder with model.bin (version 6), config.json and a vocabulary.

    model.bin = version, name of the specification, revision, number of variables, variables, aliases
    variable  = name, rank, sizes, type, bytes, data             name = length, letters, a zero byte

Lengths have 4 bytes, those of names 2, ranks and types 1. Its layers hold queries, keys and values as one
matrix; matrices of 8-bit integers have a scale for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.apps.speech.mel import Floats
from edgespec.apps.speech.weights.reading import (
    BrokenModelError,
    ByteReader,
    SourceTensor,
    WhisperContents,
    WhisperSizes,
    array_reader,
    blamed,
    heads_in,
    mapped,
    ordinary_tokens,
    read_json,
)
from edgespec.models.on_disk import CTRANSLATE2_MODEL

CONFIG_FILE = "config.json"
VOCABULARIES = ("vocabulary.json", "vocabulary.txt")

_VERSION = 6
_TYPES = {0: ("<f4", 4), 1: ("i1", 1), 2: ("<i2", 2), 3: ("<i4", 4), 4: ("<f2", 2), 5: ("bf16", 2)}
_MOST_VARIABLES = 1 << 16


class _Variable(NamedTuple):
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Floats]


Variables = dict[str, _Variable]


def read_ctranslate2(folder: Path) -> WhisperContents:
    """Return the model in `folder`, its numbers unread. Raises UsageError and EdgespecError."""
    path = folder / CTRANSLATE2_MODEL
    with mapped(path) as data, blamed(path):
        tensors = _read_variables(ByteReader(data))
        sizes = _sizes(tensors)
        named = dict(_named(tensors, sizes))
    with blamed(folder):
        heads = heads_in(read_json(folder / CONFIG_FILE))
        return WhisperContents(folder, sizes, ordinary_tokens(_vocabulary(folder)), heads, named)


def _read_variables(reader: ByteReader) -> Variables:
    version = reader.number("I")
    if version != _VERSION:
        raise BrokenModelError(f"version {version} of CTranslate2's files, only {_VERSION} is known")
    name = _name(reader)
    if name != "WhisperSpec":
        raise BrokenModelError(f"CTranslate2 calls it {name[:40]!r}, not a Whisper model")
    _revision, n = reader.numbers("II")
    if n > _MOST_VARIABLES:
        raise BrokenModelError(f"it says that it has {n:,} variables")
    variables: Variables = {}
    for _ in range(n):
        name, rank = _name(reader), reader.number("B")
        shape = reader.shape("I", rank)
        kind, n_bytes = reader.numbers("BI")
        if kind not in _TYPES or n_bytes != math.prod(shape) * _TYPES[kind][1]:
            raise BrokenModelError(f"the variable {name[:60]!r} has an unknown type or length")
        code, start = _TYPES[kind][0], reader.skip(n_bytes)
        variables[name] = _Variable(shape, code, array_reader(reader.data, start, shape, code))
    for _ in range(0 if reader.is_at_end else min(reader.number("I"), _MOST_VARIABLES)):
        alias, name = _name(reader), _name(reader)
        if name in variables:
            variables.setdefault(alias, variables[name])
    return variables


def _name(reader: ByteReader) -> str:
    return reader.bytes(reader.number("H")).rstrip(b"\0").decode(errors="replace")


def _tensor(variables: Variables, name: str) -> SourceTensor:
    variable, scale = variables.get(name), f"{name}_scale"
    if variable is None:
        raise BrokenModelError(f"the variable {name} is missing")
    if variable.kind in ("i1", "<i2") and scale in variables:
        return SourceTensor(variable.shape, _scaled(variable.read, _tensor(variables, scale)))
    return SourceTensor(variable.shape, variable.read)


def _number(variables: Variables, name: str) -> int:
    variable = variables.get(name)
    if variable is None or math.prod(variable.shape) != 1 or variable.kind[-2:] not in ("i1", "i2", "i4"):
        raise BrokenModelError(f"the number {name} is missing")
    return int(variable.read().reshape(-1)[0])


def _n_layers(variables: Variables, part: str) -> int:
    return sum(f"{part}/layer_{i}/ffn/linear_0/weight" in variables for i in range(len(variables)))


def _scaled(read: Callable[[], Floats], scale: SourceTensor) -> Callable[[], Floats]:
    def divided() -> Floats:
        rows, scales = read(), scale.read().reshape(-1)
        if scales.size not in (1, len(rows)) or not np.all(scales):
            raise BrokenModelError("the scales of a quantized matrix do not fit it")
        return rows / scales.reshape(-1, *(1,) * (rows.ndim - 1))

    return divided


def _sizes(tensors: Variables) -> WhisperSizes:
    conv, embedding = _tensor(tensors, "encoder/conv1/weight"), _tensor(tensors, "decoder/embeddings/weight")
    audio, text = (
        _tensor(tensors, f"{part}/position_encodings/encodings") for part in ("encoder", "decoder")
    )
    if (len(conv.shape), *(len(t.shape) for t in (embedding, audio, text))) != (3, 2, 2, 2):
        raise BrokenModelError("its embeddings and convolutions are no matrices")
    return WhisperSizes(
        conv.shape[1],
        embedding.shape[0],
        *(*audio.shape, _number(tensors, "encoder/num_heads"), _n_layers(tensors, "encoder")),
        *(*text.shape, _number(tensors, "decoder/num_heads"), _n_layers(tensors, "decoder")),
    )


def _named(tensors: Variables, sizes: WhisperSizes) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the tensors with OpenAI's names."""
    for part, layers, last in (
        ("encoder", sizes.n_audio_layer, "ln_post"),
        ("decoder", sizes.n_text_layer, "ln"),
    ):
        yield f"{part}.positional_embedding", _tensor(tensors, f"{part}/position_encodings/encodings")
        yield from _norm(tensors, f"{part}.{last}", f"{part}/layer_norm")
        for layer in range(layers):
            yield from _block(tensors, f"{part}.blocks.{layer}", f"{part}/layer_{layer}", part == "decoder")
    for name in ("conv1", "conv2"):
        yield from _linear(tensors, [f"encoder.{name}"], f"encoder/{name}")
    yield "decoder.token_embedding.weight", _tensor(tensors, "decoder/embeddings/weight")


def _block(tensors: Variables, ours: str, theirs: str, has_cross: bool) -> Iterator[tuple[str, SourceTensor]]:
    own = f"{theirs}/self_attention"
    parts = [f"{ours}.attn.{part}" for part in ("query", "key", "value")]
    yield from _linear(tensors, parts, f"{own}/linear_0")
    yield from _linear(tensors, [f"{ours}.attn.out"], f"{own}/linear_1")
    yield from _norm(tensors, f"{ours}.attn_ln", f"{own}/layer_norm")
    if has_cross:
        cross = f"{theirs}/attention"
        yield from _linear(tensors, [f"{ours}.cross_attn.query"], f"{cross}/linear_0")
        parts = [f"{ours}.cross_attn.{part}" for part in ("key", "value")]
        yield from _linear(tensors, parts, f"{cross}/linear_1")
        yield from _linear(tensors, [f"{ours}.cross_attn.out"], f"{cross}/linear_2")
        yield from _norm(tensors, f"{ours}.cross_attn_ln", f"{cross}/layer_norm")
    for i, number in enumerate((0, 2)):
        yield from _linear(tensors, [f"{ours}.mlp.{number}"], f"{theirs}/ffn/linear_{i}")
    yield from _norm(tensors, f"{ours}.mlp_ln", f"{theirs}/ffn/layer_norm")


def _linear(tensors: Variables, ours: list[str], theirs: str) -> Iterator[tuple[str, SourceTensor]]:
    """Yield weights and biases of the layers that CTranslate2 holds as one; keys have no bias."""
    for kind in ("weight", "bias"):
        tensor = _tensor(tensors, f"{theirs}/{kind}")
        rows = tensor.shape[0] if tensor.shape else 0
        if rows == 0 or rows % len(ours):
            raise BrokenModelError(f"a tensor of {rows} rows cannot be cut into {len(ours)}")
        size = rows // len(ours)
        for i, name in enumerate(ours):
            if not (kind == "bias" and name.endswith(".key")):
                part = slice(i * size, (i + 1) * size)
                read = partial(lambda whole, part: whole.read()[part], tensor, part)
                yield f"{name}.{kind}", SourceTensor((size, *tensor.shape[1:]), read)


def _norm(tensors: Variables, ours: str, theirs: str) -> Iterator[tuple[str, SourceTensor]]:
    yield f"{ours}.weight", _tensor(tensors, f"{theirs}/gamma")
    yield f"{ours}.bias", _tensor(tensors, f"{theirs}/beta")


def _vocabulary(folder: Path) -> list[str]:
    """Return the tokens in the order of their ids, as the folder's file writes them."""
    for name in VOCABULARIES:
        path = folder / name
        if not path.exists():
            continue
        if path.suffix == ".txt":
            return path.read_text(encoding="utf-8", errors="replace").split("\n")
        found = read_json(path)
        if not isinstance(found, list) or not all(isinstance(token, str) for token in found):
            raise BrokenModelError(f"{name} is no list of tokens")
        return found
    raise BrokenModelError(f"{' or '.join(VOCABULARIES)} is missing beside {CTRANSLATE2_MODEL}")
