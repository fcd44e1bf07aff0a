"""Maps two vocabularies: which tokens of both stand for the same bytes.

Text is what two tokenizers share, so tokens are compared by their bytes, whatever each file calls them:
byte-level BPE, SentencePiece's spaces, single bytes. Control tokens have no text; they stand for each
other by role.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

NONE = -1
"""In a map: no token of the other vocabulary."""


class TokenVocabulary(Protocol):
    """Tokens and their texts, as `Model` provides them."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""

    @property
    def bos(self) -> int | None:
        """The token before a text."""

    @property
    def eos(self) -> int | None:
        """The token after a text."""

    @property
    def eot(self) -> int | None:
        """The token after an answer."""

    @property
    def add_bos(self) -> bool:
        """Whether the model wants its BOS before a text."""

    def is_control(self, token: int) -> bool:
        """Whether `token` is no text."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of `token`."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of `text`."""


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """The tokens that two vocabularies share."""

    target_of: Ids
    """The target's token for each of the draft's, or NONE. End tokens lead to the target's end of turn."""
    draft_of: Ids
    """The draft's token for each of the target's, or NONE."""
    shared: tuple[Ids, Ids]
    """The draft's ids and the target's, one to one, of text that both can say in one token."""
    target_end: int | None
    """The token that ends the target's answer."""
    draft_ends: tuple[int, ...]
    """The tokens that end the draft's."""

    @property
    def n_shared(self) -> int:
        """Number of texts that are a token in both."""
        return len(self.shared[0])


def map_vocabularies(target: TokenVocabulary, draft: TokenVocabulary) -> VocabularyMap:
    """Return the map between two vocabularies; takes a microsecond or two per token.

    If several tokens have the same bytes, the one that the tokenizer itself uses is chosen, else the one with
    the smallest id. A control token of the target is read as the draft's control token of the same name, and
    the target's ends as the draft's end. BOS is never proposed, nor is any other control token.
    """
    ours, theirs = _Texts(target), _Texts(draft)
    common = ours.tokens.keys() & theirs.tokens.keys()
    draft_ids, target_ids = (
        np.array([side.tokens[text] for text in common], np.int32) for side in (theirs, ours)
    )
    order = np.argsort(draft_ids)
    shared = draft_ids[order], target_ids[order]
    target_of, draft_of = (np.full(side.n_vocab, NONE, np.int32) for side in (draft, target))
    target_of[shared[0]], draft_of[shared[1]] = shared[1], shared[0]
    for same, found in ((theirs.same, target_of), (ours.same, draft_of)):
        for token, other in same:
            found[token] = found[other]

    target_end = target.eos if target.eot is None else target.eot
    draft_ends = _given(draft.eot, draft.eos)
    if target_end is not None:
        target_of[list(draft_ends)] = target_end
    for name, token in ours.controls.items():
        draft_of[token] = theirs.controls.get(name, NONE)
    for end in _given(target.eot, target.eos):
        if draft_of[end] == NONE and draft_ends:
            draft_of[end] = draft_ends[0]
    return VocabularyMap(
        target_of=target_of,
        draft_of=draft_of,
        shared=shared,
        target_end=target_end,
        draft_ends=draft_ends,
    )


class _Texts:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        pieces = [vocabulary.piece(token) for token in range(vocabulary.n_vocab)]
        self.tokens: dict[bytes, int] = {}
        again: dict[bytes, list[int]] = {}
        for token, text in enumerate(pieces):
            if self.tokens.setdefault(text, token) != token:
                again.setdefault(text, [self.tokens[text]]).append(token)
        self.tokens.pop(b"", None)
        nameless = again.pop(b"", [])
        tokenizer = TextTokenizer(vocabulary)
        for text in again:
            written = tokenizer.tokens(text)
            if len(written) == 1 and pieces[written[0]] == text:
                self.tokens[text] = written[0]
        self.same = [(token, self.tokens[text]) for text, tokens in again.items() for token in tokens]
        """Each of several tokens of the same bytes, and the one that stands for them."""
        controls = [token for token in reversed(nameless) if vocabulary.is_control(token)]
        self.controls = {vocabulary.piece(token, special=True): token for token in controls}
        """The control tokens by their names."""


def _given(*tokens: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in tokens if token is not None))


class TextTokenizer:
    """A vocabulary's tokenizer over bytes from the middle of a text.

    No space is put before them, as some tokenizers do at the start of a text. Bytes that are not UTF-8
    (the first half of a character) become the tokens of single bytes, as far as there are such.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        """Tokenize as `vocabulary` does."""
        self._vocabulary = vocabulary
        self._bytes: list[int | None] | None = None  # found when first needed
        # A line break never merges with what follows: behind one, a tokenizer is in the middle of a text.
        self._anchor, self._n_anchor = "", 0
        if b"".join(map(vocabulary.piece, self._plain("a"))) != b"a":
            self._anchor = "\n"
            self._n_anchor = len(self._plain("\n"))

    def tokens(self, data: bytes) -> list[int]:
        """Return the tokens of `data`."""
        try:
            return self._middle(data.decode())
        except UnicodeDecodeError as error:
            end = error.end
            half = [t for byte in data[error.start : end] if (t := self._byte(byte)) is not None]
            return [*self.tokens(data[: error.start]), *half, *self.tokens(data[end:])]

    def _middle(self, text: str) -> list[int]:
        return self._plain(self._anchor + text)[self._n_anchor :] if text else []

    def _plain(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)

    def _byte(self, byte: int) -> int | None:
        if self._bytes is None:
            self._bytes = [None] * 256
            for token in range(self._vocabulary.n_vocab):
                piece = self._vocabulary.piece(token)
                if len(piece) == 1 and self._bytes[piece[0]] is None:
                    self._bytes[piece[0]] = token
        return self._bytes[byte]
