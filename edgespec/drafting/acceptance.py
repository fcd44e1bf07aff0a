"""A branch predictor for drafts: which share of a source's tokens the target accepts, learned each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
N_BUCKETS = len(_EDGES) + 1
_CENTRES = tuple((a + b) / 2 for a, b in itertools.pairwise((0.0, *_EDGES, 1.0)))
_BUCKET_OF = tuple(sum(i / 256 >= edge for edge in _EDGES) for i in range(257))

_ROW_OF = tuple(min(4, depth.bit_length()) for depth in range(65))  # of a table: 0, 1, 2-3, 4-7, 8 and more
N_DEPTHS = 5

_SECOND = (0.10, 0.12, 0.16, 0.19, 0.2, 0.18, 0.1, 0.04, 0.002)  # measured over 1,900 tokens at 0.8
_SUFFIX = (
    (0.05, 0.11, 0.22, 0.30, 0.47, 0.60, 0.75, 0.87, 0.95),
    (0.05, 0.08, 0.18, 0.18, 0.40, 0.58, 0.70, 0.80, 0.91),
)  # of a first token and of later ones: measured, answers to 155 prompts
_TRUST, _TRUST_COUNTS = 0.6, 3.0  # in the suffix store at the start of a text, and what that counts for
_TRUST_KEEP = 0.97  # of a count at each outcome: the last tens of tokens matter


def bucket_of(confidence: float) -> int:
    """Return the bucket of a probability in [0, 1]."""
    return _BUCKET_OF[int(confidence * 256)]


class AcceptanceTable:
    """Probability that a token is accepted, by its depth and its bucket, learned from outcomes.

    A cell is a decaying count. A cell with few outcomes is supplemented by its bucket over all depths, and
    that by a prior, so that a few outcomes already improve all estimates.
    """

    _COUNTS = 5.0  # outcomes that what completes a cell counts for in it
    _KEEP = 0.99  # of a count at each outcome: the last 100 or so matter
    _FAST = 0.2  # weight of an outcome in the short memory
    _BROKEN = 0.45  # a short memory that far from the long one: acceptance has changed
    _CARRIED = 6.0  # outcomes that a cell counts for at most in the next text, which may differ
    _FADED = 0.9  # of all counts
    _USUAL = 0.1  # of a text's acceptance in the mean over texts

    def __init__(self, prior: Callable[[int, int], float], *, alike: bool = False) -> None:
        """Start from `prior(depth row, bucket)`; `alike`: cells differ little, so all supplement each."""
        self._prior = [[prior(d, b) for b in range(N_BUCKETS)] for d in range(N_DEPTHS)]
        self._alike = alike
        self._usual = self._prior[0][0]  # where cells are alike: acceptance over all, a mean over texts
        self._clear()

    def _clear(self) -> None:
        # Rows by depth, and one for all depths.
        self._hits, self._tested = ([[0.0] * N_BUCKETS for _ in range(N_DEPTHS + 1)] for _ in range(2))
        self._recent = [[-1.0] * N_BUCKETS for _ in range(N_DEPTHS + 1)]
        self.n_learned = 0
        """Outcomes of this text."""

    def begin(self) -> None:
        """Start on another text, about which the last one says little."""
        if self._alike:
            self._usual = self._usual_so_far()
            self._clear()
        self.n_learned = 0
        for hits, tested in zip(self._hits, self._tested, strict=True):
            for bucket, n in enumerate(tested):
                if n > self._CARRIED:
                    hits[bucket] *= self._CARRIED / n
                    tested[bucket] = self._CARRIED

    def _usual_so_far(self) -> float:
        hits, tested = self._hits[-1][0], self._tested[-1][0]
        return self._usual + (self._USUAL * (hits / tested - self._usual) if tested > self._COUNTS else 0.0)

    @property
    def overall(self) -> float:
        """Return the acceptance over all cells in this text, for cells that are `alike`."""
        return self._completed(N_DEPTHS, 0, self._usual)

    def chance(self, depth: int, bucket: int) -> float:
        """Return the estimated acceptance of a token, given that those before it are accepted."""
        row = _ROW_OF[depth]
        guess = self._prior[row][bucket]
        if self._alike:
            guess = min(0.98, guess / self._prior[0][0] * self.overall)
        else:
            guess = self._completed(N_DEPTHS, bucket, guess)
        return self._completed(row, bucket, guess)

    def _completed(self, row: int, bucket: int, guess: float) -> float:
        return (self._hits[row][bucket] + self._COUNTS * guess) / (self._tested[row][bucket] + self._COUNTS)

    def learn(self, depth: int, bucket: int, outcome: float) -> None:
        """Count one tested token; `outcome` is 1, 0, or the probability with which it was accepted."""
        self.n_learned += 1
        for row, column in ((_ROW_OF[depth], bucket), (N_DEPTHS, 0 if self._alike else bucket)):
            hits, tested, recent = self._hits[row], self._tested[row], self._recent[row]
            hits[column] = self._KEEP * hits[column] + outcome
            tested[column] = self._KEEP * tested[column] + 1.0
            before = recent[column] if recent[column] >= 0.0 else outcome
            now = recent[column] = before + self._FAST * (outcome - before)
            if tested[column] > 12.0 and abs(now - hits[column] / tested[column]) > self._BROKEN:
                tested[column], hits[column] = 8.0, 8.0 * now

    def fade(self) -> None:
        """Count outcomes a little less: cells without new ones return to the common estimate."""
        for rows in (self._hits, self._tested):
            rows[:N_DEPTHS] = [[self._FADED * count for count in row] for row in rows[:N_DEPTHS]]

    def as_json(self) -> dict[str, Any]:
        """Return the counts for a file."""
        if self._alike:
            return {"usual": round(self._usual_so_far(), 4)}
        return {
            name: [[round(count, 2) for count in row] for row in rows]
            for name, rows in (("accepted", self._hits), ("tested", self._tested))
        }

    def restore(self, stored: Any) -> None:  # noqa: ANN401 - whatever a file holds
        """Restore counts from `as_json`; ignore anything else."""
        if not isinstance(stored, Mapping):
            return
        usual = stored.get("usual")
        hits, tested = (stored.get(name) for name in ("accepted", "tested"))
        if self._alike and isinstance(usual, int | float) and 0.0 <= usual <= 1.0:
            self._usual = float(usual)
        elif not self._alike and hits and tested and _is_grid(hits) and _is_grid(tested):
            for d, b in itertools.product(range(N_DEPTHS + 1), range(N_BUCKETS)):
                n = float(tested[d][b])
                self._tested[d][b], self._hits[d][b] = n, min(n, float(hits[d][b]))
        self.begin()


def _is_grid(value: Any) -> bool:  # noqa: ANN401
    return (
        isinstance(value, Sequence)
        and len(value) == N_DEPTHS + 1
        and all(isinstance(row, Sequence) and len(row) == N_BUCKETS for row in value)
        and all(isinstance(x, int | float) and 0 <= x <= 1e9 for row in value for x in row)
    )


class AcceptanceTables:
    """The share of a source's tokens that the target accepts: a table for each kind, learned each step.

    Only tested tokens count: whether those after the first rejection would have been accepted is unknown.
    So a cell at depth d holds the acceptance *given* that the d tokens before it were accepted. The bucket is
    that of a probability:

        suffix    the one that the suffix store gives the token
        sampled   the draft model's confidence; the token was sampled from its distribution
        argmax    the same; it was the likeliest one, a point mass
        second    the same; one more token was sampled at the position, without the first
        other     the one that the draft model gives the token, which is not its likeliest
        next      its confidence in the token before, 0 at depth 0: the next one, before the model has run
    """

    def __init__(self) -> None:
        self.suffix = AcceptanceTable(lambda d, b: _SUFFIX[d > 0][b])
        self.sampled = AcceptanceTable(lambda _d, b: 0.3 + 0.65 * _CENTRES[b])
        self.argmax = AcceptanceTable(lambda _d, b: 0.15 + 0.8 * _CENTRES[b])
        self.second = AcceptanceTable(lambda _d, b: _SECOND[b])
        self.other = AcceptanceTable(lambda _d, b: 0.8 * _CENTRES[b])
        self.next = AcceptanceTable(lambda d, b: 0.75 if d == 0 else 0.55 + 0.3 * _CENTRES[b], alike=True)
        self.begin()

    def _tables(self) -> dict[str, AcceptanceTable]:
        return {name: table for name, table in vars(self).items() if isinstance(table, AcceptanceTable)}

    def begin(self) -> None:
        """Start on another text, which may differ: what was learned counts for less."""
        self._right, self._expected = _TRUST * _TRUST_COUNTS, _TRUST_COUNTS
        for table in self._tables().values():
            table.begin()

    def offered(self, depth: int, bucket: int) -> float:
        """Return the estimated acceptance of the suffix store's token, given that those before it are right.

        How much a text repeats itself differs more between texts than the table shows. So its estimate for a
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

    def merge(self, text: AcceptanceTables) -> None:
        """Replace tables by those of `text` that have learned anything."""
        for name, table in text._tables().items():
            if table.n_learned:
                setattr(self, name, table)

    def as_json(self) -> dict[str, Any]:
        """Return all counts, for a file."""
        return {name: table.as_json() for name, table in self._tables().items()}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Restore counts from `as_json`; ignore anything else."""
        for name, table in self._tables().items():
            table.restore(stored.get(name))
