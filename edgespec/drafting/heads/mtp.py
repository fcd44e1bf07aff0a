"""The drafting head in a target's own file: multi-token prediction (MTP), "nextn" in GGUF files.

It is a block after those of the target, with an input matrix of its own: it reads token t together with the
target's hidden state before t, and predicts what follows t. (DeepSeek-V3, arXiv 2412.19437, section 2.2.)
Published models were trained with it, so it drafts well; most programs leave it out when they load the file.
llama.cpp runs it in a context of its own kind, over the weights of the target.

    MtpDraft    the draft, from the target's file to its sessions
    MtpTarget   a target that is loaded with its head
    MtpHead     that head, which sessions use like a model
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.decoding.choices import DrafterChoice
from edgespec.drafting.draft import Draft, NoDraft
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.heads.head import HeadDraft, HeadModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.backend import llama
from edgespec.llama.gguf_header import GGUFHeader, read_tensors
from edgespec.llama.hidden_states import NEXTN, NEXTN_HEAD
from edgespec.llama.rpc import RemoteLayers
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.weights import Model

ARCHITECTURES = frozenset({"qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2"})
"""Architectures whose heads were tried here, on random models (tests/support/tiny_models.py)."""

_OUTPUTS = ("output.weight", "token_embd.weight")


def why_no_mtp(header: GGUFHeader) -> str:
    """Return in a few words why the file has no usable head; "" if it has one.

    The library aborts if its own assertions about a head fail, so they are checked here.
    """
    if header.n_nextn == 0:
        return "its file has no MTP head"
    if header.architecture not in ARCHITECTURES:
        return f"the MTP heads of architecture {header.architecture} are not known here"
    if header.n_nextn > 1:
        return f"its MTP head has {header.n_nextn} blocks, and llama.cpp runs one of this architecture"
    block = f"blk.{header.n_layer - 1}."
    if not any(tensor.name == f"{block}nextn.eh_proj.weight" for tensor in read_tensors(header)):
        return "its MTP head was left out of the file"
    if header.architecture == "deepseek2":
        has = header.gguf.fields
        if "deepseek2.attention.key_length_mla" not in has or "deepseek2.attention.temperature_scale" in has:
            return "llama.cpp runs no MTP head with attention of this kind"
    if NEXTN is None:
        return "this llama.cpp does not export what an MTP head needs"
    return ""


class MtpTarget(Model):
    """A target that is loaded with its head, and returns the hidden states that the head reads."""

    _with_nextn = True

    def __init__(self, header: GGUFHeader, *, kernels: bool) -> None:
        """Load the file of `header`; arguments as for Model.

        Raises EdgespecError if its head cannot be used (`why_no_mtp`).
        """
        reason = why_no_mtp(header)
        if reason or NEXTN is None:
            raise EdgespecError(f"{header.path}: {reason}")
        self.hidden_states = NEXTN
        super().__init__(header.path, kernels=kernels, header=header)


class MtpHead(Model):
    """The head of a target behind the interface of a model: weights, tokenizer and sessions are the target's.

    It uses only attention, whatever kind of model the target is.
    """

    takes_states = True

    def __init__(self, target: MtpTarget) -> None:
        """Use the head of `target`, which closes it."""
        vars(self).update(vars(target))
        self._target = target  # whose weights these are
        if NEXTN_HEAD:  # as it is where its target could be loaded
            self.hidden_states = NEXTN_HEAD
        self.header = header_of_head(target.header)
        self.size_bytes = self.header.file_bytes
        self.can_rewind, self.keeps_state = True, False
        self.n_input = target.n_embd

    @property
    def name(self) -> str:
        """The name of the model whose head it is."""
        return f"the MTP head of {self._target.name}"

    def make_context(self, params: llama.llama_context_params) -> llama.llama_context_p | None:
        """Return a context of the library's own kind for such a head."""
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        return super().make_context(params)

    def close(self) -> None:
        """Do nothing: the target closes its head's sessions with its own."""


def header_of_head(header: GGUFHeader) -> GGUFHeader:
    """Return a file's header as if it held only its head; the size is the bytes that a pass reads."""
    block = f"blk.{header.n_layer - 1}."
    tensors = {tensor.name: tensor for tensor in read_tensors(header)}
    own = [tensor for name, tensor in tensors.items() if name.startswith(block)]
    names = (f"{block}nextn.shared_head_head.weight", *_OUTPUTS)
    output = next((tensors[name] for name in names if name in tensors), None)
    read = {tensor.name: tensor.bytes for tensor in [*own, *([output] if output else [])]}
    return replace(
        header,
        is_part=True,
        cache_type="f16",  # whatever the target's is
        n_layer=1,
        n_head_kv=header.n_head_kv[-1:],
        state_bytes=0,
        file_bytes=sum(read.values()),
    )


_ON_NODES = "its layers lie on nodes, where the head cannot read them"


class MtpDraft(HeadDraft):
    """The head in the target's own file."""

    why_not = staticmethod(why_no_mtp)

    def without_layers(self, drafter: DrafterChoice) -> Draft:
        """Return NoDraft. Raises UsageError if the user chose the head."""
        if drafter == self.name:
            raise UsageError(f"{self.target_name}: {_ON_NODES}", field="drafter", value=drafter)
        return NoDraft(self.target_name, _ON_NODES)

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        """Load the target with its head."""
        return MtpTarget(header, kernels=kernels)

    def load_model(self, *, kernels: bool) -> Model:
        """Return the head of the loaded target."""
        assert isinstance(self.target, MtpTarget)  # noqa: S101 - for the type checker
        return MtpHead(self.target)

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation, which reads the target's states with its tokens."""
        return HeadModel(sequences.begin([0]), self.features(), n_vocab=self.target.n_vocab)
