"""A Gemma 4 head, which works in the cache of its target.

It reads the last token together with the target's hidden state before it, and along a draft each token with
its own last state. Its layers attend to the keys and values of the target's last layers, one with a sliding
window and one without. Its passes leave nothing in the cache, so nothing is rewound: all tokens of a draft
have the position after the last token that the target has read.

    GemmaDraft    the draft, from its file to its sessions
    GemmaHead     its model
    LentCache     a context of the head on the cells of the target's context; it needs one free cell per token
    LentSession   passes after a sequence of the target, which they do not change
    LentModel     the head of one generation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from edgespec._core import Interrupt
from edgespec.decoding.session import (
    Features,
    Forward,
    ForwardResult,
    ModelSession,
    Rows,
    SequenceTokens,
    TargetFeatures,
)
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.heads.published import MOST_BATCH, PublishedDraft
from edgespec.llama.backend import llama
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.hidden_states import NEXTN_HEAD
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.rpc import RemoteLayers
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import Session
from edgespec.llama.weights import Model


class GemmaHead(Model):
    """A head that works in the cache of its target."""

    takes_states = True
    most_batch = MOST_BATCH
    lender: KVCache
    """The cache of the target that it works in, once there is one."""

    def __init__(self, header: GGUFHeader, target: Model, *, kernels: bool) -> None:
        """Load a file that `GemmaDraft.check` has checked; `target` must stay open as long as it."""
        if NEXTN_HEAD:
            self.hidden_states = NEXTN_HEAD
        super().__init__(header.path, kernels=kernels, header=header)
        # Keys and values are the target's, and so are their type and the attention over them.
        self.header = replace(header, cache_type=target.header.cache_type)
        self._target = target

    @property
    def uses_flash(self) -> bool:
        """Whether the target's caches are read by flash attention."""
        return self._target.uses_flash

    def make_context(self, params: llama.llama_context_params) -> llama.llama_context_p | None:
        """Return a context on the cells of `lender`."""
        params.ctx_other = self.lender.context
        return super().make_context(params)


class LentCache(KVCache):
    """A context on the cells of another context, which must stay open longer.

    The library empties the cells when it makes such a context.
    """

    def __init__(
        self, model: GemmaHead, lender: KVCache, *, n_threads: int, interrupt: Interrupt | None = None
    ) -> None:
        """Let `model` work on the cells of `lender`, an empty cache of its target.

        Raises EdgespecError if the context cannot be created.
        """
        if any(session.n_past for session in lender.sessions.values()):
            raise ValueError("the cells to be lent are in use")
        model.lender = lender
        size = KVCacheSize(
            n_ctx=lender.n_ctx,
            n_batch=min(lender.n_batch, model.most_batch),
            n_logits_max=lender.n_logits_max,
            n_sequences=lender.n_sequences,
        )
        super().__init__(model, size, n_threads=n_threads, takes_inputs=True, interrupt=interrupt)
        self.sessions = lender.sessions


