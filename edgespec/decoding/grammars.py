"""Text that must match a grammar or a JSON schema (docs/structured.md).

    GrammarSource    what a user wrote, read and checked before any model is loaded
    Grammar          the same over a model's vocabulary, run by llguidance
    Constraint       applied to one generation: which tokens may come next, and which must

The logits of forbidden tokens are set to -inf before all filters; that defines the target's distribution. The
end-of-generation tokens are allowed exactly where the grammar may end. What is allowed depends on the tokens
before and on nothing else, so target and draft are masked alike at each node of a tree.

llguidance compiles all grammars. It limits the time and memory that one takes, but descends into rules that
refer to rules: so the length of a text is limited here, and it is compiled on a large stack.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, MutableSet, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from edgespec.decoding.json_schemas import compiled, explained, read_schema
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import Rows
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.closing import Closing

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
Path = Sequence[int]
"""Drafted tokens that follow the sequence, one after the other."""


class Matcher(Protocol):
    """A position in a grammar that moves on token by token, and back."""

    def mask(self, out: Words) -> None:
        """Set bit `token % 32` of word `token // 32` where a token may come next, clear the others."""

    def consume(self, token: int) -> None:
        """Move on by `token`, which must be allowed."""

    def rollback(self, n: int) -> None:
        """Take the last `n` tokens back."""

    def forced(self) -> list[int]:
        """Return the tokens that must follow, the only ones allowed one after the other."""


class Allowed:
    """The tokens that may stand at one place."""

    __slots__ = ("ids", "is_most", "n", "words")

    def __init__(self, words: Words, n_vocab: int) -> None:
        """Read the mask `words`, a bit for each of `n_vocab` tokens."""
        self.words = words
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=n_vocab).view(np.bool_)
        self.n = int(np.count_nonzero(bits))
        """Number of allowed tokens."""
        self.is_most = 2 * self.n > n_vocab
        """Whether `ids` are the forbidden tokens; else they are the allowed ones."""
        self.ids: Ids = np.flatnonzero(~bits if self.is_most else bits).astype(np.int32)

    def __contains__(self, token: int) -> bool:
        """Whether `token` is allowed."""
        return bool(self.words[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


class Constraint(Closing):
    """The tokens that a grammar allows after a generation's sequence, and after paths of drafted tokens.

    Not for use by two threads at once.
    """

    def __init__(
        self,
        start: Callable[[], Matcher],
        n_vocab: int,
        *,
        is_eog: Callable[[int], bool],
        banned: Sequence[int] = (),
        name: str = "the grammar",
    ) -> None:
        """Begin where the matcher that `start` returns begins; it is called when it is first needed.

        `banned` tokens are never allowed. `name` stands in errors.
        """
        self._start, self._n_vocab, self._is_eog, self._name = start, n_vocab, is_eog, name
        self._matcher: Matcher | None = None
        self._at: list[int] = []  # the path that the matcher has followed
        self._ended = False
        self._found: dict[tuple[int, ...], Allowed] = {}
        self._last: Allowed | None = None
        self._usable = np.full((n_vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
        for token in banned:
            self._usable[token >> 5] &= ~np.uint32(1 << (token & 31))
        self._rows: Rows = np.empty((0, n_vocab), np.float32)
        self._written: list[Allowed | None] = []  # what each of `_rows` was masked with; None: nothing

    @property
    def may_force(self) -> bool:
        """Whether a token of the next draft may be forced; if none is, a drafter may rest."""
        return True

    def mask(self, row: Rows, path: Path, *, place: int = 0) -> Rows | None:
        """Return the logits `row`, which follow `path`, with forbidden tokens at -inf.

        The result is a buffer of this object, one for each `place`, valid until the next call with that
        place. None if nothing may follow: after an end, or a path that the grammar forbids. Raises
        EdgespecError if the grammar allows no token of the model. A row of fewer than n_vocab logits, a draft
        model's, may be -inf everywhere then.
        """
        allowed = self._allowed(tuple(path))
        if allowed is None:
            return None
        self._make_room(place + 1)
        out, before, n = self._rows[place], self._written[place], len(row)
        ids = allowed.ids if n == self._n_vocab else allowed.ids[allowed.ids < n]
        if allowed.is_most:
            out[:n] = row
            out[ids] = -np.inf
        else:
            if before is None or before.is_most:
                out.fill(-np.inf)
            else:
                out[before.ids] = -np.inf
            out[ids] = row[ids]
        self._written[place] = allowed
        masked: Rows = out[:n]
        return masked

    def masked(self, rows: Rows, paths: Sequence[Path]) -> Rows:
        """Return `rows` (len(paths), n_vocab) masked, each after its path; unmasked if nothing may follow."""
        self._make_room(len(paths))
        for place, path in enumerate(paths):
            if self.mask(rows[place], path, place=place) is None:
                self._rows[place] = rows[place]
                self._written[place] = None
        return self._rows[: len(paths)]

    def allows(self, path: Path, token: int) -> bool:
        """Whether `token` may follow `path`."""
        allowed = self._allowed(tuple(path))
        return allowed is not None and token in allowed

    def fitting(self, path: Path, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow `path`, one after the other."""
        for n, token in enumerate(tokens):
            if not self.allows((*path, *tokens[:n]), token):
                return n
        return len(tokens)

    def forced(self, path: Path) -> int | None:
        """Return the only token that may follow `path`; None where there is a choice, or nothing may."""
        allowed = self._allowed(tuple(path))
        return int(allowed.ids[0]) if allowed is not None and allowed.n == 1 else None

    def forced_run(self, path: Path) -> list[int]:
        """Return the tokens that must follow `path`: at each place the only one allowed."""
        if self.forced(path) is None or not self._go(path):
            return []
        assert self._matcher  # noqa: S101 - for the type checker: `_go` made it
        tokens = self._matcher.forced()
        return tokens[: self.fitting(path, tokens)]

    def advance(self, tokens: Sequence[int]) -> None:
        """Move on by `tokens`, which were emitted."""
        if tokens:
            self._ended = not self._go(tokens) or self._is_eog(tokens[-1])
        self._at = []
        self._found = {}

    def close(self) -> None:
        """Free the matcher; nothing may follow from now on."""
        self._matcher, self._ended, self._found = None, True, {}

    def _allowed(self, path: tuple[int, ...]) -> Allowed | None:
        found = self._found.get(path)
        if found is None and not (path and self._is_eog(path[-1])) and self._go(path):
            found = self._found[path] = self._look()
        return found

    def _go(self, path: Path) -> bool:
        """Move the matcher to the end of `path`; return False if the grammar forbids it, or has ended."""
        if self._ended:
            return False
        if self._matcher is None:
            self._matcher = self._start()
        at, n = self._at, 0
        while n < len(at) and n < len(path) and at[n] == path[n]:
            n += 1
        if n < len(at):
            self._matcher.rollback(len(at) - n)
            del at[n:]
        for token in path[n:]:
            allowed = self._allowed(tuple(at))
            if allowed is None or token not in allowed:
                return False
            self._matcher.consume(token)
            at.append(token)
        return True

    def _look(self) -> Allowed:
        assert self._matcher  # noqa: S101 - for the type checker: `_go` made it
        words = np.empty_like(self._usable)
        self._matcher.mask(words)
        words &= self._usable
        last = self._last
        if last is not None and np.array_equal(words, last.words):  # as within a string
            return last
        self._last = Allowed(words, self._n_vocab)
        if not self._last.n:
            raise EdgespecError(
                "no token of the model may follow here: the grammar has a dead end, "
                "or the logit bias forbids what it allows",
                field=self._name,
            )
        return self._last

    def _make_room(self, n_rows: int) -> None:
        n_more = n_rows - len(self._rows)
        if n_more > 0:
            more = np.empty((n_more, self._n_vocab), np.float32)
            self._rows = np.concatenate([self._rows, more])
            self._written += [None] * n_more


