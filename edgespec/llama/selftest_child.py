"""The part of the kernels' self-test that runs in the child process (see selftest.py).

Tiny random models with experts, which together have every type of weights, run over the same tokens, with
stock kernels and packed:

    packed logits are finite and near stock's           the arithmetic is right
    batches of 1, 8 and N, on 1 and on 2 threads        bit for bit the same logits

Then the matrix products of a layer, for one token and for eight, are timed in turns with weights prefetched
into level 2, the default, and into level 1. The default stays unless the other is clearly faster, and if
other programs were busy meanwhile. Those of more tokens are timed with tile registers and without.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import Rows
from edgespec.errors import EdgespecError
from edgespec.llama import kernels
from edgespec.llama.gguf import (
    F32,
    FLOAT32,
    UINT32,
    encode_number,
    encode_start,
    encode_text,
    from_floats,
    padded,
    row_bytes,
    to_floats,
    type_number,
)
from edgespec.llama.gguf_header import read_header
from edgespec.llama.kernel_timing import MatrixShape, Prefetch, WeightStream, beyond_caches
from edgespec.llama.selftest import FAILED, PrefetchChoice
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.machine import MOST_OTHER_LOAD, OtherLoad, available_bytes, default_threads

N_TOKENS = 32
N_VOCAB = N_EMBD = 512
N_HEAD, N_HEAD_KV, HEAD_DIM = 8, 2, 64
N_FF = 320  # a multiple of 64 but not of 256, a width at which models fall back to the older types
N_EXPERTS = 3  # all are used: which ones are chosen would depend on how numbers are rounded
SEED = 1

# Rounding differently changes a row of logits by up to 4 % (stock against stock, batches of 1 against 8:
# 1.4 %). Any one wrong matrix changes it by 77 % or more (tests/llama/test_selftest.py).
TOLERANCE = 0.1

# Their blocks are random: ggml's quantizer would search their tables for longer than the test takes.
_CODED = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")


class TestMatrix(NamedTuple):
    """A weight matrix of the test's model."""

    rows: int
    columns: int
    type: str
    spread: float
    """The standard deviation of its products with unit vectors."""
    n_matrices: int = 1
    """In one tensor: one for each expert."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's, in ggml's order."""
        return (self.columns, self.rows, self.n_matrices)[: 2 + (self.n_matrices > 1)]


# Large queries and keys make attention sharp, so that errors in them show.
_LAYER = {
    "attn_q": (N_HEAD * HEAD_DIM, N_EMBD, 2.0),
    "attn_k": (N_HEAD_KV * HEAD_DIM, N_EMBD, 2.0),
    "attn_v": (N_HEAD_KV * HEAD_DIM, N_EMBD, 1.0),
    "attn_output": (N_EMBD, N_HEAD * HEAD_DIM, 1.0),
    "ffn_gate_exps": (N_FF, N_EMBD, 1.5),
    "ffn_up_exps": (N_FF, N_EMBD, 1.5),
    "ffn_down_exps": (N_EMBD, N_FF, 1.5),
    "ffn_gate_inp": (N_EXPERTS, N_EMBD, 2.0),
}
N_LAYERS = 2  # of a model: what rounding changes grows with more
_LAYER_TYPES = (
    ("q4_0", "q8_0", "q6_K", "q4_K", "q5_K", "q4_1", "q5_0", "f32"),
    ("f16", "q5_1", "q3_K", "iq4_nl", "mxfp4", "bf16", "q8_0", "f32"),
    ("q2_K", "tq1_0", "tq2_0", "iq4_xs", "iq1_s", "q1_0", "nvfp4", "f32"),
    ("iq3_s", "iq1_m", "iq2_xs", "iq2_s", "iq2_xxs", "iq3_xxs", "q2_0", "f32"),
)


def _matrices(layer_types: tuple[tuple[str, ...], ...]) -> dict[str, TestMatrix]:
    """Return the matrices of a model whose layers have these types."""
    found = {
        "token_embd": TestMatrix(N_VOCAB, N_EMBD, "q8_0", 0.3 * N_EMBD**0.5),  # looked up, not multiplied
        "output": TestMatrix(N_VOCAB, N_EMBD, "q6_K", 1.0),
    }
    for layer, types in enumerate(layer_types):
        for (name, (rows, columns, spread)), type_ in zip(_LAYER.items(), types, strict=True):
            n_matrices = N_EXPERTS if name.endswith("_exps") else 1
            found[f"blk.{layer}.{name}"] = TestMatrix(rows, columns, type_, spread, n_matrices)
    return found


MODELS = tuple(_matrices(_LAYER_TYPES[i : i + N_LAYERS]) for i in range(0, len(_LAYER_TYPES), N_LAYERS))
"""The matrices of each model, by name."""

_NORMS = (
    "output_norm",
    *(f"blk.{layer}.{name}" for layer in range(N_LAYERS) for name in ("attn_norm", "ffn_norm")),
)


