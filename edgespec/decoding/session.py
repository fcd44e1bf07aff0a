"""The sessions that the loops run: what a model over one sequence of tokens must provide, and its passes.

llama.cpp's (llama/session.py) and Whisper's (speech/whisper_model.py) are such sessions, and toys in tests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edgespec.errors import EdgespecError

Rows: TypeAlias = npt.NDArray[np.float32]
"""Logits, shape (n_logits, n_vocab), C-contiguous: a view on the library's buffer."""

Features: TypeAlias = npt.NDArray[np.float32]
"""Hidden states, shape (n_tokens, n_states): of one layer a view on the library's buffer."""

Inputs: TypeAlias = npt.NDArray[np.float32]
"""Rows that the first layer takes for the tokens of one sequence, shape (n_tokens, n_embd)."""


Places: TypeAlias = npt.NDArray[np.int32]
"""Positions of rows in each dimension that attention rotates, shape (n_dimensions, n_rows)."""


class EmbeddedSpan(msgspec.Struct, frozen=True, eq=False):
    """A stretch of a prompt that the model reads as rows in the place of tokens.

    `ids` stand for its rows wherever tokens do. They are negative and made from the content, so that prompts
    with a common prefix are known by their ids. Two bits of each say how the span is placed: so the ids of a
    sequence alone tell the position of each of its tokens.
    """

    ids: tuple[int, ...]
    start: Callable[[], Future[Inputs]]
    """Begins to compute the rows, shape (n, n_embd), unless it has begun, and returns them."""
    places: Places | None = None
    """Positions relative to that of the first row; None: each row takes the next position."""
    at_once: bool = False
    """Whether its rows attend to each other, and so are read in one pass."""

    @staticmethod
    def ids_of(content: bytes, n_rows: int, n_positions: int) -> tuple[int, ...]:
        """Return ids for a hash of the `content` of `n_rows` rows, which take at most as many positions."""
        random = np.frombuffer(hashlib.shake_256(content).digest(4 * n_rows), "<u4") & 0x1FFFFFFF
        ids = (random.astype(np.int64) << 2) + (np.arange(n_rows) >= n_rows - n_positions)
        ids[0] += _BEGINS
        return tuple((-1 - ids).tolist())


_ADVANCES, _BEGINS = 1, 2  # bits of an id, after -1 - id: it takes a position; it is the first of its span


def begins_span(token: int) -> bool:
    """Whether a token is the first id of a span."""
    return token < 0 and (-1 - token) & _BEGINS > 0


def n_positions(tokens: Sequence[int]) -> int:
    """Return how many positions the tokens of a sequence take."""
    return sum(token >= 0 or (-1 - token) & _ADVANCES for token in tokens)


class PromptTokens(list[int]):
    """The tokens of a prompt, in which the ids of `spans` stand for what is read as rows, in their order."""

    spans: tuple[EmbeddedSpan, ...] = ()


Medium: TypeAlias = "bytes | str | Path"
"""What an encoder reads: the contents of a file, or its path."""


class MediaEncoder(Protocol):
    """Turns media into parts of a target's prompts."""

    def problem(self, *, ask_hub: bool) -> str:
        """Return why it reads nothing here, or ""; without `ask_hub` only the disk says."""

    def read(self, medium: Medium, name: str) -> Sequence[list[int] | EmbeddedSpan]:
        """Return the parts that stand for `medium`: tokens and spans. Raises UsageError about `name`."""

    def close(self) -> None:
        """Free what it holds."""


