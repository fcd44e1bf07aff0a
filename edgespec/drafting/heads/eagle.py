"""EAGLE-3 heads (arXiv 2503.01840): an encoder turns a token's states, from three layers, into one row.

One block reads token t with the row before t, and predicts what follows t; along a draft the row is the
block's own. EAGLE-3.1 (arXiv 2605.09992) adds norms.

    EagleDraft   the draft, from its file to its sessions
    EagleHead    its model, with the encoder
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from edgespec.decoding.session import Features, Inputs
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.heads.head import HeadModel
from edgespec.drafting.heads.published import HeadKind, LayersDraft, LayersHead, holds, layers_of, says
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.gguf import TensorInfo
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.hidden_states import NEXTN_HEAD, Outputs
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.weights import Model

N_LAYERS = 3
"""Layers of the target whose states it reads."""

_ENCODED = 16  # rows at once: the library sets aside a row of logits for each, though it computes none
_LAYER_NORMS = "llama.cpp has no form for norms of single layers, or for states that are read after the norm"


class EagleDraft(LayersDraft):
    """An EAGLE-3 head."""

    what = "an EAGLE-3 head"
    kinds = (
        HeadKind(
            "an EAGLE-3.1 head with norms of another form",
            lambda head: says("norm_output", "fc_norm")(head) or holds("fc_norm.")(head),
            _LAYER_NORMS,
        ),
        HeadKind("an EAGLE-3.1 head", says("norm_before_fc")),
    )
    model: EagleHead

    @property
    def read_width(self) -> int:
        """Elements of the hidden states that it reads."""
        head = self.header
        return max(head.gguf.integers(f"{head.architecture}.target_hidden_size"), default=0)

    def misfit(self, target: GGUFHeader) -> str:
        """Return why llama.cpp could not run it with `target`; "" if it could."""
        if len(layers_of(self.header)) != N_LAYERS:
            return "damaged: it does not say which layers it reads"
        return super().misfit(target)

    def own_damage(self, tensors: Mapping[str, TensorInfo], n_known: int) -> str:
        """Say whether it has another number of blocks."""
        n = self.header.n_layer
        return "" if n == 1 else f"it has {n} blocks, not one"

    def load_model(self, *, kernels: bool) -> Model:
        """Load the head."""
        return EagleHead(self.header, self.target, kernels=kernels, n_threads=self.n_threads)

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation, with the encoder of the target's states."""
        return HeadModel(
            sequences.begin([0]), self.features(), n_vocab=self.target.n_vocab, encode=self.model.encode
        )

    def timed_rows(self, tokens: Sequence[int]) -> Inputs | None:
        """Return encoded states of zeros; a pass over one token is one along a draft, without the encoder."""
        if len(tokens) == 1:
            return super().timed_rows(tokens)
        return self.model.encode(np.zeros((len(tokens), self.target.n_state), np.float32))


class EagleHead(LayersHead):
    """An EAGLE-3 head, with the encoder of its target's states."""

    def __init__(self, header: GGUFHeader, target: Model, *, kernels: bool, n_threads: int) -> None:
        """Load the file, as LayersHead; `n_threads` work on the encoder."""
        if NEXTN_HEAD:
            self.hidden_states = NEXTN_HEAD
        super().__init__(header, target, kernels=kernels)
        # Of its own, as what it leaves must not overwrite what a pass of the decoder has left.
        size = KVCacheSize(n_ctx=_ENCODED, n_batch=_ENCODED, n_logits_max=_ENCODED)
        self._encoder = KVCache(self, size, n_threads=n_threads)
        self._encoded = Outputs(self._encoder.context, self, _ENCODED, _ENCODED)
        self._encoded.ask(with_features=True)

    def encode(self, states: Features) -> Inputs:
        """Return the head's input, shape (n, n_embd), for the target's states, shape (n, n_state)."""
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