def write_model(path: Path, model: int = 0, *, other: str = "") -> None:
    """Write a model of MODELS to `path`.

    `other` names a matrix that gets other random weights.
    """
    sizes = {
        "context_length": 2 * N_TOKENS,
        "embedding_length": N_EMBD,
        "block_count": N_LAYERS,
        "feed_forward_length": N_FF,
        "expert_count": N_EXPERTS,
        "expert_used_count": N_EXPERTS,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "rope.dimension_count": HEAD_DIM,
        "vocab_size": N_VOCAB,
    }
    fields = [
        encode_text("general.architecture", "llama"),
        encode_text("tokenizer.ggml.model", "no_vocab"),
        *(encode_number(f"llama.{key}", UINT32, number) for key, number in sizes.items()),
        encode_number("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
    ]
    matrices = MODELS[model]
    tensors = [
        *((name, one.shape, type_number(one.type)) for name, one in matrices.items()),
        *((name, (N_EMBD,), F32) for name in _NORMS),
    ]
    _, start = encode_start(fields, [(f"{name}.weight", shape, kind) for name, shape, kind in tensors])
    data = [_blocks(model, name, name == other).tobytes() for name in matrices]
    data += [np.ones(N_EMBD, np.float32).tobytes()] * len(_NORMS)
    try:
        with path.open("wb") as file:
            file.write(start + b"".join(map(padded, data)))
    except OSError as error:
        raise EdgespecError(f"the test model could not be written to {path}: {error.strerror}") from error


@functools.cache
def _blocks(model: int, name: str, other: bool) -> npt.NDArray[np.uint8]:
    """Return a matrix of a model, by ggml's own quantizer; `other`: with other random weights."""
    matrix = MODELS[model][name]
    kind = type_number(matrix.type)
    rng = np.random.default_rng((SEED, model, list(MODELS[model]).index(name), other))
    values = rng.standard_normal((matrix.n_matrices * matrix.rows, matrix.columns), np.float32)
    values *= np.float32(matrix.spread / matrix.columns**0.5)
    return _random_blocks(values, kind) if matrix.type in _CODED else from_floats(values, kind)


def _random_blocks(values: npt.NDArray[np.float32], kind: int) -> npt.NDArray[np.uint8]:
    """Return random blocks of a coded type, as many as for `values`, and as large on average."""
    blocks = np.ascontiguousarray(values).view(np.uint8).reshape(-1)[: row_bytes(kind, values.size)]
    blocks = np.random.default_rng(blocks[:64].tolist()).permuted(blocks).reshape(-1, row_bytes(kind, 256))

    def set_scale(scale: float) -> None:
        low, high = np.float16(scale).tobytes()
        if kind == type_number("iq1_m"):  # in the high nibbles of the words that hold the small scales
            nibbles = np.array([low << 4 & 0xF0, low & 0xF0, high << 4 & 0xF0, high & 0xF0], np.uint8)
            blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | nibbles
        else:
            blocks[:, :2] = low, high

    set_scale(1)
    set_scale(float(values.std() / to_floats(blocks[:256], kind, 256).std()))
    return blocks


@contextmanager
def _model_file(model: int) -> Iterator[Path]:
    """A file in memory: nothing is left behind, however the test ends."""
    handle = os.memfd_create("edgespec-selftest")
    try:
        path = Path(f"/proc/self/fd/{handle}")
        write_model(path, model)
        yield path
    finally:
        os.close(handle)


def logits(model: Model, *, n_batch: int, n_threads: int) -> Rows:
    """Return logits, shape (N_TOKENS, N_VOCAB), of the test's tokens, read in passes of `n_batch`."""
    tokens = np.random.default_rng(SEED).integers(0, N_VOCAB, N_TOKENS).tolist()
    with Session(model, n_ctx=2 * N_TOKENS, n_threads=n_threads) as session:
        session.eval(tokens, n_logits=0)  # as a draft reads its prompt: parts of the graph are then empty
        session.clear()
        batches = [tokens[i : i + n_batch] for i in range(0, N_TOKENS, n_batch)]
        return np.concatenate([session.eval(batch, n_logits=len(batch)).copy() for batch in batches])


def difference(rows: Rows, reference: Rows) -> float:
    """Return the largest relative difference of a row: |row - reference| / |reference|."""
    norm = np.linalg.norm
    return float(np.max(norm(rows - reference, axis=1) / norm(reference, axis=1)))


def open_model(path: Path, *, use_kernels: bool) -> Model:
    """Load the test's model, which has no tokenizer."""
    return Model(path, kernels=use_kernels, header=read_header(path))


def _compare(path: Path) -> str:
    """Return the fault of the loaded kernels, found with the model at `path`; "" if none."""
    with open_model(path, use_kernels=False) as stock:
        reference = logits(stock, n_batch=8, n_threads=1)
    with open_model(path, use_kernels=True) as packed:
        if not packed.uses_kernels:
            return "nothing was packed"
        first = logits(packed, n_batch=1, n_threads=1)
        if not np.isfinite(first).all():
            return "the logits are not finite"
        if (off := difference(first, reference)) > TOLERANCE:
            return f"the logits differ from stock by {off:.0%}"
        for n_batch in (1, 8, N_TOKENS):
            for n_threads in (1, 2):
                if not np.array_equal(logits(packed, n_batch=n_batch, n_threads=n_threads), first):
                    return f"the logits change with batches of {n_batch} on {n_threads} threads"
    return ""


def _compare_all() -> str:
    for model in range(len(MODELS)):
        with _model_file(model) as path:
            if wrong := _compare(path):
                return wrong
    return ""


# ---- prefetching ----

PREFETCHES = (Prefetch(), Prefetch(1, 8192))
"""The default first. Past the other caches Intel fetches at half the speed, AMD a little faster."""

LEAST_GAIN = 1.03
"""How many times as fast as the default the other must be in three quarters of the rounds."""

_Q4_K, _Q6_K = 12, 14
_LAYER_1_5B = (  # of Qwen2.5-1.5B in Q4_K_M: large matrices alone would hide the cost at a matrix's end
    *(MatrixShape(_Q4_K, rows, 1536) for rows in (1536, 256)),
    MatrixShape(_Q6_K, 256, 1536),
    *(MatrixShape(_Q4_K, rows, 1536) for rows in (1536, 8960, 8960)),
    MatrixShape(_Q6_K, 1536, 8960),
)
_BUDGET_S, _FEWEST_ROUNDS = 1.0, 5


def faster_prefetch(rounds: Sequence[Sequence[float]]) -> PrefetchChoice:
    """Choose how to prefetch. `rounds`: for each number of tokens, the speed-ups over the default."""
    low, gain, _ = statistics.quantiles(map(statistics.geometric_mean, rounds), n=4)
    worst = min(statistics.median(of_size) for of_size in zip(*rounds, strict=True))
    if low < LEAST_GAIN or worst < 1 / LEAST_GAIN:
        return PrefetchChoice(reason="")
    return PrefetchChoice(PREFETCHES[1], round(gain, 3), "")


def fewest_in_tiles(seconds: Callable[[int, int], float]) -> int:
    """Return from how many tokens on tile registers are faster; 0: they never are.

    `seconds` tells what n tokens take where tile registers are used from a number of tokens on.
    """
    fewest = 0
    for n in (64, 32, 16):
        rounds = [(seconds(n, 0), seconds(n, n)) for _ in range(_FEWEST_ROUNDS)]
        without, with_them = map(statistics.median, zip(*rounds, strict=True))
        if with_them >= without:
            break
        fewest = n
    return fewest


def _measured(plugin: Path, isa: str) -> PrefetchChoice:
    size, available = beyond_caches(), available_bytes()
    if available is not None and size > available / 4:
        return PrefetchChoice(reason=f"that takes {size >> 20} MiB of memory")
    rounds: list[list[float]] = []
    with WeightStream(plugin, isa, size) as stream:
        load, began = OtherLoad(), perf_counter()
        while len(rounds) <= _FEWEST_ROUNDS or perf_counter() - began < _BUDGET_S:
            order = PREFETCHES[:: -1 if len(rounds) % 2 else 1]
            times = [
                {one: stream.products(_LAYER_1_5B, n, one, default_threads()) for one in order}
                for n in (1, 8)
            ]
            if perf_counter() - began > 4 * _BUDGET_S:
                return PrefetchChoice(reason="the machine is too slow for it")
            rounds.append([of_size[PREFETCHES[0]] / of_size[PREFETCHES[1]] for of_size in times])

        def seconds(n: int, wide_from: int) -> float:
            kernels.Plugin(plugin).set_wide_from(wide_from)
            return stream.products(_LAYER_1_5B, n, PREFETCHES[0], default_threads())

        wide_from = fewest_in_tiles(seconds) if isa == kernels.TILES else PrefetchChoice().wide_from
        busy = load.processors()
    if busy is not None and busy > MOST_OTHER_LOAD:
        return PrefetchChoice(reason=f"other programs kept {busy:.1f} processors busy")
    choice = faster_prefetch(rounds[1:])  # the first warms up
    return msgspec.structs.replace(choice, wide_from=wide_from)


def _send(choice: PrefetchChoice) -> None:
    sys.stdout.write(msgspec.json.encode(choice).decode() + "\n")
    sys.stdout.flush()


def main(plugin: str, isa: str, measure: str = "") -> int:
    """Test `plugin` with instruction set `isa`; return the exit code, write what is wrong to stderr.

    If it passes, and for any word `measure`, the last line on stdout is a PrefetchChoice as JSON.
    """
    try:
        wrong = kernels.load_untested(Path(plugin), isa) or _compare_all()
        if measure and not wrong:
            _send(PrefetchChoice(reason="the measurement crashed, or did not end"))  # the test has passed
            try:
                _send(_measured(Path(plugin), isa))
            except EdgespecError as error:  # no memory
                _send(PrefetchChoice(reason=str(error)))
    except EdgespecError as error:  # the machine's fault, not the kernels': no memory, for example
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if wrong:
        sys.stderr.write(f"{wrong}\n")
    return FAILED if wrong else 0