def text_of(tokens: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt without the ids of spans."""
    return [token for token in tokens if token >= 0]


class Folded(NamedTuple):
    """A span in a sequence that takes fewer positions than it has rows."""

    start: int
    """Tokens before it."""
    end: int
    position: int
    """Of all of its rows, in the first dimension."""
    n_positions: int


def folded_spans(tokens: array[int]) -> list[Folded]:
    """Return the spans in a sequence of tokens that take fewer positions than they have rows."""
    if not tokens or min(tokens) >= 0:
        return []
    found: list[Folded] = []
    n_folded = start = 0
    while start < len(tokens):
        end = start + 1
        if tokens[start] < 0:
            while end < len(tokens) and tokens[end] < 0 and not begins_span(tokens[end]):
                end += 1
            n = n_positions(tokens[start:end])
            if n < end - start:
                found.append(Folded(start, end, start - n_folded, n))
                n_folded += end - start - n
        start = end
    return found


class Branches(NamedTuple):
    """A tree of tokens as llama.cpp sees it: one sequence per leaf, in the order of the nodes."""

    depths: list[int]
    """Depth of each node; 0 directly below the token before the tree."""
    first_leaf: list[int]
    """Index of the first leaf at or below each node."""
    leaves: list[int]
    """Number of leaves at or below each node."""
    n_leaves: int


@dataclass(slots=True)
class SequenceTokens:
    """Tokens that a forward pass appends to one sequence of a cache: a chain, which may end with a tree.

    The fields are the arguments of `Session.eval`. The cache sets the last three when the pass begins.
    """

    sequence: int
    tokens: Sequence[int]
    """Those of a step are an array of C ints, which is copied as it is."""
    n_logits: int = 1
    """Number of tokens, at the end, whose logits are wanted."""
    parents: Sequence[int] | None = None
    inputs: Inputs | None = None
    """The rows that are read in the place of the tokens, or beside them."""
    places: Places | None = None
    """Positions of those rows relative to `position`; None: one after the other."""
    at_once: bool = False
    """Whether each of the tokens attends to all of them."""
    with_features: bool = False
    """Whether the hidden states of the tokens are wanted."""
    with_last_states: bool = False
    """Whether those of the tokens with logits are, if edgespec's kernels leave them for nothing."""
    n_past: int = 0
    """Tokens of the sequence before these."""
    position: int = 0
    """Position of the first."""
    branches: Branches | None = None
    """The tree, where it is not a chain."""
    leaves: Sequence[int] = ()
    """Spare sequences of the tree's leaves, without the trunk's."""

    @property
    def n_drafted(self) -> int:
        """Tokens at the end that may be removed again."""
        return max(0, self.n_logits - 1)

    @property
    def n_chain(self) -> int:
        """Tokens before the tree, each of which follows the one before it."""
        return len(self.tokens) - (len(self.branches.depths) if self.branches else 0)

    def section(self, start: int, n: int) -> SequenceTokens:
        """Return the `n` tokens from `start` on, for a separate pass; the last section has the whole tree."""
        ends = start + n == len(self.tokens)
        inputs = None if self.inputs is None else self.inputs[start : start + n]
        return SequenceTokens(
            self.sequence,
            self.tokens[start : start + n],
            self.n_logits if ends else 0,
            inputs=inputs,
            places=None if self.places is None else self.places[:, start : start + n],
            with_features=self.with_features,
            with_last_states=self.with_last_states,
            n_past=self.n_past + start,
            position=self.position + (start if self.places is None else 0),
            branches=self.branches if ends else None,
        )


class ForwardResult(msgspec.Struct, frozen=True):
    """The result of a forward pass for one of its sequences."""

    rows: Rows
    """The logits that were asked for; valid until the next pass of that cache."""
    seconds: float
    """The whole pass's time."""
    n_tokens: int
    """Tokens in the whole pass, others' among them."""
    features: Features | None = None
    """The hidden states of the sequence's tokens, if any were asked for; valid as long as `rows`."""
    confidence: float | None = None
    """How likely a draft head says that a token of the first row is accepted; most say nothing."""

    def copy(self) -> ForwardResult:
        """Return the result with copies of its rows and features, which the next pass does not overwrite."""
        features = None if self.features is None else self.features.copy()
        return replace(self, rows=self.rows.copy(), features=features)


class SessionModel(Protocol):
    """What sessions need of a model: vocabulary, end tokens, name."""

    @property
    def n_vocab(self) -> int:
        """Tokens of its vocabulary."""

    @property
    def name(self) -> str:
        """The model's name, for errors."""

    @property
    def path(self) -> object:
        """The model's file, for errors."""

    @property
    def keeps_state(self) -> bool:
        """Whether the model has a recurrent state, which can be rewound only to checkpoints."""

    @property
    def leaves_last_states(self) -> bool:
        """Whether its passes return the hidden states of tokens with logits at no extra cost."""

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a text."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of `token`; with `special` also a control token's name."""

    def sequence_breakers(self, texts: tuple[str, ...], /) -> array[int]:
        """Return the tokens that contain one of `texts`, or begin it, as `_core.Sampler` needs them (DRY)."""


class SessionCache(Protocol):
    """The cache that holds a session's sequence, alone or with others."""

    @property
    def n_logits_max(self) -> int:
        """Most rows of logits of a pass."""

    @property
    def n_features_max(self) -> int:
        """Most tokens of a pass that returns hidden states."""

    @property
    def most_drafted(self) -> int:
        """Most tokens of a pass that may be removed after it."""

    @property
    def all_logits(self) -> bool:
        """Whether a pass that returns hidden states computes the logits of all its tokens."""

    def forward(self, parts: Sequence[SequenceTokens]) -> Sequence[ForwardResult]:
        """Append the tokens of each part to its sequence; return a result for each."""


class ModelSession(Protocol):
    """A model over one sequence of tokens, which grows and can be cut back."""

    @property
    def model(self) -> SessionModel:
        """The model that it runs."""

    @property
    def cache(self) -> SessionCache:
        """The cache that its sequence is in, maybe with others."""

    @property
    def sequence(self) -> int:
        """The sequence's number in the cache."""

    @property
    def n_ctx(self) -> int:
        """Most tokens of the sequence."""

    @property
    def n_past(self) -> int:
        """Tokens in the sequence."""

    def rewind(self, n_keep: int, /) -> int:
        """Cut the sequence back to its first `n_keep` tokens; return how many are left, maybe fewer."""


class Forward(SequenceTokens):
    """A forward pass over tokens after a session's sequence."""

    __slots__ = ("finish", "session")

    finish: Callable[[ForwardResult], ForwardResult]
    """Returns what a draft model makes of the result, and takes note of the pass; set only in its passes."""

    def __init__(
        self,
        session: ModelSession,
        tokens: Sequence[int],
        n_logits: int = 1,
        parents: Sequence[int] | None = None,
        *,
        inputs: Inputs | None = None,
        with_features: bool = False,
        with_last_states: bool = False,
    ) -> None:
        """Ask for a pass of `session`; the other arguments are the fields of SequenceTokens."""
        super().__init__(session.sequence, tokens, n_logits, parents, inputs)
        self.with_features, self.with_last_states = with_features, with_last_states
        self.session = session

    @property
    def is_embedded(self) -> bool:
        """Whether rows are read in the place of its tokens, which needs a pass of its own."""
        return self.tokens[0] < 0 if self.tokens else False

    @property
    def n_outputs(self) -> int:
        """Tokens whose logits the library computes."""
        return len(self.tokens) if self.with_features and self.session.cache.all_logits else self.n_logits

    def run(self) -> ForwardResult:
        """Run the pass alone, and return its result."""
        return self.session.cache.forward([self])[0]


def forward_together(parts: Sequence[Forward]) -> list[ForwardResult | Exception]:
    """Run one pass of a cache for all `parts`, which fit in one; return a result for each.

    If it fails, run one pass for each; if that fails too, its result is the error.
    """
    try:
        return [*parts[0].session.cache.forward(parts)]
    except (EdgespecError, MemoryError, OSError) as error:
        if len(parts) == 1:
            return [error]
    found: list[ForwardResult | Exception] = []
    for part in parts:
        if found and isinstance(last := found[-1], ForwardResult):
            found[-1] = last.copy()  # its rows are the cache's own memory, which the next pass overwrites
        try:
            found.append(part.run())
        except (EdgespecError, MemoryError, OSError) as error:
            found.append(error)
    return found


def is_one_pass(parts: Sequence[Forward]) -> bool:
    """Whether one pass of the library can run these: with recurrent states, all need equal lengths."""
    return not parts[0].session.model.keeps_state or len({len(part.tokens) for part in parts}) == 1


class TokenView(Sequence[int]):
    """The first tokens of a text that only grows, and perhaps others after them, read in place.

    A slice is a tuple.
    """

    __slots__ = ("_more", "_n", "_tokens")

    def __init__(self, tokens: Sequence[int], more: Sequence[int] = (), n: int | None = None) -> None:
        """View the first `n` of `tokens` (None: all that there are now), then `more`."""
        self._tokens, self._more, self._n = tokens, more, len(tokens) if n is None else n

    def __len__(self) -> int:
        return self._n + len(self._more)

    @overload
    def __getitem__(self, place: int, /) -> int: ...
    @overload
    def __getitem__(self, place: slice, /) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice, /) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1:
                return tuple(self[i] for i in range(start, stop, step))
            n, tokens, more = self._n, self._tokens, self._more
            return (*tokens[start : min(stop, n)], *more[max(0, start - n) : max(0, stop - n)])
        i = place + len(self) if place < 0 else place
        if not 0 <= i < len(self):
            raise IndexError(f"no token {place} of {len(self)}")
        return self._tokens[i] if i < self._n else self._more[i - self._n]


