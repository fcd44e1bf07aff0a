"""Whisper's encoder and decoder on ggml: the Python side of `csrc/`.

    WhisperModel.open(path)
      -> encode(mel)      -> EncodedAudio    one window of sound, as every decoder layer attends to it
      -> cache(audio, n)  -> DecoderCache    the KV cache of n sequences that share it

A token's logits are the same bits whatever shares its pass, on any number of threads, where edgespec's
kernels run (`WhisperModel.kernels`). Ids, shapes and the file are checked here and in the library.

One sequence of a decoder is a session of the exact loop (decoding/generate.py), so that drafts run through it
unchanged. A Whisper decoder attends to nothing but its tokens and one window of sound, so taking tokens back
is a shorter cache.
"""

from __future__ import annotations

import ctypes
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.apps.speech.mel import Floats
from edgespec.apps.speech.speech_model import check_speech_file
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.weights.reading import WhisperSizes
from edgespec.decoding.session import ForwardResult, Rows, SequenceTokens
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama import kernels as llama_kernels
from edgespec.llama.gguf import read_gguf
from edgespec.platform.closing import Closing
from edgespec.platform.machine import default_threads
from edgespec.platform.processes import HomeProcess, finalize

# ---- the C interface (csrc/edgespec_whisper.h) ----

_REASON_BYTES = 512
_MOST_ID = 2**31 - 1
_pointer, _size, _text, _int32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int32


class CDims(ctypes.Structure):
    """`struct es_whisper_dims`."""

    _fields_ = tuple(
        (name, _int32)
        for name in (*(size.name for size in fields(WhisperSizes)), "is_multilingual", "n_alignment_heads")
    )


class CPart(ctypes.Structure):
    """`struct es_whisper_part`."""

    _fields_ = (
        ("sequence", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("n_tokens", ctypes.c_size_t),
        ("n_logits", ctypes.c_size_t),
        ("parents", ctypes.c_void_p),
        ("n_parents", ctypes.c_size_t),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "open": (_pointer, (_text, _int32, _int32, _text, _size)),
    "free": (None, (_pointer,)),
    "get_dims": (CDims, (_pointer,)),
    "alignment_heads": (ctypes.c_int, (_pointer, _pointer, _size)),
    "kernels_reason": (_text, (_pointer,)),
    "encode": (_pointer, (_pointer, _pointer, _size, _text, _size)),
    "cross_from": (_pointer, (_pointer, _pointer, _size, _text, _size)),
    "audio_free": (None, (_pointer,)),
    "states": (ctypes.c_int, (_pointer, _pointer, _size)),
    "cache_new": (_pointer, (_pointer, _size, _int32, _text, _size)),
    "cache_free": (None, (_pointer,)),
    "forward": (ctypes.c_int, (_pointer, ctypes.POINTER(CPart), _size, _pointer, _size, _text, _size)),
    "n_past": (ctypes.c_int, (_pointer, _int32)),
    "rewind": (ctypes.c_int, (_pointer, _int32, _int32)),
    "reorder": (ctypes.c_int, (_pointer, _pointer, _size)),
    "cross_attention": (
        ctypes.c_int,
        (_pointer, _pointer, _size, _pointer, _size, _pointer, _size, _text, _size),
    ),
}


@cache
def whisper_library() -> SimpleNamespace:
    """Return the functions of the library beside the C core, without `es_whisper_` before their names.

    Raises EdgespecError if it is missing or not this library.
    """
    backend.clear_log()  # llama.cpp's libraries are loaded: the graphs call the ggml among them
    path, found = Path(_core.__file__).with_name("edgespec_whisper.so"), SimpleNamespace()
    if not path.exists():
        raise EdgespecError(f"speech is not built in this installation: no {path}; install edgespec again")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, parameters) in _SIGNATURES.items():
            function = library[f"es_whisper_{name}"]
            function.restype, function.argtypes = result, parameters
            setattr(found, name, function)
    except (OSError, AttributeError) as error:
        raise EdgespecError(f"{error}; install edgespec again") from error
    return found


