"""The sessions that the loops run: what a model along one sequence of tokens has to do, and its passes.

llama.cpp's (llama/session.py) and Whisper's (speech/session.py) are such sessions, and toys in tests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.float32]
"""Logits, shape (n_logits, n_vocab), C-contiguous: a view on the library's buffer."""

Features: TypeAlias = npt.NDArray[np.float32]
"""Hidden states, shape (n_tokens, n_states): of one layer a view on the library's buffer."""

Inputs: TypeAlias = npt.NDArray[np.float32]
"""Rows that the first layer takes for the tokens of one sequence, shape (n_tokens, n_embd)."""


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
    with_features: bool = False
    """Whether the hidden states of the tokens are wanted."""
    with_last_states: bool = False
    """Whether those of the tokens with logits are, if edgespec's kernels leave them for nothing."""
    n_past: int = 0
    """Tokens of the sequence before these."""
    branches: Branches | None = None
    """The tree, where it is not a chain."""
    leaves: Sequence[int] = ()
    """Spare sequences of the tree's leaves, but for the trunk's."""

    @property
    def n_drafted(self) -> int:
        """Tokens at the end that may be taken back."""
        return max(0, self.n_logits - 1)

    @property
    def n_chain(self) -> int:
        """Tokens before the tree, each of which follows the one before it."""
        return len(self.tokens) - (len(self.branches.depths) if self.branches else 0)

    def section(self, start: int, n: int) -> SequenceTokens:
        """Return the `n` tokens from `start` on, for a pass of their own; a tree stays whole, in the last."""
        ends = start + n == len(self.tokens)
        inputs = None if self.inputs is None else self.inputs[start : start + n]
        return SequenceTokens(
            self.sequence,
            self.tokens[start : start + n],
            self.n_logits if ends else 0,
            inputs=inputs,
            with_features=self.with_features,
            with_last_states=self.with_last_states,
            n_past=self.n_past + start,
            branches=self.branches if ends else None,
        )


@dataclass(frozen=True, slots=True)
class ForwardResult:
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
        """Return the result with copies of its rows and features, which the next pass leaves as they are."""
        features = None if self.features is None else self.features.copy()
        return replace(self, rows=self.rows.copy(), features=features)


class SessionModel(Protocol):
    """A model as sessions know it: vocabulary, end tokens, name."""

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
        """Whether it keeps a state, which takes tokens back only to some places."""

    @property
    def leaves_last_states(self) -> bool:
        """Whether its passes leave the hidden states of tokens with logits for nothing."""

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a text."""

    def sequence_breakers(self, texts: tuple[str, ...], /) -> array[int]:
        """Return the tokens that hold one of `texts`, or begin it, as `_core.Sampler` takes them (DRY)."""


class SessionCache(Protocol):
    """The cache in which a session has its sequence, alone or with others."""

    def forward(self, parts: Sequence[SequenceTokens]) -> Sequence[ForwardResult]:
        """Append the tokens of each part to its sequence; return a result for each."""


class ModelSession(Protocol):
    """A model along one sequence of tokens, which grows and can be cut back."""

    @property
    def model(self) -> SessionModel:
        """The model whose passes it makes."""

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

    @property
    def n_logits_max(self) -> int:
        """Most rows of logits of a pass."""

    @property
    def n_features_max(self) -> int:
        """Most tokens of a pass that leaves hidden states."""

    @property
    def most_drafted(self) -> int:
        """Most tokens of a pass that may be taken back after it."""

    @property
    def all_logits(self) -> bool:
        """Whether a pass that leaves hidden states computes the logits of all of its tokens."""

    def rewind(self, n_keep: int, /) -> int:
        """Cut the sequence back to its first `n_keep` tokens; return how many are left, maybe fewer."""


def as_ints(tokens: Sequence[int]) -> array[int]:
    """Return `tokens` as C ints, themselves if they are; then many comparisons copy them once."""
    return tokens if isinstance(tokens, array) else array("i", tokens)


_PIECE = 512


def n_common(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of tokens, or of characters, with which both sequences begin."""
    n = 0
    while piece := first[n : n + _PIECE]:  # where both are of one type, a piece is compared at once
        other = second[n : n + _PIECE]
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(piece, other, strict=False))
        n_alike = len(piece) if piece == other else sum(1 for _ in alike)
        n += n_alike
        if n_alike < _PIECE:
            break
    return n
