"""A grammar over a model's vocabulary, run by llguidance (docs/structured.md)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableSet, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgespec.decoding.grammar.constraint import Constraint, Words
from edgespec.decoding.grammar.source import GrammarSource, on_large_stack, reason
from edgespec.decoding.json_schema.reading import Schema
from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.closing import Closing

# ---- a vocabulary as llguidance reads it ----


_SPECIAL = b"\xff"  # how llguidance marks a token that is no text

_known: weakref.WeakKeyDictionary[GrammarModel, GrammarVocabulary] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class GrammarModel(Protocol):
    """The model whose tokens a grammar allows or forbids."""

    @property
    def name(self) -> str:
        """The model's name, for errors."""

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
        """Whether `token` ends a text."""

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
        """Return the tokenizer once it is prepared. Raises UsageError for a model whose texts cannot end."""
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


# ---- grammar ----


_LIMITS = LLParserLimits(verbose_errors=False, max_items_in_row=20_000)  # thousands of optional properties


class Grammar:
    """A grammar over a model's vocabulary. Immutable: any number of generations can use it."""

    def __init__(self, model: GrammarModel, source: GrammarSource | str, *, name: str = "grammar") -> None:
        """Take a source that was read, or text in llama.cpp's GBNF, which must match the rule "root".

        The model's vocabulary is prepared in another thread. Raises UsageError, whose field is `name`, for
        what is no grammar.
        """
        self.source = GrammarSource.gbnf(source, name) if isinstance(source, str) else source
        self.name = self.source.name
        self.warnings = self.source.warnings
        """Parts of the grammar that are enforced only in part, or not at all."""
        self.model = model
        self._vocabulary = GrammarVocabulary.of(model)

    @classmethod
    def from_json_schema(
        cls, model: GrammarModel, schema: str | Schema, *, name: str = "json_schema", strict: bool = False
    ) -> Grammar:
        """Return the grammar of the JSON values that `schema` describes, written in one line.

        What of it cannot be enforced is named in `warnings`; with `strict` it is a UsageError.
        """
        return cls(model, GrammarSource.json_schema(schema, name, strict=strict))

    @classmethod
    def any_json(cls, model: GrammarModel) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.from_json_schema(model, {"type": "object"})

    @classmethod
    def from_lark(cls, model: GrammarModel, text: str, *, name: str = "grammar") -> Grammar:
        """Return the grammar of `text`, in llguidance's dialect of Lark. Raises UsageError."""
        return cls(model, GrammarSource.lark(text, name))

    @classmethod
    def from_regex(cls, model: GrammarModel, pattern: str, *, name: str = "regex") -> Grammar:
        """Return the grammar of texts that `pattern` matches as a whole. Raises UsageError."""
        return cls(model, GrammarSource.regex(pattern, name))

    @classmethod
    def from_choice(cls, model: GrammarModel, texts: Sequence[str], *, name: str = "choice") -> Grammar:
        """Return the grammar of which each of `texts` is a whole text. Raises UsageError."""
        return cls(model, GrammarSource.choice(texts, name))

    def begin(self, params: SamplingParams | None = None) -> Constraint:
        """Return the Constraint of one generation, which samples with `params`.

        Raises EdgespecError if the model is closed.
        """
        _ = self.model.handle  # raises if the model is closed
        return Constraint(
            self.matcher,
            self.model.n_vocab,
            is_eog=self.model.is_eog,
            banned=params.banned if params else (),
            name=self.name,
        )

    def matcher(self) -> LibraryMatcher:
        """Return a position at its beginning. Raises UsageError for a grammar that is none."""
        return LibraryMatcher(self._start.deep_copy(), self.name)

    @cached_property
    def _start(self) -> LLMatcher:
        tokenizer = self._vocabulary.tokenizer()
        start = on_large_stack(
            lambda: LLMatcher(tokenizer, self.source.compiled, log_level=0, limits=_LIMITS)
        )
        if start.is_error():
            raise UsageError(reason(start.get_error()), field=self.name)
        return start


class LibraryMatcher:
    """llguidance's matcher, which reports what goes wrong: a Matcher."""

    def __init__(self, matcher: LLMatcher, name: str) -> None:
        """Own `matcher`; `name` is what errors call its grammar."""
        self._matcher, self._name = matcher, name

    def mask(self, out: Words) -> None:
        """Write a bit for each token: whether it may come next."""
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self._check()

    def consume(self, token: int) -> None:
        """Move on by `token`, which must be allowed."""
        self._matcher.consume_token(token)
        self._check()

    def rollback(self, n: int) -> None:
        """Take the last `n` tokens back."""
        self._matcher.rollback(n)
        self._check()

    def forced(self) -> list[int]:
        """Return the tokens that must follow."""
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        """Raise EdgespecError where the library has given up: a dead end, or a grammar beyond its limits."""
        if self._matcher.is_error():
            raise EdgespecError(
                f"no text can follow here: {reason(self._matcher.get_error())}", field=self._name
            )
