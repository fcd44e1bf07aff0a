"""Draft heads that are published as files of their own, each made for one target.

Files are as llama.cpp's converter writes them: `general.architecture` names a family, and keys and tensors
show which of its kinds a file is. Missing embeddings and output matrices are the target's. An unsupported
head is refused with the reason.

    PublishedDraft   the draft, which checks its file
    LayersDraft      one that reads the hidden states of several layers of its target, concatenated
    LayersTarget     a target that returns the states of these layers
    LayersHead       its model, which needs its target loaded
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from edgespec.decoding.choices import DrafterChoice
from edgespec.drafting.draft import Draft
from edgespec.drafting.heads.head import HeadDraft
from edgespec.drafting.vocabulary_match import vocabulary_difference
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.llama.backend import llama
from edgespec.llama.gguf import TensorInfo, type_number
from edgespec.llama.gguf_header import GGUFHeader, check_complete_file
from edgespec.llama.hidden_states import NEXTN_HEAD, of_kernels, of_layers
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.rpc import RemoteLayers
from edgespec.llama.weights import Model

MOST_BATCH = 64
"""Most tokens of a pass: the library computes the logits of all of them."""

# ---- kinds, told apart by what their files hold ----


class HeadKind(NamedTuple):
    """A kind of head in a family."""

    name: str
    """With its article, as a user reads it."""
    has_mark: Callable[[GGUFHeader], bool] = lambda _head: True
    """Whether a file of the family is of this kind, if it is of none before."""
    refused: str = ""
    """Why edgespec does not run it; "" if it does."""


def says(*keys: str) -> Callable[[GGUFHeader], bool]:
    """Return a test for files with one of these metadata keys, with a value other than 0."""
    return lambda head: any(any(head.gguf.integers(f"{head.architecture}.{key}")) for key in keys)


def holds(*tensors: str) -> Callable[[GGUFHeader], bool]:
    """Return a test for files with a tensor whose name begins with one of these."""
    return lambda head: any(tensor.name.startswith(tensors) for tensor in head.gguf.tensors)


def layers_of(head: GGUFHeader) -> tuple[int, ...]:
    """Return the layers of the target whose input a head reads."""
    return head.gguf.integers(f"{head.architecture}.target_layers")


class PublishedDraft(HeadDraft):
    """A head that was published in a file of its own."""

    header: GGUFHeader
    what: str
    """The family, with its article."""
    kinds: tuple[HeadKind, ...] = ()
    """The kinds of the family that have a name of their own; a file is of the first that it fits."""

    @property
    def kind(self) -> HeadKind:
        """The kind of its file."""
        return next((kind for kind in self.kinds if kind.has_mark(self.header)), HeadKind(self.what))

    def check(self, target: GGUFHeader) -> None:
        """Raise UsageError if it cannot draft for the file of `target`, EdgespecError if it is truncated."""
        file, kind = self.header.path, self.kind
        self.header = check_complete_file(self.header)
        if reason := self.misfit(target):
            raise UsageError(f"{file}: {kind.name} that does not fit {target.path.name}: {reason}")
        if kind.refused:
            raise UsageError(
                f"{file}: {kind.name}, which edgespec does not run: {kind.refused}; leave it out, or choose "
                "a draft model"
            )
        if reason := self.damage(target):
            raise UsageError(f"{file}: {kind.name}, damaged: {reason}")
        if NEXTN_HEAD is None or of_layers(layers_of(self.header), target.n_layer) is None:
            raise UsageError(f"{file}: {kind.name}; this llama.cpp does not export what it needs")

    def misfit(self, target: GGUFHeader) -> str:
        """Return why llama.cpp could not run it with `target`; "" if it could, as far as the headers say."""
        raise NotImplementedError

    def damage(self, target: GGUFHeader) -> str:
        """Return the part of its file that would make llama.cpp abort or read out of bounds; "" if none.

        The library checks the shapes of other tensors itself when it loads the file.
        """
        raise NotImplementedError

    def without_layers(self, drafter: DrafterChoice) -> Draft:
        """Raise UsageError: it needs the states of layers, which lie on nodes."""
        problem = "reads what is in the target's layers, which lie on nodes: choose another draft"
        raise UsageError(problem, field="draft", value=self.name)

    def match(self, model: Model, on_message: MessageFn) -> Draft:
        """Return itself. Raises UsageError for a head of another vocabulary."""
        if difference := vocabulary_difference(self.target, model):
            raise UsageError(f"{model.path}: a head of another model than {self.target_name}: {difference}")
        return self


# ---- heads that read several layers ----

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


class LayersDraft(PublishedDraft):
    """A head that reads what goes into several layers of its target."""

    @property
    def read_width(self) -> int:
        """Elements of the hidden states that it reads."""
        return self.header.n_embd

    def misfit(self, target: GGUFHeader) -> str:
        """Return why llama.cpp could not run it with `target`; "" if it could."""
        head, layers = self.header, layers_of(self.header)
        if not layers:
            return "damaged: it does not say which layers it reads"
        if self.read_width != target.n_embd:
            return f"it reads hidden states of {self.read_width} numbers, and this model has {target.n_embd}"
        n_trunk = target.n_layer - target.n_nextn
        if not 0 <= min(layers) <= max(layers) <= n_trunk:
            return f"it reads what goes into layer {max(layers)}, from 0 on, and this model has {n_trunk}"
        if head.n_vocab < target.n_vocab:
            return f"it knows {head.n_vocab} tokens, and this model has {target.n_vocab}"
        if not gives_layers(head, target) and (min(layers) == 0 or not load_kernels().available):
            return _no_states(target)
        return ""

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        """Load the target such that it returns the states of these layers."""
        return LayersTarget(header, self.header, kernels=kernels)

    def damage(self, target: GGUFHeader) -> str:
        """Return the part of its file that would make llama.cpp abort; "" if none."""
        head, tensors = self.header, {tensor.name: tensor for tensor in self.header.gguf.tensors}
        embeddings, output = tensors.get("token_embd.weight"), tensors.get("output.weight")
        n_known = embeddings.rows if embeddings else target.n_vocab
        if reason := self.own_damage(tensors, n_known):
            return reason
        if self.ties_output:
            output = output or embeddings
        if head.head_dim_k != head.head_dim_v:
            return "its keys and values are of different widths"
        if not (embeddings and output) and head.n_embd != target.n_embd:
            return "it has no embeddings or output matrix, and those of the target are of another width"
        if n_known < target.n_vocab:
            return f"it has embeddings of {n_known} tokens, and the target has {target.n_vocab}"
        if not output and ("d2t" in tensors or head.n_vocab != target.n_vocab):
            return "it has no output matrix, and the target's is of other tokens"
        return _bad_ids(head, tensors["d2t"]) if "d2t" in tensors else ""

    ties_output = False
    """Whether its own embeddings, if it has them, are its output matrix too."""

    def own_damage(self, tensors: Mapping[str, TensorInfo], n_known: int) -> str:
        """Return the fault in parts that only its family has; `n_known`: number of tokens with embeddings."""
        raise NotImplementedError


def gives_layers(head: GGUFHeader, target: GGUFHeader) -> bool:
    """Whether llama.cpp exports the states of `target` that `head` reads."""
    reads_last = max(layers_of(head)) == target.n_layer - target.n_nextn
    return target.architecture in (_GIVE_LAST if reads_last else _GIVE_LAYERS)


def _no_states(target: GGUFHeader) -> str:
    why = f"llama.cpp gives no hidden states of all of these layers of architecture {target.architecture}"
    return f"{why}, and edgespec's kernels are not in use here, or it reads the embeddings"


def _bad_ids(head: GGUFHeader, ids: TensorInfo) -> str:
    """Return the fault in its list of the tokens that it drafts; "" if none."""
    if ids.kind != type_number("i64") or len(ids.shape) != 1:
        return "its list of tokens (d2t) is not of 64-bit integers"
    values = np.fromfile(head.path, np.int64, ids.shape[0], offset=head.gguf.data_start + ids.offset)
    if (values < 0).any() or (values >= head.n_vocab).any() or len(np.unique(values)) < len(values):
        return "its list of tokens (d2t) names some twice, or some that it does not know"
    return ""


class LayersTarget(Model):
    """A target that returns the hidden states of the layers that a published head reads."""

    def __init__(self, header: GGUFHeader, head: GGUFHeader, *, kernels: bool) -> None:
        """Load the file of `header`, for the head of a file that `PublishedDraft.check` has checked."""
        layers = layers_of(head)
        # What goes into a layer is what the one before has left.
        before = tuple(layer - 1 for layer in layers)
        of_library, n_trunk = gives_layers(head, header), header.n_layer - header.n_nextn
        states = of_layers(layers, n_trunk) if of_library else of_kernels(before, n_trunk)
        if states is None:
            raise EdgespecError(f"{header.path}: this llama.cpp does not export what {head.path} needs")
        self.hidden_states = states
        super().__init__(header.path, kernels=kernels, header=header)
        if not (of_library or self.uses_kernels):
            self.close()
            raise UsageError(f"{head.path}: a head that cannot read {header.path.name}: {_no_states(header)}")
        self.n_state = len(layers) * self.n_embd


class LayersHead(Model):
    """The model of a head that reads several layers; it needs its target loaded."""

    takes_states = True
    most_batch = MOST_BATCH

    def __init__(self, header: GGUFHeader, target: Model, *, kernels: bool) -> None:
        """Load a file that `PublishedDraft.check` has checked; `target` must stay open as long as it."""
        # Only to find the target's weights. A context of texts would be closed when they need a larger one.
        self._beside = KVCache(target, KVCacheSize(n_ctx=1), n_threads=1)
        super().__init__(header.path, kernels=kernels, header=header)

    def make_context(self, params: llama.llama_context_params) -> llama.llama_context_p | None:
        """Return a context that uses the target's weights as well as its own."""
        params.ctx_other = self._beside.context
        return super().make_context(params)
