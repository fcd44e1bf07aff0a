"""Drafts of several shapes in JAX, for `draft_shapes.py`: heads asked once a token, and once a block.

Both read x(c) = We e(token c) + Wf F(c - 1), F: the target's states after the token before, of the last
layer or of several side by side. Keys and values of x(0) .. x(c) are the context.

    chain   as `forge.training.head`: step s reads We e(c + s) + Wo f'(c + s - 1), f' its own last output
    block   place i of one pass reads x(c) + mask(i), at position c + i, and gives h(i), for token c + i + 1.
            What was drafted before comes in after the pass, cheaply (Markov head):
            logits(i) = W_out[cut] (h(i) + ((1 + h(i) G) * (e(c + i) R)) S), a file would hold
            two tables of kept tokens, E R and W_out S
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from edgespec.forge.training.arithmetic import FACTOR, MASKED, project, rms_norm, rope, rope_turns, score
from edgespec.forge.training.weights import BlockShape

Params = Any
Floats = npt.NDArray[np.float32]
Turns = tuple[Any, Any]
N_PLACES = 7
RANK = 128
_LATER = 0.8  # weight of a place or step relative to the one before
_FIRST_CONFIDENCE = 0.5
CLIP = 12.0  # of scaled states: a text's first tokens have single elements a thousand times the others


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of a draft."""

    name: str
    n_states: int
    """Layers whose states it reads: the last, or all that there are."""
    n_layers: int = 1
    block: bool = False
    n_steps: int = 3
    """Tokens a chain drafts in training."""
    n_anchors: int = 192
    """Blocks of each row in training: with 7 places as many queries as a chain's 3 steps over 448 answers."""


SHAPES = {
    shape.name: shape
    for shape in (
        DraftShape("head", 1),
        DraftShape("head-fused", 3),
        DraftShape("block-1", 3, 1, block=True),
        DraftShape("block-2", 3, 2, block=True),
    )
}


class ShapeBatch(NamedTuple):
    """Texts of a training step; `forge.training.family.TrainingBatch` describes the first six."""

    tokens: Any
    embeddings: Any
    features: Any
    text: Any
    answers: Any
    weights: Any
    anchors: Any
    """int32 (n, anchors): indices into `answers`; a block begins at each."""
    compared: Any
    """int32 (v,): rows of the kept tokens whose logits are compared, the likeliest first."""
    stands_for: Any
    """float32 (v,): logarithm of the number of tokens that each stands for."""


def _product(x: Array, y: Array, y_dim: int) -> Array:
    dimensions = (((2,), (y_dim,)), ((0,), (0,)))
    return jax.lax.dot_general(
        x.astype(FACTOR), y.astype(FACTOR), dimensions, preferred_element_type=jnp.float32
    )


def _shifted(x: Array, n: int) -> Array:
    if n == 0:
        return x
    return jnp.pad(x, ((0, 0), (n, 0), *((0, 0),) * (x.ndim - 2)))[:, : x.shape[1]]


def _later(x: Array, n: int) -> Array:
    return _shifted(x[:, ::-1], n)[:, ::-1]