class Reason:
    """Buffer for the line in which the library says why it failed."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_REASON_BYTES)
        self.arguments = (self._buffer, _REASON_BYTES)
        """The last two arguments of a function that can fail."""

    def __str__(self) -> str:
        return self._buffer.value.decode(errors="replace") or "the library gives no reason"


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array's data."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return int(array.ctypes.data)


def ids(tokens: object) -> npt.NDArray[np.int32]:
    """Return tokens as an int32 array. Raises ValueError for numbers that are no 32-bit ids."""
    wide = np.asarray(tokens, np.int64)
    if wide.ndim != 1 or (wide.size and (wide.min() < -1 or wide.max() > _MOST_ID)):
        raise ValueError("token ids and parents are 32-bit numbers in one row")
    return wide.astype(np.int32)


@dataclass(frozen=True, slots=True)
class WhisperDims(WhisperSizes):
    """The sizes of a loaded model, and other facts in its file."""

    multilingual: bool = True
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Decoder layer and head whose attention follows the sound, for times of words; may be empty."""


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Tokens that a forward pass appends to one sequence: a chain, which may end with a tree."""

    sequence: int
    tokens: Sequence[int]
    n_logits: int = 1
    """Number of tokens, at the end, whose logits are wanted."""
    parents: Sequence[int] | None = None
    """Index, within the tree, of the node before each of the last len(parents) tokens; -1: the chain's end.
    Nodes are in depth-first order. After the pass the trunk stays in the cache: the nodes up to the first
    that does not follow the one before it."""


class _Held:
    """An object of the library, which uses a model."""

    def __init__(self, model: WhisperModel, handle: int, free: Callable[..., None]) -> None:
        self.model, self._library, self._dims = model, model.library, model.dims
        self._handle = handle
        self.close = finalize(self, free, handle)
        """Frees the memory; what was made with it keeps what it needs."""

    @property
    def handle(self) -> int:
        """The library's object. Raises ValueError after `close`."""
        if not self.close.alive:
            raise ValueError("it is closed")
        self.model.home.require()
        return self._handle


class EncodedAudio(_Held):
    """One window of sound as the decoder sees it: keys and values of every layer's cross attention."""

    def states(self) -> Floats:
        """Return the encoder's states, shape (n_audio_ctx, n_audio_state): what `cross_from` takes."""
        dims = self._dims
        states = np.empty((dims.n_audio_ctx, dims.n_audio_state), np.float32)
        self._library.states(self.handle, address(states), states.size)
        return states


