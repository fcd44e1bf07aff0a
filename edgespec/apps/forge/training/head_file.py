"""File of a head: a GGUF of one block, which llama.cpp runs; read again to resume training.

token_embd                the kept rows of the target's output matrix, as output matrix too
output_norm, blk.0.*      the block
after the last tensor     the fusion matrix [We | Wf], where no GGUF parser looks
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.apps.forge.training.family import Params
from edgespec.apps.forge.training.weights import EMBEDDINGS, OUTPUT_NORM, BlockShape, ModelWeights
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.ggml_types import F32, from_floats, type_number
from edgespec.llama.gguf import (
    FLOAT32,
    UINT32,
    UINT64,
    TensorInfo,
    aligned,
    encode_head,
    encode_number,
    encode_numbers,
    encode_tensor_info,
    encode_text,
)
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import (
    FUSION_OFFSET,
    FUSION_TYPE,
    N_VOCAB,
    TARGET,
    TOKEN_IDS,
    read_fusion,
    read_head,
)
from edgespec.platform.files import replacing

_ARCHITECTURE = "llama"
_CONTEXT = 32768  # tokens; a head looks back on a few hundred
_MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_NORMS = {"attention_norm": "attn_norm", "ff_norm": "ffn_norm"}
_N_COMPARED = 1024  # rows of the output matrix

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadMetadata:
    """Metadata of a head's file."""

    shape: BlockShape
    target_sha256: str
    n_vocab: int
    token_ids: npt.NDArray[np.int64]
    """Tokens that the head can say, ascending: rows of its output matrix."""


def write_head(path: Path, head: HeadMetadata, params: Params, output: Floats, type_: str) -> None:
    """Write a head with matrices of `type_`: "q4_0", "q8_0", "f16" or "f32"; the fusion has 8 bits or more.

    `params` are those of head.Head, `output` its output matrix. The file appears
    complete or not at all. Raises EdgespecError when it cannot be written.
    """
    kind = type_number(type_)
    tensors: list[tuple[TensorInfo, bytes]] = []
    offset = 0

    def add(name: str, rows: Floats, kind: int) -> None:
        nonlocal offset
        shape = tuple(reversed(rows.shape))
        info = TensorInfo(name, shape, kind, offset)
        tensors.append((info, from_floats(np.atleast_2d(rows), kind).tobytes()))
        offset = aligned(offset + info.bytes)

    add(EMBEDDINGS, output, kind)
    for name, tensor in _MATRICES.items():
        add(f"blk.0.{tensor}.weight", np.ascontiguousarray(np.asarray(params[name]).T), kind)
    for name, tensor in _NORMS.items():
        add(f"blk.0.{tensor}.weight", np.asarray(params[name]), F32)
    add(OUTPUT_NORM, np.asarray(params["output_norm"]), F32)
    fusion = np.concatenate([np.asarray(params["embedding"]).T, np.asarray(params["feature"]).T], axis=1)
    fusion_kind = kind if type_ in ("f16", "f32") else type_number("q8_0")

    infos = [info for info, _ in tensors]
    # Any offset of the fusion matrix takes eight bytes, so 0 stands for it here.
    start = aligned(len(_metadata(head, infos, fusion_kind, 0)))
    try:
        with replacing(path) as file:
            file.write(_metadata(head, infos, fusion_kind, start + offset))
            for info, data in tensors:
                file.write(bytes(start + info.offset - file.tell()) + data)
            file.write(bytes(start + offset - file.tell()) + from_floats(fusion, fusion_kind).tobytes())
    except OSError as error:
        raise EdgespecError(f"cannot write {path}: {describe_os_error(error)}") from error


def read_params(path: Path, target: ModelWeights) -> Params:
    """Return the parameters of the head in `path`, made for `target`, rounded to its type.

    Raises UsageError and EdgespecError if it is no such head.
    """
    weights = ModelWeights(check_model_file(path))
    head = read_head(weights.header)
    if head is None:
        raise UsageError(f"{path}: no draft head")
    params: Params = {
        **{name: weights.rows(f"blk.0.{tensor}.weight").T for name, tensor in _MATRICES.items()},
        **{name: weights.vector(f"blk.0.{tensor}.weight") for name, tensor in _NORMS.items()},
        "output_norm": weights.vector(OUTPUT_NORM),
    }
    fusion = read_fusion(head)
    params["embedding"], params["feature"] = fusion[:, : head.n_embd].T, fusion[:, head.n_embd :].T
    # The output matrix is the target's, times the confidence.
    wanted = target.rows(target.output, head.token_ids[:_N_COMPARED])
    own = weights.rows(EMBEDDINGS, np.arange(len(wanted)))
    params["confidence"] = np.float32((own * wanted).sum() / (wanted**2).sum())
    return params


def _metadata(head: HeadMetadata, infos: list[TensorInfo], fusion_kind: int, fusion_offset: int) -> bytes:
    shape = head.shape
    sizes = {
        "context_length": _CONTEXT,
        "embedding_length": shape.n_embd,
        "block_count": 1,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": len(head.token_ids),
    }
    factors = {"attention.layer_norm_rms_epsilon": shape.epsilon, "rope.freq_base": shape.rope_base}
    fields = [
        encode_text("general.architecture", _ARCHITECTURE),
        encode_text("general.type", "model"),
        encode_text("general.name", "draft head"),
        *(encode_number(f"{_ARCHITECTURE}.{key}", UINT32, value) for key, value in sizes.items()),
        *(encode_number(f"{_ARCHITECTURE}.{key}", FLOAT32, value) for key, value in factors.items()),
        encode_text("tokenizer.ggml.model", "none"),
        encode_number(N_VOCAB, UINT32, head.n_vocab),
        encode_numbers(TOKEN_IDS, UINT32, head.token_ids),
        encode_text(TARGET, head.target_sha256),
        encode_number(FUSION_TYPE, UINT32, fusion_kind),
        encode_number(FUSION_OFFSET, UINT64, fusion_offset),
    ]
    head_bytes = encode_head(len(infos), len(fields))
    return head_bytes + b"".join(fields) + b"".join(map(encode_tensor_info, infos))
