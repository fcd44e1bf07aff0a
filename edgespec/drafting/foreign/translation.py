"""The target's sequence in the tokens of another vocabulary.

The tokens of the target are gathered to words (space and what follows it, up to the next space), and each
word is tokenized as the draft's tokenizer would: a model guesses badly after tokens it has never seen side
by side. So the translation of a sequence depends on nothing but the sequence, and of its end only the last
word may change when more is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from edgespec.drafting.foreign.vocabulary_map import NONE, TextTokenizer, TokenVocabulary, VocabularyMap

_LONGEST = 16  # tokens of a word: text without spaces must not be tokenized again as a whole each time
_CACHED = 8192  # tokens whose text is remembered


class Translation:
    """The draft's tokens for a stretch of the target's sequence; grows, and shortens at both ends."""

    def __init__(self, target: TokenVocabulary, draft: TokenVocabulary, mapping: VocabularyMap) -> None:
        """Translate from `target`'s tokens to `draft`'s."""
        self.tokens: list[int] = []
        """The draft's tokens."""
        self._ids: list[int] = []  # the target's
        self._words: list[tuple[int, int]] = []  # where each begins, in _ids and in tokens
        self._draft_of = mapping.draft_of
        self._tokenizer = TextTokenizer(draft)
        self._is_control = lru_cache(_CACHED)(target.is_control)
        self._target = target
        self._bos = target.bos if target.add_bos else None
        self._text = lru_cache(_CACHED)(target.piece)

    @property
    def n_read(self) -> int:
        """Tokens of the target that are translated."""
        return len(self._ids)

    def clear(self) -> None:
        """Begin again."""
        self.tokens.clear()
        self._ids.clear()
        self._words.clear()

    def extend(self, ids: Sequence[int]) -> None:
        """Translate `ids`, which follow; the last word so far may be spelled anew."""
        word = self._take_last()
        for token in ids:
            if word and self._begins_word(word, token):
                self._put(word)
                word = []
            word.append(token)
        self._put(word)

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens of the target."""
        while self.n_read > n:
            word = self._take_last()
            self._put(word[: max(0, n - self.n_read)])

    def drop_first(self, n_tokens: int) -> int:
        """Leave out the first words, of at least `n_tokens` of the draft's tokens.

        Return how many tokens of the target they are.
        """
        start, at = next((word for word in self._words if word[1] >= n_tokens), self._words[-1])
        del self._ids[:start], self.tokens[:at]
        self._words = [(a - start, b - at) for a, b in self._words if a >= start]
        return start

    def alone(self, token: int) -> list[int]:
        """Return the draft's tokens for one of the target's, wherever it stands."""
        if token == self._bos:  # the draft has one of its own, or wants none
            return []
        draft = int(self._draft_of[token])
        if draft != NONE:
            return [draft]
        if self._is_control(token):  # no such control token here: its name, as text
            return self._tokenizer.tokens(self._target.piece(token, special=True))
        return self._tokenizer.tokens(self._text(token))

    def _take_last(self) -> list[int]:
        if not self._words:
            return []
        start, at = self._words.pop()
        word = self._ids[start:]
        del self._ids[start:], self.tokens[at:]
        return word

    def _put(self, word: Sequence[int]) -> None:
        if not word:
            return
        self._words.append((len(self._ids), len(self.tokens)))
        self._ids += word
        if len(word) == 1:
            self.tokens += self.alone(word[0])
        else:
            self.tokens += self._tokenizer.tokens(b"".join(map(self._text, word)))

    def _begins_word(self, word: Sequence[int], token: int) -> bool:
        if self._is_control(token) or self._is_control(word[-1]):
            return True
        before, text = self._text(word[-1]), self._text(token)
        if len(word) >= _LONGEST and not 0x80 <= (text or b" ")[0] < 0xC0:  # not within a character
            return True
        return text[:1].isspace() and not before[-1:].isspace()