class DecoderCache(_Held):
    """The KV cache of some sequences (beams) that attend to one window and share passes."""

    def __init__(self, audio: EncodedAudio, n_sequences: int) -> None:
        """For `WhisperModel.cache` only."""
        self.audio, self.n_sequences = audio, n_sequences
        handles, reason, library = np.array([audio.handle], np.uintp), Reason(), audio.model.library
        handle = library.cache_new(address(handles), 1, n_sequences, *reason.arguments)
        if not handle:
            raise EdgespecError(f"no cache for {n_sequences} sequences: {reason}")
        super().__init__(audio.model, handle, library.cache_free)

    def forward(self, batch: Sequence[SequenceBatch]) -> list[Floats]:
        """Run one pass over all of `batch`; return for each its logits, shape (n_logits, n_vocab).

        The arrays are the caller's. Raises ValueError for an invalid token, sequence or parent, or a
        sequence that would be longer than n_text_ctx, and EdgespecError if memory runs out. Nothing is
        changed then.
        """
        kept, parts = [], (CPart * len(batch))()
        for part, given in zip(parts, batch, strict=True):
            tokens, parents = ids(given.tokens), ids(given.parents or ())
            kept += [tokens, parents]
            part.sequence, part.tokens, part.n_tokens = given.sequence, address(tokens), tokens.size
            part.n_logits = self._checked_rows(given.n_logits, tokens.size)
            part.parents, part.n_parents = address(parents), parents.size
        logits = np.empty((sum(part.n_logits for part in parts), self._dims.n_vocab), np.float32)
        reason = Reason()
        sizes = (address(logits), logits.size)
        if self._library.forward(self.handle, parts, len(batch), *sizes, *reason.arguments):
            if "memory" in str(reason):
                raise EdgespecError(f"{self.model.path}: {reason}")
            raise ValueError(str(reason))
        ends = accumulate(part.n_logits for part in parts)
        return [logits[end - part.n_logits : end] for end, part in zip(ends, parts, strict=True)]

    @staticmethod
    def _checked_rows(n_logits: int, n_tokens: int) -> int:
        if not 0 <= n_logits <= n_tokens:
            raise ValueError(f"no logits of {n_logits} of {n_tokens} tokens")
        return n_logits

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens that the sequence holds. Raises ValueError if there is no such one."""
        n: int = self._library.n_past(self.handle, sequence)
        if n < 0:
            raise ValueError(f"no sequence {sequence}: there are {self.n_sequences}")
        return n

    def rewind(self, sequence: int, n_keep: int) -> None:
        """Remove all but the first `n_keep` tokens of the sequence. Raises ValueError if it has fewer."""
        if self._library.rewind(self.handle, sequence, n_keep):
            raise ValueError(f"cannot keep {n_keep} tokens of sequence {sequence}")

    def reorder(self, sources: Sequence[int]) -> None:
        """Let sequence i continue from the content of sequence sources[i]; nothing is copied.

        `sources` may be shorter than the number of sequences; the others become empty. Raises ValueError if
        there is no such sequence.
        """
        indices = ids(sources)
        if self._library.reorder(self.handle, address(indices), indices.size):
            raise ValueError(f"no such sequences: {list(sources)} of {self.n_sequences}")

    def cross_attention(self, tokens: Sequence[int], n_logits: int = 0) -> tuple[Floats, Floats]:
        """Return the alignment heads' attention, and logits, of one pass over `tokens` from position 0.

        The cache is unchanged. Attention: softmaxed weights, shape (n_alignment_heads, n_tokens,
        n_audio_ctx); logits: of the last `n_logits` tokens. Raises ValueError for
        invalid tokens.
        """
        wanted, dims = ids(tokens), self._dims
        weights = np.zeros((len(dims.alignment_heads), wanted.size, dims.n_audio_ctx), np.float32)
        logits = np.empty((self._checked_rows(n_logits, wanted.size), dims.n_vocab), np.float32)
        reason = Reason()
        sizes = (address(wanted), wanted.size, address(weights), weights.size, address(logits), logits.size)
        if self._library.cross_attention(self.handle, *sizes, *reason.arguments):
            raise ValueError(str(reason))
        return weights, logits


class WhisperModel(Closing):
    """A Whisper model in memory."""

    def __init__(self, path: Path, library: SimpleNamespace, handle: int, isa: str) -> None:
        """For `open` only."""
        self.path, self.library = path, library
        self._handle = handle
        self.home = HomeProcess("the Whisper model")
        """The process that it can be used in."""
        self._freed = finalize(self, library.free, handle)
        """Frees the memory; windows and caches keep what they need."""
        self.kernels_reason: str = library.kernels_reason(handle).decode(errors="replace")
        """Why ggml's own kernels are used, in one line; "" if edgespec's are."""
        self.kernels: str = llama_kernels.STOCK if self.kernels_reason else isa
        """The instruction set of edgespec's kernels, or "stock"."""
        c = library.get_dims(handle)
        heads = np.zeros((c.n_alignment_heads, 2), np.int32)
        library.alignment_heads(handle, address(heads), len(heads))
        self.dims = WhisperDims(
            **{size.name: getattr(c, size.name) for size in fields(WhisperSizes)},
            multilingual=bool(c.is_multilingual),
            alignment_heads=tuple((int(layer), int(head)) for layer, head in heads),
        )
        """The model's sizes."""

    @classmethod
    def open(cls, path: Path, *, n_threads: int = 0, kernels: bool = True) -> WhisperModel:
        """Load a GGUF of architecture "whisper". `n_threads` 0: as many as pay on this machine.

        Raises EdgespecError, in one line, if it is no such file or damaged, or the library is not built.
        """
        read_gguf(path)  # says more of what is wrong with a file than ggml
        library = whisper_library()
        wanted, why = kernels, "not wanted"
        isa = ""
        if kernels:
            loaded = llama_kernels.load()
            wanted, why, isa = loaded.available, loaded.reason, loaded.name
        reason = Reason()
        threads = n_threads or default_threads()
        handle = library.open(os.fsencode(path.absolute()), threads, int(wanted), *reason.arguments)
        if not handle:
            raise EdgespecError(f"{path}: {reason}")
        model = cls(path, library, handle, isa)
        if not wanted:
            model.kernels_reason = why
        return model

    @property
    def handle(self) -> int:
        """The library's object. Raises ValueError after `close`."""
        if not self._freed.alive:
            raise ValueError("the model is closed")
        self.home.require()
        return self._handle

    def encode(self, mel: Floats) -> EncodedAudio:
        """Encode one window. `mel`: shape (n_mels, 2 n_audio_ctx), as OpenAI's log-mel spectrogram.

        Raises EdgespecError for numbers that are not finite, a model without encoder, or too little memory.
        """
        shape = (self.dims.n_mels, 2 * self.dims.n_audio_ctx)
        return self._listen(self.library.encode, mel, shape, "the sound")

    def cross_from(self, states: Floats) -> EncodedAudio:
        """Return a window from another model's `EncodedAudio.states`, of the same shape."""
        shape = (self.dims.n_audio_ctx, self.dims.n_audio_state)
        return self._listen(self.library.cross_from, states, shape, "the encoder's states")

    def _listen(
        self, function: Callable[..., int | None], given: Floats, shape: tuple[int, int], what: str
    ) -> EncodedAudio:
        if given.shape != shape:
            raise ValueError(f"{what} have the shape {given.shape}, not {shape}")
        array = np.ascontiguousarray(given, np.float32)
        reason = Reason()
        handle = function(self.handle, address(array), array.size, *reason.arguments)
        if not handle:
            raise EdgespecError(f"{self.path}: {reason}")
        return EncodedAudio(self, handle, self.library.audio_free)

    def cache(self, audio: EncodedAudio, n_sequences: int = 1) -> DecoderCache:
        """Return an empty cache for sequences that attend to `audio`, a window of this model."""
        if audio.model is not self:
            raise ValueError("the window belongs to another model: use cross_from")
        return DecoderCache(audio, n_sequences)

    def close(self) -> None:
        """Free the library's object; a second call does nothing."""
        self._freed()


