"""The acceptance predictor: which share of a source's proposals will the target accept?

A branch predictor for drafts: per source a table of (depth, bucket), each cell a decaying count of how
often a token there was accepted. A cell leans on its bucket over all depths, and that on what one would
guess, so that a few outcomes already say something everywhere. Only judged tokens count: of what follows
the first rejection nobody knows whether it would have been accepted, so it counts neither way, and a cell
at depth d holds the acceptance *given* that the d tokens before it were accepted.

The tables:
    suffix    bucket: the probability that the suffix store gives the token
    sampled   bucket: the draft model's confidence; its token was sampled from its distribution
    argmax    the same; its token was the likeliest one, a point mass
    next      the draft model's next token before the model has run: the bucket is the confidence in the
              token before it in this draft, at depth 0 the last outcomes (a branch history register)
    guess     bucket as `suffix`: will the draft model itself say what the suffix store proposes?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

TableName = Literal["suffix", "sampled", "argmax", "next", "guess"]

_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
N_BUCKETS = len(_EDGES) + 1
_CENTRES = tuple((a + b) / 2 for a, b in itertools.pairwise((0.0, *_EDGES, 1.0)))
_BUCKET_OF = tuple(sum(i / 256 >= edge for edge in _EDGES) for i in range(257))

DEPTH_OF = tuple(min(4, depth.bit_length()) for depth in range(65))
"""Depth (tokens drafted before this one) to the row of a table: 0, 1, 2-3, 4-7, 8 and more."""
N_DEPTHS = 5

N_HISTORY = 8
"""Buckets of the history register: the last three outcomes."""


def bucket_of(confidence: float) -> int:
    """Return the bucket of a probability in [0, 1]."""
    return _BUCKET_OF[int(confidence * 256)]


class Table:
    """Acceptance by (depth, bucket); `estimates[DEPTH_OF[depth]][bucket]` is always up to date."""

    _LEAN, _PRIOR = 6.0, 6.0  # outcomes that the guess, and the bucket over all depths, count for
    _KEEP = 0.98  # of a count at each outcome: the last 50 or so matter
    _STORED = 12.0  # outcomes that a stored cell counts for at most: another prompt may be another world

    def __init__(self, prior: Callable[[int, int], float]) -> None:
        """Start from `prior(depth row, bucket)`."""
        self._prior = [[prior(d, b) for b in range(N_BUCKETS)] for d in range(N_DEPTHS)]
        self._hits = [[0.0] * N_BUCKETS for _ in range(N_DEPTHS + 1)]  # the last row: all depths
        self._tested = [[0.0] * N_BUCKETS for _ in range(N_DEPTHS + 1)]
        self.estimates = [list(row) for row in self._prior]

    def learn(self, depth: int, bucket: int, outcome: float) -> None:
        """Count one judged token; `outcome` is 1, 0, or the probability with which it was accepted."""
        row = DEPTH_OF[depth]
        keep = self._KEEP
        for hits, tested in (
            (self._hits[row], self._tested[row]),
            (self._hits[N_DEPTHS], self._tested[N_DEPTHS]),
        ):
            hits[bucket] = keep * hits[bucket] + outcome
            tested[bucket] = keep * tested[bucket] + 1.0
        self._estimate(bucket)

    def fade(self, keep: float) -> None:
        """Forget a little of everything: what was not tried for long is again what one would guess."""
        for rows in (self._hits, self._tested):
            for row in rows:
                row[:] = [keep * count for count in row]
        for bucket in range(N_BUCKETS):
            self._estimate(bucket)

    def _estimate(self, bucket: int) -> None:
        all_hits, all_tested = self._hits[N_DEPTHS][bucket], self._tested[N_DEPTHS][bucket]
        for d in range(N_DEPTHS):
            common = (all_hits + self._PRIOR * self._prior[d][bucket]) / (all_tested + self._PRIOR)
            hits, tested = self._hits[d][bucket], self._tested[d][bucket]
            self.estimates[d][bucket] = (hits + self._LEAN * common) / (tested + self._LEAN)

    def as_dict(self) -> dict[str, list[list[float]]]:
        """Return the counts, for a file."""
        return {
            name: [[round(count, 2) for count in row] for row in rows]
            for name, rows in (("accepted", self._hits), ("tested", self._tested))
        }

    def restore(self, stored: Any) -> None:  # noqa: ANN401 - whatever a file holds
        """Take up counts that `as_dict` gave; anything else is left alone."""
        if not isinstance(stored, Mapping):
            return
        hits, tested = stored.get("accepted"), stored.get("tested")
        if hits is None or tested is None or not (_is_grid(hits) and _is_grid(tested)):
            return
        for d in range(N_DEPTHS + 1):
            for b in range(N_BUCKETS):
                n = float(tested[d][b])
                share = min(1.0, max(0.0, float(hits[d][b]) / n)) if n > 0 else 0.0
                self._tested[d][b] = min(n, self._STORED)
                self._hits[d][b] = share * self._tested[d][b]
        for b in range(N_BUCKETS):
            self._estimate(b)


def _is_grid(value: Any) -> bool:  # noqa: ANN401
    return (
        isinstance(value, Sequence)
        and len(value) == N_DEPTHS + 1
        and all(isinstance(row, Sequence) and len(row) == N_BUCKETS for row in value)
        and all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for row in value for x in row)
    )


class Predictor:
    """The five tables, and the history register of the draft model's last outcomes."""

    def __init__(self) -> None:
        self.suffix = Table(lambda _d, b: 0.9 * _CENTRES[b])
        self.sampled = Table(lambda _d, b: 0.3 + 0.65 * _CENTRES[b])
        self.argmax = Table(lambda _d, b: 0.15 + 0.8 * _CENTRES[b])
        self.next = Table(lambda d, b: 0.75 if d == 0 else 0.3 + 0.6 * _CENTRES[b])
        self.guess = Table(lambda _d, b: 0.9 * _CENTRES[b])
        self.history = N_HISTORY - 1

    @property
    def _tables(self) -> dict[TableName, Table]:
        return {
            "suffix": self.suffix,
            "sampled": self.sampled,
            "argmax": self.argmax,
            "next": self.next,
            "guess": self.guess,
        }

    def remember(self, accepted: bool) -> None:
        """Shift an outcome of the draft model's first token into the history register."""
        self.history = (2 * self.history + accepted) % N_HISTORY

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, for a file."""
        return {name: table.as_dict() for name, table in self._tables.items()}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take up what `as_dict` gave; what does not make sense is left alone."""
        for name, table in self._tables.items():
            table.restore(stored.get(name))
