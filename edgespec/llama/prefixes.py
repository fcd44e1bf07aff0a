"""Keep copies of the caches of earlier prompts, so that a prompt with the same beginning is not read again.

A session holds the cache of one timeline. Before another prompt overwrites it, the cache is copied, and
copied back when that conversation goes on: a copy of 1,000 tokens of a 1.5B model is 28 MB and takes 10 ms;
reading them again takes seconds. Beyond the allowed bytes, the oldest copies are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from edgespec.errors import UsageError
from edgespec.llama.session import Session, State

_WORTH_KEEPING = 32  # tokens: reading fewer again costs no more than a copy, which may push out others


_SHARE_OF_DRAFT = 0.25  # of the bytes: a token takes fewer in a smaller model


def prefixes_of_pair(max_bytes: int | None) -> tuple[Prefixes | None, Prefixes | None]:
    """Return the prefix caches of target and draft, up to `max_bytes` together. Raises UsageError."""
    if max_bytes is None:
        return None, None
    if max_bytes < 0:
        raise UsageError(f"prefix cache of {max_bytes} bytes: must be 0 or more")
    for_draft = int(max_bytes * _SHARE_OF_DRAFT)
    return Prefixes(max_bytes - for_draft), Prefixes(for_draft)


class Prefixes:
    """Copies of one session's earlier caches; the session may be replaced by another of its model."""

    def __init__(self, max_bytes: int) -> None:
        """Keep up to `max_bytes` of copies; 0: only what the session itself holds."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[int, ...], State] = OrderedDict()
        self._moving: tuple[list[int], State] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(state.nbytes for state in self._kept.values())

    def hold(self, session: Session) -> None:
        """Copy the cache of `session`, for the session that replaces it."""
        if session.n_past:
            self._moving = (session.timeline, session.state())

    def forget(self) -> None:
        """Drop all copies."""
        self._kept.clear()
        self._moving = None

    def prepare(self, session: Session, tokens: Sequence[int]) -> int:
        """Make `session` hold as much of the beginning of `tokens` as is known; return the number of tokens.

        At most len(tokens) - 1: the last one must be read for its logits. The caller must cut what the
        session holds beyond these tokens.
        """
        if self._moving:
            timeline, state = self._moving
            self._moving = None
            session.restore(state, timeline)
        held = session.timeline
        n_known = n_common(held, tokens)
        best, n_best = None, n_known + _WORTH_KEEPING
        for other in self._kept:
            n = n_common(other, tokens) if len(other) <= session.n_ctx else 0
            if n >= n_best:
                best, n_best = other, n
        known = None if best is None else self._kept.pop(best)  # makes room for the next copy
        if len(held) - n_known >= _WORTH_KEEPING:
            self._keep(session, held)
        if best is not None and known is not None:
            session.restore(known, best)
            n_known = n_best
            if len(best) - n_known >= _WORTH_KEEPING:  # else the session goes on with all of it
                self._kept[best] = known
                self._make_room()
        return max(0, min(n_known, len(tokens) - 1))

    def _keep(self, session: Session, held: Sequence[int]) -> None:
        if session.state_bytes > self._max_bytes:
            return
        for other in list(self._kept):
            n = n_common(other, held)
            if n == len(held):  # `other` includes all of `held`
                self._kept.move_to_end(other)
                return
            if n == len(other):  # `held` includes all of `other`
                del self._kept[other]
        self._kept[tuple(held)] = session.state()
        self._make_room()

    def _make_room(self) -> None:
        while self.n_bytes > self._max_bytes:
            self._kept.popitem(last=False)


def n_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both timelines begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
