"""Convert a Whisper model of another program to GGUF.

    convert_whisper(folder of CTranslate2 | folder of the hub | ggml-NAME.bin, out.gguf, "q8_0")

Matrices get the type asked for, where their rows are whole blocks of it, else F16; vectors and positions stay
F32. A convolution becomes a matrix whose rows hold the kernel of each input channel one after another. Each
form of files has a section, which begins with its layout.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from edgespec.apps.speech.mel import Floats
from edgespec.apps.speech.weights.reading import (
    END_OF_TEXT,
    BrokenModelError,
    ByteReader,
    SourceTensor,
    WhisperContents,
    WhisperSizes,
    array_reader,
    blamed,
    check_contents,
    check_sizes,
    expected_tensors,
    heads_in,
    mapped,
    n_ordinary,
    ordinary_tokens,
    read_json,
    written_token,
)
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.gguf import (
    BOOL,
    F32,
    INT32,
    TOKENS,
    UINT32,
    TensorInfo,
    block_size,
    encode_number,
    encode_numbers,
    encode_start,
    encode_text,
    encode_texts,
    from_floats,
    is_type,
    padded,
    row_bytes,
    to_floats,
    type_number,
)
from edgespec.models.on_disk import ARCHITECTURE, CTRANSLATE2_MODEL, HUB_INDEX, HUB_WEIGHTS, WHISPER_CPP_MAGIC
from edgespec.platform.files import replacing

# ---- CTranslate2: a folder with model.bin (version 6), config.json and a vocabulary ----
#
#     model.bin = version, name of the specification, revision, number of variables, variables, aliases
#     variable  = name, rank, sizes, type, bytes, data             name = length, letters, a zero byte
#
# Lengths have 4 bytes, those of names 2, ranks and types 1. Its layers hold queries, keys and values as one
# matrix; matrices of 8-bit integers have a scale for each row.

CONFIG_FILE = "config.json"
VOCABULARIES = ("vocabulary.json", "vocabulary.txt")

_VERSION = 6
_NUMBERS = {
    0: ("<f4", 4),
    1: ("i1", 1),
    2: ("<i2", 2),
    3: ("<i4", 4),
    4: ("<f2", 2),
    5: ("bf16", 2),
}
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
        sizes = _ctranslate2_sizes(tensors)
        named = dict(_named(tensors, sizes))
    with blamed(folder):
        heads = heads_in(read_json(folder / CONFIG_FILE))
        return WhisperContents(folder, sizes, ordinary_tokens(_ctranslate2_tokens(folder)), heads, named)


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
        if kind not in _NUMBERS or n_bytes != math.prod(shape) * _NUMBERS[kind][1]:
            raise BrokenModelError(f"the variable {name[:60]!r} has an unknown type or length")
        code, start = _NUMBERS[kind][0], reader.skip(n_bytes)
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


def _ctranslate2_sizes(tensors: Variables) -> WhisperSizes:
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
    """Yield weights and biases of the layers that CTranslate2 stores as one; keys have no bias."""
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


def _ctranslate2_tokens(folder: Path) -> list[str]:
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


# ---- the hub: a folder with config.json, vocab.json and safetensors files ----
#
#     file = length of the description, description (JSON: name -> type, shape, first and last byte), data

GENERATION_FILE, VOCABULARY_FILE = "generation_config.json", "vocab.json"

_HUB_NUMBERS = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("bf16", 2)}
# The fields of WhisperSizes, in their order.
_SIZES = (
    *("num_mel_bins", "vocab_size", "max_source_positions", "d_model", "encoder_attention_heads"),
    *("encoder_layers", "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers"),
)
_MOST_HEADER = 32 << 20  # bytes
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_PARTS = {
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}
_OTHERS = {
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}


def read_safetensors(folder: Path) -> WhisperContents:
    """Return the model in `folder`, its numbers unread. Raises UsageError and EdgespecError."""
    tensors: dict[str, SourceTensor] = {}
    for path in _weight_files(folder):
        with mapped(path) as data, blamed(path):
            tensors |= _hub_tensors(data)
    with blamed(folder):
        config, generation = read_json(folder / CONFIG_FILE), folder / GENERATION_FILE
        heads = heads_in(read_json(generation)) if generation.exists() else ()
        named = {ours: tensor for name, tensor in tensors.items() if (ours := our_name(name))}
        return WhisperContents(folder, _hub_sizes(config), _hub_tokens(folder), heads, named)


def our_name(name: str) -> str:
    """Return OpenAI's name of a tensor of the hub; "" for one that no model needs, such as a tied copy."""
    name = name.removeprefix("model.")
    if layer := _LAYER.fullmatch(name):
        part, _, kind = layer[3].rpartition(".")
        return f"{layer[1]}.blocks.{layer[2]}.{_PARTS[part]}.{kind}" if part in _PARTS else ""
    return _OTHERS.get(name, name if name.startswith("encoder.conv") else "")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / HUB_INDEX
    if (folder / HUB_WEIGHTS).exists() or not index.exists():
        return [folder / HUB_WEIGHTS]
    with blamed(index):
        match read_json(index):
            case {"weight_map": dict(places)}:
                names = sorted({str(name) for name in places.values()})
            case _:
                raise BrokenModelError("it names no files of weights")
        for name in names:
            if "/" in name or not name.endswith(".safetensors"):
                raise BrokenModelError(f"it names the file {name[:60]!r}")
    for name in names:
        if not (folder / name).exists():
            raise UsageError(f"{folder / name}: no such file; the model needs all {len(names)} files")
    return [folder / name for name in names]


