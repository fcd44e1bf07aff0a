"""A model's vocabulary as llguidance reads it: each token's bytes, which are text, how text is tokenized.

Tokens are spelled as a reader sees them. A token without visible text (a control token, an unused one) is
special: no text of a grammar matches it, and a grammar names it by its number, `<[5]>`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableSet
from concurrent.futures import Future
from typing import Protocol

from llguidance import LLTokenizer

from edgespec.errors import UsageError
from edgespec.platform.closing import Closing

_SPECIAL = b"\xff"  # how llguidance marks a token that is no text

_known: weakref.WeakKeyDictionary[GrammarModel, GrammarVocabulary] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class GrammarModel(Protocol):
    """The model whose tokens a grammar allows or forbids."""

    @property
    def name(self) -> str:
        """Its name, for errors."""

    @property
    def n_vocab(self) -> int:
        """Tokens of its vocabulary."""

    @property
    def handle(self) -> object:
        """The loaded model. Raises EdgespecError once it is closed."""

    @property
    def vocabulary(self) -> int:
        """The address of its vocabulary, for llguidance."""

    @property
    def tokenize_address(self) -> int:
        """The address of the C function that tokenizes with it."""

    @property
    def sessions(self) -> MutableSet[Closing]:
        """All that is closed before it."""

    def is_eog(self, token: int) -> bool:
        """Return whether `token` ends a text."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of `token`; with `special` also a control token's name."""


class GrammarVocabulary(Closing):
    """The vocabulary of one model, which a thread prepares while the prompt is read.

    That takes half a second for 152,000 tokens. It is closed with the model's sessions, before the model.
    """

    def __init__(self, model: GrammarModel) -> None:
        """Begin to prepare."""
        self._made: Future[LLTokenizer] = Future()
        self._thread = threading.Thread(target=self._prepare, args=(model,), name="edgespec-vocabulary")
        model.sessions.add(self)
        self._thread.start()

    @classmethod
    def of(cls, model: GrammarModel) -> GrammarVocabulary:
        """Return the vocabulary of `model`, prepared once per model."""
        with _lock:
            found = _known.get(model)
            if found is None:
                found = _known[model] = cls(model)
            return found

    def tokenizer(self) -> LLTokenizer:
        """Return it once it is prepared. Raises UsageError for a model whose texts cannot end."""
        return self._made.result()

    def close(self) -> None:
        """Wait until nothing reads the model."""
        self._thread.join()

    def _prepare(self, model: GrammarModel) -> None:
        try:
            self._made.set_result(_tokenizer(model))
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            self._made.set_exception(error)


def _tokenizer(model: GrammarModel) -> LLTokenizer:
    tokens = range(model.n_vocab)
    ends = [token for token in tokens if model.is_eog(token)]
    if not ends:
        raise UsageError(f"{model.name} has no token that ends a text, so that none can match a grammar")
    made: LLTokenizer = LLTokenizer.from_llamacpp(  # type: ignore[attr-defined] # missing in its stub
        tokens=[model.piece(token) or _SPECIAL + model.piece(token, special=True) for token in tokens],
        vocab_ptr=model.vocabulary,
        tokenize_fptr=model.tokenize_address,
        eos_token=ends,
        slices=None,
    )
    return made
