"""Shards of a dataset: arrays in an uncompressed .npz, checked, and mapped instead of loaded.

    tokens       int32    [sum of length]     all texts, one after another
    length       int32    [n_texts]           tokens of each, prompt and answer
    n_prompt     int32    [n_texts]           tokens of its prompt
    first        int32    [n_texts]           the first token with a stored hidden state
    features     float16  [sum of (length - 1 - first), n_embd]
    temperature  float32  [n_texts]
    source       str      [n_texts]
    key          uint64   [n_texts]

The last token of a text was never read, so it has no hidden state.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.platform.state_file import DamagedFileError

Arrays = Mapping[str, npt.NDArray[np.generic]]

_NAMES = {"tokens", "length", "n_prompt", "first", "features", "temperature", "source", "key"}
_LOCAL_HEADER = struct.Struct("<26xHH")  # in a zip, before each file: lengths of its name and extra field


def open_shard(path: Path, *, n_embd: int, n_vocab: int, checked: bool) -> Arrays:
    """Return the arrays of a shard, as views on the file.

    `checked`: skip the checksums, which were right before. Raises OSError, and DamagedFileError for no shard
    of a target with hidden states of `n_embd` elements and `n_vocab` tokens.
    """
    try:
        if not checked:
            _check_sums(path)
        arrays = _mapped(path)
    except (zipfile.BadZipFile, ValueError, EOFError, struct.error) as error:
        raise DamagedFileError(str(error)) from None
    _check_shape(arrays, n_embd, n_vocab)
    return arrays


def _check_sums(path: Path) -> None:
    """Raise DamagedFileError if a checksum is wrong."""
    with zipfile.ZipFile(path) as file:
        if wrong := file.testzip():
            raise DamagedFileError(f"{wrong}: wrong checksum")


def _mapped(path: Path) -> Arrays:
    """Return the arrays of an uncompressed .npz as views on the file; numpy itself would load them."""
    data = np.memmap(path, np.uint8, "r")
    arrays = {}
    with zipfile.ZipFile(path) as file, path.open("rb") as raw:
        for info in file.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise DamagedFileError(f"{info.filename}: compressed")
            raw.seek(info.header_offset)
            start = raw.tell() + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size)))
            raw.seek(start)
            version = np.lib.format.read_magic(raw)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read(raw)
            n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            content = data[raw.tell() : start + info.file_size]
            if len(content) != n_bytes:
                raise DamagedFileError(f"{info.filename}: {len(content)} bytes, {n_bytes} expected")
            arrays[info.filename.removesuffix(".npy")] = content.view(dtype).reshape(shape).view(np.ndarray)
    return arrays


def _check_shape(arrays: Arrays, n_embd: int, n_vocab: int) -> None:
    """Raise DamagedFileError unless the arrays fit together, and the target."""
    if missing := sorted(_NAMES - arrays.keys()):
        raise DamagedFileError(f"it has no {missing[0]}")
    length, first = arrays["length"].astype(np.int64), arrays["first"].astype(np.int64)
    n_prompt, tokens, features = arrays["n_prompt"], arrays["tokens"], arrays["features"]
    columns = [arrays[name].shape for name in ("n_prompt", "first", "temperature", "source", "key")]
    if any(shape != length.shape for shape in columns) or tokens.shape != (length.sum(),):
        raise DamagedFileError("its arrays do not belong together")
    if features.dtype != np.float16 or features.shape != ((length - 1 - first).sum(), n_embd):
        raise DamagedFileError(f"hidden states of shape {features.shape} and type {features.dtype}")
    if not (np.all(first >= 0) and np.all(first < length) and np.all(n_prompt.astype(np.int64) <= length)):
        raise DamagedFileError("lengths that cannot be")
    if (
        tokens.size
        and not 0 <= int(tokens.astype(np.int64).min()) <= int(tokens.astype(np.int64).max()) < n_vocab
    ):
        raise DamagedFileError("token ids that the target does not have")
