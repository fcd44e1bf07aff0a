"""A draft model of another vocabulary: it reads the sequence in its own tokens and proposes the target's.

    token level    the draft's distribution, restricted to the tokens that both vocabularies have (TLI)
    string level   the draft writes a few more tokens greedily, and the target's tokenizer says how it would
                   write that text (SLEM); its first token takes the place of the draft's likeliest

both of arXiv 2502.05202, joined in one row. The string level costs passes. It is always used if the
draft's likeliest token is not in the target's vocabulary. Otherwise (a bracket and a colon, which the target
writes together with the line's end) it is used as long as it changes anything: after _QUIET attempts at a
token that changed nothing the token is used unchanged, until the target's text shows that it was the
beginning of a longer one.

Proposals are verified like any others. Every row is a distribution made only from the past and the draft's
logits, so the emitted text stays the target's, however well the two agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from edgespec.decoding.session import ForwardResult, Rows, SessionModel, TokenView
from edgespec.drafting.draft_model import DraftModel, DraftSession
from edgespec.drafting.foreign.vocabulary_map import (
    NONE,
    TextTokenizer,
    TokenVocabulary,
    VocabularyMap,
)

# ---- the target's sequence in the tokens of another vocabulary ----


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
        """Forget both texts."""
        self.tokens.clear()
        self._ids.clear()
        self._words.clear()

    def extend(self, ids: Sequence[int]) -> None:
        """Translate `ids`, which follow; the last word so far may be tokenized again."""
        word = self._pop_word()
        for token in ids:
            if word and self._begins_word(word, token):
                self._append_word(word)
                word = []
            word.append(token)
        self._append_word(word)

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens of the target."""
        while self.n_read > n:
            word = self._pop_word()
            self._append_word(word[: max(0, n - self.n_read)])

    def drop_first(self, n_tokens: int) -> int:
        """Drop the first words, at least `n_tokens` of the draft's tokens.

        Return how many of the target's tokens were dropped.
        """
        start, at = next((word for word in self._words if word[1] >= n_tokens), self._words[-1])
        del self._ids[:start], self.tokens[:at]
        self._words = [(a - start, b - at) for a, b in self._words if a >= start]
        return start

    def alone(self, token: int) -> list[int]:
        """Return the draft's tokens for one of the target's, regardless of its context."""
        if token == self._bos:  # the draft has one of its own, or wants none
            return []
        draft = int(self._draft_of[token])
        if draft != NONE:
            return [draft]
        if self._is_control(token):  # no such control token here: its name, as text
            return self._tokenizer.tokens(self._target.piece(token, special=True))
        return self._tokenizer.tokens(self._text(token))

    def _pop_word(self) -> list[int]:
        if not self._words:
            return []
        start, at = self._words.pop()
        word = self._ids[start:]
        del self._ids[start:], self.tokens[at:]
        return word

    def _append_word(self, word: Sequence[int]) -> None:
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


# ---- translated_model ----


ROOM_PER_TOKEN = 1.5
"""Tokens of the draft's context that are counted on for one of the target's."""

_MOST_LOOKED = 3  # more tokens that the draft writes, to see how the target would write its text
_QUIET = 3  # looks without a change after which a token is taken as it is
_REMEMBERED = 64  # last tokens among which one that was taken without a look is compared with what came


class ForeignModel(SessionModel, TokenVocabulary, Protocol):
    """A draft model of another vocabulary."""


class ForeignSession(DraftSession, Protocol):
    """A session of such a model."""

    @property
    def model(self) -> ForeignModel:
        """The draft model, of another vocabulary."""


