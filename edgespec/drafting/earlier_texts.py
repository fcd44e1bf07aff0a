"""Earlier texts, in which drafts are looked for: the suffix store, filled from the history on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from edgespec.drafting.history import MAX_TOKENS, History
from edgespec.drafting.suffix import SuffixDrafts
from edgespec.errors import EdgespecError
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.gguf_header import GGUFHeader

OWN_TOKENS = 1 << 16
"""Tokens of an engine's own sequences that drafts are looked for in."""


class EarlierTexts:
    """The suffix store, with earlier documents of the history in it if one is kept.

    They are read and indexed in a thread of their own, while the models are loaded.
    """

    def __init__(self, header: GGUFHeader, *, kept: bool, on_message: Callable[[str], None]) -> None:
        """Begin reading the history of `header`'s tokenizer, if it is `kept`."""
        self.suffix = SuffixDrafts(OWN_TOKENS)
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
        self.suffix = SuffixDrafts(MAX_TOKENS)
        self._thread = threading.Thread(target=self._load, args=(self._history,), daemon=True)
        self._thread.start()

    def _load(self, history: History) -> None:
        self.suffix.load(history.load(MAX_TOKENS - OWN_TOKENS, n_vocab=self._n_vocab))

    def ready(self) -> SuffixDrafts:
        """Return the suffix store, once all is in it."""
        if self._thread:
            self._thread.join()
            self._thread = None
        self._report()
        return self.suffix

    def keep(self, tokens: list[int]) -> None:
        """Add a document to the history, if one is kept."""
        if self._history and tokens:
            self._history.append(np.asarray(tokens, np.int32))
            self._report()

    def _report(self) -> None:
        while self._lines:
            self._on_message(self._lines.pop(0))
