"""A head: a decoder block that predicts the target's next hidden state from its last one.

    x = We e(token c) + Wf f(c - 1);  f'(c) = norm(block(x));  logits = k W_out[cut] f'(c)

e is the target's input embedding, f its hidden state after the last norm (EAGLE-1, arXiv 2401.15077), k a
learned number, the head's confidence; the file's output matrix includes it.
From its second token on a draft reads the head's own f', so training does too (HASS, arXiv 2408.15766): in
step s all answers are predicted once more, each by a draft that began s columns before it.

    column                  c-3   c-2   c-1    c
    drafted by step 0                          o      reads f(c-1)
    drafted by step 1                     o -> o      reads f'(c-1) of step 0
    drafted by step 2               o ->  o -> o      reads f'(c-1) of step 1

A query sees what a draft's would: keys of the target's features up to where the draft began, then the draft's
own. Only answers are queries; the prompt's columns have keys and values alone.

Matrix products take nearly all of the time. Where the processor multiplies bfloat16 at twice the speed of
float32 (AVX512-BF16, AMX), factors are rounded to it; sums and the optimizer's weights are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from edgespec.apps.forge.dataset import TrainingText
from edgespec.apps.forge.training.batches import EmbedFn, TrainingBatch
from edgespec.apps.forge.training.weights import EMBEDDINGS, OUTPUT_NORM, Floats, ModelWeights
from edgespec.drafting.heads.head_file import (
    FUSION_OFFSET,
    FUSION_TYPE,
    N_VOCAB,
    TARGET,
    TOKEN_IDS,
    read_fusion,
    read_head,
)
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.gguf import (
    F32,
    FLOAT32,
    UINT32,
    UINT64,
    aligned,
    encode_number,
    encode_numbers,
    encode_start,
    encode_text,
    from_floats,
    padded,
    type_number,
)
from edgespec.llama.gguf_header import check_model_file
from edgespec.platform.files import replacing
from edgespec.platform.machine import read_cpu

FACTOR: Any = jnp.bfloat16 if {"avx512_bf16", "amx_bf16"} & read_cpu().flags else jnp.float32

Params = Any
"""Nested dicts of float32 arrays."""

MASKED = -1e9
"""An attention score that softmax turns into 0."""


def dot(x: Array, y: Array, x_dim: int, y_dim: int) -> Array:
    """Return the product of two matrices over dimension `x_dim` of x and `y_dim` of y, in float32."""
    dimensions = (((x_dim,), (y_dim,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(FACTOR), y.astype(FACTOR), dimensions, preferred_element_type=jnp.float32
    )


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _transposed(x: Array) -> Array:
    """Transpose x in a way that XLA does not fold into the next product.

    XLA's products over the first dimensions of both factors run at a third of the speed.
    """
    half = x.shape[1] // 2
    return jnp.concatenate([x[:, :half].T.astype(FACTOR), x[:, half:].T.astype(FACTOR)])


def _product(x: Array, weight: Array) -> Array:
    return dot(_rows(x), weight, 1, 0).reshape(*x.shape[:-1], weight.shape[1])


def _project_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight), (x.astype(FACTOR), weight)


def _project_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = saved
    gradients = _rows(gradient)
    return dot(gradients, weight, 1, 1).reshape(x.shape), dot(_transposed(_rows(x)), gradients, 1, 0)


_project: Any = jax.custom_vjp(_product)
_project.defvjp(_project_forward, _project_backward)


def project(x: Array, weight: Array) -> Array:
    """Return `x @ weight`, shapes (..., k) and (k, n)."""
    return _project(x, weight)


def _row_products(x: Array, rows: Array) -> Array:
    return dot(x, rows, 1, 1)


def _score_forward(x: Array, rows: Array) -> tuple[Array, Array]:
    return _row_products(x, rows), rows


def _score_backward(rows: Array, gradient: Array) -> tuple[Array, None]:
    return dot(gradient, rows, 1, 0), None


_score: Any = jax.custom_vjp(_row_products)
_score.defvjp(_score_forward, _score_backward)


def score(x: Array, rows: Array) -> Array:
    """Return the products of `x`, (n, k), with frozen `rows`, (v, k): shape (n, v)."""
    return _score(x, rows)


def at_answers(x: Array, batch: TrainingBatch) -> Array:
    """Return the answers' columns of x, (n, m, width): shape (n, a, width)."""
    return jnp.take_along_axis(x, batch.answers[:, :, None], 1)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return x scaled to a mean square of 1, times `weight` (arXiv 1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * weight


def rope_turns(n: int, width: int, base: float) -> tuple[Any, Any]:
    """Return cosines and sines, each (n, width / 2), of the angles of `n` positions (arXiv 2104.09864)."""
    angles = np.arange(n)[:, None] / base ** (np.arange(0, width, 2) / width)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate neighbouring elements of x, (..., heads, width), by angles of shape (..., width / 2)."""
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cosine - b * sine, a * sine + b * cosine], -1).reshape(x.shape)


# ---- file of a head: a GGUF of one block, which llama.cpp runs; read again to resume training ----
#
# token_embd                the kept rows of the target's output matrix, as output matrix too
# output_norm, blk.0.*      the block
# after the last tensor     the fusion matrix [We | Wf], where no GGUF parser looks

_ARCHITECTURE = "llama"
_CONTEXT = 32768  # tokens; a head looks back on a few hundred
_MATRICES = {
    **{name: f"blk.0.attn_{name}.weight" for name in ("q", "k", "v")},
    "o": "blk.0.attn_output.weight",
    **{name: f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")},
}
_NORMS = {
    "attention_norm": "blk.0.attn_norm.weight",
    "ff_norm": "blk.0.ffn_norm.weight",
    "output_norm": OUTPUT_NORM,
}
_N_COMPARED = 1024  # rows of the output matrix

# ---- distance from the target's predictions ----


def divergence_from(
    features: Array, weights: Array, output: Array, n: tuple[int, int], key: Array
) -> Callable[[Array], Array]:
    """Return KL(target || head) as a function of predicted features, (answers, n_embd): nats at each answer.

    The target's n[0] likeliest tokens over all answers are compared, and a random n[1] of the others, whose
    gradients are tiny: a sample saves most of the work with the output matrix.
    `features` are the target's, (rows, a, n_embd), `weights` the answers', (rows, a), `output` the matrix of
    all kept tokens, (kept, n_embd).
    """
    n_kept = len(output)
    stands_for = jnp.zeros(n_kept)  # logarithm of the number of tokens that each stands for
    if sum(n) < n_kept:
        mass = jax.lax.map(  # by rows: all logits at once would take most of the memory
            lambda row: (jax.nn.softmax(score(row[0], output), -1) * row[1][:, None]).sum(0),
            (features, weights),
        ).sum(0)
        _, likeliest = jax.lax.top_k(mass, n[0])
        # A random sample: the greatest of independent random numbers.
        _, others = jax.lax.top_k(jax.random.uniform(key, (n_kept,)).at[likeliest].set(-1.0), n[1])
        stands_for = jnp.concatenate([jnp.zeros(n[0]), jnp.full(n[1], np.log((n_kept - n[0]) / n[1]))])
        # Gathering rows of the matrix for a second product is faster than gathering columns of the logits.
        output = output[jnp.concatenate([likeliest, others])]

    def log_probs(of: Array) -> Array:
        return jax.nn.log_softmax(score(of, output) + stands_for, -1)

    wanted = log_probs(features.reshape(-1, features.shape[-1]))
    return lambda predicted: (jnp.exp(wanted) * (wanted - log_probs(predicted))).sum(-1)


_CONFIDENCE = 0.5
"""Factor of a new head's logits, whose features are as long as the target's although it knows little.

With 1 a fitted head is off by 3.9 nats, with this by 2.3.
"""

_N_SCALED_BY = 16384  # first embeddings: the same for every choice of tokens
_NEW_BLOCK_SCALE = 0.1  # a new block adds little to its input


# ---- the head, and its training ----

_N_STEPS = 3  # tokens drafted in training
_LATER = 0.8  # weight of a step's loss relative to the step before
_NOISE = 0.1  # uniform, on features that are read, so that small errors of a draft do not grow
_N_COMPARED_LOGITS = 1536, 512  # the target's likeliest tokens over a batch, and a sample of the others
_N_FITTED = 50_000  # columns that a new head is fitted to


class HeadFamily:
    """A head for one target and one cut vocabulary."""

    def __init__(
        self,
        target: ModelWeights,
        target_sha256: str,
        token_ids: npt.NDArray[np.int64],
        n_ff: int | None = None,
        sample: Iterable[TrainingText] = (),
    ) -> None:
        """Prepare a head that drafts the tokens `token_ids`, ascending; `sample`: texts to fit a new head to.

        `n_ff`: width of its feed-forward layer; None: twice n_embd.
        """
        self._sample = sample
        self.target, self.target_sha256, self.token_ids = target, target_sha256, token_ids
        own = target.shape()
        self.shape = replace(own, n_ff=n_ff or 2 * own.n_embd)
        # Inputs are scaled to a mean square of 1, so that one rate suits both matrices; not in the file.
        n_vocab = target.info(EMBEDDINGS).rows
        self.embedding_scale = _rms(target.rows(EMBEDDINGS, np.arange(min(n_vocab, _N_SCALED_BY))))
        self.feature_scale = _rms(target.vector(OUTPUT_NORM))
        self.frozen: Params = {
            "output": jnp.asarray(target.rows(target.output, token_ids)).astype(FACTOR),
            "row": jnp.full(n_vocab, -1, jnp.int32).at[token_ids].set(np.arange(len(token_ids))),
        }

    def init(self, key: Array) -> Params:
        """Return a block that adds little, and a fusion fitted to the sample, or random."""
        shape = self.shape
        n, heads, kv = shape.n_embd, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
        sizes = {
            "embedding": (n, n),
            "feature": (n, n),
            "q": (n, heads),
            "k": (n, kv),
            "v": (n, kv),
            "o": (heads, n),
            "gate": (n, shape.n_ff),
            "up": (n, shape.n_ff),
            "down": (shape.n_ff, n),
        }
        params = {
            name: jax.random.normal(part, size) * size[0] ** -0.5
            for part, (name, size) in zip(jax.random.split(key, len(sizes)), sizes.items(), strict=True)
        }
        norm = self.target.vector(OUTPUT_NORM)
        fitted = fit_fusion(self._sample, self.target.embed, norm, _N_FITTED)
        if fitted is not None:
            params["embedding"] = jnp.asarray(fitted[0] * self.embedding_scale)
            params["feature"] = jnp.asarray(fitted[1] * self.feature_scale)
        for name in ("o", "down"):
            params[name] *= _NEW_BLOCK_SCALE
        ones = {name: jnp.ones(n) for name in ("attention_norm", "ff_norm")}
        own = {"output_norm": jnp.asarray(norm), "confidence": jnp.asarray(_CONFIDENCE)}
        return {**params, **ones, **own}

    # ---- what JAX traces ----

    def loss(self, params: Params, frozen: Params, batch: TrainingBatch, key: Array) -> Array:
        """Return the weighted sum of KL(target || head) over all steps, in nats.

        No term holds f' near f: training over all steps teaches what the next step needs of it
        (docs/measurements/drafts.md).
        """
        noise, choice = jax.random.split(key)
        rollout = HeadRollout(self, params, batch, noise)
        features = at_answers(batch.features.astype(jnp.float32), batch)
        divergence = divergence_from(features, batch.weights, frozen["output"], _N_COMPARED_LOGITS, choice)
        total = jnp.zeros(())
        for step in range(_N_STEPS):
            predicted = rollout.step()
            weights = rollout.weights(step)
            n = jnp.maximum(weights.sum(), 1.0)
            own = predicted.reshape(-1, self.shape.n_embd) * params["confidence"]
            total += _LATER**step * (divergence(own) * weights.reshape(-1)).sum() / n
        return total

    def rollout(self, params: Params, frozen: Params, batch: TrainingBatch, n: int) -> Array:
        """Return bool (rows, a, n): whether a draft from each answer has the text's next tokens.

        [row, i, s]: given the target's features up to column answers[i] - 1 and the tokens up to column
        answers[i] + s, the head's likeliest next token is tokens[answers[i] + s + 1]. Undefined where
        answers[i] + s is no answer of the same text.
        """
        rollout, last = HeadRollout(self, params, batch), batch.tokens.shape[1] - 1
        following = jnp.take_along_axis(batch.tokens, jnp.minimum(batch.answers + 1, last), 1)
        wanted, right = frozen["row"][following], []
        for step in range(n):
            logits = score(rollout.step().reshape(-1, self.shape.n_embd), frozen["output"])
            right.append(jnp.roll(logits.argmax(-1).reshape(wanted.shape) == wanted, -step, 1))
        return jnp.stack(right, -1)

    def export(self, params: Params, path: Path, type_: str) -> None:
        """Write a head with matrices of `type_` ("q4_0", "q8_0", "f16", "f32").

        Its fusion has 8 bits or more. The file appears complete or not at all. Raises EdgespecError when it
        cannot be written.
        """
        kind = type_number(type_)
        fusion_kind = kind if type_ in ("f16", "f32") else type_number("q8_0")
        arrays = {name: np.asarray(array) for name, array in params.items()}
        own = arrays["embedding"] / self.embedding_scale, arrays["feature"] / self.feature_scale
        tensors = [
            (EMBEDDINGS, self.target.rows(self.target.output, self.token_ids) * arrays["confidence"], kind),
            *((tensor, np.ascontiguousarray(arrays[name].T), kind) for name, tensor in _MATRICES.items()),
            *((tensor, arrays[name], F32) for name, tensor in _NORMS.items()),
        ]
        laid_out = [(name, rows.shape[::-1], own_kind) for name, rows, own_kind in tensors]
        # Any offset of the fusion matrix takes eight bytes, so 0 stands for it here.
        infos, start = encode_start(self._metadata(fusion_kind, 0), laid_out)
        fusion_offset = len(start) + aligned(infos[-1].offset + infos[-1].bytes)
        try:
            with replacing(path) as file:
                file.write(encode_start(self._metadata(fusion_kind, fusion_offset), laid_out)[1])
                for info, (_, rows, _) in zip(infos, tensors, strict=True):
                    file.write(padded(from_floats(np.atleast_2d(rows), info.kind).tobytes()))
                fusion = np.concatenate([part.T for part in own], axis=1)
                file.write(from_floats(fusion, fusion_kind).tobytes())
        except OSError as error:
            raise EdgespecError(f"cannot write {path}: {describe_os_error(error)}") from error

    def _metadata(self, fusion_kind: int, fusion_offset: int) -> list[bytes]:
        shape = self.shape
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
            "vocab_size": len(self.token_ids),
        }
        factors = {"attention.layer_norm_rms_epsilon": shape.epsilon, "rope.freq_base": shape.rope_base}
        return [
            encode_text("general.architecture", _ARCHITECTURE),
            encode_text("general.type", "model"),
            encode_text("general.name", "draft head"),
            *(encode_number(f"{_ARCHITECTURE}.{key}", UINT32, value) for key, value in sizes.items()),
            *(encode_number(f"{_ARCHITECTURE}.{key}", FLOAT32, value) for key, value in factors.items()),
            encode_text("tokenizer.ggml.model", "none"),
            encode_number(N_VOCAB, UINT32, len(self.frozen["row"])),
            encode_numbers(TOKEN_IDS, UINT32, self.token_ids),
            encode_text(TARGET, self.target_sha256),
            encode_number(FUSION_TYPE, UINT32, fusion_kind),
            encode_number(FUSION_OFFSET, UINT64, fusion_offset),
        ]

    def read(self, path: Path) -> Params:
        """Return the parameters of an exported head, rounded to its type.

        Raises UsageError and EdgespecError if there is none, or one of another shape.
        """
        weights = ModelWeights(check_model_file(path))
        head = read_head(weights.header)
        if head is None:
            raise UsageError(f"{path}: no draft head")
        params: Params = {name: weights.rows(tensor).T for name, tensor in _MATRICES.items()}
        if params["gate"].shape != (self.shape.n_embd, self.shape.n_ff):
            raise UsageError(f"{path}: a head of another width; cannot start from it")
        fusion, n = read_fusion(head), head.n_embd
        # The output matrix is the target's, times the confidence.
        wanted = self.target.rows(self.target.output, head.token_ids[:_N_COMPARED])
        own = weights.rows(EMBEDDINGS, np.arange(len(wanted)))
        return {
            **params,
            **{name: weights.vector(tensor) for name, tensor in _NORMS.items()},
            "embedding": fusion[:, :n].T * self.embedding_scale,
            "feature": fusion[:, n:].T * self.feature_scale,
            "confidence": np.float32((own * wanted).sum() / (wanted**2).sum()),
        }


class HeadRollout:
    """Passes of a head over a batch: each `step` drafts all answers by one column more."""

    def __init__(
        self, head: HeadFamily, params: Params, batch: TrainingBatch, key: Array | None = None
    ) -> None:
        """Begin on `batch`; with a `key`, features have noise."""
        shape = head.shape
        self._shape, self._params, self._batch = shape, params, batch
        self._feature_scale = head.feature_scale
        n_columns = batch.tokens.shape[1]
        features = batch.features.astype(jnp.float32)
        if key is not None:
            features += jax.random.uniform(key, features.shape, minval=-_NOISE, maxval=_NOISE)
        embeddings = batch.embeddings.astype(jnp.float32) / head.embedding_scale
        self._embedded = project(embeddings, params["embedding"])
        x = self._embedded + self._after(features)
        # A text's first column has no feature before it: it is neither drafted nor seen.
        before = _shifted(batch.text + 1, 1) - 1
        usable = (batch.text >= 0) & (batch.text == before)
        text = jnp.take_along_axis(batch.text, batch.answers, 1)
        self._same = usable[:, None, :] & (text[:, :, None] == batch.text[:, None, :])
        self._columns = jnp.arange(n_columns)
        cosine, sine = rope_turns(n_columns, shape.head_dim, shape.rope_base)
        self._turns = jnp.asarray(cosine)[batch.answers], jnp.asarray(sine)[batch.answers]
        self._keys, self._values = self._keys_values(x, (cosine[None], sine[None]))
        self._embedded = at_answers(self._embedded, batch)
        self._x = at_answers(x, batch)
        self._own: list[tuple[Array, Array]] = []
        self._n = 0

    def weights(self, step: int) -> Array:
        """Return the weights (n, a) of a step's predictions: 0 where no draft can have begun."""
        answers, n = self._batch.answers, len(self._columns)
        began = _shifted(answers + n, step) - n
        return self._batch.weights * (began == answers - step)

    def step(self) -> Array:
        """Predict the features at the answers, (n, a, n_embd)."""
        shape, params = self._shape, self._params
        x = self._x
        if self._n:
            self._own.append(self._keys_values(x, self._turns))
        h = rms_norm(x, params["attention_norm"], shape.epsilon)
        x = x + project(self._attend(self._heads(project(h, params["q"]))), params["o"])
        h = rms_norm(x, params["ff_norm"], shape.epsilon)
        h = jax.nn.silu(project(h, params["gate"])) * project(h, params["up"])
        predicted = rms_norm(x + project(h, params["down"]), params["output_norm"], shape.epsilon)
        self._n += 1
        self._x = self._embedded + self._after(predicted)
        return predicted

    def _after(self, features: Array) -> Array:
        return project(_shifted(features / self._feature_scale, 1), self._params["feature"])

    def _keys_values(self, x: Array, turns: tuple[Any, Any]) -> tuple[Array, Array]:
        """Return keys and values, each (n, columns, n_head_kv, head_dim)."""
        h = rms_norm(x, self._params["attention_norm"], self._shape.epsilon)
        size = (*x.shape[:2], self._shape.n_head_kv, self._shape.head_dim)
        keys = rope(project(h, self._params["k"]).reshape(size), *turns)
        return keys, project(h, self._params["v"]).reshape(size)

    def _heads(self, q: Array) -> Array:
        """Return queries with RoPE, (n, a, n_head_kv, heads that share keys, head_dim)."""
        shape = self._shape
        q = rope(q.reshape(*q.shape[:2], shape.n_head, shape.head_dim), *self._turns)
        q *= shape.head_dim**-0.5
        return q.reshape(*q.shape[:2], shape.n_head_kv, -1, shape.head_dim)

    def _attend(self, q: Array) -> Array:
        """Return the attention of this step's queries, (n, a, n_head * head_dim)."""
        n_columns = len(self._columns)
        began = self._batch.answers - self._n
        seen = self._same & (self._columns <= began[:, :, None])
        scores = jnp.einsum("nagqd,nmgd->nagqm", q, self._keys)
        scores = jnp.where(seen[:, :, None, None, :], scores, MASKED)
        # The draft's own columns: step i's lies n - i columns back.
        own = [(_shifted(k, self._n - i), _shifted(v, self._n - i)) for i, (k, v) in enumerate(self._own, 1)]
        more = [jnp.einsum("nagqd,nagd->nagq", q, keys)[..., None] for keys, _ in own]
        shares = jax.nn.softmax(jnp.concatenate([scores, *more], -1), -1)
        found = jnp.einsum("nagqm,nmgd->nagqd", shares[..., :n_columns], self._values)
        for i, (_, values) in enumerate(own):
            found += shares[..., n_columns + i, None] * values[:, :, :, None, :]
        return found.reshape(*q.shape[:2], -1)


def _shifted(x: Array, n: int) -> Array:
    """Move all columns, dimension 1, right by `n`; zeros come in."""
    if n == 0:
        return x
    return jnp.pad(x, ((0, 0), (n, 0), *((0, 0),) * (x.ndim - 2)))[:, : x.shape[1]]


def _rms(x: Floats) -> float:
    return float(np.sqrt((x**2).mean()))


# ---- weights that a head starts from ----
#
# Least squares over some ten thousand tokens take seconds. For a 1.5B target they find the likeliest token
# in a third of all places, as half an hour of training from random numbers does.

_BLOCK = 4096  # columns
_RIDGE = 1e-2  # of the mean variance: damps directions that the sample hardly has


def fit_fusion(
    texts: Iterable[TrainingText], embed: EmbedFn, norm: Floats, n_most: int
) -> tuple[Floats, Floats] | None:
    """Fit We and Wf, each (n_embd, n_embd), to predict feature(c) / norm.

    The prediction for column c is `embed(token c) @ We + feature(c - 1) @ Wf`. Up to `n_most` columns
    are read; None if there are fewer than a matrix has rows. `norm`: weights of the target's last norm.
    """
    width, n = len(norm), 0
    squares, products = np.zeros((2 * width, 2 * width)), np.zeros((2 * width, width))
    scale = np.where(np.abs(norm) < 0.1 * np.abs(norm).mean(), np.inf, norm)  # tiny: no information
    for x, y in _blocks(texts, embed):
        squares += x.T @ x
        products += x.T @ (y / scale)
        n += len(x)
        if n >= n_most:
            break
    if n < 2 * width:
        return None
    variances = np.diag(squares)
    # Embeddings are a hundred times smaller than features: each part has its own ridge.
    ridge = _RIDGE * np.repeat([variances[:width].mean(), variances[width:].mean()], width)
    found = np.linalg.solve(squares + np.diag(ridge), products).astype(np.float32)
    return found[:width], found[width:]


def _blocks(texts: Iterable[TrainingText], embed: EmbedFn) -> Iterator[tuple[Floats, Floats]]:
    """Yield inputs (columns, 2 * n_embd) and features to predict, some thousand columns at a time."""
    inputs, outputs, n = [], [], 0
    for text in texts:
        features = text.features.astype(np.float32)
        embeddings = embed(text.tokens[text.first + 1 : -1]).astype(np.float32)
        inputs.append(np.concatenate([embeddings, features[:-1]], axis=1))
        outputs.append(features[1:])
        n += len(embeddings)
        if n >= _BLOCK:
            yield np.concatenate(inputs), np.concatenate(outputs)
            inputs, outputs, n = [], [], 0
    if inputs:
        yield np.concatenate(inputs), np.concatenate(outputs)
