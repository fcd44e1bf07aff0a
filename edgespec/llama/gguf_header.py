"""Read the header of a model file, without loading the model.

`check_model_file` checks that the file exists, is a GGUF, is complete and holds a model that writes text.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.choices import CacheType
from edgespec.llama.gguf import GGUF, INT32, LONG, MERGES, TOKEN_TYPES, TOKENS, TensorInfo, read_gguf
from edgespec.platform.plugins import load, offered

HEAD_PREFIX = "edgespec.head."
"""Begins the keys of the metadata of a draft head that edgespec made."""

DRAFT_PREFIX = "edgespec.draft."
"""Begins the keys of the tokens that a head can say."""

_HEAD, _SAMPLES, _SAMPLE = 256 << 10, 32, 4 << 10  # bytes, samples, bytes
_MAX_LAYERS = 512  # of llama.cpp, which aborts on more
_KV_PAD = 256  # llama.cpp rounds a context up to this many cells
_CACHE_BYTES: dict[CacheType, int] = {"f16": 64, "q8_0": 34, "q4_0": 18}  # of 32 numbers

_ENCODERS = re.compile(r"bert|^(t5encoder|gemma-embedding|llama-embed|wavtokenizer-dec)$")
_PICTURES = frozenset(
    {
        "flux",
        "sd1",
        "sdxl",
        "sd3",
        "wan",
        "aura",
        "ltxv",
        "hyvid",
        "cosmos",
        "hidream",
        "lumina2",
        "qwen_image",
    }
)
_OLLAMA_VISION = ("v.", "mm.")  # begins the names of a vision part's tensors

DRAFTS = "edgespec.drafts"
"""The entry points of kinds of drafts, each under the name that begins the metadata of its files."""


@dataclass(frozen=True)
class GGUFHeader:
    """The header of one model file.

    A number that the file does not state is 0, a text "".
    """

    path: Path
    architecture: str
    name: str
    general_type: str
    """`general.type`: "model", "adapter", "mmproj", "imatrix" or ""."""
    file_bytes: int
    """Size on disk; `check_model_file` counts all parts of a split model."""
    expected_bytes: int
    """Least size of the complete file; less on disk means that it is truncated."""
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
    gguf: GGUF = field(repr=False)
    """All of the file's metadata."""
    n_nextn: int = 0
    """Blocks after the model's own, counted in `n_layer`, that are a head which drafts ("nextn")."""
    is_part: bool = False
    """Whether it describes only that head, as if the file held nothing else."""
    state_bytes: int = 0
    """Bytes that the recurrent layers keep of one text, however long; 0 without such layers."""
    cache_type: CacheType = "f16"
    """Type of the caches that are made for the model (cache_types.py); no file says it."""
    other_parts: tuple[Path, ...] = ()
    """The files beside `path` that complete a split model; found by `check_model_file`."""

    @property
    def is_head(self) -> bool:
        """Whether it is a draft head, which runs only with its own target."""
        return any(key.startswith(HEAD_PREFIX) for key in self.gguf.fields)

    @property
    def is_embedder(self) -> bool:
        """Whether it makes vectors or scores of texts instead of writing text."""
        return bool(_ENCODERS.search(self.architecture)) or self.pooling_type > 0 or not self.is_causal

    @property
    def draft_kind(self) -> str:
        """The name in `DRAFTS` of what the file holds; "" for a model, which writes by itself."""
        fields = self.gguf.fields
        return next(
            (name for name in offered(DRAFTS) if any(key.startswith(f"{name}.") for key in fields)), ""
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file can turn text into tokens."""
        return self.n_vocab > 0

    @property
    def has_snapshots(self) -> bool:
        """Whether a pass can return the state after each of its last tokens (rollback.py)."""
        return self.architecture in SNAPSHOTS

    def kv_bytes(self, n_ctx: int) -> int:
        """Return the bytes of a cache of keys and values for `n_ctx` tokens."""
        cells = math.ceil(n_ctx / _KV_PAD) * _KV_PAD
        numbers = cells * sum(self.n_head_kv) * (self.head_dim_k + self.head_dim_v)
        return numbers * _CACHE_BYTES[self.cache_type] // 32

    def fingerprint(self) -> str:
        """Return 64 hex digits that identify this model file.

        SHA-256 over the size, the first 256 KiB (header and most of the tokenizer) and 32 samples of 4 KiB,
        evenly spread to the last byte, of each part of the model. 384 KiB are read: under 1 ms from the page
        cache, 33 seeks on a cold disk. This is no checksum: a change outside the samples goes unnoticed.
        Raises OSError if the file cannot be read.
        """
        digest = hashlib.sha256()
        for path in (self.path, *self.other_parts):
            with path.open("rb", buffering=0) as file:
                handle = file.fileno()
                size = os.fstat(handle).st_size
                digest.update(f"{size}\n".encode())
                digest.update(os.pread(handle, _HEAD, 0))
                last = max(0, size - _SAMPLE)
                for i in range(1, _SAMPLES + 1):
                    digest.update(os.pread(handle, _SAMPLE, last * i // _SAMPLES))
        return digest.hexdigest()


def read_header(path: str | Path) -> GGUFHeader:
    """Read the header of the GGUF file `path`, without checking whether the model can be run.

    Raises UsageError and EdgespecError as `read_gguf`.
    """
    path = Path(path)
    gguf = read_gguf(path)

    def text(key: str) -> str:
        return "".join(filter(str.isprintable, gguf.text(key)))  # it may end up in a line on a terminal

    def largest(key: str, default: int = 0) -> int:
        return max(gguf.integers(key), default=default)  # some architectures state one for each layer

    architecture = text("general.architecture")
    n_layer = largest(f"{architecture}.block_count")
    n_embd = largest(f"{architecture}.embedding_length")
    n_head = largest(f"{architecture}.attention.head_count")
    head_dim = n_embd // n_head if n_head > 0 else 0

    def of_architecture(key: str) -> tuple[int, ...]:
        return gguf.integers(f"{architecture}.{key}")

    head_dim_k = largest(f"{architecture}.attention.key_length", head_dim)
    recurrent = recurrent_layers(architecture, min(n_layer, _MAX_LAYERS), of_architecture)
    n_head_kv = _per_layer(of_architecture("attention.head_count_kv"), n_layer, n_head)
    if architecture not in BOTH_IN_A_LAYER:
        n_head_kv = tuple(0 if i in recurrent else heads for i, heads in enumerate(n_head_kv))
    return GGUFHeader(
        path=path,
        architecture=architecture,
        name=text("general.name"),
        general_type=text("general.type"),
        file_bytes=gguf.n_bytes,
        expected_bytes=gguf.expected_bytes,
        n_ctx_train=largest(f"{architecture}.context_length"),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=largest(f"{architecture}.feed_forward_length"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim_k,
        head_dim_v=largest(f"{architecture}.attention.value_length", head_dim),
        tokenizer=text("tokenizer.ggml.model"),
        n_vocab=gguf.n_texts(TOKENS),
        pooling_type=largest(f"{architecture}.pooling_type"),
        is_causal=largest(f"{architecture}.attention.causal", 1) != 0,
        split_no=largest("split.no"),
        split_count=largest("split.count"),
        gguf=gguf,
        n_nextn=largest(f"{architecture}.nextn_predict_layers"),
        state_bytes=len(recurrent) * layer_state_bytes(n_embd, n_head, head_dim_k, of_architecture)
        if recurrent
        else 0,
    )


def _per_layer(heads: tuple[int, ...], n_layer: int, default: int) -> tuple[int, ...]:
    n_layer = min(n_layer, _MAX_LAYERS)  # a damaged number must not fill the memory
    heads = heads or (default,)
    return heads * n_layer if len(heads) == 1 else heads[:n_layer]


def read_tensors(header: GGUFHeader) -> list[TensorInfo]:
    """Return the tensors of a file, or of all files of a split model, in their order."""
    others = (tensor for part in header.other_parts for tensor in read_gguf(part).tensors)
    return [*header.gguf.tensors, *others]


def check_model_file(file: str | Path | GGUFHeader, *, or_head: bool = False) -> GGUFHeader:
    """Return the header of a complete GGUF file that holds a text-generating model.

    `file`: its path, or its header if that was read. `or_head`: or a draft head that is published as a file
    of its own.

    For anything else, raises UsageError (wrong path) or EdgespecError (wrong file), with one line that says
    what it is and what to do. For a split model give the first part; the others must be in the same folder,
    and `file_bytes` is the sum of all.
    """
    header = check_complete_file(file)
    if not (or_head and header.draft_kind and not header.is_head):
        _check_kind(header)
    return header


def check_complete_file(file: str | Path | GGUFHeader) -> GGUFHeader:
    """Return the header of a complete GGUF file, whatever it holds; else as `check_model_file`."""
    header = file if isinstance(file, GGUFHeader) else read_header(file)
    parts = [read_header(part) for part in _other_parts(header)]
    for part in (header, *parts):
        _check_complete(part)
    return replace(
        header,
        file_bytes=header.file_bytes + sum(part.file_bytes for part in parts),
        other_parts=tuple(part.path for part in parts),
    )


def check_complete_part(path: Path) -> None:
    """Raise EdgespecError for a file of a split model that is no GGUF, or not complete."""
    _check_complete(read_header(path))


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
    if what := other_kind(header):
        raise EdgespecError(f"{header.path}: {what}; choose a text-generating language model")
    if not 1 <= header.n_layer <= _MAX_LAYERS:
        raise EdgespecError(f"{header.path}: damaged: a model of {header.n_layer} layers; download it again")


def other_kind(header: GGUFHeader, *, or_embedder: bool = False) -> str:
    """Return what a valid GGUF is, if not a text-generating model, such as "a LoRA adapter, not a model".

    Return "" for a text-generating model, or a head that edgespec made; with `or_embedder` also for an
    embedding or reranking model.
    """
    architecture, kind = header.architecture, header.general_type
    cannot = {
        "the vision or audio projector of a multimodal model, not its language model": (
            architecture == "clip" or kind == "mmproj"
        ),
        "a LoRA adapter, not a model": kind == "adapter",
        "an importance matrix, not a model": "imatrix" in (kind, architecture),
        "a GGUF file that names no architecture": not architecture,
        "a Whisper model, which turns speech into text (`edgespec transcribe`)": architecture == "whisper",
        f"a model that makes pictures or films (architecture {architecture})": architecture in _PICTURES,
        f"an embedding, reranking or encoder model (architecture {architecture})": (
            header.is_embedder and not or_embedder
        ),
        "an encoder-decoder model (architecture t5)": architecture == "t5",
    }
    what = next((what for what, is_so in cannot.items() if is_so), "")
    if not what and (name := header.draft_kind) and not header.is_head:
        what = f"{load(DRAFTS, name).what}, which drafts beside its own target only"
    return what or _missing_part(header)


def _missing_part(header: GGUFHeader) -> str:
    """Return the faults of a text-generating model: missing or surplus parts; "" if there are none."""
    tensors, is_whole = header.gguf.tensors, header.split_count < 2
    if not tensors and is_whole:
        return "only a vocabulary, without a model's weights"
    if header.n_nextn and is_whole and not _has_first_block(header):
        return "only the MTP head of a model, without the model"
    if any(tensor.name.startswith(_OLLAMA_VISION) for tensor in tensors):
        return (
            "a multimodal model in Ollama's own form, whose file holds the vision part too, as llama.cpp "
            "cannot load it"
        )
    if not header.has_tokenizer and not header.is_head:
        return "a model without a tokenizer"
    return ""


def _has_first_block(header: GGUFHeader) -> bool:
    return any(tensor.name.startswith("blk.0.") for tensor in header.gguf.tensors)


# ---- architectures that were checked ----

RESULTS = "architectures.json"
"""File of this package with the results, by `architecture_key`."""


class ArchitectureSupport(msgspec.Struct, frozen=True):
    """The results of checking an architecture: the features that work with it."""

    same_in_any_batch: bool
    """Whether the logits after a token are the same bits in batches of any size."""
    left_to_llama_cpp: tuple[str, ...]
    """Operations of a pass that edgespec's kernels do not run, by ggml's name."""
    drafts: tuple[str, ...]
    """Sources whose drafts change nothing in the text."""
    keeps_cache: bool
    takes_back: bool
    """Whether tokens can be removed from the end of a sequence."""

    def __str__(self) -> str:
        kernels = ", ".join(self.left_to_llama_cpp)
        parts = [
            f"all but {kernels} on the kernels" if kernels else "all on the kernels",
            "same bits in any batch" if self.same_in_any_batch else "rounds by batch",
            f"drafts: {', '.join(self.drafts) or 'none'}",
        ]
        parts += ["cache kept"] * self.keeps_cache + ["tokens back"] * self.takes_back
        return "; ".join(parts)


def architecture_key(gguf_name: str, *, own_head: bool) -> str:
    """Return the name of a result; `own_head`: of models with a head in their file."""
    return f"{gguf_name}-mtp" if own_head else gguf_name


@functools.cache
def read_results() -> dict[str, ArchitectureSupport]:
    """Return the results for each architecture (docs/models-supported.md), by its name."""
    data = (files("edgespec.llama") / RESULTS).read_bytes()
    return msgspec.json.decode(data, type=dict[str, ArchitectureSupport])


def architecture_support(header: GGUFHeader) -> ArchitectureSupport | None:
    """Return the features that work with a model's architecture; None if it was never checked."""
    return read_results().get(architecture_key(header.architecture, own_head=header.n_nextn > 0))


# ---- fingerprints: the keys of what edgespec stores about model files and tokenizers ----


_UNUSED = 5  # enum llama_token_type


def tokenizer_fingerprint(header: GGUFHeader) -> str:
    """Return a name for the meaning of a model's token ids, such as "qwen2-0123456789abcdef".

    The same for all sizes and quantizations of a family: a hash of the file's token list, without the padding
    at its end, of the merges and of the tokenizer's type. Raises EdgespecError if the file has no token list,
    OSError if it cannot be read.
    """
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


# ---- which models keep a state, and how large it is, by the header of a file ----
#
# An attention layer keeps keys and values of each token. A recurrent layer (a state space, a gated delta
# net, a short convolution) keeps one state of the whole text instead, which every token changes: earlier
# tokens cannot be cut off it. Hybrid models have layers of both kinds. rollback.py takes tokens back there.
#
# The figures are those of llama.cpp (`llama_hparams::n_embd_r`, `n_embd_s`, `is_recr`; all states are F32).


RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
"""Architectures without attention."""

SNAPSHOTS = frozenset(
    {
        *("qwen35", "qwen35moe", "qwen4exp", "kimi-k3", "glm5-next", "nemotron_h", "nemotron_h_moe"),
        *("lfm2", "lfm2moe", "bailingmoe3"),
    }
)
"""Architectures whose passes can leave the state after each of their last tokens (`n_rs_seq`):
`llm_arch_supports_rs_rollback`, without deepseek4, whose cache is of a kind of its own."""

BOTH_IN_A_LAYER = frozenset({"falcon-h1"})
"""Architectures whose layers attend and keep a state as well."""

_EVERY_LAYER = RECURRENT | BOTH_IN_A_LAYER
_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
"""Architectures in which every n-th layer attends and the others keep a state, if the file says no more."""
_LAYERS_WITHOUT_HEADS = frozenset(
    {
        *("jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"),
        *("kimi-linear", "kimi-k3", "glm5-next", "bailingmoe3"),
    }
)
"""Architectures in which a layer without key/value heads keeps a state."""
_ONE_BLOCK_A_LAYER = frozenset({"nemotron_h", "nemotron_h_moe"})
"""Architectures of these in which a layer with a feed-forward has nothing else."""

Integers = Callable[[str], tuple[int, ...]]
"""Returns the whole numbers of a metadata field without the architecture's prefix; () if it is not there."""


def recurrent_layers(architecture: str, n_layer: int, integers: Integers) -> frozenset[int]:
    """Return which of a model's layers have a recurrent state."""
    layers = range(n_layer)
    if architecture in _EVERY_LAYER:
        return frozenset(layers)
    if architecture in _INTERVALS:
        stated = integers("attention.recurrent_layers")
        if stated:
            return frozenset(i for i, one in enumerate(stated[:n_layer]) if one)
        interval = max(1, *integers("full_attention_interval") or (_INTERVALS[architecture],))
        n_trunk = n_layer - max(integers("nextn_predict_layers"), default=0)
        return frozenset(i for i in range(n_trunk) if (i + 1) % interval)
    if architecture in _LAYERS_WITHOUT_HEADS:
        heads = _of_each(integers("attention.head_count_kv"), n_layer)
        widths = _of_each(integers("feed_forward_length"), n_layer)
        alone = architecture in _ONE_BLOCK_A_LAYER
        return frozenset(i for i in layers if heads[i] == 0 and not (alone and widths[i]))
    return frozenset()


def _of_each(values: tuple[int, ...], n_layer: int) -> tuple[int, ...]:
    """Return a value for each layer; a file may state one for all."""
    if len(values) == 1:
        return values * n_layer
    return (*values, *[-1] * n_layer)[:n_layer]


def layer_state_bytes(n_embd: int, n_head: int, head_dim: int, integers: Integers) -> int:
    """Return the bytes of one recurrent layer's state of one text."""

    def value(key: str, default: int = 0) -> int:
        return max(integers(key), default=default)

    if head := value("wkv.head_size"):
        return 4 * (value("token_shift_count", 2) * n_embd + n_embd * head)
    inner, states = value("ssm.inner_size"), value("ssm.state_size")
    taps = max(0, value("ssm.conv_kernel") - 1)
    if length := value("shortconv.l_cache"):
        return 4 * (n_embd * (length - 1) + inner * states)
    if head := value("kda.head_dim"):
        return 4 * (3 * (taps or 3) * n_head * head + head * head * n_head)
    if not inner:  # linear attention: a matrix for each head
        return 4 * head_dim * head_dim * n_head
    return 4 * (taps * (inner + 2 * value("ssm.group_count") * states) + inner * states)
