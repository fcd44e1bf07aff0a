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

    # `dry_breakers`: sequences of tokens, each ended by -1; those that begin alike stand together.
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
        dry_multiplier: float,
        dry_base: float,
        dry_allowed_length: int,
        dry_penalty_last_n: int,
        dry_breakers: array[int],
        top_n_sigma: float,
        xtc_probability: float,
        xtc_threshold: float,
        dynatemp_range: float,
        dynatemp_exponent: float,
        seed: int,
        logit_bias: dict[int, float],
    ) -> Sampler: ...
    def sample(
        self,
        row: _Floats,
        prefix: _Ints | array[int],
        coin: float,
        slot: int,
        ids: _Ints | None = None,
        ratio: float = 1.0,
        /,
    ) -> int:
        """Filter `row` (float32, at most n_vocab) into `slot` (-1: the target's) and sample it.

        `prefix` (int32) is what precedes the position; penalties and DRY read it, XTC its length.
        `coin` is in [0, 1). With `ids` (int32, ascending) entry i of the row is that of token ids[i], and all
        others are impossible. `ratio` (above 0) multiplies the temperature: a draft's may be another one.
        """

    def adjusted(self, row: _Floats, prefix: _Ints | array[int], tokens: list[int], /) -> list[float]:
        """Return the logits of `tokens` after bias, penalties, DRY and top-n-sigma."""

    def set_probs(self, slot: int, probs: _Floats) -> None:
        """Give `slot` the probabilities `probs` (float32, by token id)."""

    def top(self, slot: int) -> int:
        """Return the likeliest token of `slot`, of equal ones that of the smallest id."""

    def draw(self, slot: int, coin: float) -> int:
        """Sample a token from `slot` as it stands, with `coin` in [0, 1)."""

    def likeliest(self, row: _Floats, k: int, ids: _Ints | None = None, /) -> list[tuple[int, float]]:
        """Return the `k` (1 to 16) likeliest tokens of `row` (float32, at most n_vocab), best first.

        Beside each stands the probability that the row itself, unfiltered, gives it. Tokens at -inf are
        left out. `ids` is as for `sample`.
        """

    def probs(self, slot: int, out: _Floats) -> None:
        """Write the probabilities of `slot` by token id into `out` (float32, n_vocab)."""

    def without(self, slot: int, token: int, into: int) -> None:
        """Make slot `into` what slot `slot` is without `token`, normalised: sampling without replacement.

        The two may be the same. Raises ArithmeticError, and leaves `into` alone, when nothing is left.
        """

    def verify(
        self,
        rows: _Floats,
        tokens: _Ints | array[int],
        parents: _Ints | array[int],
        slots: _Ints | array[int],
        prefix: _Ints | array[int],
        coins: list[float],
        block: bool,
        *,
        lenience: float = 1.0,
    ) -> tuple[list[int], int, list[tuple[int, float, float]]]:
        """Accept a path of a token tree and sample what follows it; returns (path, next_token, judged).

        `tokens`, `parents` and `slots` (int32) describe n nodes, at most n_slots, in depth-first order: a
        node's parent is the index of an earlier node, or -1 when it follows the timeline, and its slot holds
        the q that it was sampled from, or is -1 for a point mass. Siblings are tested in their order.
        `rows` are n + 1 rows of n_vocab target logits, the first after the timeline, row i + 1 after node i.
        `prefix` (int32) is what precedes the tree; the filters that read it go on along the path. `coins`
        are n + 1 numbers in [0, 1): one for each node, the last for the next token.

        `path` holds the accepted nodes, root to leaf. `judged` holds (node, p, q), in order, of each node
        whose parent was accepted (or is the timeline), up to the accepted one among siblings: p is the
        target's own probability of the token there, q that of its slot (1 for a point mass).

        What is emitted is distributed as the target alone would emit it, with two exceptions: if a sampled
        node was left out because of what it turned out to be, and with a `lenience` below 1 (above 0, with
        the chain rule only: Leviathan et al., arXiv 2211.17192, appendix). A token is then accepted with
        min(1, p / (lenience q)) and may come out up to 1 / lenience times as likely as the target makes it.
        """

    def outcome(
        self,
        rows: _Floats,
        tokens: _Ints | array[int],
        parents: _Ints | array[int],
        slots: _Ints | array[int],
        prefix: _Ints | array[int],
        block: bool,
        end: int,
        out: _Floats,
        *,
        lenience: float = 1.0,
    ) -> float:
        """Return the probability that `verify`'s path ends at node `end` (-1: that it is empty).

        Writes the distribution of the next token in that case into `out` (float32, n_vocab). Tests enumerate
        with it what coins can do.
        """

class SuffixStore:
    """The last `capacity` tokens (rounded up to a power of two) of all documents, and how they went on.

    Many documents may grow in turns: nothing is matched or proposed across them. A token of -1 also ends a
    document, so that many can be appended at once. Raises RuntimeError when two threads use it at once.
    """

    def __new__(cls, capacity: int) -> SuffixStore: ...
    def extend(self, tokens: _Ints | array[int], document: int = 0, /) -> int:
        """Append `tokens` (int32) to a document and return the position of its last token.

        That position names the document when it is extended again; 0 begins a new one. Raises ValueError,
        and appends nothing, with a token below -1 or a position at which no document ends.
        """

    def clear(self) -> None:
        """Forget all tokens; a document that is extended later goes on as a new one."""

    def propose(
        self, tail: _Ints | array[int], max: int, branches: int
    ) -> tuple[list[int], list[int], list[float]]:
        """Return how `tail` (int32) may go on: the tokens of a tree, their parents and probabilities.

        At most `max` tokens (0 to 32), the likeliest paths first, and at most `branches` (1 to 32) follow
        each; with 1 that is a chain. A parent is the index of the token before, and comes first; -1: `tail`.
        A probability is given all tokens before: between 0 and 1. Paths of less than 1/1024 are left out.
        `tail` may be the whole text; its last 32 tokens are read.
        """

    def check(self) -> bool:
        """Whether every invariant of suffix.h holds; takes a tenth of a second for 500,000 tokens."""

    @property
    def n_bytes(self) -> int:
        """Memory that the store takes: all of it from the start, 44 bytes a token of capacity."""

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

    @property
    def fd(self) -> int:
        """The descriptor."""

def coins(seed: int, first: int, n: int) -> list[float]:
    """Coins `first` .. `first + n - 1` of stream `seed`: numbers in [0, 1) (Philox 4x64-10)."""

def fnv1a(data: bytes, hash: int = ..., /) -> int:
    """Return the FNV-1a hash, 64 bits, of what `hash` is of (default: of nothing), followed by `data`."""

def multiply(matrix: npt.NDArray[np.uint8] | bytes, vectors: _Floats, out: _Floats) -> None:
    """Write a matrix of ggml's type Q8_0 times each of `vectors` into `out`.

    `vectors` is float32 (n, columns), columns a multiple of 32, `out` float32 (n, rows). Raises ValueError
    when the shapes do not fit together.
    """

def simd() -> str:
    """Name of the row kernels this CPU runs."""
