"""Fingerprints of model files and of tokenizers: the keys of what edgespec stores about them."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Protocol

import numpy as np

from edgespec.errors import EdgespecError
from edgespec.llama.gguf import GGUF, INT32, LONG, MERGES, TOKEN_TYPES, TOKENS
from edgespec.llama.gguf_header import GGUFHeader

_HEAD, _SAMPLES, _SAMPLE = 256 << 10, 32, 4 << 10  # bytes, samples, bytes
_UNUSED = 5  # enum llama_token_type


class HasHeader(Protocol):
    """A model that was loaded."""

    header: GGUFHeader


def file_fingerprint(header: GGUFHeader) -> str:
    """Return 64 hex digits that identify this model file.

    SHA-256 over the size, the first 256 KiB (header and most of the tokenizer) and 32 samples of 4 KiB,
    evenly spread to the last byte, of each part of the model. 384 KiB are read: under 1 ms from the page
    cache, 33 seeks on a cold disk. This is no checksum: a change outside the samples goes unnoticed. Raises
    OSError if the file cannot be read.
    """
    digest = hashlib.sha256()
    for path in (header.path, *header.other_parts):
        with path.open("rb", buffering=0) as file:
            handle = file.fileno()
            size = os.fstat(handle).st_size
            digest.update(f"{size}\n".encode())
            digest.update(os.pread(handle, _HEAD, 0))
            last = max(0, size - _SAMPLE)
            for i in range(1, _SAMPLES + 1):
                digest.update(os.pread(handle, _SAMPLE, last * i // _SAMPLES))
    return digest.hexdigest()


def tokenizer_fingerprint(source: HasHeader | GGUFHeader) -> str:
    """Return a name for the meaning of a model's token ids, such as "qwen2-0123456789abcdef".

    The same for all sizes and quantizations of a family: a hash of the file's token list, without the padding
    at its end, of the merges and of the tokenizer's type. Raises EdgespecError if the file has no token list,
    OSError if it cannot be read.
    """
    header = source if isinstance(source, GGUFHeader) else source.header
    gguf, pre = header.gguf, header.gguf.text("tokenizer.ggml.pre")
    if TOKENS not in gguf.fields:
        raise EdgespecError(f"{header.path}: no token list was found in it")
    digest = hashlib.sha256(f"{header.tokenizer} {pre}".encode())
    digest.update(_without_padding(gguf) + b"\0")
    if header.tokenizer == "gpt2" and MERGES in gguf.fields:
        digest.update(gguf.raw_texts(MERGES) + b"\0")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", pre or header.tokenizer)[:32] or "tokenizer"
    return f"{readable}-{digest.hexdigest()[:16]}"


def _without_padding(gguf: GGUF) -> bytes:
    raw, types = gguf.raw_texts(TOKENS), gguf.fields.get(TOKEN_TYPES)
    if types is None or (types.kind, types.n) != (INT32, gguf.n_texts(TOKENS)):
        return raw
    used = np.flatnonzero(gguf.numbers(TOKEN_TYPES) != _UNUSED)
    first = f"[PAD{used[-1] + 1 if used.size else 0}]".encode()
    # A search of the bytes: walking 151,936 texts would take longer than all the rest.
    found = raw.find(LONG.pack(len(first)) + first)
    return raw if found < 0 else raw[:found]