def _hub_tensors(data: mmap.mmap) -> dict[str, SourceTensor]:
    reader = ByteReader(data)
    length = reader.number("Q")
    if length > _MOST_HEADER:
        raise BrokenModelError(f"a description of {length:,} bytes")
    try:
        described = json.loads(reader.bytes(length))
    except (ValueError, RecursionError):
        raise BrokenModelError("its description is no valid JSON") from None
    if not isinstance(described, dict):
        raise BrokenModelError("its description is no table")
    tensors, start = {}, reader.at
    for name, facts in described.items():
        if name == "__metadata__":
            continue
        match facts:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
                pass
            case _:
                raise BrokenModelError(f"the tensor {name[:60]!r} is not described")
        if kind not in _HUB_NUMBERS:
            raise BrokenModelError(f"the tensor {name[:60]!r} has the type {kind[:20]}, not F32, F16 or BF16")
        if not all(isinstance(n, int) and 0 < n < 1 << 31 for n in shape):
            raise BrokenModelError(f"the tensor {name[:60]!r} has no proper shape")
        code, size = _HUB_NUMBERS[kind]
        sizes = tuple(shape)
        if not 0 <= first <= last <= len(data) - start or last - first != math.prod(sizes) * size:
            raise BrokenModelError(
                f"the tensor {name[:60]!r} is cut off, or of another length than its shape"
            )
        tensors[name] = SourceTensor(sizes, array_reader(data, start + first, sizes, code))
    return tensors


def _hub_sizes(config: object) -> WhisperSizes:
    if not isinstance(config, dict) or config.get("model_type") != "whisper":
        raise BrokenModelError(f"{CONFIG_FILE} describes no Whisper model")

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise BrokenModelError(f"{CONFIG_FILE} has no number {key}")
        return value

    return WhisperSizes(*map(number, _SIZES))


def _hub_tokens(folder: Path) -> tuple[bytes, ...]:
    found = read_json(folder / VOCABULARY_FILE)
    if not isinstance(found, dict) or not all(isinstance(number, int) for number in found.values()):
        raise BrokenModelError(f"{VOCABULARY_FILE} is no table of tokens")
    written = sorted(found, key=lambda token: found[token])
    if [found[token] for token in written] != list(range(len(written))):
        raise BrokenModelError(f"the ids in {VOCABULARY_FILE} are not 0 to {len(written) - 1:,}")
    return ordinary_tokens(written)


_LONGEST_TOKEN, _LONGEST_NAME = 1 << 10, 1 << 8
# ---- whisper.cpp: one file ggml-NAME.bin ----
#
#     file   = magic, 11 sizes and types, mel filters, vocabulary, tensors until the end
#     token  = length, bytes
#     tensor = number of dimensions, length of the name, type, sizes (innermost first), name, data
#
# All numbers are 32-bit integers, little-endian. Types of data are ggml's.

_F16 = 1


