"""Draft heads in files: those that edgespec makes, and published ones.

Ours is one block that continues from the target's hidden states, and the file that it is in.

    NAME.gguf = an ordinary GGUF of one block with `edgespec.head.*` in its metadata; `token_embd`, which is
                its output matrix too, holds the rows of the kept ids of the target's output matrix;
                after the last tensor, where no GGUF parser looks: the fusion matrix [We | Wf]

Its input for token t after a token with the hidden state f is We e(t) + Wf f, with e the target's own input
embedding, which is read in the target's file. Its own hidden state takes f's place where the target has not
been. (EAGLE, arXiv 2401.15077.)

Draft heads published as files of their own: EAGLE-3 (arXiv 2503.01840), DFlash (arXiv 2602.06036), others.

They read the hidden states of several layers of one target, side by side.

    LayersTarget   a target that gives the states of these layers
    EagleHead      an encoder makes one row of a token's states; one block reads token t beside the row
                   before t, and says what may follow t; along a draft the row is the block's own
    GemmaHead      some layers on the keys and values of the target's last ones (lent_cache.py)
    BlockHead      DFlash and its kin: the states become keys and values of some blocks, which then draft
                   several tokens in one pass, over the last token and masks (see block_rows.py)

What a file lacks of embeddings and output matrix is the target's. head_kinds.py tells the kinds apart; those
that are not run are refused with the reason.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.decoding.session import Features, Inputs
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.gguf import TensorInfo, from_floats, is_type, read_gguf, row_bytes, to_floats, type_number
from edgespec.llama.gguf_header import DRAFT_PREFIX, HEAD_PREFIX, HELPERS, GGUFHeader, check_complete_file
from edgespec.llama.head_kinds import DFLASH, DFLASH_2, DSPARK, EAGLE, GEMMA, kind_of
from edgespec.llama.hidden_states import NEXTN_HEAD, Outputs, of_kernels, of_layers
from edgespec.llama.kernels import Plugin
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.weights import Model
from edgespec.platform.processes import finalize

TARGET = HEAD_PREFIX + "target"
TOKEN_IDS, N_VOCAB = DRAFT_PREFIX + "token_ids", DRAFT_PREFIX + "n_vocab"
FUSION_TYPE, FUSION_OFFSET = HEAD_PREFIX + "fusion_type", HEAD_PREFIX + "fusion_offset"
_EMBEDDINGS = "token_embd.weight"
_AGAIN = "make it again with `edgespec draft make`"
_REMEMBERED = 1024  # tokens: 6 MB for a target of 1,536 elements


@dataclass(frozen=True, slots=True, eq=False)
class HeadFile:
    """The metadata of a draft head."""

    path: Path
    target_sha256: str
    """SHA-256 of the file of the target that it was made for."""
    n_vocab: int
    """Tokens of the target's vocabulary."""
    token_ids: npt.NDArray[np.int64]
    """Row of its logits -> id in the target's vocabulary, ascending."""
    n_embd: int
    """Elements of a hidden state, and of an embedding, of the target."""
    fusion_type: int
    """`enum ggml_type` of the fusion matrix, whose n_embd rows have 2 n_embd elements each."""
    fusion_offset: int
    """Where it starts in the file, bytes."""


def check_target(header: GGUFHeader) -> None:
    """Raise UsageError for a draft head, which cannot be a target."""
    if header.is_head:
        raise UsageError(f"{header.path}: a draft head; it cannot be a target")


