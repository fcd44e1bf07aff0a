"""Timelines that were read before: a prompt that begins like one of them is read from where they part.

The session's own cache is one of them. What another prompt is about to overwrite there is copied beside, and
copied back when its conversation goes on: a copy of 1,000 tokens of a 1.5B model is 28 MB and takes 10 ms, to
read them again takes seconds. The oldest copies go when there are more bytes than allowed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from edgespec.errors import UsageError
from edgespec.llama.session import Session, State

_WORTH_KEEPING = (
    32  # tokens: reading fewer again takes no longer than the copying and what it takes from others
)


_SHARE_OF_DRAFT = 0.25  # of the bytes: a token takes less of them in a smaller model


def prefixes_of_pair(max_bytes: int | None) -> tuple[Prefixes | None, Prefixes | None]:
    """Return what target and draft keep, up to `max_bytes` together. Raises UsageError."""
    if max_bytes is None:
        return None, None
    if max_bytes < 0:
        raise UsageError(f"prefix cache of {max_bytes} bytes: must be 0 or more")
    for_draft = int(max_bytes * _SHARE_OF_DRAFT)
    return Prefixes(max_bytes - for_draft), Prefixes(for_draft)


class Prefixes:
    """Copies of what one session has read, up to `max_bytes`; the session may be replaced by another."""

    def __init__(self, max_bytes: int) -> None:
        """Keep up to `max_bytes` beside the session; 0: only what is in the session itself."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[int, ...], State] = OrderedDict()
        self._moving: tuple[list[int], State] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(state.nbytes for state in self._kept.values())

    def hold(self, session: Session) -> None:
        """Take what `session` has read to the one that comes in its place."""
        if session.n_past:
            self._moving = (session.timeline, session.state())

    def forget(self) -> None:
        """Drop all copies."""
        self._kept.clear()
        self._moving = None

    def prepare(self, session: Session, tokens: Sequence[int]) -> int:
        """Let `session` hold as much of the beginning of `tokens` as is known.

        Return how many tokens that is, but for the last of `tokens`: its logits are wanted. What is beyond
        them in the session is for the caller to cut.
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
        known = None if best is None else self._kept.pop(best)  # makes room for what is kept next
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
            if n == len(held):  # it has all of it
                self._kept.move_to_end(other)
                return
            if n == len(other):  # the beginning of what is kept now
                del self._kept[other]
        self._kept[tuple(held)] = session.state()
        self._make_room()

    def _make_room(self) -> None:
        while self.n_bytes > self._max_bytes:
            self._kept.popitem(last=False)


def n_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two timelines have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
