"""The acceptance predictor: which share of a source's proposals will the target accept?

A branch predictor for drafts: per source a table of (depth, bucket), each cell a decaying count of how
often a token there was accepted. A cell with few outcomes is completed by its bucket over all depths, and
that by a first guess, so that a few outcomes already say something everywhere. Only judged tokens count:
nobody knows whether those after the first rejection would have been accepted, so they count neither way,
and a cell at depth d holds the acceptance *given* that the d tokens before it were accepted.

The tables:
    suffix    bucket: the probability that the suffix store gives the token
    sampled   bucket: the draft model's confidence; its token was sampled from its distribution
    argmax    the same; its token was the likeliest one, a point mass
    second    the same bucket; one more token was sampled at the position, without the first
    other     bucket: the probability that the draft model gives the token, which is not its likeliest one
    next      the draft model's next token before the model has run; the bucket is the confidence in the
              token before it in this draft, 0 at depth 0
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

_TABLES = ("suffix", "sampled", "argmax", "second", "other", "next")

_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
N_BUCKETS = len(_EDGES) + 1
_CENTRES = tuple((a + b) / 2 for a, b in itertools.pairwise((0.0, *_EDGES, 1.0)))
_BUCKET_OF = tuple(sum(i / 256 >= edge for edge in _EDGES) for i in range(257))

DEPTH_OF = tuple(min(4, depth.bit_length()) for depth in range(65))
"""Depth (tokens drafted before this one) to the row of a table: 0, 1, 2-3, 4-7, 8 and more."""
N_DEPTHS = 5

_SECOND = (0.10, 0.12, 0.16, 0.19, 0.2, 0.18, 0.1, 0.04, 0.002)
"""First guess at the table `second`, by bucket; measured over 1,900 tokens at temperature 0.8."""

_SUFFIX = (
    (0.05, 0.11, 0.22, 0.30, 0.47, 0.60, 0.75, 0.87, 0.95),
    (0.05, 0.08, 0.18, 0.18, 0.40, 0.58, 0.70, 0.80, 0.91),
)
"""First guess at the table `suffix`, of a first token and of later ones: measured, answers to 155 prompts."""

_TRUST, _TRUST_COUNTS = 0.6, 3.0  # in the suffix store at the start of a text, and what that counts for
_TRUST_KEEP = 0.97  # of a count at each outcome: the last tens of tokens matter

_USUAL = 0.1  # of a generation's acceptance in the mean over generations


def bucket_of(confidence: float) -> int:
    """Return the bucket of a probability in [0, 1]."""
    return _BUCKET_OF[int(confidence * 256)]


class AcceptanceTable:
    """Probability that a token is accepted, by its depth and its bucket, learned from outcomes."""

    _BUCKET_COUNTS = 5.0  # outcomes that the bucket over all depths counts for in a cell
    _GUESS_COUNTS = 5.0  # outcomes that the first guess counts for in the bucket
    _KEEP = 0.99  # of a count at each outcome: the last 100 or so matter
    _FAST = 0.2  # weight of an outcome in the short memory
    _BROKEN = 0.45  # a short memory that far from the long one: acceptance has changed
    _CARRIED = 6.0  # outcomes that a cell counts for at most in the next text, which may differ
    _REMEMBERED = 1024  # outcomes of a text, for `learn_of`: those before count for nothing

    def __init__(self, prior: Callable[[int, int], float], *, alike: bool = False) -> None:
        """Start from `prior(depth row, bucket)`; `alike`: cells differ little, all complete each."""
        self._prior = [[prior(d, b) for b in range(N_BUCKETS)] for d in range(N_DEPTHS)]
        self._alike = alike
        self._hits = [[0.0] * N_BUCKETS for _ in range(N_DEPTHS + 1)]  # the last row: all depths
        self._tested = [[0.0] * N_BUCKETS for _ in range(N_DEPTHS + 1)]
        self._recent = [[-1.0] * N_BUCKETS for _ in range(N_DEPTHS + 1)]
        self._chances: list[list[float | None]] = [[None] * N_BUCKETS for _ in range(N_DEPTHS)]
        self._outcomes: deque[tuple[int, int, float]] = deque(maxlen=self._REMEMBERED)  # of this text
        self.usual = self._prior[0][0]
        """Where cells are alike: the acceptance over all of them, a mean over generations."""
        self.overall = self.usual
        """The same in this generation."""

    def begin(self) -> None:
        """Start on another text: what the last one was like says little of it."""
        self._outcomes.clear()
        if not self._alike:
            for accepted, counts in zip(self._hits, self._tested, strict=True):
                for bucket, n in enumerate(counts):
                    if n > self._CARRIED:
                        accepted[bucket] *= self._CARRIED / n
                        counts[bucket] = self._CARRIED
            self._refresh()
            return
        self.usual = self._usual_so_far()
        for rows in (self._hits, self._tested, self._recent):
            for row in rows:
                row[:] = [-1.0 if rows is self._recent else 0.0] * N_BUCKETS
        self._refresh()

    def _usual_so_far(self) -> float:
        tested = self._tested[N_DEPTHS][0]
        if tested <= 5.0:
            return self.usual
        return self.usual + _USUAL * (self._hits[N_DEPTHS][0] / tested - self.usual)

    def chance(self, depth: int, bucket: int) -> float:
        """Return the estimated acceptance of a token, those before it being accepted."""
        row = DEPTH_OF[depth]
        found = self._chances[row][bucket]
        if found is None:
            found = self._chances[row][bucket] = self._estimate(row, bucket)
        return found

    def learn(self, depth: int, bucket: int, outcome: float) -> None:
        """Count one judged token; `outcome` is 1, 0, or the probability with which it was accepted."""
        self._outcomes.append((depth, bucket, outcome))
        common = 0 if self._alike else bucket
        self._count(DEPTH_OF[depth], bucket, outcome)
        self._count(N_DEPTHS, common, outcome)
        self._refresh(bucket)

    def copy(self) -> AcceptanceTable:
        """Return a table of the same counts, which learns by itself."""
        copied = copy(self)
        for name in ("_hits", "_tested", "_recent", "_chances"):
            setattr(copied, name, [row[:] for row in getattr(self, name)])
        copied._outcomes = self._outcomes.copy()
        return copied

    def learn_of(self, other: AcceptanceTable) -> None:
        """Count the outcomes of the text that `other` was last told of, as another text's."""
        self.begin()
        for outcome in other._outcomes:
            self.learn(*outcome)

    def _count(self, row: int, bucket: int, outcome: float) -> None:
        hits, tested, recent = self._hits[row], self._tested[row], self._recent[row]
        hits[bucket] = self._KEEP * hits[bucket] + outcome
        tested[bucket] = self._KEEP * tested[bucket] + 1.0
        before = recent[bucket] if recent[bucket] >= 0.0 else outcome
        now = recent[bucket] = before + self._FAST * (outcome - before)
        if tested[bucket] > 12.0 and abs(now - hits[bucket] / tested[bucket]) > self._BROKEN:
            tested[bucket], hits[bucket] = 8.0, 8.0 * now

    def _refresh(self, bucket: int | None = None) -> None:
        """Drop the estimates that depend on this bucket (None: all), to be computed when next asked for."""
        if self._alike:
            # What is known of all cells; each is moved from it as it was thought to differ from the first.
            hits, tested = self._hits[N_DEPTHS][0], self._tested[N_DEPTHS][0]
            self.overall = (hits + self._GUESS_COUNTS * self.usual) / (tested + self._GUESS_COUNTS)
        for row in self._chances:
            if self._alike or bucket is None:
                row[:] = [None] * N_BUCKETS
            else:
                row[bucket] = None

    def _estimate(self, row: int, bucket: int) -> float:
        guess = self._prior[row][bucket]
        if self._alike:
            common_chance = min(0.98, guess / self._prior[0][0] * self.overall)
        else:
            hits, tested = self._hits[N_DEPTHS][bucket], self._tested[N_DEPTHS][bucket]
            common_chance = (hits + self._GUESS_COUNTS * guess) / (tested + self._GUESS_COUNTS)
        hits, tested = self._hits[row][bucket], self._tested[row][bucket]
        return (hits + self._BUCKET_COUNTS * common_chance) / (tested + self._BUCKET_COUNTS)

    def fade(self, keep: float, *, wholly: bool = False) -> None:
        """Count all outcomes a little less: cells without new ones return to the common estimate.

        `wholly`: that one, too, returns to its first guess, if it is lower.
        """
        n = N_DEPTHS + (wholly and self.overall < self.usual)
        for rows in (self._hits, self._tested):
            for row in rows[:n]:
                row[:] = [keep * count for count in row]
        self._refresh()

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for a file."""
        if self._alike:
            return {"usual": round(self._usual_so_far(), 4)}
        return {
            name: [[round(count, 2) for count in row] for row in rows]
            for name, rows in (("accepted", self._hits), ("tested", self._tested))
        }

    def restore(self, stored: Any) -> None:  # noqa: ANN401 - whatever a file holds
        """Take up counts that `as_dict` gave; anything else is left alone."""
        if not isinstance(stored, Mapping):
            return
        if self._alike:
            usual = stored.get("usual")
            if isinstance(usual, int | float) and 0.0 <= usual <= 1.0:
                self.usual = float(usual)
                self.begin()
            return
        hits, tested = stored.get("accepted"), stored.get("tested")
        if hits is None or tested is None or not (_is_grid(hits) and _is_grid(tested)):
            return
        for d in range(N_DEPTHS + 1):
            for b in range(N_BUCKETS):
                n = float(tested[d][b])
                share = min(1.0, max(0.0, float(hits[d][b]) / n)) if n > 0 else 0.0
                self._tested[d][b], self._hits[d][b] = n, share * n
        self.begin()


def _is_grid(value: Any) -> bool:  # noqa: ANN401
    return (
        isinstance(value, Sequence)
        and len(value) == N_DEPTHS + 1
        and all(isinstance(row, Sequence) and len(row) == N_BUCKETS for row in value)
        and all(isinstance(x, int | float) and 0 <= x <= 1e9 for row in value for x in row)
    )


class Predictor:
    """Probability that a drafted token is accepted, by where it came from: six tables, learned each step."""

    _right: float  # first tokens of the suffix store that were right in this text
    _expected: float  # how many of them should have been, by its table

    def __init__(self) -> None:
        self.suffix = AcceptanceTable(lambda d, b: _SUFFIX[d > 0][b])
        self.sampled = AcceptanceTable(lambda _d, b: 0.3 + 0.65 * _CENTRES[b])
        self.argmax = AcceptanceTable(lambda _d, b: 0.15 + 0.8 * _CENTRES[b])
        self.second = AcceptanceTable(lambda _d, b: _SECOND[b])
        self.other = AcceptanceTable(lambda _d, b: 0.8 * _CENTRES[b])
        self.next = AcceptanceTable(lambda d, b: 0.75 if d == 0 else 0.55 + 0.3 * _CENTRES[b], alike=True)
        self.begin()

    def _tables(self) -> dict[str, AcceptanceTable]:
        return {name: getattr(self, name) for name in _TABLES}

    def offered(self, depth: int, bucket: int) -> float:
        """Return the estimated acceptance of a token of the suffix store, those before it being right.

        How much a text repeats differs between texts more than the table can tell. So its estimate for a
        first token is multiplied by (how many were right in this text) / (how many should have been).
        """
        chance = self.suffix.chance(depth, bucket)
        return chance if depth else min(0.98, chance * self._right / self._expected)

    def learn_offered(self, depth: int, bucket: int, right: bool) -> None:
        """Count a token that the suffix store offered, and that was `right` or not."""
        if depth == 0:
            self._right = _TRUST_KEEP * self._right + right
            self._expected = _TRUST_KEEP * self._expected + self.suffix.chance(depth, bucket)
        self.suffix.learn(depth, bucket, right)

    def begin(self) -> None:
        """Start on another text, which may differ: what was learned counts for less."""
        self._right, self._expected = _TRUST * _TRUST_COUNTS, _TRUST_COUNTS
        for table in self._tables().values():
            table.begin()

    def copy(self) -> Predictor:
        """Return tables of the same counts, which learn by themselves."""
        copied = copy(self)
        for name, table in self._tables().items():
            setattr(copied, name, table.copy())
        return copied

    def learn_of(self, other: Predictor) -> None:
        """Count the outcomes of the text that `other` was last told of, as another text's."""
        for name, table in self._tables().items():
            table.learn_of(getattr(other, name))

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, for a file."""
        return {name: table.as_dict() for name, table in self._tables().items()}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take up the counts that `as_dict` gave; anything else is left alone."""
        for name, table in self._tables().items():
            table.restore(stored.get(name))
