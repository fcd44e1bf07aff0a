"""The sequences of one cache: those under way, and finished ones kept for prompts with the same prefix.

A prompt shares the cells of the longest common prefix, which is not read again and takes no second place. A
finished sequence stays until its cells are needed: the least recently used one is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from edgespec.decoding.session import as_ints
from edgespec.llama.backend import llama
from edgespec.llama.choices import AdapterSet
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.prompt_states import PromptStates
from edgespec.llama.rollback import State
from edgespec.llama.session import Session, n_cells
from edgespec.platform.closing import Closing

_WORTH_KEEPING = 32  # tokens: reading fewer again costs no more than what keeping them may push out
_WORTH_A_STOP = 256  # tokens to read: a stop to copy a state, where there is one, makes a pass more
_ENDING = 8  # tokens: those that a chat template puts after a question may be others in later prompts


class CachedPrefix(NamedTuple):
    """A copy of a sequence, for a larger cache."""

    state: State
    tokens: list[int]
    copies: dict[int, State]
    """States that it can be cut back to, where the model keeps one."""
    adapters: AdapterSet


class SequencePool(Closing):
    """Opens the sessions of one cache. A context manager; it closes the cache."""

    def __init__(
        self,
        cache: KVCache,
        *,
        n_ctx: int | None = None,
        reserved: int = 0,
        keeps: bool = True,
        states: PromptStates | None = None,
    ) -> None:
        """Open sessions of up to `n_ctx` tokens (None: all) in `cache`.

        Finished sequences are kept in all but `reserved` of its cells. Without `keeps`, every prompt is read
        from its beginning. `states`: its sequences on disk.
        """
        self.cache = cache
        self.n_ctx = min(n_ctx or cache.n_ctx, cache.n_ctx)
        """Most tokens of a session."""
        self._reserved = reserved
        self._keeps = keeps and cache.model.can_rewind
        self._states = states if self._keeps else None
        self._window = int(llama.llama_model_n_swa(cache.model.handle))
        self._running: list[Session] = []
        self._kept: OrderedDict[int, Session] = OrderedDict()  # by id, the one unused for longest first

    @property
    def n_running(self) -> int:
        """Sessions under way."""
        return len(self._running)

    @property
    def n_used(self) -> int:
        """Cells of the sequences under way."""
        return n_cells(self._running)

    @property
    def n_kept(self) -> int:
        """Cells of the sequences that are kept."""
        return n_cells(self._kept.values())

    def n_new(self, tokens: Sequence[int], adapters: AdapterSet = ()) -> int:
        """Return how many cells `tokens` would need beyond those of sequences under way."""
        best, n, _ = self._best(tokens, adapters)
        shared = 0
        if best:
            cells = (best.n_shared(one) for one in self._running)
            shared = n if best in self._running else min(n, max(cells, default=0))
        return len(tokens) - shared

    def begin(self, tokens: Sequence[int], adapters: AdapterSet = ()) -> Session:
        """Open a session that holds the longest known prefix of `tokens`, read with the same `adapters`.

        It has at most len(tokens) - 1 of them: the last one must be read for its logits. One of the cache's
        sequences must be free.
        """
        best, n, n_same = self._best(tokens, adapters)
        session: Session | None = None
        if best and id(best) in self._kept:
            # With no number left, or if little follows what both have, the sequence itself is continued.
            is_last = len(self.cache.sessions) == self.cache.n_sequences and len(self._kept) == 1
            if is_last or best.n_past - n < _WORTH_KEEPING:
                session = self._kept.pop(id(best))
                if session.n_past - n >= _WORTH_KEEPING:
                    self._store(session)
                session.rewind(n)
        if session is None:
            if len(self.cache.sessions) == self.cache.n_sequences:
                self._drop_oldest(but=best)
            session = Session.within(self.cache, self.n_ctx)
            session.adapters = adapters
            if best and n:
                session.begin_as(best, n)
        if self._states:
            self._states.extend(session, tokens, self.make_room)
        if self._keeps:
            self._checkpoint_places(session, n_same, len(tokens))
        self._running.append(session)
        return session

    def _checkpoint_places(self, session: Session, n_same: int, n_prompt: int) -> None:
        """Keep states where later prompts are likely to diverge from this one.

        That is where this one diverges from earlier ones, at `n_same`, and shortly before its end.
        """
        n_past = session.n_past
        if n_prompt - n_past >= _WORTH_A_STOP:
            session.checkpoint_at(n_same, n_prompt - _ENDING)
        elif n_past:
            session.checkpoint()

    def _best(self, tokens: Sequence[int], adapters: AdapterSet) -> tuple[Session | None, int, int]:
        """Return the sequence with the longest usable prefix of `tokens`, its length, and the shared length.

        With a recurrent state, the usable prefix may be shorter than the shared one.
        """
        best, n_best, n_same = None, 0, 0
        if self._keeps:
            wanted = as_ints(tokens)
            for session in [*self._running, *self._kept.values()]:
                if session.adapters != adapters:
                    continue
                n = min(session.n_same(wanted), len(tokens) - 1)
                n_same = max(n_same, n)
                if n < max(1, n_best) or not self._has_all(session, n):
                    continue
                n = session.n_reachable(n)
                if n > n_best:
                    best, n_best = session, n
        return best, n_best, n_same

    def _has_all(self, session: Session, n: int) -> bool:
        """Whether a sequence still has all cells that its first `n` tokens need.

        If attention has a sliding window, tokens before the window may have been overwritten.
        """
        return self._window == 0 or session.n_past < self._window or n == session.n_past

    def end(self, session: Session) -> None:
        """End a session, and keep its sequence if that is worthwhile."""
        if session not in self._running:
            return
        self._running.remove(session)
        n = session.n_past
        if not self._keeps or (n < _WORTH_KEEPING and self._kept):
            session.close()
            return
        session.rest()
        timeline = session.written
        for key, other in list(self._kept.items()):
            n_same = other.n_same(timeline) if other.adapters == session.adapters else -1
            if n_same == other.n_past:  # it says no more than the new one
                self._kept.pop(key).close()
        self._kept[id(session)] = session
        while self._kept and self.n_kept > self.cache.n_ctx - self._reserved:
            self._drop_oldest()

    def make_room(self, n_free: int) -> bool:
        """Drop kept sequences until `n_free` cells are free; return whether they are."""
        while n_cells([*self._running, *self._kept.values()]) + n_free > self.cache.n_ctx:
            if not self._kept:
                return False
            self._drop_oldest()
        return True

    def _drop_oldest(self, but: Session | None = None) -> None:
        key = next(key for key, session in self._kept.items() if session is not but)
        session = self._kept.pop(key)
        self._store(session)
        session.close()

    def _store(self, session: Session) -> None:
        if self._states:
            self._states.save(session)

    def forget(self, but: Sequence[int] = ()) -> None:
        """Drop all kept sequences; files on disk stay.

        A prefix `but` of one of them stays, if the model can be rewound to it.
        """
        kept, self._kept = self._kept, OrderedDict()
        for session in kept.values():
            n = session.n_same(as_ints(but)) if but and not self._kept else 0
            if n and n == len(but) == session.rewind(n):
                self._kept[id(session)] = session
            else:
                session.close()

    def last(self) -> CachedPrefix | None:
        """Return a copy of the sequence that was kept last, for `adopt`; None if none is kept."""
        for session in reversed(self._kept.values()):
            return CachedPrefix(session.state(), session.tokens, session.copies(), session.adapters)
        return None

    def adopt(self, kept: CachedPrefix) -> None:
        """Keep a sequence that `last` copied from a smaller cache."""
        session = Session.within(self.cache, self.n_ctx)
        session.restore(kept.state, kept.tokens, kept.copies)
        session.adapters = kept.adapters
        self._kept[id(session)] = session

    def close(self) -> None:
        """Close all sessions and the cache; kept sequences are written to disk if states are stored."""
        if self._states:
            for session in self._kept.values():
                self._states.save(session)
        self._running.clear()
        self._kept.clear()
        self.cache.close()
