"""From token pieces to text that may be shown: whole characters, and nothing past a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of one token after another into text.

    Bytes of an unfinished character wait for the rest of it. Text that may be the beginning of a
    stop string waits until it is decided. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; it and what follows are not part of the text."""

    @property
    def holds(self) -> bool:
        """Whether text waits for what a stop string turns out to be."""
        return bool(self._held)

    def feed(self, piece: bytes) -> str:
        """Return the text that became certain with `piece`."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(piece)
        found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[0]]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back for a stop string that did not come.

        An unfinished character is dropped: half of it is not text.
        """
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
