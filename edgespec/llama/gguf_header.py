"""What a GGUF file says about itself, read before anything is loaded.

`read_header` uses ggml's own parser, so both agree on what a valid file is. `check_model_file`
adds the questions a user should have answered in one line: is it there, is it a GGUF, is it
complete, and is it a model that writes text.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend

_GGUF_VERSIONS = (2, 3)
_MAX_LAYERS = 512  # of llama.cpp, which aborts on more
_KV_PAD = 256  # llama.cpp rounds a context up to this many cells

_INTEGERS = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
}
_BOOL, _STRING, _ARRAY = 7, 8, 9  # enum gguf_type

# How files begin that people pass by mistake.
_LOOKALIKES = (
    (b"version https://git-lfs", "a git-lfs pointer; fetch the real file with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?); convert the model to GGUF first"),
    (b"\x80\x02", "a Python pickle (a PyTorch checkpoint?); convert the model to GGUF first"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"\xfd7zXZ", "an xz archive; unpack it first"),
    (b"ggjt", "a GGML file of 2023; convert it or download the GGUF version"),
    (b"tjgg", "a GGML file of 2023; convert it or download the GGUF version"),
    (b"lmgg", "a GGML file of 2023; convert it or download the GGUF version"),
    (b"fmgg", "a GGML file of 2023; convert it or download the GGUF version"),
)

_ENCODERS = re.compile(r"bert|^(t5encoder|gemma-embedding|llama-embed|wavtokenizer-dec)$")
_HELPERS = {"eagle3", "dflash", "gemma4-assistant"}  # draft heads: run only inside their target


@dataclass(frozen=True)
class GGUFHeader:
    """The facts of one model file, taken from its header.

    A number the file does not state is 0, a text it does not state is "".
    """

    path: Path
    architecture: str
    name: str
    general_type: str
    """`general.type`: "model", "adapter", "mmproj", "imatrix" or ""."""
    file_bytes: int
    """Size on disk; `check_model_file` counts all parts of a split model."""
    expected_bytes: int
    """What the header says the file's size is at least; less on disk means a truncated file."""
    n_ctx_train: int
    n_layer: int
    n_embd: int
    n_ff: int
    """The widest feed-forward layer."""
    n_head: int
    n_head_kv: tuple[int, ...]
    """Key/value heads of each layer, `n_layer` numbers; 0 for a layer without attention."""
    head_dim_k: int
    head_dim_v: int
    tokenizer: str
    """`tokenizer.ggml.model`: "gpt2" (BPE), "llama" (SPM), ...; "" when the file has none."""
    n_vocab: int
    """Length of the token list, padding included."""
    pooling_type: int
    """`enum llama_pooling_type`: 0 none; others make an embedding or reranking model."""
    is_causal: bool
    split_no: int
    split_count: int
    """Parts of a model split over several files; 0 or 1 for a single file."""
    other_parts: tuple[Path, ...] = ()
    """The files beside `path` that complete a split model; found by `check_model_file`."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file can turn text into tokens."""
        return self.n_vocab > 0

    def kv_bytes(self, n_ctx: int) -> int:
        """Return the bytes of an F16 cache of keys and values for `n_ctx` tokens.

        An upper bound for models that keep less than every token (recurrent layers).
        """
        cells = math.ceil(n_ctx / _KV_PAD) * _KV_PAD
        return cells * sum(self.n_head_kv) * (self.head_dim_k + self.head_dim_v) * 2