def as_ints(tokens: Sequence[int]) -> array[int]:
    """Return `tokens` as C ints, unchanged if they are; so that many comparisons copy them only once."""
    return tokens if isinstance(tokens, array) else array("i", tokens)


_PIECE = 512


def n_common(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences of tokens, or of characters."""
    n = 0
    while piece := first[n : n + _PIECE]:  # where both are of one type, a piece is compared at once
        other = second[n : n + _PIECE]
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(piece, other, strict=False))
        n_alike = len(piece) if piece == other else sum(1 for _ in alike)
        n += n_alike
        if n_alike < _PIECE:
            break
    return n


# ---- the target's hidden states along one sequence, from which a draft head continues ----

KEPT = 512
"""Most recent hidden states that are kept: a head was trained on texts hardly longer, and what it has not
read of a longer one is left out. 4 MB for a target of 1,536 elements."""
_ROOM = 128  # for more, so that they are moved rarely


class TargetFeatures:
    """The hidden states after the last norm at sequence indices `first` .. `end` - 1, without gaps."""

    def __init__(self, n_embd: int) -> None:
        """Keep rows of `n_embd` elements."""
        self.n_prompt: Callable[[], int] = int
        """Returns at how many tokens of a prompt's end states are wanted, asked as it is read; else 0."""
        self._rows = np.empty((KEPT + _ROOM, n_embd), np.float32)
        self.first = 0
        self._tokens: list[int] = []

    @property
    def end(self) -> int:
        """The index after the last one that is known."""
        return self.first + len(self._tokens)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start on the sequence `tokens`; keep the states of the prefix it shares with the one before."""
        del self._tokens[n_common(self._tokens, tokens[self.first :]) :]

    def set(self, at: int, tokens: Sequence[int], features: Features) -> None:
        """Set the states of `tokens`, at most KEPT, from index `at` on; drop those after them.

        If that leaves a gap, the states before it are dropped too.
        """
        if not self.first <= at <= self.end:
            self._tokens.clear()
        if not self._tokens:
            self.first = at
        del self._tokens[at - self.first :]
        if len(self._tokens) + len(tokens) > len(self._rows):  # rarely, since the others are moved
            n_first = len(self._tokens) + len(tokens) - KEPT
            del self._tokens[:n_first]
            self._rows[: len(self._tokens)] = self._rows[n_first : n_first + len(self._tokens)].copy()
            self.first += n_first
        n = len(self._tokens)
        self._rows[n : n + len(tokens)] = features
        self._tokens += tokens

    def rows(self, start: int, stop: int) -> Features:
        """Return the states at indices `start` .. `stop` - 1, all known, shape (stop - start, n_embd).

        A view, valid until the next `set`.
        """
        return self._rows[start - self.first : stop - self.first]
