"""Drafts without a model: what followed the same words before, in the prompt, the output, earlier answers.

Prompt lookup and n-grams are the same thing here: the suffix store (csrc/suffix.h) finds the longest
suffix of the text that occurred before, down to a single token, and counts what followed it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from edgespec._core import SuffixStore
from edgespec.drafting.history import MAX_TOKENS, History
from edgespec.drafting.rejections import RejectedPlaces, RejectedText
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import GGUFHeader, tokenizer_fingerprint

_OWN = 1 << 16  # tokens of one text
_HEADER = 8  # tokens with which a chat template begins an answer, at most
_TAIL = 32  # tokens of the text's end that the store compares
_BRANCHES = 32  # as many as the store has: few of them are likely enough to be offered
_END = array("i", [-1])  # of a document: nothing matches across it


def n_before_answer(tokens: Sequence[int], is_eog: Callable[[int], bool]) -> int:
    """Return how many of `tokens`, a prompt and one more token, a match must not reach back into.

    If the prompt ends a turn, as with a chat template, that is all of it: the template's last tokens are the
    same before every answer, so that a match of them would look long and mean nothing.
    """
    header = tokens[-1 - _HEADER : -1]
    return len(tokens) - 1 if any(map(is_eog, header)) else 0


class Document:
    """A text that grows in a suffix store, beside others.

    Any number of documents may grow in turns. Each gets proposals from the continuations in all of them,
    finished or not. A document need not be closed.
    """

    def __init__(self, store: SuffixStore, tokens: Sequence[int], *, n_silent: int = 0) -> None:
        """Append `tokens` to `store`; no match reaches back into the first `n_silent`.

        These can be offered like any other tokens.
        """
        document = array("i", tokens)
        self._store = store
        # An end is not needed here, but each loaded text has one: so the window counts all texts alike.
        self._last = store.extend(_END + document)
        self._tail = document[n_silent:][-_TAIL:]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the document."""
        # Arrays rather than numpy's: for so few tokens they save some microseconds at every step.
        recent = array("i", tokens)
        self._last = self._store.extend(recent, self._last)
        self._tail = (self._tail + recent)[-_TAIL:]

    def offer(self, drafted: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """Return up to `n` tokens to follow the document and `drafted`, and their probabilities.

        Each probability assumes that the tokens before it are right.
        """
        tokens, _, probabilities = self._store.propose(self._tail + array("i", drafted), n, 1)
        return tokens, probabilities

    def offer_tree(self, drafted: Sequence[int], n: int) -> tuple[list[int], list[int], list[float]]:
        """Return a tree of up to `n` tokens to follow the document and `drafted`: the likeliest paths.

        These are the tokens, their parents (an index before the token's own; -1: the end of `drafted`) and
        their probabilities, each assuming that the tokens above it are right. The first children are those
        that `offer` begins with.
        """
        return self._store.propose(self._tail + array("i", drafted), n, _BRANCHES)


class NgramDrafter:
    """Repeats what followed the same words before in one text: "ngram", like a user's drafter (plugin.py)."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Start with the prompt `tokens`."""
        self._text = Document(SuffixStore(_OWN), tokens)
        self._n = len(tokens)

    def draft(self, tokens: Sequence[int], room: int, sample: object) -> list[int]:
        """Return the tokens that followed the longest suffix of the text that occurred before."""
        return self._text.offer((), room)[0]

    def accept(self, tokens: Sequence[int], n_accepted: int) -> None:
        """Append the tokens that were emitted since the last call."""
        self._text.extend(tokens[self._n :])
        self._n = len(tokens)


# ---- earlier texts: the suffix store, filled from the history on disk ----


OWN_TOKENS = 1 << 16
"""Tokens of an engine's own sequences that drafts are looked for in."""


class EarlierTexts:
    """The suffix store, with earlier documents of the history in it if one is kept.

    They are read and indexed on a separate thread, while the models are loaded.
    """

    def __init__(self, header: GGUFHeader, *, kept: bool, on_message: Callable[[str], None]) -> None:
        """Begin reading the history of `header`'s tokenizer, if it is `kept`."""
        self.suffix = SuffixStore(OWN_TOKENS)
        self.rejected: RejectedPlaces | None = None
        """Where rejected drafts are kept; None: nowhere. Set by the engine, which knows what drafts."""
        self._history: History | None = None
        self._on_message = on_message
        self._lines: list[str] = []
        self._thread: threading.Thread | None = None
        self._n_vocab = header.n_vocab
        if not kept:
            return
        try:
            self._history = History(tokenizer_fingerprint(header), on_message=self._lines.append)
        except (EdgespecError, OSError) as error:
            on_message(f"earlier answers are not used: {error}")
            return
        self.suffix = SuffixStore(MAX_TOKENS)
        self._thread = threading.Thread(target=self._load, args=(self._history,), daemon=True)
        self._thread.start()

    def _load(self, history: History) -> None:
        self.suffix.extend(history.load(MAX_TOKENS - OWN_TOKENS, n_vocab=self._n_vocab))

    def ready(self) -> SuffixStore:
        """Return the suffix store, once all documents are in it."""
        if self._thread:
            self._thread.join()
            self._thread = None
        self._report()
        return self.suffix

    def add(self, tokens: list[int], rejected: RejectedText | None, adapters: str = "") -> None:
        """Add a document to the history, and its rejected drafts to those of the set `adapters`, if kept."""
        if self._history and tokens:
            self._history.append(np.asarray(tokens, np.int32))
            self._report()
        if self.rejected and rejected:
            self.rejected.of(adapters).append(rejected)

    def _report(self) -> None:
        while self._lines:
            self._on_message(self._lines.pop(0))