class _Params(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_function = backend.foreign_function
_gguf, _id, _size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
_init_from_file = _function("gguf_init_from_file", _gguf, ctypes.c_char_p, _Params)
_free = _function("gguf_free", None, _gguf)
_find_key = _function("gguf_find_key", _id, _gguf, ctypes.c_char_p)
_kv_type = _function("gguf_get_kv_type", ctypes.c_int, _gguf, _id)
_val_data = _function("gguf_get_val_data", ctypes.c_void_p, _gguf, _id)
_val_str = _function("gguf_get_val_str", ctypes.c_char_p, _gguf, _id)
_arr_type = _function("gguf_get_arr_type", ctypes.c_int, _gguf, _id)
_arr_n = _function("gguf_get_arr_n", _size, _gguf, _id)
_arr_data = _function("gguf_get_arr_data", ctypes.c_void_p, _gguf, _id)
_data_offset = _function("gguf_get_data_offset", _size, _gguf)
_n_tensors = _function("gguf_get_n_tensors", _id, _gguf)
_tensor_offset = _function("gguf_get_tensor_offset", _size, _gguf, _id)
_tensor_size = _function("gguf_get_tensor_size", _size, _gguf, _id)


class _Values:
    """The key-value pairs of an open gguf_context. The C getters abort on a wrong type: ask first."""

    def __init__(self, context: int, path: Path) -> None:
        self._context = context
        self._path = path

    def _find(self, key: str) -> tuple[int, int] | None:
        index = _find_key(self._context, key.encode())
        return None if index < 0 else (index, _kv_type(self._context, index))

    def _wrong_type(self, key: str) -> EdgespecError:
        return EdgespecError(f"{self._path}: damaged: '{key}' has the wrong type; download the file again")

    def text(self, key: str) -> str:
        found = self._find(key)
        if found is None:
            return ""
        if found[1] != _STRING:
            raise self._wrong_type(key)
        value: bytes = _val_str(self._context, found[0])
        # These texts end up in one-line messages on terminals.
        return "".join(filter(str.isprintable, value.decode(errors="replace")))

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a number, or an array of them (some architectures state one per layer)."""
        found = self._find(key)
        if found is None:
            return ()
        index, kind = found
        n, data = 1, _val_data
        if kind == _ARRAY:
            n, kind, data = _arr_n(self._context, index), _arr_type(self._context, index), _arr_data
        if kind not in _INTEGERS and kind != _BOOL:
            raise self._wrong_type(key)
        if n == 0:
            return ()
        element = _INTEGERS.get(kind, ctypes.c_int8)  # a bool is stored as int8
        return tuple((element * n).from_address(data(self._context, index)))

    def largest(self, key: str, default: int = 0) -> int:
        return max(self.integers(key), default=default)

    def length(self, key: str) -> int:
        """Return the length of a list of strings."""
        found = self._find(key)
        if found is None:
            return 0
        if found[1] != _ARRAY or _arr_type(self._context, found[0]) != _STRING:
            raise self._wrong_type(key)
        n: int = _arr_n(self._context, found[0])
        return n


@contextmanager
def open_gguf(path: Path) -> Iterator[int]:
    """Open a GGUF file with ggml's parser, without its weights; the value is a gguf_context."""
    context = backend.create(
        lambda _: _init_from_file(os.fsencode(path), _Params(no_alloc=True, ctx=None)), _free
    )
    if context is None:
        raise EdgespecError(
            f"{path}: damaged or incomplete ({path.stat().st_size:,} bytes): {backend.failure_reason()}; "
            "download it again"
        )
    try:
        yield context
    finally:
        _free(context)


def read_header(path: str | Path) -> GGUFHeader:
    """Read the header of the GGUF file `path`.

    Raises UsageError when there is no such readable file, EdgespecError when it is not a GGUF this
    library reads or its header is damaged. Says nothing about whether the model can be run.
    """
    path = Path(path)
    _check_magic(path, _first_bytes(path))
    with open_gguf(path) as context:
        values = _Values(context, path)
        architecture = values.text("general.architecture")
        n_layer = values.largest(f"{architecture}.block_count")
        n_embd = values.largest(f"{architecture}.embedding_length")
        n_head = values.largest(f"{architecture}.attention.head_count")
        head_dim = n_embd // n_head if n_head > 0 else 0
        return GGUFHeader(
            path=path,
            architecture=architecture,
            name=values.text("general.name"),
            general_type=values.text("general.type"),
            file_bytes=path.stat().st_size,
            expected_bytes=_expected_bytes(context),
            n_ctx_train=values.largest(f"{architecture}.context_length"),
            n_layer=n_layer,
            n_embd=n_embd,
            n_ff=values.largest(f"{architecture}.feed_forward_length"),
            n_head=n_head,
            n_head_kv=_per_layer(values, architecture, n_layer, n_head),
            head_dim_k=values.largest(f"{architecture}.attention.key_length", head_dim),
            head_dim_v=values.largest(f"{architecture}.attention.value_length", head_dim),
            tokenizer=values.text("tokenizer.ggml.model"),
            n_vocab=values.length("tokenizer.ggml.tokens"),
            pooling_type=values.largest(f"{architecture}.pooling_type"),
            is_causal=values.largest(f"{architecture}.attention.causal", 1) != 0,
            split_no=values.largest("split.no"),
            split_count=values.largest("split.count"),
        )


def _per_layer(values: _Values, architecture: str, n_layer: int, n_head: int) -> tuple[int, ...]:
    heads = values.integers(f"{architecture}.attention.head_count_kv") or (n_head,)
    n_layer = min(n_layer, _MAX_LAYERS)  # a damaged number must not fill the memory
    return heads * n_layer if len(heads) == 1 else heads[:n_layer]


def _expected_bytes(context: int) -> int:
    """Return where the last tensor ends; the parser has checked that they follow one another."""
    offset: int = _data_offset(context)
    n = _n_tensors(context)
    if n == 0:
        return offset
    return offset + int(_tensor_offset(context, n - 1)) + int(_tensor_size(context, n - 1))


def _first_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise UsageError(f"{path}: a directory; name the .gguf file in it")
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not path.is_file():  # opening a pipe would wait for its other end
        raise UsageError(f"{path}: not a regular file; models are read at random places")
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def _check_magic(path: Path, start: bytes) -> None:
    if not start:
        raise EdgespecError(f"{path}: an empty file; download it again")
    if start[:4] != b"GGUF":
        raise EdgespecError(f"{path}: not a GGUF model but {_looks_like(start)}")
    little, big = (int.from_bytes(start[4:8], order) for order in ("little", "big"))
    if len(start) >= 8 and little not in _GGUF_VERSIONS:
        if big in _GGUF_VERSIONS:
            raise EdgespecError(f"{path}: a big-endian GGUF; download the little-endian version")
        raise EdgespecError(
            f"{path}: GGUF version {little} is not supported (only 2 and 3); "
            "download a current version of the model"
        )


def _looks_like(start: bytes) -> str:
    for magic, description in _LOOKALIKES:
        if start.startswith(magic):
            return description
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 30:
        return "a safetensors file; convert the model to GGUF first"
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (a download that needs a login, or the wrong link); download the file itself"
    if not any(start):
        return "zeros (an interrupted download); download it again"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in start):
        return "a text file"
    return "an unknown kind of file"


