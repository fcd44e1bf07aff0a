"""A llama_context whose cache several timelines share, and its passes over pieces of them.

A piece may end with a tree of tokens, of which only the trunk stays. rollback.py takes tokens back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.batch import Batch, Branches, EmbeddingsFn, Inputs, Part, PassInput, find_branches
from edgespec.llama.context import create_context
from edgespec.llama.decode import Decoder
from edgespec.llama.outputs import Features, Outputs, Rows
from edgespec.llama.rollback import MAX_SEQUENCES, Cells, Coming, Rollback, RollbackSize, State, bytes_of
from edgespec.llama.states import States
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing

MAX_LEAVES = 32
"""Most leaves of the trees of a pass: the library keeps room for a row of logits for each."""

MAX_TIMELINES = MAX_SEQUENCES - MAX_LEAVES
"""Most timelines of a cache."""

_SEVERAL_POSITIONS = 8  # a bit of enum llama_rope_type: M-RoPE and its kin


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """How large a cache and its passes are."""

    n_ctx: int
    """Cells: tokens of all timelines together, what several share counted once."""
    n_batch: int = 512
    """Most tokens computed in one pass."""
    n_logits_max: int = 64
    """Most rows of logits of one pass; it sets the size of buffers."""
    n_timelines: int = 1
    rollback: RollbackSize = field(default_factory=RollbackSize)

    def __post_init__(self) -> None:
        if self.n_ctx < 1 or self.n_batch < 1 or self.n_logits_max < 1:
            raise ValueError("n_ctx, n_batch and n_logits_max must be at least 1")
        if not 1 <= self.n_timelines <= MAX_TIMELINES:
            raise ValueError(f"n_timelines {self.n_timelines}: must be 1 to {MAX_TIMELINES}")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one pass adds to one timeline; the fields are the arguments of `Session.eval`."""

    sequence: int
    tokens: Sequence[int]
    n_logits: int = 1
    parents: Sequence[int] | None = None
    inputs: Inputs | None = None


