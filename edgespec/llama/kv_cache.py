"""A llama_context whose KV cache several sequences share, and its forward passes over tokens of them.

A tree of tokens may end those of a sequence; only its trunk stays. rollback.py takes tokens back.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec._core import Interrupt
from edgespec.decoding.session import Branches, Features, ForwardResult, Inputs, SequenceTokens, n_common
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.batch import Batch, EmbeddingsFn, PassInput, find_branches
from edgespec.llama.choices import CacheType
from edgespec.llama.hidden_states import Outputs
from edgespec.llama.rollback import MAX_SEQUENCES, Cells, Rollback, RollbackSize, State, bytes_of
from edgespec.llama.states import States
from edgespec.platform.closing import Closing
from edgespec.platform.processes import HomeProcess, finalize

if TYPE_CHECKING:
    from edgespec.llama.weights import Model

MAX_LEAVES = 32
"""Most leaves of the trees of a pass: the library keeps room for a row of logits for each."""

MAX_SEQUENCES_OPEN = MAX_SEQUENCES - MAX_LEAVES
"""Most sequences of a cache."""

_SEVERAL_POSITIONS = 8  # a bit of enum llama_rope_type: M-RoPE and its kin


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSize:
    """How large a cache and its passes are."""

    n_ctx: int
    """Cells: tokens of all sequences together, what several share counted once."""
    n_batch: int = 512
    """Most tokens computed in one pass."""
    n_logits_max: int = 64
    """Most rows of logits of one pass; it sets the size of buffers."""
    n_sequences: int = 1
    rollback: RollbackSize = field(default_factory=RollbackSize)

    def __post_init__(self) -> None:
        if self.n_ctx < 1 or self.n_batch < 1 or self.n_logits_max < 1:
            raise ValueError("n_ctx, n_batch and n_logits_max must be at least 1")
        if not 1 <= self.n_sequences <= MAX_SEQUENCES_OPEN:
            raise ValueError(f"n_sequences {self.n_sequences}: must be 1 to {MAX_SEQUENCES_OPEN}")


class KVCache(Closing):
    """A context of a model and the sequences in its cache. A context manager.

    The library is always asked for the number of cached tokens: a second count could become wrong when Ctrl-C
    lands between two lines. A cache keeps its model alive. Two threads must not use it at once.
    """

    def __init__(
        self,
        model: Model,
        size: KVCacheSize,
        *,
        n_threads: int,
        embeddings: EmbeddingsFn | None = None,
        takes_inputs: bool = False,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Make a context; arguments as for `Session`.

        `takes_inputs`: each part of a pass brings the rows that the first layer takes for its tokens.
        Raises EdgespecError if it cannot be created, the model cannot take embeddings, or cannot share its
        cache between sequences.
        """
        self.model, self.interrupt = model, interrupt
        self.n_ctx = size.n_ctx
        self.n_batch = min(size.n_batch, size.n_ctx)
        self.n_logits_max = min(size.n_logits_max, self.n_batch)
        has_trees = model.can_rewind and not model.keeps_state
        self.max_leaves = max(1, min(MAX_LEAVES, self.n_logits_max - 1)) if has_trees else 1
        """Most leaves of the trees of a pass; 1: chains only."""
        self.n_sequences = size.n_sequences
        _check_model(model, self.n_sequences, takes_embeddings=embeddings is not None)
        self._trees = None if model.keeps_state else Cells(self.n_sequences, self.max_leaves)
        self._rollback: Rollback = self._trees or _states(model, size, self.n_batch)
        self.most_drafted = min(self.n_logits_max - 1, self._rollback.most_drafted or self.n_logits_max)
        """Most tokens of a pass that may be taken back after it."""
        n_sequences = self.n_sequences + self._rollback.n_spare
        context = self._make_context(n_threads, n_sequences)
        # The finalizer's reference keeps the weights until the context that uses them is freed, even if the
        # garbage collector finds both unreachable at once.
        self._finalizer = finalize(self, _free, context, model)
        model.sessions.add(self)
        self._context, self._home = context, HomeProcess("the session")
        self._decoder = Decoder(context, model, self._rollback, interrupt)
        self._rollback.attach(context)
        self._input = PassInput(
            self.n_batch,
            n_sequences,
            n_embd=model.n_input,
            embeddings=embeddings,
            takes_inputs=takes_inputs,
            with_tokens=model.takes_states,
            tokens_alone=model.takes_tokens_alone,
        )
        self._free_sequences = list(reversed(range(self.n_sequences)))
        self._outputs = Outputs(context, model, self.n_logits_max, self.n_batch)
        self.all_logits = model.hidden_states.all_logits
        """Whether a pass that leaves hidden states computes the logits of all of its tokens."""
        self._written: list[array[int]] = [array("i") for _ in range(self.n_sequences)]
        self._n_ctx_of = [self.n_ctx] * self.n_sequences
        # How many of their first tokens two sequences have in the same cells, at most: `n_cells` says more.
        self._shared = [[0] * self.n_sequences for _ in range(self.n_sequences)]

    def _make_context(self, n_threads: int, n_sequences: int) -> llama.llama_context_p:
        return create_context(
            self.model,
            n_ctx=self.n_ctx,
            n_threads=n_threads,
            n_batch=self.n_batch,
            n_logits_max=self.n_logits_max,
            n_sequences=n_sequences,
            n_snapshots=self._rollback.n_snapshots,
        )

    # ---- sequences ----

    @property
    def n_open(self) -> int:
        """Sequences that sessions use now."""
        return self.n_sequences - len(self._free_sequences)

    def take(self, n_ctx: int | None = None) -> int:
        """Return the number of an empty sequence of up to `n_ctx` tokens, in use until `release`."""
        sequence = self._free_sequences.pop()
        self._n_ctx_of[sequence] = n_ctx or self.n_ctx
        self._written[sequence] = array("i")
        return sequence

    def release(self, sequence: int) -> None:
        """Empty a sequence and let others use its number."""
        if self._finalizer.alive:
            self.cut(sequence, 0)
        self._free_sequences.append(sequence)

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""
        self.require_open()
        return self._rollback.n_past(sequence)

    def n_held(self, sequence: int) -> int:
        """Return how many of a sequence's tokens have cells: fewer than all after `drop_first`."""
        return self.n_past(sequence) - self._rollback.n_dropped(sequence)

    def drop_first(self, sequence: int, n_tokens: int) -> bool:
        """Free the cells of the first `n_tokens` of more; return whether the model allows it."""
        self._part(sequence, 0)
        return self._rollback.drop_first(sequence, n_tokens)

    def tokens(self, sequence: int) -> list[int]:
        """Return the tokens of a sequence."""
        return self.written(sequence).tolist()

    def written(self, sequence: int) -> array[int]:
        """Return the tokens of a sequence as C ints, a hundred times as fast as `tokens`."""
        return self._written[sequence][: self.n_past(sequence)]

    def n_same(self, sequence: int, tokens: array[int]) -> int:
        """Return how many of `tokens` a sequence begins with; it is compared in place."""
        return min(n_common(self._written[sequence], tokens), self.n_past(sequence))

    def set_tokens(self, sequence: int, tokens: Sequence[int]) -> None:
        """Note which tokens are put into a sequence otherwise than by a pass."""
        self._part(sequence, 0)
        self._written[sequence] = array("i", tokens)

    def share(self, source: int, sequence: int, n_tokens: int) -> None:
        """Begin an empty sequence with the first `n_tokens` of `source`, or fewer, in the same cells.

        Fewer if the model keeps states and has none after `n_tokens` tokens.
        """
        n = self._rollback.share(source, sequence, n_tokens)
        self.set_tokens(sequence, self._written[source][:n])
        row = [min(n, both) for both in self._shared[source]]
        row[source], row[sequence] = n, 0
        self._shared[sequence] = row
        for other, both in enumerate(row):
            self._shared[other][sequence] = both

    def _part(self, sequence: int, n_tokens: int) -> None:
        """Note that what follows the first `n_tokens` of a sequence is in no other's cells."""
        row = self._shared[sequence]
        if max(row) > n_tokens:
            row[:] = [min(n_tokens, both) for both in row]
            for other, both in enumerate(row):
                self._shared[other][sequence] = both

    def n_shared(self, sequence: int, other: int) -> int:
        """Return how many tokens of two sequences are in the same cells; they are the first of both."""
        return min(self._shared[sequence][other], self.n_past(sequence), self.n_past(other))

    def n_cells(self, sequences: Iterable[int]) -> int:
        """Return how many cells these sequences have; one that several share is counted once."""
        lengths: dict[int, int] = {}
        n_cells = 0
        for sequence in sequences:
            n_held, row = self.n_held(sequence), self._shared[sequence]
            most = max((min(row[other], n) for other, n in lengths.items()), default=0)
            lengths[sequence] = n_held
            n_cells += max(0, n_held - most)
        return n_cells

    @property
    def context(self) -> llama.llama_context_p:
        """The library's pointer, for what this class does not do."""
        self.require_open()
        return self._context

    @property
    def rollback(self) -> Rollback:
        """The part of the cache that takes tokens of sequences back."""
        self.require_open()
        return self._rollback

    def cut(self, sequence: int, n_keep: int) -> int:
        """Cut a sequence back to `n_keep` tokens, or to the next possible number below; return how many."""
        return self._rollback.cut(sequence, n_keep)

    def clear(self) -> None:
        """Empty all sequences; sessions stay open."""
        self.require_open()
        self._rollback.clear()

    # ---- passes ----

    def forward(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        """Append each part to its sequence in one pass; return what `Session.eval` does, for each.

        The rows are valid until the next pass or `close`. Only a part that comes alone may have more than
        `n_batch` tokens: it takes several passes. Hidden states are left of all tokens if one part wants
        them; with `all_logits` these count as rows of logits, of which there are at most `n_logits_max`
        (edgespec's kernels compute only those that are wanted of a part that comes alone).
        A failed or interrupted pass leaves all sequences as they were before the call; of a model that keeps
        a state one may also end with tokens of its part before the tree, or become empty. Raises CacheFull,
        EdgespecError if the model has no hidden states to give, and as `Session.eval`.
        """
        started = time.perf_counter()
        with_features = any(part.with_features for part in parts)
        for part in parts:
            self._prepare(part)
        self._outputs.ask(with_features=with_features)
        n_tokens = sum(len(part.tokens) for part in parts)
        n_outputs = sum(self._n_outputs(part) for part in parts)
        if n_outputs > self.n_logits_max or (len(parts) > 1 and n_tokens > self.n_batch):
            raise ValueError(f"a pass of {n_tokens} tokens and {n_outputs} rows of logits")
        backend.clear_log()
        self._rollback.begin(parts)
        last = parts
        earlier: list[Features] = []
        try:
            for i, sections in enumerate([parts] if len(parts) > 1 else self._sections(parts[0])):
                if i and with_features:  # the next pass overwrites them
                    earlier.append(self._features(last)[0].copy())
                self._decode(sections)
                last = sections
        except BaseException:
            self._rollback.undo(parts)
            raise
        ends = list(accumulate(self._n_outputs(part) for part in last))
        rows = self._outputs.rows(ends[-1])
        features = self._features(last) if with_features else []
        if not with_features and any(part.with_last_states for part in last):
            features = self._last_states(last, ends)
        if earlier:
            features = [np.concatenate([*earlier, *features])]
        seconds = time.perf_counter() - started
        return [
            ForwardResult(
                rows[ends[i] - part.n_logits : ends[i]], seconds, n_tokens, features[i] if features else None
            )
            for i, part in enumerate(last)
        ]

    def _features(self, parts: Sequence[SequenceTokens]) -> list[Features]:
        return self._outputs.features([len(part.tokens) for part in parts])

    def _last_states(self, parts: Sequence[SequenceTokens], ends: Sequence[int]) -> list[Features]:
        """Return the states of tokens with logits, which end at the rows `ends`; empty if there are none."""
        states = self._outputs.last_states(ends[-1])
        return (
            []
            if states is None
            else [states[end - part.n_logits : end] for part, end in zip(parts, ends, strict=True)]
        )

    def _prepare(self, part: SequenceTokens) -> None:
        """Check a part and note its place, its tree and its tokens."""
        n_past, n_tokens = self.n_past(part.sequence), len(part.tokens)
        if (n_held := self.n_held(part.sequence)) + n_tokens > self._n_ctx_of[part.sequence]:
            raise EdgespecError(
                f"the context is full: {n_held} tokens and {n_tokens} more do not fit in "
                f"{self._n_ctx_of[part.sequence]}; choose a larger context"
            )
        if not 0 <= part.n_logits <= min(n_tokens, self.n_logits_max):
            raise ValueError(
                f"n_logits {part.n_logits} with {n_tokens} tokens, n_logits_max {self.n_logits_max}"
            )
        part.n_past = n_past
        part.branches = None if part.parents is None else self._branches(part.parents, part.n_logits)
        self._note(part.sequence, n_past, part.tokens)  # of a tree the trunk is first; `tokens` cuts

    def _note(self, sequence: int, n_past: int, tokens: Sequence[int]) -> None:
        """Note what follows the first `n_past` tokens of a sequence; what was taken back is written anew."""
        self._part(sequence, n_past)
        written = self._written[sequence]
        del written[n_past:]
        written.extend(tokens)

    def _branches(self, parents: Sequence[int], n_logits: int) -> Branches | None:
        """Return a tree whose parents are these; None for a chain."""
        n_nodes = len(parents)
        if n_logits != n_nodes + 1:
            raise ValueError(f"n_logits {n_logits} with a tree of {n_nodes} nodes")
        if list(parents) == list(range(-1, n_nodes - 1)):
            return None
        branches = find_branches(parents)
        if self.max_leaves == 1:
            raise EdgespecError(
                f"{self.model.name} cannot evaluate branches (architecture {self.model.header.architecture})"
            )
        if branches.n_leaves > self.max_leaves:
            raise ValueError(f"a tree of {branches.n_leaves} leaves, max_leaves {self.max_leaves}")
        return branches

    def _sections(self, part: SequenceTokens) -> Iterator[list[SequenceTokens]]:
        """Yield the part of each pass, of a part of more than `n_batch` tokens that comes alone."""
        start, n_tokens = 0, len(part.tokens)
        while start < n_tokens:
            left = n_tokens - start
            n = min(self.n_batch, self._rollback.stop_before(part.sequence, part.n_past + start, left))
            if n < left:
                # Leave all tokens whose logits are wanted to the last pass.
                n = min(n, left - part.n_logits) or left
            yield [part if n == n_tokens else part.section(start, n)]
            start += n

    def _decode(self, parts: Sequence[SequenceTokens]) -> None:
        """Decode parts that fit in one pass, and drop all of their trees but the trunks."""
        first, batch, n_sides = parts[0], self._input.chain, 0
        if len(parts) == 1 and first.sequence == 0 and not first.branches:
            n_outputs = self._n_outputs(first)
            self._input.fill(batch, first.tokens, n_outputs, first.inputs)
        else:
            n_sides = self._share_with_leaves(parts)
            batch = self._input.parts
            n_outputs = self._input.parts.lay_out(parts, all_logits=self._outputs.all_logits)
            tokens, inputs = _joined(parts)
            self._input.fill(batch, tokens, None, inputs)
        n_wanted = first.n_logits if len(parts) == 1 else n_outputs
        self._decoder.listen(self._rollback.begin_pass(parts))
        with self._outputs.keeping(parts):
            self._decoder.decode(batch, int(batch.struct.n_tokens), n_outputs=n_outputs, n_wanted=n_wanted)
        if self._trees and n_sides:
            for part in parts:
                self._trees.drop_tree(part.leaves, part.n_past + part.n_chain)
            self._trees.end_trees()

    def _share_with_leaves(self, parts: Sequence[SequenceTokens]) -> int:
        """Give each tree a spare sequence for each leaf but the trunk's; return how many are in use."""
        n_sides = 0
        for part in parts:
            part.leaves = ()
            if part.branches and self._trees:
                sides = range(n_sides, n_sides + part.branches.n_leaves - 1)
                part.leaves = [self._trees.side(part.sequence, i, part.n_past) for i in sides]
                n_sides = sides.stop
        return n_sides

    def _n_outputs(self, part: SequenceTokens) -> int:
        return len(part.tokens) if self._outputs.all_logits else part.n_logits

    # ---- copies ----

    def state_bytes(self, sequence: int) -> int:
        """Return the size in bytes of what `state` would return now."""
        self.require_open()
        return int(llama.llama_state_seq_get_size(self._context, sequence))

    def state(self, sequence: int) -> State:
        """Return a copy of a sequence's cache."""
        size = self.state_bytes(sequence)
        state: State = np.empty(size, np.uint8)
        n = llama.llama_state_seq_get_data(self._context, bytes_of(state), size, sequence)
        if n != size:
            raise EdgespecError(f"{self.model.path}: llama.cpp copied {n} of {size} bytes of the cache")
        return state

    def restore(self, sequence: int, state: State) -> bool:
        """Put a copied cache into an empty sequence; return whether the library could."""
        n = llama.llama_state_seq_set_data(self._context, bytes_of(state), state.nbytes, sequence)
        return bool(n == state.nbytes)

    @property
    def has_parts(self) -> bool:
        """Whether the cells of some of a sequence's tokens can be copied by themselves."""
        has_window = llama.llama_model_n_swa(self.model.handle) > 0
        return self._trees is not None and self._trees.n_spare > 0 and not has_window

    def part(self, sequence: int, start: int, stop: int) -> State:
        """Return a copy of the cells of a sequence's tokens `start` .. `stop` - 1; needs `has_parts`."""
        assert self._trees  # noqa: S101 - for the type checker
        with self._trees.lent(sequence, start, stop) as part:
            return self.state(part)

    def add_part(self, sequence: int, state: State, start: int, tokens: Sequence[int]) -> bool:
        """Append a copy of the cells of `tokens`, from index `start` on, except those that it has.

        Returns whether the library could; if not, the sequence is as before.
        """
        assert self._trees  # noqa: S101 - for the type checker
        n_past, stop = self.n_past(sequence), start + len(tokens)
        with self._trees.lent(sequence, 0, 0) as part:
            if not self.restore(part, state) or self._rollback.n_past(part) < stop:
                return False
            self._note(sequence, n_past, tokens[n_past - start :])
            llama.llama_memory_seq_cp(llama.llama_get_memory(self._context), part, sequence, n_past, stop)
        return True

    def close(self) -> None:
        """Free the cache and the buffers; a second call does nothing. Rows become invalid."""
        self._finalizer()

    def require_open(self) -> None:
        """Raise EdgespecError if the cache is closed, or was opened before a fork."""
        if not self._finalizer.alive:
            raise EdgespecError(f"{self.model.path}: the session is closed")
        self._home.require()


def _joined(parts: Sequence[SequenceTokens]) -> tuple[Sequence[int], Inputs | None]:
    """Return the tokens of a pass, and their input rows if there are any; those of a part alone uncopied."""
    if len(parts) == 1:
        return parts[0].tokens, parts[0].inputs
    given = [part.inputs for part in parts if part.inputs is not None]
    tokens = array("i")
    for part in parts:
        tokens.extend(part.tokens)
    return tokens, np.concatenate(given) if given else None


def _check_model(model: Model, n_sequences: int, *, takes_embeddings: bool) -> None:
    """Raise EdgespecError if a cache of `model` cannot have this."""
    if n_sequences > 1 and not model.can_rewind:
        raise EdgespecError(
            f"{model.name} cannot hold several texts in one cache "
            f"(architecture {model.header.architecture}); ask for one at a time"
        )
    has_several = llama.llama_model_rope_type(model.handle) & _SEVERAL_POSITIONS
    if takes_embeddings and has_several and not model.takes_states:
        raise EdgespecError(
            f"{model.name} cannot take embeddings in place of tokens "
            f"(architecture {model.header.architecture})"
        )


def _states(model: Model, size: KVCacheSize, n_batch: int) -> States:
    # The library wants room in a pass for a token more than snapshots reach.
    wanted = replace(size.rollback, n_snapshots=max(0, min(size.rollback.n_snapshots, n_batch - 2)))
    return States(size.n_sequences, wanted, has_snapshots=model.header.has_snapshots)


def _free(context: llama.llama_context_p, _model: Model) -> None:
    llama.llama_free(context)


# ---- the library's call that makes a pass ----

_NO_SLOT, _ABORTED, _BAD_INPUT = 1, 2, -1


class CacheFull(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The cache has no cells left for a pass; nothing of it was kept."""


class Decoder:
    """Makes the passes of one context."""

    def __init__(
        self, context: llama.llama_context_p, model: Model, rollback: Rollback, interrupt: Interrupt | None
    ) -> None:
        """Let `interrupt` break passes off, and tell `rollback` of those that were."""
        self._context, self._model, self._rollback = context, model, rollback
        self._interrupt = interrupt  # its data must live as long as the context
        self._plugin = model.plugin
        self._listens = False
        self.listen(True)

    def listen(self, wanted: bool) -> None:
        """Let the interrupt break off the passes that follow, or not."""
        if wanted == self._listens or not self._interrupt:
            return
        self._listens = wanted
        address, data = (self._interrupt.callback, self._interrupt.data) if wanted else (None, None)
        callback = ctypes.cast(ctypes.c_void_p(address), llama.ggml_abort_callback)
        llama.llama_set_abort_callback(self._context, callback, ctypes.c_void_p(data))

    def decode(self, batch: Batch, n_tokens: int, *, n_outputs: int, n_wanted: int) -> None:
        """Make a pass over `batch`, of `n_tokens`.

        Of `n_outputs` of them the library computes logits; where edgespec's kernels can, only the last
        `n_wanted` are: the others are asked for because of hidden states. Raises CacheFull, KeyboardInterrupt
        if the interrupt broke it off, and EdgespecError.
        """
        only_wanted = (
            self._plugin.last_logits(n_wanted) if self._plugin and n_wanted < n_outputs else nullcontext()
        )
        # An aborted pass is logged, and Python may raise Ctrl-C in that callback.
        with backend.interruptible(), only_wanted:
            code = llama.llama_decode(self._context, batch.struct)
        if code == 0:
            return
        if code not in (_NO_SLOT, _BAD_INPUT):
            self._rollback.break_off()
        if code == _ABORTED:
            raise KeyboardInterrupt
        if code == _NO_SLOT:
            raise CacheFull(
                f"the context is full: no place for {n_tokens} more tokens; choose a larger context"
            )
        raise EdgespecError(
            f"{self._model.path}: llama.cpp failed with code {code}: {backend.failure_reason()}"
        )


# ---- the context ----

_FLASH_ATTN_DISABLED, _FLASH_ATTN_ENABLED = 0, 1
_CACHE_TYPES: dict[CacheType, int] = {"f16": 1, "q8_0": 8, "q4_0": 2}  # enum ggml_type
_POOLING_NONE = 0


def create_context(  # noqa: PLR0913 - sizes, each by its name
    model: Model,
    *,
    n_ctx: int,
    n_threads: int,
    n_batch: int,
    n_logits_max: int,
    n_sequences: int,
    n_snapshots: int = 0,
    pooling: int | None = None,
    on_operation: Any = None,  # noqa: ANN401 - a function of ctypes
) -> llama.llama_context_p:
    """Return a context of `n_ctx` tokens for `n_sequences` sequences; the caller frees it.

    `n_batch`: most tokens of a pass. `n_logits_max`: most rows of logits. `n_snapshots`: earlier states that
    the last pass leaves of each sequence, where a model keeps a state. `pooling`: the library's number, for a
    context that gives hidden states pooled so. `on_operation`: a
    `ggml_backend_sched_eval_callback`, kept by the caller. Raises EdgespecError if the library fails.
    """
    if n_threads < 1:
        raise ValueError("n_threads must be at least 1")
    if not model.is_checked_later and model.condition(wait=True) == "damaged":
        model.accept_weights()  # nothing was computed with them
    params = llama.llama_context_default_params()
    params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP if model.is_mtp else llama.LLAMA_CONTEXT_TYPE_DEFAULT
    params.ctx_other = model.context_beside
    params.n_ctx = n_ctx
    # n_batch == n_ubatch keeps the rows of logits in the order of the tokens.
    params.n_batch = params.n_ubatch = n_batch
    params.n_outputs_max = max(n_logits_max, n_sequences)  # the library plans a pass with one for each
    params.n_seq_max = n_sequences
    params.n_rs_seq = n_snapshots
    params.kv_unified = n_sequences > 1  # sequences can share cells of one cache
    params.n_threads = params.n_threads_batch = n_threads
    owner = model.cells_of or model
    cache_type = owner.header.cache_type
    params.type_k = params.type_v = _CACHE_TYPES[cache_type]
    # edgespec's kernels get attention only this way; llama.cpp's own flash attention is slower than without,
    # but it alone reads a quantized cache.
    flash = owner.uses_kernels or cache_type != "f16"
    params.flash_attn_type = _FLASH_ATTN_ENABLED if flash else _FLASH_ATTN_DISABLED
    # Hidden states, where they are asked for, are else those of each token.
    params.pooling_type = pooling or _POOLING_NONE
    params.embeddings = pooling is not None
    params.offload_kqv = model.remote is not None  # a node holds the cache of its layers
    params.no_perf = True
    if on_operation is not None:
        params.cb_eval = on_operation
    params.swa_full = True  # a sliding window that drops tokens cannot be rewound
    context: llama.llama_context_p | None = backend.create(
        lambda _: llama.llama_init_from_model(model.handle, params), llama.llama_free
    )
    if context is None:
        reason = backend.failure_reason()
        raise EdgespecError(f"{model.path}: no context of {n_ctx} tokens: {reason}; choose a smaller context")
    if not model.is_causal:
        llama.llama_set_causal_attn(context, False)
    return context
