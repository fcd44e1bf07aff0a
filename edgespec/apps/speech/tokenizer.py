"""Whisper's tokenizer: byte-pair encoding of text, and the special tokens with what they mean.

    ids = ordinary tokens, <|endoftext|>, <|startoftranscript|>, languages, translate, transcribe,
          start of LM, start of previous text, no speech, no timestamps, <|0.00|> .. <|30.00|>

The ordinary tokens, which are their ranks too, come from the model's file; the special ones follow them in
this order in all of OpenAI's models, and the number of languages from the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.apps.speech.options import LANGUAGES, WITHOUT_SPACES
from edgespec.apps.speech.weights.reading import BrokenModelError, token_bytes
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf import TOKENS, read_gguf

if TYPE_CHECKING:
    import tiktoken

SECONDS_PER_TIMESTAMP = 0.02
N_TIMESTAMPS = 1501

# GPT-2's: contractions, runs of letters, of digits, of other signs, each with a space before; white space.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

# OpenAI's list of what stands in subtitles for sounds that nobody speaks. Tokens that are one of these signs
# alone, with a space before or not, are suppressed; of musical signs the first token of several.
_SIGNS = '"#()*+/:;<=>@[\\]^_`{|}~「」『』'
_RUNS = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
_MUSIC = "♩♪♫♬♭♮♯"
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class WhisperTokenizer:
    """The tokens of one Whisper model: words, languages, tasks and times."""

    tokens: tuple[bytes, ...]
    """The bytes of the ordinary tokens, by id."""
    n_vocab: int
    is_multilingual: bool = True
    """Whether the model knows other languages than English, and translates."""
    path: Path | None = None
    eot: int = field(init=False)
    """The token that ends a window's text."""
    sot: int = field(init=False)
    """The token that begins a transcript."""
    translate: int = field(init=False)
    transcribe: int = field(init=False)
    """The tokens of the tasks: English, or what is spoken."""
    sot_lm: int = field(init=False)
    """The token that begins a text without sound, of training."""
    sot_prev: int = field(init=False)
    """The token before the text that came before."""
    no_speech: int = field(init=False)
    """The token whose probability at the start says that nobody speaks."""
    no_timestamps: int = field(init=False)
    """The token that asks for text without timestamps."""
    timestamp_begin: int = field(init=False)
    """The token of 0.00 s; each one more is 0.02 s later."""

    @classmethod
    def from_gguf(cls, path: Path) -> WhisperTokenizer:
        """Return the tokenizer in a model's file. Raises EdgespecError if it is no Whisper model."""
        gguf = read_gguf(path)
        try:
            tokens = tuple(token_bytes(token.decode(errors="replace")) for token in gguf.texts(TOKENS))
            n_vocab = int(gguf.number("whisper.vocab_size"))
            is_multilingual = bool(gguf.number("whisper.multilingual"))
        except (BrokenModelError, KeyError) as error:
            reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise EdgespecError(f"{gguf.path}: no Whisper model's vocabulary: {reason}") from None
        if n_vocab - len(tokens) < N_TIMESTAMPS + 8:
            raise EdgespecError(f"{gguf.path}: damaged: a vocabulary of {n_vocab:,} has no special tokens")
        return cls(tokens, n_vocab, is_multilingual, gguf.path)

    def __post_init__(self) -> None:
        first = self.n_vocab - N_TIMESTAMPS
        for name, token in (
            ("eot", len(self.tokens)),
            ("sot", len(self.tokens) + 1),
            ("translate", first - 6),
            ("transcribe", first - 5),
            ("sot_lm", first - 4),
            ("sot_prev", first - 3),
            ("no_speech", first - 2),
            ("no_timestamps", first - 1),
            ("timestamp_begin", first),
        ):
            object.__setattr__(self, name, token)

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """The codes of the languages in the order of their tokens."""
        return tuple(LANGUAGES)[: max(0, self.translate - self.sot - 1)]

    @property
    def language_tokens(self) -> range:
        """The tokens of `languages`."""
        return range(self.sot + 1, self.sot + 1 + len(self.languages))

    def language_token(self, code: str) -> int:
        """Return the token of a language. Raises UsageError if the model has none for it."""
        if code not in self.languages:
            raise UsageError(f"{self.path or 'this model'} knows no language {code!r}", field="language")
        return self.sot + 1 + self.languages.index(code)

    def start(self, language: str | None, *, translate: bool = False, timestamps: bool = True) -> list[int]:
        """Return the tokens that begin a transcript: language and task for a model of many languages."""
        tokens = [self.sot]
        if self.is_multilingual:
            tokens += [self.language_token(language or "en")]
            tokens += [self.translate if translate else self.transcribe]
        return tokens if timestamps else [*tokens, self.no_timestamps]

    def is_timestamp(self, token: int) -> bool:
        """Whether `token` is a time."""
        return self.timestamp_begin <= token < self.n_vocab

    def seconds(self, token: int) -> float:
        """Return the time of a timestamp token, seconds from the window's start."""
        return (token - self.timestamp_begin) * SECONDS_PER_TIMESTAMP

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(self.tokens) if token}
        return tiktoken.Encoding("whisper", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> list[int]:
        """Return the ordinary tokens of a text; the names of special tokens in it are text too."""
        return self._encoding.encode_ordinary(text)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, maybe part of a character; b"" for special tokens."""
        return self.tokens[token] if 0 <= token < len(self.tokens) else b""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens without the special ones; what is no UTF-8 becomes U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode(errors="replace")

    def split_to_words(self, tokens: Sequence[int], language: str) -> tuple[list[str], list[list[int]]]:
        """Return the words of tokens, and the tokens of each word, as OpenAI's word timestamps split them.

        Words begin with a space; a sign of punctuation alone and special tokens are words too. In languages
        without spaces each whole character is a word.
        """
        pieces = self._characters(tokens)
        if language not in WITHOUT_SPACES:
            pieces = self._joined(pieces)
        return [text for text, _ in pieces], [ids for _, ids in pieces]

    def _characters(self, tokens: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Return the smallest groups of tokens that are whole characters, with their text."""
        whole = self._shown(tokens)
        pieces, current, offset = [], list[int](), 0
        for token in tokens:
            current.append(token)
            text = self._shown(current)
            at = offset + text.find(_REPLACEMENT)
            # A character that is cut is shown as U+FFFD, which the whole text has there only if it says so.
            if _REPLACEMENT not in text or (at < len(whole) and whole[at] == _REPLACEMENT):
                pieces.append((text, current))
                current, offset = [], offset + len(text)
        return pieces

    def _joined(self, pieces: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
        """Join pieces to words that spaces and punctuation separate."""
        import string

        words: list[tuple[str, list[int]]] = []
        for text, tokens in pieces:
            begins = text.startswith(" ") or text.strip() in string.punctuation or tokens[0] >= self.eot
            if begins or not words:
                words.append((text, list(tokens)))
            else:
                words[-1] = (words[-1][0] + text, words[-1][1] + tokens)
        return words

    def _shown(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, with times as <|1.00|> and other special tokens by name."""
        return b"".join(self.piece(token) or self._name(token).encode() for token in tokens).decode(
            errors="replace"
        )

    def _name(self, token: int) -> str:
        if self.is_timestamp(token):
            return f"<|{self.seconds(token):.2f}|>"
        if token == self.eot:
            return "<|endoftext|>"
        return "<|special|>" if token > self.eot else ""

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """The ordinary tokens of sounds and signs that nobody speaks, ascending."""
        found = {self.encode(" -")[0], self.encode(" '")[0]}
        for sign in [*_SIGNS, *_RUNS.split(), *_MUSIC]:
            for tokens in (self.encode(sign), self.encode(f" {sign}")):
                if len(tokens) == 1 or sign in _MUSIC:
                    found.add(tokens[0])
        return tuple(sorted(found))

    @cached_property
    def suppressed(self) -> tuple[int, ...]:
        """The tokens never written by default: those of no speech, tasks and starts, ascending."""
        special = {self.transcribe, self.translate, self.sot, self.sot_prev, self.sot_lm, self.no_speech}
        return tuple(sorted({*self.non_speech_tokens, *special}))