def read_head(header: GGUFHeader) -> HeadFile | None:
    """The description of a head in its file; None for an ordinary model.

    Raises EdgespecError if the file is not as training made it.
    """
    path, gguf = header.path, header.gguf
    if not header.is_head:
        return None
    try:
        head = HeadFile(
            path=path,
            target_sha256=gguf.text(TARGET),
            n_vocab=int(gguf.number(N_VOCAB)),
            token_ids=gguf.numbers(TOKEN_IDS).astype(np.int64),
            n_embd=header.n_embd,
            fusion_type=int(gguf.number(FUSION_TYPE)),
            fusion_offset=int(gguf.number(FUSION_OFFSET)),
        )
    except KeyError:
        raise EdgespecError(f"{path}: damaged: incomplete {HEAD_PREFIX}* metadata; {_AGAIN}") from None
    ids = head.token_ids
    if not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= head.n_vocab:
        raise EdgespecError(f"{path}: damaged: its list of tokens is not ascending; {_AGAIN}")
    if any(tensor.name == _EMBEDDINGS and tensor.rows != len(ids) for tensor in gguf.tensors):
        raise EdgespecError(f"{path}: damaged: its list of tokens does not fit its matrix; {_AGAIN}")
    size = row_bytes(head.fusion_type, 2 * head.n_embd) if is_type(head.fusion_type) else None
    if size is None or gguf.n_bytes < head.fusion_offset + head.n_embd * size:
        raise EdgespecError(
            f"{path}: the fusion matrix after its last tensor is missing (copied or requantized by another "
            f"program?); {_AGAIN}"
        )
    return head


def read_fusion(head: HeadFile) -> npt.NDArray[np.float32]:
    """Return the fusion matrix [We | Wf], shape (n_embd, 2 n_embd)."""
    n, size = head.n_embd, row_bytes(head.fusion_type, 2 * head.n_embd)
    raw = np.fromfile(head.path, np.uint8, n * size, offset=head.fusion_offset).reshape(n, size)
    return to_floats(raw, head.fusion_type, 2 * n)


class MappedMatrix:
    """A matrix in a model's file, whose rows are read as floats.

    It is mapped, so that only the pages of used rows are in memory.
    """

    def __init__(self, header: GGUFHeader, name: str) -> None:
        """Map the tensor of that name. Raises EdgespecError if the file has none."""
        for path in (header.path, *header.other_parts):
            gguf = header.gguf if path == header.path else read_gguf(path)
            for tensor in gguf.tensors:
                if tensor.name == name:
                    size = row_bytes(tensor.kind, tensor.columns)
                    start = gguf.data_start + tensor.offset
                    self._rows = np.memmap(path, np.uint8, "r", start, (tensor.rows, size))
                    self._kind, self.n_embd = tensor.kind, tensor.columns
                    return
        raise EdgespecError(f"{header.path}: no {name} in it; a head cannot draft for it")

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the rows of `tokens`, shape (len(tokens), n_embd)."""
        return to_floats(self._rows[np.asarray(tokens, np.int64)], self._kind, self.n_embd)


class TargetEmbeddings(MappedMatrix):
    """The input embeddings of a target."""

    def __init__(self, header: GGUFHeader) -> None:
        """Map the matrix of the target's file. Raises EdgespecError if it has none."""
        super().__init__(header, _EMBEDDINGS)


class Fusion:
    """The input of a head in place of tokens: the fusion matrix times embedding and hidden state.

    What embeddings give is remembered: the same few hundred tokens make most of a text.
    """

    def __init__(
        self,
        head: HeadFile,
        embeddings: TargetEmbeddings,
        *,
        n_threads: int = 1,
        plugin: Plugin | None = None,
    ) -> None:
        """Load the matrix of `head`; `embeddings` are those of its target; `plugin`: kernels to use."""
        n, floats = head.n_embd, read_fusion(head)
        self._n_embd, self._embeddings = n, embeddings
        self._of_embedding, self._of_state = (
            EightBitMatrix(half, n_threads, plugin) for half in (floats[:, :n], floats[:, n:])
        )
        self._of_token: dict[int, npt.NDArray[np.float32]] = {}

    def __call__(self, tokens: Sequence[int], features: Features) -> npt.NDArray[np.float32]:
        """Return the inputs for `tokens`, the first of them after features[0]; both of one length.

        Shape (len(tokens), n_embd).
        """
        if features.shape != (len(tokens), self._n_embd):
            raise ValueError(f"hidden states of shape {features.shape} for {len(tokens)} tokens")
        inputs = np.empty((len(tokens), self._n_embd), np.float32)
        self._of_state.multiply(np.ascontiguousarray(features), inputs)
        self._remember(tokens)
        for i, token in enumerate(tokens):
            inputs[i] += self._of_token[token]
        return inputs

    def _remember(self, tokens: Sequence[int]) -> None:
        unknown = set(tokens).difference(self._of_token)
        if not unknown:
            return
        if len(self._of_token) + len(unknown) > _REMEMBERED:
            self._of_token.clear()
            unknown = set(tokens)
        found = np.empty((len(unknown), self._n_embd), np.float32)
        self._of_embedding.multiply(self._embeddings(list(unknown)), found)
        self._of_token.update(zip(unknown, found, strict=True))


