"""Text that must match a grammar or a JSON schema (docs/structured.md).

    GrammarSource    what a user wrote, read and checked before any model is loaded
    Grammar          the same over a model's vocabulary, run by llguidance
    Constraint       applied to one generation (constraint.py)

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

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from edgespec.decoding.constraint import Constraint, Words
from edgespec.decoding.json_schemas import compiled, explained, read_schema
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import SessionModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.closing import Closing

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

    Raises UsageError, without the name of a file, for invalid GBNF.
    """
    plain = _PART.sub(lambda part: "" if part["comment"] else '""' if part["string"] else part[0], text)
    rules = Counter(_RULE.findall(plain))
    if len(rules) > MOST_RULES:
        raise UsageError(f"has {len(rules):,} rules; at most {MOST_RULES:,} are taken")
    twice = [name for name, n in rules.items() if n > 1]
    if twice:
        raise UsageError(f"the rule {twice[0]} is defined twice")
    try:
        return gbnf_to_lark(_PART.sub(_escaped, text))
    except RecursionError:
        raise UsageError("the grammar is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the converter raises plain exceptions
        raise UsageError(" ".join(str(error).split())) from None


def _escaped(part: re.Match[str]) -> str:
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
    """A grammar as llguidance compiles it. The constructors below raise UsageError for an invalid one."""

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
        """Read GBNF, if its rules have "::=", or else Lark."""
        return cls.gbnf(text, name) if _GBNF_RULE.search(text) else cls.lark(text, name)

    @classmethod
    def regex(cls, pattern: str, name: str) -> GrammarSource:
        """Read a regular expression, which the whole text must match."""
        _check_length(pattern, MOST_GRAMMAR, name)
        return _checked(LLMatcher.grammar_from_regex(pattern), name)

    @classmethod
    def choice(cls, texts: Sequence[str], name: str) -> GrammarSource:
        """Read a list of texts; the answer is one of them."""
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


class GrammarModel(SessionModel, Protocol):
    """The model whose tokens a grammar allows or forbids."""

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
        """The objects that are closed before it."""


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
        """Use a source that was read, or GBNF text, whose rule "root" the text must match.

        The model's vocabulary is prepared in another thread. Raises UsageError, whose field is `name`, for
        an invalid grammar.
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

        Parts that cannot be enforced are named in `warnings`; with `strict` they are a UsageError.
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
        """Return the grammar whose texts are exactly `texts`. Raises UsageError."""
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
        """Return a position at its beginning. Raises UsageError for an invalid grammar."""
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
    """llguidance's matcher as a `Matcher`; its failures become errors."""

    def __init__(self, matcher: LLMatcher, name: str) -> None:
        """Own `matcher`; `name`: of its grammar, for errors."""
        self._matcher, self._name = matcher, name

    def mask(self, out: Words) -> None:
        """Write a bit for each token: whether it may come next."""
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self._check()

    def consume(self, token: int) -> None:
        """Advance by `token`, which must be allowed."""
        self._matcher.consume_token(token)
        self._check()

    def rollback(self, n: int) -> None:
        """Undo the last `n` tokens."""
        self._matcher.rollback(n)
        self._check()

    def forced(self) -> list[int]:
        """Return the tokens that must follow."""
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        """Raise EdgespecError if the library has given up: a dead end, or a grammar beyond its limits."""
        if self._matcher.is_error():
            raise EdgespecError(
                f"no text can follow here: {reason(self._matcher.get_error())}", field=self._name
            )