def read_whisper_cpp(path: Path) -> WhisperContents:
    """Return the model in `path`, its numbers unread. Raises UsageError and EdgespecError."""
    with mapped(path) as data, blamed(path):
        reader = ByteReader(data)
        if reader.bytes(4) != WHISPER_CPP_MAGIC:
            raise BrokenModelError("it does not begin as whisper.cpp's models do")
        *numbers, n_mels, _type = reader.numbers("11i")
        sizes = WhisperSizes(n_mels, *numbers)
        check_sizes(sizes)
        n_filters, n_bins = reader.numbers("ii")
        if not (0 < n_filters <= n_mels and 0 < n_bins <= 1 << 12):
            raise BrokenModelError(f"mel filters of {n_filters} by {n_bins}")
        reader.skip(4 * n_filters * n_bins)
        tokens = _tokens(reader, sizes.n_vocab)
        return WhisperContents(path, sizes, tokens, (), _ggml_tensors(reader, data))


def _tokens(reader: ByteReader, n_vocab: int) -> tuple[bytes, ...]:
    n = reader.number("i")
    if not 0 < n <= n_vocab:
        raise BrokenModelError(f"a vocabulary of {n:,} tokens")
    tokens = []
    for _ in range(n):
        length = reader.number("i")
        if not 0 <= length <= _LONGEST_TOKEN:
            raise BrokenModelError(f"a token of {length:,} bytes")
        tokens.append(reader.bytes(length))
    # Files made from the hub's vocabulary have <|endoftext|> too: 50,257 tokens, of English models as well.
    ordinary = tokens[: n_ordinary(n_vocab)]
    return tuple(b"" if token == END_OF_TEXT.encode() else token for token in ordinary)


def _ggml_tensors(reader: ByteReader, data: mmap.mmap) -> dict[str, SourceTensor]:
    tensors = {}
    while not reader.is_at_end:
        n, length, kind = reader.numbers("iii")
        sizes = reader.shape("i", n)
        if not 0 < length <= _LONGEST_NAME:
            raise BrokenModelError(f"a tensor's name has {length:,} letters")
        name = reader.bytes(length).decode(errors="replace")
        if not is_type(kind) or not sizes or sizes[0] % block_size(kind):
            raise BrokenModelError(f"the tensor {name[:60]!r} has the unknown type {kind}")
        shape = sizes[::-1]
        start = reader.skip(row_bytes(kind, sizes[0]) * math.prod(sizes[1:]))
        if name.endswith(".bias") and len(shape) == 2 and shape[1] == 1:  # of a convolution
            shape = shape[:1]
        tensors[name] = SourceTensor(shape, _reader(data, start, shape, kind))
    return tensors


def _reader(data: mmap.mmap, start: int, shape: tuple[int, ...], kind: int) -> Callable[[], Floats]:
    if kind in (F32, _F16):
        return array_reader(data, start, shape, "<f4" if kind == F32 else "<f2")

    def read() -> Floats:
        width, rows = shape[-1], math.prod(shape[:-1])
        n_bytes = row_bytes(kind, width)
        raw = np.frombuffer(data, np.uint8, rows * n_bytes, start).reshape(rows, n_bytes)
        return to_floats(raw, kind, width).reshape(shape)

    return read


# ---- conversion ----

WHISPER_TYPES = ("q8_0", "q6_k", "q5_1", "q5_0", "q4_1", "q4_0", "f16", "f32")
"""The types that matrices can have."""

SIZE_KEYS = {
    "n_mels": "n_mels",
    "n_vocab": "vocab_size",
    "n_audio_ctx": "encoder.context_length",
    "n_audio_state": "encoder.embedding_length",
    "n_audio_head": "encoder.attention.head_count",
    "n_audio_layer": "encoder.block_count",
    "n_text_ctx": "decoder.context_length",
    "n_text_state": "decoder.embedding_length",
    "n_text_head": "decoder.attention.head_count",
    "n_text_layer": "decoder.block_count",
}
"""The keys of a GGUF file, after "whisper.", that hold the fields of `WhisperSizes`."""