# ---- a matrix with 8 bits a number ----

_Q8_0 = type_number("q8_0")
_Floats = npt.NDArray[np.float32]


class EightBitMatrix:
    """A matrix of Q8_0 and its products. Two threads must not use it at once.

    Not multiplied by numpy: threads of its library wait busily for 30 ms after each product, on the
    processors that the target's pass needs then.
    """

    def __init__(self, matrix: _Floats, n_threads: int, plugin: Plugin | None) -> None:
        """Quantize `matrix`, (rows, columns); `plugin`: the kernels, where they are used.

        Raises MemoryError.
        """
        rows = from_floats(np.ascontiguousarray(matrix), _Q8_0)
        self._rows = None if plugin else rows
        self._n_threads = n_threads
        if plugin:
            make, self._multiply, free = plugin.matrices()
            self._address = make(_Q8_0, *matrix.shape, rows.ctypes.data, rows.nbytes)
            if not self._address:
                raise MemoryError(f"no memory for a matrix of {matrix.shape}")
            finalize(self, free, self._address)

    def multiply(self, vectors: _Floats, out: _Floats) -> None:
        """Write the products with `vectors`, (n, columns), into `out`, (n, rows), both contiguous.

        Raises ValueError for others.
        """
        if self._rows is not None:
            _core.multiply(self._rows, vectors, out)
            return
        if not (
            vectors.flags.c_contiguous and out.flags.c_contiguous and out.dtype == vectors.dtype == np.float32
        ):
            raise ValueError("vectors and products must be contiguous float32")
        sizes = vectors.ctypes.data, vectors.size, out.ctypes.data, out.size
        if self._multiply(self._address, len(vectors), *sizes, self._n_threads) != 0:
            raise ValueError(f"vectors of shape {vectors.shape}, products of {out.shape}: not of this matrix")


# ---- published heads ----


N_LAYERS = 3
"""Layers of the target whose states an EAGLE-3 head reads."""

