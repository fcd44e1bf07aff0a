"""A llama_context whose KV cache several sequences share, and its forward passes over tokens of them.

A sequence's tokens may end with a tree, of which only the trunk stays. rollback.py rewinds sequences.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edgespec._core import Interrupt
from edgespec.decoding.session import Branches, Features, ForwardResult, SequenceTokens, as_ints
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.choices import CacheType
from edgespec.llama.hidden_states import Outputs
from edgespec.llama.rollback import MAX_SEQUENCES, Rollback, RollbackSize, States
from edgespec.platform.closing import Closing
from edgespec.platform.processes import HomeProcess, finalize

if TYPE_CHECKING:
    from edgespec.llama.session import Session
    from edgespec.llama.weights import Model

MAX_LEAVES = 32
"""Most leaves of the trees of a pass: the library keeps room for a row of logits for each."""

MAX_SEQUENCES_OPEN = MAX_SEQUENCES - MAX_LEAVES
"""Most sequences of a cache."""


class KVCacheSize(msgspec.Struct, frozen=True, kw_only=True):
    """How large a cache and its passes are."""

    n_ctx: int
    """Cells: tokens of all sequences together, what several share counted once."""
    n_batch: int = 512
    """Most tokens computed in one pass."""
    n_logits_max: int = 64
    """Most rows of logits of one pass; it sets the size of buffers."""
    n_sequences: int = 1
    rollback: RollbackSize = msgspec.field(default_factory=RollbackSize)

    def __post_init__(self) -> None:
        if self.n_ctx < 1 or self.n_batch < 1 or self.n_logits_max < 1:
            raise ValueError("n_ctx, n_batch and n_logits_max must be at least 1")
        if not 1 <= self.n_sequences <= MAX_SEQUENCES_OPEN:
            raise ValueError(f"n_sequences {self.n_sequences}: must be 1 to {MAX_SEQUENCES_OPEN}")


_NO_SLOT, _ABORTED, _BAD_INPUT = 1, 2, -1  # of llama_decode


class CacheFull(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The cache has no cells left for a pass, which changed nothing."""