class TranslatedModel(DraftModel):
    """The model of `session` behind the interface of DraftModel, which counts the target's tokens.

    Its cache holds BOS if the model wants one, the translation of what it has read, and after that the
    tokens it wrote when it looked ahead, which are reused if the sequence continues with them. So `trim` only
    forgets: the next pass keeps the common prefix of its cache and the sequence.
    """

    def __init__(self, session: ForeignSession, target: TokenVocabulary, mapping: VocabularyMap) -> None:
        """Draft for `target` with `session`, whose model's vocabulary `mapping` relates to the target's."""
        super().__init__(session, n_vocab=target.n_vocab)
        self.n_vocab = target.n_vocab
        draft: TokenVocabulary = session.model
        self._map = mapping
        self._translation = Translation(target, draft, mapping)
        self._written = TextTokenizer(target)
        self._target_text = lru_cache(_CACHED)(target.piece)
        self._draft_text = lru_cache(_CACHED)(draft.piece)
        self._ends = frozenset(mapping.draft_ends)
        # Read where there is nothing to read.
        self._filler = next((t for t in (draft.bos, draft.eos) if t is not None), 0)
        self._prefix = [draft.bos] if draft.add_bos and draft.bos is not None else []
        self._cache: list[int] = []  # the draft's tokens in the session, as far as it still has them
        self._seen: dict[int, Rows] = {}  # copies of logits, by the length of the cache they follow
        self._quiet: dict[int, int] = {}  # a token: looks at it in a row that changed nothing
        self._unlooked: dict[int, tuple[int, int]] = {}  # place in the sequence: draft's and target's token

    @property
    def n_ctx(self) -> int:
        """Tokens of the target that the model's context holds, estimated from its own."""
        return int(self._session.n_ctx / ROOM_PER_TOKEN)

    @property
    def n_past(self) -> int:
        """Tokens of the target it has read."""
        return self._translation.n_read

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Forget everything: nothing of the sequence is read yet."""
        self._session.clear()
        self._start_at(0)
        self._unlooked.clear()

    def n_unread(self, n_tokens: int) -> int:
        """Return how many of a sequence of `n_tokens` it has not read."""
        return n_tokens - self._offset - self.n_past

    def read(self, tokens: Sequence[int]) -> None:
        """Read the unread part of `tokens` except the last, which is read with the next pass."""
        wanted = self._follow(TokenView(tokens, n=len(tokens) - 1))
        n_kept = self._common(wanted)
        if n_kept < len(wanted):
            n_kept = self._rewind(n_kept)
            self._eval_own(wanted[n_kept:], n_logits=0)

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> ForwardResult:
        """Read the rest of `tokens`; return the logits after them, -inf where the draft has no token.

        Its passes depend on each other, and are not shared. There are no `guesses`.
        """
        started = time.perf_counter()
        self._compare(tokens)
        wanted = self._follow(tokens)
        row = self._row_after(wanted)
        out = np.full((1, self.n_vocab), -np.inf, np.float32)
        draft_ids, target_ids = self._map.shared
        out[0, target_ids] = row[draft_ids]
        if self._map.target_end is not None and self._ends:
            out[0, self._map.target_end] = max(row[end] for end in self._ends)
        self._look(row, len(wanted), out[0], len(tokens))
        return ForwardResult(out, time.perf_counter() - started, 0)

    def trim(self, n_tokens: int) -> None:
        """Forget the tokens read after the sequence's first `n_tokens`."""
        self._translation.truncate(max(0, n_tokens - self._offset))
        self._offset = min(self._offset, n_tokens)

    # --- the sequence and the cache

    def _start_at(self, offset: int) -> None:
        self._offset = offset
        self._translation.clear()

    def _follow(self, tokens: Sequence[int]) -> list[int]:
        """Translate the new part of `tokens`; return the tokens that the cache should hold."""
        translation = self._translation
        translation.extend(tokens[self._offset + translation.n_read :])
        most = self._session.n_ctx - len(self._prefix) - _MOST_LOOKED - 1
        if len(translation.tokens) > most:
            self._offset += translation.drop_first(len(translation.tokens) - most // 2)
        return self._prefix + translation.tokens[-most:] or [self._filler]

    def _common(self, wanted: Sequence[int]) -> int:
        del self._cache[self._session.n_past :]  # a pass that was broken off took its tokens with it
        n = min(len(self._cache), len(wanted))
        if self._cache[:n] == wanted[:n]:
            return n
        return next(i for i, (a, b) in enumerate(zip(self._cache, wanted, strict=False)) if a != b)

    def _rewind(self, n_keep: int) -> int:
        """Cut the cache back to `n_keep` tokens, or fewer; return how many."""
        n_keep = self._session.rewind(n_keep)
        del self._cache[n_keep:]
        self._seen = {n: row for n, row in self._seen.items() if n <= n_keep}
        return n_keep

    def _eval_own(self, own: Sequence[int], *, n_logits: int) -> Rows:
        rows = self._session.eval(own, n_logits=n_logits)
        self._cache += own
        return rows

    def _row_after(self, wanted: Sequence[int]) -> Rows:
        """Return the logits after `wanted`: known ones, or those of one pass."""
        n_kept = self._common(wanted)
        if n_kept == len(wanted):
            self._seen = {n: row for n, row in self._seen.items() if n >= n_kept}
            if n_kept in self._seen:
                return self._seen[n_kept]
            n_kept -= 1
        n_kept = self._rewind(n_kept)
        self._seen.clear()
        row: Rows = self._eval_own(wanted[n_kept:], n_logits=1)[0]
        return row

    # --- the string level

    def _look(self, row: Rows, n_before: int, out: Rows, place: int) -> None:
        """If the target would write the draft's likeliest text with another token, put that in its place.

        `row`: the draft's logits after `n_before` tokens; `out`: the row made from them, for the token at
        `place` in the sequence.
        """
        first = int(row.argmax())
        plain = int(self._map.target_of[first])
        if first in self._ends or not self._draft_text(first):
            return
        if plain != NONE and self._quiet.get(first, 0) >= _QUIET:
            self._unlooked[place] = first, plain
            return
        logit = row[first]
        written = self._continue(row, first, n_before)
        if not written:
            return
        self._quiet[first] = self._quiet.get(first, 0) + 1 if written[0] == plain else 0
        if written[0] != plain:
            if plain != NONE:
                out[plain] = -np.inf
            out[written[0]] = logit

    def _continue(self, row: Rows, first: int, n_before: int) -> list[int]:
        """Let the draft continue from `first` until the target's first token for its text is certain.

        The last token of a text never is: what follows may be written together with it.
        """
        if n_before not in self._seen:
            self._seen[n_before] = row.copy()
        said, token, n = b"", first, n_before
        while True:
            said += self._draft_text(token)
            written = self._written.tokens(_whole_characters(said))
            if len(written) > 1 or n - n_before == _MOST_LOOKED:
                return written
            if self._cache[n : n + 1] != [token] or n + 1 not in self._seen:
                before = self._cache[:n]
                own = [*before[self._rewind(n) :], token]
                self._seen[n + 1] = self._eval_own(own, n_logits=1)[0].copy()
            n += 1
            token = int(self._seen[n].argmax())
            if token in self._ends:
                return written

    def _compare(self, tokens: Sequence[int]) -> None:
        for place, (first, plain) in [*self._unlooked.items()]:
            if place < len(tokens) - _REMEMBERED:
                del self._unlooked[place]
            elif place < len(tokens) and tokens[place] != plain:
                del self._unlooked[place]
                if self._target_text(tokens[place]).startswith(self._target_text(plain)):
                    self._quiet[first] = 0


def _whole_characters(data: bytes) -> bytes:
    return data.decode(errors="ignore").encode()
