"""Windows that know nothing of each other, decoded together: what each asks of the decoder is one pass.

Each window is decoded as it is alone, in a thread of its own, which waits wherever it needs a pass. Once all
wait, the caller's thread makes one pass for all of them. Nothing else runs beside that pass, and with
edgespec's kernels a token's logits are the same bits whatever shares it: the texts are those of windows
decoded one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from edgespec.apps.speech.beam import BeamPasses
from edgespec.apps.speech.whisper_model import SequenceBatch
from edgespec.decoding.session import Rows

T = TypeVar("T")


class SharedCache(BeamPasses, Protocol):
    """A cache of several windows, the same number of sequences for each, numbered window by window."""

    n_sequences: int
    """Sequences of each window."""


class _GivenUpError(Exception):
    """Another window, or the caller, has ended the work."""


class WindowPasses:
    """One window's sequences, numbered from 0: its passes wait for those of the others. A BeamPasses."""

    def __init__(self, together: WindowsTogether[T], cache: SharedCache, place: int) -> None:
        """For `WindowsTogether` only."""
        self._together, self._cache, self._place = together, cache, place
        self._first = place * cache.n_sequences

    def forward(self, batch: Sequence[SequenceBatch]) -> Sequence[Rows]:
        """Append tokens to sequences, in a pass with what other windows append; return the logits of each."""
        moved = [replace(part, sequence=self._first + part.sequence) for part in batch]
        return self._together.wait_for_pass(self._place, moved)

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""
        return self._cache.n_past(self._first + sequence)

    def rewind(self, sequence: int, n_keep: int) -> None:
        """Cut a sequence back to its first `n_keep` tokens."""
        self._cache.rewind(self._first + sequence, n_keep)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let sequence i go on from what sequence sources[i] holds; other windows' stay."""
        own = [self._first + source for source in sources]
        end = self._first + self._cache.n_sequences
        self._cache.reorder(
            [
                *range(self._first),
                *own,
                *range(self._first + len(own), self._together.n_windows * self._cache.n_sequences),
            ]
        )
        for sequence in range(self._first + len(own), end):
            self._cache.rewind(sequence, 0)


class WindowsTogether(Generic[T]):
    """Decodes the windows of one cache together."""

    def __init__(self, cache: SharedCache, n_windows: int) -> None:
        """Decode in `cache`, which has so many windows."""
        self.n_windows = n_windows
        self._cache = cache
        self._changed = threading.Condition()
        self._asked: dict[int, list[SequenceBatch]] = {}
        self._answers: dict[int, Sequence[Rows]] = {}
        self._found: dict[int, T] = {}
        self._failed: dict[int, BaseException] = {}
        self._given_up = False

    def run(self, decode: Callable[[int, WindowPasses], T]) -> list[T]:
        """Return what `decode` makes of each window, given its number and its passes.

        Raises what a decoding or a pass raises; then, and if the caller is interrupted, all end.
        """
        threads = [
            threading.Thread(target=self._decode, args=(decode, place), daemon=True)
            for place in range(self.n_windows)
        ]
        for thread in threads:
            thread.start()
        try:
            self._make_passes()
        finally:
            with self._changed:
                self._given_up = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
        for failure in self._failed.values():
            raise failure
        return [self._found[place] for place in range(self.n_windows)]

    def wait_for_pass(self, place: int, batch: list[SequenceBatch]) -> Sequence[Rows]:
        """Return the logits of a window's tokens from the next pass, which has those of all that go on."""
        with self._changed:
            self._asked[place] = batch
            self._changed.notify_all()
            self._changed.wait_for(lambda: place in self._answers or self._given_up)
            if place not in self._answers:
                raise _GivenUpError
            return self._answers.pop(place)

    def _decode(self, decode: Callable[[int, WindowPasses], T], place: int) -> None:
        """Decode one window, in its thread."""
        try:
            found = decode(place, WindowPasses(self, self._cache, place))
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            with self._changed:
                self._failed[place] = error
                self._changed.notify_all()
        else:
            with self._changed:
                self._found[place] = found
                self._changed.notify_all()

    def _make_passes(self) -> None:
        """Make passes until all windows are decoded, or one has failed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._failed or len(self._asked) + len(self._found) == self.n_windows
                )
                if self._failed or not self._asked:
                    return
                asked, self._asked = dict(sorted(self._asked.items())), {}
            rows = iter(self._cache.forward([part for batch in asked.values() for part in batch]))
            answers = {place: [next(rows) for _ in batch] for place, batch in asked.items()}
            with self._changed:
                self._answers |= answers
                self._changed.notify_all()