# ---- llama.cpp's GBNF, put so that llguidance's converter to Lark reads it as llama.cpp does ----


MOST_RULES = 3_000
"""Two seconds of the converter, which looks at all rules for each that it finds to be one of characters."""

_PART = re.compile(
    r'(?P<string>"(?:\\.?|[^"\\])*+(?:"|\Z))|(?P<set>\[(?:\\.?|[^\]\\])*+(?:\]|\Z))'
    r"|(?P<comment>#[^\n]*)|(?P<name>[a-zA-Z0-9_-]+)|\.",
    re.DOTALL,
)
_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_RULE = re.compile(r"^[ \t]*([a-zA-Z0-9_-]+)[ \t]*::=", re.MULTILINE)
_ANY = "[\\x00-\U0010ffff]"
_SET_OPERATORS = {"&&": r"&\x26", "~~": r"~\x7E", "--": r"-\x2D"}  # which a regular expression knows


def to_lark(text: str) -> str:
    """Return the Lark grammar of `text`; its rule "root" becomes "start".

    Raises UsageError, without the name of a file, for what is no GBNF.
    """
    plain = _PART.sub(lambda part: "" if part["comment"] else '""' if part["string"] else part[0], text)
    rules = Counter(_RULE.findall(plain))
    if len(rules) > MOST_RULES:
        raise UsageError(f"has {len(rules):,} rules; at most {MOST_RULES:,} are taken")
    twice = [name for name, n in rules.items() if n > 1]
    if twice:
        raise UsageError(f"the rule {twice[0]} is defined twice")
    try:
        return gbnf_to_lark(_PART.sub(_put, text))
    except RecursionError:
        raise UsageError("the grammar is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the converter raises plain exceptions
        raise UsageError(" ".join(str(error).split())) from None


def _put(part: re.Match[str]) -> str:
    found = part[0]
    if part["string"]:
        return _CODE.sub(_character, found)
    if part["set"]:
        found = _CODE.sub(_character, found)
        for operator, escaped in _SET_OPERATORS.items():
            found = found.replace(operator, escaped)
        return found
    if found == "start":
        return "start-rule"
    return _ANY if found == "." else found


def _character(code: re.Match[str]) -> str:
    number = int(code[1] or code[2], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise UsageError(f"{code[0]} is no character")
    return f"\\x{number:02X}" if number < 0x80 else chr(number)


# ---- source ----


MOST_GRAMMAR, MOST_SCHEMA = 1 << 18, 1 << 20
"""Longest texts, in characters."""

_STACK = 256 << 20  # bytes, of which those are used that are needed: the longest texts need a quarter
_SHOWN = 160  # characters of the library's messages
_COUNTED = re.compile(
    r"minProperties \(\d+\) is greater than number of properties \(\d+\)"
)  # less the required
_LATER = "no tokenizer"  # begins its remark on tokens named by number, which a model is needed to check

_GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++\s*+::=", re.MULTILINE)
_stack_size = threading.Lock()
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as llguidance compiles it. The constructors below raise UsageError for what is none."""

    compiled: str
    name: str
    """The name that errors use."""
    warnings: tuple[str, ...] = ()
    """Parts of it that are enforced only in part, or not at all."""

    @classmethod
    def gbnf(cls, text: str, name: str) -> GrammarSource:
        """Read llama.cpp's GBNF; the text must match the rule "root"."""
        _check_length(text, MOST_GRAMMAR, name)
        return cls.lark(_named(name, lambda: to_lark(text)), name, most=2 * MOST_GRAMMAR)

    @classmethod
    def lark(cls, text: str, name: str, *, most: int = MOST_GRAMMAR) -> GrammarSource:
        """Read Lark in llguidance's dialect; the text must match the rule "start"."""
        _check_length(text, most, name)
        return _checked(LLMatcher.grammar_from_lark(text), name)

    @classmethod
    def any(cls, text: str, name: str) -> GrammarSource:
        """Read GBNF, whose rules are told by "::=", or else Lark."""
        return cls.gbnf(text, name) if _GBNF_RULE.search(text) else cls.lark(text, name)

    @classmethod
    def regex(cls, pattern: str, name: str) -> GrammarSource:
        """Read a regular expression, which the whole text must match."""
        _check_length(pattern, MOST_GRAMMAR, name)
        return _checked(LLMatcher.grammar_from_regex(pattern), name)

    @classmethod
    def choice(cls, texts: Sequence[str], name: str) -> GrammarSource:
        """Take the texts of which one is to be written."""
        if not texts or not all(texts):
            raise UsageError("needs at least one text, and none that is empty", field=name)
        return cls.lark("start: " + " | ".join(json.dumps(text) for text in texts), name)

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any], name: str, *, strict: bool = False
    ) -> GrammarSource:
        """Read a JSON schema; `warnings` name what is not enforced, which with `strict` is an error."""
        given, unenforced = _named(name, lambda: read_schema(schema))
        made = _named(name, lambda: compiled(given))
        _check_length(made, MOST_SCHEMA, name)
        found = _checked(made, name)
        more = [one for message in found.warnings for one in explained(message, given, unenforced)]
        warnings = (*unenforced, *dict.fromkeys(more))
        if strict and warnings:
            raise UsageError(f"cannot be enforced: {'; '.join(warnings)}", field=name)
        return replace(found, warnings=warnings)

    def inside(self, lark: str) -> GrammarSource:
        """Return the grammar of `lark`, in which @answer stands for this one. Raises UsageError."""
        try:
            own = json.loads(self.compiled)["grammars"][0]
        except ValueError:
            own = {"lark_grammar": self.compiled}
        both = json.dumps({"grammars": [{"lark_grammar": lark}, own | {"name": "answer"}]})
        _check_length(both, 2 * MOST_SCHEMA, self.name)
        return _checked(both, self.name)