class SpeechModel(Closing):
    """A Whisper model and its tokenizer. A context manager, which frees it."""

    def __init__(
        self, path: Path, *, name: str = "", n_threads: int | None = None, kernels: bool = True
    ) -> None:
        """Load the file at `path`, called `name`. Raises EdgespecError if it is no Whisper model."""
        check_speech_file(path, name or str(path))
        self.path = path
        self.name = name or path.stem
        self.tokenizer = WhisperTokenizer.from_gguf(path)
        self.model = WhisperModel.open(path, n_threads=n_threads or 0, kernels=kernels)

    def close(self) -> None:
        """Free the library's object; a second call does nothing."""
        self.model.close()


class SpeechVocabulary:
    """A Whisper tokenizer in the form that the loop and drafts of another vocabulary need: a TokenVocabulary.

    Timestamps have a name and no text; languages and tasks have neither, so that a draft that knows none
    reads none.
    """

    keeps_state = False
    can_rewind = True
    add_bos = False
    bos: int | None = None
    leaves_last_states = False

    def __init__(self, tokenizer: WhisperTokenizer) -> None:
        """Answer for `tokenizer`."""
        self.tokenizer = tokenizer
        self.n_vocab = tokenizer.n_vocab
        self.eos: int | None = tokenizer.eot
        self.eot: int | None = tokenizer.eot
        self.path = str(tokenizer.path or "Whisper")
        self.name = tokenizer.path.name if tokenizer.path else "Whisper"
        self._names = {
            tokenizer.eot: b"<|endoftext|>",
            tokenizer.sot: b"<|startoftranscript|>",
            tokenizer.sot_prev: b"<|startofprev|>",
            tokenizer.no_timestamps: b"<|notimestamps|>",
        }

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a window's text."""
        return token == self.tokenizer.eot

    def sequence_breakers(self, _texts: tuple[str, ...], /) -> array[int]:
        """Return none: no option of speech asks for DRY."""
        return array("i")

    def is_control(self, token: int) -> bool:
        """Whether `token` is no text."""
        return token >= self.tokenizer.eot

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of `token`; those of a special one's name only if `special`."""
        if not self.is_control(token):
            return self.tokenizer.piece(token)
        if not special:
            return b""
        if self.tokenizer.is_timestamp(token):
            return b"<|%.2f|>" % self.tokenizer.seconds(token)
        return self._names.get(token, b"")

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Return the tokens of `text`; there are no special ones in it."""
        return self.tokenizer.encode(text)


class SpeechSession:
    """One sequence in a cache of a Whisper decoder; `session()` is what the loop takes."""

    all_logits = False
    n_features_max = 0
    most_drafted = 32  # tokens of a tree in one pass

    def __init__(
        self, cache: DecoderCache, traits: SpeechVocabulary, *, n_ctx: int, noted: int | None = None
    ) -> None:
        """Continue sequence 0 of `cache`, up to `n_ctx` tokens.

        `noted`: the position whose logits are stored in `noted_row` when they are computed: that of
        <|startoftranscript|>, where the model shows whether anyone speaks.
        """
        self.cache = self
        self.model = traits
        self.sequence = 0
        self.n_ctx = n_ctx
        self.n_logits_max = n_ctx
        self.noted_row: Rows | None = None
        """The logits at the noted position, (n_vocab,), a copy; None: not computed yet."""
        self.seconds = 0.0
        """Time of all passes."""
        self._cache = cache
        self._noted = noted

    @property
    def n_past(self) -> int:
        """Tokens in the sequence."""
        return self._cache.n_past(self.sequence)

    @property
    def tokens(self) -> list[int]:
        """Nothing: tokens of an earlier window cannot be reused."""
        return []

    def forward(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        """Run a pass over one part, which is this sequence's."""
        (part,) = parts
        started = time.perf_counter()
        n_tokens, parents = len(part.tokens), part.parents
        if parents is not None and list(parents) == list(range(-1, len(parents) - 1)):
            parents = None
        n_rows = part.n_logits
        noted = -1 if self._noted is None or self.noted_row is not None else self._noted - self.n_past
        is_noted = 0 <= noted < n_tokens and parents is None
        if is_noted:
            n_rows = max(n_rows, n_tokens - noted)
        (rows,) = self._cache.forward([SequenceBatch(self.sequence, part.tokens, n_rows, parents)])
        if is_noted:
            self.noted_row = np.array(rows[noted - n_tokens])
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return [ForwardResult(rows[n_rows - part.n_logits :], seconds, n_tokens)]

    def eval(self, tokens: Sequence[int], *, n_logits: int = 1, parents: Sequence[int] | None = None) -> Rows:
        """Append `tokens`; return the logits after each of the last `n_logits`, as Session.eval does."""
        if not tokens:
            return np.empty((0, self.model.n_vocab), np.float32)
        return self.forward([SequenceTokens(self.sequence, tokens, n_logits, parents)])[0].rows

    def rewind(self, n_keep: int) -> int:
        """Cut the sequence back to its first `n_keep` tokens; return `n_keep`."""
        n_past = self.n_past
        if not 0 <= n_keep <= n_past:
            raise ValueError(f"cannot keep {n_keep} of {n_past} tokens")
        if n_keep < n_past:
            self._cache.rewind(self.sequence, n_keep)
        return n_keep

    def clear(self) -> None:
        """Empty the sequence."""
        self.rewind(0)

    def close(self) -> None:
        """Do nothing: the cache belongs to the window."""