def read_whisper(path: Path) -> WhisperContents:
    """Return the contents of a model of another program, its numbers unread and nothing checked but lengths.

    Raises UsageError if nothing there is such a model, EdgespecError if it is damaged.
    """
    if not path.is_dir():
        contents, beside = read_whisper_cpp(path), path.with_name(GENERATION_FILE)
        if not beside.is_file():
            return contents
        with blamed(beside):
            return replace(contents, alignment_heads=heads_in(read_json(beside)))
    if (path / CTRANSLATE2_MODEL).is_file():
        return read_ctranslate2(path)
    if any((path / name).is_file() for name in (HUB_WEIGHTS, HUB_INDEX)):
        return read_safetensors(path)
    raise UsageError(
        f"{path}: no Whisper model: neither {CTRANSLATE2_MODEL} (CTranslate2) nor {HUB_WEIGHTS} (the hub) is "
        "in it"
    )


def check_whisper_type(type_name: str, field: str = "") -> None:
    """Raise UsageError for a type that matrices cannot have; it names the `field`."""
    if type_name not in WHISPER_TYPES:
        known = ", ".join(WHISPER_TYPES)
        raise UsageError(f"a Whisper model cannot be {type_name!r} (known: {known})", field=field)


def convert_whisper(
    source: Path | WhisperContents,
    target: Path,
    type_name: str,
    *,
    name: str = "",
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write the model `source`, a path or what was read there, as a GGUF file with matrices of `type_name`.

    `target` appears complete or not at all. `on_progress` takes the number of tensors done and the total; an
    exception from it ends the work. Raises UsageError for an unknown type or a missing file, EdgespecError
    for a damaged model and if `target` cannot be written.
    """
    check_whisper_type(type_name)
    contents = read_whisper(source) if isinstance(source, Path) else source
    check_contents(contents)
    try:
        with replacing(target) as stream, blamed(contents.path):
            fields = _fields(contents, type_name, name or contents.path.stem)
            _write(stream, contents, type_name, fields, on_progress)
    except OSError as error:
        raise EdgespecError(f"cannot write {target}: {describe_os_error(error)}") from error


def _write(
    stream: BinaryIO,
    contents: WhisperContents,
    type_name: str,
    fields: list[bytes],
    on_progress: Callable[[int, int], None],
) -> None:
    wanted = type_number(type_name)
    shapes = {name: stored_shape(name, shape) for name, shape in expected_tensors(contents.sizes).items()}
    tensors = [(name, shape[::-1], _stored_type(name, shape, wanted)) for name, shape in shapes.items()]
    infos, start = encode_start(fields, tensors)
    stream.write(start)
    for done, info in enumerate(infos):
        on_progress(done, len(infos))
        stream.write(padded(_encoded(info, contents.tensors[info.name])))
    on_progress(len(infos), len(infos))


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor in the GGUF file, rows first: a convolution is a matrix there."""
    return (shape[0], shape[1] * shape[2]) if name.startswith("encoder.conv") and len(shape) == 3 else shape


def _stored_type(name: str, shape: tuple[int, ...], wanted: int) -> int:
    if len(shape) < 2 or name.endswith("positional_embedding"):
        return F32
    return wanted if shape[-1] % block_size(wanted) == 0 else _F16


def _encoded(info: TensorInfo, tensor: SourceTensor) -> bytes:
    numbers = np.ascontiguousarray(tensor.read(), np.float32).reshape(-1, info.columns)
    if not np.isfinite(numbers).all():
        raise BrokenModelError(f"the tensor {info.name} holds numbers that are not finite")
    if info.kind == F32:
        return numbers.astype("<f4").tobytes()
    return from_floats(numbers, info.kind).tobytes()


def _fields(contents: WhisperContents, type_name: str, name: str) -> list[bytes]:
    numbers = {key: getattr(contents.sizes, size) for size, key in SIZE_KEYS.items()}
    heads = np.array(contents.own_heads, np.int32).reshape(-1)
    return [
        encode_text("general.architecture", ARCHITECTURE),
        encode_text("general.name", name),
        encode_text("general.type", "model"),
        encode_text("edgespec.whisper.type", type_name),
        *(encode_number(f"whisper.{key}", UINT32, number) for key, number in numbers.items()),
        encode_number("whisper.multilingual", BOOL, contents.is_multilingual),
        encode_numbers("whisper.alignment_heads", INT32, heads),
        encode_text("tokenizer.ggml.model", "gpt2"),
        encode_texts(TOKENS, [written_token(token) for token in contents.tokens]),
    ]