class Cache(Closing):
    """A context of a model and the timelines in its cache. A context manager.

    The library is always asked for the number of cached tokens: a second count could become wrong when Ctrl-C
    lands between two lines. A cache keeps its model alive. Two threads must not use it at once.
    """

    def __init__(
        self,
        model: Model,
        size: CacheSize,
        *,
        n_threads: int,
        embeddings: EmbeddingsFn | None = None,
        takes_inputs: bool = False,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Make a context; arguments as for `Session`.

        `takes_inputs`: each piece brings the rows that the first layer takes for its tokens.

        Raises EdgespecError if it cannot be created, the model cannot take embeddings, or cannot share its
        cache between timelines.
        """
        if n_threads < 1:
            raise ValueError("n_threads must be at least 1")
        self.model = model
        self.n_ctx = size.n_ctx
        self.n_batch = min(size.n_batch, size.n_ctx)
        self.n_logits_max = min(size.n_logits_max, self.n_batch)
        has_trees = model.can_rewind and not model.keeps_state
        self.max_leaves = max(1, min(MAX_LEAVES, self.n_logits_max - 1)) if has_trees else 1
        """Most leaves of the trees of a pass; 1: chains only."""
        self.n_timelines = size.n_timelines
        if self.n_timelines > 1 and not model.can_rewind:
            raise EdgespecError(
                f"{model.name} cannot hold several texts in one cache "
                f"(architecture {model.header.architecture}); ask for one at a time"
            )
        self._trees: Cells | None = None
        self._rollback: Rollback
        if model.keeps_state:
            self._rollback = _states(model, size, self.n_batch)
        else:
            self._rollback = self._trees = Cells(self.n_timelines, self.max_leaves)
        self.most_drafted = min(self.n_logits_max - 1, self._rollback.most_drafted or self.n_logits_max)
        """Most tokens of a pass that may be taken back after it."""
        has_several = llama.llama_model_rope_type(model.handle) & _SEVERAL_POSITIONS
        if embeddings and has_several and not model.takes_states:
            raise EdgespecError(
                f"{model.name} cannot take embeddings in place of tokens "
                f"(architecture {model.header.architecture})"
            )
        n_sequences = self.n_timelines + self._rollback.n_spare
        context = create_context(
            model,
            n_ctx=self.n_ctx,
            n_threads=n_threads,
            n_batch=self.n_batch,
            n_logits_max=self.n_logits_max,
            n_sequences=n_sequences,
            n_snapshots=self._rollback.n_snapshots,
        )
        # The finalizer's reference keeps the weights until the context that uses them is freed, even if the
        # garbage collector finds both unreachable at once.
        self._finalizer = weakref.finalize(self, _free, context, model)
        model.sessions.add(self)
        self._context = context
        self._decoder = Decoder(context, model, self._rollback, interrupt)
        self._rollback.attach(context, self._decoder.on_nodes)
        self._input = PassInput(
            self.n_batch,
            n_sequences,
            n_embd=model.n_input,
            embeddings=embeddings,
            takes_inputs=takes_inputs,
            with_tokens=model.takes_states,
            tokens_alone=model.takes_tokens_alone,
        )
        self._free_sequences = list(reversed(range(self.n_timelines)))
        self._outputs = Outputs(context, model, self.n_logits_max, self.n_batch)
        self.all_logits = model.hidden_states.all_logits
        """Whether a pass that leaves hidden states computes the logits of all of its tokens."""
        self.features: list[Features] = []
        """Of the last pass, for each piece those of its tokens; empty if it was made without.

        Valid until the next `eval` or `close`."""

    # ---- timelines ----

    @property
    def n_open(self) -> int:
        """Timelines in use."""
        return self.n_timelines - len(self._free_sequences)

    def take(self) -> int:
        """Return the number of an empty timeline, which is in use until `release`."""
        return self._free_sequences.pop()

    def release(self, sequence: int) -> None:
        """Empty a timeline and let others use its number."""
        if self._finalizer.alive:
            self.cut(sequence, 0)
        self._free_sequences.append(sequence)

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens in a timeline."""
        self.require_open()
        return self._rollback.n_past(sequence)

    @property
    def context(self) -> llama.llama_context_p:
        """The library's pointer, for what this class does not do."""
        self.require_open()
        return self._context

    @property
    def rollback(self) -> Rollback:
        """What takes tokens of its timelines back."""
        self.require_open()
        return self._rollback

    def cut(self, sequence: int, n_keep: int) -> int:
        """Cut a timeline back to `n_keep` tokens, or to the most below that can be had; return how many."""
        return self._rollback.cut(sequence, n_keep)

    def clear(self) -> None:
        """Empty all timelines."""
        self.require_open()
        self._rollback.clear()

    # ---- passes ----

    def eval(self, pieces: Sequence[Piece], *, with_features: bool = False) -> list[Rows]:
        """Append each piece to its timeline in one pass; return the logits of each, as `Session.eval` does.

        The rows are valid until the next `eval` or `close`. Only a piece that comes alone may have more than
        `n_batch` tokens: it takes several passes. `with_features` leaves the hidden states of all tokens in
        `features`; with `all_logits` they count as rows of logits, of which there are at most `n_logits_max`
        (edgespec's kernels compute only those that are wanted of a piece that comes alone).
        A failed or interrupted pass leaves all timelines as they were before the call; of a model that keeps
        a state one may also end with tokens of its piece before the tree, or become empty. Raises CacheFull,
        EdgespecError if the model has no hidden states to give, and as `Session.eval`.
        """
        branches = [self._branches(piece) for piece in pieces]
        before = [self.n_past(piece.sequence) for piece in pieces]
        n_tokens = sum(len(piece.tokens) for piece in pieces)
        self._outputs.ask(with_features=with_features)
        n_outputs = sum(self._n_outputs(piece) for piece in pieces)
        if n_outputs > self.n_logits_max or (len(pieces) > 1 and n_tokens > self.n_batch):
            raise ValueError(f"a pass of {n_tokens} tokens and {n_outputs} rows of logits")
        backend.clear_log()
        coming = [_coming(piece, n_past) for piece, n_past in zip(pieces, before, strict=True)]
        self._rollback.begin(coming)
        self.features = []
        try:
            if len(pieces) > 1:
                self._decode_parts(pieces, branches, before)
                last = list(pieces)
            else:
                last = [self._decode_alone(pieces[0], branches[0], before[0])]
        except BaseException:
            self._rollback.undo(coming)
            raise
        ends = list(accumulate(self._n_outputs(piece) for piece in last))
        rows = self._outputs.rows(ends[-1])
        if self.features:
            self._gather_features(last[0])
        elif with_features:
            self.features = self._outputs.features([len(piece.tokens) for piece in pieces])
        return [rows[end - piece.n_logits : end] for piece, end in zip(last, ends, strict=True)]

    def _gather_features(self, part: Piece) -> None:
        """Add those of a pass over a part of a piece to `features`: the next pass overwrites them."""
        found = self._outputs.features([len(part.tokens)])
        self.features = [np.concatenate([*self.features, *found])]

    def _branches(self, piece: Piece) -> Branches | None:
        """Check the tree that a piece ends with and return it; None for a chain."""
        if not 0 <= piece.n_logits <= min(len(piece.tokens), self.n_logits_max):
            raise ValueError(
                f"n_logits {piece.n_logits} with {len(piece.tokens)} tokens, n_logits_max {self.n_logits_max}"
            )
        if piece.parents is None:
            return None
        nodes = list(map(int, piece.parents))
        if piece.n_logits != len(nodes) + 1:
            raise ValueError(f"n_logits {piece.n_logits} with a tree of {len(nodes)} nodes")
        if nodes == list(range(-1, len(nodes) - 1)):
            return None
        branches = find_branches(nodes)
        if self.max_leaves == 1:
            raise EdgespecError(
                f"{self.model.name} cannot evaluate branches (architecture {self.model.header.architecture})"
            )
        if branches.n_leaves > self.max_leaves:
            raise ValueError(f"a tree of {branches.n_leaves} leaves, max_leaves {self.max_leaves}")
        return branches

    def _decode_alone(self, piece: Piece, branches: Branches | None, n_past: int) -> Piece:
        """Decode one piece, in several passes if it is longer than one; return what was in the last."""
        tokens, start, part = piece.tokens, 0, piece
        while start < len(tokens):
            if start and self._outputs.with_features:
                self._gather_features(part)
            left = len(tokens) - start
            n = min(self.n_batch, self._rollback.stop_before(piece.sequence, n_past + start, left))
            if n < left:
                # Leave all tokens whose logits are wanted to the last pass.
                n = min(n, left - piece.n_logits) or left
            last = start + n == len(tokens)
            inputs = None if piece.inputs is None else piece.inputs[start : start + n]
            part = Piece(
                piece.sequence, tokens[start : start + n], piece.n_logits if last else 0, inputs=inputs
            )
            if piece.sequence == 0 and not (last and branches):
                self._begin_pass([_coming(part, n_past + start)])
                self._decode(self._input.chain, part, self._n_outputs(part))
            else:
                self._decode_parts([part], [branches if last else None], [n_past + start])
            start += n
        return part

    def _decode_parts(
        self, pieces: Sequence[Piece], branches: Sequence[Branches | None], n_past: Sequence[int]
    ) -> None:
        """Decode pieces that fit in one pass, and drop all of their trees but the trunks."""
        parts: list[Part] = []
        n_sides = 0
        for piece, tree, n in zip(pieces, branches, n_past, strict=True):
            sequences = [piece.sequence]
            if tree and self._trees:
                sides = range(n_sides, n_sides + tree.n_leaves - 1)
                sequences += [self._trees.side(piece.sequence, i, n) for i in sides]
                n_sides = sides.stop
            parts.append(Part(sequences, n, len(piece.tokens), self._n_outputs(piece), tree))
        self._input.parts.lay_out(parts)
        self._begin_pass([_coming(piece, n) for piece, n in zip(pieces, n_past, strict=True)])
        joined = pieces[0] if len(pieces) == 1 else _joined(pieces)
        self._decode(self._input.parts, joined, sum(part.n_logits for part in parts))
        if self._trees and n_sides:
            for part in parts:
                n_before = part.n_tokens - (len(part.branches.depths) if part.branches else 0)
                self._trees.drop_tree(part.sequences[1:], part.n_past + n_before)
            self._trees.end_trees()

    def _n_outputs(self, piece: Piece) -> int:
        """Return of how many of a piece's tokens the library computes the logits."""
        return len(piece.tokens) if self._outputs.all_logits else piece.n_logits

    def _begin_pass(self, coming: Sequence[Coming]) -> None:
        self._decoder.listen(self._rollback.begin_pass(coming))

    def _decode(self, batch: Batch, piece: Piece, n_outputs: int) -> None:
        """Make a pass over `piece`, for logits of its last `n_outputs` tokens, or of those laid out."""
        laid_out = batch is not self._input.chain
        self._input.fill(batch, piece.tokens, None if laid_out else n_outputs, piece.inputs)
        n_wanted = piece.n_logits if self._outputs.all_logits else n_outputs
        self._decoder.decode(batch, len(piece.tokens), n_outputs=n_outputs, n_wanted=n_wanted)

    # ---- copies ----

    def state_bytes(self, sequence: int) -> int:
        """Return the size in bytes of what `state` would return now."""
        self.require_open()
        return int(llama.llama_state_seq_get_size(self._context, sequence))

    def state(self, sequence: int) -> State:
        """Return a copy of a timeline's cache."""
        size = self.state_bytes(sequence)
        state: State = np.empty(size, np.uint8)
        with self._decoder.on_nodes():
            n = llama.llama_state_seq_get_data(self._context, bytes_of(state), size, sequence)
        if n != size:
            raise EdgespecError(f"{self.model.path}: llama.cpp copied {n} of {size} bytes of the cache")
        return state

    def restore(self, sequence: int, state: State) -> bool:
        """Put a copied cache into an empty timeline; return whether the library could."""
        with self._decoder.on_nodes():
            n = llama.llama_state_seq_set_data(self._context, bytes_of(state), state.nbytes, sequence)
        return bool(n == state.nbytes)

    def close(self) -> None:
        """Free the cache and the buffers; a second call does nothing. Rows become invalid."""
        self._finalizer()

    def require_open(self) -> None:
        """Raise EdgespecError if the cache is closed."""
        if not self._finalizer.alive:
            raise EdgespecError(f"{self.model.path}: the session is closed")


def _states(model: Model, size: CacheSize, n_batch: int) -> States:
    """Return how tokens are taken back on a model that keeps a state, in passes of up to `n_batch` tokens."""
    # The library wants room in a pass for a token more than snapshots reach.
    wanted = replace(size.rollback, n_snapshots=max(0, min(size.rollback.n_snapshots, n_batch - 2)))
    return States(size.n_timelines, wanted, has_snapshots=model.header.has_snapshots)


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Return pieces as one, all of whose logits are wanted."""
    tokens = [token for piece in pieces for token in piece.tokens]
    given = [piece.inputs for piece in pieces if piece.inputs is not None]
    return Piece(-1, tokens, len(tokens), inputs=np.concatenate(given) if given else None)


def _coming(piece: Piece, n_past: int) -> Coming:
    """Return what `piece` will add to a timeline of `n_past` tokens."""
    return Coming(piece.sequence, n_past, len(piece.tokens), max(0, piece.n_logits - 1))


def _free(context: llama.llama_context_p, _model: Model) -> None:
    llama.llama_free(context)