def check_model_file(path: str | Path) -> GGUFHeader:
    """Return the header of a complete GGUF file that holds a text-generating model.

    Anything else raises with one line that says what it is and what to do: UsageError where the
    path is wrong, EdgespecError where the file is. Of a split model the first part is expected;
    the others are looked up beside it, and `file_bytes` is the sum of all.
    """
    header = read_header(path)
    parts = [read_header(part) for part in _other_parts(header)]
    for part in (header, *parts):
        _check_complete(part)
    _check_kind(header)
    return replace(
        header,
        file_bytes=header.file_bytes + sum(part.file_bytes for part in parts),
        other_parts=tuple(part.path for part in parts),
    )


def _other_parts(header: GGUFHeader) -> list[Path]:
    """Return the files that complete the first part of a split model; [] for a single file."""
    n = header.split_count
    if n < 2:
        return []
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", header.path.name)
    if match is None or int(match[2]) != n:
        raise UsageError(
            f"{header.path}: one of {n} parts, but not named NAME-00001-of-{n:05}.gguf; "
            "give the parts their original names"
        )
    names = [f"{match[1]}-{no:05}-of-{n:05}.gguf" for no in range(1, n + 1)]
    if header.split_no != 0:
        raise UsageError(f"{header.path}: part {header.split_no + 1} of {n}; choose the first, {names[0]}")
    parts = [header.path.with_name(name) for name in names[1:]]
    for part in parts:
        if not part.exists():
            raise UsageError(f"{part}: no such file; a split model needs all its {n} parts")
    return parts


def _check_complete(header: GGUFHeader) -> None:
    if header.file_bytes < header.expected_bytes:
        raise EdgespecError(
            f"{header.path}: truncated: {header.file_bytes:,} bytes of {header.expected_bytes:,}; "
            "download it again"
        )


def _check_kind(header: GGUFHeader) -> None:
    """Refuse what is a valid GGUF but does not write text."""

    def refuse(what: str) -> None:
        raise EdgespecError(f"{header.path}: {what}; choose a text-generating language model")

    if header.architecture == "clip" or header.general_type == "mmproj":
        refuse("the vision or audio projector of a multimodal model, not its language model")
    if header.general_type == "adapter":
        refuse("a LoRA adapter, not a model")
    if header.general_type == "imatrix" or header.architecture == "imatrix":
        refuse("an importance matrix, not a model")
    if not header.architecture:
        refuse("a GGUF file that names no architecture")
    if _ENCODERS.search(header.architecture) or header.pooling_type > 0 or not header.is_causal:
        refuse(f"an embedding, reranking or encoder model (architecture {header.architecture})")
    if header.architecture == "t5":
        refuse("an encoder-decoder model (architecture t5)")
    if header.architecture in _HELPERS:
        refuse(f"a draft head that runs only inside its own target (architecture {header.architecture})")
    if not header.has_tokenizer:
        refuse("a model without a tokenizer")
    if not 1 <= header.n_layer <= _MAX_LAYERS:
        raise EdgespecError(f"{header.path}: damaged: a model of {header.n_layer} layers; download it again")