class Draft:
    """A draft of a shape: first parameters, loss, and what it says of held-out texts."""

    def __init__(
        self, shape: DraftShape, block: BlockShape, norm: Floats, scales: tuple[float, Floats]
    ) -> None:
        """`norm`: the target's last norm; `scales`: root mean squares of embeddings (a number) and states."""
        self.shape, self.block, self._norm = shape, block, norm
        self._embedding_scale, self._state_scale = scales
        self._own_scale = float(np.sqrt((norm**2).mean()))

    def init(self, key: Array, fitted: tuple[Any, Any, Any] | None, start: Params | None) -> Params:
        """Return first parameters.

        `fitted`: We, Wf, Wo of a linear prediction, for scaled inputs. Or `start`: parameters of a head, for
        what is alike; the states of other layers then count nothing at first.
        """
        zeros = [
            np.zeros((n * self.block.n_embd, self.block.n_embd), np.float32)
            for n in (1, self.shape.n_states, 1)
        ]
        first = fitted or zeros
        block, shape = self.block, self.shape
        n, heads, kv = block.n_embd, block.n_head * block.head_dim, block.n_head_kv * block.head_dim
        sizes = {"q": (n, heads), "k": (n, kv), "v": (n, kv), "o": (heads, n)}
        sizes |= {"gate": (n, block.n_ff), "up": (n, block.n_ff), "down": (block.n_ff, n)}
        keys = iter(jax.random.split(key, 32))
        params: Params = {"layers": []}
        for _ in range(shape.n_layers):
            layer = {name: jax.random.normal(next(keys), s) * s[0] ** -0.5 for name, s in sizes.items()}
            layer["o"], layer["down"] = layer["o"] * 0.1, layer["down"] * 0.1
            layer |= {name: jnp.ones(n) for name in ("attention_norm", "ff_norm")}
            params["layers"].append(layer)
        params["embedding"], params["state"] = jnp.asarray(first[0]), jnp.asarray(first[1])
        params["output_norm"], params["confidence"] = jnp.asarray(self._norm), jnp.asarray(_FIRST_CONFIDENCE)
        if shape.block:
            params["mask"] = 0.02 * jax.random.normal(next(keys), (N_PLACES, n))
            params["markov_in"] = jax.random.normal(next(keys), (n, RANK)) * n**-0.5
            params["markov_out"] = jnp.zeros((RANK, n))
            params["markov_gate"] = jnp.zeros((n, RANK))
            params["trust"] = {"w": jnp.zeros((n + RANK,)), "b": jnp.zeros((N_PLACES,))}
        elif shape.n_states > 1:
            params["own"] = jnp.asarray(first[2])
        return params if start is None else self._from_head(params, start)

    def _from_head(self, params: Params, start: Params) -> Params:
        """Return `params` with a head's where they are alike."""
        start = {name: jnp.asarray(x) for name, x in start.items()}
        own = start["feature"] * self._own_scale
        first = {name: start[name] for name in params["layers"][0]}
        params |= {
            "layers": [first, *params["layers"][1:]],
            "embedding": start["embedding"] * self._embedding_scale,
        }
        params |= {name: start[name] for name in ("output_norm", "confidence")}
        others = jnp.zeros((len(params["state"]) - len(own), own.shape[1]))
        params["state"] = jnp.concatenate([others, own])
        return {**params, "own": own} if "own" in params else params

    # ---- the parts ----

    def _inputs(self, params: Params, batch: ShapeBatch) -> tuple[Array, Array]:
        """Return embeddings' part, and x of all columns."""
        width = self.shape.n_states * self.block.n_embd
        states = batch.features[..., -width:].astype(jnp.float32) / self._state_scale[-width:]
        limits = np.full(width, CLIP, np.float32)
        limits[-self.block.n_embd :] = np.inf
        states = jnp.clip(states, -limits, limits)
        embeddings = batch.embeddings.astype(jnp.float32) / self._embedding_scale
        embedded = project(embeddings, params["embedding"])
        return embedded, embedded + _shifted(project(states, params["state"]), 1)

    def _context(self, layer: Params, x: Array, turns: Turns) -> tuple[Array, Array]:
        block = self.block
        h = rms_norm(x, layer["attention_norm"], block.epsilon)
        size = (*x.shape[:-1], block.n_head_kv, block.head_dim)
        keys = rope(project(h, layer["k"]).reshape(size), *turns, interleaved=True)
        return keys, project(h, layer["v"]).reshape(size)

    def _attend(
        self, q: Array, context: tuple[Array, Array], seen: Array, own: Sequence[tuple[Array, Array]]
    ) -> Array:
        """Return attention of q, (n, queries, n_head, width), to columns `seen`, and its `own` keys."""
        block = self.block
        n, n_q, _, width = q.shape
        groups, m = block.n_head_kv, context[0].shape[1]
        q = (q * width**-0.5).reshape(n, n_q, groups, -1, width)
        rows = q.transpose(0, 2, 3, 1, 4).reshape(n * groups, -1, width)
        keys, values = (x.transpose(0, 2, 1, 3).reshape(n * groups, m, width) for x in context)
        scores = _product(rows, keys, 2).reshape(n, groups, -1, n_q, m)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        more = [(q * k[:, :, :, None]).sum(-1).transpose(0, 2, 3, 1)[..., None] for k, _ in own]
        most = scores.max(-1, keepdims=True)
        for each in more:
            most = jnp.maximum(most, each)
        most = jax.lax.stop_gradient(most)
        shares = jnp.exp(scores - most)
        total = shares.sum(-1, keepdims=True)
        found = _product(shares.reshape(n * groups, -1, m), values, 1).reshape(n, groups, -1, n_q, width)
        for each, (_, v) in zip(more, own, strict=True):
            share = jnp.exp(each - most)
            total += share
            found += share * v.transpose(0, 2, 1, 3)[:, :, None]
        return (found / total).transpose(0, 3, 1, 2, 4).reshape(n, n_q, -1)

    def _layer(self, layer: Params, x: Array, turns: Turns, attend: Callable[[Array], Array]) -> Array:
        block = self.block
        h = rms_norm(x, layer["attention_norm"], block.epsilon)
        q = project(h, layer["q"]).reshape(*x.shape[:-1], block.n_head, block.head_dim)
        x = x + project(attend(rope(q, *turns, interleaved=True)), layer["o"])
        h = rms_norm(x, layer["ff_norm"], block.epsilon)
        return x + project(jax.nn.silu(project(h, layer["gate"])) * project(h, layer["up"]), layer["down"])

    def _seen(self, batch: ShapeBatch, columns: Array) -> Array:
        """Return bool (n, queries, m): columns of the query's text up to `columns` (n, queries)."""
        before = _shifted(batch.text + 1, 1) - 1
        usable = (batch.text >= 0) & (batch.text == before)  # a text's first column has no state before it
        text = jnp.take_along_axis(batch.text, columns, 1)
        same = usable[:, None, :] & (text[:, :, None] == batch.text[:, None, :])
        return same & (jnp.arange(batch.text.shape[1]) <= columns[:, :, None])

    # ---- a head asked once a token ----

    def chain(self, params: Params, batch: ShapeBatch, n: int) -> list[Array]:
        """Return outputs (rows, a, n_embd) at the answers, of drafts that began 0 .. n - 1 columns before."""
        block, layer = self.block, params["layers"][0]
        embedded, x = self._inputs(params, batch)
        turns = rope_turns(x.shape[1], block.head_dim, block.rope_base)
        context = self._context(layer, x, (turns[0][None], turns[1][None]))
        own_turns = tuple(jnp.asarray(t)[batch.answers] for t in turns)
        embedded, x = (jnp.take_along_axis(y, batch.answers[..., None], 1) for y in (embedded, x))
        own: list[tuple[Array, Array]] = []
        outputs: list[Array] = []
        for step in range(n):
            if step:
                own.append(self._context(layer, x, own_turns))
            seen = self._seen(batch, jnp.maximum(batch.answers - step, 0))
            back = [(_shifted(k, step - i), _shifted(v, step - i)) for i, (k, v) in enumerate(own, 1)]
            h = self._layer(layer, x, own_turns, partial(self._attend, context=context, seen=seen, own=back))
            outputs.append(rms_norm(h, params["output_norm"], block.epsilon))
            weight = params["own"] if "own" in params else params["state"]
            x = embedded + _shifted(project(outputs[-1] / self._own_scale, weight), 1)
        return outputs

    # ---- a head asked once a block ----

    def blocks(self, params: Params, batch: ShapeBatch, anchors: Array) -> tuple[Array, Array]:
        """Return what confidence reads, and outputs with the Markov head of the text's own tokens.

        Rows of both: (n, anchors * places).
        """
        block = self.block
        n, n_anchors = anchors.shape
        _, x = self._inputs(params, batch)
        turns = rope_turns(x.shape[1] + N_PLACES, block.head_dim, block.rope_base)
        column = jnp.take_along_axis(batch.answers, anchors, 1)
        places = column[:, :, None] + jnp.arange(N_PLACES)
        own_turns = tuple(jnp.asarray(t)[places].reshape(n, n_anchors * N_PLACES, -1) for t in turns)
        context_turns = tuple(t[None, : x.shape[1]] for t in turns)
        seen = jnp.repeat(self._seen(batch, column), N_PLACES, 1)
        h = jnp.take_along_axis(x, column[..., None], 1)[:, :, None] + params["mask"]
        h = h.reshape(n, n_anchors * N_PLACES, -1)
        for i, layer in enumerate(params["layers"]):
            context = self._context(layer, x, context_turns)
            own = self._block_keys(layer, h, own_turns, n_anchors) if i else []
            h = self._layer(layer, h, own_turns, partial(self._attend, context=context, seen=seen, own=own))
        h = rms_norm(h, params["output_norm"], block.epsilon)
        last = batch.tokens.shape[1] - 1
        at = jnp.minimum(places, last).reshape(n, -1, 1)
        embeddings = jnp.take_along_axis(batch.embeddings, at, 1).astype(jnp.float32) / self._embedding_scale
        said = project(embeddings, params["markov_in"]) * (
            1 + project(h / self._own_scale, params["markov_gate"])
        )
        return jnp.concatenate([h, said], -1), h + project(said, params["markov_out"]) * self._own_scale

    def _block_keys(self, layer: Params, h: Array, turns: Turns, n_anchors: int) -> list[tuple[Array, Array]]:
        """Return keys and values of each place of a query's own block."""
        size = (h.shape[0], n_anchors, N_PLACES, self.block.n_head_kv, self.block.head_dim)
        keys, values = (x.reshape(size) for x in self._context(layer, h, turns))
        return [
            (jnp.repeat(keys[:, :, i], N_PLACES, 1), jnp.repeat(values[:, :, i], N_PLACES, 1))
            for i in range(N_PLACES)
        ]

    # ---- loss ----

    def loss(self, params: Params, frozen: Params, batch: ShapeBatch, eta: float) -> Array:
        """Return eta * total variation + (1 - eta) * cross-entropy, falling with the place."""
        rows = frozen["output"][batch.compared]
        last = batch.features[..., -self.block.n_embd :]
        wanted = jnp.take_along_axis(last, batch.answers[..., None], 1).reshape(-1, self.block.n_embd)
        target = jax.nn.softmax(score(wanted.astype(jnp.float32), rows) + batch.stands_for, -1)
        target = jax.lax.stop_gradient(target)

        def distance(outputs: Array, p: Array) -> tuple[Array, Array]:
            logits = score(outputs.reshape(-1, outputs.shape[-1]) * params["confidence"], rows)
            log_q = jax.nn.log_softmax(logits + batch.stands_for, -1)
            variation = 0.5 * jnp.abs(jnp.exp(log_q) - p).sum(-1)
            return eta * variation - (1 - eta) * (p * log_q).sum(-1), variation

        total = jnp.zeros(())
        if not self.shape.block:
            for step, outputs in enumerate(self.chain(params, batch, self.shape.n_steps)):
                began = _shifted(batch.answers + 10**6, step) - 10**6
                weights = (batch.weights * (began == batch.answers - step)).reshape(-1)
                mean = (distance(outputs, target)[0] * weights).sum() / jnp.maximum(weights.sum(), 1.0)
                total += _LATER**step * mean
            return total
        n, n_anchors = batch.anchors.shape
        seen, outputs = self.blocks(params, batch, batch.anchors)
        places, weights = block_places(batch, batch.anchors)
        p = jnp.take_along_axis(target.reshape(n, -1, target.shape[-1]), places.reshape(n, -1, 1), 1)
        distances, variation = distance(outputs, p.reshape(-1, p.shape[-1]))
        weights = weights * _LATER ** jnp.arange(N_PLACES)
        total = (distances * weights.reshape(-1)).sum() / jnp.maximum(weights[..., 0].sum(), 1.0)
        trust = jax.lax.stop_gradient(seen) @ params["trust"]["w"] / self._own_scale
        trust = trust.reshape(n, n_anchors, N_PLACES) + params["trust"]["b"]
        accepted = 1 - jax.lax.stop_gradient(variation).reshape(trust.shape)
        entropy = jax.nn.softplus(trust) - accepted * trust
        return total + 0.1 * (entropy * weights).sum() / jnp.maximum(weights.sum(), 1.0)

    def right(self, params: Params, frozen: Params, batch: ShapeBatch) -> Array:
        """Return bool (n, a, N_PLACES): whether a greedy draft from each answer says the text's tokens."""
        following = jnp.take_along_axis(
            batch.tokens, jnp.minimum(batch.answers + 1, batch.tokens.shape[1] - 1), 1
        )
        following = frozen["row"][following]
        shape = following.shape
        if not self.shape.block:
            found = []
            for step, outputs in enumerate(self.chain(params, batch, N_PLACES)):
                likeliest = score(outputs.reshape(-1, outputs.shape[-1]), frozen["output"]).argmax(-1)
                found.append(_later(likeliest.reshape(shape) == following, step))
            return jnp.stack(found, -1)
        anchors = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        _, outputs = self.blocks(params, batch, anchors)
        outputs = outputs.reshape(shape[0], shape[1], N_PLACES, -1)
        found = []
        for i in range(N_PLACES):
            likeliest = score(outputs[:, :, i].reshape(-1, outputs.shape[-1]), frozen["output"]).argmax(-1)
            found.append(likeliest.reshape(shape) == _later(following, i))
        return jnp.stack(found, -1)


def block_places(batch: ShapeBatch, anchors: Array) -> tuple[Array, Array]:
    """Return indices into the answers of each block's places, and 1 for those in the block's text, else 0."""
    places = anchors[..., None] + jnp.arange(N_PLACES)
    n_answers = batch.answers.shape[1]
    at = jnp.minimum(places, n_answers - 1)
    n = at.shape[0]
    column = jnp.take_along_axis(batch.answers, at.reshape(n, -1), 1).reshape(at.shape)
    weight = jnp.take_along_axis(batch.weights, at.reshape(n, -1), 1).reshape(at.shape)
    begin = column[..., :1]
    fits = (places < n_answers) & (column == begin + jnp.arange(N_PLACES))
    return at, weight * weight[..., :1] * fits
