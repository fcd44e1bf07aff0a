"""Rejected places: where a head's draft was not what the target wrote, kept on disk for the next training.

    cache_root()/rejected/                          0700
        texts.db                          0600      all targets' texts, each under the SHA-256 of its file, or
                                                    with adapters under one of both

A file has the form of a history (history.py). A record is a text with at least one place, as int32:

    record      = n_prompt, n_places, places, tokens
    place       = index of the token, 16 likeliest tokens there, their probabilities in 4 words
    probability = a byte: -8 ln p, rounded, at most 126; the likeliest first, 127 for a token that is missing

A place is the first of a draft's tokens that differs from the text. So each is a position that the head
reached by its own tokens; those after it in that draft were never tested.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec._core import Sampler
from edgespec.decoding.records import Step
from edgespec.decoding.session import Rows
from edgespec.drafting.history import History
from edgespec.drafting.step import DraftStep
from edgespec.errors import MessageFn, silent
from edgespec.platform.kept import REJECTED

MAX_WORDS = 1 << 20
"""Words kept of a target, 4 MB: about 110,000 tokens of texts, of which two in five are places."""

N_LIKELIEST = 16

_PLACE = 1 + N_LIKELIEST + N_LIKELIEST // 4
_SCALE, _LEAST, _MISSING = 8.0, 126, 127  # of a byte: steps in a nat, the smallest probability, none

Ids = npt.NDArray[np.int32]


class RejectedText(msgspec.Struct, frozen=True, eq=False):
    """A text, and the places where a head's draft of it was rejected."""

    tokens: Ids
    n_prompt: int
    """Tokens of the prompt."""
    places: Ids
    """Indexes of the tokens that the head did not find, ascending, (n,)."""
    likeliest: Ids
    """The target's likeliest tokens at each place, best first, (n, 16)."""
    probs: npt.NDArray[np.float32]
    """Their probabilities, to 6 %, (n, 16); 0 where there are fewer tokens."""

    def encoded(self) -> Ids:
        """Return the text as a record."""
        logs = np.round(-_SCALE * np.log(np.maximum(self.probs, 1e-9)))
        coded = np.where(self.probs > 0, np.minimum(logs, _LEAST), _MISSING).astype(np.uint8)
        rows = np.concatenate([self.places[:, None], self.likeliest, coded.view("<i4")], 1)
        return np.concatenate([[self.n_prompt, len(rows)], rows.ravel(), self.tokens]).astype(np.int32)

    @classmethod
    def decoded(cls, record: Ids) -> RejectedText | None:
        """Return the text of a record; None for an invalid record."""
        n_prompt, n = record[:2].tolist() if len(record) > 2 else (0, 0)
        rows, tokens = record[2 : 2 + n * _PLACE], record[2 + n * _PLACE :]
        if not 0 < n_prompt < len(tokens) or not n:
            return None
        rows = rows.reshape(n, _PLACE)
        places = rows[:, 0]
        if places[0] < n_prompt or places[-1] >= len(tokens) or (np.diff(places) <= 0).any():
            return None
        coded = np.ascontiguousarray(rows[:, 1 + N_LIKELIEST :]).view(np.uint8)
        probs = np.where(coded < _MISSING, np.exp(coded / -_SCALE), 0.0).astype(np.float32)
        return cls(tokens, n_prompt, places, rows[:, 1 : 1 + N_LIKELIEST], probs)


class PlacesOfText(msgspec.Struct):
    """The rejected places of a text that is being written."""

    places: list[int] = msgspec.field(default_factory=list)
    likeliest: list[list[tuple[int, float]]] = msgspec.field(default_factory=list)

    def note(self, step: DraftStep, made: Step, rows: Rows, sampler: Sampler) -> None:
        """Note the first token of the trunk that was not emitted, if the head proposed it."""
        emitted, trunk = made.tokens, step.trunk
        n = step.n_right(emitted)
        if n >= min(len(emitted), len(trunk)):
            return
        if trunk[n].source not in {"sampled", "argmax"}:
            return
        row = rows[made.path[n - 1] + 1 if n else 0]
        self.places.append(step.n_sequence + n)
        self.likeliest.append(sampler.likeliest(row, min(N_LIKELIEST, len(row))))

    def of(self, tokens: Sequence[int], n_prompt: int, start: int) -> RejectedText | None:
        """Return the text `tokens` from index `start` on with its places; None if it has none."""
        known = [i for i, place in enumerate(self.places) if max(start, n_prompt) <= place < len(tokens)]
        if not known:
            return None
        likeliest = np.zeros((len(known), N_LIKELIEST), np.int32)
        probs = np.zeros(likeliest.shape, np.float32)
        for row, i in enumerate(known):
            ids, shares = zip(*self.likeliest[i], strict=True)
            likeliest[row, : len(ids)], probs[row, : len(ids)] = ids, shares
        places = np.array([self.places[i] for i in known], np.int32) - start
        return RejectedText(np.array(tokens[start:], np.int32), n_prompt - start, places, likeliest, probs)


class RejectedPlaces:
    """The rejected texts of one target on disk. Any number of processes may use it at once."""

    def __init__(
        self, target_sha256: str, *, max_words: int = MAX_WORDS, on_message: MessageFn = silent
    ) -> None:
        """Name the texts of the target whose file has this SHA-256; nothing is opened yet.

        `max_words`: their bound; the oldest go first. `on_message` takes lines that the user should know.
        """
        self._target, self._on_message = target_sha256, on_message
        self._file = History(
            f"target-{target_sha256[:16]}", kept=REJECTED, max_tokens=max_words, on_message=on_message
        )
        self.path = self._file.path

    def of(self, adapters: str) -> RejectedPlaces:
        """Return those of the target with a set of adapters, by its key; "" stands for none."""
        if not adapters:
            return self
        both = hashlib.sha256((self._target + adapters).encode()).hexdigest()
        return RejectedPlaces(both, max_words=self._file.max_tokens, on_message=self._on_message)

    def append(self, text: RejectedText) -> None:
        """Store a text, unless it is larger than the whole file may be. A failure is one line."""
        record = text.encoded()
        if len(record) < self._file.max_tokens:
            self._file.append(record)

    def texts(self) -> list[RejectedText]:
        """Return the texts, oldest first.

        Raises EdgespecError, which names the file, for one that is damaged.
        """
        found = map(RejectedText.decoded, self._file.texts())
        return [text for text in found if text]