class KVCache(Closing):
    """A context of a model and the sequences in its cache. A context manager.

    The library is always asked for the number of cached tokens: a second count could become wrong if Ctrl-C
    came between two lines. A cache keeps its model alive. Two threads must not use it at once.
    """

    def __init__(
        self,
        model: Model,
        size: KVCacheSize,
        *,
        n_threads: int,
        takes_inputs: bool = False,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Make a context; arguments as for `Session`.

        `takes_inputs`: each part of a pass has the rows that the first layer reads for its tokens; else only
        parts of prompts that are no tokens have.
        Raises EdgespecError if it cannot be created, or the model cannot share it between sequences.
        """
        self.model, self.interrupt = model, interrupt
        self.n_ctx, self.n_batch = size.n_ctx, min(size.n_batch, size.n_ctx)
        self.n_logits_max = min(size.n_logits_max, self.n_batch)
        has_trees = model.can_rewind and not model.keeps_state
        self.max_leaves = max(1, min(MAX_LEAVES, self.n_logits_max - 1)) if has_trees else 1
        """Most leaves of the trees of a pass; 1: chains only."""
        self.n_sequences = size.n_sequences
        if self.n_sequences > 1 and not model.can_rewind:
            raise EdgespecError(
                f"{model.name} cannot hold several texts in one cache "
                f"(architecture {model.header.architecture}); ask for one at a time"
            )
        self._rollback = (
            _states(model, size, self.n_batch)
            if model.keeps_state
            else Rollback(self.n_sequences, self.max_leaves)
        )
        self.most_drafted = min(self.n_logits_max - 1, self._rollback.most_drafted or self.n_logits_max)
        """Most tokens of a pass that may be removed after it."""
        n_sequences = self.n_sequences + self._rollback.n_spare
        context = self._make_context(n_threads, n_sequences)
        # The finalizer's reference keeps the weights until the context that uses them is freed, even if the
        # garbage collector finds both unreachable at once.
        self._finalizer = finalize(self, _free, context, model)
        model.sessions.add(self)
        self._context, self._home = context, HomeProcess("the session")
        self._rollback.attach(context)
        self._plugin, self._listens = model.plugin, False
        self._listen(True)
        self._input = Batch(
            self.n_batch,
            n_sequences,
            n_embd=model.n_input,
            needs_rows=takes_inputs and not model.takes_tokens_alone,
            with_tokens=model.takes_states and not model.takes_tokens_alone,
        )
        self._outputs = Outputs(context, model, self.n_logits_max, self.n_batch)
        self.all_logits = model.hidden_states.all_logits
        """Whether a pass that returns hidden states computes the logits of all of its tokens."""
        self.n_features_max = self.n_logits_max if self.all_logits else self.n_batch
        """Most tokens of a pass that returns hidden states."""
        self._free_sequences = list(reversed(range(self.n_sequences)))
        self.sessions: dict[int, Session] = {}
        """The open sessions by their sequences' numbers."""

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

    def open(self, session: Session) -> int:
        """Return the number of an empty sequence, `session`'s until `end`."""
        sequence = self._free_sequences.pop()
        self.sessions[sequence] = session
        return sequence

    def end(self, session: Session) -> bool:
        """Empty a session's sequence and let others use its number; return False if that was done."""
        sequence = session.sequence
        if self.sessions.get(sequence) is not session:
            return False
        if self._finalizer.alive:
            self._rollback.cut(sequence, 0)
        del self.sessions[sequence]
        self._free_sequences.append(sequence)
        return True

    @property
    def cuts_anywhere(self) -> bool:
        """Whether its sequences can be cut to any length, however long ago that was."""
        return not self.model.keeps_state and llama.llama_model_n_swa(self.model.handle) == 0

    @property
    def context(self) -> llama.llama_context_p:
        """The library's pointer, for functions that this class lacks."""
        self.require_open()
        return self._context

    @property
    def rollback(self) -> Rollback:
        """The part of the cache that rewinds sequences."""
        self.require_open()
        return self._rollback

    def clear(self) -> None:
        """Empty all sequences; sessions stay open."""
        self.require_open()
        self._rollback.clear()

    # ---- passes ----

    def forward(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        """Append each part to its sequence in one pass; return for each what `Session.eval` returns.

        The rows are valid until the next pass or `close`. Only a single part may have more than
        `n_batch` tokens: it takes several passes. Hidden states are kept of all tokens if one part wants
        them; with `all_logits` these count as rows of logits, of which there are at most `n_logits_max`
        (for a single part edgespec's kernels compute only the wanted ones).
        A failed or interrupted pass leaves all sequences as they were before the call; with a recurrent
        state one may also end with tokens of its part before the tree, or become empty. Raises CacheFull,
        EdgespecError if the model cannot return hidden states, and as `Session.eval`.
        """
        self.require_open()
        started = time.perf_counter()
        with_features = any(part.with_features for part in parts)
        if adapters := self.model.adapters:
            (applied,) = {self.sessions[part.sequence].adapters for part in parts}  # one set for all
            adapters.apply(self._context, applied)
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
        session, n_tokens = self.sessions[part.sequence], len(part.tokens)
        part.n_past = n_past = self.rollback.n_past(part.sequence)
        n_held = n_past - self._rollback.n_dropped(part.sequence)
        if n_held + n_tokens > session.n_ctx:
            raise EdgespecError(
                f"the context is full: {n_held} tokens and {n_tokens} more do not fit in "
                f"{session.n_ctx}; choose a larger context"
            )
        if not 0 <= part.n_logits <= min(n_tokens, self.n_logits_max):
            raise ValueError(
                f"n_logits {part.n_logits} with {n_tokens} tokens, n_logits_max {self.n_logits_max}"
            )
        if part.at_once and n_tokens > self.n_batch:
            raise EdgespecError(
                f"{n_tokens} rows are read at once, and a pass has {self.n_batch}; choose a larger n_batch"
            )
        self._rollback.place(part)
        part.branches = None if part.parents is None else self._branches(part.parents, part.n_logits)
        session.note(n_past, part.tokens)  # of a tree the trunk is first; `written` cuts

    def _branches(self, parents: Sequence[int], n_logits: int) -> Branches | None:
        """Return the tree with these parents; None for a chain."""
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
        """Yield the sections, one per pass, of a single part of more than `n_batch` tokens."""
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
        n_sides = 0
        for part in parts:  # a spare sequence for each leaf but the trunk's
            sides = range(n_sides, n_sides + (part.branches.n_leaves - 1 if part.branches else 0))
            part.leaves = [self._rollback.side(part.sequence, i, part.position) for i in sides]
            n_sides = sides.stop
        n_outputs = self._input.fill(parts, all_logits=self._outputs.all_logits)
        self._listen(self._rollback.begin_pass(parts))
        with self._outputs.keeping(parts), self._all_attending() if parts[0].at_once else nullcontext():
            self._run(n_outputs, parts[0].n_logits if len(parts) == 1 else n_outputs)
        if parts[0].places is not None:
            self._rollback.note_rows(parts[0])
        self._rollback.drop_trees(parts)

    @contextmanager
    def _all_attending(self) -> Iterator[None]:
        """Inside the block, each token of a pass attends to all of them."""
        llama.llama_set_causal_attn(self._context, False)
        try:
            yield
        finally:
            llama.llama_set_causal_attn(self._context, True)

    def _listen(self, wanted: bool) -> None:
        """Set whether the interrupt may break off later passes."""
        if wanted == self._listens or not self.interrupt:
            return
        self._listens = wanted
        address, data = (self.interrupt.callback, self.interrupt.data) if wanted else (None, None)
        callback = ctypes.cast(ctypes.c_void_p(address), llama.ggml_abort_callback)
        llama.llama_set_abort_callback(self._context, callback, ctypes.c_void_p(data))

    def _run(self, n_outputs: int, n_wanted: int) -> None:
        """Run the pass over the input.

        The library computes logits of `n_outputs` tokens; edgespec's kernels, if they can, compute only the
        last `n_wanted`, as the others are asked for because of hidden states. Raises CacheFull,
        KeyboardInterrupt if the interrupt broke it off, and EdgespecError.
        """
        batch = self._input.struct
        only_wanted = (
            self._plugin.last_logits(n_wanted) if self._plugin and n_wanted < n_outputs else nullcontext()
        )
        # An aborted pass is logged, and Python may raise Ctrl-C in that callback.
        with backend.interruptible(), only_wanted:
            code = llama.llama_decode(self._context, batch)
        if code == 0:
            return
        if code not in (_NO_SLOT, _BAD_INPUT):
            self._rollback.break_off()
        if code == _ABORTED:
            raise KeyboardInterrupt
        if code == _NO_SLOT:
            raise CacheFull(
                f"the context is full: no place for {batch.n_tokens} more tokens; choose a larger context"
            )
        raise EdgespecError(
            f"{self.model.path}: llama.cpp failed with code {code}: {backend.failure_reason()}"
        )

    def _n_outputs(self, part: SequenceTokens) -> int:
        return len(part.tokens) if self._outputs.all_logits else part.n_logits

    def close(self) -> None:
        """Free the cache and the buffers; a second call does nothing. Rows become invalid."""
        self._finalizer()

    def require_open(self) -> None:
        """Raise EdgespecError if the cache is closed, or was opened before a fork."""
        if not self._finalizer.alive:
            raise EdgespecError(f"{self.model.path}: the session is closed")
        self._home.require()


def _states(model: Model, size: KVCacheSize, n_batch: int) -> States:
    # The library wants room in a pass for a token more than snapshots reach.
    wanted = replace(size.rollback, n_snapshots=max(0, min(size.rollback.n_snapshots, n_batch - 2)))
    return States(size.n_sequences, wanted, has_snapshots=model.header.has_snapshots)


def _free(context: llama.llama_context_p, _model: Model) -> None:
    llama.llama_free(context)


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

    `n_batch`: most tokens of a pass. `n_logits_max`: most rows of logits. `n_snapshots`: earlier recurrent
    states of each sequence that the last pass keeps. `pooling`: the library's number, for a context that
    returns pooled hidden states. `on_operation`: a
    `ggml_backend_sched_eval_callback`, kept by the caller. Raises EdgespecError if the library fails.
    """
    if n_threads < 1:
        raise ValueError("n_threads must be at least 1")
    if not model.is_checked_later and model.condition(wait=True) == "damaged":
        model.accept_weights()  # nothing was computed with them
    params = llama.llama_context_default_params()
    params.n_ctx = n_ctx
    # n_batch == n_ubatch keeps the rows of logits in the order of the tokens.
    params.n_batch = params.n_ubatch = n_batch
    params.n_outputs_max = max(n_logits_max, n_sequences)  # the library plans a pass with one for each
    params.n_seq_max = n_sequences
    params.n_rs_seq = n_snapshots
    params.kv_unified = n_sequences > 1  # sequences can share cells of one cache
    params.n_threads = params.n_threads_batch = n_threads
    params.type_k = params.type_v = _CACHE_TYPES[model.header.cache_type]
    params.flash_attn_type = _FLASH_ATTN_ENABLED if model.uses_flash else _FLASH_ATTN_DISABLED
    # Hidden states, where they are asked for, are else those of each token.
    params.pooling_type = pooling or _POOLING_NONE
    params.embeddings = pooling is not None
    params.offload_kqv = model.remote is not None  # a node holds the cache of its layers
    params.no_perf = True
    if on_operation is not None:
        params.cb_eval = on_operation
    params.swa_full = True  # a sliding window that drops tokens cannot be rewound
    context: llama.llama_context_p | None = backend.create(
        lambda _: model.make_context(params), llama.llama_free
    )
    if context is None:
        reason = backend.failure_reason()
        raise EdgespecError(f"{model.path}: no context of {n_ctx} tokens: {reason}; choose a smaller context")
    return context


# ---- the input of a pass ----


_MOST_POSITIONS = 4  # of a row: GGML_MROPE_SECTIONS


def find_branches(parents: Sequence[int]) -> Branches:
    """Return the tree in which node i follows node parents[i], -1 being the token before the tree.

    Raises ValueError when the nodes are not in depth-first pre-order.
    """
    n = len(parents)
    path: list[int] = []
    depths, first_leaf, n_leaves = [], [], 0
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            raise ValueError(f"parents[{node}] is {parent}: not in depth-first pre-order")
        depths.append(len(path))
        path.append(node)
        first_leaf.append(n_leaves)
        n_leaves += node + 1 == n or parents[node + 1] != node
    leaves = [0] * n
    for node in reversed(range(n)):
        leaves[node] = leaves[node] or 1
        if parents[node] >= 0:
            leaves[parents[node]] += leaves[node]
    return Branches(depths, first_leaf, leaves, n_leaves)


class Batch:
    """A `llama_batch` and its arrays: tokens of several sequences, or rows in their place."""

    def __init__(
        self,
        n_batch: int,
        n_sequences: int,
        *,
        n_embd: int = 0,
        needs_rows: bool = False,
        with_tokens: bool = False,
    ) -> None:
        """Prepare passes of up to `n_batch` tokens of up to `n_sequences` sequences.

        A pass may have input rows, `n_embd` wide, in the place of its tokens, or beside them (`with_tokens`);
        `needs_rows`: each has.
        """
        self._n_embd, self._needs_rows, self._with_tokens = n_embd, needs_rows, with_tokens
        # For rows in place of tokens some models read that many positions; what counts is the first.
        positions = (ctypes.c_int32 * (_MOST_POSITIONS * n_batch))()
        tokens, n_of = (ctypes.c_int32 * n_batch)(), (ctypes.c_int32 * n_batch)()
        sequences = (ctypes.POINTER(ctypes.c_int32) * n_batch)()
        flags = (ctypes.c_int8 * n_batch)()
        # Views as of arrays, which are filled in a fifth of numpy's time where there are few tokens.
        self._tokens = memoryview(tokens).cast("B").cast("i")
        self._positions = memoryview(positions).cast("B").cast("i")
        self._n_of = memoryview(n_of).cast("B").cast("i")
        self._sequences = memoryview(sequences).cast("B").cast("Q")
        self._flags = memoryview(flags).cast("B")
        self._numbers = array("i", bytes(4 * n_sequences))
        self._all_tokens = tokens
        self._rows: npt.NDArray[np.float32] | None = None
        self.struct = llama.llama_batch(
            token=tokens,
            pos=positions,
            n_seq_id=n_of,
            seq_id=sequences,
            logits=flags,
        )
        self._token, self._embd = self._pointer("token"), self._pointer("embd")

    def _pointer(self, name: str) -> ctypes.c_void_p:
        field: Any = getattr(llama.llama_batch, name)  # at run time a ctypes field descriptor
        return ctypes.c_void_p.from_buffer(self.struct, field.offset)

    def fill(self, parts: Sequence[SequenceTokens], *, all_logits: bool) -> int:
        """Describe a pass over these parts; return for how many tokens it computes logits.

        The leaves below a node are adjacent among the part's sequences, so its own are a slice of them.
        """
        address, size = self._numbers.buffer_info()[0], self._numbers.itemsize
        at = n_numbers = n_outputs = 0
        for part in parts:
            numbers, start, n_chain = (part.sequence, *part.leaves), part.position, part.n_chain
            first, n, end = address + n_numbers * size, len(part.tokens), at + len(part.tokens)
            self._numbers[n_numbers : n_numbers + len(numbers)] = array("i", numbers)
            n_numbers += len(numbers)
            n_logits = n if all_logits else part.n_logits
            n_outputs += n_logits
            self._tokens[at:end] = as_ints(part.tokens)
            self._positions[at : at + n_chain] = array("i", range(start, start + n_chain))
            self._n_of[at:end] = array("i", (len(numbers),)) * n
            self._sequences[at:end] = array("Q", (first,)) * n
            self._flags[at:end] = bytes(n - n_logits) + b"\1" * n_logits
            if tree := part.branches:
                at += n_chain
                start += n_chain
                self._positions[at:end] = array("i", [start + depth for depth in tree.depths])
                self._n_of[at:end] = array("i", tree.leaves)
                self._sequences[at:end] = array("Q", [first + leaf * size for leaf in tree.first_leaf])
            at = end
        self.struct.n_tokens = at
        self._fill_rows(parts, at)
        return n_outputs

    def _fill_rows(self, parts: Sequence[SequenceTokens], n_tokens: int) -> None:
        found = [part.inputs for part in parts if part.inputs is not None]
        has_tokens = not found or self._with_tokens
        self._token.value = ctypes.addressof(self._all_tokens) if has_tokens else None
        if not found:
            if self._needs_rows:
                raise ValueError("a pass without the rows for its tokens")
            self._embd.value = None
            return
        # An attribute keeps the array alive: the pass reads it in place.
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        self._rows = np.ascontiguousarray(rows, np.float32)
        if self._rows.shape != (n_tokens, self._n_embd):
            raise ValueError(f"embeddings of shape {self._rows.shape}, not {(n_tokens, self._n_embd)}")
        self._embd.value = self._rows.ctypes.data
        places = parts[0].places
        if places is not None:  # of a pass of its own; the last dimension is not a place
            moved = places + np.array([[parts[0].position]] * 3 + [[0]], np.int32)
            self._positions[: places.size] = array("i", moved.tobytes())