# Architectures of which llama.cpp hands out what goes into single layers; with others it ends the process:
# theirs come from edgespec's kernels, but for the embeddings, which go into the first layer.
_GIVE_LAYERS = frozenset(
    {
        *("llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "gemma4", "gpt-oss"),
        *("lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "bailingmoe3", "hunyuan_vl"),
        *("minimax-01", "minimax-m2", "mimo2", "nanbeige", "muse-glimmer"),
    }
)
_GIVE_LAST = frozenset({"gpt-oss"})
"""Those of which it also hands out what the last layer leaves, before the norm."""
_ENCODED = 16  # rows at once: the library sets aside a row of logits for each, though it computes none
_LARGEST_BLOCK = 33  # tokens: one and as many masks as a draft can have tokens (options.MAX_GAMMA)
_BATCH = 64  # tokens of a pass: the library computes the logits of all of them


def check_published_head(draft: GGUFHeader, target: GGUFHeader) -> GGUFHeader | None:
    """Return the header of `draft` if it is a published head that can be used; None if it is no such file.

    Raises UsageError, with the reason, if it cannot, EdgespecError if the file is truncated.
    """
    if draft.architecture not in HELPERS:
        return None
    kind = kind_of(draft)
    what = kind.name
    draft = check_complete_file(draft)
    if reason := _misfit(draft, target):
        raise UsageError(f"{draft.path}: {what} that does not fit {target.path.name}: {reason}")
    if kind.refused:
        raise UsageError(
            f"{draft.path}: {what}, which edgespec does not run: {kind.refused}; leave it out, or choose a "
            "draft model"
        )
    if reason := _damage(draft, target):
        raise UsageError(f"{draft.path}: {what}, damaged: {reason}")
    if NEXTN_HEAD is None or of_layers(_layers(draft), target.n_layer) is None:
        raise UsageError(f"{draft.path}: {what}; this llama.cpp does not export what it needs")
    # In the target's cache it needs no room of its own.
    return replace(draft, n_head_kv=(0,) * draft.n_layer) if draft.architecture == GEMMA else draft


def _layers(head: GGUFHeader) -> tuple[int, ...]:
    return head.gguf.integers(f"{head.architecture}.target_layers")


def _block_size(head: GGUFHeader) -> int:
    return max(head.gguf.integers("dflash.block_size"), default=16)


def _mask(head: GGUFHeader) -> int:
    return max(head.gguf.integers("tokenizer.ggml.mask_token_id"), default=-1)


def _is_causal(head: GGUFHeader) -> bool:
    stated = head.gguf.integers("dflash.attention.causal")
    return bool(stated[0]) if stated else head.gguf.text("dflash.decoder_arch") == "laguna"


def _drafts_from_anchor(head: GGUFHeader) -> bool:
    """Whether the last token's place in a DSpark block says what may follow it; else the first mask's."""
    return all(head.gguf.integers("dflash.sample_from_anchor"))


def _misfit(head: GGUFHeader, target: GGUFHeader) -> str:
    """Return why llama.cpp could not run `head` with `target`; "" if it could, as far as the headers say."""
    layers, is_eagle = _layers(head), head.architecture == EAGLE
    if head.architecture == GEMMA:
        return _gemma_misfit(head, target)
    if not layers or (is_eagle and len(layers) != N_LAYERS):
        return "damaged: it does not say which layers it reads"
    stated = head.gguf.integers(f"{head.architecture}.target_hidden_size")
    width = max(stated, default=0) if is_eagle else head.n_embd
    if width != target.n_embd:
        return f"it reads hidden states of {width} numbers, and this model has {target.n_embd}"
    n_trunk = target.n_layer - target.n_mtp
    if not 0 <= min(layers) <= max(layers) <= n_trunk:
        return f"it reads what goes into layer {max(layers)}, from 0 on, and this model has {n_trunk}"
    if head.n_vocab < target.n_vocab:
        return f"it knows {head.n_vocab} tokens, and this model has {target.n_vocab}"
    if not _gives_layers(head, target) and (min(layers) == 0 or not load_kernels().available):
        return _no_layers(target)
    return ""


def _gives_layers(head: GGUFHeader, target: GGUFHeader) -> bool:
    """Whether llama.cpp hands out what `head` reads of `target`."""
    reads_last = max(_layers(head)) == target.n_layer - target.n_mtp
    return target.architecture in (_GIVE_LAST if reads_last else _GIVE_LAYERS)


def _gemma_misfit(head: GGUFHeader, target: GGUFHeader) -> str:
    """Return why a Gemma 4 head cannot work in the cache of `target`; "" if it can.

    It takes the keys and values of the last layer but one, which has a sliding window, and of the last, which
    has none, as if they were its own.
    """
    if target.architecture != "gemma4":
        return f"it is for Gemma 4, not for architecture {target.architecture}"
    width = max(head.gguf.integers(f"{GEMMA}.embedding_length_out"), default=0)
    if width != target.n_embd:
        return f"it reads hidden states of {width} numbers, and this model has {target.n_embd}"
    if head.n_vocab < target.n_vocab:
        return f"it knows {head.n_vocab} tokens, and this model has {target.n_vocab}"
    windows, of_target = (
        one.gguf.integers(f"{one.architecture}.attention.sliding_window_pattern") for one in (head, target)
    )
    if len(of_target) != target.n_layer or of_target[-2:] != (1, 0):
        return "this model's last layers are not one with a sliding window and one without"
    if len(windows) != head.n_layer or not any(windows):
        return "damaged: it does not say which of its layers have a sliding window"
    n_heads = [target.n_head_kv[-2 if is_window else -1] for is_window in windows]
    keys = ("key_length", "value_length", "key_length_swa", "value_length_swa")
    sizes = [
        [max(one.gguf.integers(f"{one.architecture}.attention.{key}"), default=0) for key in keys]
        for one in (head, target)
    ]
    if sizes[0] != sizes[1] or n_heads != [*head.n_head_kv]:
        return "its keys and values are of another size than this model's"
    return ""


def _no_layers(target: GGUFHeader) -> str:
    why = f"llama.cpp gives no hidden states of all of these layers of architecture {target.architecture}"
    return f"{why}, and edgespec's kernels are not in use here, or it reads the embeddings"


def _damage(head: GGUFHeader, target: GGUFHeader) -> str:
    """The part of a file that would make llama.cpp end the process or read past an end; "" if nothing.

    It checks the shapes of other tensors itself when it loads the file.
    """
    if head.architecture == GEMMA:
        n = max(head.gguf.integers(f"{GEMMA}.nextn_predict_layers"), default=0)
        return "" if n == head.n_layer else f"it says that {n} of its {head.n_layer} layers draft"
    tensors = {tensor.name: tensor for tensor in head.gguf.tensors}
    embeddings, output = tensors.get("token_embd.weight"), tensors.get("output.weight")
    n_known = embeddings.rows if embeddings else target.n_vocab
    if head.architecture == DFLASH:
        if not 2 <= _block_size(head) <= _LARGEST_BLOCK:
            return f"its blocks are of {_block_size(head)} tokens, and should be of 2 to {_LARGEST_BLOCK}"
        if not 0 <= _mask(head) < min(n_known, head.n_vocab):
            return "it does not say which token is the mask"
        if kind_of(head) is DSPARK and "dflash.block_size" not in head.gguf.fields:
            return "it does not say how large its blocks are"
        if any("_conv_base" in name and tensor.type != "f32" for name, tensor in tensors.items()):
            return "its convolutions are not of 32-bit floats"
        output = output or embeddings  # its own embeddings, if it has them, are its output matrix too
    elif head.n_layer != 1:
        return f"it has {head.n_layer} blocks, not one"
    if head.head_dim_k != head.head_dim_v:
        return "its keys and values are of different widths"
    if not (embeddings and output) and head.n_embd != target.n_embd:
        return "it has no embeddings or output matrix, and those of the target are of another width"
    if n_known < target.n_vocab:
        return f"it has embeddings of {n_known} tokens, and the target has {target.n_vocab}"
    if not output and ("d2t" in tensors or head.n_vocab != target.n_vocab):
        return "it has no output matrix, and the target's is of other tokens"
    return _bad_ids(head, tensors["d2t"]) if "d2t" in tensors else ""


def _bad_ids(head: GGUFHeader, ids: TensorInfo) -> str:
    """The fault of its list of the tokens that it drafts; "" if nothing."""
    if ids.kind != type_number("i64") or len(ids.shape) != 1:
        return "its list of tokens (d2t) is not of 64-bit integers"
    values = np.fromfile(head.path, np.int64, ids.shape[0], offset=head.gguf.data_start + ids.offset)
    if (values < 0).any() or (values >= head.n_vocab).any() or len(np.unique(values)) < len(values):
        return "its list of tokens (d2t) names some twice, or some that it does not know"
    return ""


class LayersTarget(Model):
    """A target that gives the hidden states of the layers that a published head reads."""

    def __init__(self, header: GGUFHeader, head: GGUFHeader, *, kernels: bool) -> None:
        """Load the file of `header`, for the head of a file that `check_published_head` has checked."""
        layers = _layers(head)
        # What goes into a layer is what the one before has left.
        before = tuple(layer - 1 for layer in layers)
        of_library, n_trunk = _gives_layers(head, header), header.n_layer - header.n_mtp
        states = of_layers(layers, n_trunk) if of_library else of_kernels(before, n_trunk)
        if states is None:
            raise EdgespecError(f"{header.path}: this llama.cpp does not export what {head.path} needs")
        self.hidden_states = states
        super().__init__(header.path, kernels=kernels, header=header)
        if not (of_library or self.uses_kernels):
            self.close()
            raise UsageError(f"{head.path}: a head that cannot read {header.path.name}: {_no_layers(header)}")
        self.n_state = len(_layers(head)) * self.n_embd


class PublishedHead(Model):
    """A published draft head, which needs its target loaded beside it."""

    takes_states = True
    most_batch = _BATCH

    def __init__(self, header: GGUFHeader, target: Model, *, kernels: bool) -> None:
        """Load a file that `check_published_head` has checked; `target` must stay open as long as it."""
        # Only to find the target's weights. A context of texts would be closed when they need a larger one.
        self._beside = KVCache(target, KVCacheSize(n_ctx=1), n_threads=1)
        self.context_beside = self._beside.context
        super().__init__(header.path, kernels=kernels, header=header)


class BlockHead(PublishedHead):
    """A DFlash head or its kin: its passes are over hidden states, or over tokens that may be masks."""

    takes_tokens_alone = True

    def __init__(self, header: GGUFHeader, target: Model, *, kernels: bool) -> None:
        """Load the file, as PublishedHead."""
        self.is_causal = _is_causal(header)
        self.kind = kind_of(header)
        if NEXTN_HEAD and self.kind in (DSPARK, DFLASH_2):  # what their further parts give, a row a token
            self.hidden_states = replace(NEXTN_HEAD, stays=True)
        super().__init__(header, target, kernels=kernels)
        self.n_input = target.n_state
        self.n_block = _block_size(header)
        """Tokens of a pass that drafts: the last of the text, then masks."""
        self.mask = _mask(header)
        self.first = int(self.kind is not DSPARK or not _drafts_from_anchor(header))
        """Row of a pass that says what may follow the text: 1 where that stands at the first mask."""


class GemmaHead(Model):
    """A Gemma 4 head, which works in the cache of its target."""

    takes_states = True
    most_batch = _BATCH

    def __init__(self, header: GGUFHeader, target: Model, *, kernels: bool) -> None:
        """Load a file that `check_published_head` has checked; `target` must stay open as long as it."""
        if NEXTN_HEAD:
            self.hidden_states = NEXTN_HEAD
        self.cells_of = target
        super().__init__(header.path, kernels=kernels, header=header)


class EagleHead(PublishedHead):
    """An EAGLE-3 head, with the encoder of its target's states."""

    def __init__(self, header: GGUFHeader, target: Model, *, kernels: bool, n_threads: int) -> None:
        """Load the file, as PublishedHead; `n_threads` work on the encoder."""
        if NEXTN_HEAD:
            self.hidden_states = NEXTN_HEAD
        super().__init__(header, target, kernels=kernels)
        # Of its own, as what it leaves must not overwrite what a pass of the decoder has left.
        size = KVCacheSize(n_ctx=_ENCODED, n_batch=_ENCODED, n_logits_max=_ENCODED)
        self._encoder = KVCache(self, size, n_threads=n_threads)
        self._encoded = Outputs(self._encoder.context, self, _ENCODED, _ENCODED)
        self._encoded.ask(with_features=True)

    def encode(self, states: Features) -> Inputs:
        """The head's input for states of the target of shape (n, n_state of the target): (n, n_embd)."""
        self._encoder.require_open()
        rows = np.empty((len(states), self.n_embd), np.float32)
        for start in range(0, len(states), _ENCODED):
            part = np.ascontiguousarray(states[start : start + _ENCODED])
            rows_of = part.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            batch = llama.llama_batch(n_tokens=len(part), embd=rows_of)
            if code := llama.llama_encode(self._encoder.context, batch):
                raise EdgespecError(
                    f"{self.path}: llama.cpp failed with code {code}: {backend.failure_reason()}"
                )
            rows[start : start + len(part)] = self._encoded.features([len(part)])[0]
        return rows
