"""The reference ("twins") of the C core, written for reading: float64, whole arrays, no tricks.

`filtered_probs` and `sample` are what `csrc/sampler.c` does, `verify` what `csrc/verify.c` does: pure
functions, no model, no clock, and coins come in. The tests hold the two against each other.

Chain rule: Leviathan et al., arXiv 2211.17192, algorithm 1 (lenience: its appendix), and Chen et al., arXiv
2302.01318, algorithm 2. Over siblings, recursive rejection: Miao et al. (SpecInfer), arXiv 2305.09781,
section 4; siblings sampled without replacement: Chen et al. (Sequoia), arXiv 2402.12374, section 3.
Block rule: Sun et al., arXiv 2403.10444, algorithm 2. Over a tree, traversal verification: Weng et al.,
arXiv 2505.12398, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.decoding.choices import Rule
from edgespec.decoding.sampling import SamplingParams

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


def filtered_probs(
    logits: npt.ArrayLike,
    params: SamplingParams,
    prefix: Sequence[int] = (),
    *,
    seed: int = 0,
    breakers: Sequence[Sequence[int]] = (),
) -> Floats:
    """Return the probabilities of all tokens after bias, penalties, filters and temperature.

    `logits` has shape (n_vocab,); `prefix` is what precedes the position. `seed` is that of XTC's coins,
    `breakers` are the sequences of tokens that DRY takes no repeat across. The result has the same shape and
    sums to 1.
    """
    x = np.array(logits, dtype=np.float32)
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    _penalise(x, params, prefix)
    _penalise_repeats(x, params, list(prefix), breakers)
    if params.top_n_sigma > 0.0:
        possible = x[x > -np.inf].astype(np.float64)
        least = possible.max() - np.float64(np.float32(params.top_n_sigma)) * possible.std()
        x[x.astype(np.float64) < least] = -np.inf

    x64 = x.astype(np.float64)
    kept = np.lexsort((np.arange(len(x)), -x64))  # best first, ties by id
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.typical_p < 1.0:
        kept = _typical(x64, kept, params.typical_p)
    if params.top_p < 1.0:
        reached = np.cumsum(_softmax(x64[kept])) >= params.top_p
        kept = kept[: int(np.argmax(reached)) + 1] if reached.any() else kept
    if params.min_p > 0.0:
        least = np.float32(x[kept[0]]) + np.log(np.float32(params.min_p))
        kept = kept[x[kept] >= least]
    kept = kept[x[kept] > -np.inf]
    if position_coin(seed, len(prefix)) < params.xtc_probability and params.xtc_threshold <= 0.5:
        top = np.flatnonzero(_softmax(x64[kept]) >= params.xtc_threshold)  # the first ones: they are sorted
        kept = kept[max(0, len(top) - 1) :]
    probs = np.zeros(len(x))
    temperature = _temperature(_softmax(x64[kept]), params)
    if temperature < 1e-38:
        probs[kept[0]] = 1.0
    else:
        probs[kept] = _softmax(x64[kept] / temperature)
    return probs


def position_coin(seed: int, position: int) -> float:
    """Return XTC's coin of a position. numpy's Philox steps its counter before the first block."""
    return float(
        np.random.Generator(
            np.random.Philox(key=seed | 1 << 64, counter=(position - 1) % (1 << 256))
        ).random()
    )


def sample(probs: npt.ArrayLike, coin: float) -> int:
    """Return the token at which the running sum of `probs` first exceeds `coin` times its total."""
    running = np.cumsum(np.asarray(probs, dtype=np.float64))
    return int(np.searchsorted(running, coin * running[-1], side="right"))


def _softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def _temperature(probs: Floats, params: SamplingParams) -> float:
    """Return the temperature; a dynamic one goes with the entropy, as a share of the most there can be."""
    if params.dynatemp_range == 0.0 or len(probs) < 2:
        return params.temperature
    positive = probs[probs > 0]
    share = max(0.0, float(-(positive * np.log(positive)).sum()) / np.log(len(probs)))
    low = max(0.0, params.temperature - params.dynatemp_range)
    return low + (params.temperature + params.dynatemp_range - low) * share**params.dynatemp_exponent


def _penalise_repeats(
    x: Logits, params: SamplingParams, text: list[int], breakers: Sequence[Sequence[int]]
) -> None:
    """DRY: for each place in the text, compare what stands before it with the text's end."""
    if params.dry_multiplier == 0.0 or params.dry_base < 1.0 or params.dry_penalty_last_n == 0:
        return
    if params.dry_penalty_last_n > 0:
        text = text[-params.dry_penalty_last_n :]
    limit = len(text)
    for start in range(
        len(text) - 1, -1, -1
    ):  # the last place where a breaker stands; of several the longest
        ends = [start + len(one) for one in breakers if text[start : start + len(one)] == [*one]]
        if ends:
            limit = len(text) - max(ends)
            break
    longest: dict[int, int] = {}
    for place in range(1, len(text)):
        n = 0
        while n < min(place, limit) and text[place - 1 - n] == text[-1 - n]:
            n += 1
        longest[text[place]] = max(n, longest.get(text[place], 0))
    most = 88.7228391 // np.log(params.dry_base) if params.dry_base > 1.000001 else np.inf
    for token, n in longest.items():
        if (
            n >= params.dry_allowed_length
            and len(text) > params.dry_allowed_length
            and (token,) not in breakers
        ):
            x[token] -= np.float32(
                params.dry_multiplier * params.dry_base ** min(n - params.dry_allowed_length, most)
            )


