"""The C core over logits. Arrays are used in place: C-contiguous float32 or int32 buffers.

`Sampler` is a pure function of its arguments but for its slots, which hold the draft's
distributions q from `sample` to `verify`. It raises ArithmeticError when logits are not finite,
ValueError for a length or index it was not made for, RuntimeError when two threads use it at once.
"""

from array import array

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

class Sampler:
    """Filters, samples and verifies over one vocabulary of `n_vocab` tokens."""

    def __new__(
        cls,
        n_vocab: int,
        n_slots: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        typical_p: float,
        penalty_last_n: int,
        repeat_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        logit_bias: dict[int, float],
    ) -> Sampler: ...
    def sample(self, row: _Floats, prefix: _Ints, coin: float, slot: int) -> int:
        """Filter `row` (float32, at most n_vocab) into `slot` (-1: the target's) and sample it.

        `prefix` (int32) is what precedes the position; the penalties read it. `coin` is in [0, 1).
        """

    def set_probs(self, slot: int, probs: _Floats) -> None:
        """Give `slot` the probabilities `probs` (float32, by token id)."""

    def set_point(self, slot: int, token: int) -> None:
        """Give `slot` the point mass on `token`: a deterministic proposal."""

    def top(self, slot: int) -> int:
        """Return the likeliest token of `slot`, of equal ones that of the smallest id."""

    def confidence(self, row: _Floats) -> float:
        """Return the probability that `row` itself (float32, at most n_vocab), unfiltered, gives its top."""

    def probs(self, slot: int, out: _Floats) -> None:
        """Write the probabilities of `slot` by token id into `out` (float32, n_vocab)."""

    def verify(
        self, rows: _Floats, draft: _Ints, prefix: _Ints, coins: list[float], block: bool
    ) -> tuple[int, int, list[tuple[float, float]]]:
        """Accept or resample the n tokens of `draft` (int32); returns (n_accepted, next_token, judged).

        `judged` holds (p, q) of the accepted tokens and of the first one that was not.

        `rows` are n + 1 rows of n_vocab target logits, `prefix` (int32) ends with the draft itself,
        `coins` are n + 1 numbers in [0, 1). q of draft[i] stands in slot i.
        """

    def acceptance(
        self, rows: _Floats, draft: _Ints, prefix: _Ints, block: bool
    ) -> tuple[list[float], list[float]]:
        """Return the probability of each of the n coins, and the n + 1 residual weights."""

    def next_probs(
        self, rows: _Floats, draft: _Ints, prefix: _Ints, tau: int, weight: float, out: _Floats
    ) -> None:
        """Write the distribution of the token after `tau` accepted ones into `out` (n_vocab)."""

class SuffixStore:
    """The last `capacity` tokens (rounded up to a power of two) of a stream, and how they went on.

    A token of -1 ends a document: nothing is matched or proposed across it. Raises RuntimeError when two
    threads use it at once.
    """

    def __new__(cls, capacity: int) -> SuffixStore: ...
    def extend(self, tokens: _Ints | array[int]) -> None:
        """Append `tokens` (int32); with one below -1 raise ValueError and append none."""

    def propose(self, tail: _Ints | array[int], max: int) -> tuple[list[int], list[float]]:
        """Return the likeliest continuation of `tail` (int32), at most `max` (0 to 32) tokens.

        Beside them stands the probability of each, given those before it: between 0 and 1. `tail` may be
        the whole text; its last 32 tokens are read.
        """

    def check(self) -> bool:
        """Whether every invariant of suffix.h holds; takes a tenth of a second for 500,000 tokens."""

    @property
    def n_bytes(self) -> int:
        """Memory that the store takes: all of it from the start, 36 bytes a token of capacity."""

    def __len__(self) -> int:
        """Tokens remembered."""

class Interrupt:
    """A ggml_abort_callback that answers true once descriptor `fd` is readable."""

    def __new__(cls, fd: int) -> Interrupt: ...
    @property
    def callback(self) -> int:
        """Address of the C callback."""

    @property
    def data(self) -> int:
        """Address of its data, valid while this object lives."""

def coins(seed: int, first: int, n: int) -> list[float]:
    """Coins `first` .. `first + n - 1` of stream `seed`: numbers in [0, 1) (Philox 4x64-10)."""

def simd() -> str:
    """Name of the row kernels this CPU runs."""
