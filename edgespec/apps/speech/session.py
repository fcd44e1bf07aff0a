"""One sequence of a Whisper decoder as a session of the exact loop, so that drafts run through it unchanged.

The loop (decoding/generate.py), the draft model and the batcher ask a session for passes, and to take tokens
back; llama.cpp's is edgespec/llama/session.py. A Whisper decoder attends to nothing but its tokens and one
window of sound, so taking tokens back is a shorter cache.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np

from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.whisper_model import DecoderCache, SequenceBatch
from edgespec.decoding.session import ForwardResult, Rows, SequenceTokens


class SpeechVocabulary:
    """A Whisper tokenizer as the loop and drafts of another vocabulary ask for it: a TokenVocabulary.

    Timestamps have a name and no text; languages and tasks have neither, so that a draft that knows none
    reads none.
    """

    keeps_state = False
    can_rewind = True
    add_bos = False
    bos: int | None = None
    leaves_last_states = False

    def __init__(self, tokenizer: WhisperTokenizer) -> None:
        """Answer for `tokenizer`."""
        self.tokenizer = tokenizer
        self.n_vocab = tokenizer.n_vocab
        self.eos: int | None = tokenizer.eot
        self.eot: int | None = tokenizer.eot
        self.path = str(tokenizer.path or "Whisper")
        self.name = tokenizer.path.name if tokenizer.path else "Whisper"
        self._names = {
            tokenizer.eot: b"<|endoftext|>",
            tokenizer.sot: b"<|startoftranscript|>",
            tokenizer.sot_prev: b"<|startofprev|>",
            tokenizer.no_timestamps: b"<|notimestamps|>",
        }

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a window's text."""
        return token == self.tokenizer.eot

    def sequence_breakers(self, _texts: tuple[str, ...], /) -> array[int]:
        """Return none: no option of speech asks for DRY."""
        return array("i")

    def is_control(self, token: int) -> bool:
        """Whether `token` is no text."""
        return token >= self.tokenizer.eot

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of `token`; those of a special one's name only if `special`."""
        if not self.is_control(token):
            return self.tokenizer.piece(token)
        if not special:
            return b""
        if self.tokenizer.is_timestamp(token):
            return b"<|%.2f|>" % self.tokenizer.seconds(token)
        return self._names.get(token, b"")

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Return the tokens of `text`; there are no special ones in it."""
        return self.tokenizer.encode(text)


class SpeechSession:
    """One sequence in a cache of a Whisper decoder; `session()` is what the loop takes."""

    all_logits = False
    n_features_max = 0
    most_drafted = 32  # tokens of a tree in one pass

    def __init__(
        self, cache: DecoderCache, traits: SpeechVocabulary, *, n_ctx: int, noted: int | None = None
    ) -> None:
        """Continue sequence 0 of `cache`, up to `n_ctx` tokens.

        `noted`: the position whose logits are kept when they are computed, in `noted_row`: that of
        <|startoftranscript|>, where the model says whether anyone speaks.
        """
        self.cache = self
        self.model = traits
        self.sequence = 0
        self.n_ctx = n_ctx
        self.n_logits_max = n_ctx
        self.noted_row: Rows | None = None
        """The logits at the noted position, (n_vocab,), a copy; None: not computed yet."""
        self.seconds = 0.0
        """Time of all passes."""
        self._cache = cache
        self._noted = noted

    @property
    def n_past(self) -> int:
        """Tokens in the sequence."""
        return self._cache.n_past(self.sequence)

    @property
    def tokens(self) -> list[int]:
        """Nothing: what an earlier window had read is of no use."""
        return []

    def forward(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        """Run a pass over one part, which is this sequence's."""
        (part,) = parts
        started = time.perf_counter()
        n_tokens, parents = len(part.tokens), part.parents
        if parents is not None and list(parents) == list(range(-1, len(parents) - 1)):
            parents = None
        n_rows = part.n_logits
        noted = -1 if self._noted is None or self.noted_row is not None else self._noted - self.n_past
        is_noted = 0 <= noted < n_tokens and parents is None
        if is_noted:
            n_rows = max(n_rows, n_tokens - noted)
        (rows,) = self._cache.forward([SequenceBatch(self.sequence, part.tokens, n_rows, parents)])
        if is_noted:
            self.noted_row = np.array(rows[noted - n_tokens])
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return [ForwardResult(rows[n_rows - part.n_logits :], seconds, n_tokens)]

    def eval(self, tokens: Sequence[int], *, n_logits: int = 1, parents: Sequence[int] | None = None) -> Rows:
        """Append `tokens`; return the logits after each of the last `n_logits`, as Session.eval does."""
        if not tokens:
            return np.empty((0, self.model.n_vocab), np.float32)
        return self.forward([SequenceTokens(self.sequence, tokens, n_logits, parents)])[0].rows

    def rewind(self, n_keep: int) -> int:
        """Cut the sequence back to its first `n_keep` tokens; return `n_keep`."""
        n_past = self.n_past
        if not 0 <= n_keep <= n_past:
            raise ValueError(f"cannot keep {n_keep} of {n_past} tokens")
        if n_keep < n_past:
            self._cache.rewind(self.sequence, n_keep)
        return n_keep

    def clear(self) -> None:
        """Empty the sequence."""
        self.rewind(0)

    def close(self) -> None:
        """Do nothing: the cache belongs to the window."""