def _penalise(x: Logits, params: SamplingParams, prefix: Sequence[int]) -> None:
    if params.penalty_last_n == 0:
        return
    recent = list(prefix) if params.penalty_last_n < 0 else list(prefix)[-params.penalty_last_n :]
    for token in set(recent):
        penalty = np.float32(params.repeat_penalty)
        x[token] = x[token] * penalty if x[token] <= 0 else x[token] / penalty
        x[token] -= np.float32(recent.count(token)) * np.float32(params.frequency_penalty) + np.float32(
            params.presence_penalty
        )


def _typical(x: Floats, kept: npt.NDArray[Any], share: float) -> npt.NDArray[Any]:
    """Locally typical sampling (Meister et al., arXiv 2202.00666): best first by logit."""
    probs = _softmax(x[kept])
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = float(np.sum(probs[probs > 0] * surprise[probs > 0]))
    order = np.lexsort((kept, np.abs(surprise - entropy)))
    above = np.cumsum(probs[order]) > share
    order = order[: int(np.argmax(above)) + 1] if above.any() else order
    return kept[np.sort(order)]


# ---- verification ----

_Toss = Callable[[int, float], bool]
"""Whether the coin of a node falls below a probability."""


@dataclass(frozen=True)
class Drafted:
    """A tree of n drafted tokens and what the two models gave them. A chain's node i has the parent i - 1."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """Index of each token's parent, which precedes it; -1: it follows the timeline. In depth-first order."""
    draft_probs: Floats
    """(n, n_vocab): the q that each was sampled from; of a deterministic proposal, a point mass."""
    target_probs: Floats
    """(n + 1, n_vocab): row 0 follows the timeline, row i + 1 follows node i."""

    def children(self, node: int) -> list[int]:
        """Return the nodes that follow `node` (-1: the timeline), in order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first one down to `node`; none for -1."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]


def verify(
    drafted: Drafted, coins: Sequence[float], rule: Rule, *, lenience: float = 1.0
) -> tuple[list[int], int]:
    """Run the rule with n + 1 coins in [0, 1); return the accepted path and the token after it."""
    node, rest = _follow(drafted, rule, lenience, lambda node, probability: coins[node] < probability)
    return drafted.path(node), sample(rest, coins[-1])


def outcomes(drafted: Drafted, rule: Rule, *, lenience: float = 1.0) -> list[tuple[int, float, Floats]]:
    """Return every outcome that independent uniform coins can give.

    Each entry is the node that the accepted path ends at (-1: none is accepted), its probability, and the
    distribution that the next token is then sampled from.
    """
    found: list[tuple[int, float, Floats]] = []
    unseen: list[list[bool]] = [[]]  # results of the first coins
    while unseen:
        falls = unseen.pop()
        chance, n_tossed = 1.0, 0

        def toss(_node: int, probability: float, falls: list[bool] = falls) -> bool:
            nonlocal chance, n_tossed
            if not 0.0 < probability < 1.0:
                return probability > 0.0
            if n_tossed == len(falls):
                unseen.append([*falls, False])
                falls.append(True)
            n_tossed += 1
            chance *= probability if falls[n_tossed - 1] else 1.0 - probability
            return falls[n_tossed - 1]

        node, rest = _follow(drafted, rule, lenience, toss)
        found.append((node, chance, rest))
    return found


def residual(p: Floats, q: Floats, weight: float = 1.0) -> tuple[Floats, float]:
    """Return max(0, weight p - q), normalised (p itself when nothing is left), and its total before that."""
    excess = np.maximum(0.0, weight * p - q)
    left = float(excess.sum())
    return (np.asarray(excess / left) if left > 0.0 else p), left


def _follow(drafted: Drafted, rule: Rule, lenience: float, toss: _Toss) -> tuple[int, Floats]:
    """Return the node that the accepted path ends at, and what the next token is sampled from."""
    if rule == "chain":
        return _descend(drafted, -1, lenience, toss)
    node, rest = _climb(drafted, -1, 1.0, toss)
    return (-1 if node is None else node), rest


def _descend(drafted: Drafted, node: int, lenience: float, toss: _Toss) -> tuple[int, Floats]:
    """Chain rule: the first child whose coin accepts it is accepted for good."""
    p = drafted.target_probs[node + 1]
    for child in drafted.children(node):
        q, token = drafted.draft_probs[child], drafted.tokens[child]
        if toss(child, min(1.0, p[token] / (lenience * q[token]))):
            return _descend(drafted, child, lenience, toss)
        p, _ = residual(p, q)
    return node, p


def _climb(drafted: Drafted, node: int, weight: float, toss: _Toss) -> tuple[int | None, Floats]:
    """Block rule: accept something below `node`, else `node`: with a probability of `weight` in all."""
    p = drafted.target_probs[node + 1]
    for child in drafted.children(node):
        q, token = drafted.draft_probs[child], drafted.tokens[child]
        accepted, rest = _climb(drafted, child, min(1.0, weight * p[token] / q[token]), toss)
        if accepted is not None:
            return accepted, rest
        p, left = residual(p, q, weight)
        weight = left / (left + (1.0 - weight)) if left > 0.0 else 0.0
    return (node if node >= 0 and toss(node, weight) else None), p
