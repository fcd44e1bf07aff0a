"""Models with all their layers on devices of other machines, through llama.cpp's own functions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edgespec.llama import backend, rpc
from edgespec.llama.backend import llama
from edgespec.llama.kernels import packing
from edgespec.llama.placement import SILENCE_S

N_CTX = 256


@contextmanager
def loaded(
    path: Path, devices: Sequence[int] = (), *, kernels: bool = True, output: bool = False
) -> Iterator[llama.llama_model_p]:
    """A model, its layers on `devices`; without them on this machine's processors.

    `kernels`: what stays here is packed. `output`: the output matrix goes to the devices too.
    """
    params = llama.llama_model_default_params()
    params.load_mode = 1
    params.use_extra_bufts = False  # llama.cpp's own rearranged weights round otherwise, and only stay here
    listed = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
    params.devices = ctypes.cast(listed, ctypes.c_void_p)
    params.n_gpu_layers = 0
    if devices:
        # An earlier test of this process may have left less: a node whose disk is busy was lost by that.
        rpc.load().set_patience(None, SILENCE_S)
        n_layers = llama.llama_model_n_layer(probe := _load(path, params, kernels))
        llama.llama_model_free(probe)
        params.n_gpu_layers = n_layers + output
    model = _load(path, params, kernels)
    try:
        yield model
    finally:
        llama.llama_model_free(model)


def _load(path: Path, params: llama.llama_model_params, kernels: bool) -> llama.llama_model_p:
    with packing(kernels):
        backend.clear_log()
        model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model, backend.failure_reason()
    return model


def logits(
    model: llama.llama_model_p, tokens: Sequence[int], *, batch: int = 8, n_threads: int = 2
) -> np.ndarray:
    """Return the logits after each token of a new text, read in batches."""
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = llama.llama_init_from_model(model, params)
    assert context, backend.failure_reason()
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    rows = []
    try:
        for begin in range(0, len(tokens), batch):
            rows.append(_rows(context, tokens[begin : begin + batch], begin, n_vocab))
    finally:
        llama.llama_free(context)
    return np.concatenate(rows)


def _rows(context: llama.llama_context_p, tokens: Sequence[int], begin: int, n_vocab: int) -> np.ndarray:
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, begin + i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    code = llama.llama_decode(context, batch)
    llama.llama_batch_free(batch)
    assert code == 0, backend.failure_reason()
    size = len(tokens) * n_vocab
    return np.ctypeslib.as_array(llama.llama_get_logits(context), (size,)).reshape(-1, n_vocab).copy()