class LentSession:
    """Passes of a head after a session of its target."""

    def __init__(self, cache: LentCache, target: ModelSession | None = None) -> None:
        """Work in `cache`, after the sequence of `target`; it can be set later."""
        self.cache, self.model, self.target = cache, cache.model, target
        self.n_ctx = cache.n_ctx
        """Most tokens of the target's sequence."""

    @property
    def sequence(self) -> int:
        """The target's sequence in the cache."""
        assert self.target  # noqa: S101 - for the type checker
        return self.target.sequence

    @property
    def n_past(self) -> int:
        """Tokens that the target has read; 0 before there is one."""
        return self.target.n_past if self.target else 0

    @property
    def tokens(self) -> list[int]:
        """The tokens that the target has read."""
        return self.cache.sessions[self.sequence].tokens if self.target else []

    def eval(self, tokens: Sequence[int], *, n_logits: int = 1) -> Rows:
        """Return the logits after each of the last `n_logits` of `tokens`, read with states of zeros."""
        inputs = np.zeros((len(tokens), self.model.n_input), np.float32)
        return self.cache.forward([SequenceTokens(self.sequence, tokens, n_logits, inputs=inputs)])[0].rows

    def rewind(self, n_keep: int) -> int:
        """Do nothing, as passes leave nothing; return `n_keep`."""
        return n_keep

    def checkpoint(self) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the cache is closed with its model, or its lender."""


class _TimedSession(LentSession):
    def close(self) -> None:
        self.cache.close()


class LentModel(DraftModel):
    """The head of `session` behind the interface of DraftModel."""

    features: TargetFeatures
    _session: LentSession

    def __init__(
        self, session: LentSession, features: TargetFeatures, pool: SequencePool, *, n_vocab: int
    ) -> None:
        """Draft with `session`, from the states in `features`, in the cache of `pool`, the target's.

        Only the first `n_vocab` tokens are drafted.
        """
        super().__init__(session, n_vocab=n_vocab)
        self.features, self._pool = features, pool
        self._own_at = -1
        self._own: Features = features.rows(0, 0)  # its own hidden state of token `_own_at`

    def join(self, target: ModelSession) -> None:
        """Draft for this session of the target from now on."""
        self._session.target = target

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`."""
        self._own_at = -1

    def rest(self) -> None:
        """Leave the target's session, which ends."""
        self._session.target = None

    def follows(self, n_tokens: int) -> bool:
        """Whether it can draft after `n_tokens`: it needs the state of the last but one, and free cells."""
        known = self.features.first <= n_tokens - 2 < self.features.end or self._own_at == n_tokens - 2 >= 0
        return known and self.n_past > 0 and self._pool.make_room(self._pool.n_running)

    def n_unread(self, n_tokens: int) -> int:
        """Return 1: the last token."""
        return 1

    def skip(self, n_tokens: int, n_recent: int) -> None:
        """Do nothing."""

    def read(self, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def make_room(self, n_tokens: int) -> None:
        """Do nothing: it uses the room of the target's sequence."""

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Forward | ForwardResult:
        """Return the pass over the last token; `follows` must say that it can, and there are no `guesses`."""
        before = len(tokens) - 2
        is_known = self.features.first <= before < self.features.end
        state = self.features.rows(before, before + 1) if is_known else self._own
        asked = Forward(self._session, self._known(tokens[-1:]), inputs=state, with_features=True)
        asked.finish = partial(self._finish_read, len(tokens) - 1)
        return asked

    def _finish_read(self, at: int, evaluated: ForwardResult) -> ForwardResult:
        if evaluated.features is not None:
            self._own_at, self._own = at, evaluated.features[-1:].copy()
        return self._finish(evaluated)

    def trim(self, n_tokens: int) -> None:
        """Forget its own state after the sequence's first `n_tokens` tokens."""
        if self._own_at >= n_tokens:
            self._own_at = -1


class GemmaDraft(PublishedDraft):
    """A Gemma 4 head."""

    what = "a Gemma 4 head"
    model: GemmaHead
    in_target_cache = True
    _cache: LentCache | None = None

    def check(self, target: GGUFHeader) -> None:
        """Check as for every published head; in the target's cache it needs no room of its own."""
        super().check(target)
        self.header = replace(self.header, n_head_kv=(0,) * self.header.n_layer)

    def misfit(self, target: GGUFHeader) -> str:
        """Return why it cannot work in the cache of `target`; "" if it can."""
        return _misfit(self.header, target)

    def damage(self, target: GGUFHeader) -> str:
        """Return the part of the file that would make llama.cpp abort; "" if none."""
        head = self.header
        n = max(head.gguf.integers(f"{head.architecture}.nextn_predict_layers"), default=0)
        return "" if n == head.n_layer else f"it says that {n} of its {head.n_layer} layers draft"

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        """Load the target without changes: the head reads its last hidden states."""
        return Model(header.path, kernels=kernels, header=header)

    def load_model(self, *, kernels: bool) -> Model:
        """Load the head."""
        return GemmaHead(self.header, self.target, kernels=kernels)

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return it as a LentModel, in the cache of `sequences`, the target's."""
        assert self._cache  # noqa: S101 - for the type checker
        session = LentSession(self._cache)
        return LentModel(session, self.features(), sequences, n_vocab=self.target.n_vocab)

    def use_cache(self, cache: KVCache | None) -> None:
        """Make its context in the target's new cache, after closing the one in the last."""
        if self._cache:
            self._cache.close()
        self._cache = self._lent(cache, cache.interrupt) if cache else None

    def timed_session(self, target: Session, n_ctx: int, interrupt: Interrupt | None) -> LentSession:
        """Return a session in the cache of `target`, which was just opened."""
        return _TimedSession(self._lent(target.cache, interrupt), target)

    def _lent(self, cache: KVCache, interrupt: Interrupt | None) -> LentCache:
        return LentCache(self.model, cache, n_threads=self.n_threads, interrupt=interrupt)


def _misfit(head: GGUFHeader, target: GGUFHeader) -> str:
    """Return why a Gemma 4 head cannot work in the cache of `target`; "" if it can.

    It uses the keys and values of the last layer but one, which has a sliding window, and of the last, which
    has none, as its own.
    """
    if target.architecture != "gemma4":
        return f"it is for Gemma 4, not for architecture {target.architecture}"
    width = max(head.gguf.integers(f"{head.architecture}.embedding_length_out"), default=0)
    if width != target.n_embd:
        return f"it reads hidden states of {width} numbers, and this model has {target.n_embd}"
    if head.n_vocab < target.n_vocab:
        return f"it knows {head.n_vocab} tokens, and this model has {target.n_vocab}"
    windows, of_target = (
        one.gguf.integers(f"{one.architecture}.attention.sliding_window_pattern") for one in (head, target)
    )
    if len(of_target) != target.n_layer or of_target[-2:] != (1, 0):
        return "this model's last layers are not one with a sliding window and one without"
    if len(windows) != head.n_layer or not any(windows):
        return "damaged: it does not say which of its layers have a sliding window"
    n_heads = [target.n_head_kv[-2 if is_window else -1] for is_window in windows]
    keys = ("key_length", "value_length", "key_length_swa", "value_length_swa")
    sizes = [
        [max(one.gguf.integers(f"{one.architecture}.attention.{key}"), default=0) for key in keys]
        for one in (head, target)
    ]
    if sizes[0] != sizes[1] or n_heads != [*head.n_head_kv]:
        return "its keys and values are of another size than this model's"
    return ""