def on_large_stack(function: Callable[[], Found]) -> Found:
    """Call `function` in a thread with a stack of 256 MiB."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((True, function()))
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.extend((False, error))

    with _stack_size:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="edgespec-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    succeeded, found = outcome
    if not succeeded:
        raise found
    return found  # type: ignore[no-any-return]


def reason(message: str) -> str:
    """Return the library's `message` as one short line."""
    lines = message.partition("\n   1 |")[0].partition("<non-verbose/>")[0].split()  # without the grammar
    text = _COUNTED.sub("fewer properties are allowed than minProperties asks for", " ".join(lines))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _check_length(text: str, most: int, name: str) -> None:
    if len(text) > most:
        raise UsageError(f"has {len(text):,} characters; at most {most:,} are taken", field=name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"is not valid Unicode at character {error.start}", field=name) from None


def _named(name: str, read: Callable[[], Found]) -> Found:
    try:
        return read()
    except UsageError as error:
        raise UsageError(str(error), field=name) from None


def _checked(made: str, name: str) -> GrammarSource:
    is_error, messages = on_large_stack(lambda: LLMatcher.validate_grammar_with_warnings(made))
    if is_error:
        raise UsageError(reason(messages[0]), field=name)
    told = dict.fromkeys(reason(one) for one in messages if not one.startswith(_LATER))
    return GrammarSource(made, name, tuple(told))


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
        cls,
        model: GrammarModel,
        schema: str | Mapping[str, Any],
        *,
        name: str = "json_schema",
        strict: bool = False,
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
